"""Rows with images: where their content is, the places of images in messages, the tokens of a prompt, bad input."""

from __future__ import annotations

import base64
import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from vision import END, IMAGE, START, chat_folder, encoded, image_tokenizer, png

from verl.config.schema import DataConfig
from verl.data import images
from verl.data.source import TaskTable, load_tasks
from verl.errors import Refused

CAT, DOG = png(12, 8, 1), png(8, 8, 2)
TOKENS = {"cat": 6, "dog": 4}
"""The tokens of each image: four patches of 2 x 2 pixels are one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("vl"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return image_tokenizer()


@pytest.fixture
def load(model: Path, tokenizer: Any, tmp_path: Path) -> Any:
    (tmp_path / "cat.png").write_bytes(CAT)
    (tmp_path / "dog.png").write_bytes(DOG)

    def read(*rows: dict[str, Any], folder: Path | None = model, **keys: Any) -> TaskTable:
        file = tmp_path / "rows.parquet"
        columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
        pq.write_table(pa.table(columns), file)
        cfg = DataConfig(**{"cache_dir": str(tmp_path / "cache"), "max_prompt_tokens": 64, **keys})
        return load_tasks([str(file)], tokenizer, cfg, model=folder)

    return read


def row(prompt: Any, **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}] if not isinstance(prompt, list) else prompt
    return {"prompt": messages, "ground_truth": "4", **columns}


def shown(task: Any, tokenizer: Any) -> str:
    """Return the prompt with the number of tokens of each image in its place, as its `images` say it."""
    out, at = "", 0
    for image in task.images:
        assert set(task.prompt_ids[image.start : image.start + image.tokens].tolist()) == {IMAGE}
        assert task.prompt_ids[image.start - 1] == START and task.prompt_ids[image.start + image.tokens] == END
        out += tokenizer.decode(task.prompt_ids[at : image.start - 1].tolist()) + f"[{image.tokens}]"
        at = image.start + image.tokens + 1
    assert IMAGE not in task.prompt_ids[at:]
    return out + tokenizer.decode(task.prompt_ids[at:].tolist())


def contents(task: Any) -> list[bytes]:
    return [Path(image.path).read_bytes() for image in task.images]


@pytest.mark.parametrize(
    "item",
    [
        CAT,
        {"bytes": CAT, "path": None},
        {"bytes": CAT, "path": "gone.png"},
        {"bytes": None, "path": "cat.png"},
        "cat.png",
        "file://cat.png",
        "data:image/png;base64," + base64.b64encode(CAT).decode(),
    ],
    ids=["bytes", "datasets", "both", "path in datasets", "path", "file URL", "data URL"],
)
def test_an_image_is_read_from_each_form_of_its_content(item: Any, load: Any, tokenizer: Any) -> None:
    for table in (load(row("<image>what?", images=[item])), load(row("<image>what?", images=[item]))):
        assert contents(table[0]) == [CAT]
        assert shown(table[0], tokenizer) == "<|user|>[6]what?<|end|><|assistant|>"
        assert table[0].row["images"] == [table[0].images[0].path]
    assert table.report.from_cache


def test_images_have_the_places_that_marks_parts_and_trl_give_them(load: Any, tokenizer: Any) -> None:
    pair = ["cat.png", "dog.png"]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    inline = [{"type": "image", "image": "dog.png"}, {"type": "text", "text": "x"}]
    url = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(CAT).decode()}}]
    turns = [*row("<image>hi")["prompt"], {"role": "assistant", "content": "yes"}, *row("and <image>?")["prompt"]]
    cases = [
        (row("a<image>b<image>", images=pair), "<|user|>a[6]b[4]"),
        (row([{"role": "user", "content": parts}], images=pair), "<|user|>a[6]b[4]"),
        (row("both?", images=pair), "<|user|>[6][4]both?"),
        (row("one?", image="dog.png"), "<|user|>[4]one?"),
        (row([{"role": "user", "content": inline}]), "<|user|>[4]x"),
        (row([{"role": "user", "content": url}]), "<|user|>[6]"),
        (row(turns, images=pair), "<|user|>[6]hi<|end|><|assistant|>yes<|end|><|user|>and [4]?"),
    ]
    for given, expected in cases:
        task = load(given)[0]
        assert shown(task, tokenizer) == expected + "<|end|><|assistant|>"
        assert contents(task) == [CAT if image.tokens == 6 else DOG for image in task.images]


def test_rows_of_a_problem_with_its_answer_are_read_by_the_name_of_their_column(load: Any, tokenizer: Any) -> None:
    """The rows of EasyR1's data sets."""
    given = {"images": ["cat.png"], "problem": "<image>how many?", "answer": "4"}
    task = load(given, prompt_key="problem")[0]
    assert shown(task, tokenizer) == "<|user|>[6]how many?<|end|><|assistant|>" and task.ground_truth == "4"
    with pytest.raises(Refused, match=r"no prompt: .*\(columns: answer, images, problem\). Fix: data.prompt_key"):
        load(given)


