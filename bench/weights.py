"""Weights from a trainer's process to a rollout's on one host: how fast and in how much memory by each transport, and
what changes cost.

    python bench/weights.py [--sizes 0.1,1] [--rounds N] [--threads N]

stage: the trainer's end, from its tensors to where they can be fetched · read: the other process, tensor by tensor,
into the memory of its own model · load: as the native engine does, which lays them out anew over the version that is
live, or beside it while requests run. Checksums are apart: the manifest's are of all bytes for the first versions, of a
sixteenth after. For tcp, collective and nixl the other process plays another host: it fetches into shared memory of its
own; through buckets it reads while the trainer sends. All are shares of a warm copy of the same bytes by as many
threads, made in the same round. Memory: the most in shared memory, and the most that a process took for itself during
its part, in models. delta: versions after AdamW steps at lr 1e-6, in the format that a float32 and a bfloat16 replica
reads; over a link of 1 Gb/s the bytes are counted at 125 MB/s beside the time measured here. paused: whole publishes
through shared memory into a native engine of this process, with requests that continue under the new weights, without a
canary; and the time of each in which they do not run.
Writes its part of bench/RESULTS.md (bench/sections/weights.md).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.report import write_section
from bench.results import Spread, Table
from verl.algorithms.losses import nll
from verl.batch import pack
from verl.model_engine.base import whole_part
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.objective import Term
from verl.rollout.base import GenerateRequest, RolloutContext, RolloutEngine, WireFormat
from verl.rollout.native import engine as native_engine
from verl.rollout.native.architecture import shape_of
from verl.rollout.native.options import Options
from verl.rollout.native.runner import NativeRunner
from verl.rollout.native.weights import Storage
from verl.types import Sample, Sampling, Segment
from verl.weight_sync import buckets, collective, nixl, relay, shm, tcp
from verl.weight_sync.base import Outlet, Passed, Readers, SyncReport, checksum
from verl.weight_sync.local import LocalCheckpointEngine
from verl.weight_sync.record import entry_of
from verl.weight_sync.sender import WeightSender

DROPPED = 2  # rounds before the first that counts
LINK = 125e6  # bytes per second: 1 Gb/s
LR, TOKENS = 1e-6, 64  # of the optimizer steps between versions
REQUESTS = 4  # that run during publishes
COPIED = 0.1e9  # bytes of the target of a warm copy, which is repeated: more than caches hold
NEEDS = {"memory": 8, "shared memory": 4}  # models, of the transport that needs the most
BUCKET_BYTES = 16 << 20
MODULES = {"shm": shm, "tcp": tcp, "collective": collective, "nixl": nixl}
BUCKETS = {"shm, buckets": buckets, "tcp, buckets": relay}
PARTS = ("gather", "stage", "transfer", "load", "pause")
Weights = dict[str, torch.Tensor]


class Spent(NamedTuple):
    """anon: bytes that the process took for itself meanwhile, at most."""

    wall_s: float
    cpu_s: float
    anon: int
    came: int = 0


def config(layers: int) -> Qwen3Config:
    """50 MB of float32 in each layer."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    more = {"head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 512, "tie_word_embeddings": True}
    return Qwen3Config.from_dict({"num_hidden_layers": layers, **sizes, **more})


def layers_of(num_bytes: float) -> int:
    return max(1, round(num_bytes / 50.3e6))


def model(num_bytes: float) -> Weights:
    shape = shape_of(config(layers_of(num_bytes)), 512)
    storage = Storage(shape, torch.float32, torch.float32, torch.device("meta"))
    return {n: torch.randn(to.shape) for n, to in storage.destinations.items() if n != "lm_head.weight"}


