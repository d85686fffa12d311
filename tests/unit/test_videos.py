"""Videos as models read them: frames, sizes, patches and times are those of the video processors of transformers."""

from __future__ import annotations

import enum
import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers.image_processing_backends as backends
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata
from videos import frames_of, video

from verl.errors import Refused
from verl.models.clips import CLIPS, Clip, is_clip, unpacked
from verl.models.pictures import video_picture
from verl.models.video_files import VideoFacts
from verl.models.videos import VideoReader, video_reader

CONFIG = SimpleNamespace(
    model_type="qwen2_5_vl",
    video_token_id=9,
    vision_start_token_id=7,
    vision_end_token_id=8,
    vision_config=SimpleNamespace(tokens_per_second=4),
)
PROCESSORS = {kind: "qwen2_vl" if kind in ("qwen2_vl", "qwen2_5_vl") else "qwen3_vl" for kind in CLIPS}
SHAPES = [(2, 10.0, 33, 57), (30, 10.0, 90, 120), (33, 25.0, 300, 150), (301, 29.97, 60, 80), (7, 12.0, 500, 20)]
"""Frames, frames in a second, height and width."""


class Mode(enum.Enum):
    """The ways of torchvision to scale."""

    BICUBIC = "bicubic"
    BILINEAR = "bilinear"
    LANCZOS = "lanczos"


def resized(image: torch.Tensor, size: Any, interpolation: Mode, antialias: bool) -> torch.Tensor:
    """The function of torchvision for pixels of 8 bits on a CPU."""
    assert image.dtype == torch.uint8 and interpolation is Mode.BICUBIC and antialias
    flat = image.reshape(-1, *image.shape[-3:])
    out = F.interpolate(flat, size=[*size], mode="bicubic", align_corners=False, antialias=True)
    return out.reshape(*image.shape[:-2], *size)


