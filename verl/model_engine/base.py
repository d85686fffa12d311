"""Model engines: parallel training of one model. They know parallelism and numerics, not RL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from verl.batch import Batch
from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec
from verl.nn.heads import Head
from verl.objective import Term
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.model_engine.snapshot import Snapshot

T = TypeVar("T")
Part = Literal["weights", "optimizer"]
"""Of an engine's state."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Metrics of the terms, and the model outputs of this pass per loss token [L] (detached, on the CPU, batch
    order)."""

    metrics: Metrics
    columns: Mapping[str, Tensor] = field(default_factory=dict)


class Ranks(Protocol):
    """What a rank knows of the others that train the same model: `rank` of `world_size` that have rows of their own.
    primary: of the ranks that compute the same rows, this one writes and reports what came of them."""

    @property
    def primary(self) -> bool: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order. Every rank must call it the same number of times."""
        ...


class OneRank:
    """A group of one."""

    rank = 0
    world_size = 1
    primary = True

    def all_gather(self, value: T) -> list[T]:
        return [value]


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """Whom the output `divergence` of a student compares with: the head of the model in `folder`, whose hidden states
    are the column `teacher_hidden`. beta: see nn/linear_teacher.py · temperature: of its logits; None: the sample's
    · adapter: in its weights."""

    folder: Path
    beta: float
    temperature: float | None = None
    adapter: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAt:
    """Where a frozen model is served (`served.py`). longest: row that it will be asked for, in tokens · vocab: ids that
    the policy has logits of · texts: with the ids that its tokenizer must read them as · top: it names its likeliest
    tokens too · timeout_s: of one answer · budget_s: for all rows of a call; the others have no number then · parallel:
    requests at once · key: sent as a bearer token · cache_mb: of what it said of rows."""

    url: str
    longest: int
    vocab: int
    texts: tuple[tuple[str, tuple[int, ...]], ...]
    top: bool = False
    timeout_s: float = 120.0
    budget_s: float = 300.0
    parallel: int = 32
    key: str = field(default="", repr=False)
    cache_mb: float = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What every backend builds an engine from, besides its own options. `folder`: a Hugging Face folder · head: lm
    (policy, reference, teacher), value (critic) or score (reward model) · optim: None for a frozen model · dump_dir:
    where a batch with a non-finite gradient is written · layout: of the ranks that hold the model together · teacher:
    of a student · top_k: how many ids a teacher names · adapter: of a frozen model, which is in the weights of the
    folder · longest: row of the run, in tokens, by which RoPE is fixed (nn/rope.py); None: the model's positions."""

    folder: Path
    head: Head = "lm"
    optim: OptimSpec | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    max_tokens_per_microbatch: int = 16384
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    dump_dir: Path | None = None
    layout: Layout = field(default_factory=Layout)
    teacher: TeacherHead | None = None
    top_k: int = 0
    adapter: Path | None = None
    longest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do with the model it holds; asked once at start, and obeyed."""

    shares_prefix: bool
    max_tokens_per_microbatch: int
    outputs: tuple[str, ...]
    trains: bool
    one_pass: bool
    """A step that fits into one micro-batch needs no first pass: its outputs are the same in both."""


@runtime_checkable
class Counts(Protocol):
    """An engine that counts what it does."""

    def take_metrics(self) -> Metrics: ...


class ModelEngine(Protocol):
    """One per rank. Policy, critic and reward model differ by head."""

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int = 0, extra_outputs: Sequence[str] = ()
    ) -> StepOutput:
        """Add the gradient of sum over terms of sum(w * value). `batch` is this rank's share of ONE optimizer step.

        num_microbatches: exactly so many passes, the same number on every rank; 0: as the token budget makes them. The
        outputs that terms name, and the extra ones, come back in the columns of the result."""
        ...

    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False) -> dict[str, Tensor]:
        """logprobs, entropy, values, sum_pi_squared [L], or scores [R]: only what is asked. Of a teacher hidden [L, H],
        topk_ids [L, k], topk_logprobs [L, k + 1]; of a student logprobs_at [L, k + 1], divergence [L] and its figures
        (nn/linear_teacher.py). average: of the weights' moving average, where the optimizer keeps one."""
        ...

    def optim_step(self) -> Metrics:
        """Clip and step; a non-finite gradient never reaches the weights."""
        ...

    def published(self, version: int) -> None:
        """The weights as they are now become this version: a copy of them that lags (`OptimSpec`) is taken anew where
        it is due, once, though a run that goes on publishes its version again."""
        ...

    def weights(self, kind: Literal["full", "adapter", "merged"] = "full") -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor) with bounded memory; tied tensors once."""
        ...

    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters of all ranks into the folder `path`; any number of ranks can load
        them."""
        ...

    def snapshot(self) -> Snapshot:
        """A copy of the state as it is now, on the host: another thread can save it, and export its weights, while
        training goes on. One is saved at a time."""
        ...

    @property
    def snapshot_bytes(self) -> int:
        """What this rank's part of a snapshot takes."""
        ...

    def load(self, path: Path) -> None:
        """Continue as `save` left it. ValueError if the folder is of another model."""
        ...

    def check_packing(self, *, share_prefix: bool) -> float:
        """Prove at start that a pass draws no random numbers, that packed rows do not leak into each other, and that a
        padded or packed pass gives what the model's own does; ValueError where it does not."""
        ...

    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
        """Log-probs [t-1] of ids[1:] of each probe [t] by the model's own forward pass with its weights in
        `dtype`, as a rollout engine computes them: what they differ by from `infer` is rounding."""
        ...

    def awake(self, *parts: Part) -> AbstractContextManager[None]:
        """Inside, these parts of the state are on the device. Behind the outermost one, what the engine offloads is
        not; each of its methods is inside one of its own, so this is for several calls that belong together."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """{name: the name its tensor is delivered under} of tied tensors."""
        ...

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The trained tensors by the engine's own names; of a sharded engine what this rank holds of them."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def optimizer_step(self) -> int: ...
