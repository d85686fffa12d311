"""Files of videos, and tiny models that read videos, for tests."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vision import END, IMAGE, KINDS, START, VIDEO, VOCAB, chat_folder, drawn, model, sample_ids
from vision_families import random_model

from verl.media_tokens import Picture
from verl.models.clips import CLIPS, Clip
from verl.types import Grid, Medium, Sample, Segment

av = pytest.importorskip("av", reason="PyAV is not installed (the extra video)")
PER = 2
"""The frames of a patch."""
SETTINGS: dict[str, Any] = {
    "patch_size": 2,
    "temporal_patch_size": PER,
    "merge_size": 2,
    "min_frames": 2,
    "max_frames": 12,
    "size": {"shortest_edge": 16, "longest_edge": 4096},
}


def frames_of(count: int, width: int = 12, height: int = 8, seed: int = 0) -> np.ndarray:
    """Return frames [count, height, width, 3] of random colours."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def video(
    frames: np.ndarray, fps: int = 4, codec: str = "ffv1", kind: str = "matroska", times_ms: Sequence[int] = ()
) -> bytes:
    """Return the bytes of a video with these frames; ffv1 keeps them as they are. times_ms: the time of each frame."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for k, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times_ms:
                frame.time_base, frame.pts = Fraction(1, 1000), times_ms[k]
                stream.codec_context.time_base = frame.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def video_model(kind: str, **given: Any) -> Any:
    """Return a tiny random model with patches of two frames."""
    tower = {"temporal_patch_size": PER}
    if kind in KINDS:
        return model(kind, tower=tower, **given)
    return random_model(kind, {"vision_end_token_id": END}, tower=tower, **given)


def video_folder(folder: Path, kind: str) -> Path:
    """Write a tiny model that reads images and videos, with its tokenizer and the settings of its processors."""
    chat_folder(folder, kind, video_model(kind))
    images = json.loads((folder / "preprocessor_config.json").read_text()) | {"temporal_patch_size": PER}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


GRIDS: dict[str, Grid] = {"cat": (1, 4, 6), "cut": (2, 4, 6), "long": (5, 2, 4)}
"""The patches of an image, of a video, and of a video that is longer in positions of time than it is wide."""
_STEPS = dict.fromkeys(CLIPS, 1.0) | {"qwen2_5_vl": 2.5}
SEEN = {"cat": IMAGE, "cut": VIDEO, "long": VIDEO}


def clip_of(kind: str, name: str) -> Clip | None:
    if name == "cat":
        return None
    return Clip(_STEPS[kind], (5, 3, 4, 3)[: GRIDS[name][0] - 1] if CLIPS[kind].timed else ())


@cache
def pictures(kind: str) -> dict[str, Picture]:
    rng = torch.Generator().manual_seed(0)
    sizes = {name: (int(np.prod(grid)), 12 * PER) for name, grid in GRIDS.items()}
    return {
        name: Picture(patches=torch.randn(*size, generator=rng), grid=GRIDS[name], clip=clip_of(kind, name))
        for name, size in sizes.items()
    }


def blocks(kind: str, name: str) -> list[tuple[int, int]]:
    """Return for each block of features (an image, a video, or a frame of one) the tokens of text in front of it within
    its medium, and its own."""
    frames, rows, columns = GRIDS[name]
    if not CLIPS[kind].timed or frames == 1:
        return [(0, frames * rows * columns // 4)]
    clip = clip_of(kind, name)
    assert clip is not None
    return [(gap, rows * columns // 4) for gap in (0, *clip.gaps)]


def seen(kind: str, text: list[int], *names: str, source: Any = "prompt") -> Segment:
    """Return a segment of text with these images and videos after its first token."""
    ids, media = text[:1], list[Medium]()
    for name in names:
        own = [i for gap, features in blocks(kind, name) for i in (*range(30, 30 + gap), *[SEEN[name]] * features)]
        media.append(Medium(name, len(ids) + 1, len(own)))
        ids = [*ids, START, *own, END]
    return Segment(ids=np.array([*ids, *text[1:]]), source=source, media=tuple(media))


def rows(kind: str) -> list[Sample]:
    """Return rows with videos and an image, several turns, and a placeholder that the policy sampled."""
    one, two = seen(kind, [1, 2, 3], "cut"), seen(kind, [4, 5], "cat", "long")
    later = seen(kind, [9, 10], "long", source="env")
    given = [
        ("a", (one, drawn(12, 13))),
        ("a", (one, drawn(14, VIDEO, 15))),
        ("a", (one, drawn(17), later, drawn(18, 19))),
        ("b", (two, drawn(20, 21))),
        ("c", (seen(kind, [6, 7]), drawn(24, VIDEO))),
    ]
    names = [{"sample_id": str(i), "trajectory_id": str(i), "group_id": group} for i, (group, _) in enumerate(given)]
    return [Sample(**name, purpose="train", segments=row) for name, (_, row) in zip(names, given)]


def qwen_inputs(kind: str, module: Any, sample: Sample) -> dict[str, Any]:
    """Return the inputs of transformers for a row. The text after an image or video continues after the largest of its
    positions, as in Qwen's own code; where transformers computes other positions, the video is long."""
    content, base = pictures(kind), module.base_model
    ids, kinds, places, now, at = sample_ids(sample), np.zeros(sample.total_tokens, np.int64), [], 0, 0

    def text(count: int) -> None:
        nonlocal now
        places.append((now + torch.arange(count)).expand(3, -1))
        now += count

    used = {*ids.tolist()}
    spare = sorted({*range(VOCAB)} - used)[:2]
    module.config.image_token_id, module.config.video_token_id = spare
    for segment in sample.segments:
        end = 0
        for m in segment.media:
            text(m.start - end)
            own, end, video = at + m.start, m.end, m.reference != "cat"
            frames, *sides = content[m.reference].grid
            grid = torch.tensor([1 if CLIPS[kind].timed else frames, *sides])
            for gap, features in blocks(kind, m.reference):
                text(gap)
                kinds[own + gap : own + gap + features] = 2 if video else 1
                own += gap + features
                step = _STEPS[kind] if video else 1
                places.append(base.get_vision_position_ids(now, grid, 1, 2, step))
                now = int(places[-1].max()) + 1
        text(len(segment.ids) - end)
        at += len(segment.ids)
    ids[kinds == 1], ids[kinds == 2] = spare
    given: dict[str, Any] = {
        "input_ids": torch.from_numpy(ids)[None],
        "mm_token_type_ids": torch.from_numpy(kinds)[None],
    }
    for what, names in (
        ("image", [n for n in sample.media if n == "cat"]),
        ("video", [n for n in sample.media if n != "cat"]),
    ):
        if names:
            given[f"{what}_grid_thw"] = torch.tensor([content[n].grid for n in names])
            given["pixel_values" + "_videos" * (what == "video")] = torch.cat([content[n].patches for n in names])
    if kind == "qwen2_5_vl":
        module.config.vision_config.tokens_per_second = 1
        given["second_per_grid_ts"] = torch.full((len(sample.media),), _STEPS[kind])
    given["position_ids"] = torch.cat(places, 1)[:, None]
    return given


def own_logprobs(kind: str, module: Any, sample: Sample, banned: Sequence[int] = ()) -> torch.Tensor:
    """Return the log-probs of a row's sampled tokens by the forward pass of transformers, where the banned ids have
    probability 0."""
    logits = module(**qwen_inputs(kind, module, sample), use_cache=False).logits[0]
    logits = logits.index_fill(-1, torch.tensor(banned, dtype=torch.int64), -torch.inf).log_softmax(-1)
    sampled, at = list[int](), 0
    for s in sample.segments:
        sampled += range(at, at + len(s.ids)) if s.source == "sampled" else ()
        at += len(s.ids)
    own: torch.Tensor = logits[torch.tensor(sampled) - 1, torch.from_numpy(sample_ids(sample))[sampled]]
    return own
