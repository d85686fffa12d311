"""Pipeline parallelism: every rank of a group holds some of a model's layers, and the states of a pass run through them
in turn.

The base model runs as it is written, from the embeddings of its tokens or, after the first stage, from the received
states. A layer of another stage is replaced by a module without parameters that returns its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.errors import Refused


class Elsewhere(nn.Module):
    """The replacement for a layer that another stage holds: without parameters, it returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if not name.startswith("_")})

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


def owners(model: Any, stages: Sequence[range]) -> dict[str, int]:
    """Return the stage of each parameter and buffer of a causal LM, by name; for tied embeddings, which two stages
    hold, the first. stages: the layers of each stage. Raise ValueError if the model cannot be cut into stages."""
    base, last = model.base_model, len(stages) - 1
    what = f"parallel.pipeline={len(stages)}: {type(model).__name__}"
    before, behind = _around_the_layers(model, what)
    stage_of: dict[int, int] = {}
    parts = [(base.get_submodule(name), 0) for name in before]
    parts += [(base.layers[i], stage) for stage, layers in enumerate(stages) for i in layers]
    parts += [(base.get_submodule(name), last) for name in behind] + [(model.get_output_embeddings(), last)]
    for module, stage in parts:
        for p in module.parameters():
            stage_of.setdefault(id(p), stage)
    found = dict(model.named_parameters(remove_duplicate=False))
    unknown = [name for name, p in found.items() if id(p) not in stage_of]
    unknown += [f"layers.{name}" for name, _ in base.layers.named_buffers()]
    if unknown:
        raise Refused(f"{what} cannot be cut into stages here: its plan does not name {unknown[0]}; {_FIX}")
    return {name: stage_of[id(p)] for name, p in found.items()} | {name: 0 for name, _ in model.named_buffers()}


_FIX = "use parallel.pipeline=1"


def _around_the_layers(model: Any, what: str) -> tuple[list[str], list[str]]:
    """Return the names of the base model's modules before and after its layers, from transformers' pipeline plan. Raise
    ValueError if there is no such plan."""
    plan = list(getattr(type(model.config.get_text_config()), "base_model_pp_plan", None) or {})
    if "layers" not in plan or "layers" not in model.base_model._modules:
        raise Refused(f"{what} cannot be cut into stages here: transformers has no plan for its layers; {_FIX}")
    at = plan.index("layers")
    return plan[:at], plan[at + 1 :]


def cut(model: Any, heads: nn.Module | None, stage: int, stages: Sequence[range]) -> None:
    """Remove from a model, and from the heads that are trained on it, the parts that this stage does not hold. The
    first stage has the embeddings, the last one the last norm and the heads; tied embeddings are on both."""
    base, last, mine = model.base_model, stage == len(stages) - 1, stages[stage]
    before, behind = _around_the_layers(model, type(model).__name__)
    for i, layer in enumerate(base.layers):
        if i not in mine:
            base.layers[i] = Elsewhere(layer)
    embeddings, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = lm_head.weight is embeddings.weight
    dropped = [] if stage == 0 or (last and tied) else [base.get_submodule(name) for name in before]
    if not last:
        dropped += [heads] if heads is not None else []
        dropped += [] if stage == 0 and tied else [lm_head]
        for name in behind:
            setattr(base, name, nn.Identity())
    for module in (part for top in dropped for part in top.modules()):
        module._parameters.update(dict.fromkeys(module._parameters))


def one_forward_one_backward(stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """Yield (True for forward or False for backward, index of the pass) in the order in which this stage runs `count`
    passes: backward pass i - n follows forward pass i, where n is the number of later stages."""
    ahead = stages - 1 - stage
    for i in range(count + ahead):
        if i < count:
            yield True, i
        if i >= ahead:
            yield False, i - ahead


@dataclass(slots=True)
class Lane:
    """A connection from a stage to the stage `step` further, in a process group of its own, so that the two directions
    do not wait for each other. A rank sends one tensor at a time; tensors are received in the order in which they were
    sent."""

    group: dist.ProcessGroup
    step: int
    _sent: tuple[Any, Tensor] | None = None

    def send(self, x: Tensor) -> None:
        self.settle()
        x = x.detach().contiguous()
        self._sent = (dist.isend(x, group=self.group, group_dst=self.group.rank() + self.step), x)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(x, group=self.group, group_src=self.group.rank() - self.step)
        return x

    def settle(self) -> None:
        """Wait until the last send has completed."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None
