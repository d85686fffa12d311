"""The contract of a checkpoint engine, with the real trainer and the real embedded rollout engines."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import write_adapter
from each import FULL_GRID, each
from families import QWEN3_MOE
from gpu_memory import fake_gpu
from on_device import DEVICE, ON_CPU
from transformers import AutoModelForCausalLM

from verl.algorithms.losses import nll
from verl.checkpoint.safetensors_file import host_bytes
from verl.driver.lora_publisher import LoraPublisher
from verl.driver.publisher import Publisher
from verl.errors import Refused
from verl.model_engine.lora_source import LoraSource
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models import tiny
from verl.nn import fp8
from verl.nn.fp8 import SCALES, as_computed, in_blocks, quantise
from verl.objective import Term
from verl.parameter_set import ParameterSet
from verl.recipes import arithmetic
from verl.rollout import hf
from verl.rollout.base import GenerateRequest, ReplicaLost, RolloutContext
from verl.rollout.native import engine as native
from verl.rollout.native import runner
from verl.rollout.native.options import Options
from verl.rollout.router import Router
from verl.rollout.wrapper import AfterPublish
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Refs, Sample, Sampling, Segment
from verl.weight_sync import base, buckets, collective, disk, nixl, objects, relay, shm, tcp
from verl.weight_sync.base import CheckpointEngine, Outlet, Sent, SyncError, SyncReport, open_stream
from verl.weight_sync.local import LocalCheckpointEngine, LocalOutlet
from verl.weight_sync.record import entry_of
from verl.weight_sync.sender import WeightSender, probed
from verl.wire import FP8, WireFormat
from verl.workers.compute import Compute
from verl.workers.group import Broadcast
from verl.workers.inproc import InprocGroup
from verl.workers.model_workers import ComputeWorker, ModelWorkers, OptimizerStep
from verl.workers.role import Role
from verl.workers.waits import Waits


def shm_outlet() -> shm.ShmOutlet:
    outlet = shm.ShmOutlet(f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    atexit.register(shm.remove, outlet.name)
    return outlet


def tcp_outlet(kind: type[tcp.TcpOutlet] = tcp.TcpOutlet, **options: Any) -> tcp.TcpOutlet:
    outlet = kind(host="127.0.0.1", **options)
    atexit.register(shm.remove, f"{shm.PREFIX}-*-{outlet.tag}")
    return outlet


def bucket_outlet(**on: bool) -> buckets.BucketOutlet:
    """A model is sent in several buckets, and one of its tensors is larger than a bucket."""
    name = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    atexit.register(shm.remove, name)
    return buckets.BucketOutlet(name, BUCKET_BYTES, **on)


def relay_outlet() -> relay.RelayOutlet:
    """As that, for readers of other hosts."""
    outlet = relay.RelayOutlet(BUCKET_BYTES, host="127.0.0.1")
    atexit.register(shm.remove, f"{shm.PREFIX}-*-{outlet.tag}")
    return outlet


def disk_outlet() -> disk.DiskOutlet:
    root = Path(tempfile.mkdtemp(prefix="verl-test-"))
    atexit.register(shutil.rmtree, root, True)
    return disk.DiskOutlet(root)


def objects_outlet() -> objects.ObjectOutlet:
    return objects.ObjectOutlet(f"memory://verl-test-{uuid.uuid4().hex}")


BACKENDS: dict[str, tuple[Callable[..., CheckpointEngine], Callable[[], Outlet]]] = {
    "local": (LocalCheckpointEngine, LocalOutlet),
    "shm": (partial(LocalCheckpointEngine, copies=True), shm_outlet),
    "shm, buckets": (partial(LocalCheckpointEngine, copies=True), bucket_outlet),
    "ipc": (partial(LocalCheckpointEngine, copies=True), partial(bucket_outlet, on_gpu=True)),
    "tcp": (partial(LocalCheckpointEngine, copies=True), tcp_outlet),
    "tcp, buckets": (partial(LocalCheckpointEngine, copies=True), relay_outlet),
    "tcp, delta": (partial(LocalCheckpointEngine, copies=True), partial(tcp_outlet, delta=True)),
    "collective": (partial(LocalCheckpointEngine, copies=True), partial(tcp_outlet, collective.CollectiveOutlet)),
    "nixl": (partial(LocalCheckpointEngine, copies=True), partial(tcp_outlet, nixl.NixlOutlet)),
    "disk": (partial(LocalCheckpointEngine, copies=True), disk_outlet),
    "objects": (partial(LocalCheckpointEngine, copies=True), objects_outlet),
}
PASSING = ("shm, buckets", "ipc", "tcp, buckets")
QUICK = ("local", "shm", "tcp, buckets")
"""One in this process, one whole version, and one in buckets over the network."""
MISSING = pytest.mark.skipif(find_spec("nixl") is None, reason="the package nixl is not installed (make nixl-package)")
ROLLOUTS = {"native": partial(native.build, Options()), "hf": partial(hf.build, hf.Options())}
PROBES = (np.array([1, 5, 6, 7, 8, 9, 2], np.int64), np.array([1, 11, 4, 12], np.int64))
TOLERANCE = 1e-4
BUCKET_BYTES = 8_000
PARTS = {"gather", "stage", "transfer", "load", "pause"}
TERMS = (Term(name="nll", fn=nll, aggregate="token-mean"),)


@cache
def _fresh(tied: bool) -> Any:
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    return tiny.qwen3(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, seed=1, tied=tied)


@cache
def _base_and_adapter(tied: bool) -> Path:
    """Return a folder with the model that a trainer begins with (`base`) and an adapter of it (`a`)."""
    folder = Path(tempfile.mkdtemp(prefix="verl-test-"))
    atexit.register(shutil.rmtree, folder, True)
    _fresh(tied).save_pretrained(folder / "base")
    write_adapter(folder / "a", folder / "base", size=0.5)
    return folder


def trainer(cls: type[TorchEngine] = TorchEngine, *, tied: bool = True, lr: float = 0.05) -> TorchEngine:
    model = copy.deepcopy(_fresh(tied))  # in half of the time of building it
    return cls(model, EngineSettings(optim=OptimSpec(lr=lr, weight_decay=0.0), dtype="float32", device=str(DEVICE)))


WORLDS: list[World] = []  # the worlds of a test; their threads end with it


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights for other hosts are sent over the network."""
    monkeypatch.setattr(relay, "ledger_of", lambda name: Path("/nowhere") / name)


@pytest.fixture(autouse=True)
def worlds() -> Iterator[None]:
    yield
    for world in WORLDS:
        world.group.close()
        world.work.close()
    WORLDS.clear()


