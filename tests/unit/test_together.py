"""Processes without a controller that do not see one run directory are refused before a checkpoint lacks their part."""

from __future__ import annotations

import copy
import errno
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from small_runs import small_args

from verl.checkpoint.store import CheckpointStore, is_late
from verl.config.load import load_config
from verl.driver import driver_host
from verl.driver.together import SharedStore, open_together
from verl.workers.answers import RankLate
from verl.workers.group import WorkerDied
from verl.workers.spmd import Meetings, SpmdDrivers


def drivers(number: int, told: list[Any]) -> Any:
    def gather(value: Any) -> Future[list[Any]]:
        if number == 0:
            told.append(value)
        future: Future[list[Any]] = Future()
        future.set_result([told[-1]])
        return future

    return SimpleNamespace(number=number, gather=gather)


def test_another_folder_of_the_same_name(tmp_path, tiny_model, arithmetic_data):
    resolved, told = load_config(small_args(tmp_path, tiny_model, arithmetic_data)), []
    first = open_together(resolved, "train", drivers(0, told))
    second = open_together(copy.deepcopy(resolved), "train", drivers(1, told))
    assert second.path == first.path and second.records != first.records
    first.path.rename(tmp_path / "of_the_first")
    shutil.copytree(tmp_path / "of_the_first", first.path)
    (first.path / driver_host.MARK).write_text("of an earlier run on this node's own disk")
    with pytest.raises(ValueError, match="does not see the run directory"):
        open_together(copy.deepcopy(resolved), "train", drivers(1, told))


def test_what_the_first_is_refused_ends_all(tmp_path, tiny_model, arithmetic_data):
    """With its words, and nothing is written."""
    resolved, told = load_config(small_args(tmp_path, tiny_model, arithmetic_data, "run.resume=never")), []
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text("")
    for number in range(2):
        with pytest.raises(ValueError, match="^run.resume=never, but"):
            open_together(copy.deepcopy(resolved), "train", drivers(number, told))
    assert len(told) == 1 and sorted(p.name for p in (tmp_path / "r").iterdir()) == [".lock", "metrics.jsonl"]


def test_another_source(tmp_path, tiny_model, arithmetic_data):
    resolved, told = load_config(small_args(tmp_path, tiny_model, arithmetic_data)), []
    open_together(resolved, "train", drivers(0, told))
    (place, *more), error = told[-1]
    told.append(((replace(place, versions=tuple((name, "another") for name, _ in place.versions)), *more), error))
    with pytest.raises(ValueError, match="has Python .* has another: install the same"):
        open_together(copy.deepcopy(resolved), "train", drivers(1, told))


class Pair:
    """Two processes that save together, each in a thread here. first_s: for which the first waits for the other."""

    def __init__(self, folder: Path, first_s: float = 60.0) -> None:
        self.store = CheckpointStore(folder)
        shared = dist.HashStore()
        self.meetings = [Meetings(dist.PrefixStore("beside", shared), n, 2, s) for n, s in enumerate((first_s, 60.0))]
        self._stores = [SharedStore(self.store if n == 0 else None, self.meetings[n]) for n in range(2)]
        self._threads = ThreadPoolExecutor(2)

    def save(self, step: int, *writes: Callable[[Path], None], needed_bytes: int = 0) -> list[Future[None]]:
        given = {"needed_bytes": needed_bytes}
        return [self._threads.submit(s.save, step, w, **given) for s, w in zip(self._stores, writes)]


