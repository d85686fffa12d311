"""Norms, gates and rotary attention of Llama-like models in few passes over memory, for the CPU.

Transformers spells them in a dozen elementwise operations, which on a CPU cost as much as the matmuls of a small model.
Same mathematics, never less precision; the engine's start-up check compares the whole model with its own forward pass.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl.accel.cpu import training
from verl.nn.attention import attend, window_of

# The model types with modules that are known to be these.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def fuse(model: nn.Module, *, packed: bool) -> bool:
    """Speed up the norms of `model`, and its attention if it runs on packed batches. False: the type is unknown."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if config.model_type not in _KNOWN:
        return False
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_norm_forward, module)
        elif training.has_kernels() and config.hidden_act == "silu" and hasattr(module, "gate_proj"):
            module.forward = MethodType(_mlp_forward, module)
        elif packed and hasattr(module, "q_proj") and hasattr(module, "head_dim"):
            module.forward = MethodType(_attention_forward, module)
    return True


def unfuse(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop("forward", None)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return training.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(training.swiglu(self.gate_proj(x), self.up_proj(x)))
    return out


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """hidden_states [1, T, hidden], cos and sin [1, T, D] -> [1, T, hidden]."""
    assert kwargs.get("past_key_values") is None, "packed attention is driven by a plan alone"
    window, rows = window_of(attention_mask), (hidden_states.shape[1], -1, self.head_dim)
    q, k, v = (project(hidden_states).view(rows) for project in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x[0, :, None] for x in position_embeddings)  # [T, 1, D]
    q, k = _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)
    out = attend(kwargs["verl_plan"], q, k, v, self.scaling, window)  # [T, H, D]
    return self.o_proj(out.reshape(1, len(out), -1)), None


class _Rotary(torch.autograd.Function):
    """x [T, h, D] turned by cos and sin [T, 1, D]: x cos + rotate_half(x) sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = d_out.shape[-1] // 2
        d_x = d_out * cos
        d_x[..., :half].addcmul_(d_out[..., half:], sin[..., half:])
        d_x[..., half:].addcmul_(d_out[..., :half], sin[..., :half], value=-1)
        return d_x.to(ctx.dtype), None, None
