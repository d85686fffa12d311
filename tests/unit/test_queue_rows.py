"""The rows of the queue have one owner: it puts them, and drops them when no worker uses them any more."""

import ast
import asyncio
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import verl
from verl.config.schema import Config
from verl.driver.queue_rows import QueueRows
from verl.driver.record import SampleRecorder
from verl.driver.reporter import Reporter
from verl.track.console import LiveProgress
from verl.track.events import EventLog
from verl.track.samples import read_samples
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Sample, Segment
from verl.workers.inproc import InprocGroup
from verl.workers.waits import DeadlineExpired, Waits

ROOT = Path(verl.__file__).parent


def sample(name: str) -> Sample:
    segment = Segment(ids=np.array([5]), source="sampled", logprobs=np.zeros(1, np.float32), version=0)
    segments = (Segment(ids=np.array([1]), source="prompt"), segment)
    return Sample(sample_id=name, trajectory_id=name, group_id="g", purpose="train", segments=segments)


def test_no_other_code_puts_or_drops_rows():
    found = set()
    for path in (*(ROOT / "driver").glob("*.py"), *ROOT.glob("*.py"), *(ROOT / "workers").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("put", "drop"):
                found |= {path.name} if ast.unparse(node.value).rpartition(".")[2] == "queue" else set()
    assert found == {"queue_rows.py"}


def test_rows_are_put_again_after_the_calls_that_used_them_have_ended():
    async def main():
        queue, call, failures = MemoryQueue(), Future(), []
        rows = QueueRows(queue, Waits())
        refs = await rows.put([sample("a")], "g")
        rows.drop_after([call], refs, "g", 60.0, failures.append)
        again = asyncio.ensure_future(rows.put([sample("a")], "g"))
        other = await rows.put([sample("b")], "h")
        assert len(queue) == 2 and not again.done(), "another owner does not wait"
        call.set_result(None)
        assert (await again).ids == ["a"] and not failures
        rows.drop(await again)
        rows.drop(other)
        assert len(queue) == 0 and not rows.pending

    asyncio.run(main())


def test_a_call_that_does_not_end_is_reported():
    async def main():
        queue, failures = MemoryQueue(), []
        rows = QueueRows(queue, Waits())
        rows.drop_after([Future()], await rows.put([sample("a")], "g"), "g", 0.01, failures.append)
        await asyncio.gather(*rows.pending, return_exceptions=True)
        await asyncio.sleep(0)
        (failure,) = failures
        assert isinstance(failure, DeadlineExpired) and len(queue) == 1
        with pytest.raises(DeadlineExpired):
            await rows.put([sample("a")], "g")

    asyncio.run(main())


def test_rows_are_dropped_after_they_are_recorded(tmp_path):
    async def main():
        queue = MemoryQueue()
        rows = QueueRows(queue, Waits())
        refs = await rows.put([sample("a"), sample("b")])
        reporter = Reporter(
            config=Config(),
            run_dir=tmp_path,
            sinks=None,
            events=EventLog(tmp_path, 0),
            progress=LiveProgress(silent=True),
            waits=Waits(),
            recorder=InprocGroup("recorder", [SampleRecorder(queue, tmp_path, str)]),
            rows=rows,
            on_step=None,
            verl_names=False,
        )
        await reporter.record(3, refs, {})
        assert len(queue) == 2
        await reporter.wait_recorded()
        assert len(queue) == 0 and [r.sample_id for r in read_samples(tmp_path, 3)] == ["a", "b"]

    asyncio.run(main())
