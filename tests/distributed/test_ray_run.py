"""Whole runs over processes: what they learn is what one process learns, and a death costs no more than a restart."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from small_runs import dispatched, metrics_of, same_tensors, small_args, small_run, tensors_of, trained
from test_house_ray import House

from verl.checkpoint.store import CheckpointStore
from verl.cli import main

ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
pytestmark = pytest.mark.usefixtures("ray_session")  # runs in this process use it, others start their own
RAY = ("cluster.backend=ray", "run.save_every_steps=1", "track.sinks=[jsonl]")
TWO = ("cluster.ranks_per_node=2", "rollout.replicas=2")
TESTS = Path(__file__).parents[1]


def exported(root: Path, step: int) -> dict[str, torch.Tensor]:
    folder = root / "r" / "checkpoints" / f"step_{step}" / "hf"
    return load_file(next(folder.glob("*model.safetensors")))


def start(
    args: list[str], door: str = "verl.cli", cwd: Path = TESTS.parent, group: bool = False
) -> subprocess.Popen[str]:
    """The run in a process of its own, as the command line starts it; with `group` it leads a process group."""
    command = [sys.executable, "-m", door, "train", *args]
    own = {"process_group": 0 if group else None}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, **own)


def until_step(root: Path, number: int, run: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 180
    while not (root / "r" / "checkpoints" / f"step_{number}").is_dir():
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.1)


def below(run: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Processes of this run's cluster by what they are called."""
    return [p for p in psutil.Process(run.pid).children(recursive=True) if name in " ".join(p.cmdline())]


def test_one_worker_on_ray_trains_bitwise_what_this_process_trains(tmp_path, tiny_model, arithmetic_data, monkeypatch):
    """And its driver holds and reads no column (see `test_house_ray`)."""
    more = ("run.total_steps=2", "run.deterministic=true", "algorithm.name=ppo")
    small_run(tmp_path / "here", tiny_model, arithmetic_data, *more, "run.save_every_steps=1")
    house = House(monkeypatch)
    small_run(tmp_path / "ray", tiny_model, arithmetic_data, *more, *RAY)
    house.held_no_column(tmp_path / "ray" / "r", steps=2)
    here, there = (exported(tmp_path / where, 2) for where in ("here", "ray"))
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    assert trained(tmp_path / "here" / "r") == trained(tmp_path / "ray" / "r")
    mine, theirs = metrics_of(tmp_path / "here" / "r"), metrics_of(tmp_path / "ray" / "r")
    for name in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "eval/acc/greedy"):
        assert [m.get(name) for m in mine.values()] == [m.get(name) for m in theirs.values()], name


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="minutes: make test-all; test_ray_workers has pools")
def test_a_teacher_in_a_pool_of_its_own_teaches_what_one_here_does(tmp_path, tiny_model, tiny_teacher, arithmetic_data):
    more = ("run.total_steps=2", "run.deterministic=true", f"teacher.path={tiny_teacher}", "algorithm.name=gkd")
    apart = ("cluster.pools={school: {ranks_per_node: 1}}", "cluster.roles={teacher: school}")
    small_run(tmp_path / "here", tiny_model, arithmetic_data, *more, "run.save_every_steps=1")
    small_run(tmp_path / "ray", tiny_model, arithmetic_data, *more, *RAY, *apart)
    here, there = (exported(tmp_path / where, 2) for where in ("here", "ray"))
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    for where in ("here", "ray"):
        assert metrics_of(tmp_path / where / "r")[1]["actor/teacher_divergence"] > 0


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="minutes: make test-all; e2e/test_asked_ahead is quick")
def test_a_teacher_in_a_pool_of_its_own_is_asked_ahead(tmp_path, tiny_model, tiny_teacher, arithmetic_data):
    more = ("run.total_steps=4", "pipeline.staleness=1", f"teacher.path={tiny_teacher}", "algorithm.name=gkd")
    apart = ("cluster.pools={school: {ranks_per_node: 1}}", "cluster.roles={teacher: school}")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *more, *RAY, *apart)
    found = [m for step, m in metrics_of(tmp_path / "r").items() if step]
    assert len(found) == 4 and any(m["teacher/ahead"] > 0 for m in found)
    assert all(m["teacher/invalid"] == 0 and m["actor/teacher_divergence"] > 0 for m in found)


