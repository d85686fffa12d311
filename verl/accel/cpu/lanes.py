"""The threads that compute. On a CPU with few cores, rows are divided over lanes of one thread each, and operations are
not split over the cores: starting a parallel region takes tens of microseconds, as long as a whole operation of a small
model."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
LANE_WORK = 5e6  # multiply-adds that take as long as dispatching a layer, which only one lane does at a time
WIDE_OPERATION = 2e7  # multiply-adds of a mean product from which all cores together finish it sooner
MEMORY_BOUND_ROWS = 20  # below about this many rows a product waits for its weights


def compute_alone(others: int) -> None:
    """Make torch use one thread for operations of the calling thread, and `others` for those of every other thread.

    torch's number is per thread, but set_num_threads also changes the number of threads that have not computed yet; a
    temporary thread restores that. `others` is an argument: a number read here could be the 1 that another lane has
    just set."""
    torch.get_num_threads()  # at its first use a thread sets its number to torch's; make that happen now
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(others,))
    restore.start()
    restore.join()


class Lanes:
    """`count` lanes of one thread each, the first of which is the calling thread (after `enter`), and a thread for
    operations on all cores."""

    def __init__(self, count: int) -> None:
        self.count, self._threads = count, torch.get_num_threads()
        self._helpers = [
            ThreadPoolExecutor(1, f"rollout-lane-{i}", initializer=compute_alone, initargs=(self._threads,))
            for i in range(1, count)
        ]
        # threads start on first use, so a tiny model never starts the wide one
        self._wide = ThreadPoolExecutor(1, thread_name_prefix="rollout-wide") if count > 1 else None

    def enter(self) -> None:
        if self.count > 1:
            compute_alone(self._threads)

    def useful(self, layer_work: float) -> int:
        """Return the best number of lanes for `layer_work` multiply-adds per layer: each of p lanes computes work / p
        while the dispatches of p lanes run one after another, which is fastest at p = sqrt(work / dispatch)."""
        return max(1, min(self.count, math.isqrt(int(layer_work / LANE_WORK))))

    def map(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run the jobs, dealt to the lanes in turn. Return their results in the order of the jobs."""
        shares = [jobs[lane :: self.count] for lane in range(min(self.count, len(jobs)))]
        futures = [pool.submit(_run_all, share) for pool, share in zip(self._helpers, shares[1:])]
        done = [_run_all(shares[0]), *(future.result() for future in futures)]
        return [done[i % self.count][i // self.count] for i in range(len(jobs))]

    def wide(self, job: Callable[[], T]) -> T:
        """Run one job with every operation split over all cores, and return its result."""
        return self._wide.submit(job).result() if self._wide else job()

    def close(self) -> None:
        for pool in (*self._helpers, *((self._wide,) if self._wide else ())):
            pool.shutdown(wait=False)


def wide_pays(rows: int, weights_per_product: float) -> bool:
    """Return True if all cores together finish a product of `rows` rows sooner than one core."""
    return max(rows, MEMORY_BOUND_ROWS) * weights_per_product >= WIDE_OPERATION


def _run_all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    return [job() for job in jobs]
