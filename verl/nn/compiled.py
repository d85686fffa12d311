"""Decoder layers by torch.compile: the parts of a layer before and after attention, which is not compiled.

Both parts are compiled once for all layers of a model, for any number of tokens; gradients, passes without them and the
dtype of the check at start each need a graph of their own. torch's compiler then decides what is fused and what is
computed again in the backward pass: kernels and hooks of nn/fused.py are left out. A part that cannot be compiled is
computed by torch's operations one by one, which is logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.accel.families import FUSED_TYPES
from verl.errors import Refused
from verl.nn.attention import attend, window_of

Part = Callable[..., Any]

BACKEND = "inductor"
RECOMPILES = 4
"""The most compilations beyond the first of each part. After them the layers are no longer compiled."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CompiledLayers:
    """The parts of the layers of one model, as far as they are compiled."""

    graphs: int = 0
    """How many were compiled."""
    stopped: str = ""
    """Why the layers are not compiled any more."""
    _parts: dict[Part, Part] = field(default_factory=dict)

    def apply(self, model: nn.Module, *, known: bool) -> None:
        """Replace the forward pass of each decoder layer. known: the model is of a family of `FUSED_TYPES`, and its
        rows are packed; another one is left as it is, which is said once."""
        if not known:
            self._stop(Refused(f"{type(model).__name__} is not compiled, only packed {', '.join(FUSED_TYPES)}"))
            return
        for module in model.modules():
            if hasattr(module, "self_attn") and hasattr(module, "post_attention_layernorm"):
                module.forward = MethodType(partial(_layer_forward, self), module)

    def run(self, part: Part, *args: Any) -> Any:
        """Return the result of a part of a layer."""
        if self.stopped:
            return part(*args)
        if part not in self._parts:
            # torch keeps graphs, and counts them, per code object: each model has its own
            own = FunctionType(part.__code__.replace(), part.__globals__, part.__name__)
            self._parts[part] = torch.compile(own, fullgraph=True, dynamic=True, backend=self._compile)
        try:
            found = self._parts[part](*args)
        except torch._dynamo.exc.TorchDynamoException as e:
            self._stop(e)
            return part(*args)
        if not self.graphs:
            self._stop(RuntimeError("torch.compile did nothing; is it disabled in the environment?"))
        return found

    def _compile(self, graph: Any, inputs: Any) -> Any:
        if self.graphs >= len(self._parts) + RECOMPILES:
            raise RuntimeError(f"{self.graphs} graphs were compiled, more than a run should need")
        found = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        self.graphs += 1  # now: torch may begin a graph anew from inside its backend
        return found

    def _stop(self, why: Exception) -> None:
        """Compute by torch's operations from now on, and say so."""
        if self.stopped:
            return
        self.stopped = " ".join(f"{type(why).__name__}: {why}".split())[:300]
        logger.warning("model.engine_options.compile: layers are not compiled from now on (%s)", self.stopped)


def _layer_forward(
    layers: CompiledLayers,
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a decoder layer's output [1, T, hidden]. The arguments are those of transformers' modules."""
    assert kwargs.get("past_key_values") is None, "packed attention is driven by a plan alone"
    assert position_embeddings is not None
    if (
        torch.is_grad_enabled() and not hidden_states.requires_grad
    ):  # below LoRA; with a gradient the graphs are as above
        hidden_states = hidden_states.detach().requires_grad_()
    q, k, v = layers.run(_before_attention, self, hidden_states, *position_embeddings)
    out = attend(kwargs["verl_plan"], q, k, v, self.self_attn.scaling, window_of(attention_mask))  # [T, H, D]
    found: Tensor = layers.run(_after_attention, self, hidden_states, out)
    return found


def _before_attention(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries [T, H, D] and keys, and the values, of hidden states [1, T, hidden]."""
    attention, rows = layer.self_attn, (hidden.shape[1], -1, layer.self_attn.head_dim)
    x = _norm(layer.input_layernorm, hidden)
    q, k, v = (p(x).view(rows) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    if hasattr(attention, "q_norm"):
        q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
    kind = torch.promote_types(hidden.dtype, q.dtype)  # under autocast hidden states are float32, q may not be
    cos, sin = cos[0, :, None], sin[0, :, None]
    q, k = (_rotated(x.to(kind), cos, sin) for x in (q, k))
    return q, k, v


def _after_attention(layer: Any, hidden: Tensor, out: Tensor) -> Tensor:
    """Return the output of a layer, [1, T, hidden], of its input and the output of its attention [T, H, D]."""
    hidden = hidden + layer.self_attn.o_proj(out.reshape(1, len(out), -1))
    x, mlp = _norm(layer.post_attention_layernorm, hidden), layer.mlp
    gated: Tensor = hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    return gated


def _norm(module: Any, x: Tensor) -> Tensor:
    exact = x if x.dtype == torch.float64 else x.float()
    out = F.rms_norm(exact, x.shape[-1:], None, module.variance_epsilon) * module.weight
    return out.to(torch.promote_types(x.dtype, module.weight.dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
