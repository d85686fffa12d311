"""The model engine of one rank on Megatron-Core: tensor ranks (with its sequence parallelism), pipeline stages (1F1B,
also of several chunks in turn), expert ranks, data ranks, and its distributed optimizer.

What is computed is that of the other engines: terms, weights and the one division are theirs, log-probs are those of
nn/linear_logprob.py over the slices of the vocabulary. Without Transformer Engine Megatron's attention reads padded
rows, so every row of a pass is padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.batch import Batch, exactly, padded_rows, select_rows, unshare, without_weight
from verl.errors import Refused
from verl.model_engine.adapter import open_adapter
from verl.model_engine.base import EngineContext, StepOutput
from verl.model_engine.hf_parts import open_skeleton
from verl.model_engine.layout import Layout
from verl.model_engine.lm_head import LM_OUTPUTS, store_outputs
from verl.model_engine.megatron_exchange import exchange_of_chunks
from verl.model_engine.megatron_model import MegatronModel
from verl.model_engine.megatron_optimizer import MegatronState, MegatronUpdates
from verl.model_engine.megatron_options import Options
from verl.model_engine.megatron_routes import MegatronRoutes
from verl.model_engine.megatron_shims import check_version, computing_on
from verl.model_engine.objective import reduce_terms
from verl.model_engine.offload import Offload
from verl.model_engine.options import Options as TorchOptions
from verl.model_engine.passes import TOKEN_OUTPUTS, VALUE_OUTPUTS
from verl.model_engine.pending import Pending, read_pending
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sharded import Fill, ShardedPasses
from verl.model_engine.torch_engine import TorchEngine
from verl.model_engine.torch_engine import build as build_torch
from verl.nn.precision import rounded
from verl.objective import Term

Read = Callable[[np.ndarray, Batch], Any]
"""Reads the outputs of a micro-batch, on the last stage: (its rows, its batch) -> what the schedule gets."""
PASS_TOKENS = 128
"""The cost of a pass besides its tokens, as a number of tokens: more passes are narrower, and pad less."""
PADDED = "model.engine=megatron: without Transformer Engine rows are padded to the longest of a pass"


class MegatronPasses(ShardedPasses):
    """The passes of a rank, in Megatron's schedule. All stages return the results of the last one."""

    local: MegatronModel

    def __init__(self, local: MegatronModel, updates: MegatronUpdates, notes: Sequence[str] = ()) -> None:
        settings = local.settings
        self.local, self._updates, self._layout, self._precision = local, updates, local.layout, settings.precision
        self.compute = self._precision.compute
        self.notes = (PADDED, *notes)
        self.max_tokens, self.packed, self._top_k = settings.max_tokens_per_microbatch, False, settings.top_k
        self.possible = LM_OUTPUTS if settings.head == "lm" else VALUE_OUTPUTS
        self._copy, self._vision, self.compiled, self._logit_cap = None, None, None, 0.0
        self.models_attention = local.model.config._attn_implementation or "eager"
        self._routes = MegatronRoutes(local) if settings.replays_routes else None
        self._teacher = settings.teacher and settings.teacher.moved_to(
            local.device, self.compute, rounds=self._precision.rounds
        )
        self.last: tuple[Batch, tuple[str, ...]] | None = None
        self._came: tuple[Tensor, Tensor, Tensor] | None = None  # states [s, b, h], mask and order of the padded rows

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int, extra_outputs: Sequence[str]
    ) -> StepOutput:
        self.last = (batch, tuple(t.name for t in terms))
        wanted = tuple(dict.fromkeys([*(name for t in terms for name in t.outputs), *extra_outputs]))
        assert set(wanted) <= set(TOKEN_OUTPUTS), f"{wanted}: a loss is of outputs per token, {TOKEN_OUTPUTS}"
        pending: list[Pending] = []
        found: list[tuple[np.ndarray, dict[str, Tensor]]] = []

        def read(rows: np.ndarray, part: Batch) -> tuple[Tensor, Tensor, None]:
            outputs = self._outputs(part, wanted)
            loss, metrics = reduce_terms(terms, part, outputs)
            if len(rows):
                pending.append(metrics)
                found.append((rows, {name: value.detach() for name, value in outputs.items()}))
            return loss.float(), torch.ones((), dtype=torch.int, device=loss.device), None

        self._updates.begin_gradient()
        self._run_schedule(batch, self.cuts(batch, num_microbatches), read)
        kept = self._room(batch, wanted)
        for rows, detached in found:
            store_outputs(kept, detached, batch, rows)
        metrics = [read_pending(pending)]
        dist.broadcast_object_list(metrics, group=self.local.column, group_src=self.local.last_stage)
        return StepOutput(metrics[0] | self._replayed(batch), self._on_all_stages(kept))

    @torch.no_grad()
    def infer(self, batch: Batch, columns: Sequence[str]) -> dict[str, Tensor]:
        out = self._room(batch, columns)

        def read(rows: np.ndarray, part: Batch) -> None:
            found = self._outputs(part, columns)
            if len(rows):
                store_outputs(out, found, batch, rows)

        self._run_schedule(batch, self.cuts(batch), read, trains=False)
        return self._on_all_stages(out)

    @torch.no_grad()
    def policy_outputs(self, batch: Batch) -> dict[str, Tensor]:
        logprobs = torch.empty(batch.num_loss_tokens, dtype=self._precision.master)

        def read(rows: np.ndarray, part: Batch) -> None:
            found = self._lm_outputs(part, ("logprobs",))["logprobs"]
            if len(rows):
                logprobs.copy_(found)

        self._run_schedule(batch, [np.arange(batch.num_rows)], read, trains=False, exact=True)
        return self._on_all_stages({"logprobs": logprobs})

    def cuts(self, batch: Batch, count: int = 0) -> list[np.ndarray]:
        """Return the rows of each pass, so that they fit into the token budget when they are padded, and little is
        padded. Every rank has as many passes as the rank that needs most, whatever `count`; some may have no row."""
        longest = row_lengths(batch)
        whole: dict[int, list[int]] = {}
        for row in range(batch.num_rows):
            whole.setdefault(int(batch.sequence[row]), []).append(row)
        ordered = sorted(whole.values(), key=lambda rows: -max(longest[rows]))  # rows of a trajectory stay together
        widths, counts = [max(longest[rows]) for rows in ordered], [len(rows) for rows in ordered]
        cut = least_padding(widths, counts, self.max_tokens)
        parts = [np.sort(np.concatenate([np.array(rows, np.int64) for rows in ordered[of]])) for of in cut]
        most = torch.tensor(len(parts), device=self.local.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return exactly(parts, int(most))

    def _run_schedule(
        self, batch: Batch, parts: Sequence[np.ndarray], read: Read, *, trains: bool = True, exact: bool = False
    ) -> None:
        """Run all passes in Megatron's schedule, and their backward passes if `trains`. On the last stage `read` is
        called for each pass. exact: with the weights as they are, not rounded."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(every: Iterator[tuple[int, np.ndarray]], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            number, rows = next(every)
            part = select_rows(batch, rows) if len(rows) else without_weight(shortest)
            ids, place, origin = self._padded(part)
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            replay = self._routes and self._routes.replaying(number, part, place, trains=trains)
            with self._autocast(), replay or nullcontext():
                states = chunk(ids, positions, None, output_processor=_states)

            def reduced(states: Tensor, non_loss_data: bool = False) -> Any:
                self._came = states, place, origin
                try:
                    return read(rows, part)
                finally:
                    self._came = None

            return states.contiguous(), reduced

        if self._routes is not None:
            self._routes.accept(batch)
        chunks = [*(self._updates.wrapped if trains else self.local.chunks)]
        several = len(chunks) > 1
        if several:  # as many passes as Megatron's order of chunks wants
            parts = exactly([*parts], len(parts) + -len(parts) % self._layout.pipeline)
        lengths = row_lengths(batch)
        passes = [iter([(number, rows) for rows in parts]) for number in range(len(chunks))]
        shortest = select_rows(batch, lengths.argsort()[:1])  # of a pass that another rank has and this one has not
        none: dict[str, Any] = {}
        with (
            nullcontext() if exact else self._compute_weights(),
            computing_on(self.local.device),
            exchange_of_chunks(self.local.megatron) if several else nullcontext(none) as exchange,
        ):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=passes if several else passes[0],
                model=chunks,
                num_microbatches=len(parts),
                seq_length=int(lengths.max(initial=1)),
                micro_batch_size=1,  # of shapes that differ: each pass sends its own
                forward_only=not trains,
                collect_non_loss_data=not trains,
                **exchange,
            )
        if self._routes is not None:
            self._routes.check()

    def _padded(self, part: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return padded ids [B, W], the mask of tokens [B, W], and the order of the tokens of the part [T] in it."""
        ids, place, origin = padded_rows(part)
        more = (0, -ids.shape[1] % self._layout.tensor)  # tensor ranks share the positions
        ids, place = nn.functional.pad(ids, more), nn.functional.pad(place, more)
        device = self.local.device
        return ids.to(device), place.to(device), origin.to(device)

    def _hidden(self, batch: Batch) -> Tensor:
        """Return the states [T, H] of the tokens of a pass. The gradients of the tensor ranks are summed for a head of
        which each has a slice, and are the same for a head that each has whole."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        assert self._came is not None
        states, place, origin = self._came
        if self._layout.tensor > 1:
            sliced = self.local.value_head is None
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=sliced)
        return states.transpose(0, 1)[place].index_select(0, origin)

    def _head(self) -> tuple[Tensor, None]:
        return self.local.head_weight(), None

    def _run(self, fn: Callable[..., dict[str, Tensor]], batch: Batch, *args: Any) -> dict[str, Tensor]:
        return fn(batch, *args)

    def _on_all_stages(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the results of the last stage to all stages, in place, and return them."""
        for values in found.values() if self._layout.pipeline > 1 else ():
            sent = values.to(self.local.device)
            dist.broadcast(sent, group=self.local.column, group_src=self.local.last_stage)
            values.copy_(sent)
        return found

    @contextmanager
    def _compute_weights(self) -> Iterator[None]:
        """Round all weights but the value head, as the engine of one process does."""
        named = self.local.parameters.items()
        weights = [p for name, p in named if not name.startswith("value_head.")]
        with rounded(weights, self._precision.dtype) if self._precision.rounds else nullcontext():
            yield


def least_padding(widths: Sequence[int], counts: Sequence[int], budget: int) -> list[slice]:
    """Return the parts of groups of rows that cost least when each part is padded to its first group, the widest, and
    has at most `budget` tokens then. widths: the tokens of the longest row of each group, falling · counts: its rows"""
    wide, ends = np.array(widths, np.int64), np.cumsum([0, *counts])
    best, first = np.zeros(len(wide) + 1), np.zeros(len(wide) + 1, np.int64)
    for end in range(1, len(wide) + 1):
        padded = (ends[end] - ends[:end]) * wide[:end]
        fits = padded <= budget
        fits[-1] = True  # a group that is too large is a part alone
        costs = np.where(fits, best[:end] + padded + PASS_TOKENS, np.inf)
        first[end] = costs.argmin()
        best[end] = costs[first[end]]
    found, end = list[slice](), len(wide)
    while end:
        found.append(slice(int(first[end]), end))
        end = int(first[end])
    return found[::-1]


def row_lengths(batch: Batch) -> np.ndarray:
    """Return the tokens of each row, with those that it shares."""
    found: np.ndarray = np.diff(unshare(batch).seg_start)
    return found


def _states(hidden_states: Tensor, **_: object) -> Tensor:
    """Return the states [s, b, h] in place of logits: the log-probs are computed from them without [tokens, vocab]."""
    return hidden_states


class MegatronEngine(TorchEngine):
    """The `ModelEngine` of one rank. The arguments are those of `MegatronModel`, Megatron's options, and lines that the
    run prints once."""

    local: MegatronModel

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        *,
        options: Options,
        layout: Layout,
        fill: Fill,
        notes: Sequence[str] = (),
    ) -> None:
        if torch.device(settings.device).type != "cuda" and settings.emulate_bf16 is None:
            # Megatron's backward of a split matrix multiplies float32 by bfloat16, which a CPU refuses
            settings = replace(settings, emulate_bf16=True)
        local = MegatronModel(model, settings, layout, options, fill)
        self.local, self.settings, self.device = local, settings, local.device
        self.updates = MegatronUpdates(local, distributed=options.distributed_optimizer)
        self.passes = MegatronPasses(local, self.updates, notes)
        self.model, self.value_head, self.optimizer = local.model, local.value_head, self.updates.optimizer
        self.offload = Offload(self.device, settings.offload, self._tensors_of)
        local.seen = partial(self.offload.on_host, copy=False)
        self._state = self._megatron_state = MegatronState(local, self.updates, self.offload)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.local.delivered(name, t)) for name, t in self.local.exported())

    @property
    def snapshot_bytes(self) -> int:
        return self._megatron_state.num_bytes


def build(options: Options, context: EngineContext) -> TorchEngine:
    """Build this rank's engine of a folder, of which it reads its part. Raise Refused if Megatron-Core is missing or
    another version, or if the model or the layout is not one that this engine has."""
    of_python = check_version()
    c = context
    if not dist.is_initialized():
        raise Refused("model.engine=megatron wants several ranks: set cluster.backend=ray, cluster.ranks_per_node=2")
    trusted = c.trust_remote_code
    found = open_skeleton(c.folder, trust_remote_code=trusted, needs_lm_head=c.head == "lm")
    if found is None:
        raise Refused(f"model.path={c.folder}: model.engine=megatron reads safetensors files, and there are none")
    fill = open_adapter(c.adapter, c.folder, found.model).after(found.fill) if c.adapter else found.fill
    notes = (of_python,) if of_python else ()
    kind = partial(MegatronEngine, options=options, layout=c.layout, fill=fill, notes=notes)
    given = TorchOptions(
        attention="padded",
        share_prefix=False,
        max_skipped_updates=options.max_skipped_updates,
        offload_weights=options.offload_weights,
        offload_optimizer=options.offload_optimizer,
        offload_frozen=options.offload_frozen,
    )
    return build_torch(given, c, kind, model=found.model)
