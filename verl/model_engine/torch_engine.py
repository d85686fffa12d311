"""The model engine of one process: a float32 master model, autocast compute, AdamW. Nothing is sharded.

An engine is composed of its model, as far as this process has it (local_model.py), the passes over micro-batches
(passes.py), the optimizer steps (updates.py) and the state (state.py). This module connects them with offloading, which
moves the state to the device and off it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch
from verl.checkpoint.score import WEIGHT as SCORE_WEIGHT
from verl.checkpoint.score import read_score
from verl.errors import Refused
from verl.model_engine.adapter import load_model
from verl.model_engine.base import EngineCapabilities, EngineContext, Part, StepOutput, WeightPart
from verl.model_engine.lm_head import read_teacher
from verl.model_engine.local_model import LocalModel
from verl.model_engine.offload import Offload
from verl.model_engine.optim import averaged
from verl.model_engine.options import Options
from verl.model_engine.passes import Passes, ReplicaWeights
from verl.model_engine.proof import prove
from verl.model_engine.quantised_parts import load_base
from verl.model_engine.settings import DEFAULTS, DTYPES, EngineSettings
from verl.model_engine.snapshot import Snapshot
from verl.model_engine.state import EngineState
from verl.model_engine.updates import Updates
from verl.models.pictures import shared_pictures
from verl.objective import Term
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.types import Metrics
from verl.wire import FP8, FP8_INPUTS


class TorchEngine:
    """The `ModelEngine` of one process around an instantiated causal LM."""

    def __init__(self, model: Any, settings: EngineSettings = DEFAULTS) -> None:
        self._compose(LocalModel(model, settings), Passes, EngineState)

    def _compose(self, local: LocalModel, passes: type[Passes], state: type[EngineState]) -> None:
        self.local, self.settings, self.device = local, local.settings, local.device
        self.passes, self.updates = passes(local), Updates(local)
        self.model, self.value_head, self.optimizer = local.model, local.value_head, self.updates.optimizer
        self.offload = Offload(self.device, self.settings.offload, self._tensors_of)
        self._state = state(local, self.updates, self.offload)

    def _tensors_of(self, part: Part) -> Sequence[Tensor]:
        return self.local.tensors() if part == "weights" else self.updates.tensors()

    # -- Computes ------------------------------------------------------------------------------------------------------

    def infer(
        self, batch: Batch, columns: Sequence[str], average: bool = False, start: bool = False
    ) -> dict[str, Tensor]:
        parts: tuple[Part, ...] = ("weights", "optimizer") if average else ("weights",)
        as_of = self.local.at_start() if start else nullcontext()
        with self.awake(*parts), averaged(self.optimizer if average else None), as_of:
            # other weights than the rollout's choose their own experts
            return self.passes.infer(replace(batch, routes=None) if average or start else batch, columns)

    def check_packing(self, *, share_prefix: bool) -> float:
        with self.awake("weights"):
            return prove(self.passes, share_prefix=share_prefix)

    def awake(self, *parts: Part) -> AbstractContextManager[None]:
        return self.offload.awake(*parts)

    def take_metrics(self) -> Metrics:
        return {}  # the passes return their metrics

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            shares_prefix=self.settings.share_prefix and self.passes.packed,
            max_tokens_per_microbatch=self.passes.max_tokens,
            outputs=self.passes.possible,
            trains=self.optimizer is not None,
            one_pass=self.device.type == "cpu",
            replays_routes=self.settings.replays_routes,
            notes=self.passes.notes,
        )

    # -- Trains --------------------------------------------------------------------------------------------------------

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int = 0, extra_outputs: Sequence[str] = ()
    ) -> StepOutput:
        assert self.optimizer is not None, "this engine was built without an optimizer"
        with self.awake("weights"):
            self.offload.soon("optimizer")  # for the step that follows these passes
            return self.passes.forward_backward(batch, terms, num_microbatches, extra_outputs)

    def optim_step(self) -> Metrics:
        with self.awake("weights", "optimizer"):
            return self.updates.step(self.passes.last)

    def published(self, version: int) -> None:
        if self.local.lora is not None:
            with self.awake("weights"):
                self.local.gather_factors()
        if self.updates.copies(version):
            with self.awake("weights", "optimizer"):
                self.updates.copy(version)

    @property
    def optimizer_step(self) -> int:
        """The number of optimizer steps so far."""
        return self.updates.steps

    # -- Publishes -----------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.offload.stream(self.local.published())

    def weight_parts(self) -> Iterator[WeightPart]:
        return self.local.weight_parts()

    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str, merged: bool = True) -> list[np.ndarray]:
        with self.awake("weights"), torch.no_grad():
            fp8, inputs = dtype in (FP8, FP8_INPUTS), dtype == FP8_INPUTS
            ids = [torch.from_numpy(one) for one in probes]
            given = torch.bfloat16 if fp8 else DTYPES[dtype]
            form = ReplicaWeights(dtype=given, fp8=fp8, fp8_inputs=inputs, merged=merged)
            found = self.passes.models_own(ids, form)
        return [logprobs.float().numpy() for logprobs in found]

    @property
    def tied(self) -> Mapping[str, str]:
        return self.local.tied

    @property
    def masters(self) -> Mapping[str, Tensor]:
        assert not self.offload.is_away("weights"), "read inside `awake`"
        return self.local.masters()

    # -- Persists ------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        self._state.save(path)

    def load(self, path: Path) -> None:
        with self.awake("weights", "optimizer"):
            self._state.load(path)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        return self.offload.stream(self._state.now().weights())

    @property
    def exported_set(self) -> ParameterSet:
        return POLICY_SET if self.local.lora is None else self.local.lora.parameters

    def snapshot(self) -> Snapshot:
        return self._state.snapshot()

    @property
    def snapshot_bytes(self) -> int:
        return self._state.now().num_bytes


def build(
    options: Options, context: EngineContext, kind: Callable[..., TorchEngine] | None = None, model: Any = None
) -> TorchEngine:
    """Build the engine of a folder. A reward model or critic starts from the score head of the folder, or of the
    adapter of a frozen model, if there is one. Without one a frozen reward model is refused with a ValueError, and a
    trained head starts at 0 (whatever the seed). model: the folder's model, if it is loaded already."""
    c = context
    adapter = c.lora.path if c.lora is not None and c.optim is None else None
    source = c.folder if adapter is None else Path(adapter).expanduser()
    score = read_score(source) if c.head != "lm" else None
    if c.head == "score" and score is None and c.optim is None:
        raise Refused(
            f"{source}: no {SCORE_WEIGHT} in its weights: a language model, not a reward model; train one with verl rm"
        )
    if model is None:
        model = load_model(c) if c.quantisation is None else load_base(c, c.quantisation)
    settings = EngineSettings(
        head=c.head,
        optim=c.optim and replace(c.optim, max_skipped_updates=options.max_skipped_updates),
        dtype=c.dtype,
        head_dtype=c.head_dtype,
        device=c.device,
        max_tokens_per_microbatch=c.max_tokens_per_microbatch,
        attention_mode=options.attention,
        gradient_checkpointing="none" if c.optim is None else c.gradient_checkpointing,
        compile=options.compile,
        share_prefix=options.share_prefix,
        dump_dir=c.dump_dir,
        score=score,
        teacher=None if c.teacher is None else read_teacher(c.teacher),
        top_k=c.top_k,
        longest=c.longest,
        lora=c.lora,
        base=c.folder,
        banned=c.banned,
        freeze=c.freeze,
        replays_routes=c.replays_routes,
        pictures=None if c.media is None else shared_pictures(c.folder, c.media),
        offload=options.offload(trained=c.optim is not None),
    )
    return (kind or TorchEngine)(model, settings)
