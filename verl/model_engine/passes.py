"""Passes of a model over micro-batches: outputs, and the gradients of a loss.

A micro-batch is one packed forward pass (nn/attention.py); the padded path, one row per sequence, is the reference to
which it is compared. A CPU that only emulates bf16 computes in float32 with weights rounded to bf16, which is more
exact and faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verl.accel.families import FUSED_TYPES
from verl.accel.transfer import to_device
from verl.batch import Batch, exactly, make_microbatches, padded_rows, part_of, select_rows, unshare
from verl.errors import Refused
from verl.media_tokens import MediaTokens
from verl.model_engine.base import StepOutput
from verl.model_engine.compute_copy import ComputeCopy
from verl.model_engine.lm_head import LM_OUTPUTS, allocate_outputs, lm_outputs, store_outputs
from verl.model_engine.local_model import LocalModel
from verl.model_engine.objective import reduce_terms, trained_rows
from verl.model_engine.pending import Pending, read_pending
from verl.model_engine.sharded_copy import ShardedCopy
from verl.models.families import family_of
from verl.models.multimodal import layer_embeddings
from verl.nn import attention
from verl.nn.compiled import CompiledLayers
from verl.nn.delta_net import StatePlan, plan_states, route_delta_nets
from verl.nn.deterministic import setting_restored
from verl.nn.fp8 import RoundedInputs, as_computed, in_blocks
from verl.nn.fused import fuse, unfuse
from verl.nn.kernel_notes import training_notes
from verl.nn.linear_teacher import HeadWeights
from verl.nn.precision import computing_in, rounded, rounded_weight
from verl.nn.quant_linear import computing_with, quantised_layers
from verl.nn.router_replay import RouterReplay
from verl.nn.vision import Vision
from verl.objective import Term
from verl.types import NO_ROUTE, Metric, Metrics

NO_ARGUMENTS: Mapping[str, Tensor] = MappingProxyType({})
VALUE_OUTPUTS = ("values", "scores")
TOKEN_OUTPUTS = (*LM_OUTPUTS, "values")
Which = Tensor | slice
Reader = Callable[[Tensor, Which], dict[str, Tensor]]
Ready = tuple[np.ndarray, Batch, Mapping[str, Tensor], Callable[[Tensor], None]]
"""The rows of a pass, their batch, its outputs, and a function that gets the loss and runs the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWeights:
    """The form of the weights with which a replica computes."""

    dtype: torch.dtype
    fp8: bool = False
    """The parameters that replicas read in blocks of 8 bits are quantised."""
    fp8_inputs: bool = False
    """The tensors that are multiplied with them are quantised too."""
    merged: bool = True
    """LoRA factors are added to the weights, not to the outputs of layers."""


