"""Waits and limits: the deadline holds, the message names the waiting part and the awaited result, nothing is left
behind."""

import asyncio
import gc
import json

import pytest

from verl.workers import waits as waits_module
from verl.workers.waits import Abandoned, DeadlineExpired, Limit, Waits


def test_an_expired_wait_says_who_what_and_what_else_was_pending(tmp_path):
    async def main():
        waits, path = Waits(tmp_path / "waits.json"), tmp_path / "waits.json"
        other = asyncio.ensure_future(
            waits.wait(asyncio.sleep(30), waiter="trajectory g1/train0.0", what="its reward", timeout_s=60)
        )
        await asyncio.sleep(0)
        asked = []
        with pytest.raises(DeadlineExpired) as caught:
            await waits.wait(
                asyncio.sleep(30), waiter="step 7", what=lambda: asked.append(1) or "4 groups of 8", timeout_s=0.02
            )
        assert (
            str(caught.value)
            == "step 7 waited 0.02 s for 4 groups of 8; also pending: trajectory g1/train0.0: its reward"
        )
        assert isinstance(caught.value, TimeoutError) and asked
        dumped = json.loads(path.read_text())
        assert [(w["who"], w["what"], w["timeout_s"]) for w in dumped["pending"]] == [
            ("trajectory g1/train0.0", "its reward", 60),
            ("step 7", "4 groups of 8", 0.02),
        ]
        assert [w["who"] for w in waits.pending()] == ["trajectory g1/train0.0"]
        other.cancel()
        await asyncio.wait({other}, timeout=5)
        assert waits.pending() == []

    asyncio.run(main())


def test_the_message_stays_short_with_thousands_pending():
    async def main():
        waits = Waits()
        others = [
            asyncio.ensure_future(waits.wait(asyncio.sleep(30), waiter=f"t{i}", what="x", timeout_s=60))
            for i in range(500)
        ]
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExpired, match=r"t0: x.* and 494 more") as caught:
            await waits.wait(asyncio.sleep(30), waiter="me", what="it", timeout_s=0.01)
        assert len(str(caught.value)) < 300
        for other in others:
            other.cancel()
        await asyncio.wait(others, timeout=20)

    asyncio.run(main())


async def until_cancelled(ended):
    """Ends a little after it is cancelled, and records that."""
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.01)
        ended.append(True)


def test_a_coroutine_that_is_too_late_has_ended_when_the_error_comes():
    async def main():
        ended = []

        with pytest.raises(DeadlineExpired):
            await Waits().wait(until_cancelled(ended), waiter="a", what="b", timeout_s=0.01)
        assert ended and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_future_that_others_may_hold_is_not_cancelled():
    async def main():
        shared = asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExpired):
            await Waits().wait(shared, waiter="a", what="b", timeout_s=0.01)
        assert not shared.cancelled()

    asyncio.run(main())


def test_a_cancelled_waiter_leaves_nothing_running_and_nothing_pending():
    async def main():
        waits, ended = Waits(), []

        waiter = asyncio.ensure_future(waits.wait(until_cancelled(ended), waiter="a", what="b", timeout_s=60))
        await asyncio.sleep(0.005)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert ended and waits.pending() == [] and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_something_cancelled_by_others_is_an_error_and_not_the_waiters_end():
    async def main():
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        with pytest.raises(Abandoned, match="step 1 waited for the weights, which was cancelled"):
            await Waits().wait(future, waiter="step 1", what="the weights", timeout_s=1)

        async def suicidal():
            raise asyncio.CancelledError

        with pytest.raises(Abandoned):
            await Waits().wait(suicidal(), waiter="a", what="b", timeout_s=1)
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_results_and_errors_come_through():
    async def main():
        async def fine():
            return 5

        async def bad():
            raise KeyError("k")

        assert await Waits().wait(fine(), waiter="a", what="b", timeout_s=5) == 5
        with pytest.raises(KeyError):
            await Waits().wait(bad(), waiter="a", what="b", timeout_s=5)

    asyncio.run(main())


