"""The quickstart over processes: it learns what it does in one, although it is killed and started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from small_runs import metrics_of, saved, trained, wait_for

OVER = ("cluster.backend=ray", "cluster.ranks_per_node=2", "rollout.replicas=2", "run.save_every_steps=2")
WAIT_S = 3600.0  # for a machine that has much else to do


@pytest.fixture
def start() -> Iterator[Callable[[Path, str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(root: Path, log: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "verl.quickstart", *OVER, f"run.root_dir={root}"]
        with (root / log).open("w") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd=root))
        return started[-1]

    yield begin
    for process in started:  # what a test that failed leaves behind
        process.kill()
        process.wait()


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="a quarter of an hour: make test-all")
@pytest.mark.timeout(2 * WAIT_S + 300)
def test_the_quickstart_over_processes_learns_and_goes_on_after_a_kill(start, tmp_path):
    """From the checkpoint of its second step, if the third was not over for long: it is made anew."""
    home = tmp_path / "quickstart"
    first = start(tmp_path, "first")

    def there() -> bool:
        assert first.poll() is None, (tmp_path / "first").read_text()
        return 3 in metrics_of(home) and saved(home) >= 2  # which is written beside the third

    wait_for(there, WAIT_S, "the third step")
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.wait()
    assert children and not psutil.wait_procs(children, timeout=60)[1], "its processes live"
    second = start(tmp_path, "second")
    seen: dict[int, psutil.Process] = {}

    def ended() -> bool:
        seen.update({p.pid: p for p in psutil.Process(second.pid).children(recursive=True)})
        return second.poll() is not None

    wait_for(ended, WAIT_S, "the end")
    said = (tmp_path / "second").read_text()
    assert second.returncode == 0, said
    assert re.search(rf"resuming{home}afterstep\d+of25", "".join(said.split())), said  # the warm-up prints it too
    assert not psutil.wait_procs([*seen.values()], timeout=60)[1], "its processes live"
    metrics = metrics_of(home)
    steps = [step for step in metrics if step]
    assert steps == [*range(1, max(steps) + 1)] and metrics[max(steps)]["eval/acc/greedy"] >= 0.85, metrics[max(steps)]
    by_step = trained(home)
    assert sorted(by_step) == steps
    assert {*Counter(sample for samples in by_step.values() for sample in samples).values()} == {1}