def anon() -> int:
    """Bytes of this process that are its own, and no file's."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").open() if line.startswith("RssAnon:"))


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """[what was taken, at most], once it is over."""
    over, before = threading.Event(), anon()
    found = [0]

    def look() -> None:
        while not over.wait(0.002):
            found[0] = max(found[0], anon() - before)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield found
    finally:
        over.set()
        watching.join()
        found[0] = max(found[0], anon() - before)


def spent(call: Callable[[], Any]) -> Spent:
    with peak() as taken:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Spent(wall, cpu, taken[0])


def reader(line: Any, threads: int, layers: int | None, runs: bool) -> None:
    """The rollout's process: it reads the given version, and answers with its times and the received bytes. layers:
    into a native engine of so many · runs: beside the version that is live, as while requests run."""
    torch.set_num_threads(threads)
    came = [0]
    receive = tcp.filled

    def counted(peer: Any, into: memoryview) -> None:
        came[0] += len(into)
        receive(peer, into)

    tcp.filled = counted
    away = Path(tempfile.mkdtemp(dir=shm.SHM))  # the shared memory of another host
    shm.SHM = tcp.SHM = relay.SHM = away
    relay.ledger_of = lambda name: away / name
    into: Weights = {}  # its model
    context = RolloutContext(hf_config=config(layers or 1), max_context_tokens=256, dtype=torch.float32)
    runner = None if layers is None else NativeRunner(Options(), context)

    def read(transport: str, address: str) -> None:
        stream = (MODULES | BUCKETS)[transport].open_weights(address)
        if runner is not None:
            return runner.prepare(stream)() if runs else runner.load(stream)
        for name, tensor in stream.tensors():
            mine = into.get(name)
            if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                into[name] = tensor.clone()
            else:
                mine.copy_(tensor)
        return None

    while (told := line.recv()) is not None:
        came[0] = 0
        found = spent(partial(read, *told))
        line.send((found._replace(came=came[0]), in_files(away)))
    shutil.rmtree(away)


def in_files(folder: Path, prefix: str = shm.PREFIX) -> int:
    """Bytes of weights in shared memory."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob(f"{prefix}-*"))