def test_a_late_error_of_an_abandoned_future_is_not_reported_as_never_retrieved():
    said = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExpired):
            await Waits().wait(future, waiter="a", what="b", timeout_s=0.01)
        future.set_exception(RuntimeError("late"))
        del future
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    assert not said


def test_an_unwritable_dump_does_not_hide_the_deadline(tmp_path):
    (tmp_path / "file").write_text("")

    async def main():
        with pytest.raises(DeadlineExpired):
            await Waits(tmp_path / "file" / "waits.json").wait(asyncio.sleep(9), waiter="a", what="b", timeout_s=0.01)

    asyncio.run(main())


def test_a_long_wait_is_written_down_before_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(waits_module, "NOTICE_S", 0.01)

    async def main():
        path = tmp_path / "waits.json"
        waiter = asyncio.ensure_future(
            Waits(path).wait(asyncio.sleep(30), waiter="step 3", what="a hung engine", timeout_s=60)
        )
        for _ in range(1000):
            if path.exists():
                break
            await asyncio.sleep(0.005)
        assert json.loads(path.read_text())["pending"][0]["what"] == "a hung engine"
        waiter.cancel()
        await asyncio.wait({waiter}, timeout=5)

    asyncio.run(main())


def test_a_limit_cancels_its_block_and_says_what_it_waited_for():
    async def main(nested):
        waits, ended = Waits(), []

        async def block():
            with Limit(waits, "trajectory g1/train0.0", "its reward", 0.01):
                await until_cancelled(ended)

        with pytest.raises(DeadlineExpired, match="trajectory g1/train0.0 waited 0.01 s for its reward"):
            if nested:
                with Limit(waits, "outer", "all of it", 60):
                    await block()
            else:
                await block()
        assert ended and waits.pending() == [] and not asyncio.current_task().cancelling()
        await asyncio.sleep(0)  # no cancellation is left over

    for nested in (False, True):
        asyncio.run(main(nested))


def test_a_limit_lets_results_errors_and_other_cancellations_through():
    async def main():
        waits = Waits()
        with Limit(waits, "a", "b", 60):
            await asyncio.sleep(0)
        with pytest.raises(KeyError), Limit(waits, "a", "b", 60):
            raise KeyError

        async def limited():
            with Limit(waits, "a", "b", 60):
                await asyncio.sleep(30)

        future = asyncio.get_running_loop().create_future()
        future.cancel()
        with pytest.raises(Abandoned, match="a waited for b, which was cancelled"), Limit(waits, "a", "b", 60):
            await future
        task = asyncio.ensure_future(limited())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waits.pending() == []

    asyncio.run(main())


def test_a_limit_leaves_no_cancellation_behind_however_its_block_ends():
    async def main():
        waits = Waits()

        async def badly():
            try:
                await asyncio.sleep(30)
            finally:
                raise KeyError("in its cleanup")

        with pytest.raises(KeyError), Limit(waits, "a", "b", 0.01):
            await badly()
        assert not asyncio.current_task().cancelling()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0.01))

    asyncio.run(main())


def test_deadlines_hold_on_a_second_event_loop():
    waits = Waits()
    first = asyncio.new_event_loop()
    left = first.create_task(waits.wait(first.create_future(), waiter="a", what="b", timeout_s=30))
    first.run_until_complete(asyncio.sleep(0))
    first.close()  # with a wait in it

    async def main():
        async with asyncio.timeout(10):
            with pytest.raises(DeadlineExpired):
                await waits.wait(asyncio.sleep(30), waiter="a", what="b", timeout_s=0.05)

    asyncio.run(main())
    left._log_destroy_pending = False


def test_limits_of_any_order_expire_in_theirs():
    async def main():
        waits, order = Waits(), []

        async def limited(timeout_s):
            with pytest.raises(DeadlineExpired), Limit(waits, str(timeout_s), "b", timeout_s):
                await asyncio.sleep(30)
            order.append(timeout_s)

        await asyncio.gather(*(limited(t) for t in (0.15, 0.01, 0.08)))
        assert order == [0.01, 0.08, 0.15]

    asyncio.run(main())
