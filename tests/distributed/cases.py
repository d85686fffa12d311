"""One optimizer step, in one process and over the ranks of a layout: what both find."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import forked  # noqa: F401 - which knows where the next one is
import numpy as np
import torch
import torch.distributed as dist
from test_split import TEACHER, TOP_K, VOCAB, prepared, samples
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from verl.batch import Batch, select_rows, unshare, without_weight
from verl.driver.dispatch import shares
from verl.model_engine.hf_parts import part_and_place
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.pipeline import PipelinedEngine
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sharded import ShardedEngine
from verl.model_engine.torch_engine import TorchEngine
from verl.types import Refs, merge_metrics, ref_of

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=48,
    max_position_embeddings=256,
    initializer_range=0.3,
    head_dim=8,
    pad_token_id=23,  # a row of the embedding that gets no gradient, in one slice of the vocabulary
)
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama, biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    ),
}
EXPERTS = "qwen3, experts"  # MODELS of every layout, and this for those that spread experts
MODELS[EXPERTS] = lambda: Qwen3MoeForCausalLM(
    Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
)
LORA = ", LoRA"  # the end of the name of a model that is trained by its factors
HEADS = {"actor": "lm", "reference": "lm", "critic": "value", "reward_model": "score"}
OUTPUTS = {"reference": ("logprobs", "entropy", "sum_pi_squared"), "reward_model": ("scores",)}
TAUGHT = ("gkd", "gkd_topk")
OUTPUTS["teacher"] = ("hidden", "topk_ids", "topk_logprobs", "logprobs")
BUDGET = 60  # tokens of a pass: several passes on every rank


@cache
def model(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name.removesuffix(LORA)]()


def engine(name: str, role: str, layout: Layout | None, lender: Any = None, **given: Any) -> TorchEngine:
    """The model on this rank; without a layout in one process. lender: the model whose frozen shards it uses."""
    trained = role in ("actor", "critic", *TAUGHT)
    if role in TAUGHT:
        given["teacher"] = TEACHER
    if name.endswith(LORA):  # of a rank that 2, 3 and 4 processes cannot share equally
        targets = ["all-linear", *(["experts"] if name.startswith(EXPERTS) else [])]
        given.setdefault("lora", LoraSpec(rank=5, alpha=10.0, targets=targets))
    generator = torch.Generator().manual_seed(1)
    settings: dict[str, Any] = dict(
        head=HEADS.get(role, "lm"),
        optim=OptimSpec(lr=1e-2) if trained else None,
        dtype="float32",
        max_tokens_per_microbatch=BUDGET,
        score=torch.randn(1, SIZES["hidden_size"], generator=generator) if role in ("critic", "reward_model") else None,
        top_k=TOP_K,
    )
    own = copy.deepcopy(model(name))
    if layout is None:
        return with_random_factors(TorchEngine(own, EngineSettings(**settings | given)))
    kind = PipelinedEngine if layout.pipeline > 1 else ShardedEngine
    return with_random_factors(kind(own, EngineSettings(**settings | given), layout=layout, lender=lender))


@torch.no_grad()
def with_random_factors(e: TorchEngine) -> TorchEngine:
    """The engine with factors B that are not 0, else the factors A would have no gradient."""
    for name, p in e.model.named_parameters():
        if name.endswith("lora_B"):
            mine, index = part_and_place(p)
            generator = torch.Generator().manual_seed(len(name))
            mine.copy_(torch.randn(p.shape, generator=generator)[index] * 0.1)
    return e


@dataclass(frozen=True)
class Case:
    layout: Layout
    role: str = "actor"
    shared: bool = True
    idle: bool = False  # so few groups that a rank has no row
    model: str = "qwen3, tied"

    def batch(self) -> tuple[Refs, Batch, tuple[Any, ...]]:
        rows = [s for s in samples(11) if not self.idle or s.group_id == "001"]
        batch, terms = prepared(rows, {"critic": "ppo:critic", **{n: n for n in TAUGHT}}.get(self.role, "grpo"))
        return Refs(ref_of(s) for s in rows), batch if self.shared else unshare(batch), terms


def share(case: Case, rank: int) -> tuple[np.ndarray, Batch, int]:
    """The rows of a rank, their batch and the number of passes, as the driver gives them out."""
    refs, batch, _ = case.batch()
    found = shares(refs, case.layout.data, max_tokens=BUDGET, shares_prefix=case.shared)
    mine = found[case.layout.place(rank).data]
    rows = np.array(mine.rows or (0,), np.int64)
    part = select_rows(batch, rows)
    return np.array(mine.rows, np.int64), without_weight(part) if mine.idle else part, mine.num_microbatches


def gradients(e: TorchEngine) -> dict[str, Tensor]:
    """Whole, of all stages of a pipeline."""
    every = {n: p.grad for n, p in e.local.trained().named_parameters() if p.grad is not None}
    found = {n: e.local.whole(g).clone() for n, g in every.items()}
    if not isinstance(e, PipelinedEngine):
        return found
    stages: list[Any] = [None] * e.local.layout.pipeline
    dist.all_gather_object(stages, found, group=e.local.column)
    first, last = stages[0], stages[-1]
    assert all(torch.equal(first[n], last[n]) for n in first.keys() & last.keys()), "what both hold moves as one"
    return {n: g for stage in stages for n, g in stage.items()}


def one_process(case: Case, **given: Any) -> dict[str, Tensor]:
    _, batch, terms = case.batch()
    e = engine(case.model, case.role, None, **given)
    if case.role in OUTPUTS:
        return e.infer(batch, OUTPUTS[case.role])
    out = e.forward_backward(batch, terms)
    return {"loss": torch.tensor(sum(out.metrics[t.name].total for t in terms)), **out.columns, **gradients(e)}


def on_rank(case: Case, rank: int, **given: Any) -> dict[str, Any]:
    """Return the results of one rank: its rows of the outputs, its share of the loss, and whole gradients."""
    rows, batch, count = share(case, rank)
    e = engine(case.model, case.role, case.layout, **given)
    if case.role in OUTPUTS:
        return {"rows": rows, "columns": e.infer(batch, OUTPUTS[case.role]), "whole": {}, "metrics": {}}
    out = e.forward_backward(batch, case.batch()[2], count)
    return {"rows": rows, "columns": dict(out.columns), "whole": gradients(e), "metrics": out.metrics}


def together(case: Case, found: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The ranks' answers as one process would have given them; peers that compute the same rows must agree."""
    refs, batch, terms = case.batch()
    out: dict[str, Tensor] = dict(found[0]["whole"])
    for rank, theirs in enumerate(found):
        data = case.layout.place(rank).data
        primary = found[case.layout.primaries[data]]
        assert theirs["metrics"] == primary["metrics"]
        assert all(torch.equal(theirs["columns"][n], c) for n, c in primary["columns"].items())
        assert all(torch.allclose(theirs["whole"][n], g, rtol=1e-6) for n, g in found[0]["whole"].items())
    for primary in case.layout.primaries:
        rows = found[primary]["rows"]
        if len(rows) == 0:
            continue
        for name, values in found[primary]["columns"].items():
            per_row = name == "scores"
            size = batch.num_rows if per_row else batch.num_loss_tokens
            whole = out.setdefault(name, torch.full((size, *values.shape[1:]), torch.nan))
            at = torch.from_numpy(rows)
            if not per_row:
                spans = [torch.arange(int(batch.row_start[r]), int(batch.row_start[r + 1])) for r in rows]
                at = torch.cat(spans)
            whole[at] = values.to(whole.dtype)
    if case.role not in OUTPUTS:
        metrics = merge_metrics([found[r]["metrics"] for r in case.layout.primaries])
        out["loss"] = torch.tensor(sum(metrics[t.name].total for t in terms))
    return out


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> list[str]:
    """Tensors that differ by more than rtol of their largest value."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = []
    for name, e in expected.items():
        scale = float(e.abs().max())
        off = float((found[name] - e).abs().max())
        if not off <= rtol * max(scale, 1e-3):
            wrong.append(f"{name}: {off / max(scale, 1e-12):.2g} of its largest")
    return wrong