OFFLOAD = tuple(f"model.engine_options.offload_{part}=true" for part in ("weights", "optimizer", "frozen"))
STAGES = {
    "data": (),
    "stages": ("parallel.pipeline=2", "algorithm.kl_loss_coef=0.01", *OFFLOAD),
    "factors": ("model.lora.rank=5", *OFFLOAD),
    "one base": ("model.lora.rank=5", "algorithm.name=ppo", "algorithm.kl_loss_coef=0.01"),
    "data and stages": ("cluster.ranks_per_node=4", "parallel.pipeline=2", "algorithm.kl_loss_coef=0.01", *OFFLOAD),
}


@pytest.mark.parametrize("layout", STAGES if os.environ.get("FULL_GRID") else ["stages", "factors", "one base"])
def test_ranks_and_replicas_learn_what_one_process_learns(layout, tmp_path, tiny_model, arithmetic_data):
    """The first step samples from equal weights, so its update is that of one process but for the order of sums; eps
    keeps Adam from making much of that order where a gradient is almost 0."""
    same = (part for part in STAGES[layout] if part.startswith(("algorithm", "model.lora")))
    one = ("run.total_steps=1", "optim.eps=1e-5", *same)
    small_run(tmp_path / "here", tiny_model, arithmetic_data[:1], *one, "run.save_every_steps=1")
    small_run(tmp_path / "ray", tiny_model, arithmetic_data[:1], *one, *RAY, *TWO, *STAGES[layout])
    here, there = (exported(tmp_path / where, 1) for where in ("here", "ray"))
    start_weights = load_file(tiny_model / "model.safetensors")
    for name, value in here.items():
        moved = (value - start_weights.get(name, torch.zeros(()))).abs().max()
        assert (there[name] - value).abs().max() <= 1e-3 * moved + 1e-7, name
    mine, theirs = (metrics_of(tmp_path / where / "r")[1] for where in ("here", "ray"))
    assert mine["critic/score/mean"] == theirs["critic/score/mean"]
    for name in ("actor/grad_norm", *(("critic/grad_norm",) if layout == "one base" else ())):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4) and mine[name] > 0, name


PAGE = re.findall(r"^verl train (.* cluster.backend=ray .*)$", (TESTS.parent / "docs/cluster.md").read_text(), re.M)
"""The command of docs/cluster.md for one machine."""
SHAPE = (
    *("run.total_steps=6", "data.max_rows=16", "run.deterministic=true", "run.keep_every_steps=2"),
    *("recipe=gsm8k_grpo", "data.eval_files=[]", "run.eval_every_steps=0", "run.keep_best=null"),
    *(*RAY, "cluster.ranks_per_node=2"),
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny_model, arithmetic_data) -> Path:
    """A run that nothing happened to."""
    root = tmp_path_factory.mktemp("straight")
    small_run(root, tiny_model, arithmetic_data[:1], *SHAPE)
    return root


FAR = """
import importlib.abc, importlib.util, sys
from pathlib import Path

class Far(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "verl.weight_sync.relay":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loads = spec.loader.exec_module

        def patched(module):
            loads(module)
            module.ledger_of = lambda name: Path("/nowhere") / name
            received = module.RelayStream._received

            def noted(self, peer):
                with open("{asked}", "a") as file:
                    file.write("x")
                yield from received(self, peer)

            module.RelayStream._received = noted

        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Far())
"""


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_weights_that_pass_through_buckets_are_the_same(
    engine, tmp_path, straight, tiny_model, arithmetic_data, monkeypatch
):
    """Gathered from two ranks, into replicas that stand still: the run is the one bit for bit. tcp: they see nothing of
    the trainer's memory."""
    asked = tmp_path / "asked"
    if engine == "tcp":
        (tmp_path / "far").mkdir()
        (tmp_path / "far" / "sitecustomize.py").write_text(FAR.format(asked=asked))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "far"))
        ray.shutdown()  # the next one's processes have this
    options = (f"sync.engine={engine}", "sync.engine_options.bucket_mb=1")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *SHAPE, *options)
    for name, value in exported(straight, 6).items():
        assert torch.equal(exported(tmp_path, 6)[name], value), name
    assert engine == "shm" or len(asked.read_text()) == 7, "each version came over the network"


