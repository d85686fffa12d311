"""Rows with videos: where their content is, their places, the tokens of a prompt, and bad input."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_tokenizers import marked_folder
from PIL import Image
from videos import av, frames_of, video, video_folder
from vision import IMAGE, VIDEO, encoded, image_tokenizer, png

from verl.config.schema import DataConfig
from verl.data.preference import load_pairs
from verl.data.source import load_conversations, load_tasks
from verl.driver.task_media import LostImage, _media
from verl.errors import Refused
from verl.models.clips import unpacked
from verl.models.pictures import Pictures
from verl.models.video_files import decoded_frames, video_facts
from verl.transfer_queue.media import MemoryMedia

FRAMES = frames_of(8)
FILE = video(FRAMES)
"""Two seconds of 12 x 8 pixels: four frames are read, two patches in time, of 2 x 3 tokens each."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: video_folder(root / kind, kind) for kind in ("qwen2_5_vl", "qwen3_vl")}


@pytest.fixture
def load(folders: dict[str, Path], tmp_path: Path) -> Any:
    (tmp_path / "a.mkv").write_bytes(FILE)
    for k, frame in enumerate(FRAMES[:3]):
        (tmp_path / f"{k}.png").write_bytes(encoded(Image.fromarray(frame)))
    tokenizer = image_tokenizer()

    def read(*rows: dict[str, Any], folder: Path | None = None, **keys: Any) -> Any:
        file = tmp_path / "rows.parquet"
        columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
        pq.write_table(pa.table(columns), file)
        cfg = DataConfig(**{"cache_dir": str(tmp_path / "cache"), "max_prompt_tokens": 96, **keys})
        return load_tasks([str(file)], tokenizer, cfg, model=folder or folders["qwen2_5_vl"])

    return read


