"""The protocols of model engines: parallel training of one model. An engine has parallelism and numerics, and no RL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.models.families import Part as ModelPart
from verl.nn.heads import Head
from verl.nn.quant import Kind
from verl.objective import Term
from verl.parameter_set import ParameterSet
from verl.transfer_queue.base import MediaStore
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.model_engine.snapshot import Snapshot

T = TypeVar("T")
Part = Literal["weights", "optimizer"]
"""A part of an engine's state."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a pass over one optimizer step."""

    metrics: Metrics
    """The metrics of the terms."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Model outputs per loss token [L], detached, on the CPU, in the order of the batch."""


class Ranks(Protocol):
    """The group of ranks that train the same model."""

    @property
    def primary(self) -> bool:
        """True for one of the ranks that compute the same rows: it writes and reports the results."""
        ...

    @property
    def rank(self) -> int:
        """The index of this rank among those with rows of their own."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks with rows of their own."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Every rank must call it the same number of times."""
        ...


class OneRank:
    """The ranks of a model that runs in one process: `all_gather` returns the value itself."""

    rank = 0
    world_size = 1
    primary = True

    def all_gather(self, value: T) -> list[T]:
        return [value]


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """The teacher that the output `divergence` of a student is compared with: its hidden states are the column
    `teacher_hidden`."""

    folder: Path
    """The model folder that the head is read from."""
    beta: float
    """The mixture parameter of the divergence (nn/linear_teacher.py)."""
    temperature: float | None = None
    """The temperature of the teacher's logits; None: the sample's."""
    adapter: Path | None = None
    """A LoRA adapter that is added to the teacher's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAt:
    """The server of a frozen model, and the limits of its requests (`served.py`)."""

    url: str
    longest: int
    """The longest row that is sent, in tokens."""
    vocab: int
    """The number of ids that the policy has logits for."""
    texts: tuple[tuple[str, tuple[int, ...]], ...]
    """Texts with the ids that the server's tokenizer must return for them."""
    top: bool = False
    """The server must also return its likeliest ids."""
    timeout_s: float = 120.0
    """The timeout of one request."""
    budget_s: float = 300.0
    """The time for all rows of a call; rows that arrive later are NaN."""
    parallel: int = 32
    """The number of concurrent requests."""
    key: str = field(default="", repr=False)
    """Sent as a bearer token."""
    cache_mb: float = 256.0
    """The size of the cache of answered rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """The arguments from which every backend builds an engine, besides its own options."""

    folder: Path
    """A Hugging Face folder."""
    head: Head = "lm"
    """lm (policy, reference, teacher), value (critic) or score (reward model)."""
    optim: OptimSpec | None = None
    """None for a frozen model."""
    dtype: str = "bfloat16"
    head_dtype: str = "auto"
    """float32: a language-model head multiplies in float32."""
    device: str = "cpu"
    max_tokens_per_microbatch: int = 16384
    gradient_checkpointing: str = "none"
    """none, selective or full: what the layers of a trained model compute again in the backward pass."""
    trust_remote_code: bool = False
    dump_dir: Path | None = None
    """The folder for batches with a non-finite gradient."""
    layout: Layout = field(default_factory=Layout)
    """The arrangement of the ranks that hold the model together."""
    teacher: TeacherHead | None = None
    """The teacher of a student."""
    top_k: int = 0
    """The number of ids that a teacher returns per token."""
    adapter: Path | None = None
    """A LoRA adapter that is added to the weights of a frozen model."""
    longest: int | None = None
    """The longest row of the run in tokens, which fixes RoPE (nn/rope.py); None: the model's maximum."""
    lora: LoraSpec | None = None
    """LoRA factors are trained, and the weights of the folder are frozen; None: all weights are trained."""
    quantisation: Kind | None = None
    """The format of the frozen weights in decoder layers, as bitsandbytes has it; None: float32."""
    freeze: tuple[ModelPart, ...] = ()
    """The parts of a trained model that reads images which are not trained."""
    banned: tuple[int, ...] = ()
    """The ids that have probability 0 in rows that were sampled without them (`Facts.banned`)."""
    replays_routes: bool = False
    """Tokens are computed with the experts that the rollout chose for them (nn/router_replay.py)."""
    media: MediaStore | None = None
    """The content of the images of the rows, for a model that reads images."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A rank's part of a weight."""

    name: str
    """The Hugging Face name."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype
    mine: Callable[[], Tensor] | None
    """Returns the part that this rank delivers, or a view of it with more dimensions, in the same order, so that it is
    copied once (`flat`); None: other ranks deliver the tensor."""
    index: tuple[slice, ...]
    """The position of `mine` in the whole tensor."""

    def flat(self, tensor: Tensor) -> Tensor:
        """Return what `mine` returned, or its conversion, with the dimensions of the part."""
        return tensor.reshape([place.stop - place.start for place in self.index])


def whole_part(name: str, tensor: Tensor) -> WeightPart:
    """Return the part of a rank that holds the whole tensor."""
    whole = tuple(slice(0, size) for size in tensor.shape)
    return WeightPart(name, tuple(tensor.shape), tensor.dtype, tensor.detach, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The abilities of an engine with its model; the driver reads them once at the start."""

    shares_prefix: bool
    max_tokens_per_microbatch: int
    outputs: tuple[str, ...]
    trains: bool
    one_pass: bool
    """A step that fits into one micro-batch needs no separate first pass, since its outputs would be the same."""
    replays_routes: bool = False
    """It computes tokens with the routes of their rollout; other engines are given rows without them."""
    notes: tuple[str, ...] = ()
    """Lines for the user: operations that are computed without a kernel, and why."""


