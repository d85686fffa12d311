"""Weights in and out of the Megatron engine, bit by bit; its updates, its checkpoints, and mistakes in its names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import EXPERTS, Case, differences, engine, share
from forked import run
from megatron_engines import LAYOUTS, built, folder
from torch import Tensor

from verl.errors import Refused
from verl.model_engine import megatron_names
from verl.model_engine.base import WeightPart
from verl.model_engine.layout import Layout
from verl.model_engine.megatron_names import FAMILIES, Piece, rows_of
from verl.model_engine.megatron_options import MODEL_TYPES, Options
from verl.model_engine.optim import OptimSpec

TIED, BIASES = "qwen3, tied", "llama, biases"
SPEC = OptimSpec(lr=1e-2, eps=1e-2, weight_decay=0.1)  # so large an eps that the noise of a gradient of 0 is no step


def assembled(parts: list[list[tuple[str, tuple[int, ...], Any, Tensor | None]]]) -> dict[str, Tensor]:
    """The tensors that the parts of all ranks make together; each element is in one part."""
    whole: dict[str, Tensor] = {}
    for of_rank in parts:
        assert [name for name, *_ in of_rank] == [name for name, *_ in parts[0]], "one order on all ranks"
        for name, shape, index, mine in of_rank:
            into = whole.setdefault(name, torch.full(shape, torch.nan))
            if mine is not None:
                assert into[index].isnan().all(), f"{name} is in two parts"
                into[index] = mine
    return whole


def described(part: WeightPart) -> tuple[str, tuple[int, ...], Any, Tensor | None]:
    return part.name, part.shape, part.index, None if part.mine is None else part.mine().clone()


@pytest.mark.parametrize(
    "layout, name", [("TP", BIASES), ("PP", TIED), ("TP x DP", TIED), ("TP x EP", EXPERTS), ("PP x EP", EXPERTS)]
)
def test_weights_come_out_as_they_went_in(layout, name):
    """By parts, as a publish sends them, and whole, as they are exported; the log-probs of both ways agree."""
    expected = dict(engine(name, "actor", None).weights())
    folder(name)

    def on(rank: int) -> tuple[Any, Any, float]:
        e = built(name, "actor", LAYOUTS[layout])
        parts = [described(part) for part in e.weight_parts()]
        exported = {n: t.clone() for n, t in e.exported()}
        return parts, exported, e.check_packing(share_prefix=False)

    found = run(LAYOUTS[layout].world_size, on)
    published = assembled([parts for parts, _, _ in found])
    for of in (published, *(exported for _, exported, _ in found)):
        assert of.keys() == expected.keys()
        assert all(torch.equal(of[n], t) for n, t in expected.items())
    assert max(off for *_, off in found) < 1e-4


def updated(e: Any, case: Case, rank: int | None, steps: int) -> list[float]:
    """Do optimizer steps, each with its gradient; return the norms."""
    _, whole, terms = case.batch()
    _, batch, count = share(case, rank) if rank is not None else (None, whole, 0)
    norms = []
    for _ in range(steps):
        e.forward_backward(batch, terms, count)
        norms.append(e.optim_step()["grad_norm"].total)
    return norms


@pytest.mark.parametrize(
    "layout, name, distributed",
    [
        ("TP", TIED, False),
        ("TP x DP", TIED, True),
        ("PP x DP", TIED, True),
        ("DP", BIASES, True),
        ("EP", EXPERTS, True),
        ("TP x EP", EXPERTS, True),
    ],
)
def test_three_updates_are_those_of_one_process_and_continue_elsewhere(layout, name, distributed, tmp_path):
    """Weights and norms after three steps; then a checkpoint of two steps, of which one process does the third."""
    case = Case(LAYOUTS[layout], model=name)
    one = engine(name, "actor", None, optim=SPEC)
    norms = updated(one, case, None, 3)
    folder(name)

    def on(rank: int) -> tuple[dict[str, Tensor], list[float]]:
        e = built(name, "actor", case.layout, options=Options(distributed_optimizer=distributed), optim=SPEC)
        found = updated(e, case, rank, 2)
        snapshot = e.snapshot()
        found += updated(e, case, rank, 1)
        snapshot.save(tmp_path / "two")
        e.save(tmp_path / "three")
        return {n: t.clone() for n, t in e.exported()}, found

    for weights, found in run(case.layout.world_size, on):
        np.testing.assert_allclose(found, norms, rtol=1e-4)
        assert not (wrong := differences(weights, dict(one.weights()), rtol=1e-4)), wrong
    again = engine(name, "actor", None, optim=SPEC)
    again.load(tmp_path / "two")
    assert again.optimizer_step == 2
    updated(again, case, None, 1)
    assert not (wrong := differences(dict(again.weights()), dict(one.weights()), rtol=1e-4)), wrong
    again.load(tmp_path / "three")
    assert again.optimizer_step == 3
    assert not (wrong := differences(dict(again.weights()), dict(one.weights()), rtol=1e-4)), wrong


@pytest.mark.parametrize("layout, name", [("PP x DP", TIED), ("TP x EP", EXPERTS)])
def test_a_checkpoint_of_one_process_continues_on_megatron(layout, name, tmp_path):
    case = Case(LAYOUTS[layout], model=name)
    one = engine(name, "actor", None, optim=SPEC)
    updated(one, case, None, 2)
    one.save(tmp_path / "two")
    updated(one, case, None, 1)
    folder(name)

    def on(rank: int) -> tuple[dict[str, Tensor], int]:
        e = built(name, "actor", case.layout, options=Options(), optim=SPEC)
        e.load(tmp_path / "two")
        updated(e, case, rank, 1)
        return {n: t.clone() for n, t in e.exported()}, e.optimizer_step

    for weights, steps in run(case.layout.world_size, on):
        assert steps == 3
        assert not (wrong := differences(weights, dict(one.weights()), rtol=1e-4)), wrong


def test_a_gradient_that_is_not_finite_changes_nothing():
    case = Case(LAYOUTS["TP"])
    folder(case.model)

    def on(rank: int) -> tuple[bool, float, float]:
        e = built(case.model, "actor", case.layout, options=Options())
        before = [p.detach().clone() for p in e.local.parameters.values()]
        _, batch, count = share(case, rank)
        e.forward_backward(batch, case.batch()[2], count)
        if rank == 1:
            next(iter(e.local.parameters.values())).main_grad[0] = torch.nan
        skipped = e.optim_step()["skipped_updates"].total
        same = all(torch.equal(a, b) for a, b in zip(before, e.local.parameters.values(), strict=True))
        e.forward_backward(batch, case.batch()[2], count)
        return same, skipped, e.optim_step()["grad_norm"].total

    norm = updated(engine(case.model, "actor", None), case, None, 1)[0]
    for same, skipped, after in run(2, on):
        assert same and skipped == 1
        np.testing.assert_allclose(after, norm, rtol=1e-4)


def heads_first(way: Any, config: Any, made: Any) -> Any:
    """All queries, then all keys, then all values, in place of group after group."""
    width, queries, keys = 8, config.num_attention_heads, config.num_key_value_heads
    ends = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
    if way not in ends:
        return made(way, config)
    start, end = ends[way]
    return lambda t: t.view(-1, width, *t.shape[1:])[start:end]


MISTAKES = {
    "heads that are not by group": heads_first,
    "keys and values swapped": lambda way, config, made: made({"k": "v", "v": "k"}.get(way, way), config),
    "gate and up swapped": lambda way, config, made: made({"gate": "up", "up": "gate"}.get(way, way), config),
}


def start_fails(layout: str, name: str) -> list[str]:
    """The messages of the check at start, which every run makes, of each rank; empty where it found nothing."""
    folder(name)

    def on(_: int) -> str:
        try:
            built(name, "actor", LAYOUTS[layout]).check_packing(share_prefix=False)
        except ValueError as e:
            return str(e)
        return ""

    return run(LAYOUTS[layout].world_size, on)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_names_is_seen_at_the_start(mistake, monkeypatch):
    """A round trip does not see it, since what reads also writes."""
    views, made = MISTAKES[mistake], megatron_names._pick_of
    monkeypatch.setattr(megatron_names, "_pick_of", lambda way, config: views(way, config, made))
    assert all(start_fails("one", BIASES)), "a model whose weights are elsewhere was trained"


def test_two_heads_swapped_are_seen_at_the_start(monkeypatch):
    def first_two(part: Tensor) -> Tensor:
        heads = part.reshape(-1, 8, *part.shape[1:])
        return torch.cat([heads[1:2], heads[:1], heads[2:]]).reshape(part.shape)

    read, write = Piece.read, Piece.write
    monkeypatch.setattr(Piece, "read", lambda p, ts: first_two(read(p, ts)) if "q_proj" in p.name else read(p, ts))
    monkeypatch.setattr(Piece, "write", lambda p, ts, x: write(p, ts, first_two(x) if "q_proj" in p.name else x))
    assert all(start_fails("one", BIASES))


def test_a_wrong_split_dimension_is_seen(monkeypatch):
    """Rows of the output projection of attention, in place of its columns: a square matrix has both."""
    made = megatron_names._piece

    def planted(name: str, shape: Any, row: Any, *given: Any) -> Any:
        return made(name, shape, row._replace(way="rows") if name.endswith("o_proj.weight") else row, *given)

    monkeypatch.setattr(megatron_names, "_piece", planted)
    with pytest.raises(RuntimeError, match="o_proj.weight: .* is not"):
        start_fails("TP", BIASES)


def test_a_tied_head_that_is_sent_twice_is_seen(monkeypatch):
    """The copy of the embeddings on the last stage is delivered by the first stage alone."""
    made = megatron_names._piece

    def planted(*given: Any) -> Any:
        return made(*given[:-1], True)

    monkeypatch.setattr(megatron_names, "_piece", planted)
    folder(TIED)

    def on(rank: int) -> list[str]:
        return sorted(built(TIED, "actor", LAYOUTS["PP"]).local.trained_pieces())

    first, last = run(2, on)
    assert {*first} & {*last} == {"model.embed_tokens.weight"}, "what the gate's checkpoints refuse"


REFUSED = {
    "parallel.tensor=3": (Layout(world_size=3, tensor=3), "8 attention heads"),
    "parallel.context=2": (Layout(world_size=2, context=2), "Transformer Engine"),
    "parallel.expert=2": (Layout(world_size=2, expert=2), "0 experts"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_layouts_that_cannot_be_are_refused_with_their_divisor(key):
    layout, why = REFUSED[key]
    folder(TIED)

    def on(_: int) -> str:
        with pytest.raises(Refused) as caught:
            built(TIED, "actor", layout)
        return str(caught.value)

    found = run(layout.world_size, on)
    assert all(line.startswith(key) and why in line for line in found), found[0]


def test_every_family_has_names_and_is_known_to_configuration():
    assert tuple(sorted(FAMILIES)) == tuple(sorted(MODEL_TYPES))
    with pytest.raises(Refused, match="no names of gemma3 models.*sharded"):
        rows_of("gemma3")
