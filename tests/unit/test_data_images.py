"""Rows with images: where their content is, the places of images in messages, the tokens of a prompt, bad input."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from vision import END, IMAGE, START, chat_folder, encoded, image_tokenizer, png, png_header

from verl.config.schema import DataConfig
from verl.config.tree import leaves
from verl.data import downloads, images, media_items, source
from verl.data.source import TaskTable, load_tasks
from verl.errors import Refused

CAT, DOG = png(12, 8, 1), png(8, 8, 2)
TOKENS = {"cat": 6, "dog": 4}
"""The tokens of each image: four patches of 2 x 2 pixels are one."""
SLOW_S = 0.05
"""The pause before a part of a slow answer."""


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
    (tmp_path / "empty.png").write_bytes(b"")

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


BOMB = png_header(30_000)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8))
ANIMATED = encoded(NOISE, "GIF", save_all=True, append_images=[NOISE.rotate(90)])


def empty_png(width: int, height: int) -> bytes:
    """Return a PNG of which the header has these sides."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return CAT[:8] + chunk + CAT[33:]


@pytest.mark.parametrize(
    "given, line",
    [
        (row("<image>", images=[b"no image"]), r"image 1 \(.*\): 8 bytes are no image that can be read"),
        (row("<image>", images=[CAT[:-40]]), "a damaged PNG image"),
        (row("<image>", images=[BOMB]), "900000000 pixels"),
        (row("<image>", images=[ANIMATED]), "an image of 2 frames; take one of them"),
        (row("<image>", images=["gone.png"]), "image 1: no file .*gone.png"),
        (row("<image>", images=["empty.png"]), r"image 1 \(.*\): 0 bytes are no image that can be read"),
        (row("<image>", images=[empty_png(0, 8)]), "bytes are no image that can be read"),
        (
            row("<image>", images=["http://x.org/cat.png"]),
            r"downloaded from no host. Fix: .*data.media_hosts=\[x.org\]",
        ),
        (row("<image>", images=["http://[x/cat.png"]), r"Invalid IPv6 URL. Fix: the URL, or a path"),
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


def test_an_image_in_a_system_turn_has_its_place_or_is_refused(load: Any, tokenizer: Any) -> None:
    system = {"role": "system", "content": [{"type": "image", "image": "dog.png"}, {"type": "text", "text": "a"}]}
    given = row([system, {"role": "user", "content": [{"type": "image", "image": "cat.png"}]}])
    with pytest.raises(Refused, match="row 1: .* system message, which this chat template has no place for"):
        load(given)
    real = tokenizer.chat_template
    tokenizer.chat_template = real.replace("{% for m in messages %}", "{% for m in messages %}<{{ m['role'] }}>", 1)
    try:
        (task,) = load(given)
        assert contents(task) == [DOG, CAT] and "[4]a" in (text := shown(task, tokenizer))
        assert text.startswith("<system>") and text.index("[4]") < text.index("<user>") < text.index("[6]")
    finally:
        tokenizer.chat_template = real


@contextlib.contextmanager
def served(answers: dict[str, list[tuple[int, dict[str, str], Any]]]) -> Iterator[tuple[str, list[str]]]:
    """Serve these answers by path, one after the other and the last one for ever; a list of parts is slow. Yield the
    address and the paths that were requested."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            left = answers[self.path]
            status, headers, content = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client reads no more
                for part in content if isinstance(content, list) else [content]:
                    time.sleep(SLOW_S * isinstance(content, list))
                    self.wfile.write(part)

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_image_at_an_allowed_host_is_downloaded_once(load: Any, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(downloads, "PAUSE_S", 0.0)
    short = (200, {"Content-Length": "900"}, CAT)
    answers = {"/cat": [(503, {}, b""), short, (200, {}, CAT)], "/dog": [(302, {"Location": "/dog2"}, b"")]}
    answers["/dog2"] = [(200, {}, DOG)]
    with served(answers) as (address, paths):
        parts = [{"type": "image_url", "image_url": {"url": f"{address}/dog"}}]
        for _ in range(2):
            (one,) = load(row("<image>a", images=[f"{address}/cat"]), media_hosts=["127.0.0.1"], num_workers=0)
            (two,) = load(row([{"role": "user", "content": parts}]), media_hosts=["127.0.0.1"], num_workers=0)
            assert contents(one) + contents(two) == [CAT, DOG]
            assert shown(one, tokenizer) == "<|user|>[6]a<|end|><|assistant|>"
        assert paths == ["/cat"] * 3 + ["/dog", "/dog2"]


def test_downloads_that_fail_are_one_line(load: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(downloads, "PAUSE_S", 0.0)
    monkeypatch.setattr(downloads, "MAX_BYTES", 1000)
    answers = {"/none": [(404, {}, b"")], "/large": [(200, {}, bytes(2000))], "/busy": [(503, {}, b"")]}
    answers |= {"/login": [(200, {}, b"<html>")], "/empty": [(200, {}, b"")]}
    answers["/many"] = [(200, {"Content-Length": "many"}, CAT)]
    answers["/away"] = [(302, {"Location": "http://localhost:1/cat.png"}, b"")]
    with served(answers) as (address, paths):
        for name, line in (
            ("/none", "cannot be downloaded: the server answers 404 Not Found"),
            ("/large", "more than 1000 bytes"),
            ("/busy", "the server answers 503"),
            ("/away", r"/away is redirected: http://localhost:1/cat.png: data.media_hosts=\[127.0.0.1\]: another host"),
            ("/login", r"image 1 \(http://127.0.0.1:\d+/login\): 6 bytes are no image"),
            ("/empty", r"image 1 \(http://127.0.0.1:\d+/empty\): 0 bytes are no image"),
            ("/many", "cannot be downloaded: the server answers Content-Length: many"),
        ):
            given = row("<image>", images=[address + name])
            with pytest.raises(Refused, match=line) as refused:
                load(given, media_hosts=["127.0.0.1"], num_workers=0)
            assert re.match(r".*rows.parquet: row 1: ", str(refused.value)) and "\n" not in str(refused.value)
        assert paths == ["/none", "/large", "/busy", "/busy", "/busy", "/away", "/login", "/empty", "/many"]
        answers |= {"/login": [(200, {}, CAT)], "/slow": [(200, {}, [b" "] * 100)]}
        (task,) = load(row("<image>", images=[address + "/login"]), media_hosts=["127.0.0.1"], num_workers=0)
        assert contents(task) == [CAT], "a wrong answer is not kept"
        assert downloads.TOTAL_S < source.WORKER_TIMEOUT_S
        monkeypatch.setattr(downloads, "TOTAL_S", 4 * SLOW_S)
        start = time.monotonic()
        with pytest.raises(Refused, match=r"127.0.0.1:\d+/slow is not downloaded after 0.2 s. Fix: a host"):
            load(row("<image>", images=[address + "/slow"]), media_hosts=["127.0.0.1"], num_workers=0)
        assert time.monotonic() - start < 60 * SLOW_S, "each part is soon enough for the timeout of a read"
    with pytest.raises(Refused, match="Connection refused"):
        load(row("<image>", images=[address + "/none"]), media_hosts=["127.0.0.1"], num_workers=0)
    for url, line in (
        ("http://a.org/cat", r"=\[127.0.0.1\]: another host. Fix: .* or data.media_hosts=\[127.0.0.1,a.org\]$"),
        ("http://127.0.0.1:99999/cat", "Port out of range"),
    ):
        with pytest.raises(Refused, match=line):
            load(row("<image>", images=[url]), media_hosts=["127.0.0.1"], num_workers=0)


def test_the_first_of_two_downloads_of_a_url_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the worker that was first have the time of its file."""
    kept: list[os.stat_result] = []

    def download(check: Any) -> Path:
        return downloads.downloaded(f"{address}/cat", ["127.0.0.1"], tmp_path, "row 1", check)

    with served({"/cat": [(200, {}, CAT)]}) as (address, paths):
        path = download(lambda stream, where: kept.append(download(lambda *_: None).stat()))
    assert len(paths) == 2, "each began before the other one ended"
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (kept[0].st_mtime_ns, kept[0].st_ino)
    assert [*path.parent.iterdir()] == [path], "no temporary file is left"

    def without_links(*given: Any) -> None:
        raise PermissionError("no hard links")

    monkeypatch.setattr(os, "link", without_links)
    (tmp_path / "coming").write_bytes(DOG)
    media_items.published(tmp_path / "coming", tmp_path / "dog")
    assert (tmp_path / "dog").read_bytes() == DOG and not (tmp_path / "coming").exists()


def test_content_that_two_workers_write_stays_as_the_first_one_left_it(tmp_path: Path, monkeypatch: Any) -> None:
    kept: list[int] = []

    def other_worker() -> Any:
        monkeypatch.undo()
        kept.append(media_items.written_once(CAT, tmp_path).stat().st_ino)
        return media_items.uuid.uuid4()

    monkeypatch.setattr(media_items.uuid, "uuid4", other_worker)
    assert [media_items.written_once(CAT, tmp_path).stat().st_ino] == kept


def test_a_url_may_have_characters_that_are_quoted(load: Any) -> None:
    quoted = "/katze%20gro%C3%9F?n=%C3%A4%20b&x=%2F"
    with served({quoted: [(200, {}, CAT)]}) as (address, paths):
        for name in ("/katze groß?n=ä b&x=%2F", quoted):
            (task,) = load(row("<image>", images=[address + name]), media_hosts=["127.0.0.1"], num_workers=0)
            assert contents(task) == [CAT]
        assert paths == [quoted] * 2


def test_another_allowed_host_is_the_same_table(load: Any) -> None:
    assert leaves()["data.media_hosts"].adjustable, "a resumed run may name more"
    one, two = (load(row("<image>a", images=["cat.png"]), media_hosts=hosts) for hosts in ([], ["a.org"]))
    assert one.key == two.key and two.report.from_cache