def test_weights_that_ranks_write_into_a_folder_are_the_same(tmp_path, straight, tiny_model, arithmetic_data):
    """Each rank writes its slices, and no rank gathers a tensor: the run is the one bit for bit."""
    options = ("sync.engine=disk", f"sync.engine_options.folder={tmp_path}")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *SHAPE, *options)
    for name, value in exported(straight, 6).items():
        assert torch.equal(exported(tmp_path, 6)[name], value), name
    gathered = [row["sync/gather_s"] for row in metrics_of(tmp_path / "r").values() if "sync/gather_s" in row]
    assert gathered and not any(gathered), gathered
    assert not list(tmp_path.glob("verl-versions-*")), "the run has removed them"


LOST = {
    "ray::ReplicaActor": "its requests go on elsewhere, and it is started again",
    "ray::RankActor": "starting again from the last checkpoint (1 of 3 times)",
}


def test_killed_processes_cost_a_restart_and_nothing_else(tmp_path, tiny_model, arithmetic_data, straight):
    """A killed replica is restarted by itself; for a killed worker the run is restarted, as the page describes."""
    (tmp_path / "model").symlink_to(tiny_model)
    (page,) = (line.split() for line in PAGE)
    assert {"model.path=model", "rollout.replicas=2", "cluster.ranks_per_node=2"} <= {*page}
    more = [words for words in SHAPE if words not in page]
    run = start(small_args(tmp_path, tiny_model, arithmetic_data[:1], *more, *page), cwd=tmp_path)
    newest = 1
    for who, words in LOST.items():
        until_step(tmp_path, newest, run)
        said = ""
        os.kill(below(run, who)[0].pid, signal.SIGKILL)
        while "".join(words.split()) not in said:  # lines are broken where the screen ends
            line = run.stdout.readline()
            assert line, said
            said += "".join(line.split())
        kept = CheckpointStore(tmp_path / "r" / "checkpoints", read_only=True).steps()
        assert newest > 1 or ("2ranks=2data" in said and "2rolloutreplicas" in said), said
        assert "died" in said and sum("".join(w.split()) in said for w in LOST.values()) == 1, said
        newest = max(kept) + 1
    text = run.communicate(timeout=240)[0]
    assert run.returncode == 0, text
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())["cluster"]
    assert (plan["queue"], plan["sync"]) == ("shared", "shm")
    one, two = exported(straight, 6), exported(tmp_path, 6)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert trained(straight / "r") == trained(tmp_path / "r")
    seen = Counter(i for ids in trained(tmp_path / "r").values() for i in ids)
    assert set(seen.values()) == {1}, "a sample was trained twice"
    assert {i.partition("/")[0] for i in seen} <= set(dispatched(tmp_path / "r"))


def test_a_signal_to_the_process_group_saves_and_ends_as_one_to_the_driver(tmp_path, tiny_model, arithmetic_data):
    """`timeout` and Slurm send it so: the Ray that the run started gets no signal, and ends with it."""
    more = ("run.total_steps=300", "run.eval_every_steps=0", "track.sinks=[jsonl]", "cluster.backend=ray")
    args = small_args(tmp_path, tiny_model, arithmetic_data[:1], *more, "run.save_every_steps=0")
    run = start(args, group=True)
    end_s = time.monotonic() + 180
    while not metrics_of(tmp_path / "r"):
        assert run.poll() is None and time.monotonic() < end_s, run.stdout.read()
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    assert {"gcs_server", "raylet"} <= {child.name() for child in children}
    os.killpg(run.pid, signal.SIGTERM)
    text = run.communicate(timeout=60)[0]
    assert run.returncode == 75, text
    (saved,) = CheckpointStore(tmp_path / "r" / "checkpoints", read_only=True).steps()
    assert saved == max(metrics_of(tmp_path / "r")) and f"stopped before step {saved + 1} of 300" in text, text
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.skipif(
    not os.environ.get("FULL_GRID"), reason="minutes: make test-all; e2e/test_stopping has it in process"
)
def test_a_stop_in_an_update_that_does_not_end_saves_what_was_before_it(
    tmp_path, tiny_model, arithmetic_data, straight
):
    """On both ranks, which have made an optimizer step of the third turn; the checkpoint before it is two turns old."""
    (tmp_path / "update").write_text("3")
    more = (*SHAPE, "run.save_every_steps=0", "run.grace_s=2")
    args = small_args(
        tmp_path, tiny_model, arithmetic_data[:1], *more, f"cluster.pools.main.env={{HANGING: '{tmp_path}'}}"
    )
    run = start(args, "tests.hanging")
    end_s = time.monotonic() + 180
    while not (tmp_path / "in_update").exists():
        assert run.poll() is None and time.monotonic() < end_s
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    text = run.communicate(timeout=60)[0]
    assert run.returncode == 75, text
    assert "so that a stop can save what was before them" in text and "stopped before step 3 of 6" in text, text
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()] == ["step_2"]
    same_tensors(tensors_of(straight / "r", 2), tensors_of(tmp_path / "r", 2))
    if os.environ.get("FULL_GRID"):
        (tmp_path / "update").unlink()
        small_run(tmp_path, tiny_model, arithmetic_data[:1], *more)
        same_tensors(exported(straight, 6), exported(tmp_path, 6))
        assert trained(straight / "r") == trained(tmp_path / "r")


