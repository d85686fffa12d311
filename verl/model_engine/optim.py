"""The settings of an optimizer, its learning-rate schedule, and averages of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version

from verl.errors import Refused
from verl.model_engine.optimizer_table import LR

SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSpec:
    """The settings of an optimizer, of its learning rate schedule and of clipping."""

    lr: float
    name: str = "adamw"
    """A row of optimizer_table.py."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of that row, and learning rates of roles."""
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    decay_ratio: float = 0.2
    min_lr_ratio: float = 0.0
    max_skipped_updates: int = 3
    average: float = 0.0
    """0: none. Below 2: the decay per optimizer step of a moving average of the weights, kept beside the moments. From
    2 on: a copy of the weights in place of an average, renewed at every `average`-th publish."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise Refused(f"optim.schedule={self.schedule!r}: one of {', '.join(SCHEDULES)}")
        if self.schedule != "constant" and not self.total_steps:
            raise Refused(f"optim.schedule={self.schedule} needs the number of optimizer steps; set run.total_steps")


def without_rates(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer without the learning rates of roles."""
    return {key: value for key, value in options.items() if key != LR}


def learning_rate(spec: OptimSpec, step: int) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first). Warm-up is linear from lr/(warmup+1), never
    0."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / (spec.warmup_steps + 1)
    if spec.schedule == "constant":
        return spec.lr
    assert spec.total_steps is not None
    span = max(1, spec.total_steps - spec.warmup_steps)
    done = min(1.0, (step - spec.warmup_steps) / span)
    shapes = {
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "wsd": min(1.0, (1 - done) / spec.decay_ratio),  # warm-up, stable, linear decay over the last share
    }
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * shapes[spec.schedule])


class Steps(Protocol):
    """An optimizer, as the functions of this module use it."""

    state: Any
    """The states of each parameter by name."""
    param_groups: list[dict[str, Any]]

    def step(self) -> Any: ...


AVERAGE = "average"


@torch.no_grad()
def step(optimizer: Steps, average: float) -> None:
    """Do an optimizer step, then update the average: decay x average + (1 - decay) x weights. It starts as the weights
    before the first step. A copy (`OptimSpec.average` from 2 on) is not updated."""
    decay = min(average, 1.0)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    first = {p: p.clone() for p in every if AVERAGE not in optimizer.state.get(p, {})} if average else {}
    optimizer.step()
    increment_version(every)  # the fused kernel does not count its writes; a copy of the weights relies on the count
    for p in every if average else ():
        if state := optimizer.state.get(p, {}):  # a parameter that has had no gradient yet equals its average
            state.setdefault(AVERAGE, first.get(p)).lerp_(p, 1 - decay)


@torch.no_grad()
def copy_anew(optimizer: Steps | None) -> None:
    """Replace the averages of the parameters by their present values."""
    for p, state in optimizer.state.items() if optimizer else ():
        if AVERAGE in state:
            state[AVERAGE].copy_(p)


@contextmanager
def averaged(optimizer: Steps | None) -> Iterator[None]:
    """Inside the context the parameters have the values of their averages, if they have one."""
    found = [(p, s[AVERAGE]) for p, s in (optimizer.state.items() if optimizer else ()) if AVERAGE in s]
    with torch.no_grad():
        kept = [p.clone() for p, _ in found]
        for p, average in found:
            p.copy_(average)
    try:
        yield
    finally:
        with torch.no_grad():
            for (p, _), weights in zip(found, kept, strict=True):
                p.copy_(weights)


def grad_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the 2-norm of all gradients together, 0-d float32."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(grads, norm_type=2.0)
