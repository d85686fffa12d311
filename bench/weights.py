"""Weights from a trainer's process to a rollout's on one host: how fast by each transport, and what changes cost.

    python bench/weights.py [--sizes 0.1,1] [--rounds N]

stage: the trainer's end, from its tensors to where they can be fetched · read: the other process, tensor by tensor,
into the memory of its own model, as the native engine does. Checksums are apart: the manifest's are of all bytes for
the first versions, of a sixteenth after. For tcp the other process plays another host: what it fetches goes over a
socket into shared memory of its own.
All are shares of a warm copy of the same bytes. delta: bfloat16, of which a share of the values has changed;
over a link of 1 Gb/s the bytes are counted at 125 MB/s beside the time measured here. One thread per process. Writes
its part of bench/RESULTS.md (bench/sections/weights.md).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.report import assemble
from bench.results import Spread, Table
from verl.weight_sync import shm, tcp
from verl.weight_sync.base import checksum
from verl.weight_sync.sender import entry_of

ROOT = Path(__file__).resolve().parents[1]
DROPPED = 2  # rounds before the first that counts
LINK = 125e6  # bytes per second: 1 Gb/s
SHARES = (0.01, 0.02, 0.03)  # of the values that change
Weights = dict[str, torch.Tensor]


def weights(num_bytes: float, dtype: torch.dtype = torch.float32) -> Weights:
    """Square matrices of 1,024, as a model has many."""
    count = max(1, round(num_bytes / (1024 * 1024 * dtype.itemsize)))
    return {f"layers.{i}.weight": torch.randn(1024, 1024).to(dtype) for i in range(count)}


def reader(line: Any) -> None:
    """The rollout's process: reads what it is told of, and answers with its seconds and the bytes that came."""
    torch.set_num_threads(1)
    came = [0]
    receive = tcp._receive

    def counted(peer: Any, into: memoryview) -> None:
        came[0] += len(into)
        receive(peer, into)

    tcp._receive = counted
    opens = {"shm": shm.open_weights, "tcp": tcp.open_weights}
    away = Path(tempfile.mkdtemp(dir=shm.SHM))  # the shared memory of another host
    shm.SHM = tcp.SHM = away
    into: Weights = {}  # its model
    while (told := line.recv()) is not None:
        transport, address = told
        came[0], start = 0, time.perf_counter()
        for name, tensor in opens[transport](address).tensors():
            mine = into.get(name)
            if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                into[name] = tensor.clone()
            else:
                mine.copy_(tensor)
        line.send((time.perf_counter() - start, came[0]))
    shutil.rmtree(away)


@contextlib.contextmanager
def other_process() -> Iterator[Callable[[str, str], tuple[float, int]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=reader, args=(theirs,), daemon=True)
    process.start()

    def ask(transport: str, address: str) -> tuple[float, int]:
        ours.send((transport, address))
        if not ours.poll(600):
            raise TimeoutError("the reading process did not answer in 600 s")
        return ours.recv()

    yield ask
    ours.send(None)
    process.join(30)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def transports(size_gb: float, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the first table."""
    now = weights(size_gb * 1e9)
    shapes, total = {n: entry_of(t) for n, t in now.items()}, sum(t.nbytes for t in now.values())
    into = {n: torch.empty_like(t) for n, t in now.items()}
    name = f"{shm.PREFIX}-{os.getpid()}-bench"
    outlets: dict[str, Any] = {"shm": shm.ShmOutlet(name), "tcp": tcp.TcpOutlet(host="127.0.0.1")}
    found: dict[str, list[float]] = {"copy": [], "checksum": []}
    with other_process() as ask:
        for number in range(DROPPED + rounds):
            spent = {"copy": seconds(lambda: [into[n].copy_(t) for n, t in now.items()])}
            spent["checksum"] = seconds(lambda: [checksum(t) for t in now.values()])
            for transport, outlet in outlets.items():
                start = time.perf_counter()
                address = outlet.stage(number, shapes, now.items())
                spent[f"{transport} stage"] = time.perf_counter() - start
                spent[f"{transport} read"], _ = ask(transport, address)
                spent[f"{transport} both"] = spent[f"{transport} stage"] + spent[f"{transport} read"]
            for what, value in spent.items():
                if number >= DROPPED:
                    found.setdefault(what, []).append(value)
    shm.remove(name)
    shm.remove(f"{shm.PREFIX}-*-{outlets['tcp'].tag}")
    copy = Spread.of(found["copy"]).median
    rows = []
    for what, values in found.items():
        rate = Spread.of([total / 1e9 / v for v in values]).text(2)
        rows.append((f"{total / 1e9:.2g} GB, {what}", rate, f"{copy / Spread.of(values).median:.0%}"))
    return rows


def deltas(size_gb: float, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the second table."""
    rows = []
    with other_process() as ask:
        for share in (None, *SHARES):
            outlet, now = (
                tcp.TcpOutlet(host="127.0.0.1", delta=share is not None),
                weights(size_gb * 1e9, torch.bfloat16),
            )
            shapes, spent, sent = {n: entry_of(t) for n, t in now.items()}, [], []
            for number in range(DROPPED + rounds):
                for tensor in now.values():
                    tensor.view(torch.int16).view(-1)[torch.rand(tensor.numel()) < (share or 0.02)] ^= 1
                start = time.perf_counter()
                address = outlet.stage(number, shapes, now.items())
                staged = time.perf_counter() - start
                read, came = ask("tcp", address)
                if number >= DROPPED:
                    spent.append(staged + read)
                    sent.append(came)
            shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
            here, num_bytes = Spread.of(spent), Spread.of(sent).median
            over = here.median + num_bytes / LINK
            if share is None:
                whole = (num_bytes, over)
            label = "whole" if share is None else f"{share:.0%} changed"
            ratios = (f"{whole[0] / num_bytes:.1f}×", f"{whole[1] / over:.1f}×")
            rows.append((label, f"{num_bytes / 1e6:,.1f}", here.text(2), f"{over:.2f}", *ratios))
    return rows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="0.1,1", help="GB")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = [float(size) for size in given.sizes.split(",")]
    speed = Table(
        "transports, one trainer and one rollout process",
        ("", "GB/s, median [quartiles]", "of a warm copy"),
        tuple(row for size in sizes for row in transports(size, given.rounds)),
    )
    columns = ("MB sent", "s here, stage and read", "s over 1 Gb/s", "fewer bytes", "faster over the link")
    changed = Table(f"delta, {sizes[0]:g} GB of bfloat16", ("", *columns), tuple(deltas(sizes[0], given.rounds)))
    about = (
        f"Command: `python bench/weights.py`. {given.rounds} rounds after {DROPPED} that are dropped; {os.cpu_count()} "
        f"cores, 1-minute load {os.getloadavg()[0]:.1f}; torch {torch.__version__}. "
        "stage: from the trainer's tensors to where they can be fetched; read: by the other process, into the memory "
        "of its own model; both: two copies, of which a half is the most; checksum: crc32 of all bytes, which both "
        "ends make for the first versions, and of a sixteenth after."
    )
    texts = [table.markdown() for table in (speed, changed)]
    print(*texts, sep="\n\n")
    (ROOT / "bench" / "sections" / "weights.md").write_text("\n\n".join(["## Weights", about, *texts]) + "\n")
    assemble(ROOT / "bench")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
