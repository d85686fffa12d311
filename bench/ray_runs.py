"""Whole runs on Ray, on one machine: does the quickstart learn there what it learns in one process, how soon does it
start, and how soon does a run end after a process has died or was stopped?

    python bench/ray_runs.py [--rounds N]

The quickstart as it ships, with 2 trainer ranks and 2 rollout replicas; its own warm-up runs before, in one process.
Deaths: one rank of a run at its second step is killed (SIGKILL) or stopped (SIGSTOP), N times, where nothing starts
again; timed until the command has ended, after which no process of it may be there. Writes its part of
bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import write_section
from bench.results import Spread, Table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "bench" / "ray_runs"
RAY = ("cluster.backend=ray", "cluster.ranks_per_node=2", "cluster.pools.main.cpus_per_rank=1", "rollout.replicas=2")
BEGINS = "3 of 3"  # of RL, after the warm-up
WAIT_S = 60.0  # run.wait_timeout_s of the runs that are struck: a process that is silent for half of it is given up
END_S = 300.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    learns = quickstart()
    ends = {
        "killed": [struck(signal.SIGKILL) for _ in range(given.rounds)],
        "stopped": [struck(signal.SIGSTOP) for _ in range(given.rounds)],
    }
    rows = [
        (f"{how}, given up after {WAIT_S / 2:g} s" if how == "stopped" else how, Spread.of(s).text(1))
        for how, s in ends.items()
    ]
    deaths = Table(
        "from the end of a rank to the end of the command, s", ("a rank is", "median [quartiles]"), tuple(rows)
    )
    machine = f"{os.cpu_count()} cores, 1-minute load {os.getloadavg()[0]:.1f}"
    about = f"Command: `python bench/ray_runs.py`, {given.rounds} rounds; {machine}."
    texts = [learns.markdown(), deaths.markdown()]
    write_section("ray_runs", "## Whole runs on Ray", about, *texts)
    print(*texts, sep="\n\n")
    return 0


def quickstart() -> Table:
    command = [sys.executable, "-m", "verl.quickstart", f"run.root_dir={FOLDER}", *RAY]
    began_s = first_s = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if BEGINS in line:
                began_s = time.monotonic()
            elif began_s is not None and first_s is None and line.startswith("step  1/"):
                first_s = time.monotonic() - began_s
    if run.returncode or first_s is None:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}")
    found = json.loads((FOLDER / "quickstart" / "summary.json").read_text())
    figures = [
        f"{found['greedy_before']:.3f}",
        f"{found['greedy_after']:.3f}",
        f"{first_s:.0f}",
        f"{found['seconds']['rl']:.0f}",
    ]
    head = ("2 ranks, 2 replicas", "greedy accuracy before", "after", "to the end of the first step, s", "RL in all, s")
    return Table("the quickstart", head, (("cluster.backend=ray", *figures),))


def struck(how: signal.Signals) -> float:
    """Seconds until the command has ended with the first cause as its last line."""
    home = FOLDER / "quickstart"
    shutil.rmtree(FOLDER / "struck", ignore_errors=True)
    given = [
        f"model.path={home}/base",
        f"data.train_files=[{home}/data/train.jsonl]",
        "reward.path=verl.recipes.arithmetic",
    ]
    more = [
        f"run.wait_timeout_s={WAIT_S:g}",
        "cluster.max_restarts=0",
        "run.eval_before=false",
        "run.eval_every_steps=0",
    ]
    command = [sys.executable, "-m", "verl", "train", "recipe=quickstart", *given, *more, *RAY]
    log = FOLDER / "struck.log"
    with log.open("w") as out:
        run = subprocess.Popen(
            [*command, f"run.root_dir={FOLDER}", "run.name=struck"], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT
        )
    until_s = time.monotonic() + END_S
    while "step  2/" not in log.read_text():
        if run.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"no second step: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    rank = next(child for child in children if child.name().startswith("ray::Worker"))
    struck_s = time.monotonic()
    rank.send_signal(how)
    run.wait(END_S)
    seconds = time.monotonic() - struck_s
    _, left = psutil.wait_procs(children, timeout=1)
    last = log.read_text().splitlines()[-1]
    if left or run.returncode != 1 or "rank" not in last:
        raise RuntimeError(f"{how.name}: ended with {run.returncode}, {len(left)} processes left, last line: {last}")
    print(f"{how.name}: {seconds:.1f} s: {last}", flush=True)
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