class World:
    """One trainer, its worker group, and what publishes from it."""

    def __init__(
        self,
        engine: TorchEngine,
        backend: str = "local",
        *,
        sender: type[WeightSender] = WeightSender,
        probes=PROBES,
        tolerance=TOLERANCE,
    ):
        self.engine = engine
        self.queue = MemoryQueue()
        checkpoint_engine, make_outlet = BACKENDS[backend]
        self.outlet: Any = make_outlet()
        self.group = InprocGroup("actor", [Role("actor", self.queue, engine, sender=sender(self.outlet))])
        self.actor = ModelWorkers(self.group, engine.capabilities)
        self.work = InprocGroup("compute", [Compute(self.queue)])
        self.compute = ComputeWorker(self.work)
        WORLDS.append(self)
        streamed = {"outlet": self.outlet} if isinstance(self.outlet, base.StreamingOutlet) else {}
        self.sync = checkpoint_engine(probes=probes, tolerance=tolerance, **streamed)
        self.count = 0

    def rollout(self, kind: str = "native", **more: Any) -> Any:
        config = copy.deepcopy(self.engine.model.config)  # the trainer has switched its attention
        config._attn_implementation = "sdpa"
        given = {"max_context_tokens": 64, "dtype": torch.float32, "device": DEVICE, **more}
        return ROLLOUTS[kind](RolloutContext(hf_config=config, **given))

    def submit_update(self, actor: Any = None) -> Any:
        """One optimizer step, enqueued now."""
        self.count += 1
        name = f"s{self.count}"
        ids = (np.arange(4, 14) * self.count) % 20 + 4
        segments = (
            Segment(ids=ids[:3], source="prompt"),
            Segment(ids=ids[3:], source="sampled", logprobs=np.zeros(7, np.float32), version=0),
        )
        sample = Sample(
            sample_id=name, trajectory_id=name, group_id=name, purpose="train", segments=segments, reward=1.0
        )
        put = self.queue.put([sample])  # in this process it waits for nothing
        with pytest.raises(StopIteration) as done:
            put.send(None)
        steps = [OptimizerStep(Refs(done.value.value))]
        self.compute.weigh(steps, TERMS, ()).result(60)
        return (actor or self.actor).update(steps, TERMS, ())

    @property
    def source(self) -> Any:
        """Return the source of a version."""
        return self.engine

    async def ready(self, *replicas: Any) -> None:
        """Give replicas what a publish needs: nothing."""

    async def update(self) -> None:
        await asyncio.wait_for(asyncio.wrap_future(self.submit_update()), 60)

    def publish(
        self, replicas, version: int, *, exclusive: bool = True, on_inflight: Any = "wait", timeout_s: float = 60
    ) -> asyncio.Future[SyncReport]:
        return self.sync.publish(
            self.actor,
            replicas,
            version=version,
            exclusive=exclusive,
            on_inflight=[on_inflight] * len(replicas),
            timeout_s=timeout_s,
        )

    def logprobs(self) -> list[np.ndarray]:
        """The trainer's own, as of now."""
        return list(self.group.submit(probe, Broadcast()).result(60)[0])


class LoraWorld(World):
    """The same for a LoRA set on top of the policy's weights, which replicas get by `ready`."""

    def __init__(
        self,
        engine: TorchEngine,
        backend: str = "local",
        *,
        sender: type[WeightSender] = WeightSender,
        probes=PROBES,
        tolerance=TOLERANCE,
    ):
        super().__init__(engine, probes=probes, tolerance=tolerance)
        self.full, self.policy = self.sync, self.actor
        checkpoint_engine, make_outlet = BACKENDS[backend]
        self.outlet = make_outlet()
        self.folder = _base_and_adapter(engine.model.config.tie_word_embeddings)
        self.policy.open_set("a", self.folder / "a", self.folder / "base", self.outlet).result(60)
        self.opened = self.group._workers[0].publishing.lora_sets._open
        if sender is not WeightSender:
            self.opened["a"] = self.source, sender(self.outlet, parameters=self.source.parameters, base=engine)
        self.actor = self.policy.of_set("a")
        self.sync = checkpoint_engine(probes=probes, tolerance=tolerance)

    @property
    def source(self) -> LoraSource:
        return self.opened["a"][0]

    async def ready(self, *replicas: Any) -> None:
        given = {"exclusive": True, "on_inflight": ["wait"] * len(replicas), "timeout_s": 60}
        await self.full.publish(self.policy, replicas, version=7, **given)

    def submit_update(self) -> Any:
        """Other factors, enqueued now."""

        def move(role: Role) -> None:
            for tensor in role.publishing.lora_sets._open["a"][0].masters.values():
                tensor.mul_(-1.5)
                break

        return self.group.submit(move, Broadcast())


WORLD_OF: dict[str, type[World]] = {"full": World, "lora": LoraWorld}


@pytest.fixture(params=WORLD_OF)
def of(request, backend) -> str:
    """Both kinds of set. A LoRA set is not streamed (`test_a_stream_is_refused_for_a_lora_set`)."""
    if request.param == "lora" and backend in PASSING:
        pytest.skip("a LoRA set is published whole")
    return request.param


@pytest.fixture
def storing(backend) -> str:
    """A backend that stores whole versions, as a LoRA set needs."""
    if backend in PASSING:
        pytest.skip("a LoRA set is published whole")
    return backend


def probe(role: Role) -> list[np.ndarray]:
    found = probed(
        role.publishing.lora_sets._open["a"][0] if "a" in role.publishing.lora_sets._open else role.engine,
        PROBES,
        "float32",
    )
    assert found is not None
    return np.split(found.logprobs, np.cumsum([len(ids) - 1 for ids in PROBES])[:-1])


def run(test: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 120))


async def scores(replica, parameters="policy") -> list[np.ndarray]:
    return [await replica.score(ids, parameters=parameters) for ids in PROBES]


def distance(a, b) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def marked(backends: Iterable[str]) -> list[Any]:
    """Return backends as rows: one with a missing package is skipped, and all but `QUICK` are slow."""
    marks = {
        name: [*([MISSING] if name == "nixl" else []), *([] if name in QUICK else [pytest.mark.slow])]
        for name in backends
    }
    return [pytest.param(name, marks=marks[name]) for name in backends]


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> None:
    """Replace the GPU of sync.engine=ipc on a machine without one."""
    if ON_CPU:
        fake_gpu(monkeypatch)


@pytest.fixture(params=marked(BACKENDS))
def backend(request) -> str:
    return request.param


