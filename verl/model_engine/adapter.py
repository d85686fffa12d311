"""LoRA adapters added to the weights of their base, W + scale * B A, for the parts of each tensor that this rank
has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from verl.config.adapter import WEIGHTS, AdaptedWeight, read_adapter
from verl.config.model_files import SCORE
from verl.errors import Refused
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_parts import part_and_place
from verl.model_engine.quantised_parts import load_dequantised
from verl.nn.expert_lora import from_peft


def load_model(context: EngineContext) -> Any:
    """Load the whole causal LM of the context's folder, with its adapter added."""
    c = context
    model = load_dequantised(c.folder, trust_remote_code=c.trust_remote_code, needs_lm_head=c.head == "lm")
    if c.adapter is not None:
        open_adapter(c.adapter, c.folder, model).add(dict(model.named_parameters()))
    return model


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in a file."""

    file: Path
    """The safetensors file."""
    parts: Mapping[str, AdaptedWeight]
    """The tensors of the file by the name of the weight that they change."""
    turned: Collection[str] = ()
    """The names of the weights that are stored as [in, out]."""

    @torch.no_grad()
    def add(self, into: Mapping[str, Tensor]) -> None:
        """Add the adapter to these tensors, given by their names in the model, in place."""
        with safe_open(self.file, "pt") as file:
            for name in self.parts.keys() & into.keys():
                part, (mine, index) = self.parts[name], part_and_place(into[name])
                if mine.numel() and part.whole:
                    mine.copy_(file.get_slice(part.whole)[index])
                if mine.numel() and part.experts:
                    a, b = from_peft(file.get_tensor(part.a).to(mine), file.get_tensor(part.b).to(mine), part.experts)
                    for one, e in zip(mine, range(part.experts)[index[0]], strict=True):
                        one.add_((b[e] @ a[e])[index[1:]], alpha=part.scale)
                elif mine.numel() and part.a:
                    rows, columns = index[::-1] if name in self.turned else index
                    b, a = file.get_slice(part.b)[rows].to(mine), file.get_slice(part.a)[:, columns].to(mine)
                    mine.add_((b @ a).T if name in self.turned else b @ a, alpha=part.scale)

    def after(self, fill: Callable[[Mapping[str, Tensor]], None]) -> Callable[[Mapping[str, Tensor]], None]:
        """Return a function that fills tensors from the base's folder and then adds the adapter."""

        def both(into: Mapping[str, Tensor]) -> None:
            fill(into)
            self.add(into)

        return both


def open_adapter(folder: Path, base: Path, model: Any, *, head: bool = False) -> Adapter:
    """Open an adapter of a model, which may be without storage. head: it may have the head of a reward model, which
    this model has not. Raise ValueError for an adapter of another model."""
    from transformers.pytorch_utils import Conv1D

    parts, names = read_adapter(folder, base, head=head), {name for name, _ in model.named_parameters()}
    if strange := sorted(parts.keys() - names - {SCORE if head else None}):
        raise Refused(f"{folder}: an adapter of {strange[0]}, which is no weight of {type(model).__name__}")
    turned = {name for name in parts.keys() & names if isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)}
    return Adapter(folder / WEIGHTS, parts, turned)
