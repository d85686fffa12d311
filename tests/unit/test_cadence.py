"""The steps at which a checkpoint is made: by number, or by time, so that little work is lost and saving is short."""

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl.checkpoint.store import CheckpointStore, SaveFailed
from verl.driver import checkpointer
from verl.driver.checkpointer import Cadence, Checkpointer
from verl.driver.roles import Learner
from verl.driver.state import DriverState
from verl.workers.inproc import InprocGroup
from verl.workers.model_workers import ModelWorkers
from verl.workers.role import Role
from verl.workers.waits import Waits


def saves(step_s: float, save_s: float, steps: int, every: int | None = None, guess_s: float = 0.0) -> list[float]:
    """The seconds of work before each save, of a run with steps and saves of this length."""
    now = [0.0]
    cadence, out, since_s = Cadence(every, guess_s, clock=lambda: now[0]), [], 0.0
    for number in range(1, steps + 1):
        now[0] += step_s
        since_s += step_s
        if cadence.due(number):
            now[0] += save_s
            cadence.saved(save_s)
            out.append(since_s)
            since_s = 0.0
    return out


def test_by_time_at_most_half_an_hour_of_work_and_five_percent():
    wrong = []
    for step_s in (1.0, 7.0, 100.0, 700.0, 1700.0, 4000.0):
        for save_s in (0.1, 20.0, 90.0, 400.0):
            found = saves(step_s, save_s, steps=int(40_000 / step_s), guess_s=save_s)
            share = [save_s / (save_s + work_s) for work_s in found]
            longest_s = max(1800.0, step_s, 19 * save_s + step_s)
            if not found or max(found) > longest_s or max(share) > 0.05 + 1e-9:
                wrong.append((step_s, save_s, max(found, default=0), max(share, default=0)))
            if 19 * save_s + step_s <= 1800 and max(found, default=9e9) > 1800:
                wrong.append((step_s, save_s, "more than half an hour is lost"))
            if step_s <= 100 and save_s <= 20 and min(found, default=0) < 1500:
                wrong.append((step_s, save_s, "far too often"))
    assert not wrong, wrong


def test_what_a_save_took_decides_about_the_next():
    found = saves(100.0, 400.0, 400, guess_s=0.0)  # the estimate was far too low
    assert found[0] <= 1800 and all(400 / (400 + work_s) <= 0.05 for work_s in found[1:]) and len(found) > 2


def test_by_steps():
    assert saves(1.0, 50.0, 9, every=3) == [3.0, 3.0, 3.0] and saves(9999.0, 1.0, 9, every=0) == []


NO_MEDIA = SimpleNamespace(media=None)


class Model:
    """answers: what the futures of a save end with; None: never."""

    def __init__(self, answers: BaseException | None) -> None:
        self._answers = answers

    def save(self, path: Any) -> Future[None]:
        future: Future[None] = Future()
        if self._answers is not None:
            future.set_exception(self._answers)
        return future


def checkpointer_of(tmp_path: Any, model: Any, told: list[str], needed_bytes: int, wait_timeout_s: float) -> Any:
    run = SimpleNamespace(save_every_steps=1, grace_s=1.0, wait_timeout_s=wait_timeout_s)
    config, cluster = SimpleNamespace(run=run), SimpleNamespace(own_processes=True, drivers=None)
    learner: Any = SimpleNamespace(
        config=config, models={"actor": model}, waits=Waits(), cluster=cluster, queue=NO_MEDIA
    )
    learner.done = partial(Learner.done, learner)
    claimed: Any = SimpleNamespace(path=tmp_path, state=None, store=CheckpointStore(tmp_path), records="elsewhere")
    reporter: Any = SimpleNamespace(progress=SimpleNamespace(message=told.append), events=SimpleNamespace(append=print))
    return Checkpointer(claimed, learner, ("actor",), needed_bytes, reporter)


def saved(tmp_path: Any, answers: BaseException | None, needed_bytes: int = 0) -> list[str]:
    """Save a model of so many bytes under a limit of 0.05 s. Return the warnings, with which the run continues."""
    told: list[str] = []
    made = checkpointer_of(tmp_path, Model(answers), told, needed_bytes, 0.05)
    state: Any = SimpleNamespace(step=1, version=1)
    asyncio.run(made._commit(made._write(state, None), state, 0.0, last=False))
    return told


