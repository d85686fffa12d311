"""The waits of the driver for a publish."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import small_args

from verl.config.load import load_config
from verl.config.tree import changed
from verl.driver import assemble, publisher
from verl.driver.lora_publisher import LoraPublisher
from verl.driver.publisher import Publisher
from verl.weight_sync.base import StreamingOutlet, SyncReport
from verl.wire import AS_HELD
from verl.workers.waits import DeadlineExpired, Waits


class Replica:
    def __init__(self, starts: bool, in_flight: bool = True, takes_factors: bool = False) -> None:
        self.starts, self.in_flight, self.takes_factors, self.base = starts, in_flight, takes_factors, ""

    async def capabilities(self) -> Any:
        if not self.starts:
            await asyncio.Event().wait()
        lora = {"lora_policy": self.takes_factors, "lora_rank": 64, "lora_experts": True, "lora_whole": True}
        return SimpleNamespace(in_flight_update=self.in_flight, weights=AS_HELD, **lora)


class Sync:
    """Delivers at once, and keeps what each publish was given."""

    def __init__(self, failed: dict[int, str] | None = None, broken: Exception | None = None) -> None:
        self.given: list[tuple[int, int, tuple[str, ...]]] = []  # version, replicas, their modes
        self.exclusive: set[bool] = set()
        self.failed, self.broken = failed or {}, broken

    def publish(self, trainer: Any, replicas: Any, *, version: int, on_inflight: Any, exclusive: bool, **_: Any) -> Any:
        self.given.append((version, len(replicas), on_inflight))
        self.exclusive.add(exclusive)
        done = asyncio.get_running_loop().create_future()
        if self.broken is not None and version > 0:
            done.set_exception(self.broken)
        else:
            alarms = ("slow",) if self.failed else ()
            done.set_result(
                SyncReport(version, 1, 10, 1, 0.25, True, whole_s=1.0, failed_replicas=self.failed, alarms=alarms)
            )
        return done


def publisher_of(
    *replicas: Any, engine: Any = None, partial_rollout: bool = False, exclusive: bool = True, published: Any = None
) -> Publisher:
    given: dict[str, Any] = {"waits": Waits(), "timeout_s": 60.0, "note": print, "trainer": None}
    given |= {"exclusive": exclusive, "partial_rollout": partial_rollout, "published": published}
    return Publisher(engine=engine, replicas=replicas, lora=no_sets(), **given)


def no_sets() -> LoraPublisher:
    """Publishes no LoRA set."""
    given: dict[str, Any] = {"trainer": None, "new_engine": None, "after": None, "published": None, "drop": None}
    return LoraPublisher(base=Path(), timeout_s=60.0, note=print, waits=Waits(), **given)


@pytest.mark.parametrize("late", ["open", "close", "drop"])
def test_a_lora_set_that_is_late_is_named_with_what_it_waits_for(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of an error without a word."""

    async def test() -> None:
        never, done = asyncio.Event(), Future[None]()
        done.set_result(None)

        async def drop(name: str) -> None:
            await never.wait() if late == "drop" else None

        def workers(call: str) -> Any:
            return lambda *given: Future() if call == late else done

        trainer: Any = SimpleNamespace(open_set=workers("open"), close_set=workers("close"), of_set=lambda name: None)
        made = replace(no_sets(), trainer=trainer, drop=drop, timeout_s=0.05)
        made.new_engine = lambda: SimpleNamespace(outlet=lambda: None)  # type: ignore
        monkeypatch.setattr(made, "_publish", lambda *given: asyncio.sleep(0, "report"))
        monkeypatch.setattr(made, "published", lambda name: None)
        wanted = {
            "open": "trainer's workers to open",
            "close": "trainer's workers to close",
            "drop": "replicas to drop",
        }
        what = f"the publisher of LoRA sets waited 0.05 s for the {wanted[late]} LoRA set 'a'"
        with pytest.raises(DeadlineExpired, match=what):
            assert await made.open("a", Path(), []) == "report"
            await made.close("a")

    asyncio.run(test())