class Passes:
    """The passes of one model, with the weights of `local`. Its gradients are accumulated over the calls."""

    notes: tuple[str, ...] = ()
    """A line for each operation that a GPU has a kernel of, and that is computed without one."""

    def __init__(self, local: LocalModel) -> None:
        self.local, self._precision, settings = local, local.settings.precision, local.settings
        self.compute = self._precision.compute
        self.max_tokens, self._top_k = settings.max_tokens_per_microbatch, settings.top_k
        self.possible = LM_OUTPUTS if settings.head == "lm" else VALUE_OUTPUTS
        self._copy = self._compute_copy() if self._precision.copies else None
        self._logit_cap = float(vars(local.model.config.get_text_config()).get("final_logit_softcapping") or 0.0)
        family, text = family_of(local.model.config), local.model.config.get_text_config()
        own = text._attn_implementation or "eager"  # towers keep theirs: some have one alone
        self.models_attention: str | dict[str, str] = own if family is None else {"text_config": own}
        self.packed = settings.packed and not (family is not None and family.crossed)
        self._vision = (
            None if family is None else Vision(local.model, family, settings.pictures, keeps=not local.suffix)
        )
        self.compiled = CompiledLayers() if settings.compile else None
        self._own_forward()
        coded = bool(quantised_layers(local.model))
        self.notes = training_notes(local.device, self.compute, text, packed=self.packed, quantised=coded)
        if settings.replays_routes and not self.packed:
            raise Refused("router replay is of packed rows: set model.engine_options.attention=auto")
        self._replay = RouterReplay(self._decoder) if settings.replays_routes else None
        self._teacher = settings.teacher and settings.teacher.moved_to(
            local.device, self.compute, rounds=self._precision.rounds
        )
        self.last: tuple[Batch, tuple[str, ...]] | None = None  # the batch of the gradient, the names of its terms

    def _own_forward(self) -> None:
        """Replace the model's attention by the packed one, and its norms, gates and rotations by fused ones."""
        if self.packed:
            attention.register_attention()
            packed = attention.PACKED if self._vision is None else {"text_config": attention.PACKED}
            self.local.model.set_attn_implementation(packed)
        self._keeps_states = self.packed and route_delta_nets(self.local.model)
        decoder = self.local.model if self._vision is None else self._vision.language  # a tower has other activations
        known = fuse(decoder, packed=self.packed, checkpointed=self.local.settings.gradient_checkpointing != "none")
        if self.compiled is not None:
            self.compiled.apply(decoder, known=known and self.packed)

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int, extra_outputs: Sequence[str]
    ) -> StepOutput:
        """Add the gradient of a batch, as `Trains.forward_backward` does."""
        self.last = (batch, tuple(t.name for t in terms))
        wanted = tuple(dict.fromkeys([*(name for t in terms for name in t.outputs), *extra_outputs]))
        assert set(wanted) <= set(TOKEN_OUTPUTS), f"{wanted}: a loss is of outputs per token, {TOKEN_OUTPUTS}"
        pending: list[Pending] = []
        found: list[tuple[np.ndarray, dict[str, Tensor]]] = []
        with self._compute_weights():
            for rows, part, outputs, take in self._ready(batch, terms, num_microbatches, wanted):
                loss, metrics = reduce_terms(terms, part, outputs)
                if len(rows):
                    pending.append(metrics)
                    found.append((rows, {name: value.detach() for name, value in outputs.items()}))
                take(loss)
        kept = self._room(batch, wanted)  # read after all passes are enqueued, since a read waits for the device
        for rows, detached in found:
            store_outputs(kept, detached, batch, rows)
        return StepOutput({**read_pending(pending), **self._replayed(batch)}, kept)

    @torch.no_grad()
    def infer(self, batch: Batch, columns: Sequence[str]) -> dict[str, Tensor]:
        """Return outputs of a batch, as `Computes.infer` does."""
        out = self._room(batch, columns)
        with self._compute_weights():
            for rows in self._cut(batch):
                found = self._outputs(part_of(batch, rows), columns)
                if len(rows):
                    store_outputs(out, found, batch, rows)
        return out

    def policy_outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return log-probs by the language-model head, whichever head is trained."""
        return self._lm_outputs(batch, ("logprobs",))

    def models_own(self, probes: Sequence[Tensor], form: ReplicaWeights) -> list[Tensor]:
        """Return log-probs [t-1] of each probe [t] by the model as transformers made it, with weights of this form."""
        rounded = RoundedInputs()
        model = self.local.model
        trained, kept = model.training, [(name, p, p.data) for name, p in model.named_parameters()]
        model.eval()
        model.set_attn_implementation(self.models_attention)
        unfuse(model)
        masters = {name: master for name, _, master in kept}

        def computed(name: str, weight: Tensor) -> Tensor:
            if form.merged and self.local.lora is not None:
                weight = self.local.lora.merged(name, weight, masters.__getitem__)
            return as_computed(name, weight, form.dtype, fp8=form.fp8)

        try:
            given = computing_with(model, computed)
            with self.local.factors_merged() if form.merged else nullcontext(), rounded, given:
                for name, p, master in kept:
                    p.data = computed(name, master)
                    if form.fp8_inputs and in_blocks(name, p.shape):
                        rounded.add(p)
                return [self._alone(model, ids) for ids in probes]
        finally:
            for _, p, master in kept:
                p.data = master
            model.train(trained)
            self._own_forward()

    def _alone(self, model: Any, ids: Tensor) -> Tensor:
        """Return log-probs [t-1] of ids [t] by the model's own forward pass, on the CPU."""
        device = self.local.device
        given: dict[str, Tensor] = {"input_ids": ids[None].to(device)}
        if self._vision is not None and self._vision.one_axis:  # a placeholder is text, also where models take it for 0
            embeddings = self._vision.language.get_input_embeddings()(given["input_ids"])
            given = {"inputs_embeds": embeddings, **layer_embeddings(self._vision.language, given["input_ids"])}
        z = model(**given, use_cache=False).logits[0].to(self._precision.master)
        return torch.log_softmax(z, -1)[:-1].gather(-1, ids[1:, None].to(device))[:, 0].cpu()

    # -- micro-batches -------------------------------------------------------------------------------------------------

    def _ready(self, batch: Batch, terms: Sequence[Term], count: int, wanted: Sequence[str]) -> Iterator[Ready]:
        """Yield the passes that compute their loss in this process; the caller runs the backward pass of each one
        before it requests the next. Rows on which no loss depends follow in passes without a backward pass, for their
        metrics."""
        trained = trained_rows(batch, terms)
        for rows in self._cut(batch, count if trained.all() else 0, np.flatnonzero(trained)):
            part = part_of(batch, rows)
            yield rows, part, self._outputs(part, wanted), _backward
        for rows in self._cut(batch, 0, np.flatnonzero(~trained)):
            part = part_of(batch, rows)
            with torch.no_grad():
                outputs = self._outputs(part, wanted)
            yield rows, part, outputs, _nothing

    def _cut(self, batch: Batch, count: int = 0, among: np.ndarray | None = None) -> Iterable[np.ndarray]:
        """Return the rows of each pass over the rows `among`; None: over all. count: as in `cuts`."""
        if among is None:
            return self.cuts(batch, count)
        return [among[rows] for rows in self.cuts(select_rows(batch, among), count)]

    def cuts(self, batch: Batch, count: int = 0) -> list[np.ndarray]:
        """Return the rows of each pass. count: the number of passes, some of which may have no row; 0: as the token
        budget requires. Prompts with different routes are not shared, and the rows of a group may then need more
        passes than were predicted from their lengths."""
        parts = make_microbatches(batch, self.max_tokens)
        return exactly(parts, count if batch.routes is None else max(count, len(parts)))

    def _compute_weights(self) -> AbstractContextManager[None]:
        if self._copy is not None:
            return self._copy.in_place()
        if not self._precision.rounds:
            return nullcontext()
        return rounded(self.local.model.parameters(), self._precision.dtype)

    def _compute_copy(self) -> ComputeCopy | ShardedCopy:
        settings = self.local.settings
        return ComputeCopy(
            self.local.model, self.compute, keeps=settings.optim is not None and "weights" not in settings.offload
        )

    def use_copy_of(self, other: Passes) -> None:
        """Compute with the other model's copies of the frozen parameters, which both models have."""
        if isinstance(self._copy, ComputeCopy) and isinstance(other._copy, ComputeCopy):
            self._copy.lender = other._copy

    def _room(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        return allocate_outputs(batch, names, self.local.hidden_size, self._top_k, self._precision.master)

    # -- outputs of one micro-batch ------------------------------------------------------------------------------------

    def _outputs(self, batch: Batch, wanted: Sequence[str]) -> dict[str, Tensor]:
        """Return the wanted outputs of one micro-batch, on the engine's device, with gradient where enabled."""
        head = self.local.settings.head
        assert set(wanted) <= set(self.possible), f"a model with {head=} gives {self.possible}, not {tuple(wanted)}"
        if self.local.value_head is None:
            return self._lm_outputs(batch, wanted)
        hidden = self._hidden(batch)
        last = torch.from_numpy(batch.seg_start[batch.leaf + 1] - 1)
        out: dict[str, Tensor] = {}
        for name, index in (("values", batch.target_from), ("scores", last)):
            if name in wanted:
                out |= self._read(batch, hidden, index, partial(self._value_outputs, name))
        return out

    def _value_outputs(self, name: str, rows: Tensor, which: Which) -> dict[str, Tensor]:
        assert self.local.value_head is not None
        return {name: self.local.value_head(rows)}

    def _lm_outputs(self, batch: Batch, wanted: Sequence[str]) -> dict[str, Tensor]:
        local = self.local

        def read(rows: Tensor, which: Which) -> dict[str, Tensor]:
            weight, bias = self._head()
            rows = rows.to(self.compute)
            if local.settings.head_dtype == "float32" and self.compute != self._precision.master:
                # of the numbers that the rollout's head multiplies; those of a copy are rounded
                rows = rows.to(self._precision.master)
                weight = weight if weight.dtype == self.compute else rounded_weight(weight, self.compute)
            head = HeadWeights(weight, bias, self._logit_cap)
            given: Any = {"vocabulary": local.vocabulary, "teacher": self._teacher, "k": self._top_k}
            given["banned"] = local.settings.banned
            return lm_outputs(rows, head, batch, which, wanted, **given)

        return self._read(batch, self._hidden(batch), batch.target_from, read)

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the language-model head, or of this rank's slice of it."""
        lm_head = self.local.model.get_output_embeddings()
        bias = lm_head.bias if isinstance(lm_head, nn.Linear) else None
        return self.local.local(lm_head.weight), None if bias is None else self.local.local(bias)

    def _read(self, batch: Batch, hidden: Tensor, index: Tensor, fn: Reader) -> dict[str, Tensor]:
        """Return `fn(hidden states [n, H] at index, their positions in index)`: outputs [n] by name."""
        return fn(hidden.index_select(0, to_device(index, self.local.device)), slice(None))

    def _hidden(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, H] after the final norm."""
        limit = self.local.row_limit
        if limit is not None and (tokens := int(batch.positions.max()) + 1) > limit:
            raise ValueError(f"a row has {tokens} tokens; the model's RoPE is fixed for {limit} in this run")
        if self._vision is not None:
            batch = self._vision.filled(batch)
        elif batch.media is not None:
            what = type(self.local.model).__name__
            raise Refused(f"the rows of a pass have {len(batch.media.references)} media, and {what} reads text alone")
        return self._hidden_packed(batch) if self.packed else self._hidden_padded(batch)

    def _autocast(self) -> AbstractContextManager[None]:
        if self._copy is not None:
            return nullcontext()
        return computing_in(self.compute, self._precision.master, self.local.device)

    def _hidden_packed(self, batch: Batch) -> Tensor:
        ahead = None if self._vision is None else self._vision.ahead(batch.media)
        windows = self._vision is not None and self._vision.mutual == "windows"
        plan = attention.plan_attention(batch, self.local.device, ahead=ahead, windows=windows)
        states = plan_states(batch, self.local.device) if self._keeps_states else None
        return self._states(batch.ids, batch.positions, plan, batch.media, self._routed(batch), states)

    def _states(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: attention.AttentionPlan,
        media: MediaTokens | None = None,
        routed: Mapping[str, Tensor] = NO_ARGUMENTS,
        states: StatePlan | None = None,
    ) -> Tensor:
        with self._autocast():
            out = self._decoder(
                **self._entry(ids, media),
                position_ids=to_device(positions[..., None, :], self.local.device),
                use_cache=False,
                verl_plan=plan,
                **routed,
                **({} if states is None else {"verl_states": states}),
                **self._whole_mask(len(ids)),
            )
        if routed and self._replay is not None:
            self._replay.check()
        found: Tensor = out.last_hidden_state[0]
        return found

    def _routed(self, batch: Batch, mine: Callable[[Tensor], Tensor] | None = None) -> Mapping[str, Tensor]:
        """Return the arguments of the decoder with the routes of the rollout, if it replays them. mine: selects this
        rank's tokens"""
        if self._replay is None or batch.routes is None:
            return NO_ARGUMENTS
        return self._replay.arguments(batch.routes if mine is None else mine(batch.routes), self.local.device)

    def _replayed(self, batch: Batch) -> Metrics:
        """Return the share of tokens whose experts are those of the rollout, if the engine replays them."""
        if not self.local.settings.replays_routes:
            return {}
        known = 0 if batch.routes is None else int((batch.routes[0, 0] != NO_ROUTE).sum())
        return {"replayed_routes": Metric(known, batch.num_tokens, "token")}

    def _whole_mask(self, tokens: int) -> dict[str, Tensor]:
        """Return a mask of ones for families that read no mask. Without one, transformers searches the positions for
        packed sequences, and the host would wait for the device."""
        if self.local.model.config.get_text_config().model_type not in FUSED_TYPES:
            return {}
        return {"attention_mask": torch.ones(1, tokens, dtype=torch.bool, device=self.local.device)}

    def _entry(self, ids: Tensor, media: MediaTokens | None = None) -> dict[str, Any]:
        return self._inputs(ids[None], media)

    def _inputs(self, ids: Tensor, media: MediaTokens | None) -> dict[str, Any]:
        """Return the inputs of the decoder for ids [B, W] with the media of these tokens."""
        given = to_device(ids, self.local.device)
        if media is None:
            return {"input_ids": given}
        assert self._vision is not None
        return self._vision.inputs(given, media)

    @property
    def _decoder(self) -> Any:
        """The model without its head; of a model that reads images its language model."""
        return self.local.model.base_model if self._vision is None else self._vision.language

    def _hidden_padded(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, H] through one padded row per sequence; for a shared token that of its last
        row."""
        ids, place, origin = padded_rows(batch)
        device, groups, positions = self.local.device, [(torch.arange(len(ids)), batch.media)], None
        if self._vision is not None:
            media, positions = self._vision.padded(unshare(batch), place)
            groups = self._vision.together(media, len(ids))
        with self._autocast():  # without a mask: padding is last, where causal attention ignores it
            parts = [self._padded_states(rows, ids[rows], media, positions) for rows, media in groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat([rows for rows, _ in groups]).argsort()]
        found: Tensor = out[to_device(place, device)].index_select(0, to_device(origin, device))
        return found

    def _padded_states(self, rows: Tensor, ids: Tensor, media: MediaTokens | None, positions: Tensor | None) -> Tensor:
        """Return the hidden states [n, W, H] of the padded rows with these numbers. positions: of all rows"""
        places = {} if positions is None else {"position_ids": to_device(positions[..., rows, :], self.local.device)}
        given = self._inputs(ids, media)
        if self._vision is not None:
            places |= self._vision.masks(given, media)
        states: Tensor = self._decoder(**given, **places, use_cache=False).last_hidden_state
        return states


def _nothing(loss: Tensor) -> None:
    pass


def _backward(loss: Tensor) -> None:
    """Run the backward pass of a loss; rows without images depend on no trained weight if the language is frozen."""
    if loss.requires_grad:
        with setting_restored():
            torch.autograd.backward(loss)
