"""The model engine of one process: a float32 master model, autocast compute, AdamW. Nothing is sharded.

A CPU that only emulates bf16 computes with weights rounded to bf16 in float32 arithmetic: more exact, and faster.

A micro-batch is one packed forward pass (nn/attention.py); the padded path, one row per sequence, is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verl.batch import Batch, exactly, make_microbatches, padded_rows, part_of
from verl.checkpoint.score import WEIGHT as SCORE_WEIGHT
from verl.checkpoint.score import classifier_tensors, read_score
from verl.errors import Refused
from verl.model_engine.adapter import load_model
from verl.model_engine.base import EngineCapabilities, EngineContext, Part, StepOutput, WeightPart, whole_part
from verl.model_engine.dump import dump_batch
from verl.model_engine.hf_model import refuse_altered_logits, switch_dropout_off
from verl.model_engine.lm_head import LM_OUTPUTS, Teacher, allocate_outputs, lm_outputs, read_teacher, store_outputs
from verl.model_engine.objective import evaluate_terms
from verl.model_engine.offload import Offload, needs, own_storage
from verl.model_engine.optim import OptimSpec, averaged, copy_anew, grad_norm, learning_rate, make_adamw, step
from verl.model_engine.options import Options
from verl.model_engine.snapshot import Snapshot, load_state
from verl.nn import attention
from verl.nn.fused import fuse, unfuse
from verl.nn.heads import Head, ValueHead
from verl.nn.linear_logprob import Vocabulary
from verl.nn.linear_teacher import HeadWeights
from verl.nn.packing import check_packing, refuse_neighbours, refuse_noise, refused, short_windows
from verl.nn.precision import computing_in, native_bf16, rounded
from verl.nn.rope import fix_rope
from verl.objective import Term
from verl.types import Metric, Metrics, merge_metrics

VALUE_OUTPUTS = ("values", "scores")
TOKEN_OUTPUTS = (*LM_OUTPUTS, "values")
Which = Tensor | slice
Reader = Callable[[Tensor, Which], dict[str, Tensor]]
Ready = tuple[np.ndarray, Batch, Mapping[str, Tensor], Callable[[Tensor], None]]
"""The rows of a pass, their batch, its outputs, and what takes the loss of them."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class TorchEngine:
    """The `ModelEngine` of one process.

    model: an instantiated causal LM · head: lm (policy, reference) or value (critic, reward model) · optim: None for a
    frozen model · attention_mode: auto | padded · dump_dir: the folder for batches with a non-finite gradient ·
    emulate_bf16: None: as the hardware needs · score: the weight [1, H] that a value or score head starts with ·
    teacher, top_k, longest: as in `EngineContext`."""

    _vocabulary: Vocabulary | None = None
    _suffix = ""  # of the files that this process writes beside those of others

    def __init__(
        self,
        model: Any,
        *,
        head: Head = "lm",
        optim: OptimSpec | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
        max_tokens_per_microbatch: int = 16384,
        attention_mode: str = "auto",
        gradient_checkpointing: bool = False,
        share_prefix: bool = True,
        dump_dir: Path | None = None,
        emulate_bf16: bool | None = None,
        score: Tensor | None = None,
        teacher: Teacher | None = None,
        top_k: int = 0,
        longest: int | None = None,
        offload: Sequence[Part] = (),
    ) -> None:
        if dtype not in DTYPES:
            raise Refused(f"model.dtype={dtype!r}: one of {', '.join(DTYPES)}")
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        self.head, self.max_tokens_per_microbatch = head, max_tokens_per_microbatch
        self._packed = attention_mode != "padded"
        self._shares_prefix = share_prefix and self._packed
        self._dump_dir, self._top_k = dump_dir, top_k
        self.master = torch.float64 if self.dtype == torch.float64 else torch.float32
        emulate = not native_bf16(self.device) if emulate_bf16 is None else emulate_bf16
        self._rounded = self.dtype == torch.bfloat16 and emulate
        self._compute = self.master if self._rounded else self.dtype
        self.model = model.to(self.master)
        self._longest, self._row_limit = longest, fix_rope(self.model, longest)
        refuse_altered_logits(self.model)
        self._logit_cap = float(vars(self.model.config.get_text_config()).get("final_logit_softcapping") or 0.0)
        self._models_attention = self.model.config._attn_implementation or "eager"
        hidden_size = self.model.config.get_text_config().hidden_size
        self.value_head = None if head == "lm" else ValueHead(hidden_size, bias=head == "value").to(self.master)
        if score is not None and self.value_head is not None:
            self.value_head.weight.data.copy_(score)
        if gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        for p in self._trained().parameters():
            p.requires_grad_(optim is not None)
        self._offload = Offload(self.device, offload, self._held)
        self._place()
        self._own_forward()
        self.spec, self.optimizer = optim, make_adamw(self._trained(), optim) if optim else None
        self.model.train(optim is not None)
        switch_dropout_off(self.model)
        self._optimizer_step = self._skipped = self._copied = 0  # _copied: the version that a lagging copy is of
        self._last: tuple[Batch, tuple[str, ...]] | None = None
        self._teacher = teacher and teacher.moved_to(self.device, self._compute, rounds=self._rounded)

    def _place(self) -> None:
        """Bring the model, which was loaded on the host, to where it computes."""
        self.model.to(self.device)
        if self._offload.moves("weights"):
            own_storage(self.model.parameters())
        if self.value_head is not None:
            self.value_head.to(self.device)

    def _own_forward(self) -> None:
        """Packed attention, and on a CPU the fused norms, in place of the model's own."""
        if self._packed:
            attention.register_attention()
            self.model.set_attn_implementation(attention.PACKED)
        if self.device.type == "cpu":
            fuse(self.model, packed=self._packed)

    # -- forward -----------------------------------------------------------------------------------------------------

    @needs("weights")
    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int = 0, extra_outputs: Sequence[str] = ()
    ) -> StepOutput:
        assert self.optimizer is not None, "this engine was built without an optimizer"
        self._last = (batch, tuple(t.name for t in terms))
        wanted = tuple(dict.fromkeys([*(name for t in terms for name in t.outputs), *extra_outputs]))
        assert set(wanted) <= set(TOKEN_OUTPUTS), f"{wanted}: a loss is of outputs per token, {TOKEN_OUTPUTS}"
        parts: list[Metrics] = []
        kept = self._room(batch, wanted)
        with self._compute_weights():
            for rows, part, outputs, take in self._ready(batch, num_microbatches, wanted):
                loss, metrics = evaluate_terms(terms, part, outputs)
                if len(rows):
                    parts.append(metrics)
                    store_outputs(kept, outputs, batch, rows)
                take(loss)
        return StepOutput(merge_metrics(parts), kept)

    def _ready(self, batch: Batch, count: int, wanted: Sequence[str]) -> Iterator[Ready]:
        """Yield the passes that compute their loss here; the caller runs the backward pass of each before it takes the
        next."""
        for rows in self._cut(batch, count):
            part = part_of(batch, rows)
            yield rows, part, self._outputs(part, wanted), torch.autograd.backward

    def _cut(self, batch: Batch, count: int = 0) -> Iterable[np.ndarray]:
        """The rows of each pass: so many passes, or as the token budget makes them; one may have no row."""
        return exactly(make_microbatches(batch, self.max_tokens_per_microbatch), count)

    def _compute_weights(self) -> AbstractContextManager[None]:
        return rounded(self.model.parameters(), self.dtype) if self._rounded else nullcontext()

    @needs("weights")
    @torch.no_grad()
    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False) -> dict[str, Tensor]:
        out = self._room(batch, columns)
        wanted: tuple[Part, ...] = ("optimizer",) if average else ()
        with self.awake(*wanted), averaged(self.optimizer if average else None), self._compute_weights():
            for rows in self._cut(batch):
                found = self._outputs(part_of(batch, rows), columns)
                if len(rows):
                    store_outputs(out, found, batch, rows)
        return out

    def _room(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        return allocate_outputs(batch, names, self.model.config.get_text_config().hidden_size, self._top_k, self.master)

    def _outputs(self, batch: Batch, wanted: Sequence[str]) -> dict[str, Tensor]:
        """Return the wanted outputs of one micro-batch, on the engine's device, with gradient where enabled."""
        possible = LM_OUTPUTS if self.head == "lm" else VALUE_OUTPUTS
        assert set(wanted) <= set(possible), f"a model with head={self.head!r} gives {possible}, not {tuple(wanted)}"
        if self.value_head is None:
            return self._lm_outputs(batch, wanted)
        hidden = self._hidden(batch)
        last = torch.from_numpy(batch.seg_start[batch.leaf + 1] - 1)
        out: dict[str, Tensor] = {}
        for name, index in (("values", batch.target_from), ("scores", last)):
            if name in wanted:
                out |= self._read(batch, hidden, index, partial(self._value_outputs, name))
        return out

    def _value_outputs(self, name: str, rows: Tensor, which: Which) -> dict[str, Tensor]:
        assert self.value_head is not None
        return {name: self.value_head(rows)}

    def _lm_outputs(self, batch: Batch, wanted: Sequence[str]) -> dict[str, Tensor]:
        def read(rows: Tensor, which: Which) -> dict[str, Tensor]:
            lm_head = self.model.get_output_embeddings()
            bias = lm_head.bias if isinstance(lm_head, nn.Linear) else None
            head = HeadWeights(
                self._local(lm_head.weight), None if bias is None else self._local(bias), self._logit_cap
            )
            given: Any = {"vocabulary": self._vocabulary, "teacher": self._teacher, "k": self._top_k}
            return lm_outputs(rows.to(self._compute), head, batch, which, wanted, **given)

        return self._read(batch, self._hidden(batch), batch.target_from, read)

    def _read(self, batch: Batch, hidden: Tensor, index: Tensor, fn: Reader) -> dict[str, Tensor]:
        """fn(the hidden states [n, H] at `index`, which of `index` they are) -> outputs [n] by name."""
        return fn(hidden.index_select(0, index.to(self.device)), slice(None))

    def _local(self, weight: Tensor) -> Tensor:
        return weight

    def _hidden(self, batch: Batch) -> Tensor:
        """[T, H] hidden states after the final norm."""
        if self._row_limit is not None and (tokens := int(batch.positions.max()) + 1) > self._row_limit:
            raise ValueError(f"a row has {tokens} tokens; the model's RoPE is fixed for {self._row_limit} in this run")
        return self._hidden_packed(batch) if self._packed else self._hidden_padded(batch)

    def _autocast(self) -> AbstractContextManager[None]:
        return computing_in(self._compute, self.master, self.device)

    def _hidden_packed(self, batch: Batch) -> Tensor:
        return self._states(batch.ids, batch.positions, attention.plan_attention(batch, self.device))

    def _states(self, ids: Tensor, positions: Tensor, plan: attention.AttentionPlan) -> Tensor:
        with self._autocast():
            out = self.model.base_model(
                **self._entry(ids),
                position_ids=positions[..., None, :].to(self.device),
                use_cache=False,
                verl_plan=plan,
            )
        return out.last_hidden_state[0]

    def _entry(self, ids: Tensor) -> dict[str, Tensor]:
        return {"input_ids": ids[None].to(self.device)}

    def _hidden_padded(self, batch: Batch) -> Tensor:
        """The same [T, H] through one padded row per sequence; a shared token keeps the value of its last row."""
        ids, place, origin = padded_rows(batch)
        with self._autocast():  # without a mask: padding is last, where causal attention ignores it
            out = self.model.base_model(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        return out[place.to(self.device)].index_select(0, origin.to(self.device))

    @needs("weights")
    def check_packing(self, *, share_prefix: bool) -> float:
        """Prove at start that a pass computes the model and nothing else: no noise, no leak between packed rows, its
        sliding windows, all of the head. ValueError where it does not. Returns the largest difference."""
        text, what, compute = self.model.config.get_text_config(), type(self.model).__name__, self._compute
        vocab, output = text.vocab_size, "logprobs" if self.head == "lm" else "values"
        longest = min(filter(None, (self._longest, getattr(text, "max_position_embeddings", None))), default=0)

        def ours(batch: Batch) -> Tensor:
            return self._policy_outputs(batch)["logprobs"].to("cpu", self.master)

        with refused(what, padded=not self._packed), torch.no_grad():
            refuse_noise(lambda batch: self.infer(batch, (output,))[output], vocab, what=what)
            self._compute, own = self.master, partial(self._models_own, dtype=self.master)
            try:
                if not self._packed:
                    return check_packing(ours, own, vocab, share_prefix=share_prefix, what=what, padded=True)
                with short_windows(self.model):
                    worst = check_packing(ours, own, vocab, share_prefix=share_prefix, what=what)
                return max(worst, refuse_neighbours(ours, vocab, longest, what=what))
            finally:
                self._compute = compute

    @needs("weights")
    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
        with torch.no_grad():
            found = self._models_own([torch.from_numpy(ids) for ids in probes], DTYPES[dtype])
        return [logprobs.float().numpy() for logprobs in found]

    def _policy_outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Log-probs under the language-model head, whatever the head that is trained."""
        return self._lm_outputs(batch, ("logprobs",))

    def _models_own(self, probes: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """[t] -> log-probs [t-1] of each by the model as transformers made it, with its parameters in `dtype`."""
        trained, kept = self.model.training, [(p, p.data) for p in self.model.parameters()]
        self.model.eval()
        self.model.set_attn_implementation(self._models_attention)
        unfuse(self.model)
        try:
            for p, master in kept:
                p.data = master.to(dtype)
            return [self._alone(self.model, ids) for ids in probes]
        finally:
            for p, master in kept:
                p.data = master
            self.model.train(trained)
            self._own_forward()

    def _alone(self, model: Any, ids: Tensor) -> Tensor:
        """[t] -> log-probs [t-1] by the model's own forward pass."""
        z = model(input_ids=ids[None].to(self.device), use_cache=False).logits[0].to(self.master)
        return torch.log_softmax(z, -1)[:-1].gather(-1, ids[1:, None].to(self.device))[:, 0].cpu()

    # -- optimizer ---------------------------------------------------------------------------------------------------

    @needs("weights", "optimizer")
    def optim_step(self) -> Metrics:
        assert self.optimizer is not None and self.spec is not None
        norm = self._grad_norm(params := self._params())
        lr = learning_rate(self.spec, self._optimizer_step)
        finite = bool(torch.isfinite(norm))
        if finite:
            if self.spec.clip_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(params, self.spec.clip_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            step(self.optimizer, self.spec.average)
            self._optimizer_step += 1
            self._skipped = 0
        else:
            self._refuse(float(norm))
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": Metric(float(norm) if finite else 0.0, 1, "update"),
            "lr": Metric(lr, 1, "update", "last"),
            "skipped_updates": Metric(0.0 if finite else 1.0, 1, "update", "sum"),
        }

    def published(self, version: int) -> None:
        if self.spec and (lag := self.spec.average) > 1 and version % lag == 0 and version > self._copied:
            with self.awake("weights", "optimizer"):
                copy_anew(self.optimizer)
            self._copied = version

    def _params(self) -> list[nn.Parameter]:
        """The trained tensors, or what this process holds of them, with their gradients."""
        return [p for p in self._trained().parameters() if p.requires_grad]

    def _grad_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        return grad_norm(params)

    def _refuse(self, norm: float) -> None:
        """A non-finite gradient: weights stay as they are, the batch is dumped, and too many in a row stop the run."""
        assert self.spec is not None
        self._skipped += 1
        where = "nowhere (no dump directory)"
        if self._dump_dir is not None and self._last is not None:
            name = f"nonfinite_update_{self._optimizer_step}_{self._skipped}{self._suffix}.pt"
            where = dump_batch(self._dump_dir / name, *self._last, norm)
        if self._skipped > self.spec.max_skipped_updates:
            self.optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
            raise FloatingPointError(
                f"gradient norm is {norm} for the {self._skipped}th update in a row "
                f"(limit model.engine_options.max_skipped_updates={self.spec.max_skipped_updates}); "
                f"the weights are unchanged, the last batch is in {where}"
            )

    # -- weights and state -------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._offload.stream(self._now().weights())

    def weight_parts(self) -> Iterator[WeightPart]:
        return (whole_part(name, tensor) for name, tensor in self._named_weights() if tensor is not None)

    def _named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """By their Hugging Face names; of a tied tensor the first."""
        every = self._model_weights()
        if self.head == "score":
            assert self.value_head is not None
            return classifier_tensors(self.model.base_model_prefix, every, self.value_head.weight)
        return every

    def _model_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from ((name, b) for name, b in self.model.named_buffers() if name in self.model.state_dict())

    def _whole(self, p: Tensor) -> Tensor:
        """All of a parameter, of which a process may hold a part."""
        return p.detach()

    def _delivered(self, name: str, p: Tensor | None) -> Tensor:
        assert p is not None, name
        return self._whole(p)

    @property
    def tied(self) -> dict[str, str]:
        first: dict[int, str] = {}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}

    @property
    def masters(self) -> dict[str, Tensor]:
        assert not self._offload.is_away("weights"), "read inside `awake`"
        return {name: p.detach() for name, p in self._trained().named_parameters()}

    def take_metrics(self) -> Metrics:
        return {}  # its passes return theirs

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            shares_prefix=self._shares_prefix,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            outputs=LM_OUTPUTS if self.head == "lm" else VALUE_OUTPUTS,
            trains=self.optimizer is not None,
            one_pass=self.device.type == "cpu",
        )

    def _now(self) -> Snapshot:
        params = dict(self._trained().named_parameters())
        state: dict[str, Tensor] = {f"model.{name}": p for name, p in params.items()}
        for name, p in params.items():
            for key, value in (self.optimizer.state.get(p, {}) if self.optimizer else {}).items():
                state[f"optimizer.{key}.{name}"] = value
        counters = {"optimizer_step": self._optimizer_step, "skipped": self._skipped, "copied": self._copied}
        return Snapshot(state, tuple(self._named_weights()), self._delivered, counters)

    def snapshot(self) -> Snapshot:
        with self._offload.still():
            return self._now().copied(partial(self._on_host, copy=True))

    @property
    def snapshot_bytes(self) -> int:
        return self._now().num_bytes

    def _on_host(self, t: Tensor, *, copy: bool) -> Tensor:
        return self._offload.on_host(t, copy=copy)

    def save(self, path: Path) -> None:
        with self._offload.still():
            self._now().copied(partial(self._on_host, copy=False)).save(path)

    @needs("weights", "optimizer")
    def load(self, path: Path) -> None:
        counters = load_state(path, self._trained_names(), dict(self._trained().named_parameters()), self.optimizer)
        counted = (int(counters.get(name, 0)) for name in ("optimizer_step", "skipped", "copied"))
        self._optimizer_step, self._skipped, self._copied = counted

    def awake(self, *parts: Part) -> AbstractContextManager[None]:
        return self._offload.awake(*parts)

    def _held(self, part: Part) -> list[Tensor]:
        """The tensors of this part of the state, as far as this process has them."""
        if part == "weights":
            modules = nn.ModuleList(module for module in (self.model, self.value_head) if module is not None)
            return [self._local(p.detach()) for p in modules.parameters()]
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [self._local(t) for state in states for t in state.values() if t.ndim]

    @property
    def optimizer_step(self) -> int:
        return self._optimizer_step

    def _trained_names(self) -> Set[str]:
        """Return the names of all trained parameters, on whichever rank they are."""
        return {name for name, _ in self._trained().named_parameters()}

    def _trained(self) -> nn.Module:
        if self.value_head is None:
            return self.model
        return nn.ModuleDict({"model": self.model.base_model, "value_head": self.value_head})