class Replica:
    """A rollout engine with one habit changed."""

    replaceable = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Reads:
    """A source seen through `change`."""

    def __init__(
        self, source: Any, change: Callable[[Iterator[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]]
    ):
        self.version, self.passes, self.seconds = source.version, source.passes, source.seconds
        self._source, self._change = source, change
        self.parameters, self.identity = source.parameters, source.identity

    def tensors(self):
        return self._change(self._source.tensors())


# -- delivery ----------------------------------------------------------------------------------------------------------


EVERY_WAY = list(product([True, False], ROLLOUTS, [True, False]))
EACH_TWO = [(tied, kind, tied == (kind == "native")) for tied, kind, exclusive in EVERY_WAY if exclusive]


@pytest.mark.on_device
@each("tied, kind, exclusive", EVERY_WAY if FULL_GRID else EACH_TWO)
def test_after_a_large_step_the_rollout_scores_as_the_trainer_does(backend, kind, tied, exclusive):
    async def test():
        world = World(trainer(tied=tied), backend)
        replica = world.rollout(kind)
        first = await world.publish([replica], 0, exclusive=exclusive)
        before = await scores(replica)
        assert distance(before, world.logprobs()) < TOLERANCE
        await world.update()
        assert distance(before, world.logprobs()) > 0.1, "the step was large"
        report = await world.publish([replica], 1, exclusive=exclusive)
        assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        assert replica.version == 1
        names = [n for n, _ in world.engine.weights()]
        assert ("lm_head.weight" in names) == (not tied)
        assert (report.version, report.changed, report.alarms, report.failed_replicas) == (1, True, (), {})
        assert first.num_tensors == report.num_tensors == len(names) == report.verified_tensors
        assert report.num_bytes == sum(t.nbytes for _, t in world.engine.weights())
        assert report.canary_mean_abs < TOLERANCE and set(report.seconds) == PARTS
        await replica.close()

    run(test)


class Notes(Replica):
    """Keeps a copy of what it is sent."""

    async def load_weights(self, source, *, on_inflight="wait"):
        self.came = {}

        def change(tensors):
            for name, tensor in tensors:
                self.came[name] = tensor.clone()
                yield name, tensor

        return await self.inner.load_weights(Reads(source, change), on_inflight=on_inflight)


@pytest.mark.on_device
@pytest.mark.parametrize("model", ["tied", "untied", "experts"])
def test_what_arrives_is_what_was_sent_bit_for_bit(backend, model):
    """Experts are fused in one tensor; attention and gates are fused in the engine."""

    async def test():
        made = AutoModelForCausalLM.from_config(copy.deepcopy(QWEN3_MOE)) if model == "experts" else None
        spec = OptimSpec(lr=0.05, weight_decay=0.0)
        settings = EngineSettings(optim=spec, dtype="float32", device=str(DEVICE))
        engine = TorchEngine(made, settings) if made else trainer(tied=model == "tied")
        world = World(engine, backend)
        replica, beside = Notes(world.rollout()), world.rollout()
        local = LocalCheckpointEngine(probes=PROBES, tolerance=TOLERANCE)
        for version in range(3):
            await world.publish([replica], version)
            sent = dict(world.engine.weights())
            assert replica.came.keys() == sent.keys()
            for name, tensor in sent.items():
                bits = (found.detach().cpu().contiguous().view(torch.uint8) for found in (replica.came[name], tensor))
                assert replica.came[name].dtype == tensor.dtype and torch.equal(*bits), name
            group = InprocGroup("actor", [Role("actor", world.queue, engine, sender=WeightSender(local.outlet()))])
            given = {"exclusive": True, "on_inflight": ["wait"], "timeout_s": 60}
            await local.publish(ModelWorkers(group, engine.capabilities), [beside], version=version, **given)
            assert distance(await scores(replica), await scores(beside)) == 0.0, "the same bits in the engine"
            await world.update()
        await replica.close()
        await beside.close()

    run(test)


@pytest.mark.on_device
@each("kind, dtype", product(ROLLOUTS, ["bfloat16", "float32"]))
def test_weights_travel_in_the_format_that_the_replica_reads(backend, kind, dtype):
    """A bfloat16 replica gets the bits of the masters cast to it, half of the bytes, and computes what it would compute
    had it rounded them itself; a float32 replica gets the masters."""

    async def test():
        world, to = World(trainer(), backend, tolerance=None), getattr(torch, dtype)
        for role in world.group._workers:
            role.publishing.sender = WeightSender(world.outlet, dtype=dtype)
        replica, beside = Notes(world.rollout(kind, dtype=to)), world.rollout(kind, dtype=to)
        world.actor.wire_format = (await replica.capabilities()).weights
        assert world.actor.wire_format == WireFormat(dtype, codes=kind == "native")
        whole = LocalCheckpointEngine(probes=())
        held = InprocGroup("actor", [Role("actor", world.queue, world.engine, sender=WeightSender(whole.outlet()))])
        for version in range(2):
            report = await world.publish([replica], version, exclusive=backend != "local")
            masters = dict(world.engine.weights())
            assert replica.came.keys() == masters.keys() and report.verified_tensors == len(masters)
            for name, tensor in masters.items():
                bits = (t.cpu().contiguous().view(torch.uint8) for t in (replica.came[name], tensor.detach().to(to)))
                assert replica.came[name].dtype == to and torch.equal(*bits), name
            assert report.num_bytes * (4 // to.itemsize) == sum(t.nbytes for t in masters.values())
            given = {"exclusive": True, "on_inflight": ["wait"], "timeout_s": 60}
            await whole.publish(ModelWorkers(held, world.engine.capabilities), [beside], version=version, **given)
            assert distance(await scores(replica), await scores(beside)) == 0.0
            await world.update()
        held.close()
        await replica.close()
        await beside.close()

    run(test)


def fp8_world(backend: str, cls: type[TorchEngine] = TorchEngine) -> World:
    """A trainer with quantised projections, blocks that are not full, and the canary's own tolerance."""
    world = World(trainer(cls), backend, tolerance=None)
    for role in world.group._workers:
        role.publishing.sender = WeightSender(world.outlet, dtype=FP8)
    world.actor.wire_format = WireFormat("bfloat16", fp8=True)
    return world


def test_fp8_weights_travel_as_values_and_scales(backend):
    """A replica that reads FP8 gets the blocks that the sender made of the masters, and computes with the dequantised
    weights: those of a float32 replica of a trainer that has these weights."""

    async def test():
        world = fp8_world(backend)
        replica = Notes(world.rollout(dtype=torch.float32, fp8=True))  # activations in float32: nothing else is rounded
        world.actor.wire_format = (await replica.capabilities()).weights
        assert world.actor.wire_format == WireFormat("float32", fp8=True)
        rounded = trainer()
        for version in range(3):
            report = await world.publish([replica], version, exclusive=backend != "local")
            masters = dict(world.engine.weights())
            projections = {name for name, t in masters.items() if in_blocks(name, t.shape)}
            assert replica.came.keys() == masters.keys() | {name + SCALES for name in projections} and projections
            assert report.verified_tensors == len(replica.came)
            for name, tensor in masters.items():
                sent = {name: tensor}
                if name in projections:
                    sent[name], sent[name + SCALES] = quantise(tensor)
                for one, expected in sent.items():
                    assert replica.came[one].dtype == expected.dtype
                    assert host_bytes(replica.came[one]) == host_bytes(expected), one
            assert report.num_bytes == sum(t.nbytes for t in replica.came.values())
            for name, p in rounded.model.named_parameters():
                p.data.copy_(as_computed(name, masters[name], torch.float32, fp8=True))
            beside = World(rounded, tolerance=None)
            plain = beside.rollout(dtype=torch.float32)
            await beside.publish([plain], version)
            assert distance(await scores(replica), await scores(plain)) == 0.0
            await plain.close()
            await world.update()
        await replica.close()

    run(test)


def unscaled(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The reader, with every scale forgotten."""
    yield from ((n, t.float() / fp8.LARGEST) for n, t in tensors if not n.endswith(SCALES))


def test_an_fp8_replica_without_its_scales_is_caught(backend, monkeypatch):
    """The scales are forgotten by the reader alone: the canary sees it."""

    async def test():
        world = fp8_world(backend)
        replica = world.rollout(dtype=torch.bfloat16, fp8=True)
        await world.publish([replica], 0)
        monkeypatch.setattr(runner, "dequantised", unscaled)
        with pytest.raises(SyncError, match="canary"):
            await world.publish([replica], 1)
        await replica.close()

    run(test)


@each("bad", [float("nan"), float("inf")])
def test_a_projection_that_is_not_finite_is_refused_before_any_replica_reads_fp8(backend, bad):
    async def test():
        world = fp8_world(backend)
        replica = world.rollout(dtype=torch.bfloat16, fp8=True)
        await world.publish([replica], 0)
        world.engine.model.model.layers[0].mlp.up_proj.weight.data[3, 4] = bad
        with pytest.raises((FloatingPointError, SyncError), match="1 of|not finite|no working model"):
            await world.publish([replica], 1)
        await replica.close()

    run(test)


def test_replicas_of_several_formats_share_one_version_in_the_widest(backend):
    async def test():
        world = World(trainer(), backend, probes=())
        narrow, wide = (Notes(world.rollout(dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
        formats = [(await one.capabilities()).weights for one in (narrow, wide)]
        world.actor.wire_format = WireFormat.widest(formats)
        await world.publish([narrow, wide], 0, exclusive=False)
        for name, tensor in world.engine.weights():
            assert torch.equal(wide.came[name], tensor) and torch.equal(narrow.came[name], tensor), name
        await narrow.close()
        await wide.close()

    run(test)


def test_later_versions_verify_a_sample_that_covers_everything_in_sixteen(backend):
    async def test():
        world = World(trainer(), backend, probes=())
        replica = world.rollout()
        counts = [(await world.publish([replica], v)).verified_tensors for v in range(19)]
        total = len(list(world.engine.weights()))
        assert counts[:3] == [total] * 3 and max(counts[3:]) < total
        assert sum(counts[3:]) == total
        await replica.close()

    run(test)


def test_a_rollout_in_flight_keeps_its_tokens_and_marks_the_version_of_each(backend):
    async def test():
        world = World(trainer(), backend)
        replica = world.rollout(max_context_tokens=512)
        await world.publish([replica], 0)
        asked = asyncio.ensure_future(
            replica.generate(GenerateRequest("r", PROBES[0], Sampling(max_tokens=500, seed=3)))
        )
        while not replica.stats()["sampled_tokens"]:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        await replica.pause("keep")  # or it could be done before the trainer is
        await world.update()
        await world.publish([replica], 1, exclusive=False, on_inflight="keep")
        await replica.resume()
        done = await asked
        assert [v for v, _, _ in done.spans] == [0, 1] and done.spans[-1][2] == len(done.ids) == 500
        await replica.close()

    run(test)


def test_each_part_of_a_publish_is_measured_where_it_happens(backend, monkeypatch):
    """By a clock that is put forward in each part by other hours: a machine that is slow changes nothing."""
    if backend in PASSING:
        pytest.skip("its parts go on at the same time, and each waits for the others")
    ahead, real = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + ahead[0])
    hours = {"gather": 1e4, "stage": 2e4, "transfer": 4e4, "load": 8e4}

    class Gathers(TorchEngine):
        def weights(self):
            ahead[0] += hours["gather"]
            yield from super().weights()

    def transferring(source):
        ahead[0] += hours["transfer"]
        return open_stream(source)

    async def test():
        world = World(trainer(Gathers), backend)
        stage, replica = world.outlet.stage, world.rollout()
        runner = replica._core.runner
        prepare, load = runner.prepare, runner.load

        def slow_stage(*given):
            ahead[0] += hours["stage"]
            return stage(*given)

        def slow_prepare(source):
            ahead[0] += hours["load"]
            return prepare(source)

        def slow_load(source):
            ahead[0] += hours["load"]
            return load(source)

        await world.publish([replica], 0)  # its shapes are requested once
        world.outlet.stage, runner.prepare, runner.load = slow_stage, slow_prepare, slow_load
        monkeypatch.setattr(base, "open_stream", transferring)
        report = await world.publish([replica], 1)
        assert {part: round(report.seconds[part], -4) for part in hours} == hours
        assert round(report.seconds["pause"], -4) == hours["transfer"] + hours["load"], "and nothing of the trainer's"
        assert round(report.whole_s, -4) == sum(hours.values())
        kept = await world.publish([replica], 2, on_inflight="keep")
        assert round(kept.seconds["load"], -4) == hours["load"] and round(kept.seconds["pause"], -4) == 0
        beside = world.rollout("hf")
        both = await world.publish([replica, beside], 3)
        assert both.seconds["load"] >= hours["load"], "of the one that took longest over it"
        await replica.close()
        await beside.close()

    run(test)


def test_one_version_lies_in_shared_memory_and_a_replica_that_was_given_up_holds_none():
    async def test():
        world = World(trainer(), "shm")
        good, bad = world.rollout(), Fails(None)
        for version, replicas in enumerate(([good], [good, bad], [good, Hangs(None)], [good], [good])):
            await world.publish(replicas, version, timeout_s=60 if version != 2 else 1.0)
            files = list(shm.SHM.glob(f"{world.outlet.name}-*"))
            whole = sum(t.nbytes for _, t in world.engine.weights())
            assert len(files) == 1 and sum(path.stat().st_size for path in files) < 1.2 * whole + 4096
            assert distance(await scores(good), world.logprobs()) < TOLERANCE
            await world.update()
        await good.close()

    run(test)


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_what_only_the_trainers_machine_sees_is_released_there(kind):
    """The driver of a cluster may run on another one."""
    places: list[Path] = []
    released: list[int] = []

    @contextlib.contextmanager
    def seen() -> Iterator[None]:
        for place in places:
            place.with_name(f"elsewhere-{place.name}").rename(place)
        yield
        for place in places:
            place.rename(place.with_name(f"elsewhere-{place.name}"))

    class Workers(ModelWorkers):
        def send_weights(self, version, probes, *, copy):
            with seen():
                sent = super().send_weights(version, probes, copy=copy)
                places[:] = [Path(sent.result(60).source.address)]
            return sent

        def release_weights(self, version):
            released.append(version)
            with seen():
                return super().release_weights(version)

    class There(Replica):
        async def load_weights(self, source, *, on_inflight="wait"):
            with seen():
                return await self.inner.load_weights(source, on_inflight=on_inflight)

    async def test():
        world = World(trainer(), kind, probes=())
        world.actor = Workers(world.group, world.engine.capabilities)
        replica = There(world.rollout())
        for version in range(3):
            assert (await world.publish([replica], version)).alarms == ()
            assert released == [*range(version + 1)]
            if kind == "shm":
                assert len(list(shm.SHM.glob(f"*{world.outlet.name}-*"))) == 1, "it was written over the one before"
        world.actor.release_weights = lambda version: world.group.submit(lambda role: 1 / 0, Broadcast())
        (alarm,) = (await world.publish([replica], 3)).alarms
        assert alarm == "what was staged of version 3 was not released: division by zero"
        for place in places:
            place.with_name(f"elsewhere-{place.name}").rename(place)
        await replica.close()

    run(test)


# -- what must not pass ------------------------------------------------------------------------------------------------


def tampered(change: Callable[[dict[str, Any], dict[str, Any], str], Any], name: str) -> type[WeightSender]:
    """Change the manifest and the tensors of a sender on the way, by `change(manifest, tensors, name)`."""

    class Tampered(WeightSender):
        def send(self, engine, version, probes, *, copy, first=True) -> Sent:
            sent = super().send(engine, version, probes, copy=copy, first=first)
            manifest, tensors = dict(sent.source.manifest), dict(open_stream(sent.source).tensors())
            if not isinstance(self._outlet, LocalOutlet):  # they lie where they are staged again
                tensors = {n: tensor.clone() for n, tensor in tensors.items()}
            change(manifest, tensors, name)
            at = self._outlet.stage(version, {n: entry_of(t) for n, t in tensors.items()}, tensors.items())
            return replace(sent, source=replace(sent.source, manifest=manifest, address=at))

        def manifest(self, engine):
            """The manifest of a stream is known before its tensors."""
            told, tensors = dict(super().manifest(engine)), dict(engine.weights())
            self.unchanged = dict(told)
            change(told, tensors, name)
            far = isinstance(self._outlet, relay.RelayOutlet)
            self._outlet.__init__(*(() if far else (self._outlet.name,)), BUCKET_BYTES)
            self._outlet.announce({n: entry_of(t) for n, t in tensors.items()})
            return told

        def stream(self, engine, version, probes, readers) -> Sent:
            through = self._outlet.stream

            def changed(version, passing, readers):
                tensors, sums = {}, {}
                for n, tensor, told in passing:
                    tensors[n], sums[n] = tensor.clone(), told
                told = dict(self.unchanged)
                change(told, tensors, name)
                sums |= {n: entry.checksum for n, entry in told.items() if entry.checksum is not None}
                return through(version, (base.Passed(n, t, sums.get(n)) for n, t in tensors.items()), readers)

            self._outlet.stream = changed
            return super().stream(engine, version, probes, readers)

    return Tampered


NORM = "model.layers.1.input_layernorm.weight"
FACTOR = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


def rename(mapping: dict[str, Any], name: str) -> None:
    mapping[name + "_v2"] = mapping.pop(name)


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any], str], Any]] = {
    "not sent, though in the manifest": lambda manifest, tensors, name: tensors.pop(name),
    "neither sent nor in the manifest": lambda manifest, tensors, name: (tensors.pop(name), manifest.pop(name))[0],
    "sent, but not in the manifest": lambda manifest, tensors, name: manifest.pop(name),
    "renamed on both sides": lambda manifest, tensors, name: (rename(tensors, name), rename(manifest, name))[0],
    "renamed in the manifest": lambda manifest, tensors, name: rename(manifest, name),
    "one too many": lambda manifest, tensors, name: tensors.update({"extra.weight": tensors[name]}),
    "of another shape": lambda manifest, tensors, name: tensors.update({name: tensors[name][:-1]}),
    "of another dtype": lambda manifest, tensors, name: tensors.update({name: tensors[name].bfloat16()}),
    "changed after its manifest": lambda manifest, tensors, name: tensors.update({name: tensors[name] + 1e-3}),
}


@each("kind, change", product(ROLLOUTS, CHANGES))
def test_a_tensor_that_does_not_match_its_manifest_raises(backend, of, kind, change):
    async def test():
        name = FACTOR if of == "lora" else NORM
        world = WORLD_OF[of](trainer(), backend, sender=tampered(CHANGES[change], name))
        replica = world.rollout(kind)
        await world.ready(replica)
        with pytest.raises(SyncError, match=rf"version 3.*({re.escape(name)}|extra\.weight)"):
            await world.publish([replica], 3)
        await replica.close()

    run(test)


def test_a_replica_that_skips_a_tensor_raises(backend, of):
    """As an engine that ignores names which it does not know."""

    class Skips(Replica):
        async def load_weights(self, source, *, on_inflight="wait"):
            for _ in zip(range(5), source.tensors()):
                pass
            return source.version

    async def test():
        world = WORLD_OF[of](trainer(), backend, probes=())
        with pytest.raises(SyncError, match=r"tensors were never read, e\.g\. \['(base_model\.)?model"):
            await world.publish([Skips(None)], 1)

    run(test)


def test_a_replica_that_says_another_version_raises(backend, of):
    class Stale(Replica):
        async def load_weights(self, source, *, on_inflight="wait"):
            return await self.inner.load_weights(source, on_inflight=on_inflight) - 1

    async def test():
        world = WORLD_OF[of](trainer(), backend)
        replica = world.rollout()
        await world.ready(replica)
        with pytest.raises(SyncError, match="says version 3 is live after version 4"):
            await world.publish([Stale(replica)], 4)
        await replica.close()

    run(test)


class Perturbs(Replica):
    """Serves other weights than it was sent: one value of one tensor is off."""

    def __init__(self, inner: Any, name: str, by: float) -> None:
        super().__init__(inner)
        self.name, self.by = name, by

    async def load_weights(self, source, *, on_inflight="wait"):
        def change(tensors):
            for name, tensor in tensors:
                if name == self.name:
                    tensor = tensor.clone()
                    tensor.view(-1)[0] += self.by
                yield name, tensor

        return await self.inner.load_weights(Reads(source, change), on_inflight=on_inflight)


@each("kind", ROLLOUTS)
def test_the_canary_trips_when_the_rollout_serves_other_weights(backend, of, kind):
    async def test():
        world, off = WORLD_OF[of](trainer(), backend), FACTOR if of == "lora" else NORM
        replica = world.rollout(kind)
        await world.ready(replica)
        with pytest.raises(SyncError, match=r"version 1: rollout and trainer log-probs of the canary differ by 0\.\d+"):
            await world.publish([Perturbs(replica, off, 0.5)], 1)
        blind = WORLD_OF[of](trainer(), backend, probes=())
        assert (await blind.publish([Perturbs(replica, off, 0.5)], 1)).failed_replicas == {}, (
            "it is the canary that sees it"
        )
        assert (await world.publish([replica], 1)).canary_mean_abs < TOLERANCE, "the engine itself is fine"
        await replica.close()

    run(test)


def test_a_rollout_that_scores_nan_trips_the_canary(backend, of):
    class Broken(Replica):
        async def score(self, ids, *, temperature=1.0, parameters="policy"):
            return np.full(len(ids) - 1, np.nan, np.float32)

    async def test():
        world = WORLD_OF[of](trainer(), backend)
        replica = world.rollout()
        await world.ready(replica)
        with pytest.raises(SyncError, match="differ by nan"):
            await world.publish([Broken(replica)], 1)
        await replica.close()

    run(test)


# -- what did not change -----------------------------------------------------------------------------------------------


def test_frozen_weights_pushed_twice_are_unchanged_and_no_alarm(backend, of):
    async def test():
        world = WORLD_OF[of](trainer(), backend)
        replica = world.rollout()
        await world.ready(replica)
        reports = [await world.publish([replica], v) for v in range(3)]
        assert [r.changed for r in reports] == [True, False, False] and all(r.alarms == () for r in reports)
        await replica.close()

    run(test)


def test_one_value_that_moved_is_a_change_while_all_checksums_are_made(backend):
    async def test():
        world = World(trainer(), backend)
        replica = world.rollout()
        assert (await world.publish([replica], 0)).changed
        largest = max(world.engine.model.parameters(), key=lambda p: p.numel())
        assert largest.numel() > 600, "so that not every value is among those that are compared one by one"
        largest.data.view(-1)[1] += 1e-3
        assert (await world.publish([replica], 1)).changed
        assert not (await world.publish([replica], 2)).changed
        await replica.close()

    run(test)


class SendsTheBase(TorchEngine):
    """Trains one set of tensors and sends another: adapters that were never merged."""

    def weights(self):
        if not hasattr(self, "base"):
            self.base = [(n, t.clone()) for n, t in super().weights()]
        yield from self.base


def test_masters_that_moved_without_a_byte_delivered_are_an_alarm(backend):
    async def test():
        world = World(trainer(SendsTheBase), backend, probes=())
        replica = world.rollout()
        await world.publish([replica], 5)
        await world.update()
        report = await world.publish([replica], 6)
        assert not report.changed and len(report.alarms) == 1
        assert report.alarms[0].startswith("weights unchanged since version 5, though ")
        again = await world.publish([replica], 7)
        assert again.alarms, "it is still so"
        seeing = World(trainer(SendsTheBase), backend)
        await seeing.publish([replica], 0)
        await seeing.update()
        with pytest.raises(SyncError, match="canary"):
            await seeing.publish([replica], 1)
        await replica.close()

    run(test)


def test_a_step_smaller_than_rounding_is_no_alarm_until_it_adds_up(backend):
    """bfloat16 norms at lr 1e-6 do not move for many steps: that is not an error."""

    async def test():
        world, given = World(trainer(lr=1e-7), backend, probes=()), {"exclusive": backend != "local"}
        world.actor.wire_format = WireFormat("bfloat16")  # of what is copied in one process too
        for p in world.engine.model.parameters():
            p.data.copy_(torch.where(p > 0, 1.0, -1.0))  # far from where bfloat16 rounds up or down
        replica = world.rollout()
        await world.publish([replica], 0, **given)
        masters = [p.clone() for p in world.engine.model.parameters()]
        await world.update()
        assert any(not torch.equal(a, b) for a, b in zip(masters, world.engine.model.parameters(), strict=True))
        report = await world.publish([replica], 1, **given)
        assert not report.changed and report.alarms == ()
        for p in world.engine.model.parameters():
            p.data.add_(0.25)
        assert (await world.publish([replica], 2, **given)).changed
        await replica.close()

    run(test)


def test_a_manifest_that_failed_once_does_not_fail_later_publishes(backend):
    """A trainer that had no memory for its buckets, say, and has it for the next version."""
    if backend not in PASSING:
        pytest.skip("its manifest is of one version")

    class Once(WeightSender):
        failed = False

        def announce(self, engine):
            if not self.failed:
                self.failed = True
                raise OSError("no room for a bucket")
            return super().announce(engine)

    async def test():
        world = World(trainer(), backend, sender=Once)
        with pytest.raises(OSError, match="no room for a bucket"):
            await world.publish([world.rollout()], 0, timeout_s=10)
        replica = world.rollout()
        assert (await world.publish([replica], 1)).version == 1 == replica.version
        await replica.close()

    run(test)


# -- several replicas --------------------------------------------------------------------------------------------------


class Fails(Replica):
    async def load_weights(self, source, *, on_inflight="wait"):
        raise ConnectionError("the server is gone")


class Hangs(Replica):
    async def load_weights(self, source, *, on_inflight="wait"):
        await asyncio.sleep(3600)


@pytest.mark.parametrize(("bad", "says"), [(Fails, "the server is gone"), (Hangs, "version 1 was not loaded in time")])
def test_a_failed_replica_does_not_hold_the_others_and_is_reported(backend, of, bad, says):
    async def test():
        world = WORLD_OF[of](trainer(), backend)
        good = [world.rollout(), world.rollout("hf")]
        await world.ready(*good)
        await world.publish(good, 0)
        await world.update()
        soon_s = 4.0 if backend in PASSING else 1.0  # half of it the others wait for the one that hangs
        report = await world.publish([good[0], bad(None), good[1]], 1, timeout_s=60 if bad is Fails else soon_s)
        assert list(report.failed_replicas) == [1] and says in report.failed_replicas[1]
        assert [r.version for r in good] == ([1, 1] if of == "full" else [7, 7]), "that of the full set"
        for replica in good:
            assert distance(await scores(replica, world.actor.parameters), world.logprobs()) < TOLERANCE
            await replica.close()

    run(test)


def test_a_replica_that_breaks_off_at_any_tensor_holds_up_nobody_and_says_nothing(backend):
    class Breaks(Replica):
        at = 0

        async def load_weights(self, source, *, on_inflight="wait"):
            def change(tensors):
                for i, named in enumerate(tensors):
                    if i == self.at:
                        raise ConnectionError("broken off")
                    yield named

            return await self.inner.load_weights(Reads(source, change), on_inflight=on_inflight)

    async def test():
        world = World(trainer(), backend)
        whole, broken = world.rollout(), Breaks(world.rollout())
        tensors = len(list(world.engine.weights()))
        for broken.at in range(0, tensors + 1, 1 if FULL_GRID or backend == PASSING[0] else 9):
            report = await world.publish([whole, broken], broken.at)
            assert report.failed_replicas == ({1: "ConnectionError: broken off"} if broken.at < tensors else {})
            assert whole.version == broken.at and distance(await scores(whole), world.logprobs()) < TOLERANCE
            if broken.at < tensors:
                with pytest.raises((ReplicaLost, ValueError)):
                    await broken.generate(GenerateRequest("r", PROBES[0], Sampling(max_tokens=4)))
            await world.update()
        broken.at = tensors
        await world.publish([whole, broken], tensors + 1)
        assert distance(await scores(broken), world.logprobs()) < TOLERANCE, "the next one mends it"
        await whole.close()
        await broken.close()

    run(test)


def test_who_reads_a_trainer_that_has_diverged_hears_of_it():
    """It has the weights in its memory by then, and draws nothing by them."""

    async def test():
        world = World(trainer(), "shm, buckets")
        replica = world.rollout()
        await world.publish([replica], 0)
        with torch.no_grad():
            next(world.engine.model.parameters()).fill_(float("nan"))
        with pytest.raises(FloatingPointError, match="version 1: the trainer's weights are no working model"):
            await world.publish([replica], 1)
        with pytest.raises(ReplicaLost, match="its sender (broke it off|waits no more)"):
            await asyncio.wait_for(replica.generate(GenerateRequest("r", PROBES[0], Sampling(max_tokens=4))), 20)
        await replica.close()

    run(test)


def test_no_replica_left_raises_with_every_cause(backend, of):
    async def test():
        world = WORLD_OF[of](trainer(), backend)
        with pytest.raises(
            SyncError, match=r"version 2 is live nowhere: replica 0: ConnectionError.*replica 1: SyncError"
        ) as caught:
            await world.publish([Fails(None), Hangs(None)], 2, timeout_s=1.0)
        assert isinstance(caught.value.__cause__, ConnectionError)

    run(test)


def test_a_trainer_that_is_busy_for_too_long_is_named(backend, of):
    gate = threading.Event()

    async def test():
        world = WORLD_OF[of](trainer(), backend)
        held = world.group.submit(lambda role: gate.wait(60), Broadcast())
        with pytest.raises(SyncError, match="version 8: the trainer's weights were not ready in time"):
            await world.publish([Fails(None)], 8, timeout_s=0.1)
        gate.set()
        held.result(60)

    run(test)


# -- order: nothing overtakes a publish --------------------------------------------------------------------------------


class Late(Replica):
    """Reads what it is sent only once `after` is done."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.after: Any = None

    async def load_weights(self, source, *, on_inflight="wait"):
        await asyncio.wait_for(asyncio.wrap_future(self.after), 60)
        return await self.inner.load_weights(source, on_inflight=on_inflight)


def test_unexclusive_an_optimizer_step_after_the_call_does_not_leak_into_the_version(backend, of):
    async def test():
        world = WORLD_OF[of](trainer(), backend)
        streamed = isinstance(world.outlet, base.StreamingOutlet)  # then the step waits until all was read
        replica = world.rollout() if streamed else Late(world.rollout())
        await world.ready(replica.inner if isinstance(replica, Late) else replica)
        before = world.logprobs()
        publishing = world.publish([replica], 0, exclusive=False)
        replica.after = world.submit_update()  # right after the call, long before the delivery
        await publishing
        assert distance(await scores(replica, world.actor.parameters), before) < TOLERANCE
        assert distance(before, world.logprobs()) > 0.1
        await replica.close()

    run(test)


def test_exclusive_nothing_is_copied_and_a_step_that_overtakes_is_caught():
    seen: list[dict[str, int]] = []

    def keep(manifest, tensors, name):
        seen.append({name: tensor.data_ptr() for name, tensor in tensors.items()})

    async def test():
        world = World(trainer(), "local", sender=tampered(keep, NORM))
        replica = Late(world.rollout())
        live = {n: t.data_ptr() for n, t in world.engine.weights()}
        replica.after = world.group.submit(probe, Broadcast())
        await world.publish([replica], 0)
        assert seen[0] == live
        publishing = world.publish([replica], 1)
        replica.after = world.submit_update()  # it was not exclusive
        with pytest.raises(SyncError, match="changed between its manifest and its delivery"):
            await publishing
        replica.after = world.group.submit(probe, Broadcast())
        await world.publish([replica], 2, exclusive=False)
        assert not set(live.values()) & set(seen[2].values())
        await replica.close()

    run(test)


# -- LoRA sets ---------------------------------------------------------------------------------------------------------


def merged_logprobs(world: LoraWorld) -> np.ndarray:
    """Those of the engine while its weights have the factors in them."""
    one, weights = world.source.parameters, dict(world.engine.model.named_parameters())
    kept = {module: weights[f"{module}.weight"].detach().clone() for module in one.targets}
    with torch.no_grad():
        for module in one.targets:
            a, b = (world.source.masters[name] for name in one.factors(module))
            weights[f"{module}.weight"].add_(b @ a, alpha=one.scale)
        found = probed(world.engine, PROBES, "float32").logprobs
        for module, before in kept.items():
            weights[f"{module}.weight"].copy_(before)
    return found


@each("kind", ROLLOUTS)
def test_a_published_set_computes_as_its_merged_model_and_its_requests_name_it(storing, kind):
    async def test():
        world = LoraWorld(trainer(), storing)
        replica = Notes(world.rollout(kind))
        await world.ready(replica)
        base = await scores(replica)
        for version in (3, 4):
            report = await world.publish([replica], version)
            sent = dict(world.source.weights())
            assert replica.came.keys() == sent.keys() and len(sent) == 12
            assert all(torch.equal(replica.came[name], tensor) for name, tensor in sent.items())
            assert report.num_bytes == sum(t.nbytes for t in sent.values()) and report.verified_tensors == 12
            expected = merged_logprobs(world)
            found = np.concatenate(await scores(replica, "a"))
            assert np.abs(found - expected).max() < 1e-5 and report.canary_mean_abs < 1e-5
            assert np.abs(found - np.concatenate(base)).max() > 0.1, "the adapter is large"
            assert distance(await scores(replica), base) == 0.0, "the policy is as it was"
            both = [
                GenerateRequest(f"{p}{version}", PROBES[0], Sampling(max_tokens=6, seed=1), parameters=p)
                for p in ("a", "policy")
            ]
            one, other = await asyncio.gather(*(replica.generate(request) for request in both))
            assert (one.parameters, one.spans) == ("a", ((version, 0, 6),))
            assert (other.parameters, other.spans) == ("policy", ((7, 0, 6),)) and replica.version == 7
            whole = np.concatenate([PROBES[0], one.ids])
            np.testing.assert_allclose((await replica.score(whole, parameters="a"))[-6:], one.logprobs, atol=1e-5)
            await world.update()
        await replica.close()

    run(test)


@each("kind", ROLLOUTS)
def test_a_set_over_other_weights_is_refused_and_ends_with_its_base(kind):
    async def test():
        world = LoraWorld(trainer())
        replica = world.rollout(kind)
        with pytest.raises(SyncError, match="the engine has no weights"):
            await world.publish([replica], 1)
        await world.ready(replica)
        await world.publish([replica], 1)
        with torch.no_grad():
            next(world.engine.model.parameters()).add_(1e-3)
        with pytest.raises(
            SyncError, match=r"LoRA set 'a' belongs to the weights [0-9a-f]+, and the engine has [0-9a-f]+"
        ):
            await world.publish([replica], 2)
        with pytest.raises(ValueError, match="no LoRA set 'a' is live on these weights"):
            await replica.score(PROBES[0], parameters="a")
        await world.ready(replica)
        await world.publish([replica], 3)
        request = GenerateRequest("r", PROBES[0], Sampling(max_tokens=40, seed=1, ignore_eos=True), parameters="a")
        running = asyncio.ensure_future(replica.generate(request))
        while not replica.stats()["sampled_tokens"]:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        given = {"exclusive": True, "on_inflight": ["keep"], "timeout_s": 60}
        await world.full.publish(world.policy, [replica], version=8, **given)
        done = await running
        assert len(done.ids) == 40 and done.spans == ((3, 0, 40),), "it ended before its base changed"
        with pytest.raises(ValueError, match=r"no LoRA set 'a' is live on these weights \(there are: none\)"):
            await replica.generate(replace(request, id="s"))
        await replica.close()

    run(test)


@each("kind", ROLLOUTS)
def test_running_requests_of_a_set_go_on_under_its_next_version(kind):
    async def test():
        world = LoraWorld(trainer())
        replica = world.rollout(kind, max_context_tokens=256)
        await world.ready(replica)
        await world.publish([replica], 1)
        request = GenerateRequest("r", PROBES[0], Sampling(max_tokens=200, seed=1, ignore_eos=True), parameters="a")
        running = asyncio.ensure_future(replica.generate(request))
        while not replica.stats()["sampled_tokens"]:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        await replica.pause("keep")
        await world.publish([replica], 2, exclusive=False, on_inflight="keep")
        await replica.resume()
        done = await running
        assert [v for v, _, _ in done.spans] == [1, 2] and done.spans[-1][2] == 200
        await replica.drop_set("a")
        await replica.drop_set("a")
        with pytest.raises(ValueError, match="no LoRA set 'a' is live"):
            await replica.generate(replace(request, id="s"))
        await replica.close()

    run(test)


def halved(parameters: ParameterSet, tensors: Any) -> Any:
    names = [name for module in parameters.targets[::2] for name in parameters.factors(module)]
    return parameters, {name: t * 0 if name in names else t for name, t in tensors.items()}


FAULTS: dict[str, Callable[[ParameterSet, Any], Any]] = {
    "dropped": lambda parameters, tensors: (parameters, {name: t * 0 for name, t in tensors.items()}),
    "half of the targets": halved,
    "alpha doubled": lambda parameters, tensors: (replace(parameters, scale=2 * parameters.scale), tensors),
}


@each("kind, fault", product(ROLLOUTS, [*FAULTS, "stale"]))
def test_the_canary_finds_an_adapter_that_does_not_act_as_it_was_trained(kind, fault):
    """The engine receives the right bytes, and computes with others."""

    async def test():
        world = LoraWorld(trainer())
        replica = world.rollout(kind)
        await world.ready(replica)
        add, first = replica._runner.add_set, dict(world.source.weights())
        first = {name: tensor.clone() for name, tensor in first.items()}
        faulty = FAULTS.get(fault, lambda parameters, tensors: (parameters, first))
        assert (await world.publish([replica], 1)).canary_mean_abs < TOLERANCE
        await world.update()
        replica._runner.add_set = lambda *given: add(*faulty(*given))
        with pytest.raises(SyncError, match=r"version 2: rollout and trainer log-probs of the canary differ by 0\.\d+"):
            await world.publish([replica], 2)
        replica._runner.add_set = add
        assert (await world.publish([replica], 3)).canary_mean_abs < TOLERANCE
        await replica.close()

    run(test)


def test_an_engine_without_lora_sets_refuses_one_and_serves_on():
    async def test():
        world = LoraWorld(trainer())
        replica = world.rollout()
        replica._runner.lora_rank = 0
        await world.ready(replica)
        with pytest.raises(SyncError, match="LoRA set 'a': this rollout engine loads no adapters"):
            await world.publish([replica], 1)
        assert (
            distance(await scores(replica), np.split(probed(world.engine, PROBES, "float32").logprobs, [6])) < TOLERANCE
        )
        await replica.close()

    run(test)


def test_a_stream_is_refused_for_a_lora_set():
    for backend in PASSING[:2]:
        with pytest.raises(Refused, match="'a': a LoRA set is published whole, not in buckets"):
            LoraWorld(trainer(), backend)


@each("kind", ROLLOUTS)
def test_a_published_adapter_follows_every_version_of_the_policy_on_all_replicas(kind):
    """This holds also if the trainer continues before the delivery ends."""

    async def test():
        world, notes = LoraWorld(trainer()), []
        router = Router([lambda died: world.rollout(kind) for _ in range(2)], note=notes.append)
        one = partial(LocalCheckpointEngine, probes=PROBES, tolerance=TOLERANCE)
        given = {"base": world.folder / "base", "timeout_s": 30.0, "note": notes.append, "after": AfterPublish}
        given |= {"published": router.set_published, "drop": router.drop_set}
        given |= {"waits": Waits()}
        lora = LoraPublisher(trainer=world.policy, new_engine=one, **given)
        given = {"waits": Waits(), "timeout_s": 30.0, "note": notes.append, "exclusive": False, "partial_rollout": True}
        publisher = Publisher(
            engine=world.full,
            trainer=world.policy,
            replicas=router.replicas,
            published=router.published,
            lora=lora,
            **given,
        )
        await publisher.start(0)
        report = await publisher.publish_adapter("b", world.folder / "a")
        assert (report.version, report.num_tensors, report.failed_replicas) == (0, 12, {})
        with pytest.raises(Refused, match="'b': the adapter in .*/a has this name, not .*/base; drop that set first"):
            await publisher.publish_adapter("b", world.folder / "base")
        with pytest.raises(Refused, match="'policy' is the name of the policy's own weights"):
            await publisher.publish_adapter("policy", world.folder / "a")
        asked = [GenerateRequest(f"r{i}", PROBES[0], Sampling(max_tokens=5, seed=i), parameters="b") for i in range(4)]
        assert {(await router.generate(request)).spans for request in asked} == {((0, 0, 5),)}
        for replica in router.replicas:  # a set never overtakes the weights under it, however late they are
            replica.load_weights = partial(late_weights, replica.load_weights)
        for version in (1, 2):
            before = [world.group.submit(adapted_probe, Broadcast())]
            committed, failed = [], []
            await publisher.settle()
            publisher.publish(committed.append, failed.append)
            await asyncio.wait_for(asyncio.wrap_future(World.submit_update(world, world.policy)), 60)
            await publisher.settle()
            assert not failed and committed[0].version == version and not notes
            expected = before[0].result(60)[0]
            for replica in router.replicas:
                assert distance(await scores(replica, "b"), expected) < TOLERANCE and replica.sets == {"b": version}
        with pytest.raises(SyncError, match="belongs to the weights"):
            await publisher.publish_adapter("c", world.folder / "a")  # the trainer has continued
        assert world.opened.keys() == {"a", "b"} and all(replica.ready for replica in router.replicas)
        await publisher.drop_set("b")
        assert world.opened.keys() == {"a"} and all(replica.sets == {} for replica in router.replicas)
        with pytest.raises(ValueError, match="no replica has a LoRA set 'b'"):
            await router.generate(replace(asked[0], id="s"))
        await router.close()

    run(test)


async def late_weights(load: Callable[..., Any], source: Any, **given: Any) -> int:
    if source.parameters.whole:
        await asyncio.sleep(0.2)
    return await load(source, **given)


def adapted_probe(role: Role) -> list[np.ndarray]:
    found = probed(role.publishing.lora_sets._open["b"][0], PROBES, "float32")
    assert found is not None
    return np.split(found.logprobs, [6])


# -- caches ------------------------------------------------------------------------------------------------------------


@each("kind", ROLLOUTS)
def test_a_prefix_computed_under_old_weights_is_never_used_after_a_publish(backend, kind):
    async def test():
        world = World(trainer(), backend)
        replica, prompt = world.rollout(kind), np.tile(np.arange(4, 24), 2)  # more than a block of vLLM's
        asked = [Sampling(max_tokens=12, seed=s, temperature=t) for s, t in ((1, 1.0), (2, 0.0))]

        async def answers(engine, tag):
            return [
                await engine.generate(GenerateRequest(f"{tag}{i}", prompt, s, prefix_key="p"))
                for i, s in enumerate(asked)
            ]

        await world.publish([replica], 0)
        old = await answers(replica, "old")
        if (await replica.capabilities()).prefix_cache:
            assert old[1].cached_tokens > 0, "this engine does cache prefixes"
        await world.update()
        await world.publish([replica], 1)
        new = await answers(replica, "new")
        fresh = world.rollout(kind)
        await world.publish([fresh], 1)
        expected = await answers(fresh, "fresh")
        assert new[0].cached_tokens == 0
        for a, b, c in zip(new, expected, old, strict=True):
            assert a.ids.tolist() == b.ids.tolist() and a.spans == ((1, 0, 12),)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            assert a.ids.tolist() != c.ids.tolist() or np.abs(a.logprobs - c.logprobs).max() > 1e-2
        await replica.close()
        await fresh.close()

    run(test)
