"""Videos of a model family: which frames are read, in which size, and the tokens and positions of each frame. No torch.

The content of a video in a store begins with what was decided when its row was read (`ClipHead`); so every process
reads the same frames in the same size, and the hash of the content is one of these decisions too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verl.types import Grid

MARK = b"verl clip 1 "
"""The first bytes of the content of a video in a store."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The places of the tokens of a video's frames."""

    step: float = 1.0
    """The distance of two frames in positions of time."""
    gaps: tuple[int, ...] = ()
    """The number of tokens of text between two frames each; (): there is none, and all frames are one block."""


@dataclass(frozen=True, slots=True)
class ClipHead:
    """The decisions about a video that were made when its row was read."""

    frames: tuple[int, ...]
    """The indices of the frames that are read, in their order."""
    grid: Grid
    """The frames, rows and columns of its patches; each patch is of several frames."""
    clip: Clip
    sizes: tuple[int, ...] = ()
    """The bytes of the file of each frame, if the frames are images."""

    def packed(self) -> bytes:
        """Return the first bytes of the content of the video, in front of its file or of the files of its frames."""
        return MARK + json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"


def is_clip(content: bytes) -> bool:
    """Return True if the content of a medium is a video."""
    return content.startswith(MARK)


def unpacked(content: bytes) -> tuple[ClipHead, bytes]:
    """Return what was decided about a video, and the content after it."""
    head, _, rest = content.removeprefix(MARK).partition(b"\n")
    found = json.loads(head)
    clip = Clip(found["clip"]["step"], tuple(found["clip"]["gaps"]))
    frames, rows, columns = found["grid"]
    return ClipHead(tuple(found["frames"]), (frames, rows, columns), clip, tuple(found["sizes"])), rest


def clip_places(merged: Grid, clip: Clip) -> tuple[np.ndarray, int]:
    """Return the positions [3, tokens] of a video's tokens (time, row, column), of which the first is 0, and the
    position of the token after them. If there is text between frames, each frame is an image of its own.

    The text after a video continues after the largest of its positions, as in Qwen's own code and in the decode steps
    of transformers. The forward pass of transformers 5.3 to 5.24 continues after the larger side of a frame: the
    positions of a long video and of the text after it would overlap."""
    frames, rows, columns = merged
    if not clip.gaps:
        places = np.indices(merged).reshape(3, -1)
        times = (np.arange(frames, dtype=np.float32) * np.float32(clip.step)).astype(np.int64)
        places[0] = times[places[0]]
        return places, int(places.max()) + 1
    frame, now, found = np.indices((1, rows, columns)).reshape(3, -1), 0, list[np.ndarray]()
    for gap in (0, *clip.gaps):
        found += [np.broadcast_to(now + np.arange(gap), (3, gap)), frame + now + gap]
        now += gap + max(rows, columns)
    return np.concatenate(found, axis=1), now


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRules:
    """How the processor of a family reads videos."""

    settings: Mapping[str, Any]
    """The settings of the processor that its file does not have."""
    even: bool
    """Frames are taken at equal distances from the first to the last one; else the last ones are left out."""
    whole: bool
    """The limits of pixels hold for all frames together; else for each frame."""
    step: Callable[[Any, float], float]
    """(config, seconds between two frames of patches) -> the distance in positions of time."""
    timed: bool
    """The time of each frame of patches is written in front of it as text, with marks around it."""


_SIZES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768, "fps": 2}
_WAYS = {"do_sample_frames": True, "num_frames": None, "do_resize": True, "do_rescale": True, "do_normalize": True}
_VALUES = {"rescale_factor": 1 / 255, "resample": 3, "cap_pixels_per_frame": False}
_QWEN2: dict[str, Any] = {
    **_SIZES,
    **_WAYS,
    **_VALUES,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "max_video_tokens": 128_000,
}
_QWEN3: dict[str, Any] = _QWEN2 | {
    "patch_size": 16,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "max_video_tokens": 768,
}


def _per_second(config: Any, seconds: float) -> float:
    return float(np.float32(config.vision_config.tokens_per_second) * np.float32(seconds))


_TIMED = ClipRules(settings=_QWEN3, even=True, whole=True, step=lambda config, seconds: 1.0, timed=True)
CLIPS: Mapping[str, ClipRules] = {
    "qwen2_vl": ClipRules(settings=_QWEN2, even=False, whole=False, step=lambda config, seconds: 1.0, timed=False),
    "qwen2_5_vl": ClipRules(settings=_QWEN2, even=False, whole=False, step=_per_second, timed=False),
    "qwen3_vl": _TIMED,
    "qwen3_vl_moe": _TIMED,
    "qwen3_5": _TIMED,
    "qwen3_5_moe": _TIMED,
}
"""The families of which videos are read, by the `model_type` of config.json."""


def sampled_frames(rules: ClipRules, settings: Mapping[str, Any], total: int, fps: float) -> np.ndarray:
    """Return the indices [n] int64 of the frames that are read of a video of `total` frames, `fps` in each second, with
    the settings of its processor. Raise ValueError if there are too few."""
    if not settings["do_sample_frames"]:
        return np.arange(total)
    least, most, per, wanted = (settings[k] for k in ("min_frames", "max_frames", "temporal_patch_size", "num_frames"))
    if rules.even:
        count = wanted if wanted is not None else min(max(int(total / fps * settings["fps"]), least), most, total)
        return np.linspace(0, total - 1, count).round().astype(np.int64)
    if wanted is not None:
        count = round(wanted / per) * per
    else:
        most = math.floor(min(most, total) / per) * per
        count = math.floor(min(max(total / fps * settings["fps"], least), most, total) / per) * per
    if not 0 < count <= total:
        raise ValueError(f"{count} frames are wanted, and there are {total}")
    distance = total / count
    return (np.arange(math.ceil(total / distance)) * distance).astype(np.float32).astype(np.int64)


def frame_size(rules: ClipRules, settings: Mapping[str, Any], frames: int, height: int, width: int) -> tuple[int, int]:
    """Return the height and width to which the frames of a video are scaled. Raise ValueError for a size that the
    processor refuses."""
    per, factor = settings["temporal_patch_size"], settings["patch_size"] * settings["merge_size"]
    least, most = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
    if rules.whole and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"{width} x {height} pixels, and no side may be more than 200 times the other")
    if settings["cap_pixels_per_frame"]:
        tokens, floor = settings["max_video_tokens"] * factor * factor, int(least * 1.05)
        if rules.whole:
            most = max(min(tokens, most // frames), floor) * frames
        else:
            most = max(min(most, int(tokens * 0.9) * per // frames), floor)
    count, area = (frames, round(frames / per) * per) if rules.whole else (1, 1)
    sides = [round(side / factor) * factor for side in (height, width)]
    if area * sides[0] * sides[1] > most:
        beta = math.sqrt(count * height * width / most)
        sides = [max(factor, math.floor(side / beta / factor) * factor) for side in (height, width)]
    elif area * sides[0] * sides[1] < least:
        beta = math.sqrt(least / (count * height * width))
        sides = [math.ceil(side * beta / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def patch_times(frames: Sequence[int], fps: float, per: int) -> list[float]:
    """Return the time in seconds of each frame of patches, which is made of `per` frames with these indices: the mean
    of the first and the last of them. The last frame is repeated."""
    padded = [*frames, *[frames[-1]] * (-len(frames) % per)]
    times = [index / fps for index in padded]
    return [(times[k] + times[k + per - 1]) / 2 for k in range(0, len(times), per)]