def test_a_placeholder_that_a_user_types_is_text(load: Any, tokenizer: Any) -> None:
    typed = "is <|image_pad|> or <|vision_start|> or <image> an image?"
    (plain,) = load(row(typed.replace("<image>", "that")))
    assert plain.images == () and not {START, END, IMAGE} & set(plain.prompt_ids.tolist())
    assert tokenizer.decode(plain.prompt_ids.tolist()) == f"<|user|>{typed}<|end|><|assistant|>".replace(
        "<image>", "that"
    )
    (task,) = load(row("<|image_pad|><image><|image_pad|>", images=["cat.png"]))
    assert shown(task, tokenizer) == "<|user|><|image_pad|>[6]<|image_pad|><|end|><|assistant|>"
    assert (task.prompt_ids == IMAGE).sum() == 6
    (html,) = load(row("<image> in html?"))
    assert html.images == () and "<image> in html?" in tokenizer.decode(html.prompt_ids.tolist())


def test_the_tokens_of_images_count_in_the_filter_and_prompts_are_not_cut(load: Any, tokenizer: Any) -> None:
    rows = [row("<image>a", images=["cat.png"]), row("<image>aa", images=["dog.png"])]
    table = load(*rows, max_prompt_tokens=11)
    assert len(table) == 1 and table.report.rows_filtered == 1 and len(table[0].prompt_ids) == 11
    line = "row 1: the prompt has 13 tokens, data.max_prompt_tokens is 12, and prompts with images are not cut. Fix"
    for truncation in ("error", "left", "right", "middle"):
        cut = {"max_prompt_tokens": 12, "filter_overlong_prompts": False, "truncation": truncation}
        with pytest.raises(Refused, match=line):
            load(row("<image>aa", images=["cat.png"]), row("a"), **cut)
        if truncation != "error":
            text, seen = load(row("a" * 20), row("<image>a", images=["cat.png"]), **cut)
            assert len(text.prompt_ids) == 12 and "<|user|>[6]a<|end|>" in shown(seen, tokenizer)


def test_identical_images_in_other_folders_are_the_same_task(load: Any, tmp_path: Path) -> None:
    ids = [load(row("<image>", images=[CAT]), cache_dir=str(tmp_path / name))[0].task_id for name in ("a", "b")]
    assert ids[0] == ids[1] != load(row("<image>", images=[DOG]))[0].task_id


