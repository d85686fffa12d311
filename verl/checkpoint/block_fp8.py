"""Weights in blocks of 8 bits (`nn/fp8.py`) as Hugging Face names them in a folder: the `quantization_config` of its
config.json, and the tensors of the scales. vLLM, SGLang and TensorRT-LLM read this form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from verl.checkpoint.saved_form import SavedForm
from verl.nn.fp8 import SCALES, in_blocks
from verl.wire import FP8, FP8_BLOCK, split_block

Part = tuple[str, tuple[int, ...], int]
"""Name, shape and first row of a tensor of a folder, which is a run of rows of a tensor of the model."""


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """Return the `quantization_config` with which a server makes this model (on the meta device). It names the modules
    that keep their dtype."""
    kept, form = set[str](), SavedForm(model)
    for name, tensor in model.state_dict().items():
        if tensor.ndim > 1 and not in_blocks(name, tensor.shape):
            kept |= {part.removesuffix(".weight") for part, _, _ in form.parts(name, tuple(tensor.shape))}
    return {
        "quant_method": FP8,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(kept),
    }


def unreadable(model: nn.Module) -> str:
    """Return why servers cannot read this model (on the meta device) in blocks, or ""."""
    weights = {name: tuple(t.shape) for name, t in model.state_dict().items() if in_blocks(name, t.shape)}
    form = SavedForm(model)
    found = (_split_blocks(shape, form.parts(name, shape)) for name, shape in weights.items())
    return next(filter(None, found), "")


def scale_parts(shape: Sequence[int], weights: Sequence[Part]) -> list[Part]:
    """Return the tensors of a folder that have the scales of a weight of this shape, as runs of rows of its scales, or
    none if a block would be in two of them. weights: those that have the weight itself."""
    if _split_blocks(shape, weights):
        return []
    scale_rows = -(-shape[-2] // FP8_BLOCK)
    found = []
    for part, of, first in weights:
        which, row = divmod(first, shape[-2])
        scales = (*of[:-2], -(-of[-2] // FP8_BLOCK), -(-of[-1] // FP8_BLOCK))
        found.append((part + SCALES, scales, which * scale_rows + row // FP8_BLOCK))
    return found


def _split_blocks(shape: Sequence[int], weights: Sequence[Part]) -> str:
    """Return why the scales of a weight of this shape have no place in a folder, or ""."""
    for part, of, first in weights:
        if why := split_block(part, of):
            return why
        if first % shape[-2] % FP8_BLOCK:
            return f"{part} {[*of]}: it begins amid a block of {FP8_BLOCK} rows"
    return ""
