"""A LoRA adapter in the weights of its base, W + scale * B A: of each tensor in what this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from verl.config.adapter import WEIGHTS, AdaptedWeight, read_adapter
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.hf_parts import part_and_place


def load_model(context: EngineContext) -> Any:
    """The causal LM of the folder, whole, with its adapter in it."""
    c = context
    model = load_causal_lm(c.folder, trust_remote_code=c.trust_remote_code, needs_lm_head=c.head == "lm")
    if c.adapter is not None:
        open_adapter(c.adapter, c.folder, model).add(dict(model.named_parameters()))
    return model


@dataclass(frozen=True, slots=True)
class Adapter:
    """turned: the weights that are [in, out]."""

    file: Path
    parts: Mapping[str, AdaptedWeight]
    turned: Collection[str] = ()

    @torch.no_grad()
    def add(self, into: Mapping[str, Tensor]) -> None:
        """To these tensors of the model, by its names."""
        with safe_open(self.file, "pt") as file:
            for name in self.parts.keys() & into.keys():
                part, (mine, index) = self.parts[name], part_and_place(into[name])
                if mine.numel() and part.whole:
                    mine.copy_(file.get_slice(part.whole)[index])
                if mine.numel() and part.a:
                    rows, columns = index[::-1] if name in self.turned else index
                    b, a = file.get_slice(part.b)[rows].to(mine), file.get_slice(part.a)[:, columns].to(mine)
                    mine.add_((b @ a).T if name in self.turned else b @ a, alpha=part.scale)

    def after(self, fill: Callable[[Mapping[str, Tensor]], None]) -> Callable[[Mapping[str, Tensor]], None]:
        """What fills tensors from the base's folder, and then adds to them."""

        def both(into: Mapping[str, Tensor]) -> None:
            fill(into)
            self.add(into)

        return both


def open_adapter(folder: Path, base: Path, model: Any) -> Adapter:
    """Of a model, which may be without storage; ValueError for an adapter that is not of it."""
    from transformers.pytorch_utils import Conv1D

    parts, names = read_adapter(folder, base), {name for name, _ in model.named_parameters()}
    if strange := sorted(parts.keys() - names):
        raise ValueError(f"{folder}: an adapter of {strange[0]}, which is no weight of {type(model).__name__}")
    turned = {name for name in parts if isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)}
    return Adapter(folder / WEIGHTS, parts, turned)
