"""A second role on the policy's shards: its numbers, its state, and the one base."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BUDGET, EXPERTS, LORA, Case, differences, engine, gradients, model, share, with_random_factors
from forked import run
from test_gate import LAYOUTS

from verl.model_engine import rank_engine
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_parts import part_and_place
from verl.model_engine.layout import Layout
from verl.model_engine.lora import is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.sharded import part_of_rank
from verl.model_engine.torch_engine import build as build_torch
from verl.nn.torch_compat import sharded_parameters

SPREAD = ("FSDP, three", "HSDP", "FSDP x TP", "CP", "FSDP x EP", "PP")
"""Three ranks cannot share the tensors equally."""


def context_of(folder: Path, layout: Layout, **more: Any) -> EngineContext:
    given = {"dtype": "float64", "max_tokens_per_microbatch": BUDGET, "optim": OptimSpec(lr=1e-2), **more}
    return EngineContext(folder=folder, lora=LoraSpec(rank=5, alpha=10.0), layout=layout, **given)


def started(e: Any) -> Any:
    """The engine of a critic with a head and factors B that are not 0: the factors A have gradients."""
    with torch.no_grad():
        for name, p in e.local.trained_parameters().items():
            if name == "value_head.weight":
                mine, index = part_and_place(p)
                mine.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2))[index])
    return with_random_factors(e)


def turns(e: Any, case: Case, rank: int | None, count: int, policy: Any = None) -> dict[str, torch.Tensor]:
    """Make updates of a critic, and of the policy in turn with them; return the first gradients, and the
    weights that this process trains."""
    whole = {}
    for number in range(count):
        for one, role in ((e, "critic"), (policy, "actor")):
            if one is not None:
                at = replace(case, role=role)
                _, batch, passes = share(at, rank) if rank is not None else (None, at.batch()[1], 0)
                one.forward_backward(batch, at.batch()[2], passes)
                if one is e and number == 0:
                    whole = {f"gradient of {name}": g for name, g in gradients(e).items()}
                one.optim_step()
    return whole | {n: e.local.whole(p).clone() for n, p in e.local.trained_parameters().items()}


def base_shards(e: Any) -> dict[str, tuple[int, int]]:
    """Return the addresses of this rank's frozen weights: as they are read and written, and as they are gathered."""
    gathered = {id(one.sharded_param): one._sharded_param_data for one in sharded_parameters(e.local.root)}
    named = [(n, p) for n, p in e.model.named_parameters() if not is_factor(n)]
    return {n: tuple(t.untyped_storage().data_ptr() for t in (part_of_rank(p), gathered[id(p)])) for n, p in named}


@pytest.mark.parametrize("layout", LAYOUTS if os.environ.get("FULL_GRID") else SPREAD)
def test_a_critic_on_the_policys_shards_is_that_of_one_process(layout, tmp_path):
    """Gradients, updates and values while the policy is trained too. The state continues in one process, and that of
    one process on these ranks."""
    at = LAYOUTS[layout]
    sparse = at.expert > 1
    case = Case(at, "critic", model=EXPERTS if sparse else "qwen3, tied" if at.pipeline > 1 else "llama, biases")
    model(case.model).save_pretrained(tmp_path / "base")
    given: dict[str, Any] = {}
    if sparse:  # in float64 transformers cannot compute them, and Adam makes steps of noise
        given = {"dtype": "float32", "optim": OptimSpec(name="sgd", lr=1e-2)}
    one = context_of(tmp_path / "base", Layout(), head="value", **given)
    alone = started(build_torch(Options(), one))
    expected = turns(alone, case, None, 3)
    values = alone.infer(case.batch()[1], ("values",))["values"]
    alone.save(tmp_path / "alone")
    further = turns(alone, case, None, 1)
    trained = {n: p.clone() for n, p in alone.local.trained_parameters().items()}
    assert all(t.abs().max() > 0 for n, t in expected.items() if n.startswith("gradient"))

    def on(rank: int) -> Any:
        context = context_of(tmp_path / "base", at, **given)
        policy = rank_engine.build(Options(), context)
        before = {n: t.clone() for n, t in policy.masters.items()}
        critic = started(rank_engine.build_rank_sibling(policy, Options(), replace(context, head="value")))
        found = turns(critic, case, rank, 3, policy)
        rows, batch, _ = share(case, rank)
        mine = critic.infer(batch, ("values",))["values"]
        shards, lent = base_shards(policy), base_shards(critic)
        assert shards == lent and len(shards) > 8, "one base"
        assert all(a == b for a, b in lent.values()), "what is rounded in place is what is gathered"
        changed = {n for n, t in policy.masters.items() if not torch.equal(t, before[n])}
        assert changed and all(map(is_factor, changed))
        critic.save(tmp_path / "ranks")
        critic.load(tmp_path / "alone")
        return found, rows, mine, turns(critic, case, rank, 1)

    places = case.batch()[1].row_start
    rtol = 1e-4 if sparse else 1e-6
    for found, rows, mine, after in run(at.world_size, on):
        assert len(found) > 20 and not differences(found, {n: expected[n] for n in found}, rtol)
        assert not differences(after, {n: further[n] for n in after}, rtol)
        own = torch.cat([values[places[r] : places[r + 1]] for r in rows]) if len(rows) else values[:0]
        assert len(rows) == 0 or torch.allclose(mine, own, rtol=rtol, atol=rtol)
    again = build_torch(Options(), one)
    again.load(tmp_path / "ranks")
    assert again.optimizer_step == 3
    turns(again, case, None, 1)
    assert not differences({n: p.detach() for n, p in again.local.trained_parameters().items()}, trained, rtol)


def test_a_critic_on_shards_that_are_rounded_in_place():
    """Emulated bfloat16 writes into the shards that both gather from. Here each rank has read the model whole."""
    for layout in ("FSDP, three", "TP"):
        case = Case(LAYOUTS[layout], "critic", model="llama, biases" + LORA)
        given = {"dtype": "bfloat16", "emulate_bf16": True}
        expected = turns(engine(case.model, "critic", None, **given), case, None, 1)

        def on(rank: int, case: Case = case, given: dict = given) -> Any:
            policy = engine(case.model, "actor", case.layout, **given)
            critic = engine(case.model, "critic", case.layout, lender=policy.local, **given)
            assert base_shards(policy) == base_shards(critic)
            before = {n: t.clone() for n, t in policy.masters.items()}
            found = turns(critic, case, rank, 1)
            assert all(torch.equal(t, before[n]) for n, t in policy.masters.items())
            return found

        for found in run(case.layout.world_size, on):
            assert not differences(found, expected, rtol=1e-4), layout