class Computes(Protocol):
    """A model that computes outputs of rows: all that a frozen model needs (reference, teacher, reward model)."""

    def infer(
        self, batch: Batch, columns: Sequence[str], average: bool = False, start: bool = False
    ) -> dict[str, Tensor]:
        """Return the given columns: logprobs, entropy, values, sum_pi_squared [L], or scores [R]. A teacher also has
        hidden [L, H], topk_ids [L, k], topk_logprobs [L, k + 1]; a student logprobs_at [L, k + 1], divergence [L] and
        its figures (nn/linear_teacher.py). average: use the moving average of the weights, if the optimizer keeps
        one · start: use the weights that training started from, which LoRA keeps."""
        ...

    def check_packing(self, *, share_prefix: bool) -> float:
        """Check at start that a pass draws no random numbers, that packed rows do not influence each other, and that a
        padded or packed pass returns the same as the model's own. Return the largest difference; raise ValueError if a
        check fails."""
        ...

    def awake(self, *parts: Part) -> AbstractContextManager[None]:
        """Return a context in which these parts of the state are on the device. After the outermost context the
        offloaded parts are moved away. Each method opens such a context; this one is for several calls in a row."""
        ...

    def take_metrics(self) -> Metrics:
        """Return the metrics that the engine counted by itself since the last call, if there are any."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities: ...


class Trains(Protocol):
    """A model with an optimizer."""

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int = 0, extra_outputs: Sequence[str] = ()
    ) -> StepOutput:
        """Add the gradient of sum over terms of sum(w * value). `batch` is this rank's share of ONE optimizer step.

        num_microbatches: the number of passes, the same on every rank; 0: as the token budget requires. The outputs
        that terms name, and the extra ones, are columns of the result."""
        ...

    def optim_step(self) -> Metrics:
        """Clip the gradient and do an optimizer step; a gradient that is not finite never changes the weights. Return
        metrics."""
        ...

    def published(self, version: int) -> None:
        """Record that the present weights are this version. A lagging copy of them (`OptimSpec`) is updated if it is
        due, once per version, also if a resumed run publishes its version again. All ranks call this before they read
        the tensors of `weight_parts`, and exchange here what these depend on."""
        ...


class Publishes(Protocol):
    """The source of the weights of one parameter set, as the sender of a publish reads it."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) with bounded memory; tied tensors once."""
        ...

    def weight_parts(self) -> Iterator[WeightPart]:
        """Yield this rank's part of every tensor of `weights`, in their order, on every rank, without any exchange
        between ranks. The parts of all ranks cover each tensor once. Their tensors are valid inside `awake`, until the
        weights change."""
        ...

    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False) -> dict[str, Tensor]:
        """Return the columns logprobs and entropy as `Computes.infer` does, with the weights that are published."""
        ...

    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str, merged: bool = True) -> list[np.ndarray]:
        """Return log-probs [t-1] of ids[1:] of each probe [t] by the model's own forward pass with its weights in
        `dtype`, as a rollout engine computes them: the difference from `infer` is rounding. dtype: also `FP8` of
        `verl/wire.py` (bfloat16, the projections in blocks of 8 bits) and `FP8_INPUTS` (their inputs too) · merged:
        LoRA factors are added to the weights, not to the outputs."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """The tied tensors: for each, the name under which it is delivered."""
        ...

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The trained tensors by the engine's own names; in a sharded engine the parts of this rank."""
        ...


class Persists(Protocol):
    """A model with a state that is saved, and from which a run continues."""

    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters of all ranks into the folder `path`; any number of ranks can load
        them."""
        ...

    def load(self, path: Path) -> None:
        """Restore the state that `save` wrote. Raise ValueError if the folder is of another model."""
        ...

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the folder that other programs load: the weights as `Publishes.weights` does, or the
        LoRA factors by PEFT's names."""
        ...

    @property
    def exported_set(self) -> ParameterSet:
        """The set of the tensors that `exported` yields."""
        ...

    def snapshot(self) -> Snapshot:
        """Return a copy of the state on the host: another thread can save it, and export its weights, while training
        continues. One is saved at a time."""
        ...

    @property
    def snapshot_bytes(self) -> int:
        """The size of this rank's part of a snapshot."""
        ...


class ModelEngine(Computes, Trains, Publishes, Persists, Protocol):
    """The model engine of one rank. Policy, critic and reward model differ by head. A frozen model needs `Computes`
    only."""
