"""Training in bfloat16 with a copy of the weights that computes, over ranks that share the weights: what one process
with its copy finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cases import EXPERTS, LORA, Case, differences, engine, model, on_rank, one_process, share, together
from forked import run
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec

COPIES: dict[str, Any] = {"dtype": "bfloat16", "emulate_bf16": False, "copies_weights": True}
LAYOUTS = {
    "one": Layout(world_size=1),
    "FSDP": Layout(world_size=2),
    "HSDP": Layout(world_size=4, replicate=2),
    "TP": Layout(world_size=2, tensor=2),
    "FSDP x TP": Layout(world_size=4, tensor=2),
    "FSDP x SP": Layout(world_size=4, sequence=2),
    "CP": Layout(world_size=2, context=2),
    "PP": Layout(world_size=2, pipeline=2),
    "FSDP x PP": Layout(world_size=4, pipeline=2),
    "FSDP x EP": Layout(world_size=4, expert=2),
}
TWO = LAYOUTS["FSDP"]


def case_of(name: str, role: str) -> Case:
    at = LAYOUTS[name.removesuffix(LORA)]
    kind = EXPERTS if at.expert > 1 else "llama, biases" if name.startswith("FSDP") else "qwen3, tied"
    return Case(at, role, model=kind + LORA * name.endswith(LORA))


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the error of all gradients together, as a share of their norm."""
    names = [n for n, p in model_names(exact) if p.dim()]
    flat = [torch.cat([of[n].double().flatten() for n in names]) for of in (found, exact)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def model_names(of: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in of.items() if n.endswith(("weight", "bias", "lora_A", "lora_B"))]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_gradients_of_ranks_are_those_of_the_copy_of_one_process(role):
    """Slices are summed in bfloat16, elsewhere sums differ in their order; the gradients are reduced in float32."""
    factors = [name + LORA for name in ("one", "HSDP", "FSDP x TP", "PP")]
    for name in (*LAYOUTS, *factors) if role == "actor" else ("FSDP", "TP", "PP"):
        case = case_of(name, role)
        exact, own = one_process(case), one_process(case, **COPIES)
        found = together(case, run(case.layout.world_size, lambda rank, case=case: on_rank(case, rank, **COPIES)))
        assert all(found[n].dtype == torch.float32 for n, _ in model_names(found))
        usual, apart, off = error(own, exact), error(found, own), error(found, exact)
        assert usual > 5e-3, "the copy changes nothing"
        assert apart < (1.6 * usual if case.layout.tensor > 1 else 6e-3), (name, apart, usual)
        assert off < 1.6 * usual, (name, off, usual)
        assert case.layout.world_size > 1 or apart == 0


def counted(case: Case, rank: int, **given: Any) -> dict[str, int]:
    """Bytes that one rank sends to gather weights and to reduce gradients in a step."""
    _, batch, count = share(case, rank)
    e = engine(case.model, "actor", case.layout, **given)
    found = {"gathered": 0, "reduced": 0}

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.c10d._allgather_base_.default:
                found["gathered"] += args[1].nbytes
            if func is torch.ops.c10d._reduce_scatter_base_.default:
                found["reduced"] += args[1].nbytes
            return func(*args, **kwargs or {})

    with Counts():
        e.forward_backward(batch, case.batch()[2], count)
    return found


def test_half_the_bytes_are_gathered_and_gradients_are_reduced_in_float32():
    for case in (Case(TWO), Case(LAYOUTS["HSDP"])):
        copied, plain = (
            run(case.layout.world_size, lambda rank, given=given, case=case: counted(case, rank, **given))
            for given in (COPIES, {"dtype": "float32"})
        )
        for mine, theirs in zip(copied, plain, strict=True):
            assert 0 < 2 * mine["gathered"] == theirs["gathered"]
            assert 0 < mine["reduced"] == theirs["reduced"]


def logprobs(e: Any, batch: Any, **how: Any) -> Tensor:
    return e.infer(batch, ("logprobs",), **how)["logprobs"]


def updated(e: Any, case: Case, rank: int) -> None:
    _, batch, count = share(case, rank)
    e.forward_backward(batch, case.batch()[2], count)
    e.optim_step()


@pytest.mark.parametrize("name", ["FSDP", "HSDP", "TP", "PP"])
def test_the_copy_is_cast_once_per_optimizer_step_and_follows_the_masters(name, tmp_path):
    case = case_of(name, "actor")
    given = COPIES | {"optim": OptimSpec(lr=1e-2, average=0.5)}

    def follows(rank: int) -> None:
        e = engine(case.model, "actor", case.layout, **given)
        batch = share(case, rank)[1]
        before = logprobs(e, batch)
        shards = [e.local.local(p) for p in e.local.model.parameters()]
        with casts(shards) as made:
            gradient(e, case, rank)
        assert made == [sum(t.untyped_storage().nbytes() for t in shards)], "each shard once"
        assert torch.equal(before, logprobs(e, batch))
        e.optim_step()
        after, averaged = logprobs(e, batch), logprobs(e, batch, average=True)
        assert torch.equal(after, logprobs(e, batch)) and not torch.equal(after, averaged)
        assert not torch.equal(before, after)
        e.save(tmp_path)
        again = engine(case.model, "actor", case.layout, **given)
        logprobs(again, batch)
        again.load(tmp_path)
        assert torch.equal(after, logprobs(again, batch))
        for one in (e, again):  # resumed bitwise
            gradient(one, case, rank)
            one.optim_step()
        for (n, w), (m, v) in zip(e.weights(), again.weights(), strict=True):
            assert n == m and w.dtype == torch.float32 and torch.equal(w, v), n

    run(case.layout.world_size, follows)


def gradient(e: Any, case: Case, rank: int) -> None:
    _, batch, count = share(case, rank)
    e.forward_backward(batch, case.batch()[2], count)


@contextmanager
def casts(of: list[Tensor]) -> Iterator[list[int]]:
    """Yield a list with the bytes of these tensors that are cast to bfloat16 inside the context."""
    found, own = [0], {t.untyped_storage().data_ptr() for t in of}

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and not isinstance(args[0], DTensor):
                found[0] += args[0].nbytes * (args[0].untyped_storage().data_ptr() in own)
            return func(*args, **kwargs or {})

    with Counts():
        yield found


@pytest.mark.parametrize("options", [{"optim": None}, {"offload": ("weights", "optimizer")}])
def test_frozen_models_and_offloaded_weights_compute_with_a_copy_too(options):
    case = Case(TWO)

    def found(rank: int, **given: Any) -> Tensor:
        return logprobs(engine(case.model, "actor", TWO, **COPIES | given), share(case, rank)[1])

    for mine, usual in zip(run(2, lambda rank: found(rank, **options)), run(2, found), strict=True):
        assert torch.equal(mine, usual)


def test_the_check_at_start_and_all_that_leaves_are_of_the_masters():
    """Also after a pass, and after one that failed."""
    probes = [np.arange(2, 12)]
    for name in ("FSDP", "TP", "PP"):
        case = case_of(name, "actor")
        alone = engine(case.model, "actor", None)
        expected = dict(alone.weights())

        def leaves(rank: int, case: Case = case) -> Any:
            e = engine(case.model, "actor", case.layout, **COPIES)
            batch, terms = share(case, rank)[1], case.batch()[2]
            found = [e.check_packing(share_prefix=True)]
            before = logprobs(e, batch)
            with pytest.raises(AssertionError, match="a loss is of outputs"):
                e.forward_backward(batch, terms, 1, ("scores",))
            found.append(e.check_packing(share_prefix=True))
            assert torch.equal(before, logprobs(e, batch))
            return found, dict(e.weights()), e.own_logprobs(probes, "float32")[0]

        for worst, sent, own in run(case.layout.world_size, leaves):
            assert all(0 < w < 1e-4 for w in worst), "the check computes in float32"
            assert not differences(sent, expected, rtol=0)
            assert np.allclose(own, alone.own_logprobs(probes, "float32")[0], atol=1e-5)


def test_parameters_that_a_model_keeps_in_float32_are_gathered_so(monkeypatch):
    case = Case(TWO)
    monkeypatch.setattr(model(case.model), "_keep_in_fp32_modules_strict", {"norm"}, raising=False)

    def dtypes(rank: int) -> Any:
        e, seen = engine(case.model, "actor", TWO, **COPIES), {}
        for name in ("norm", "embed_tokens"):
            module = getattr(e.model.base_model, name)
            module.register_forward_pre_hook(lambda m, *_, name=name: seen.update({name: m.weight.dtype}))
        gradient(e, case, rank)
        return seen, {p.grad.dtype for p in e.local.trained().parameters()}

    for seen, grads in run(2, dtypes):
        assert seen == {"norm": torch.float32, "embed_tokens": torch.bfloat16} and grads == {torch.float32}
