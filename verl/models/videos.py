"""Videos for a model: the settings of its processor, and what is decided about a video when its row is read: frames,
their size, and the tokens in its place. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from verl.errors import Refused
from verl.models.clips import CLIPS, Clip, ClipHead, ClipRules, frame_size, patch_times, sampled_frames
from verl.models.expand import Expansion
from verl.models.image_files import SETTINGS, decoded_image
from verl.models.video_files import VideoFacts, decoded_frames

FILES = ("processor_config.json", "video_preprocessor_config.json", SETTINGS)
"""The files with the settings of videos; the first one that has them counts, as in transformers."""
BICUBIC = 3
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": BICUBIC}
Encode = Callable[[str], Sequence[int]]
"""Text -> the ids of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoReader:
    """Reads videos for one model. settings: those of its processor · config: that of the model"""

    rules: ClipRules
    settings: Mapping[str, Any]
    config: Any

    def of_file(self, facts: VideoFacts, encode: Encode, where: str) -> tuple[ClipHead, Expansion]:
        """Return what is decided about a video with these facts, and the tokens in the place of its placeholder. Raise
        Refused, with `where`, for a video that the processor refuses."""
        try:
            frames = sampled_frames(self.rules, self.settings, facts.frames, facts.fps).tolist()
        except ValueError as e:
            raise Refused(f"{where}: {e}") from e
        return self._decided(frames, facts, len(frames) / facts.frames * facts.fps, encode, where, ())

    def of_images(
        self, sides: Sequence[tuple[int, int]], sizes: tuple[int, ...], fps: float, encode: Encode, where: str
    ) -> tuple[ClipHead, Expansion]:
        """Return the same for a video that is a list of images, each of which is a frame: their heights and widths, the
        bytes of their files, and the frames in a second."""
        if len(sides) < 2:
            raise Refused(f"{where}: a video of {len(sides)} frames; give one as an image")
        if len(found := {*sides}) > 1:
            shown = ", ".join(f"{width} x {height}" for height, width in sorted(found))
            raise Refused(f"{where}: frames of {len(found)} sizes ({shown}); give them one size")
        facts = VideoFacts(len(sides), fps, *sides[0])
        return self._decided([*range(len(sides))], facts, fps, encode, where, sizes)

    def _decided(
        self, frames: list[int], facts: VideoFacts, fps: float, encode: Encode, where: str, sizes: tuple[int, ...]
    ) -> tuple[ClipHead, Expansion]:
        """fps: the frames in a second of those that are read"""
        per, patch, most = (self.settings[key] for key in ("temporal_patch_size", "patch_size", "max_frames"))
        if not 1 < len(frames) <= most:
            raise Refused(f"{where}: {len(frames)} frames to read, and 2 to {most} (max_frames) can be; cut the video")
        try:
            height, width = frame_size(self.rules, self.settings, len(frames), facts.height, facts.width)
        except ValueError as e:
            raise Refused(f"{where}: {e}") from e
        times = patch_times(frames, facts.fps, per)
        grid = len(times), height // patch, width // patch
        merged = grid[1] * grid[2] // self.settings["merge_size"] ** 2
        expansion, gaps = self._tokens(times, merged, encode)
        clip = Clip(self.rules.step(self.config, per / fps), gaps)
        return ClipHead(tuple(frames), grid, clip, sizes), expansion

    def _tokens(self, times: Sequence[float], merged: int, encode: Encode) -> tuple[Expansion, tuple[int, ...]]:
        """Return the tokens of frames of patches at these times, `merged` of each, and the number of those of text
        between two frames each."""
        config, token = self.config, np.int64(self.config.video_token_id)
        if not self.rules.timed:
            return Expansion(np.full(len(times) * merged, token), 0, len(times) * merged), ()
        before = [[*encode(f"<{time:.1f} seconds>"), config.vision_start_token_id] for time in times]
        frame, end = [int(token)] * merged, config.vision_end_token_id
        ids = np.array([i for text in before for i in (*text, *frame, end)], np.int64)
        own = len(ids) - 1 - len(before[0])
        return Expansion(ids, len(before[0]), own), tuple(1 + len(text) for text in before[1:])

    def frames(self, head: ClipHead, rest: bytes, where: str) -> Iterator[np.ndarray]:
        """Yield the frames of a video, upright, [height, width, 3] uint8 each. rest: its content after `head`."""
        if not head.sizes:
            yield from decoded_frames(rest, head.frames, where)
            return
        edges = np.cumsum([0, *head.sizes]).tolist()
        for k in head.frames:
            image: Image.Image = decoded_image(rest[edges[k] : edges[k + 1]], f"{where}: frame {k}")
            yield np.asarray(image)


def video_reader(folder: Path, config: Any) -> VideoReader | None:
    """Return the reader of videos for the model in a folder with this configuration; None if its videos are not read.
    Raise Refused for settings of its processor that are not computed here."""
    if (rules := CLIPS.get(config.model_type)) is None:
        return None
    name, given = _given(folder)
    settings = {**rules.settings, **{key: value for key, value in given.items() if value is not None}}
    if not rules.whole:  # older files of Qwen2-VL have the limits of pixels so
        old = {"shortest_edge": given.get("min_pixels"), "longest_edge": given.get("max_pixels")}
        settings["size"] = {**settings["size"], **{key: value for key, value in old.items() if value is not None}}
    for key, value in _FIXED.items():
        if settings[key] != value:
            raise Refused(f"{folder / name}: {key}={settings[key]!r}, and videos are read with {key}={value!r} only")
    for key in ("shortest_edge", "longest_edge"):
        if key not in settings["size"]:
            raise Refused(f"{folder / name}: size={settings['size']} has no {key}")
    return VideoReader(rules=rules, settings=settings, config=config)


def _given(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the file with the settings of videos, and the settings in it."""
    for name in FILES:
        if not (folder / name).is_file():
            continue
        found = json.loads((folder / name).read_text())
        if name != FILES[0]:
            return name, found
        if isinstance(own := found.get("video_processor"), dict):
            return name, own
    raise Refused(f"{folder}: no {FILES[1]}, which describes how videos are processed; copy it from the model")
