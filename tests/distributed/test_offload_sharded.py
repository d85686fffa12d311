"""State that leaves the device between two uses: the same numbers, and the bytes that are there meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import MODELS, Case, engine, model, on_rank, share
from forked import run, tensor_bytes
from safetensors.torch import load_file
from test_gate import LAYOUTS
from test_loading import BIG
from torch import Tensor

from verl.model_engine import host_places, offload
from verl.model_engine.optim import OptimSpec
from verl.model_engine.sharded import part_of_rank

EVERYTHING = ("weights", "optimizer")


def steps(case: Case, rank: int, e: Any, count: int) -> Any:
    _, batch, passes = share(case, rank)
    for _ in range(count):
        e.forward_backward(batch, case.batch()[2], passes)
        e.optim_step()
    return e


def same_files(one: Path, two: Path) -> None:
    """Return True if two checkpoints of a state are equal."""
    names = sorted(p.name for p in one.glob("*.safetensors"))
    assert names and names == sorted(p.name for p in two.glob("*.safetensors"))
    for name in names:
        a, b = load_file(one / name), load_file(two / name)
        assert a.keys() == b.keys()
        assert not [n for n, t in a.items() if not torch.equal(t, b[n])], (two.name, name)


def state_bytes(e: Any) -> int:
    """Return the bytes of weights and optimizer states on the device."""
    tensors = [*e.local.tensors(), *e.updates.tensors()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


CUT = ("FSDP x EP", "FSDP x PP")
if os.environ.get("FULL_GRID"):
    CUT += ("FSDP", "FSDP, three", "FSDP x TP", "HSDP x SP")


@pytest.mark.parametrize("layout", CUT)
def test_a_state_that_comes_and_goes_is_the_state_that_stays(layout, tmp_path):
    """Bitwise: steps, outputs, what is saved and loaded, what is published."""
    at = LAYOUTS[layout]
    case = Case(at, model="qwen3, experts" if at.expert > 1 else "qwen3, tied")

    def compared(rank: int) -> tuple[int, int]:
        stays, goes = (engine(case.model, "actor", at, offload=parts) for parts in ((), EVERYTHING))
        for e in (stays, goes):
            steps(case, rank, e, 2)
        assert state_bytes(goes) == 0 < state_bytes(stays)
        bring = offload._Offloaded.bring
        for e, name in ((stays, "stays"), (goes, "goes")):
            with pytest.MonkeyPatch.context() as patch:  # the device may be another's while it is saved
                patch.setattr(
                    offload._Offloaded,
                    "bring",
                    lambda place, ahead=False: pytest.fail("it came back") if place.sizes else None,
                )
                e.save(tmp_path / name)
                kept = e.snapshot()
            assert bring is offload._Offloaded.bring
            kept.save(tmp_path / f"{name} kept")
            e.load(tmp_path / name)
            steps(case, rank, e, 1)
        for name in ("stays kept", "goes", "goes kept"):
            same_files(tmp_path / "stays", tmp_path / name)
        _, batch, _ = share(case, rank)
        a, b = (e.infer(batch, ("logprobs",))["logprobs"] for e in (stays, goes))
        assert torch.equal(a, b)
        for (n, w), (m, v) in zip(stays.weights(), list(goes.weights()), strict=True):
            assert n == m and torch.equal(w, v), n  # those of `goes` outlive its stay
        assert state_bytes(goes) == 0
        with goes.awake(*EVERYTHING):
            there = state_bytes(goes)
            assert all(torch.equal(t, goes.masters[n]) for n, t in stays.masters.items())
        return there, state_bytes(stays)

    for there, stays in run(at.world_size, compared):
        assert there == stays > 0


def test_what_is_away_takes_no_memory(monkeypatch):
    """Measured over all tensors of a rank."""
    monkeypatch.setitem(MODELS, "wide", BIG["wide"])
    case = Case(LAYOUTS["FSDP"], model="wide")
    model("wide")  # once, before there are ranks

    def measured(rank: int) -> tuple[int, int, int, int]:
        before = tensor_bytes()
        e = steps(case, rank, engine(case.model, "actor", case.layout, offload=EVERYTHING), 1)
        away = tensor_bytes() - before
        with e.awake("weights"):
            weights = tensor_bytes() - before
        with e.awake("weights"), e.awake("optimizer"):
            both = tensor_bytes() - before
        parts = sum(part_of_rank(p).nbytes for p in e.local.trained().parameters())
        return away, weights, both, parts

    for away, weights, both, parts in run(2, measured):
        assert away < parts / 10 and abs(weights - away - parts) < parts / 20  # padding
        assert abs(both - weights - 2 * parts) < parts / 10


def test_a_part_may_go_alone_and_a_role_may_be_frozen():
    case = Case(LAYOUTS["FSDP"], "reference")

    def frozen(rank: int) -> bool:
        found, expected = (on_rank(case, rank, offload=parts)["columns"] for parts in (("weights",), ()))
        e = engine(case.model, "actor", case.layout, offload=("optimizer",))
        steps(Case(case.layout), rank, e, 1)
        assert state_bytes(e) == sum(t.untyped_storage().nbytes() for t in {*e.local.tensors()}) > 0
        return all(torch.equal(found[n], t) for n, t in expected.items())

    assert all(run(2, frozen))


def test_a_moving_average_is_there_when_it_is_asked_for():
    case = Case(LAYOUTS["FSDP"])

    def compared(rank: int) -> bool:
        optim, (_, batch, _) = OptimSpec(lr=1e-2, average=0.5), share(case, rank)
        both = (engine(case.model, "actor", case.layout, optim=optim, offload=parts) for parts in ((), EVERYTHING))
        stays, goes = [steps(case, rank, e, 2).infer(batch, ("logprobs",), True)["logprobs"] for e in both]
        return torch.equal(stays, goes)

    assert all(run(2, compared))


def test_a_disk_without_room_is_said_and_costs_nothing(monkeypatch):
    e = engine("qwen3, tied", "actor", None, offload=EVERYTHING)
    before = {n: p.clone() for n, p in e.masters.items()}

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="TMPDIR"), e.awake():
            pass
    assert all(torch.equal(p, before[n]) for n, p in e.masters.items())
    with e.awake():
        pass
    with pytest.raises(AssertionError, match="awake"):
        e.masters  # noqa: B018 - is what fails


def test_bytes_that_do_not_come_back_are_seen(monkeypatch):
    """A planted fault: a storage that is restored without its content."""
    case = Case(LAYOUTS["FSDP"])
    made = host_places.storage_memory
    expected = run(2, lambda rank: on_rank(case, rank)["whole"])[0]

    def spoilt(rank: int) -> dict[str, Tensor]:
        e = engine(case.model, "actor", case.layout, offload=EVERYTHING)
        with e.awake():
            pass
        monkeypatch.setattr(host_places, "storage_memory", lambda storage: bytearray(made(storage)))
        _, batch, count = share(case, rank)
        out = e.forward_backward(batch, case.batch()[2], count)
        return dict(out.columns)

    found = run(2, spoilt)[0]
    assert expected and not torch.equal(found["logprobs"], run(2, lambda r: on_rank(case, r)["columns"])[0]["logprobs"])