def part(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(name) and None


def test_a_checkpoint_has_its_name_when_every_rank_has_written_its_part(tmp_path):
    pair, ready, begun, go = Pair(tmp_path), threading.Event(), threading.Event(), threading.Event()

    def quick(path: Path) -> None:
        part("a")(path)
        ready.set()

    def slow(path: Path) -> None:
        begun.set()
        assert go.wait(60)
        part("b")(path)

    for step, other in ((1, part("b")), (2, slow)):
        ready.clear()
        saves = pair.save(step, quick, other)
        if step == 2:
            assert ready.wait(60) and begun.wait(60)
            while not pair.meetings[0].waits:
                assert not saves[0].done()
            assert pair.store.steps() == [1], "the first has written, and does not seal alone"
            assert not any(save.done() for save in saves)
            go.set()
        for save in saves:
            save.result(60)
        assert {p.name for p in (tmp_path / f"step_{step}").iterdir()} == {"a", "b", "manifest.json"}
    assert pair.store.steps() == [1, 2]


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(path: Path) -> None:
    raise ValueError("a part that is none")


def linked(path: Path) -> None:
    (path / "link").symlink_to(path)


@pytest.mark.parametrize(
    "rank,bad,kind,said",
    [
        (0, full, OSError, "No space left on device"),
        (1, full, OSError, "No space left on device"),
        (1, broken, ValueError, "^a part that is none$"),
        (1, linked, ValueError, "plain files only"),  # which the first finds
    ],
)
def test_what_one_rank_cannot_write_is_the_error_of_all_and_they_save_the_next(tmp_path, rank, bad, kind, said):
    pair = Pair(tmp_path)
    writes = [part("a"), part("b")]
    for save in pair.save(1, *(bad if n == rank else w for n, w in enumerate(writes))):
        with pytest.raises(kind, match=said):
            save.result(60)
    assert not list(tmp_path.iterdir()), "nothing of it is left"
    for save in pair.save(2, *writes):
        save.result(60)
    assert pair.store.steps() == [2]


def test_a_disk_that_is_full_before_anything_is_written_is_the_error_of_all(tmp_path):
    wrote = []
    for save in Pair(tmp_path).save(1, wrote.append, wrote.append, needed_bytes=1 << 60):
        with pytest.raises(OSError, match="a checkpoint needs about"):
            save.result(60)
    assert not wrote and not list(tmp_path.iterdir())


def test_a_rank_that_does_not_come_is_named_and_nothing_has_the_name(tmp_path):
    pair, end = Pair(tmp_path, first_s=0.2), threading.Event()
    first, second = pair.save(1, part("a"), lambda path: end.wait(60) and None)
    with pytest.raises(RankLate, match=r"^rank 0 waited 0.2 s for ranks \[1\] in a save$") as late:
        first.result(60)
    assert is_late(late.value) and not pair.store.steps() and not list(tmp_path.iterdir())
    pair.meetings[1].death = WorkerDied("rank 0 (process 7) is gone: torchrun says how it ended")
    end.set()
    with pytest.raises(WorkerDied, match="rank 0"):
        second.result(60)
    assert not list(tmp_path.iterdir()), "a part that comes late is no checkpoint"


def test_what_a_process_does_beside_the_calls_tells_of_a_death_first():
    """A write thread hears of it as a connection that broke, or waits for a rank that is stopped."""
    gone = WorkerDied("rank 1 (process 7) is gone: torchrun says how it ended")
    process: Any = SimpleNamespace(_death=None, _death_seen=threading.Event())

    def raises(error: Exception) -> Callable[[], None]:
        def fn() -> None:
            if isinstance(error, RuntimeError) and "Connection" in str(error):
                process._death = gone
                process._death_seen.set()
            raise error

        return fn

    with pytest.raises(RankLate, match="waited 5 s for another rank"):
        SpmdDrivers.alone(process, raises(RuntimeError("Timed out waiting 5000ms for recv operation to complete")))
    with pytest.raises(OSError, match="full"):
        SpmdDrivers.alone(process, raises(OSError(errno.ENOSPC, "full")))
    with pytest.raises(WorkerDied, match="rank 1"):
        SpmdDrivers.alone(process, raises(RuntimeError("Connection closed by peer")))
    with pytest.raises(WorkerDied, match="rank 1"):  # known by now
        SpmdDrivers.alone(process, lambda: None)
