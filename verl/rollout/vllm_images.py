"""The images of a request in the form of vLLM's endpoint with token ids: processed, each with its hash and the tokens
that it replaces. vLLM neither processes them again nor changes the ids.

A value is the msgpack of vLLM's `MultiModalKwargsItem` in base64 (`vllm/v1/serial_utils.py`, 0.32): tensors with their
dtype and shape, and how those of several images are joined."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from verl.rollout.traits import VLLM_IMAGES

if TYPE_CHECKING:
    from verl.media_tokens import Picture
    from verl.rollout.embedded.images import RequestImages

RAW = 3
"""The msgpack extension of the bytes of a tensor."""


def takes_images(config: Any) -> bool:
    """Return True for a model of which vLLM takes images in this form."""
    return config.model_type in VLLM_IMAGES


def vllm_features(images: RequestImages, dtype: torch.dtype) -> dict[str, Any]:
    """Return the field `features` of a request. dtype: that in which the server computes. Raise ValueError for a
    video, which this form does not hold."""
    if any(picture.clip is not None for picture in images.pictures.values()):
        raise ValueError("a video, and vLLM gets images alone; use rollout.engine=native")
    return {
        "mm_hashes": {"image": [m.reference for m in images.media]},
        "mm_placeholders": {"image": [{"offset": m.start, "length": m.tokens} for m in images.media]},
        "kwargs_data": {"image": [item_of(images.pictures[m.reference], dtype) for m in images.media]},
    }


def item_of(picture: Picture, dtype: torch.dtype) -> str:
    """Return the content of one image."""
    joined = ("flat", {"keep_on_cpu": False, "slices": [(0, len(picture.patches), None)], "dim": 0})
    stacked = ("batched", {"keep_on_cpu": True})
    found = {
        "pixel_values": {"data": _tensor(picture.patches.to(dtype)), "field": joined},
        "image_grid_thw": {"data": _tensor(torch.tensor(picture.grid)), "field": stacked},
    }
    return base64.b64encode(msgspec.msgpack.encode(found)).decode("ascii")


def _tensor(t: torch.Tensor) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    raw = t.contiguous().view(torch.uint8).numpy().tobytes()
    return str(t.dtype).removeprefix("torch."), tuple(t.shape), msgspec.msgpack.Ext(RAW, raw)
