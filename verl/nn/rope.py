"""RoPE with factors that follow the longest position of a pass (`longrope`, `dynamic`), fixed for a run.

Transformers chooses the factors in every forward pass, by its longest row. In a batch a long row then changes the
log-probs of the short ones, and which rows share a micro-batch decides a gradient. Servers such as vLLM choose once, by
the longest sequence that they serve; so does a run, by its longest row: in training, scoring and generation. A prompt
that is computed once for answers of unlike lengths has one set of factors, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import Refused


def fix_rope(model: Any, longest: int | None) -> int | None:
    """Make every pass of `model` choose its RoPE factors as for a row of `longest` tokens (None: for all positions of
    the model). Return the number of tokens that a row may have before the factors would change; None: any number."""
    modules = [m for m in model.modules() if any(map(_follows_length, _kinds(getattr(m, "rope_type", None))))]
    if not modules:
        return None
    text = model.config.get_text_config()
    longest = longest or int(text.max_position_embeddings)
    for module in modules:
        module.register_forward_pre_hook(_Further(longest - 1), with_kwargs=True)
        module.register_forward_hook(_without_last)
    kinds = {kind for m in modules for kind in _kinds(m.rope_type) if _follows_length(kind)}
    first = max(first_lengths(text), default=longest)
    return None if kinds == {"longrope"} and longest > first else max(longest, first)


def _kinds(rope_type: object) -> list[object]:
    """Return the RoPE types of a model: one for all layers, or one for each kind of layer."""
    return [*rope_type.values()] if isinstance(rope_type, dict) else [rope_type]


def _follows_length(kind: object) -> bool:
    """Return True if transformers chooses the factors of this RoPE in the forward pass."""
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def first_lengths(text: Any) -> list[int]:
    """Return the original context lengths of the RoPE types that follow the length of a row: up to them, the factors
    are those of the first training."""
    given = dict(getattr(text, "rope_parameters", None) or {})
    each = [of for of in given.values() if isinstance(of, dict)] or [given]
    found = [of for of in each if _follows_length(of.get("rope_type"))]
    return [int(of.get("original_max_position_embeddings") or text.max_position_embeddings) for of in found]


class _Further:
    """A hook that appends one position, the last of the longest row, to the positions that a module is called with."""

    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = given.get("position_ids", args[1] if len(args) > 1 else None)
        if not isinstance(positions, Tensor):
            raise Refused(f"{type(module).__name__}: its RoPE follows the length of a row, in a way unknown here")
        more = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), self.last)], -1)
        if "position_ids" in given:
            return args, {**given, "position_ids": more}
        return (args[0], more, *args[2:]), given


def _without_last(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    """The hook that drops the outputs [..., T, D] of the position that `_Further` appended."""
    return out[..., :-1, :] if isinstance(out, Tensor) else tuple(x[..., :-1, :] for x in out)
