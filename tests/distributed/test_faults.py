"""A process of a run fails in any way at any time: the run ends with the first cause or continues, and no process is
left. FULL_GRID=1 makes every fault in every phase."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from small_runs import metrics_of, same_tensors, small_args, small_run, tensors_of

from tests.distributed import planted
from tests.distributed.planted import KINDS, PHASES, VARIABLE
from verl.cli import main
from verl.config import backends

ONE_OF_EACH = (
    *(("generate", "segfault"), ("publish", "raises"), ("update", "exits")),
    *(("save", "memory"), ("eval", "exits"), ("end", "killed")),
)
"""Killed ones are in `test_ray_run`, stopped ones, which are given up after a silence, in `test_ray_workers`."""
CASES = [(p, k) for p in PHASES for k in KINDS] if os.environ.get("FULL_GRID") else ONE_OF_EACH
OF_THE_ENGINE = ("generate", "receive", "eval")
RETRIED = {(p, k) for p in ("generate", "eval") for k in ("raises", "memory")}
"""An attempt that failed: the answer is tried again."""
SAID = {"raises": "planted", "memory": "allocate", "stopped": "has not answered for 20 s"}


@pytest.mark.parametrize("phase,kind", CASES, ids=lambda x: x)
def test_a_fault(ray_session, tmp_path, tiny_model, arithmetic_data, monkeypatch, capsys, phase, kind):
    """A death is repaired where it may be (here: killed ones), a stopped process is given up at its deadline."""
    monkeypatch.setitem(
        backends.MODEL, "sharded", replace(backends.MODEL["sharded"], build="tests.distributed.planted:model")
    )
    monkeypatch.setattr("verl.driver.assemble.rollout_engine", planted.rollout_engine)
    monkeypatch.setattr("verl.driver.assemble.build_recorder", planted.build_recorder)
    ranks = 1 if phase in (*OF_THE_ENGINE, "end") else 2
    repaired, others = kind == "killed" and phase != "end", set(psutil.Process().children(recursive=True))
    code = main(
        [
            "train",
            *small_args(
                tmp_path,
                tiny_model,
                arithmetic_data,
                f"cluster.pools.main.env={{{VARIABLE}: '{kind} {phase} {tmp_path}/r'}}",
                f"run.wait_timeout_s={40 if kind == 'stopped' else 120}",
                f"cluster.max_restarts={int(repaired)}",
                *("cluster.backend=ray", f"cluster.ranks_per_node={ranks}", "cluster.pools.main.cpus_per_rank=0.5"),
                *("run.save_every_steps=1", "run.eval_every_steps=2", "run.eval_before=false", "track.sinks=[jsonl]"),
            ),
        ]
    )
    found = capsys.readouterr()
    struck, last = (tmp_path / "r" / "struck").read_text(), found.err.strip().splitlines()[-1:]
    assert not left_of(others), "processes of the run live"
    if repaired:
        assert "starting again from the last checkpoint (1 of 1 times)" in found.out, found
        assert f"(process {struck} on " in found.out
    if repaired or phase == "end" or (phase, kind) in RETRIED:
        assert code == 0 and set(metrics_of(tmp_path / "r")) >= {1, 2, 3}, found
        assert all("eval/acc/greedy" in metrics_of(tmp_path / "r")[step] for step in (2, 3))
        return
    assert code == 1 and (tmp_path / "r" / "crash").is_dir(), found
    assert last[0].startswith("error: ") and re.search(SAID.get(kind, " died: "), last[0]), found
    if kind not in ("raises", "memory"):
        who = "rollout replica 0" if phase in OF_THE_ENGINE else f"rank {int(phase != 'first-save')} of actor"
        assert last[0].startswith(f"error: {who} (process {struck} on "), last


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="a minute: make test-all; test_ray_run kills a worker")
def test_a_teacher_of_its_own_pool_is_killed_and_what_is_learned_is_the_same(
    ray_session, tmp_path, tiny_model, tiny_teacher, arithmetic_data, monkeypatch, capsys
):
    """In its pass over the second step: bitwise the run in this process, to which nothing happened."""
    more = ("algorithm.name=gkd_topk", "teacher.top_k=4", f"teacher.path={tiny_teacher}", "run.deterministic=true")
    more += ("run.save_every_steps=1", "track.sinks=[jsonl]", "run.total_steps=2")
    small_run(tmp_path / "here", tiny_model, arithmetic_data[:1], *more)
    monkeypatch.setitem(
        backends.MODEL, "torch", replace(backends.MODEL["torch"], build="tests.distributed.planted:one_rank")
    )
    there, others = tmp_path / "ray", set(psutil.Process().children(recursive=True))
    school = f"cluster.pools={{school: {{ranks_per_node: 1, env: {{{VARIABLE}: 'killed teach {there}/r'}}}}}}"
    apart = (school, "cluster.roles={teacher: school}", "cluster.max_restarts=1", "cluster.backend=ray")
    args = small_args(there, tiny_model, arithmetic_data[:1], *more, *apart)
    assert main(["train", *args]) == 0
    said, struck = " ".join(capsys.readouterr().out.split()), (there / "r" / "struck").read_text()
    assert f"rank 0 of teacher (process {struck} on " in said and "from the last checkpoint (1 of 1 times)" in said
    assert not left_of(others), "processes of the run live"
    same_tensors(tensors_of(tmp_path / "here" / "r", 2), tensors_of(there / "r", 2))


def left_of(others: set[psutil.Process], within_s: float = 30.0) -> list[list[str]]:
    """Return the processes that this one has started and that still run, without Ray's own."""
    until_s = time.monotonic() + within_s
    while left := [c for p in psutil.Process().children(recursive=True) if p not in others and (c := words(p))]:
        if time.monotonic() > until_s:
            return left
        time.sleep(0.2)
    return []


def words(process: psutil.Process) -> list[str]:
    try:
        found = process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.NoSuchProcess:
        return []
    rays = ("ray::IDLE", "raylet", "gcs_server")
    inside = f"{Path('ray', '_private')}"
    return [] if not found or Path(found[0]).name.startswith(rays) or inside in " ".join(found) else found
