"""Thumbnails of a run's report: what the recorded rows saw, small, and in words where there are no pixels."""

from __future__ import annotations

import base64
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_track_report import data_of, make_run, sample
from vision import png

from verl.models.clips import Clip, ClipHead
from verl.models.sounds import SoundHead
from verl.report import thumbnails
from verl.report.page import write_report
from verl.report.thumbnails import Thumbnails
from verl.track.packed import packed_segments, packed_value
from verl.track.samples import MEDIA_FOLDER, write_samples
from verl.transfer_queue.media import FolderMedia
from verl.types import Medium, Sample, Segment

FRAMES = [png(40, 20, seed) for seed in (1, 2)]
CLIP = ClipHead((0, 1), (1, 2, 2), Clip(), tuple(map(len, FRAMES))).packed() + b"".join(FRAMES)
CONTENT = {
    "picture": png(400, 300, 0),
    "plot": png(30, 60, 3),
    "clip": CLIP,
    "sound": SoundHead(16000).packed() + b"RIFF",
    "broken": png(40, 40, 4)[:-30],
}


def run_with(folder: Path, prompt: list[str], later: list[str]) -> Path:
    """Write a run of which the last step has one group of two rows with these media."""
    store = FolderMedia(make_run(folder, steps=1) / MEDIA_FOLDER)
    named = {name: store.put(content, "step 1") for name, content in CONTENT.items()} | {"lost": "0" * 32}

    def row(index: int) -> Any:
        media = [tuple(Medium(named[name], i, 1) for i, name in enumerate(names)) for names in (prompt, later)]
        found = sample(1, 0, index, prompt_text="<|image_pad|>" * 25 + "what?")
        segments = (
            Segment(ids=found.prompt_ids, source="prompt", media=media[0]),
            Segment(ids=found.response_ids, source="env", media=media[1] if index else ()),
        )
        one = Sample(sample_id=found.sample_id, trajectory_id="t", group_id="g", purpose="train", segments=segments)
        return replace(found, segments=packed_segments(one))

    write_samples(folder, 1, [row(0), row(1)])
    return folder


def size_of(entry: dict[str, Any]) -> tuple[int, int]:
    head, _, text = entry["image"].partition(",")
    assert head == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(text))).size


def group_of(folder: Path, notes: list[str] | None = None) -> dict[str, Any]:
    page = write_report(folder, (notes if notes is not None else []).append).read_text()
    (file,) = (f for f in data_of(page)["samples"]["files"] if f["kind"] == "train")
    (group,) = file["groups"]
    return group


def test_rows_show_the_media_of_their_prompt_and_of_later_turns(tmp_path: Path) -> None:
    group = group_of(run_with(tmp_path, ["picture", "clip", "sound"], ["plot"]))
    assert [entry["text"] for entry in group["media"]] == [
        "400 x 300, 1 token",
        "video of 2 frames, 1 token",
        "sound, 1 token",
    ]
    assert [size_of(entry) for entry in group["media"][:2]] == [(144, 108), (40, 20)]
    plots = [row.get("later_media", []) for row in group["rows"]]
    assert [[size_of(entry) for entry in one] for one in plots] in ([[], [(30, 60)]], [[(30, 60)], []])
    assert group["prompt"] == "<|image_pad|> x 25what?" and not any("media" in row for row in group["rows"])


def test_what_cannot_be_shown_is_words_and_many_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "MOST", 2)
    notes: list[str] = []
    run_with(tmp_path, ["broken", "lost", "plot", "plot"], ["plot"])
    group = group_of(tmp_path, notes)
    assert [entry["text"] for entry in group["media"]] == ["unreadable, 1 token", "not recorded, 1 token", "and 2 more"]
    assert len(notes) == 1 and "a damaged PNG image" in notes[0], "once for both rows"
    (plot,) = (p for p in (tmp_path / MEDIA_FOLDER / "content").iterdir() if p.read_bytes() == CONTENT["plot"])
    plot.write_bytes(CONTENT["plot"] + b"0")
    later = [entry["text"] for row in group_of(tmp_path, notes)["rows"] for entry in row.get("later_media", ())]
    assert later == ["unreadable, 1 token"] and any("is damaged" in note for note in notes)


def test_a_damaged_row_or_reference_is_a_note(tmp_path: Path) -> None:
    """The report has all other rows, and the text of this one."""
    good = packed_segments(Sample(sample_id="s", trajectory_id="t", group_id="g", purpose="train", segments=()))
    for damaged in (b"", good[:-1], good, packed_of([Medium("../x", 0, 1)]).replace(b"<i8", b"i,(")):
        notes: list[str] = []
        seen = Thumbnails(tmp_path, notes.append).of_row(damaged, "step 3, sample s")
        assert seen == (([{"text": "unreadable"}] if damaged else []), [])
        assert len(notes) == bool(damaged) and all("step 3, sample s: its segments are damaged" in n for n in notes)
    notes.clear()
    shown, _ = Thumbnails(tmp_path, notes.append).of_row(packed_of([Medium("../x", 0, 1)]), "s")
    assert shown == [{"text": "unreadable, 1 token"}] and "'../x' is no reference of media" in notes[0]


def packed_of(media: list[Medium]) -> bytes:
    segment = Segment(ids=np.zeros(3, np.int64), source="prompt", media=tuple(media))
    return packed_segments(Sample(sample_id="s", trajectory_id="t", group_id="g", purpose="train", segments=(segment,)))


def test_the_prompt_of_a_row_of_text_is_shown_as_it_is(tmp_path: Path) -> None:
    write_samples(make_run(tmp_path, steps=1), 1, [sample(1, 0, 0, prompt_text="a<br><br><br><br>b")])
    assert group_of(tmp_path)["prompt"] == "a<br><br><br><br>b"


def test_a_value_that_no_record_can_have_is_named() -> None:
    with pytest.raises(NotImplementedError, match="neither a checkpoint nor the record of samples can have a set"):
        packed_value({1})


def test_a_browser_shows_them(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    if (path := next(filter(None, map(shutil.which, names)), None)) is None:
        pytest.skip("no Chromium here (make browser installs one)")
    report = write_report(run_with(tmp_path, ["picture", "sound"], ["plot"]))
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"]).new_page()
        page.goto(report.as_uri())
        shown = set()
        for line in page.locator(".sample-line").all():
            line.click()
            widths = page.eval_on_selector_all(".media-strip img", "all => all.map((i) => i.naturalWidth)")
            shown.add(tuple(widths))
        assert shown == {(144,), (144, 30)} and "sound, 1 token" in page.locator(".media-strip").first.inner_text()
