"""Norms, gates and rotary attention of Llama-like models in few passes over memory, for the CPU.

Transformers spells them in a dozen elementwise operations, which on a CPU cost as much as the matmuls of a small model.
Same mathematics, never less precision; the start-up check of the engine compares the whole model with its own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl.nn.attention import attend
from verl.nn.compiled import Kernels, load_kernels

# The sliding window of an attention module, by model type: the types whose modules are known to be these.
_WINDOW: Mapping[str, Callable[[Any], int | None]] = {
    "llama": lambda module: None,
    "mistral": lambda module: getattr(module.config, "sliding_window", None),
    "qwen2": lambda module: module.sliding_window,
    "qwen3": lambda module: module.sliding_window,
}


def fuse(model: nn.Module, *, packed: bool) -> bool:
    """Speed up the norms of `model`, and its attention if it runs on packed batches. False where the type is unknown."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if config.model_type not in _WINDOW:
        return False
    found = load_kernels(torch.float32)
    kernels = found if isinstance(found, Kernels) else None
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(partial(_norm_forward, kernels=kernels), module)
        elif kernels is not None and config.hidden_act == "silu" and hasattr(module, "gate_proj"):
            module.forward = MethodType(partial(_mlp_forward, kernels=kernels), module)
        elif packed and hasattr(module, "q_proj") and hasattr(module, "head_dim"):
            module.forward = MethodType(_attention_forward, module)
    return True


def unfuse(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop("forward", None)


def _norm_forward(self: Any, hidden_states: Tensor, *, kernels: Kernels | None) -> Tensor:
    return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon, kernels)


def _mlp_forward(self: Any, x: Tensor, *, kernels: Kernels) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    gated = _SwiGLU.apply(gate, up, kernels) if gate.dtype == torch.float32 else torch.nn.functional.silu(gate) * up
    return self.down_proj(gated)


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """hidden_states [1, T, hidden], cos and sin [1, T, D] -> [1, T, hidden]."""
    assert attention_mask is None and kwargs.get("past_key_values") is None, (
        "packed attention is driven by a plan alone"
    )
    window = _WINDOW[self.config.model_type](self)
    q, k, v = (
        p(hidden_states).view(hidden_states.shape[1], -1, self.head_dim)
        for p in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x[0, :, None] for x in position_embeddings)  # [T, 1, D]
    q, k = _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)
    out = attend(kwargs["verl_plan"], q, k, v, self.scaling, window)  # [T, H, D]
    return self.o_proj(out.reshape(1, len(out), -1)), None


class _RMSNorm(torch.autograd.Function):
    """weight * x / rms(x) over the last dimension, in at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: Kernels | None) -> Tensor:
        ctx.kernels = kernels if x.dtype == weight.dtype == torch.float32 else None
        if ctx.kernels is not None:
            x = x.contiguous()
            ctx.eps = eps
            ctx.save_for_backward(x, weight)
            return ctx.kernels.rms_norm(x.view(-1, x.shape[-1]), weight.detach(), eps).view(x.shape)
        rows = _exact(x.reshape(-1, x.shape[-1]))
        inverse = ((rows * rows).mean(-1, keepdim=True) + eps).rsqrt_()  # [n, 1]
        ctx.save_for_backward(x, weight, inverse)
        out = (rows * inverse).mul_(weight)
        return out.view(x.shape).to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.kernels is not None:
            x, weight = ctx.saved_tensors
            flat = (-1, x.shape[-1])
            d_x, d_weight = ctx.kernels.rms_norm_backward(x.view(flat), weight, d_out.contiguous().view(flat), ctx.eps)
            return d_x.view(x.shape), d_weight.to(weight.dtype), None, None
        x, weight, inverse = ctx.saved_tensors
        n = x.shape[-1]
        normed = _exact(x.reshape(-1, n)) * inverse
        d_rows = d_out.reshape(-1, n).to(normed.dtype)
        product = d_rows * normed
        exact_weight = weight.to(normed.dtype)
        along = torch.mv(product, exact_weight).div_(n)[:, None]  # of each row's gradient, what only scales the row
        d_x = (d_rows * exact_weight).addcmul_(normed, along, value=-1).mul_(inverse)
        return d_x.view(x.shape).to(x.dtype), product.sum(0).to(weight.dtype), None, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up in one pass, and one backward, float32."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return kernels.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.swiglu_backward(*ctx.saved_tensors, d_out.contiguous()), None


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


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
