"""The costs between the processes of a run, on one host.

    python bench/workers.py [--only queue|calls|driver|saves|sharded] [--rounds N]

queue: a ragged batch of 1,024 rows and 4 columns, written, read whole and read by one column, through each queue;
beside them the TransferQueue package by its own calls (a key per row), and a plain copy of the same bytes. Arms without
an installed package are left out and named. calls: one call of the driver, there and back · driver: its own time for a
step, over simulated workers · saves: how long a checkpoint holds up a worker · sharded: core-seconds of a step over
worlds. One thread per process. Writes its part of bench/RESULTS.md (bench/sections/workers.md); `--only` prints without
writing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench import worker_calls
from bench.report import write_section
from bench.results import Spread, Table
from verl.batch import Ragged
from verl.transfer_queue.base import TransferQueue
from verl.types import Refs, Sample, Segment

ROWS, DROPPED = 1024, 3  # rounds before the first that counts
CALLS = ("put", "get all", "get all, copied out", "one column")
PACKAGE = "the package by its own calls"
COPY = "a warm copy of the bytes"
Times = Mapping[str, float]  # call -> ms


def columns() -> dict[str, Ragged]:
    """4 token columns, 20 bytes per token; row lengths are exponential around 400, 8 to 1,600."""
    lengths = np.clip(np.random.default_rng(0).exponential(400, ROWS).astype(np.int64), 8, 1600)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    tokens = int(offsets[-1])
    flat = {"ids": torch.arange(tokens), "logprobs": torch.rand(tokens), "advantages": torch.rand(tokens)}
    return {name: Ragged(values, offsets) for name, values in {**flat, "weights": torch.ones(tokens)}.items()}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = call()
    return 1e3 * (time.perf_counter() - start), found


def put_rows(queue: TransferQueue) -> Refs:
    """The rows, 8 to a group, each as small as a row can be: what is measured is their columns."""
    prompt = Segment(ids=np.array([1]), source="prompt")
    answer = Segment(ids=np.array([2]), source="sampled", logprobs=np.zeros(1, np.float32))
    samples = [
        Sample(
            sample_id=f"{i}#0", trajectory_id=str(i), group_id=str(i // 8), purpose="train", segments=(prompt, answer)
        )
        for i in range(ROWS)
    ]
    return asyncio.run(queue.put(samples))


def one_round(queue: TransferQueue, refs: Refs, given: Mapping[str, Ragged]) -> Times:
    put, _ = timed(lambda: queue.write(refs, given))
    whole, found = timed(lambda: queue.read(refs, tuple(given)))
    assert all(torch.equal(found[name].values, given[name].values) for name in given)
    del found
    copied, found = timed(lambda: [c.values.clone() for c in queue.read(refs, tuple(given)).values()])
    del found
    one, found = timed(lambda: queue.read(refs, ("advantages",)))
    return dict(zip(CALLS, (put, whole, copied, one)))


def elsewhere(queue: TransferQueue, refs: Refs, line: Any) -> None:
    """A process that works on the queue of another one, a round for every word."""
    torch.set_num_threads(1)
    given = columns()
    while line.recv():
        line.send(one_round(queue, refs, given))


# -- arms --------------------------------------------------------------------------------------------------------------


def arms() -> Iterator[tuple[str, Callable[[], Times]]]:
    """(name, a function that measures one round). ImportError: what it needs is not installed."""
    from verl.transfer_queue import memory, shared
    from verl.transfer_queue.options import Shared

    given = columns()
    yield COPY, copies(given)
    queues: dict[str, TransferQueue] = {"memory": memory.MemoryQueue(), "shared": shared.build(Shared())}
    for name, queue in queues.items():
        yield name, partial(one_round, queue, put_rows(queue), given)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    queue = shared.build(Shared())
    process = context.Process(target=elsewhere, args=(queue, put_rows(queue), theirs), daemon=True)
    process.start()

    def ask() -> Times:
        ours.send(True)
        return ours.recv()

    yield "shared, from another process", ask
    ours.send(False)
    process.join(30)


def copies(given: Mapping[str, Ragged]) -> Callable[[], Times]:
    """Into two places in turn, as a queue must that does not write where somebody may read."""
    source = np.concatenate([c.values.view(torch.uint8).numpy() for c in given.values()])
    targets, one = itertools.cycle((source.copy(), source.copy())), given["advantages"].values.numpy()
    smaller = itertools.cycle((one.copy(), one.copy()))

    def once() -> Times:
        whole = timed(lambda: np.copyto(next(targets), source))[0]
        return {**dict.fromkeys(CALLS, whole), "one column": timed(lambda: np.copyto(next(smaller), one))[0]}

    return once


def arms_of_ray() -> Iterator[tuple[str, Callable[[], Times]]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=1 << 30,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="verl",
    )
    from verl.transfer_queue.options import Package, Remote
    from verl.transfer_queue.package import build as build_package
    from verl.transfer_queue.ray import build as build_ray

    given = columns()
    queue: TransferQueue = build_ray(Remote())
    yield "ray", partial(one_round, queue, put_rows(queue), given)
    import transfer_queue

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write("backend:\n  SimpleStorage:\n    num_data_storage_units: 2\n")
        config.flush()
        packaged = build_package(Package(config=config.name))
    yield "package", partial(one_round, packaged, put_rows(packaged), given)
    yield PACKAGE, by_its_own_calls(transfer_queue, given)
    transfer_queue.close()
    ray.shutdown()


def by_its_own_calls(tq: Any, given: Mapping[str, Ragged]) -> Callable[[], Times]:
    from tensordict import TensorDict

    def ragged(column: Ragged) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(column.rows()), layout=torch.jagged)

    fields = TensorDict({name: ragged(column) for name, column in given.items()}, batch_size=[ROWS])
    keys = [f"{i}#0" for i in range(ROWS)]

    def once() -> Times:
        put, _ = timed(lambda: tq.kv_batch_put(keys=keys, partition_id="rows", fields=fields))
        whole, found = timed(lambda: tq.kv_batch_get(keys=keys, partition_id="rows"))
        assert torch.equal(found["ids"].values(), given["ids"].values)
        one, _ = timed(lambda: tq.kv_batch_get(keys=keys, partition_id="rows", select_fields=["advantages"]))
        tq.kv_clear(keys=keys, partition_id="rows")
        return dict(zip(CALLS, (put, whole, whole, one)))

    return once


# -- the table ---------------------------------------------------------------------------------------------------------


def queue(rounds: int) -> tuple[Table, str]:
    measured: dict[str, list[Times]] = {}
    missing = ""
    for several in (arms, arms_of_ray):
        try:
            for name, once in several():
                measured[name] = [once() for _ in range(DROPPED + rounds)][DROPPED:]
                print(name, {call: round(spread(measured[name], call).median, 2) for call in CALLS}, flush=True)
        except ImportError as exc:
            missing = f"Not run, for want of {exc.name}: what is not in the table."
    rows = []
    for name, times in measured.items():
        cells = [spread(times, call).text(2) for call in CALLS]
        for call in (CALLS[0], CALLS[1], CALLS[3]):
            peer = measured.get(PACKAGE)
            better = spread(peer, call).median / spread(times, call).median if peer else 0.0
            cells.append(f"{better:,.0f}×" if better and name not in (PACKAGE, COPY) else "")
        rows.append((name, *cells))
    against = tuple(f"{call}, package / this" for call in ("put", "get all", "one column"))
    nbytes = sum(c.values.nbytes for c in columns().values())
    title = f"queue: {ROWS:,} ragged rows, 4 columns, {nbytes / 1e6:.1f} MB"
    return Table(title, ("ms, median [quartiles]", *CALLS, *against), tuple(rows)), missing


def spread(times: Sequence[Times], call: str) -> Spread:
    return Spread.of([t[call] for t in times])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=("queue", "calls", "driver", "sharded", "saves"))
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Table]] = {
        "sharded": worker_calls.sharded,  # first: its ranks are forked from a process that has computed nothing
        "saves": partial(worker_calls.saves, given.rounds),
        "driver": partial(worker_calls.driver, given.rounds),
        "calls": partial(worker_calls.calls, given.rounds),
    }
    if given.only in parts:
        print(parts[given.only]().markdown())
        return 0
    others = [] if given.only else [make() for make in parts.values()]
    table, missing = queue(given.rounds)
    versions = [f"{n} {importlib.metadata.version(n)}" for n in ("torch", "numpy")]
    for name in ("ray", "TransferQueue"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    about = (
        f"Command: `python bench/workers.py`. {given.rounds} rounds per arm after {DROPPED} that are dropped; "
        f"{os.cpu_count()} cores, 1-minute load {os.getloadavg()[0]:.1f}; {', '.join(versions)}. put: the columns of "
        "rows that are there, and the index told of them (the package by its own calls: new rows, a key each, cleared "
        "after every round). A read of `shared` and `ray` is a view: the third figure adds a copy of it."
    )
    print(table.markdown())
    if given.only:
        return 0
    texts = [table.markdown(), *([missing] if missing else []), *(other.markdown() for other in others)]
    write_section("workers", "## Between processes", about, *texts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
