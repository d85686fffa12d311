"""State that leaves a GPU through pinned memory: with copies that run at the last moment at which a device may run
them, and garbage in their places until then, the numbers are those of a state that stays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from on_device import DEVICE
from safetensors.torch import load_file
from test_engine import NLL, batch_of, make, samples
from torch import Tensor

from verl.batch import pack
from verl.model_engine import host_places, offload
from verl.model_engine.host_places import Held, PinnedPlace, room
from verl.model_engine.optim import OptimSpec
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.model_engine.passes import Passes
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine

BOTH = ("weights", "optimizer")


class LateCopies:
    """A double of a stream: its copies run, in their order, when something waits for them. log: the requests."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.log: list[str] = []

    def begin(self) -> None:
        self.log.append("begin")

    def copy(self, to: Tensor, source: Tensor) -> None:
        if all(to.data_ptr() != read.data_ptr() for _, read in self.waiting):
            to.fill_(255)
        self.waiting.append((to, source))
        self.log.append("copy")

    def before_use(self) -> None:
        self._run("use")

    def wait(self) -> None:
        self._run("wait")

    def _run(self, what: str) -> None:
        for to, source in self.waiting:
            assert to.untyped_storage().nbytes() and source.untyped_storage().nbytes(), "freed before its copy"
            to.copy_(source)
        self.waiting.clear()
        self.log.append(what)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """The stream of each part, in the order of `BOTH`."""
    made: list[LateCopies] = []

    def place_of(device: torch.device) -> PinnedPlace:
        made.append(LateCopies())
        return PinnedPlace(made[-1], pin=False)

    monkeypatch.setattr(offload, "place_of", place_of)
    return made


def engine(model: Any, parts: tuple[str, ...], name: str = "adamw") -> TorchEngine:
    optim = OptimSpec(lr=1e-2, name=name, weight_decay=0.1, average=0.5)
    return TorchEngine(copy.deepcopy(model), EngineSettings(optim=optim, dtype="float32", offload=parts))


def everything(e: TorchEngine, path: Path) -> list[Tensor]:
    """Take steps, and return all that an engine computes, publishes and saves."""
    found: list[Tensor] = []
    for number in range(3):
        out = e.forward_backward(batch_of(samples()), NLL, 2, ("logprobs",))
        found += [out.columns["logprobs"]]
        e.optim_step()
        e.save(path / f"step {number}")
        found += saved(path / f"step {number}")
    with e.awake("weights"):  # two optimizer steps, between which nothing leaves
        for _ in range(2):
            e.forward_backward(batch_of(samples()), NLL)
            e.optim_step()
    kept = e.snapshot()
    found += [e.infer(pack(samples()), ("logprobs",), average)["logprobs"] for average in (False, True)]
    found += [t.clone() for _, t in e.weights()]
    kept.save(path / "kept")
    return [*found, *saved(path / "kept")]


def saved(path: Path) -> list[Tensor]:
    return [t for file in sorted(path.glob("*.safetensors")) for _, t in sorted(load_file(file).items())]


@each("parts", [BOTH, ("weights",), ("optimizer",)])
def test_late_copies_give_the_numbers_of_a_state_that_stays(parts, streams, tmp_path):
    model = make()
    streams.clear()
    stays, goes = (everything(engine(model, p), tmp_path / str(len(p))) for p in ((), parts))
    assert len(stays) == len(goes) > 20
    assert not [i for i, (a, b) in enumerate(zip(stays, goes, strict=True)) if not torch.equal(a, b)]
    assert len(streams) == len(parts)
    for stream in streams:  # each group of copies follows what the device computes before
        groups = " ".join(stream.log).split("begin")
        assert len(groups) > 8 and all(set(group.split()[:-1]) <= {"copy"} for group in groups[1:]), groups


@each("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_the_state_of_every_optimizer_leaves_and_returns(name, streams, tmp_path):
    model = make()
    stays, goes = (everything(engine(model, parts, name), tmp_path / f"{len(parts)}") for parts in ((), BOTH))
    assert len(stays) == len(goes) > 20
    assert not [i for i, (a, b) in enumerate(zip(stays, goes, strict=True)) if not torch.equal(a, b)]


def test_the_optimizer_comes_back_beside_the_passes(streams, monkeypatch):
    e = engine(make(), BOTH)
    e.forward_backward(batch_of(samples()), NLL)
    e.optim_step()
    seen: list[tuple[int, int]] = []
    passes = Passes.forward_backward

    def watched(*given: Any) -> Any:
        seen.append((len(streams[0].waiting), len(streams[1].waiting)))
        return passes(*given)

    monkeypatch.setattr(Passes, "forward_backward", watched)
    with e.awake("weights"):
        e.forward_backward(batch_of(samples()), NLL)
        assert streams[1].waiting, "nothing has waited for it"
        e.optim_step()
        assert not streams[1].waiting
    ((weights, states),) = seen
    assert weights == 0 < states


@pytest.mark.on_device
def test_state_leaves_the_device_of_the_tests_and_returns():
    """On a GPU: through pinned memory, with streams of torch; what is computed at once waits for the copies."""
    known = {part: [torch.randn(n) for n in (1, 999, 300_000)] for part in BOTH}
    state = {part: [t.to(DEVICE, copy=True) for t in tensors] for part, tensors in known.items()}
    away = offload.Offload(DEVICE, BOTH, lambda part: state[part])
    for number in range(1, 4):
        with away.awake("weights"):
            away.soon("optimizer")
            for t in state["weights"]:
                t.mul_(2)
            with away.awake("optimizer"):
                for t in state["optimizer"]:
                    t.mul_(2)
        assert not any(t.untyped_storage().nbytes() for part in BOTH for t in state[part])
        for part in BOTH:
            found = [away.on_host(t, copy=True) for t in state[part]]
            assert all(torch.equal(a, b * 2**number) for a, b in zip(found, known[part], strict=True))


def storages(*sizes: int) -> list[Held]:
    made = [torch.randint(0, 256, (size,), dtype=torch.uint8).untyped_storage() for size in sizes]
    return [(storage, storage.nbytes()) for storage in made]


def test_pinned_memory_is_kept_and_shared_by_storages(monkeypatch):
    asked: list[int] = []
    empty = torch.empty

    def counted(size: Any, **more: Any) -> Tensor:
        if "pin_memory" in more:
            asked.append(size)
            assert more.pop("pin_memory") is True
        return empty(size, **more)

    monkeypatch.setattr(torch, "empty", counted)
    monkeypatch.setattr(host_places, "SLAB_BYTES", 1024)
    place = PinnedPlace(LateCopies(), pin=True)
    sizes = (100, 700, 300, 5000, 1, 64, 900)
    for seed in range(3):  # a later time uses the same memory
        torch.manual_seed(seed)
        held = storages(*sizes)
        known = [bytes(storage) for storage, _ in held]
        place.write(held)
        places = [place.flat(i, torch.uint8) for i in range(len(held))]
        assert [bytes(one.tolist()) for one in places] == known
        spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in places)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:])), "no two overlap"
        for storage, size in held:
            storage.resize_(0)
            storage.resize_(size)
        place.read(held)
        place.before_use()
        assert [bytes(storage) for storage, _ in held] == known
    assert asked == [1024, 1024, 5000, 1024, 960], "several storages to a slab, and one for what is larger"
    place.write(storages(64))
    assert asked[5:] == [64] and room(65) == 128, "a small state pins little"
