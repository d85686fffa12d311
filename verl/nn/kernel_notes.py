"""The lines of a run's start about operations of training that have kernels on a GPU, and are computed without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl.accel.families import FUSED_TYPES
from verl.accel.operations import Use
from verl.accel.table import why_plain

FUSED = ("trained_rms_norm", "trained_swiglu", "trained_rotation")
HEAD = ("logit_sums", "logit_gradients")
CODED = ("quantised_linear", "quantised_back")
HALVES = (torch.bfloat16, torch.float16)


def training_notes(
    device: torch.device, dtype: torch.dtype, config: Any, *, packed: bool, quantised: bool
) -> tuple[str, ...]:
    """Return a line, with the reason, for each operation that torch's operations compute in training on a CUDA device;
    there are none on other devices. dtype: that of activations · config: the text part of the model's configuration ·
    packed: rows are packed · quantised: it has layers of 4 or 8 bits."""
    if device.type != "cuda":
        return ()
    found = _reasons(device, dtype, config, packed=packed, quantised=quantised)
    return tuple(f"training: slower without a kernel of {name} ({reason})" for name, reason in found if reason)


def _reasons(
    device: torch.device, dtype: torch.dtype, config: Any, *, packed: bool, quantised: bool
) -> Iterator[tuple[str, str | None]]:
    """Yield operations, and why a kernel does not compute each; None: one does."""
    use = Use(device, dtype, {"hidden": config.hidden_size})
    kind = config.model_type
    for name in FUSED:
        fused = kind in FUSED_TYPES
        yield name, why_plain(name, use) if fused else f"model_type {kind}: {', '.join(FUSED_TYPES)} are computed by it"
    if packed:
        yield "trained_attention", _why_blocks(device, dtype, config)
    for name in HEAD:
        yield name, why_plain(name, use)
    if dtype in HALVES:  # torch's own product of float32 has a float32 result
        yield "wide_product", why_plain("wide_product", use)
    for name in CODED if quantised else ():
        yield name, why_plain(name, Use(device, dtype))


def _why_blocks(device: torch.device, dtype: torch.dtype, config: Any) -> str | None:
    """Return why the attention of packed rows is computed in blocks; None: one call computes it."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if cap := getattr(config, "attn_logit_softcapping", None):
        return f"attn_logit_softcapping={cap}: variable-length kernels do not cap scores"
    keys, values = getattr(config, "qk_head_dim", dim), getattr(config, "v_head_dim", dim)
    if keys != values:
        return f"keys have {keys} numbers per head and values {values}: variable-length kernels want the same"
    return why_plain("trained_attention", Use(device, dtype, {"head_dim": keys}))
