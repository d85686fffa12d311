"""A run that is stopped by a signal, a closed terminal or a closed pipe: finished work is saved, and the resumed run
equals one without a cut."""

import asyncio
import contextlib
import json
import os
import pty
import signal
from pathlib import Path

import psutil
import pytest
from each import FULL_GRID, matrix
from small_runs import launch, metrics_of, same_tensors, small_args, small_run, tensors_of, wait_for
from started import Started
from test_resume import assert_equal_runs

from tests.hanging import FOLDER, hangs
from verl.cli import main
from verl.rollout.embedded.front import EmbeddedEngine
from verl.track.events import read_events

TESTS = Path(__file__).parents[1]
HANGS = """
import pathlib, time
from reward_length import compute_score as plain
HERE = pathlib.Path(__file__).parent
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if (HERE / "hang").exists():
        (HERE / "hangs").touch()
        time.sleep(600)
    return plain(data_source, solution_str, ground_truth, extra_info)
"""


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{HANGS}")
    return path


def generates_for_long(args):
    async def generate(self, request):
        os.mknod("hangs")
        await asyncio.sleep(600)

    EmbeddedEngine.generate = generate
    return main(args)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_a_stop_of_what_saves_nothing_is_one_line_and_leaves_no_child(
    verb, tmp_path, tiny_model, arithmetic_data, reward
):
    (tmp_path / "hang").touch()
    more = (f"reward.path={reward}", "reward.timeout_s=500", "run.total_steps=1")
    args, log = small_args(tmp_path, tiny_model, arithmetic_data, *more), tmp_path / "log"
    entry = main
    if verb == "generate":
        args, entry = [f"model.path={tiny_model}", "prompt=2+2=", "model.dtype=float32"], generates_for_long
    process = Started([verb, *args], log, cwd=tmp_path, entry=entry)
    wait_for((tmp_path / "hangs").exists, 120, "work that hangs")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, log.read_text()
    said = log.read_text()
    assert said.splitlines()[-1].endswith("SIGTERM: stopped before the end; nothing is saved, start it again"), said
    assert "Traceback" not in said and bool(children) == (verb == "eval")
    assert not psutil.wait_procs(children, 30)[1]


def test_generate_refuses_what_it_would_not_do(tiny_model, capsys):
    assert main(["generate", f"model.path={tiny_model}", "prompt=2+2=", "cluster.ranks_per_node=2"]) == 2
    assert "cluster.ranks_per_node=2 with cluster.backend=inproc" in capsys.readouterr().err