def build(
    options: Options, context: EngineContext, kind: Callable[..., TorchEngine] | None = None, model: Any = None
) -> TorchEngine:
    """The engine of a folder. A reward model or critic starts from the folder's score head where it has one; a frozen
    reward model must have one, a trained one starts at 0 (whatever the seed). model: of the folder, opened already."""
    c = context
    score = read_score(c.folder) if c.head != "lm" else None
    if c.head == "score" and score is None and c.optim is None:
        raise Refused(
            f"{c.folder}: no {SCORE_WEIGHT} in its weights: a language model, not a reward model; train one with "
            "verl rm"
        )
    if model is None:
        model = load_model(c)
    return (kind or TorchEngine)(
        model,
        head=c.head,
        optim=c.optim and replace(c.optim, max_skipped_updates=options.max_skipped_updates),
        dtype=c.dtype,
        device=c.device,
        max_tokens_per_microbatch=c.max_tokens_per_microbatch,
        attention_mode=options.attention,
        gradient_checkpointing=c.gradient_checkpointing and c.optim is not None,
        share_prefix=options.share_prefix,
        dump_dir=c.dump_dir,
        score=score,
        teacher=None if c.teacher is None else read_teacher(c.teacher),
        top_k=c.top_k,
        longest=c.longest,
        offload=options.offload(trained=c.optim is not None),
    )
