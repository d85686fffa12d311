"""Models with gated delta nets: every way to compute a batch has the log-probs and gradients of transformers, row by
row, and no row is visible in another one's states."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from causal_models import build
from hybrid import KINDS, VOCAB, model, rows
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from verl.algorithms.losses import nll
from verl.batch import Batch, pack, select_rows
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.delta_net import gated_delta_rule
from verl.objective import Term
from verl.types import Segment

NLL = (Term(name="loss", fn=nll),)
PATHS: dict[str, dict[str, Any]] = {
    "shared": {},
    "few tokens in a pass": {"max_tokens_per_microbatch": 80},
    "not shared": {"share_prefix": False},
    "padded": {"share_prefix": False, "attention_mode": "padded"},
    "padded after sharing": {"attention_mode": "padded"},
    "checkpointed": {"gradient_checkpointing": "full"},
}


@cache
def expected(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of all rows, and the gradients, by transformers, each row alone."""
    reference, found = model(kind), list[Tensor]()
    for row, weights in zip(rows(), shares()):
        ids, sampled, at = np.concatenate([s.ids for s in row.segments]), list[int](), 0
        for s in row.segments:
            sampled += range(at, at + len(s.ids)) if s.source == "sampled" else ()
            at += len(s.ids)
        logits = reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].log_softmax(-1)
        logprobs = logits[torch.tensor(sampled) - 1, torch.from_numpy(ids)[sampled]]
        (-(logprobs * weights).sum()).backward()
        found.append(logprobs.detach())
    return torch.cat(found), {n: p.grad for n, p in reference.named_parameters()}


def shares() -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.rand(row.loss_tokens, generator=rng) for row in rows()]


def batch_of(*, share_prefix: bool = True) -> Batch:
    return pack(rows(), share_prefix=share_prefix).with_columns({"w/loss": torch.cat(shares())})


def engine_of(kind: str, of: Any = None, **settings: Any) -> TorchEngine:
    settings = {"dtype": "float32", "optim": OptimSpec(lr=0.1, weight_decay=0.0), **settings}
    return TorchEngine(copy.deepcopy(of) if of is not None else model(kind), EngineSettings(**settings))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_has_the_logprobs_and_gradients_of_transformers(kind: str, path: str) -> None:
    engine = engine_of(kind, **PATHS[path])
    batch = batch_of(share_prefix=PATHS[path].get("share_prefix", True))
    own, gradients = expected(kind)
    out = engine.forward_backward(batch, NLL, extra_outputs=("logprobs",))
    torch.testing.assert_close(out.columns["logprobs"], own, rtol=0, atol=1e-5)
    found = {n: p.grad for n, p in engine.model.named_parameters()}
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        assert scale > 1e-4, name
        torch.testing.assert_close(
            found[name] / scale, gradient / scale, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_prompts_and_turns_are_shared() -> None:
    batch = batch_of()
    forks = [s for s in range(len(batch.parent)) if (batch.parent == s).sum() > 1]
    assert (batch.parent < 0).sum() == 4 and len(forks) == 5 and any(batch.parent[s] in forks for s in forks)


@pytest.mark.parametrize("tokens", (1, 5, 64, 65, 150))
def test_a_chunked_rule_equals_the_rule_token_by_token(tokens: int) -> None:
    """And a state continues a row; tokens of zeros leave it as it is."""
    rng = torch.Generator().manual_seed(tokens)
    shapes = ((2, tokens, 3, 8), (2, tokens, 3, 8), (2, tokens, 3, 5), (2, tokens, 3), (2, tokens, 3), (2, 3, 8, 5))
    q, k, v, decay, rate, state = (torch.randn(shape, generator=rng) for shape in shapes)
    decay, rate, k = -decay.abs(), rate.sigmoid(), k / k.norm(dim=-1, keepdim=True)
    given: dict[str, Any] = {"g": decay, "beta": rate, "initial_state": state, "output_final_state": True}
    found = gated_delta_rule(q * 8**-0.5, k, v, decay, rate, state)
    for rule in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        torch.testing.assert_close(found, rule(q, k, v, **given), rtol=0, atol=1e-5)
    halves, at = [], state
    for part in (slice(0, tokens // 3), slice(tokens // 3, None)):
        if len(range(tokens)[part]):
            out, at = gated_delta_rule(q[:, part] * 8**-0.5, k[:, part], v[:, part], decay[:, part], rate[:, part], at)
            halves.append(out)
    torch.testing.assert_close((torch.cat(halves, 1), at), found, rtol=0, atol=1e-5)
    zeros = (x.new_zeros(2, 7, *x.shape[2:]) for x in (q, k, v, decay, rate))
    assert torch.equal(gated_delta_rule(*zeros, state)[1], state)


@pytest.mark.parametrize("place", ("first", "last"))
def test_a_row_of_other_states_changes_nothing_in_its_neighbours(place: str) -> None:
    """The neighbour's embeddings are NaN, and all layers keep states."""
    made = model("qwen3_5_text", layer_types=["linear_attention"] * 3)
    alone = engine_of("", made, optim=None).infer(pack(rows()), ("logprobs",))["logprobs"]
    with torch.no_grad():
        made.model.embed_tokens.weight[VOCAB - 1] = torch.nan
    ids = np.full(9, VOCAB - 1)
    answer = Segment(ids=ids[:4], source="sampled", logprobs=np.zeros(4, np.float32), version=0)
    poison = replace(rows()[0], trajectory_id="p", segments=(Segment(ids=ids, source="prompt"), answer))
    batch = pack([poison, *rows()] if place == "first" else [*rows(), poison])
    found = engine_of("", made, optim=None).infer(batch, ("logprobs",))["logprobs"]
    near = found[4:] if place == "first" else found[:-4]
    torch.testing.assert_close(near, alone, rtol=0, atol=1e-5)


def test_a_split_of_rows_is_not_visible() -> None:
    engine, batch = engine_of("qwen3_next", optim=None), batch_of()
    whole = engine.infer(batch, ("logprobs",))["logprobs"]
    parts = [engine.infer(select_rows(batch, np.array([row])), ("logprobs",))["logprobs"] for row in range(len(rows()))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)
    assert engine.check_packing(share_prefix=True) < 1e-5


def test_states_that_are_not_computed_for_packed_rows_are_refused() -> None:
    """Whatever the size of their influence, which the check at start measures."""
    for kind in ("lfm2_moe", "olmo_hybrid", "mamba"):
        other = build(kind)
        with pytest.raises(ValueError, match=rf"model_type {kind}\) has layers that keep a state .*attention=padded"):
            engine_of("", other, optim=None)
        assert engine_of("", other, optim=None, attention_mode="padded").check_packing(share_prefix=False) < 1e-4
    renamed = model("qwen3_5_text")
    renamed.model.layers[0].linear_attn.A_log_of_another_name = (
        renamed.model.layers[0].linear_attn.__dict__["_parameters"].pop("A_log")
    )
    with pytest.raises(ValueError, match="has layers that keep a state"):
        engine_of("", renamed, optim=None)
    engine = engine_of("qwen3_5_text", optim=None)
    net = engine.model.model.layers[0].linear_attn
    with pytest.raises(ValueError, match="computes whole packed rows, and got a part of them"):
        net(torch.zeros(1, 3, 32))