def steps_done(run_dir) -> int:
    return len(metrics_of(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def saved(run_dir) -> list[int]:
    return [e.step for e in read_events(run_dir, {"saved"})]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", [0, 1] if FULL_GRID else [1], ids=lambda n: "async" if n else "sync")
def test_a_hung_reward_does_not_hold_sigterm_and_the_run_goes_on(
    tmp_path, tiny_model, arithmetic_data, reward, staleness
):
    """By default nothing is saved before the end: SIGTERM saves the state at the beginning of the step that hangs."""
    more = ("run.total_steps=300", f"reward.path={reward}", "reward.timeout_s=500", "run.grace_s=4")
    more += ("run.seed=3", f"pipeline.staleness={staleness}", "track.sinks=[jsonl]")
    args, run_dir = small_args(tmp_path / "cut", tiny_model, arithmetic_data[:1], *more), tmp_path / "cut" / "r"
    log = tmp_path / "log"
    process = launch(args, log)
    wait_for(lambda: steps_done(run_dir) >= 2, 120, "two steps")
    (tmp_path / "hang").touch()
    wait_for((tmp_path / "hangs").exists, 60, "a reward that hangs")
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 75, log.read_text()
    last = max(metrics_of(run_dir))
    assert saved(run_dir) == [last], "the state after the last whole step"
    said = log.read_text()
    assert "SIGTERM: finishing this step" in said and f"stopped before step {last + 1} of 300" in said
    assert not (run_dir / "crash").exists()
    (tmp_path / "hang").unlink()
    total = f"run.total_steps={last + 2}"
    assert small_run(tmp_path / "cut", tiny_model, arithmetic_data[:1], *more, total).steps == 2
    if staleness == 0:
        small_run(tmp_path / "straight", tiny_model, arithmetic_data[:1], *more, total)
        assert_equal_runs(tmp_path / "straight" / "r", run_dir, last + 2)
    else:
        groups = [{i.split("/")[0] for i in e.data["sample_ids"]} for e in read_events(run_dir, {"trained"})]
        drawn = {e.data["group_id"] for e in read_events(run_dir, {"dispatched"})}
        assert len(groups) == last + 2 and len(set.union(*groups)) == 4 * (last + 2) and set.union(*groups) <= drawn


@pytest.mark.timeout(200)
def test_ctrl_c_saves_and_a_second_one_is_out_now(tmp_path, tiny_model, arithmetic_data, reward):
    more = ("run.total_steps=400", f"reward.path={reward}", "reward.timeout_s=500", "track.sinks=[jsonl]")
    args, run_dir = small_args(tmp_path, tiny_model, arithmetic_data[:1], *more), tmp_path / "r"
    log = tmp_path / "log"
    process = launch(args, log)
    wait_for(lambda: steps_done(run_dir) >= 1, 120, "a step")
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 130
    assert saved(run_dir) == [max(metrics_of(run_dir))]
    done = steps_done(run_dir)
    process = launch(args, log)
    wait_for(lambda: steps_done(run_dir) > done, 120, "another step")
    (tmp_path / "hang").touch()
    wait_for((tmp_path / "hangs").exists, 60, "a reward that hangs")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: log.read_text().count("SIGINT: finishing") == 2, 10, "the first to be heard")
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    assert len(saved(run_dir)) == 1


def read_all(screen: int) -> bool:
    """Read all output, since a terminal buffers 20 kB and a writer of more waits for a reader."""
    with contextlib.suppress(BlockingIOError, OSError):
        while os.read(screen, 1 << 16):
            pass
    return True


@pytest.mark.timeout(200)
def test_a_lost_terminal_and_a_closed_pipe_end_nothing(tmp_path, tiny_model, arithmetic_data):
    """The one as an ssh connection that drops, the other as `| head`: the run ends as if somebody had watched."""
    ended = {}
    for name in ("terminal", "pipe"):
        args = small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=40", f"run.name={name}")
        if name == "terminal":
            ours, theirs = pty.openpty()
            os.set_blocking(ours, False)
            process = Started(["train", *args], Path(os.ttyname(theirs)))
        else:
            os.mkfifo(tmp_path / "fifo")
            ours = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
            process = Started(["train", *args], tmp_path / "fifo", errors=tmp_path / "log")
        wait_for(lambda name=name, ours=ours: read_all(ours) and steps_done(tmp_path / name) >= 2, 120, "two steps")
        os.close(ours)
        if name == "terminal":
            os.close(theirs)
            process.send_signal(signal.SIGHUP)
        ended[name] = process.wait(120)
        assert steps_done(tmp_path / name) == 40, name
        assert [e.kind for e in read_events(tmp_path / name, {"console_lost"})] == ["console_lost"], name
    assert ended == {"terminal": 0, "pipe": 0}
    same_tensors(tensors_of(tmp_path / "terminal", 40), tensors_of(tmp_path / "pipe", 40))


RL = ("step.updates_per_step=2", "run.seed=3", "track.sinks=[jsonl]")
IN_UPDATES = {
    "grpo": ("train", RL),
    "ppo on virtual ranks": ("train", (*RL, "algorithm.name=ppo", "cluster.virtual_ranks=2")),
    "async": ("train", (*RL, "pipeline.staleness=1")),
    "sft": ("sft", ("step.prompts_per_step=4", "data.max_tokens_per_row=32")),
}


def hanging(folder, verb: str, args: list[str], log) -> Started:
    """Run the command line, and stop it at a point of `tests/hanging.py`."""
    return Started([verb, *args], log, env={FOLDER: str(folder)}, entry=hangs)


def args_of(verb: str, root, model, data, *more: str) -> list[str]:
    if verb == "train":
        return small_args(root, model, data[:1], *more)
    rows = root.parent / "rows.jsonl"
    turns = [[{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(40)]
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    base = (f"run.root_dir={root}", "run.name=r", "run.threads=1", f"model.path={model}", "model.dtype=float32")
    return [*base, f"data.train_files=[{rows}]", f"data.cache_dir={root}/cache", "optim.lr=1e-3", *more]


def same_runs(verb: str, one, two, steps: int) -> None:
    if verb == "train":
        return assert_equal_runs(one, two, steps)
    same_tensors(tensors_of(one, steps, "trainer"), tensors_of(two, steps, "trainer"))
    a, b = metrics_of(one), metrics_of(two)
    assert [a[s]["train/loss"] for s in range(1, steps + 1)] == [b[s]["train/loss"] for s in range(1, steps + 1)]


@pytest.mark.timeout(300)
@matrix("case", IN_UPDATES if FULL_GRID else ["grpo", "async", "sft"])
def test_a_stop_in_an_update_that_does_not_end_saves_what_was_before_it(tmp_path, tiny_model, arithmetic_data, case):
    """In the third step, after its first optimizer step; nothing was saved before."""
    verb, more = IN_UPDATES[case]
    updates = 1 if verb == "sft" else 2
    (tmp_path / "update").write_text(str(2 * updates + 1))
    more, run_dir = ("run.grace_s=2", *more), tmp_path / "cut" / "r"
    args = args_of(verb, tmp_path / "cut", tiny_model, arithmetic_data, *more, "run.total_steps=300")
    log = tmp_path / "log"
    process = hanging(tmp_path, verb, args, log)
    wait_for((tmp_path / "in_update").exists, 120, "an update that hangs")
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    said = log.read_text()
    assert code == 75, said
    assert saved(run_dir) == [2] and max(metrics_of(run_dir)) == 2 and not (run_dir / "crash").exists()
    assert said.count("so that a stop can save what was before them") == 1, said
    assert "less a save), the state at its beginning is saved. Ctrl-C" in said
    assert said.strip().splitlines()[-1].endswith("stopped before step 3 of 300; the run resumes there")
    (tmp_path / "update").unlink()
    for name in ("cut", "straight"):
        whole = args_of(verb, tmp_path / name, tiny_model, arithmetic_data, *more, "run.total_steps=4")
        assert main([verb, *whole]) == 0
    if case == "async":  # the version that samples each answer is not determined
        assert len(metrics_of(run_dir)) == 4
    else:
        same_runs(verb, tmp_path / "straight" / "r", run_dir, 4)


@pytest.mark.timeout(200)
def test_a_stop_in_the_first_update_loses_nothing_and_saves_nothing(tmp_path, tiny_model, arithmetic_data):
    """A state that is on disk at its beginning needs no copy: the model, or the checkpoint that the run continued
    from."""
    for last in (0, 2):
        (tmp_path / "update").write_text(str(last + 1))
        more = (f"run.total_steps={last + 1}", "step.prompts_per_step=4", "data.max_tokens_per_row=32")
        args = args_of("sft", tmp_path / "r", tiny_model, arithmetic_data, "run.grace_s=2", *more)
        log = tmp_path / "log"
        process = hanging(tmp_path, "sft", args, log)
        wait_for((tmp_path / "in_update").exists, 120, "an update that hangs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, log.read_text()
        assert saved(tmp_path / "r" / "r") == [2][:last]
        assert f"stopped before step {last + 1} of {last + 1}; the run resumes there" in log.read_text()
        (tmp_path / "update").unlink()
        (tmp_path / "in_update").unlink()
        more = ("run.total_steps=2", *more[1:])
        assert main(["sft", *args_of("sft", tmp_path / "r", tiny_model, arithmetic_data, *more)]) == 0


@pytest.mark.timeout(300)
@pytest.mark.full("faults/test_checkpoint_faults.py")
def test_killed_while_it_saves_what_was_before_an_update(tmp_path, tiny_model, arithmetic_data):
    """The last whole checkpoint exists, and the run continues from it as if never cut."""
    (tmp_path / "update").write_text("7")
    more, run_dir = ("run.grace_s=2", *RL, "run.save_every_steps=2"), tmp_path / "cut" / "r"
    args = args_of("train", tmp_path / "cut", tiny_model, arithmetic_data, *more, "run.total_steps=5")
    log = tmp_path / "log"
    process = hanging(tmp_path, "train", args, log)
    wait_for((tmp_path / "in_update").exists, 120, "an update that hangs")
    (tmp_path / "write").touch()
    process.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "in_write").exists, 60, "a checkpoint that is written")
    process.kill()
    process.wait(30)
    kept = sorted(path.name.partition(".")[0] for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step_2", "step_3"] and not (run_dir / "checkpoints" / "step_3").exists()
    for name in ("cut", "straight"):
        whole = args_of("train", tmp_path / name, tiny_model, arithmetic_data, *more, "run.total_steps=5")
        assert main(["train", *whole]) == 0
    assert_equal_runs(tmp_path / "straight" / "r", run_dir, 5)


def test_without_room_for_a_copy_a_run_says_so_and_goes_on(tmp_path, tiny_model, arithmetic_data, monkeypatch, capfd):
    monkeypatch.setattr("verl.workers.host.free_bytes", lambda: 100_000)
    more = ("run.grace_s=2", "run.total_steps=4", *RL)
    assert main(["train", *args_of("train", tmp_path, tiny_model, arithmetic_data, *more)]) == 0
    said = capfd.readouterr().out
    assert said.count("a stop in one waits for its end all the same: no room for a copy of the state before it") == 1
    assert "which has 0.0001 GB free" in said and "is kept in host memory" not in said
