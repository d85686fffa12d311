"""A new fact of a sample is its field and its user; a new side channel is its row in the table and its user.

A copy of the project gets a fact and a side channel at these places alone. Both must then pass through refs, the queue,
`compute`, the batch, the record in samples/ and a replay.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fakes import put

import verl
from verl.driver.record import SampleRecorder
from verl.driver.replay import recorded_sample
from verl.track.samples import DamagedSamples, read_samples, read_scalars, samples_path
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Sample, Segment

SOURCE = Path(verl.__file__).parent
FACT = {
    '    adapter: str | None = None\n    """The adapter': '    depth: float = fact(0.0, column="depth")\n',
    "            segments=segments,\n        )\n        for k": "            depth=float(trajectory.turns),\n",
}
CHANNEL = '    Column(name="side/surprise", dtype="float32", per="token", recorded="surprise"),\n'
SIDE = {'    Column(name="side/turn",': CHANNEL}

USER = '''
"""The user of both: an estimator, over trajectories that an agent loop has made."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

import verl
from verl.algorithms.presets import Preset
from verl.algorithms.specs import EstimatorSpec, PPOClip
from verl.batch import pack
from verl.driver.record import SampleRecorder
from verl.driver.replay import recorded_sample
from verl.track.samples import read_samples
from verl.track.samples import read_scalars
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.rows import read_facts, queued_samples
from verl.types import Sampling, Score, Segment, Trajectory, samples_of
from verl.workers.compute import Compute


def estimate(columns):
    depth = columns.sequence["depth"][columns.sequence_of]
    return {"advantages": depth * columns["side/surprise"]}


def played(i):
    def drawn(*ids):
        surprise = np.array(ids, np.float32) + i
        logprobs = np.zeros(len(ids), np.float32)
        return Segment(ids=np.array(ids), source="sampled", logprobs=logprobs, version=0, side={"surprise": surprise})

    segments = (Segment(ids=np.array([1]), source="prompt"), drawn(5, 6), Segment(ids=np.array([30]), source="env"))
    return Trajectory(
        trajectory_id=f"g/{i}", group_id="g", task_id="t", index=i, purpose="train", attempt=0, turns=2 + i,
        sampling=Sampling(max_tokens=9), segments=(*segments, drawn(7)), stop_reason="eos", reward=Score(1.0),
    )


home = Path(__file__).parent
assert Path(verl.__file__).parent == home / "verl"
estimator = EstimatorSpec("user:estimate", inputs=("side/surprise",))
assert not [*Preset("toy", "nobody, 2030.00001", estimator, PPOClip()).faults()]

queue = MemoryQueue()
refs = asyncio.run(queue.put([s for i in range(2) for s in samples_of(played(i))]))
assert [r.depth for r in refs] == [f.depth for f in read_facts(queue, refs)] == [2.0, 3.0]
Compute(queue).compute(refs, estimate, ("side/surprise",), ("advantages",))
expected = [10.0, 12.0, 14.0, 18.0, 21.0, 24.0]
assert queue.read(refs, ("advantages",))["advantages"].values.tolist() == expected
samples = queued_samples(queue, refs)
assert pack(samples).columns["side/surprise"].tolist() == [5, 6, 7, 6, 7, 8]

SampleRecorder(queue, home, str).record(1, refs, {})
table = pq.read_table(home / "samples" / "step_000001.parquet")
assert table.column("depth").to_pylist() == [2.0, 3.0] == [row["depth"] for row in read_scalars(home, 1)]
for row, ours in zip(table.column("surprise").to_pylist(), [[5, 6, np.nan, 7], [6, 7, np.nan, 8]], strict=True):
    np.testing.assert_array_equal(np.float32(row), np.float32(ours))
for row, sample in zip(read_samples(home, 1), samples, strict=True):
    again = recorded_sample(row, reads_feedback=False)
    assert again.depth == row.depth == sample.depth
    assert [s.side.keys() for s in again.segments] == [s.side.keys() for s in sample.segments]
    assert torch.equal(pack([again]).columns["side/surprise"], pack([sample]).columns["side/surprise"])
print("all of it")
'''


def inserted(path: Path, texts: dict[str, str]) -> None:
    """Insert each text before the only place of its key."""
    text = path.read_text()
    for before, new in texts.items():
        assert text.count(before) == 1, before
        text = text.replace(before, new + before)
    path.write_text(text)


@pytest.mark.slow
def test_a_fact_and_a_side_channel_are_two_files_each(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    inserted(tmp_path / "verl" / "types.py", FACT)
    inserted(tmp_path / "verl" / "columns.py", SIDE)
    (tmp_path / "user.py").write_text(USER)
    done = subprocess.run([sys.executable, tmp_path / "user.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "all of it\n", done.stderr[-2000:]


def row(**more):
    segment = Segment(ids=np.array([5, 6]), source="sampled", logprobs=np.zeros(2, np.float32), version=0)
    segments = (Segment(ids=np.array([1]), source="prompt"), segment)
    names = {"sample_id": "g/0#0", "trajectory_id": "g/0", "group_id": "g", "purpose": "train"}
    return Sample(**names, segments=segments, reward=0.5, **more)


def test_samples_of_an_older_version_have_the_defaults_of_newer_facts(tmp_path):
    """Files of before a fact or a recorded column existed are read, replayed and shown."""
    queue = MemoryQueue()
    SampleRecorder(queue, tmp_path, str).record(1, put(queue, [row(adapter="lora", temperature=0.5)]), {})
    path = samples_path(tmp_path, 1)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["adapter", "taught", "copies", "returns"]), path)
    (found,) = read_samples(tmp_path, 1)
    assert (found.adapter, found.taught, found.copies, found.temperature) == (None, True, 1, 0.5)
    assert recorded_sample(found, reads_feedback=False).adapter == "lora", "its segments have it"
    assert read_scalars(tmp_path, 1)[0]["reward"] == 0.5
    pq.write_table(table.drop_columns(["response_mask"]), path)
    for read in (read_samples, read_scalars):
        with pytest.raises(DamagedSamples, match=r"step_000001.parquet cannot be read: .*no column response_mask"):
            read(tmp_path, 1)


def test_a_side_channel_of_another_type_than_declared_is_refused():
    segment = Segment(
        ids=np.array([5]), source="sampled", logprobs=np.zeros(1, np.float32), version=0, side={"turn": np.zeros(1)}
    )
    made = Sample(sample_id="s", trajectory_id="s", group_id="g", purpose="train", segments=(segment,))
    with pytest.raises(ValueError, match="column 'side/turn' is declared as int64, and its values are float64"):
        put(MemoryQueue(), [made])