@pytest.mark.parametrize(
    "apart,drivers,beside", [(True, None, True), (False, "torchrun's", True), (False, None, False)]
)
def test_where_workers_have_processes_of_their_own_a_save_goes_on_beside_training(apart, drivers, beside, tmp_path):
    """It has begun when `save` returns; in one process it is done."""
    made = checkpointer_of(tmp_path, Model(None), [], 0, 60.0)
    made._learner.cluster = SimpleNamespace(own_processes=apart, drivers=drivers)
    made._claimed.identity, made._claimed.parent, made._claimed.hide = None, None, None
    made._reporter.events.flush = lambda **_: None
    did, go = list[str](), threading.Event()

    async def each(call: Any) -> list[Any]:
        did.append(call.__name__)
        return []

    async def stored(state: Any, best: Any, fill: Any) -> None:
        did.append(fill.__qualname__.split(".")[1])
        if beside:
            await asyncio.to_thread(go.wait, 60)

    made._each, made._stored = each, stored

    async def save() -> None:
        await made.save(DriverState(1, cast(Any, None), {}, []))
        assert (made._under_way is not None) is beside and (made.newest == 1) is not beside
        go.set()
        await made.settle()
        assert made.newest == 1

    asyncio.run(save())
    assert did == (["room", "snapshot", "_write_copies"] if beside else ["_write"])


@pytest.mark.parametrize("later", [False, True])
def test_a_snapshot_that_a_full_disk_refuses_is_not_kept(later, tmp_path):
    """A rank would hold weights and moments in host memory until the next save, or to the end of the run. A later one,
    for a step that may be stopped, stays."""
    engine: Any = SimpleNamespace(snapshot=lambda: "weights and moments")
    told, role = list[str](), Role("actor", None, engine)  # type: ignore[arg-type]
    workers = ModelWorkers(InprocGroup("actor", [role]), engine)
    made = checkpointer_of(tmp_path, workers, told, 1 << 60, 60.0)
    state: Any = SimpleNamespace(step=1, version=1)

    async def save() -> bool:
        await made._copy(1)
        if later:
            await made._copy(2)
        await made._commit(made._write_copies(state, None), state, 0.0, last=False)
        return role.saving.kept is not None

    assert asyncio.run(save()) is later
    (line,) = told
    assert "checkpoint of step 1 was not written" in line and "are free" in line


def test_a_write_follows_the_one_that_has_not_ended_yet(tmp_path):
    """A save failed on another rank; the next one of the run may start before this rank has the error."""
    free, order = threading.Event(), list[str]()

    def snapshot() -> Any:
        return SimpleNamespace(save=lambda path: (free.wait(60), order.append(path.name)))

    role = Role("actor", None, SimpleNamespace(snapshot=snapshot))  # type: ignore[arg-type]
    for name in ("first", "second"):
        role.snapshot()
        role.write(tmp_path / name, None)
        assert not role.written()
    free.set()
    assert role.saving.writing is not None and role.saving.writing.result(60) is None
    assert order == ["first", "second"]


def test_a_deadline_in_a_save_is_no_fault_of_the_disk(tmp_path, monkeypatch):
    """The run ends with the name of the waiting part; a disk that fails costs that checkpoint alone."""
    with pytest.raises(TimeoutError, match=r"^actor has not written its state within 0.05 s \(run.wait_timeout_s, or"):
        saved(tmp_path, None)
    with pytest.raises(TimeoutError, match="^rank 0 waited"):
        saved(tmp_path, TimeoutError("rank 0 waited 5 s for 1 of 2 ranks"))
    (told,) = saved(tmp_path, OSError(5, "Input/output error"))
    assert "checkpoint of step 1 was not written" in told and "Input/output error" in told
    (told,) = saved(tmp_path, TimeoutError(110, "Connection timed out"))  # of a network's disk
    assert "Connection timed out" in told
    monkeypatch.setattr(checkpointer, "SLOW_BYTES_PER_S", 4.0)
    with pytest.raises(TimeoutError, match="within 0.25 s"):
        saved(tmp_path, None, needed_bytes=1)
    assert list(tmp_path.iterdir()) == [] and issubclass(SaveFailed, OSError)