def misfit(size_gb: float) -> str | None:
    """Why a size is not for this machine."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = {"memory": int(told["MemAvailable"].split()[0]) * 1024, "shared memory": shutil.disk_usage(shm.SHM).free}
    for what, models in NEEDS.items():
        if models * size_gb * 1e9 > free[what]:
            need = f"needs {models * size_gb:.1f} GB of {what}, and {free[what] / 1e9:.1f} GB are free"
            return f"--sizes {size_gb:g}: {need}; give a smaller size"
    return None


@contextlib.contextmanager
def other_process(
    threads: int = 1, layers: int | None = None, runs: bool = False
) -> Iterator[Callable[[str, str], tuple[Spent, int]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=reader, args=(theirs, threads, layers, runs), daemon=True)
    process.start()

    def ask(transport: str, address: str) -> tuple[Spent, int]:
        ours.send((transport, address))
        if not ours.poll(600):
            raise TimeoutError("the reading process did not answer in 600 s")
        return ours.recv()

    yield ask
    ours.send(None)
    process.join(30)


def outlet_of(transport: str) -> tuple[Any, str]:
    """An outlet, and how its files are named."""
    if transport == "shm":
        name = f"{shm.PREFIX}-{os.getpid()}-bench"
        return shm.ShmOutlet(name), name
    kinds = {"tcp": tcp.TcpOutlet, "collective": collective.CollectiveOutlet, "nixl": nixl.NixlOutlet}
    outlet = kinds[transport](host="127.0.0.1")
    return outlet, f"{shm.PREFIX}-*-{outlet.tag}"


def transports(size_gb: float, rounds: int, threads: int) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Rows of the first two tables. Over the network only the smallest size is sent."""
    now = model(size_gb * 1e9)
    total = sum(t.nbytes for t in now.values())
    at, speeds, memory = f"{total / 1e9:.2g} GB", [], []
    pieces = [piece for t in now.values() for piece in t.view(-1).split(1 << 18)]
    room = torch.zeros(int(COPIED / (4 << 18)), 1 << 18)

    def copy() -> None:
        for i, piece in enumerate(pieces):
            room[i % len(room), : len(piece)].copy_(piece)

    def row(what: str, found: Sequence[Spent], copies: Sequence[Spent]) -> tuple[str, ...]:
        rate = Spread.of([total / 1e9 / one.wall_s for one in found]).text(2)
        pairs = list(zip(found, copies, strict=True))
        by_wall = Spread.of([100 * of.wall_s / one.wall_s for one, of in pairs]).text(0)
        by_cpu = Spread.of([100 * of.cpu_s / one.cpu_s for one, of in pairs]).text(0)
        return (f"{at}, {what}", rate, by_wall, by_cpu)

    checks = [(spent(copy), spent(lambda: [checksum(t) for t in now.values()])) for _ in range(DROPPED + rounds)]
    copies, checked = zip(*checks[DROPPED:], strict=True)
    speeds += [row("copy", copies, copies), row("checksum", checked, copies)]
    shapes = {n: entry_of(t) for n, t in now.items()}

    def stage(outlet: Outlet, version: int, manifests: list[Any]) -> None:
        manifests.append(outlet.stage(version, shapes, now.items()))

    ways = [("shm", ""), ("shm", "native"), ("shm", "native, requests run")]
    ways += [(name, "") for name in MODULES if name != "shm" and size_gb <= 0.1]
    for transport, native in ways:
        what, reads = f"{transport}, {native}" if native else transport, "load" if native else "read"
        outlet, files = outlet_of(transport)
        found: list[tuple[Spent, Spent, Spent]] = []  # copy, stage, read
        most = [0, 0, 0, 0]
        with other_process(threads, layers_of(size_gb * 1e9) if native else None, native.endswith("run")) as ask:
            for version in range(DROPPED + rounds):
                of, manifests = spent(copy), list[Any]()
                staged = spent(partial(stage, outlet, version, manifests))
                read, theirs = ask(transport, manifests[0])
                MODULES[transport].open_weights(manifests[0]).release(version)
                here = in_files(shm.SHM, files)
                if version >= DROPPED:
                    found.append((of, staged, read))
                    most = list(map(max, most, (here, theirs, staged.anon, read.anon)))
        shm.remove(files)
        copies, stages, answers = zip(*found, strict=True)
        both = [Spent(a.wall_s + b.wall_s, a.cpu_s + b.cpu_s, 0) for a, b in zip(stages, answers, strict=True)]
        speeds += [row(f"{what}: {part}", of, copies) for part, of in (("stage", stages), (reads, answers))]
        speeds.append(row(f"{what}: both", both, copies))
        memory.append((f"{at}, {what}", *(f"{one / total:.2f}" for one in most)))
    for transport in BUCKETS:
        passes, most = passed(transport, now, size_gb, rounds, threads, copy)
        copies, wholes = zip(*passes, strict=True)
        speeds.append(row(f"{transport}, native: both at a time", wholes, copies))
        memory.append((f"{at}, {transport}, native", *(f"{one / total:.2f}" for one in most)))
    return speeds, memory


def passed(
    transport: str, now: Weights, size_gb: float, rounds: int, threads: int, copy: Callable[[], None]
) -> tuple[list[tuple[Spent, Spent]], list[int]]:
    """(a copy, a version through buckets into a native engine) of each round, and the most memory, as in the table."""
    found, most, far = [], [0, 0, 0, 0], transport == "tcp, buckets"
    near = buckets.BucketOutlet(f"{shm.PREFIX}-{os.getpid()}-buckets", BUCKET_BYTES)
    outlet = relay.RelayOutlet(BUCKET_BYTES, host="127.0.0.1") if far else near
    where = outlet.announce({n: entry_of(t) for n, t in now.items()})
    with other_process(threads, layers_of(size_gb * 1e9)) as ask, ThreadPoolExecutor(1) as pool:
        for turn in range(DROPPED + rounds):
            of, told = spent(copy), list[tuple[Spent, int]]()

            def publish(turn: int = turn, told: list[tuple[Spent, int]] = told) -> None:
                reading = pool.submit(ask, transport, f"{where}:{turn}:{turn}:0")
                outlet.stream(turn, (Passed(n, t, None) for n, t in now.items()), Readers(turn, 1, 600.0))
                outlet.commit(turn)
                told.append(reading.result())

            sent = spent(publish)
            ((read, theirs),) = told
            if turn >= DROPPED:
                found.append((of, sent._replace(cpu_s=sent.cpu_s + read.cpu_s)))
                most = list(map(max, most, (in_files(shm.SHM, outlet.name), theirs, sent.anon, read.anon)))
    shm.remove(outlet.name)
    return found, most


