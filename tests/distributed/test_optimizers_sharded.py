"""Optimizers over several ranks: the updates and the checkpoints of one process."""

from __future__ import annotations

import os

import pytest
from cases import LORA, Case, differences, engine
from forked import run
from test_optimizers import CONFIG, STEPS, gradients, toy, trained
from test_state import EXACT, LAYOUTS, ONE, steps, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from verl.model_engine import optimizer_table, update_rules
from verl.model_engine.optim import OptimSpec
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.model_engine.optimizers import make_optimizer

OPTIONS = {"apollo": {"rank": 3, "renew_every": 2}, "sgd": {"momentum": 0.9}}
OTHERS = [name for name in OPTIMIZERS if name != "adamw"]
FULL = bool(os.environ.get("FULL_GRID"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 values, so that the rows of a tiny model have several, and none is too small for them."""
    monkeypatch.setattr(update_rules, "BLOCK", 8)
    monkeypatch.setattr(optimizer_table, "SMALL", 1)


def built(name, layout, model="qwen3, tied"):
    spec = OptimSpec(lr=1e-2, name=name, options=OPTIONS.get(name, {}))
    return engine(model, "actor", layout, optim=spec, **EXACT)


def tolerance(name):
    """Codes of 8 bits and products in bfloat16 amplify the last bit of a gradient, where it decides a rounding."""
    return {"adamw_8bit": 2e-2, "muon": 2e-2}.get(name, 1e-8)


RANKS = tuple(LAYOUTS) if FULL else ("three", "four", "stages")


def able(layout):
    return [name for name in OTHERS if layout is None or layout.tensor == 1 or OPTIMIZERS[name].splits_rows]


@pytest.mark.parametrize("ranks", (*RANKS, "three" + LORA))
def test_updates_agree_for_every_number_of_ranks(ranks):
    """Among them three ranks that share no size equally, copies of shards, and stages of a pipeline."""
    model, layout = "llama, biases" + LORA * ranks.endswith(LORA), LAYOUTS[ranks.removesuffix(LORA)]
    case, names = Case(layout, model=model), able(layout)
    found = run(
        layout.world_size,
        lambda rank: {name: weights(steps(case, rank, 2, built(name, layout, model))) for name in names},
    )
    for name in names:
        start, expected = weights(built(name, None, model)), weights(steps(case, None, 2, built(name, None, model)))
        assert max(float((expected[n] - w).abs().max()) for n, w in start.items()) > 1e-3, "nothing was learned"
        for theirs in found:
            assert not differences(theirs[name], expected, rtol=tolerance(name)), name


@pytest.mark.parametrize("count", (2, 4))
def test_twenty_updates_by_given_gradients_are_those_that_are_compared_with_the_references(count):
    """The model and the gradients of `tests/numerics/test_optimizers.py`, which compares one process with each of
    them."""
    options = {name: OPTIONS.get(name, {}) for name in OPTIMIZERS}

    def on(rank):
        found = {}
        for name, own in options.items():
            model, whole = fully_shard(toy(), mesh=init_device_mesh("cpu", (count,))), toy()
            optimizer = make_optimizer(model, OptimSpec(lr=1e-3, weight_decay=0.1, name=name, options=own), CONFIG)
            for step in range(STEPS):
                gradients(whole, step)
                for p, of in zip(model.parameters(), whole.parameters(), strict=True):
                    p.grad = distribute_tensor(of.grad, p.device_mesh, p.placements)
                optimizer.step()
            found[name] = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
        return found

    for theirs in run(count, on):
        for name, own in options.items():
            expected = dict(trained(name, options=own)[0].named_parameters())
            for tensor, found in theirs[name].items():
                assert (found - expected[tensor]).abs().max() < 1e-6, (name, tensor)


@pytest.mark.parametrize(("writer", "reader"), [("none", "three"), ("four", "none"), ("two", "stages")])
def test_a_checkpoint_of_any_world_continues_on_any_other(writer, reader, tmp_path):
    """Two steps, a checkpoint, two more steps: the weights are those of four steps in one process, for any layouts that
    write and read."""
    layout, theirs = LAYOUTS.get(writer), LAYOUTS.get(reader)

    def write(rank):
        for name in OTHERS:
            steps(Case(layout or ONE), rank, 2, built(name, layout)).save(tmp_path / name)

    def read(rank):
        found = {}
        for name in OTHERS:
            e = built(name, theirs)
            e.load(tmp_path / name)
            found[name] = weights(steps(Case(theirs or ONE), rank, 2, e))
        return found

    run(layout.world_size, write) if layout else write(None)
    found = run(theirs.world_size, read)[-1] if theirs else read(None)
    for name in OTHERS:
        expected = weights(steps(Case(ONE), None, 4, built(name, None)))
        assert not differences(found[name], expected, rtol=tolerance(name)), name


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    steps(Case(ONE), None, 1, built("adamw", None)).save(tmp_path / "c")
    for name in ("muon", "adamw_8bit", "sgd"):
        with pytest.raises(ValueError, match="resume with the optim.name that it was begun with"):
            built(name, None).load(tmp_path / "c")