def normalized(image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, inplace: bool) -> torch.Tensor:
    return image.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a video processor of transformers without torchvision, whose two functions that it calls are the above."""
    functional: Any = types.ModuleType("torchvision.transforms.v2.functional")
    functional.InterpolationMode, functional.resize, functional.normalize = Mode, resized, normalized
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = functional  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setattr(backends, "tvF", functional, raising=False)
    monkeypatch.setattr(backends, "pil_torch_interpolation_mapping", {3: Mode.BICUBIC}, raising=False)

    def make(kind: str, **given: Any) -> Any:
        name = PROCESSORS[kind]
        module = importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
        (cls,) = [one for key, one in vars(module).items() if key.endswith("VLVideoProcessor")]
        made = object.__new__(cls)
        made.__dict__.update({"num_frames": None, "fps": 2, **given})
        return made

    yield make


def reader(kind: str, **settings: Any) -> VideoReader:
    rules = CLIPS[kind]
    return VideoReader(rules=rules, settings={**rules.settings, **settings}, config=CONFIG)


def coded(text: str) -> list[int]:
    """Return 13 tokens and more: the characters of a text."""
    return [*text.encode()]


def of_transformers(made: Any, given: VideoReader, pixels: torch.Tensor) -> Any:
    s = given.settings
    return made._preprocess(
        videos=[pixels],
        do_resize=True,
        size=SizeDict(**s["size"]),
        resample=s["resample"],
        do_rescale=True,
        rescale_factor=s["rescale_factor"],
        do_normalize=True,
        image_mean=s["image_mean"],
        image_std=s["image_std"],
        return_tensors="pt",
        **{key: s[key] for key in ("patch_size", "temporal_patch_size", "merge_size", "cap_pixels_per_frame")},
    )


@pytest.mark.parametrize(
    "settings", [{}, {"fps": 0.7, "min_frames": 6}, {"max_frames": 9, "cap_pixels_per_frame": True}]
)
@pytest.mark.parametrize("kind", CLIPS)
def test_frames_sizes_and_patches_are_those_of_transformers(kind: str, settings: Any, processor: Any) -> None:
    given = reader(kind, **settings)
    made = processor(kind, **settings)
    for total, fps, height, width in SHAPES[: 5 if settings == {} else 3]:
        wanted = made.sample_frames(VideoMetadata(total_num_frames=total, fps=fps))
        frames = frames_of(total, width, height)
        head, _ = given.of_file(VideoFacts(total, fps, height, width), coded, "x")
        assert [*head.frames] == wanted.tolist(), (total, fps)
        own = of_transformers(made, given, torch.from_numpy(frames[wanted]).permute(0, 3, 1, 2))
        assert own["video_grid_thw"].tolist() == [[*head.grid]]
        content = head.packed() + video(frames) if total < 40 and width < 100 else None
        if content is not None:  # decoded from a file
            assert is_clip(content) and unpacked(content)[0] == head
            picture = video_picture(given, content, "x")
            assert picture.grid == head.grid and torch.equal(picture.patches, own["pixel_values_videos"])


def test_every_number_of_frames_is_sampled_as_transformers_does(processor: Any) -> None:
    for kind, settings in (("qwen2_vl", {}), ("qwen3_vl", {}), ("qwen2_vl", {"num_frames": 6, "fps": None})):
        made, given = processor(kind, **settings), reader(kind, **{k: v for k, v in settings.items() if v})
        for total in range(6, 400):
            for fps in (24.0, 29.97, 7.5):
                wanted = made.sample_frames(VideoMetadata(total_num_frames=total, fps=fps)).tolist()
                head, _ = given.of_file(VideoFacts(total, fps, 56, 56), coded, "x")
                assert [*head.frames] == wanted, (kind, total, fps)


def test_times_are_text_for_qwen3_and_positions_for_qwen2_5() -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    own = object.__new__(Qwen3VLProcessor)
    own.__dict__.update(video_token="V", vision_start_token="[", vision_end_token="]")
    own.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    names = {7: "[", 8: "]", 9: "V"}
    for total, fps in ((7, 12.0), (45, 10.0), (301, 29.97)):
        head, expansion = reader("qwen3_vl").of_file(VideoFacts(total, fps, 64, 96), coded, "x")
        metadata = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=[*head.frames])
        text = own.replace_video_token({"video_grid_thw": torch.tensor([head.grid]), "video_metadata": [metadata]}, 0)
        assert "".join(names.get(i) or chr(i) for i in expansion.ids.tolist()) == text
        inner = expansion.ids[expansion.start : expansion.start + expansion.tokens]
        assert inner[0] == inner[-1] == 9 and (expansion.ids == 9).sum() == (inner == 9).sum()
        assert len(head.clip.gaps) == head.grid[0] - 1
        head, expansion = reader("qwen2_5_vl").of_file(VideoFacts(total, fps, 56, 84), coded, "x")
        seconds = 2 / VideoMetadata(total, fps, frames_indices=[*head.frames]).sampled_fps
        assert head.clip == Clip(pytest.approx(4 * seconds)) and {*expansion.ids.tolist()} == {9}
        assert len(expansion.ids) == expansion.tokens == head.grid[0] * head.grid[1] * head.grid[2] // 4


def test_settings_are_those_of_the_file_that_transformers_reads(tmp_path: Path) -> None:
    def write(name: str, **given: Any) -> None:
        (tmp_path / name).write_text(json.dumps(given))

    with pytest.raises(Refused, match="no video_preprocessor_config.json, which describes how videos are processed"):
        video_reader(tmp_path, CONFIG)
    write("preprocessor_config.json", max_pixels=999, patch_size=10)
    found: Any = video_reader(tmp_path, CONFIG)
    assert (
        found.settings["size"] == {"shortest_edge": 128 * 28 * 28, "longest_edge": 999} and found.settings["fps"] == 2
    )
    write("video_preprocessor_config.json", fps=3, min_frames=None)
    found = video_reader(tmp_path, CONFIG)
    assert (found.settings["fps"], found.settings["patch_size"], found.settings["min_frames"]) == (3, 14, 4)
    write("processor_config.json", video_processor={"do_sample_frames": False})
    found = video_reader(tmp_path, CONFIG)
    head, _ = found.of_file(VideoFacts(9, 5.0, 56, 56), coded, "x")
    assert head.frames == tuple(range(9)) and head.grid[0] == 5
    with pytest.raises(Refused, match="x: 900 frames to read, and 2 to 768 .max_frames. can be; cut the video"):
        found.of_file(VideoFacts(900, 5.0, 56, 56), coded, "x")
    for wrong in ({"resample": 2}, {"do_resize": False}, {"do_normalize": False}):
        write("processor_config.json", video_processor=wrong)
        ((key, value),) = wrong.items()
        with pytest.raises(Refused, match=f"processor_config.json: {key}={value!r}, and videos are read with {key}="):
            video_reader(tmp_path, CONFIG)
    assert video_reader(tmp_path, SimpleNamespace(model_type="internvl")) is None


def test_frames_that_are_images_are_read_as_they_are() -> None:
    from PIL import Image
    from vision import encoded

    frames = frames_of(3, 84, 56)
    files = [encoded(Image.fromarray(frame)) for frame in frames]
    given = reader("qwen2_5_vl", size={"shortest_edge": 1, "longest_edge": 1 << 20})
    sizes = tuple(map(len, files))
    head, _ = given.of_images([(56, 84)] * 3, sizes, 2.0, coded, "x")
    assert head.frames == (0, 1, 2) and head.grid == (2, 4, 6) and head.clip.step == 4.0
    picture = video_picture(given, head.packed() + b"".join(files), "x")
    file, _ = given.of_file(VideoFacts(3, 2.0, 56, 84), coded, "x")
    assert file.frames == (0, 1), "sampled to a multiple of two"
    whole = reader("qwen2_5_vl", size=given.settings["size"], do_sample_frames=False)
    head, _ = whole.of_file(VideoFacts(3, 2.0, 56, 84), coded, "x")
    assert torch.equal(picture.patches, video_picture(whole, head.packed() + video(frames, 2), "x").patches)
    with pytest.raises(Refused, match="x: frames of 2 sizes .5 x 9, 84 x 56.; give them one size"):
        given.of_images([(56, 84), (9, 5)], sizes, 2.0, coded, "x")
    with pytest.raises(Refused, match="x: a video of 1 frames; give one as an image"):
        given.of_images([(56, 84)], sizes, 2.0, coded, "x")
    assert np.array_equal(frames, np.stack([*given.frames(head, video(frames, 2), "x")]))