def test_rows_are_read_by_the_headers_of_their_images(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 files of 1 MB at most 64 KiB each are read, once, and no pixels; a table from the cache reads none."""
    big = CAT + bytes(1 << 20)
    for k in range(200):
        (tmp_path / f"{k}.png").write_bytes(big)
    read = list[int]()

    class Counted(io.FileIO):
        def readinto(self, into: Any) -> int | None:
            read[-1] += (found := super().readinto(into) or 0)
            return found

    def counting(path: Path, where: str) -> Any:
        read.append(0)
        return io.BufferedReader(Counted(path))

    monkeypatch.setattr(images, "opened_file", counting)
    monkeypatch.setattr(images, "decoded_image", lambda *given: pytest.fail("pixels are read"))
    rows = [row("<image>a", images=[f"{k}.png"]) for k in range(200)]
    table = load(*rows)
    assert len(table) == len(read) == 200 and 0 < min(read) <= max(read) <= 1 << 16
    assert all(image.num_bytes > 1 << 20 for image in table[7].images)
    assert load(*rows).report.from_cache and len(read) == 200


def test_a_file_that_changes_is_read_again(load: Any, tmp_path: Path) -> None:
    given = row("<image>", images=["cat.png"])
    load(given)
    assert load(given).report.from_cache
    (tmp_path / "cat.png").write_bytes(DOG)
    table = load(given)
    assert not table.report.from_cache and table[0].images[0].tokens == 4
    os.remove(tmp_path / "cat.png")
    with pytest.raises(Refused, match=r"rows.parquet.*: image 1: no file .*cat.png"):
        load(given)


BOMB = encoded(Image.new("1", (30_000, 30_000)))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8))
ANIMATED = encoded(NOISE, "GIF", save_all=True, append_images=[NOISE.rotate(90)])


@pytest.mark.parametrize(
    "given, line",
    [
        (row("<image>", images=[b"no image"]), r"image 1 \(.*\): 8 bytes are no image that can be read"),
        (row("<image>", images=[CAT[:-40]]), "a damaged PNG image"),
        (row("<image>", images=[BOMB]), "900000000 pixels"),
        (row("<image>", images=[ANIMATED]), "an image of 2 frames; take one of them"),
        (row("<image>", images=["gone.png"]), "image 1: no file .*gone.png"),
        (row("<image>", images=["http://x.org/cat.png"]), "images are not downloaded. Fix: download them"),
        (row("<image>", images=["data:image/png;base64,@"]), "a data URL that is not base64"),
        (row("<image><image>", images=["cat.png"]), "have places for 2 images, and there are 1 in the column 'images'"),
        (row("<image>", images=["cat.png", "dog.png"]), "places for 1 images, and there are 2 in the column"),
        (row("<image>", images=[]), "places for 1 images, and there are 0 in the column"),
        (row("<image>", images=["cat.png"], image="cat.png"), "images in the columns 'images' and 'image'"),
        (row("<video>", videos=["a.mp4"]), "video 1: no file .*a.mp4"),
        (row("<image>", image_path="cat.png"), "'image_path' holds 1 item"),
        (row([{"role": "user", "content": [{"type": "image", "min_pixels": 4}]}]), "min_pixels, which is not read"),
        (row([{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]), "a content part of type 'audio'"),
    ],
)
def test_bad_rows_are_refused_in_one_line_with_file_and_row(given: dict[str, Any], line: str, load: Any) -> None:
    with pytest.raises(Refused, match=line) as refused:
        load(*[row("text")] * isinstance(given["prompt"][0]["content"], str), given)
    assert re.match(r".*rows.parquet: row [12]: ", str(refused.value)) and "\n" not in str(refused.value)


def test_other_columns_keep_their_texts(load: Any) -> None:
    """The name that comes with the bytes of an image, or the lack of one, is no content."""
    for name in ("", "cat.png"):
        columns = {"images": [{"bytes": CAT, "path": name}], "file": "cat.png", "note": "", "extra_info": {"hint": ""}}
        (task,) = load(row("<image>what?", **columns))
        assert (task.row["file"], task.row["note"], task.row["extra_info"]["hint"]) == ("cat.png", "", "")


@pytest.mark.parametrize("column", [[], None])
def test_a_mark_whose_column_is_empty_is_refused(column: Any, load: Any) -> None:
    with pytest.raises(Refused, match="places for 1 images, and there are 0"):
        load(row("<image>a", images=column), row("b", images=["cat.png"]))


def test_images_in_other_modes_and_upright(load: Any, tokenizer: Any) -> None:
    turned = Image.new("RGB", (12, 8))
    turned.getexif()[0x0112] = 6
    files = [encoded(Image.new("CMYK", (12, 8)), "JPEG"), encoded(Image.new("RGBA", (12, 8)))]
    files.append(encoded(Image.new("RGB", (32, 4)), "JPEG"))
    assert [load(row("<image>", images=[file]))[0].images[0].tokens for file in files] == [6, 6, 8]
    upright = load(row("<image>", images=[encoded(turned, "JPEG", exif=turned.getexif())]))[0]
    assert upright.images[0].tokens == 6


def test_a_model_of_text_and_a_template_without_images_refuse_them(load: Any, model: Path, tokenizer: Any) -> None:
    with pytest.raises(Refused, match="'images' holds 1 item.*prompts are rendered as text only"):
        load(row("<image>", images=["cat.png"]), folder=None)
    real, tokenizer.chat_template = tokenizer.chat_template, tokenizer.chat_template.replace("<|image_pad|>", "")
    try:
        with pytest.raises(Refused, match="images, which this chat template drops or repeats: 0 placeholders for 1"):
            load(row("<image>", images=["cat.png"]))
    finally:
        tokenizer.chat_template = real
