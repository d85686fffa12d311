"""The FSDP2 engine. At world size 1 nothing is sharded: a float32 master model, autocast compute, AdamW.

Any Hugging Face causal LM. A micro-batch is one packed forward pass (nn/attention.py); the padded path, one row per
sequence through the model's own attention, is the oracle and the way out for models whose attention cannot be packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl.batch import Batch, Columns, loss_index, select_rows, split_rows, unshare
from verl.model_engine.base import StepOutput, TermLike
from verl.model_engine.optim import OptimSpec, grad_norm, learning_rate, make_adamw
from verl.nn import attention
from verl.nn.heads import Head, ValueHead
from verl.nn.linear_logprob import linear_logprob
from verl.types import Metric, Metrics, merge_metrics

TOKEN_OUTPUTS = ("logprobs", "entropy", "sum_pi_squared", "values")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class FSDPEngine:
    """See `ModelEngine`.

    model: an instantiated causal LM · head: lm (policy, reference) or value (critic, reward model) · optim: None for a
    frozen model · attention: auto | padded · dump_dir: where a batch with a non-finite gradient is written.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        head: Head = "lm",
        optim: OptimSpec | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
        max_tokens_per_microbatch: int = 16384,
        attention_mode: str = "auto",
        gradient_checkpointing: bool = False,
        source_dir: Path | None = None,
        dump_dir: Path | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"model.dtype={dtype!r}: one of {', '.join(DTYPES)}")
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]
        self.head: Head = head
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self._packed = attention_mode != "padded"
        self._source_dir = source_dir
        self._dump_dir = dump_dir
        self.model = model.float().to(self.device)
        _refuse_altered_logits(self.model)
        if self._packed:
            attention.register()
            self.model.set_attn_implementation(attention.PACKED)
        self.value_head = ValueHead(self.model.config.get_text_config().hidden_size).to(self.device) if head == "value" else None
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.spec = optim
        self.optimizer = make_adamw(self._trained(), optim) if optim else None
        for p in self._trained().parameters():
            p.requires_grad_(optim is not None)
        self.model.train(optim is not None)
        for module in self.model.modules():  # RL and log-prob equality want no noise in the forward pass
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self._optimizer_step = 0
        self._skipped = 0
        self._last: tuple[Batch, tuple[str, ...]] | None = None

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, terms: Sequence[TermLike]) -> StepOutput:
        assert self.optimizer is not None, "this engine was built without an optimizer"
        self._last = (batch, tuple(t.name for t in terms))
        wanted = tuple({name for t in terms for name in t.outputs})
        if any(t.two_pass for t in terms):
            batch, terms, first = self._first_pass(batch, terms, wanted)
        else:
            first = {}
        parts, kept = [first], {name: torch.empty(batch.num_loss_tokens) for name in wanted}
        for rows in split_rows(batch, self.max_tokens_per_microbatch):
            part = select_rows(batch, rows)
            outputs = self._outputs(part, wanted)
            loss, metrics = evaluate_terms(terms, part, outputs)
            loss.backward()
            parts.append(metrics)
            index = loss_index(batch, rows)
            for name, value in outputs.items():
                kept[name][index] = value.detach().float().cpu()
        return StepOutput(merge_metrics(parts), kept)

    def _first_pass(self, batch: Batch, terms: Sequence[TermLike], wanted: tuple[str, ...]) -> tuple[Batch, list[TermLike], Metrics]:
        """Terms with statistics over the whole step: evaluate on all outputs, keep dL/doutput as the second pass's weight."""
        whole = [t for t in terms if t.two_pass]
        leaves = {n: v.double().requires_grad_() for n, v in self.infer(batch, wanted).items()}
        loss, metrics = evaluate_terms(whole, batch, leaves)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        surrogates: list[TermLike] = []
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            surrogate = Surrogate(f"two_pass/{name}", name)
            batch = batch.with_columns({f"w/{surrogate.name}": torch.zeros_like(leaf) if grad is None else grad})
            surrogates.append(surrogate)
        return batch, [t for t in terms if not t.two_pass] + surrogates, metrics

    @torch.no_grad()
    def infer(self, batch: Batch, columns: Sequence[str]) -> dict[str, Tensor]:
        sizes = {name: batch.num_rows if name == "scores" else batch.num_loss_tokens for name in columns}
        out = {name: torch.empty(size) for name, size in sizes.items()}
        for rows in split_rows(batch, self.max_tokens_per_microbatch):
            index = loss_index(batch, rows)
            for name, value in self._outputs(select_rows(batch, rows), columns).items():
                out[name][torch.from_numpy(rows) if name == "scores" else index] = value.float().cpu()
        return out

    def _outputs(self, batch: Batch, wanted: Sequence[str]) -> dict[str, Tensor]:
        """The asked outputs of one micro-batch, on the engine's device, with gradient where enabled."""
        hidden = self._hidden_packed(batch) if self._packed else self._hidden_padded(batch)
        out: dict[str, Tensor] = {}
        if self.value_head is not None:
            if "values" in wanted:
                out["values"] = self.value_head(hidden.index_select(0, batch.target_from.to(self.device)))
            if "scores" in wanted:
                last = torch.from_numpy(batch.seg_start[batch.leaf + 1] - 1).to(self.device)
                out["scores"] = self.value_head(hidden.index_select(0, last))
            return out
        lm_head = self.model.get_output_embeddings()
        temperature = batch.row_columns["temperature"][batch.row_of].to(self.device)
        logprobs, entropy, sum_pi2 = linear_logprob(
            hidden.index_select(0, batch.target_from.to(self.device)).to(self.dtype),
            lm_head.weight,
            batch.targets.to(self.device),
            temperature,
            bias=lm_head.bias if isinstance(lm_head, nn.Linear) else None,
            entropy="entropy" in wanted,
            sum_pi_squared="sum_pi_squared" in wanted,
        )
        computed = {"logprobs": logprobs, "entropy": entropy, "sum_pi_squared": sum_pi2}
        return {name: value for name, value in computed.items() if name in wanted and value is not None}

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)

    def _hidden_packed(self, batch: Batch) -> Tensor:
        """[T, H] hidden states after the final norm."""
        plan = attention.make_plan(batch, self.device)
        with self._autocast():
            out = self.model.base_model(
                input_ids=batch.ids[None].to(self.device),
                position_ids=batch.positions[..., None, :].to(self.device),
                use_cache=False,
                verl_plan=plan,
            )
        return out.last_hidden_state[0]

    def _hidden_padded(self, batch: Batch) -> Tensor:
        """The same [T, H] through one padded row per sequence; a shared token keeps the value of its last row."""
        flat = unshare(batch)
        lengths = torch.from_numpy(flat.seg_start[1:] - flat.seg_start[:-1])
        width = int(lengths.max())
        place = torch.arange(width)[None] < lengths[:, None]  # [R, width]
        ids = torch.zeros(place.shape, dtype=torch.int64)
        ids[place] = flat.ids
        with self._autocast():
            out = self.model.base_model(
                input_ids=ids.to(self.device), attention_mask=place.long().to(self.device), use_cache=False
            ).last_hidden_state
        hidden = out[place.to(self.device)]  # [T of flat, H]
        origin = torch.empty(batch.num_tokens, dtype=torch.int64)
        origin[_flat_origin(batch)] = torch.arange(len(flat.ids))
        return hidden.index_select(0, origin.to(self.device))

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def optim_step(self) -> Metrics:
        assert self.optimizer is not None and self.spec is not None
        params = [p for p in self._trained().parameters() if p.requires_grad]
        norm = grad_norm(params)
        lr = learning_rate(self.spec, self._optimizer_step)
        finite = bool(torch.isfinite(norm))
        if finite:
            if self.spec.clip_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(params, self.spec.clip_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
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

    def _refuse(self, norm: float) -> None:
        """A non-finite gradient: weights stay as they are, the batch is dumped, and too many in a row stop the run."""
        assert self.spec is not None
        self._skipped += 1
        where = "nowhere (no dump directory)"
        if self._dump_dir is not None and self._last is not None:
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            path = self._dump_dir / f"nonfinite_update_{self._optimizer_step}_{self._skipped}.pt"
            batch, names = self._last
            torch.save({"terms": names, "ids": batch.ids, "targets": batch.targets, "seg_start": batch.seg_start,
                        "row_start": batch.row_start, "columns": dict(batch.columns), "grad_norm": norm}, path)  # fmt: skip
            where = str(path)
        if self._skipped > self.spec.max_skipped_updates:
            self.optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
            raise FloatingPointError(
                f"gradient norm is {norm} for the {self._skipped}th update in a row (limit optim.max_skipped_updates="
                f"{self.spec.max_skipped_updates}); the weights are unchanged, the last batch is in {where}"
            )

    # -- weights and state -------------------------------------------------------------------------------------------

    def weights(self, kind: Literal["full", "adapter", "merged"] = "full") -> Iterator[tuple[str, Tensor]]:
        if kind == "adapter":
            raise ValueError("this model has no adapter; use kind='full'")
        seen: set[int] = set()
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if id(p) not in seen:
                seen.add(id(p))
                yield name, p.detach()
        for name, b in self.model.named_buffers():
            if name in self.model.state_dict():
                yield name, b

    def state(self) -> dict[str, Any]:
        out: dict[str, Any] = {"optimizer_step": self._optimizer_step, "skipped": self._skipped}
        out["model"] = {name: p.detach() for name, p in self._trained().named_parameters()}
        if self.optimizer is not None:
            names = {id(p): n for n, p in self._trained().named_parameters()}
            out["optimizer"] = {names[id(p)]: dict(s) for p, s in self.optimizer.state.items()}
        return out

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        params = dict(self._trained().named_parameters())
        if set(params) != set(state["model"]):
            differing = sorted(set(params) ^ set(state["model"]))
            raise ValueError(f"the checkpoint is of another model: {len(differing)} parameters differ, e.g. {differing[:3]}")
        for name, p in params.items():
            p.copy_(state["model"][name])
        self._optimizer_step, self._skipped = int(state["optimizer_step"]), int(state["skipped"])
        if self.optimizer is not None and "optimizer" in state:
            for name, saved in state["optimizer"].items():
                self.optimizer.state[params[name]] = {
                    k: v.to(params[name].device) if k != "step" else v for k, v in saved.items()
                }

    def to(self, where: str, parts: Sequence[str] = ("weights", "optimizer")) -> None:
        if "weights" in parts:
            self._trained().to(where)
        if "optimizer" in parts and self.optimizer is not None:
            for entry in self.optimizer.state.values():
                for k, v in entry.items():
                    if isinstance(v, Tensor) and k != "step":
                        entry[k] = v.to(where)

    @property
    def optimizer_step(self) -> int:
        return self._optimizer_step

    @property
    def source_dir(self) -> Path | None:
        return self._source_dir

    def _trained(self) -> nn.Module:
        if self.value_head is None:
            return self.model
        return nn.ModuleDict({"model": self.model.base_model, "value_head": self.value_head})


class Surrogate:
    """The second pass of a two-pass term: sum(dL/doutput * output)."""

    unit: Literal["token", "sequence"] = "token"
    two_pass = False

    def __init__(self, name: str, output: str) -> None:
        self.name = name
        self.outputs = (output,)

    def fn(self, columns: Columns) -> SurrogateValue:
        return SurrogateValue(columns[self.outputs[0]])


class SurrogateValue:
    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.metrics: Mapping[str, Any] = {}


def evaluate_terms(terms: Sequence[TermLike], batch: Batch, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
    """sum over terms of sum(w * value), and the metrics of the terms. The engine's only reduction.

    A token with weight 0 in a term is outside that term's mask; its inputs are replaced before any arithmetic.
    """
    device = next(iter(outputs.values())).device
    sequence_of = batch.sequence_of.to(device)
    total = sum((v.sum() * 0.0 for v in outputs.values()), torch.zeros((), device=device))  # backward always has a path
    metrics: Metrics = {}
    for term in terms:
        if term.unit == "token":
            weight = batch.columns[f"w/{term.name}"].to(device)
            mask = weight != 0
        else:
            weight, mask = _sequence_weight(batch, term.name, device)
        columns = Columns(
            token={**{n: c.to(device) for n, c in batch.columns.items()}, **outputs},
            sequence={}, sequence_of=sequence_of, num_sequences=batch.num_sequences, mask=mask,
        )  # fmt: skip
        value = term.fn(columns.cleaned())
        if term.unit == "token":
            inside, present = torch.where(mask, value.values, 0.0), mask
        else:
            present = weight != 0
            inside = torch.where(present, value.values, 0.0)
        loss = (weight * inside.to(weight.dtype)).sum()
        total = total + loss
        metrics[term.name] = Metric(float(loss.detach()), 1, "update", "sum")
        metrics.update(_term_metrics(value.metrics, present, term.unit))
    return total, metrics


def _sequence_weight(batch: Batch, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(weight [S], mask [L]) of a sequence-unit term; the row column holds the weight at each trajectory's first row."""
    per_row = batch.row_columns[f"w/{name}"].to(device)
    index = torch.from_numpy(batch.sequence).to(device)
    weight = torch.zeros(batch.num_sequences, dtype=per_row.dtype, device=device).index_add(0, index, per_row)
    mask = (weight != 0)[batch.sequence_of.to(device)]
    if "mask" in batch.columns:
        mask = mask & batch.columns["mask"].to(device).bool()
    return weight, mask


def _term_metrics(found: Mapping[str, tuple[Tensor, Any]], mask: Tensor, unit: str) -> Metrics:
    out: Metrics = {}
    count = float(mask.sum())
    for name, (values, kind) in found.items():
        inside = values.detach()[mask]
        if kind == "max":
            out[name] = Metric(float(inside.max()) if count else 0.0, count, unit, "max")  # type: ignore[arg-type]
        else:
            out[name] = Metric(float(inside.double().sum()), count, unit, kind)  # type: ignore[arg-type]
    return out


def _flat_origin(batch: Batch) -> Tensor:
    """[T of unshare(batch)] which token of `batch` each flat token is."""
    from dataclasses import replace

    return unshare(replace(batch, ids=torch.arange(batch.num_tokens))).ids


def _refuse_altered_logits(model: nn.Module) -> None:
    """Logits that are scaled or capped after the head would be missed by the chunked log-prob."""
    config = model.config.get_text_config()
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0)):
        found = vars(config).get(name, neutral)
        if found not in (neutral, None):
            raise ValueError(f"{type(model).__name__} changes its logits after the head ({name}={found}); not supported")