def test_a_killed_driver_leaves_nobody_and_the_run_goes_on(tmp_path, tiny_model, arithmetic_data, capsys):
    """Killed at a random moment by the seed: no sample is lost, and none is trained twice."""
    seed = int(os.environ.get("SEED") or time.time_ns() % 10_000)
    moment = random.Random(seed)
    print(f"SEED={seed} repeats the moment of the kill")
    args = small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=8", *RAY)
    run = start(args)
    until_step(tmp_path, moment.randint(1, 3), run)
    time.sleep(moment.uniform(0.0, 0.5))
    children = psutil.Process(run.pid).children(recursive=True)
    assert below(run, "ray::RankActor") and below(run, "ray::ReplicaActor")
    run.kill()
    run.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, [p.cmdline()[:3] for p in alive]
    assert main(["train", *args]) == 0
    said = capsys.readouterr().out
    assert "resuming" in said, said
    print(said)
    assert set(metrics_of(tmp_path / "r")) == set(range(1, 9))
    small_run(tmp_path / "straight", tiny_model, arithmetic_data[:1], "run.total_steps=8")
    by_step = trained(tmp_path / "r")
    assert by_step == trained(tmp_path / "straight" / "r"), "as a run that nobody killed"
    assert set(Counter(sample for samples in by_step.values() for sample in samples).values()) == {1}


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="minutes: make test-all; test_faults has one")
def test_a_stopped_process_is_given_up_and_nobody_stays(tmp_path, tiny_model, arithmetic_data):
    """A Ray that the run has started ends with the run, and with it the stopped process."""
    more = ("run.total_steps=50", "run.wait_timeout_s=40", "cluster.max_restarts=0", *RAY)
    run = start(small_args(tmp_path, tiny_model, arithmetic_data[:1], *more))
    until_step(tmp_path, 1, run)
    children = psutil.Process(run.pid).children(recursive=True)
    os.kill(below(run, "ray::RankActor")[0].pid, signal.SIGSTOP)
    text = run.communicate(timeout=180)[0]
    assert run.returncode == 1, text
    assert not psutil.wait_procs(children, timeout=30)[1]
    said = text.splitlines()[-1]
    assert said.startswith("error: rank 0 of ") and said.endswith("has not answered for 20 s"), said


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="minutes: make test-all; test_queue_package has the queue")
@pytest.mark.parametrize("over", [(), (*RAY, *TWO)], ids=["in this process", "over processes"])
def test_a_run_whose_queue_is_the_package(over, tmp_path, tiny_model, arithmetic_data):
    """On few cores, of which each of its processes takes one by Ray's count."""
    pytest.importorskip("transfer_queue", exc_type=ImportError)
    more = ("run.total_steps=1", "queue.engine=package", *over)
    run = start(small_args(tmp_path, tiny_model, arithmetic_data[:1], *more))
    text = run.communicate(timeout=240)[0]
    assert run.returncode == 0 and set(metrics_of(tmp_path / "r")) >= {1}, text
    trained_here = [sample for ids in trained(tmp_path / "r").values() for sample in ids]
    assert len(trained_here) == len({*trained_here}) == 16