@pytest.mark.parametrize("engine", ["shm", "ipc", "tcp"])
def test_lora_sets_are_published_whole_where_weights_pass_through_buckets(
    engine: str, tmp_path: Path, tiny_model: Any, arithmetic_data: Any
) -> None:
    config = load_config([*small_args(tmp_path, tiny_model, arithmetic_data), "model.lora.rank=8"]).config
    parts: Any = SimpleNamespace(drop_set=None, message=print)
    assert assemble._publisher(config, parts, [], parts, [], parts, Waits(), parts).sends_factors
    config = changed(config, {"sync.engine": engine, "sync.engine_options": {"bucket_mb": 8}, "cluster.backend": "ray"})
    made = assemble._publisher(config, parts, [], parts, [], parts, Waits(), parts)
    assert not isinstance(made.lora.new_engine().outlet(), StreamingOutlet) and not made.sends_factors


def test_the_parts_of_a_publish_are_metrics_of_the_step() -> None:
    made, seconds = publisher_of(), {"gather": 1.0, "stage": 2.0, "transfer": 3.0, "load": 4.0, "pause": 5.0}
    made._report(SyncReport(7, 2, 10, 2, 0.0, True, whole_s=20.0, seconds=seconds))
    found = {name: metric.total for name, metric in made.take_metrics().items() if name.endswith(("_s", "seconds"))}
    assert found == {"sync/seconds": 20.0, **{f"sync/{part}_s": value for part, value in seconds.items()}}


def test_a_replica_that_does_not_start_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "START_TIMEOUT_S", 0.05, raising=False)
    made = publisher_of(Replica(True), Replica(False), Replica(True))
    with pytest.raises(DeadlineExpired, match="driver waited 0.05 s for rollout replica 1 to start"):
        asyncio.run(asyncio.wait_for(made.start(0), 10))


def test_requests_go_on_under_new_weights_only_where_the_replica_can_and_the_run_wants_it() -> None:
    replicas = [Replica(True, in_flight=True), Replica(True, in_flight=False)]
    for partial, modes in ((True, ("keep", "wait")), (False, ("wait", "wait"))):
        sync = Sync()
        asyncio.run(publisher_of(*replicas, engine=sync, partial_rollout=partial).start(3))
        assert sync.given == [(3, 2, modes)]


def test_every_publish_has_the_next_version() -> None:
    sync, committed = Sync(), list[int]()
    failed = list[BaseException]()

    async def run() -> list[int]:
        made, seen = publisher_of(Replica(True), engine=sync), []
        await made.start(5)
        for _ in range(3):
            made.publish(lambda report: committed.append(report.version), failed.append)
            await made.settle()
            seen.append(made.version)
        return seen

    assert asyncio.run(run()) == committed == [6, 7, 8] and not failed
    assert [version for version, *_ in sync.given] == [5, 6, 7, 8]


@pytest.mark.parametrize("exclusive", [True, False])
def test_what_a_publish_is_given_and_what_is_known_of_it_afterwards(exclusive: bool) -> None:
    """Two replicas joined, a third gets no publish; one of the two did not take the weights."""
    sync, reported, noted = Sync(failed={1: "out of memory"}), list[Any](), list[str]()
    replicas = [Replica(True), Replica(True)]

    async def run() -> Publisher:
        made = publisher_of(*replicas, engine=sync, exclusive=exclusive, published=reported.append)
        made.note = noted.append
        await made.start(0)
        made.replicas = [*replicas, Replica(True)]
        made.publish(lambda report: None, lambda error: None)
        await made.settle()
        return made

    made = asyncio.run(run())
    assert [count for _, count, _ in sync.given] == [2, 2] and sync.exclusive == {exclusive}
    assert reported == [{1: "out of memory"}] * 2
    metrics = made.take_metrics()
    assert {n: metrics[f"sync/{n}"].value for n in ("replicas", "version", "canary_mean_abs", "bytes", "seconds")} == {
        "replicas": 1,
        "version": 1,
        "canary_mean_abs": 0.25,
        "bytes": 10,
        "seconds": 1.0,
    }
    assert made.take_metrics() == {} and noted == ["warning: weight sync: slow"] * 2