def row(prompt: Any, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": prompt}], "ground_truth": "4", **columns}


def shown(task: Any) -> str:
    """Return the prompt, with v and i for each token of a video and of an image."""
    names = {IMAGE: "i", VIDEO: "v"}
    return "".join(names.get(i) or image_tokenizer().decode([i]) for i in task.prompt_ids.tolist())


@pytest.mark.parametrize(
    "item",
    ["a.mkv", FILE, {"bytes": FILE, "path": None}, "data:video/mp4;base64," + base64.b64encode(FILE).decode()],
    ids=["path", "bytes", "datasets", "data URL"],
)
def test_a_video_is_read_from_each_form_of_its_content(item: Any, load: Any) -> None:
    for table in (load(row("a<video>b", videos=[item])), load(row("a<video>b", videos=[item]))):
        (task,) = table
        assert shown(task) == "<|user|>a<|vision_start|>" + "v" * 12 + "<|vision_end|>b<|end|><|assistant|>"
        (seen,) = task.images
        assert (seen.start, seen.tokens) == (3, 12) and task.row["videos"] == [seen.path]
        assert Path(seen.path).read_bytes() == FILE and task.extra_info == {"videos": [seen.path]}
    assert table.report.from_cache


def test_images_and_videos_have_the_places_that_the_text_and_parts_give_them(load: Any) -> None:
    both = {"images": ["0.png"], "videos": ["a.mkv"]}
    parts = [{"type": "video"}, {"type": "text", "text": "x"}, {"type": "image"}]
    inline = [{"type": "video", "video": "a.mkv"}, {"type": "text", "text": "y"}]
    i, v = (f"<|vision_start|>{k * n}<|vision_end|>" for k, n in (("i", 6), ("v", 12)))
    cases = [
        (row("<video>x<image>", **both), f"{v}x{i}"),
        (row("x<image><video>", **both), f"x{i}{v}"),
        (row("x", **both), f"{i}{v}x"),
        (row("x", video="a.mkv"), f"{v}x"),
        (row(parts, **both), f"{v}x{i}"),
        (row(inline), f"{v}y"),
        (row("is <|video_pad|> or <video> a video?"), "is <|video_pad|> or <video> a video?"),
    ]
    for given, expected in cases:
        (task,) = load(given)
        assert shown(task) == f"<|user|>{expected}<|end|><|assistant|>"
        places = {seen.start: bool(seen.head) for seen in task.images}
        assert places == {k: task.prompt_ids[k] == VIDEO for k in places}
        assert len(task.images) == expected.count("<|vision_start|>")
    assert VIDEO not in task.prompt_ids


def test_the_times_of_frames_are_text_for_qwen3(load: Any, folders: dict[str, Path]) -> None:
    (task,) = load(row("<video>x", videos=["a.mkv"]), folder=folders["qwen3_vl"])
    frame = "<|vision_start|>vvvvvv<|vision_end|>"
    inner = f"<0.2 seconds>{frame}<1.5 seconds>{frame}"  # frames 0, 2, 5 and 7 of 4 in a second
    head, _ = unpacked(task.images[0].head)
    assert head.frames == (0, 2, 5, 7) and head.clip.gaps == (15,)
    assert shown(task) == f"<|user|><|vision_start|>{inner}<|vision_end|>x<|end|><|assistant|>"
    assert task.images[0].tokens == 6 + 15 + 6
    assert task.prompt_ids[task.images[0].start - 1] != VIDEO == task.prompt_ids[task.images[0].start]


def test_a_list_of_images_is_a_video(load: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    names = ["0.png", "1.png", "2.png"]
    (task,) = load(row("<video>", videos=[names]))
    (seen,) = task.images
    assert seen.tokens == 12 and [Path(path).name for path, _, _ in seen.frames] == names
    assert unpacked(seen.head)[0].clip.step == 4.0, "two frames a second, two of them in a patch, four positions"
    slow = [{"type": "video", "video": names, "sample_fps": 0.5}]
    (other,) = load(row(slow))
    assert unpacked(other.images[0].head)[0].clip.step == 16.0
    store = MemoryMedia()
    names_of = [_media(store, one.images, "me", _never())[0].reference for one in (task, other)]
    pictures = Pictures(folders["qwen2_5_vl"], store).of(names_of)
    assert len(pictures) == 2, "another rate is another video"
    first, second = (pictures[name] for name in names_of)
    assert (first.patches == second.patches).all() and first.clip != second.clip
    table = load(row("<video>", videos=[names]))
    assert table.report.from_cache
    (tmp_path / "2.png").write_bytes(png(12, 8, 9))
    assert not load(row("<video>", videos=[names])).report.from_cache, "a frame in the middle was changed"
    with pytest.raises(LostImage, match="2.png: the file was changed after the rows were read"):
        _media(store, task.images, "me", _never())


def _never() -> Any:
    import threading

    return threading.Event()


def test_tokens_of_videos_count_in_the_filter(load: Any) -> None:
    rows = [row("<video>a", videos=["a.mkv"]), row("a")]
    assert len(load(*rows, max_prompt_tokens=17)) == 1 and len(load(*rows, max_prompt_tokens=18)) == 2


def turned(content: bytes) -> bytes:
    """Return an MP4 file with the mark of a telephone that was held upright: a quarter turn clockwise."""
    whole, zero, one = content.index(b"tkhd"), bytes(4), (1 << 16).to_bytes(4, "big")
    start = content.index(one + zero * 3 + one, whole)
    matrix = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    return content[:start] + b"".join(x.to_bytes(4, "big", signed=True) for x in matrix) + content[start + 36 :]


def test_a_turned_video_is_upright() -> None:
    frames = np.zeros((4, 32, 48, 3), np.uint8)
    frames[:, :8, :8] = 255  # a white corner, above at the left
    upright = turned(video(frames, 4, "libx264", "mp4"))
    assert video_facts(io.BytesIO(upright), "x") == (4, 4.0, 48, 32)
    (frame,) = decoded_frames(upright, [2], "x")
    assert frame.shape == (48, 32, 3) and frame[:4, -4:].min() > 200 > 50 > frame[:4, :4].max()


def sound() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


MP4 = video(frames_of(8, 32, 32), 4, "libx264", "mp4")
UNEVEN = video(frames_of(8, 32, 32), 10, "libx264", "mp4", times_ms=[0, 100, 200, 900, 1000, 1100, 1200, 1300])
BAD: list[tuple[dict[str, Any], str]] = [
    (row("<video>", videos=[video(FRAMES[:1])]), r"video 1 \(.*\): a video of one frame; give it as an image"),
    (row("<video>", videos=[b"no video"]), "8 bytes are no video that can be read: Invalid data"),
    (row("<video>", videos=[b"#EXTM3U\n#EXTINF:5,\nfile:///etc/passwd\n"]), "no video that can be read"),
    (row("<video>", videos=[MP4[: len(MP4) // 2]]), "are no video that can be read|a damaged video"),
    (
        row("<video>", videos=[FILE[: len(FILE) // 2]]),
        "a damaged video: its header announces 2.00 s, and 0.75 s are in the file",
    ),
    (row("<video>", videos=[sound()]), "no video in the file, only audio"),
    (row("<video>", videos=[UNEVEN]), "frames of unequal lengths .frame 3 is at 0.90 s.*constant rate .ffmpeg -r"),
    (row("<video>", videos=[video(frames_of(2, 604, 2))]), "604 x 2 pixels, and no side may be more than 200 times"),
    (row("<video>", videos=["gone.mp4"]), "video 1: no file .*gone.mp4"),
    (row("<video>", videos=["https://x.org/a.mp4"]), "media are downloaded from no host. Fix: download the files"),
    (row("<video><video>", videos=["a.mkv"]), "have places for 2 videos, and there are 1 in the column 'videos'"),
    (row("<video>", videos=[["0.png"]]), "video 1: a video of 1 frames; give one as an image"),
    (row("<video>", videos=[["0.png", "gone.png"]]), "video 1: frame 2: no file .*gone.png"),
    (row("<video>", videos=[["0.png"] * 13]), "13 frames to read, and 2 to 12 .max_frames. can be; cut the video"),
    (row([{"type": "video", "video": "a.mkv", "fps": 1}]), "a part of type 'video' has fps, which is not read"),
    (row([{"type": "video", "video": "a.mkv", "sample_fps": 1}]), "sample_fps is the rate of a list of frames"),
    (row([{"type": "video", "video": ["0.png"] * 2, "sample_fps": 0}]), "sample_fps=0. Fix: a number"),
    (row("<video>", videos=["a.mkv"], video="a.mkv"), "videos in the columns 'videos' and 'video'"),
]


@pytest.mark.parametrize("given, line", BAD, ids=[line[:30] for _, line in BAD])
def test_bad_videos_are_refused_in_one_line_with_file_and_row(given: dict[str, Any], line: str, load: Any) -> None:
    with pytest.raises(Refused, match=line) as refused:
        load(given)
    assert re.match(r".*rows.parquet: row 1: ", str(refused.value)) and "\n" not in str(refused.value)


def test_a_file_that_is_damaged_behind_its_first_frame_is_found_when_it_is_decoded(folders: dict[str, Path]) -> None:
    store, damaged = MemoryMedia(), bytearray(FILE)
    facts = video_facts(io.BytesIO(FILE), "x")
    assert facts.frames == 8
    head = json.dumps({"frames": [0, 30], "grid": [1, 4, 6], "clip": {"step": 1.0, "gaps": []}, "sizes": []})
    name = store.put(b"verl clip 1 " + head.encode() + b"\n" + bytes(damaged), "me")
    with pytest.raises(Refused, match=f"video {name}: a damaged video: frame 30 cannot be decoded"):
        Pictures(folders["qwen2_5_vl"], store).of([name])


def test_frames_that_a_decoder_drops_do_not_move_those_behind_them() -> None:
    """The packets of a key frame are cut: that at the start, and that of the second group."""
    for cut in (0, 8):
        out = io.BytesIO()
        with av.open(out, "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=25)
            stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 64, 64, "yuv420p", 8
            pixels = [np.full((64, 64, 3), 10 * k, np.uint8) for k in range(24)]
            packets = [p for one in pixels for p in stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24"))]
            for k, packet in enumerate([*packets, *stream.encode()]):
                if k != cut:
                    container.mux(packet)
        if cut == 0:
            with pytest.raises(Refused, match="x: a damaged video, .*its first frames are not at their times"):
                video_facts(io.BytesIO(out.getvalue()), "x")
            last, _ = decoded_frames(out.getvalue(), [20, 20], "x")
            assert abs(last.mean() - 210) < 3
        with pytest.raises(Refused, match="x: a damaged video: frame [0-9] cannot be decoded"):
            list(decoded_frames(out.getvalue(), range(23), "x"))


def test_families_without_videos_name_those_with_them(load: Any, tmp_path: Path) -> None:
    other = marked_folder("smolvlm", tmp_path / "other")
    line = "Videos are read for qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, not for a smolvlm"
    for given in (row("<video>", videos=["a.mkv"]), row([{"type": "video", "video": "a.mkv"}])):
        with pytest.raises(Refused, match=line):
            load(given, folder=other)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_of_supervised_runs_have_the_tokens_of_prompts(
    kind: str, load: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    (task,) = load(row("<video><image>?", videos=["a.mkv"], images=["0.png"]), folder=folders[kind])
    prompt = [{"role": "user", "content": "<video><image>?"}]
    seen = {"videos": ["a.mkv"], "images": ["0.png"]}
    given = {"talks": {"messages": [*prompt, {"role": "assistant", "content": "yes"}], **seen}}
    given["pairs"] = {"prompt": prompt, "chosen": "yes", "rejected": "no", **seen}
    for name, columns in given.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(columns))
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"))
    rest: tuple[Any, ...] = (image_tokenizer(), cfg)
    (talk,) = load_conversations([str(tmp_path / "talks.jsonl")], *rest, model=folders[kind])
    pair = load_pairs([str(tmp_path / "pairs.jsonl")], *rest, model=folders[kind])[0]
    for rendered in (talk, pair.chosen, pair.rejected):
        assert rendered.ids[: len(task.prompt_ids)].tolist() == task.prompt_ids.tolist()
        assert rendered.images == task.images and not rendered.mask[: len(task.prompt_ids)].any()
        assert rendered.mask[len(task.prompt_ids) :].all()
