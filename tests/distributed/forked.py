"""Ranks for tests: forked from a process that has imported everything, so that a case costs a fraction of a second."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from torch.distributed.tensor import DTensor

from verl.model_engine.layout import Layout
from verl.workers.dist import ProcessRanks, become

TIMEOUT_S = 180.0
sys.path.append(str(Path(__file__).parents[1] / "numerics"))  # cases of tests there
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)  # before anything is computed: a fork does not carry the threads of its parent


STORE: list[dist.Store] = []  # of a forked rank: where all of its case find each other
MADE = itertools.count()  # ranks of one process, in the same order on all


def ranks_of(layout: Layout, rank: int, *, timeout_s: float = TIMEOUT_S) -> ProcessRanks:
    """This rank among those that have rows of their own."""
    return ProcessRanks(dist.PrefixStore(f"ranks/{next(MADE)}", STORE[0]), layout, rank, timeout_s)


def tensor_bytes() -> int:
    """Return the bytes of the tensors on this process's host, each storage once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, DTensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def run(
    world_size: int, fn: Callable[[int], Any], *, timeout_s: float = TIMEOUT_S, killed: frozenset[int] = frozenset()
) -> list[Any]:
    """Return the results of fn(rank) on each of `world_size` ranks of one gloo group. The first that fails ends all of
    them, and its traceback is the error. killed: the ranks that are killed in fn, with None as their result; then the
    deadline of torch's collectives is ten times `timeout_s`."""
    _settle(timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        pids = [_start(rank, world_size, fn, Path(folder), timeout_s, bool(killed)) for rank in range(world_size)]
        waiting, failed, end = set(pids), None, time.monotonic() + timeout_s
        try:
            while waiting and failed is None:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid in waiting:
                    waiting.remove(pid)
                    rank = pids.index(pid)
                    failed = rank if (status != signal.SIGKILL if rank in killed else status) else None
                elif time.monotonic() > end:
                    where = _stacks([p for p in pids if p in waiting], Path(folder))
                    ranks = sorted(pids.index(p) for p in waiting)
                    raise TimeoutError(f"ranks {ranks} are not done in {timeout_s} s\n{where}")
                else:
                    time.sleep(0.005)
        finally:
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if failed is not None:
            errors = [p.read_text() for p in sorted(Path(folder).glob("*.error"), key=lambda p: p.stat().st_mtime_ns)]
            raise RuntimeError(errors[0] if errors else f"rank {failed} died")
        found = [Path(folder) / f"{rank}.result" for rank in range(world_size)]
        return [pickle.loads(p.read_bytes()) if rank not in killed else None for rank, p in enumerate(found)]


def _settle(timeout_s: float) -> None:
    """Wait until no other thread of this process runs. One that Python has joined may still be ending: MKL then gives
    back its buffers under locks, and a fork in the midst leaves those locks to the child, whose dgemm waits on."""
    end = time.monotonic() + timeout_s
    while running := _running():
        if time.monotonic() > end:
            raise TimeoutError(f"threads {running} of this process still run after {timeout_s} s: no moment to fork")
        time.sleep(0.001)


def _running() -> list[int]:
    found = []
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has ended
            state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
            if thread != threading.get_native_id() and state != "S":
                found.append(thread)
    return found


def _stacks(pids: list[int], folder: Path) -> str:
    """Return the stack of each of these processes."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)
    return "\n".join(f"{p.name}:\n{p.read_text()}" for p in sorted(folder.glob("*.stack")))


def _start(rank: int, world_size: int, fn: Callable[[int], Any], folder: Path, timeout_s: float, some_die: bool) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1, (folder / f"{rank}.stack").open("w"))
        STORE.append(dist.FileStore(str(folder / "rendezvous"), world_size))
        wait_s = timeout_s * (10 if some_die else 1)
        become(STORE[0], Layout(world_size=world_size), rank, backend="gloo", timeout_s=wait_s, start_s=timeout_s)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(fn(rank)))
        if not some_die:
            dist.barrier()
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(code)