@pytest.mark.parametrize("rank, sends, line", [(0, True, ""), (4, True, "unmerged"), (4, False, "change by 0.25 on")])
def test_the_start_notes_how_a_policy_of_lora_is_sent(rank: int, sends: bool, line: str) -> None:
    noted = list[str]()
    made = publisher_of(Replica(True, takes_factors=sends), engine=Sync())
    made.note, made.trained_rank, made.trainer = noted.append, rank, SimpleNamespace()
    asyncio.run(made.start(0))
    assert len(noted) == bool(line) and all(line in note for note in noted)


def test_a_publish_that_breaks_in_the_background_is_reported_once() -> None:
    broken, failed = RuntimeError("the wire is cut"), list[BaseException]()

    async def run() -> int:
        made = publisher_of(Replica(True), engine=Sync(broken=broken))
        await made.start(0)
        made.publish(lambda report: None, failed.append)
        with pytest.raises(RuntimeError, match="the wire is cut"):
            await made.settle()
        return made.version

    assert asyncio.run(run()) == 0 and failed == [broken]


class Slow(Sync):
    """Delivers after a while, and records when."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def publish(self, *args: Any, version: int, **given: Any) -> Any:
        done = super().publish(*args, version=version, **given)

        async def deliver() -> SyncReport:
            self.seen.append(f"{version} begins")
            await asyncio.sleep(0.01)
            self.seen.append(f"{version} ends")
            return await done

        return asyncio.ensure_future(deliver())


def test_a_set_is_changed_between_two_publishes_whoever_waits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, committed, failed = list[str](), list[int](), list[BaseException]()

    async def opened(self: Any, name: str, folder: Path, replicas: Any) -> Any:
        seen.append(f"{name} begins")
        await asyncio.sleep(0.01)
        seen.append(f"{name} ends")

    async def closed(self: Any, name: str) -> None:
        await opened(self, f"end of {name}", Path(), ())

    monkeypatch.setattr(LoraPublisher, "open", opened)
    monkeypatch.setattr(LoraPublisher, "close", closed)

    async def run() -> None:
        made = publisher_of(Replica(True), engine=Slow(seen))
        await made.start(0)

        async def steps() -> None:
            for _ in range(4):
                await made.settle()
                made.publish(lambda report: committed.append(report.version), failed.append)
            await made.settle()

        training = asyncio.ensure_future(steps())
        await asyncio.sleep(0.005)  # the loop waits for its first publish
        impatient = asyncio.ensure_future(made.publish_adapter("c", Path()))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(made.publish_adapter("a", Path()), made.publish_adapter("b", Path()), made.drop_set("a"))
        await training

    asyncio.run(asyncio.wait_for(run(), 10))
    assert committed == [1, 2, 3, 4] and not failed
    assert seen[1::2] == [begin.replace("begins", "ends") for begin in seen[::2]]
    assert sorted(seen[::2]) == sorted(f"{what} begins" for what in (0, 1, 2, 3, 4, "a", "b", "end of a"))


class Silent(Sync):
    """Answers the first publish, and no other."""

    def publish(self, trainer: Any, replicas: Any, *, version: int, **given: Any) -> Any:
        if version == 0:
            return super().publish(trainer, replicas, version=version, **given)
        return asyncio.get_running_loop().create_future()


def test_a_publish_that_never_ends_has_a_deadline_and_ends_with_its_publisher() -> None:
    async def run(close: bool) -> Any:
        made = publisher_of(Replica(True), engine=Silent())
        await made.start(0)
        made.timeout_s = 0.02 if not close else 60.0
        failed = list[BaseException]()
        made.publish(lambda report: None, failed.append)
        await asyncio.sleep(0)
        task = made._under_way
        if close:
            await made.close()
            return task.cancelled() and not failed  # type: ignore[union-attr]
        with pytest.raises(DeadlineExpired, match="the publish of version 1"):
            await made.settle()
        return True

    assert asyncio.run(asyncio.wait_for(run(True), 10)) and asyncio.run(asyncio.wait_for(run(False), 10))


def test_the_first_publish_has_a_deadline_too() -> None:
    made = publisher_of(Replica(True), engine=Silent())
    made.timeout_s = 0.02
    with pytest.raises(DeadlineExpired, match="the publish of version 1"):
        asyncio.run(asyncio.wait_for(made.start(1), 10))