def trained(num_bytes: float) -> tuple[TorchEngine, Callable[[], None]]:
    """(an engine with float32 weights of that size, one AdamW step at lr 1e-6 with the gradient of random rows)."""
    engine = TorchEngine(
        Qwen3ForCausalLM(config(layers_of(num_bytes))), EngineSettings(optim=OptimSpec(lr=LR), dtype="float32")
    )
    drawn = itertools.count()

    def step() -> None:
        ids = np.random.default_rng(next(drawn)).integers(4, 1024, TOKENS + 1)
        sampled = Segment(ids=ids[1:], source="sampled", logprobs=np.zeros(TOKENS, np.float32), version=0)
        segments, name = (Segment(ids=ids[:1], source="prompt"), sampled), str(next(drawn))
        row = Sample(sample_id=name, trajectory_id=name, group_id=name, purpose="train", segments=segments)
        weight = torch.full((TOKENS,), 1.0 / TOKENS, dtype=torch.float64)
        batch = pack([row], share_prefix=False).with_columns({"w/nll": weight})
        engine.forward_backward(batch, [Term(name="nll", fn=nll)])
        engine.optim_step()

    return engine, step


def deltas(size_gb: float, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the third table: versions after optimizer steps, from the trainer's engine to another host."""
    engine, step = trained(size_gb * 1e9)
    rows, found = [], dict[tuple[str, bool], tuple[float, float]]()
    with other_process() as ask:
        for dtype, delta in itertools.product(("float32", "bfloat16"), (False, True)):
            outlet, times, sent = tcp.TcpOutlet(host="127.0.0.1", delta=delta), list[float](), list[float]()
            sender: Any = WeightSender(outlet, verify_first=0)
            sender.set_format(WireFormat(dtype))
            for number in range(DROPPED + rounds):
                step()
                told = sender.send(engine, number, (), copy=False)
                read, _ = ask("tcp", told.source.address)
                if number >= DROPPED:
                    times.append(told.seconds["stage"] + read.wall_s)
                    sent.append(read.came)
            shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
            here, num_bytes = Spread.of(times), Spread.of(sent).median
            found[dtype, delta] = num_bytes, here.median + num_bytes / LINK
            label = f"{dtype}, {'delta' if delta else 'whole'}"
            rows.append((label, f"{num_bytes / 1e6:,.1f}", here.text(2), f"{found[dtype, delta][1]:.2f}"))
    whole, every = found["bfloat16", False], found.values()
    return [(*row, f"{whole[0] / size:.1f}×", f"{whole[1] / over:.1f}×") for row, (size, over) in zip(rows, every)]


async def publishes(now: Weights, rollout: RolloutEngine, rounds: int) -> list[SyncReport]:
    """Return the times of so many publishes through shared memory while requests run, without a canary, after those
    that are dropped."""
    name = f"{shm.PREFIX}-{os.getpid()}-paused"
    sender = WeightSender(shm.ShmOutlet(name), verify_first=0)
    parts = [whole_part(name, tensor) for name, tensor in now.items()]
    engine: Any = SimpleNamespace(
        weights=lambda: iter(now.items()), weight_parts=lambda: iter(parts), tied={}, masters={}
    )

    def done(call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call())
        return future

    trainer: Any = SimpleNamespace(
        send_weights=lambda version, probes, *, copy: done(lambda: sender.send(engine, version, probes, copy=copy)),
        release_weights=lambda version: done(lambda: sender.release(version)),
    )

    async def asked(number: int) -> None:
        for i in itertools.count():
            sampling = Sampling(max_tokens=200, seed=i, ignore_eos=True)
            await rollout.generate(GenerateRequest(f"{number}-{i}", np.arange(1, 9) + number, sampling))

    sync, found = LocalCheckpointEngine(probes=(), copies=True), []
    running: list[asyncio.Task[None]] = []
    for version in range(DROPPED + rounds):
        found.append(
            await sync.publish(
                trainer, [rollout], version=version, exclusive=True, on_inflight=["keep"], timeout_s=600.0
            )
        )
        running = running or [asyncio.create_task(asked(number)) for number in range(REQUESTS)]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await rollout.close()
    shm.remove(name)
    return found[DROPPED:]


async def paused(size_gb: float, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the last table."""
    context = RolloutContext(hf_config=config(layers_of(size_gb * 1e9)), max_context_tokens=256, dtype=torch.float32)
    kept = await publishes(model(size_gb * 1e9), native_engine.build(Options(), context), rounds)
    parts = [(part, [100 * one.seconds[part] / one.whole_s for one in kept]) for part in PARTS]
    whole = Spread.of([one.whole_s for one in kept]).text(2)
    label = {"pause": "rollout paused, of the whole sync (at most 50, aim 10)"}
    return [("whole, s", whole), *((label.get(part, part), Spread.of(of).text(0)) for part, of in parts)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="0.1,1", help="GB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    given = parser.parse_args(argv)
    sizes = [float(size) for size in given.sizes.split(",")]
    if why := next(filter(None, map(misfit, sizes)), None):
        parser.error(why)
    for name, value in {"UCX_TLS": "tcp,sm,self", "NIXL_LOG_LEVEL": "WARN", "GLOO_SOCKET_IFNAME": "lo"}.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(given.threads)
    load = os.getloadavg()[0]
    found = [transports(size, given.rounds, given.threads) for size in sizes]
    speed = Table(
        "transports, one trainer and one rollout process",
        ("", "GB/s, median [quartiles]", "% of a warm copy", "% of a warm copy, by CPU time"),
        tuple(row for speeds, _ in found for row in speeds),
    )
    places = ("in shared memory", "there, on the other host", "the trainer, meanwhile", "the rollout, meanwhile")
    room = Table(
        "memory beside the trainer's model and the rollout's, in models",
        ("", *places),
        tuple(row for _, memory in found for row in memory),
    )
    torch.set_num_threads(1)
    less = ("bytes, of bfloat16 whole: fewer", "time over the link: faster")
    columns = ("MB sent", "s here, stage and read", "s over 1 Gb/s", *less)
    changed = Table(
        f"versions after AdamW steps at lr 1e-6, {sizes[0]:g} GB of float32 masters",
        ("", *columns),
        tuple(deltas(sizes[0], given.rounds)),
    )
    stood = asyncio.run(paused(sizes[0], given.rounds))
    still = Table(f"a publish of {sizes[0]:g} GB through shm, % of the whole", ("", "median [quartiles]"), tuple(stood))
    about = (
        f"Command: `python bench/weights.py --sizes {given.sizes} --rounds {given.rounds} --threads {given.threads}`, "
        f"after {DROPPED} rounds that are dropped; {os.cpu_count()} cores, 1-minute load {load:.1f} at the start and "
        f"{os.getloadavg()[0]:.1f} at the end; torch {torch.__version__}. "
        "stage: from the trainer's tensors to where they can be fetched; read: by the other process, into the memory "
        "of its own model; load: into a native engine, laid out anew, over the version that is live, or beside it "
        "where requests run; buckets: two of 16 MiB, filled and read at the same time; both: two "
        "copies, of which a half is the most; checksum: crc32 of all bytes, which both ends make for the first "
        "versions, and of a sixteenth after. Each is a share of the warm copy of its own round."
    )
    texts = [table.markdown() for table in (speed, room, changed, still)]
    print(*texts, sep="\n\n")
    write_section("weights", "## Weights", about, *texts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
