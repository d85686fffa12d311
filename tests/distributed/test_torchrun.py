"""SFT, RM and DPO in the processes that torchrun starts: the run of one process, and its end whatever ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from small_runs import metrics_of
from vision import chat_folder, png

from verl.checkpoint.store import CheckpointStore
from verl.cli import main
from verl.driver.driver_host import MARK

WAIT_S = 120.0
LOST = [(0, signal.SIGKILL), (1, signal.SIGSTOP)] + [(1, signal.SIGKILL)] * bool(os.environ.get("FULL_GRID"))
"""(rank, what ends it)."""
ENV = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TMPDIR": ""}


def conversations(path: Path) -> Path:
    """Rows of unlike lengths, more on one rank than on the other."""
    rng = np.random.default_rng(0)
    say = lambda who, text: {"role": who, "content": text}  # noqa: E731
    rows = [(f"{rng.integers(1, 99)}+1=", "7" * int(rng.integers(1, 12))) for _ in range(23)]
    path.write_text("".join(json.dumps({"messages": [say("user", p), say("assistant", a)]}) + "\n" for p, a in rows))
    return path


def pairs(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": f"{rng.integers(1, 99)}+1=", "chosen": "7" * int(rng.integers(1, 9)), "rejected": "8"}
        for _ in range(11)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(verb: str, root: Path, model: Path, rows: Path, *more: str) -> list[str]:
    base = {
        "run.root_dir": root,
        "run.total_steps": 3,
        "run.threads": 1,
        "run.wait_timeout_s": 60,
        "model.path": model,
        "model.dtype": "float32",
        "data.train_files": f"[{rows}]",
        "data.eval_files": f"[{rows}]",
        "data.max_tokens_per_row": 64,
        "step.prompts_per_step": 5,
        "optim.lr": 1e-3,
    }
    given = {a.partition("=")[0] for a in more}
    return [verb, *(f"{k}={v}" for k, v in base.items() if k not in given), *more]


def start(args: list[str], tmp: Path, door: str = "verl.cli", ranks: int = 2) -> subprocess.Popen[str]:
    (tmp / "tmp").mkdir(exist_ok=True)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", door]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *args],
        env={**os.environ, **ENV, "TMPDIR": str(tmp / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_nodes(args: list[str], tmp: Path, count: int) -> list[subprocess.Popen[str]]:
    """The command of each node, with one rank there, on the same machine."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    found = []
    for number in range(count):
        where = [f"--nnodes={count}", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        (tmp / f"tmp{number}").mkdir()
        found.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node=1", "-m", "verl.cli", *args],
                env={**os.environ, **ENV, "TMPDIR": str(tmp / f"tmp{number}")},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return found


def ended(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=WAIT_S)[0]
    finally:
        process.kill()


def same_run(one: Path, two: Path, step: int) -> list[str]:
    """Return the differences in losses and weights."""
    wrong = []
    first, second = metrics_of(one), metrics_of(two)
    for number in first:
        for name in ("train/loss", "train/grad_norm", "val/loss", "val/acc"):
            a, b = first[number].get(name), second[number].get(name)
            if (a is None) != (b is None) or (a is not None and a != pytest.approx(b, rel=1e-4)):
                wrong.append(f"{name} of step {number}: {a} and {b}")
    folders = [run / f"checkpoints/step_{step}/hf" for run in (one, two)]
    a, b = (load_file(next(folder.glob("*model.safetensors"))) for folder in folders)
    assert a.keys() == b.keys()
    wrong += [name for name in a if not torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6)]
    return wrong


def test_two_ranks_make_the_run_of_one_process_and_one_process_goes_on_with_it(tmp_path, tiny_model, capfd):
    """The ranks of one torchrun, and (SFT) of one on each of two nodes that share a folder."""
    rows, paired = conversations(tmp_path / "rows.jsonl"), pairs(tmp_path / "pairs.jsonl")
    cases = {"sft": (rows, ()), "rm": (paired, ("parallel.pipeline=2",)), "dpo": (paired, ())}
    cases["rm of factors"] = cases["rm"]
    if not os.environ.get("FULL_GRID"):
        del cases["dpo"]  # it has pairs, as the reward model has, which has stages too
    failed = []
    for what, (data, layout) in cases.items():
        verb, factors = what.partition(" ")[0], ["model.lora.rank=5"] * what.endswith("factors")
        for name in ("one", "two"):
            cache = f"data.cache_dir={tmp_path / f'cache_{name}'}"
            args = command(verb, tmp_path / what, tiny_model, data, f"run.name={name}", cache, *factors)
            if name == "one":
                assert main(args) == 0
            elif verb == "sft":
                nodes = start_nodes(args, tmp_path, 2)
                said, other = [ended(node) for node in nodes]
                assert [node.returncode for node in nodes] == [0, 0], (said, other)
                assert "step 1/3" not in other, "the first rank alone tells of the run"
            else:
                process = start([*args, *layout], tmp_path)
                said = ended(process)
                assert process.returncode == 0, said
            if name == "two":
                assert said.count("3 steps in") == 1 and said.count("step 1/3") == 1, said
        one, two = tmp_path / what / "one", tmp_path / what / "two"
        failed += [f"{what}: {wrong}" for wrong in same_run(one, two, 3)]
        shards = sorted(p.name for p in (two / "checkpoints/step_3/state/trainer").glob("*.safetensors"))
        assert len(shards) == 2, shards
        files = [
            {p.relative_to(run) for p in run.rglob("*") if ".safetensors" not in p.name and p.name != MARK}
            for run in (one, two)
        ]
        assert files[0] == files[1], "only the first rank owns the run directory"
    assert not failed, failed
    assert not list(tmp_path.glob("tmp*/verl-records-*")), "what the others wrote is gone with them"
    again = command("sft", tmp_path / "sft", tiny_model, rows, "run.total_steps=5")
    for name in ("one", "two"):  # both by one process
        assert main([*again, f"run.name={name}", f"data.cache_dir={tmp_path / 'cache_one'}"]) == 0
    assert not same_run(tmp_path / "sft/one", tmp_path / "sft/two", 5)
    assert "resuming" in capfd.readouterr().out


def at_step(process: subprocess.Popen[str], number: int) -> dict[int, psutil.Process]:
    """Return the ranks, once the first has reported that step."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if f"step {number:>4}/" in line:
            found = psutil.Process(process.pid).children(recursive=True)
            return {int(one.environ()["RANK"]): one for one in found if "RANK" in one.environ()}
    raise AssertionError("".join(said))


def test_a_rank_that_is_killed_or_stopped_ends_all_with_the_first_cause(tmp_path, tiny_model):
    rows, failed = conversations(tmp_path / "rows.jsonl"), []
    more = ("run.total_steps=3000", "run.save_every_steps=2", f"data.cache_dir={tmp_path}/cache")
    for rank, how in LOST:
        name, wait_s = f"{rank}{how.name}", 15 if how == signal.SIGSTOP else 60
        given = (*more, f"run.name={name}", f"run.wait_timeout_s={wait_s}")
        process = start(command("sft", tmp_path, tiny_model, rows, *given), tmp_path)
        ranks = at_step(process, 5)
        ranks[rank].send_signal(how)
        said = ended(process)
        lost = re.escape(f"error: rank {rank} (process {ranks[rank].pid}) is gone")
        late = "error: (driver |rank 0 )?waited 15 s for "  # for its update; for the rank, where it stopped in a save
        if process.returncode == 0 or not re.search(late if how == signal.SIGSTOP else lost, said):
            failed.append(f"{name}: {said}")
        failed += [f"{name}: rank {n} lives" for n, one in ranks.items() if one.is_running()]
        if how == signal.SIGKILL and "Signal 9 (SIGKILL) received" not in said:
            failed.append(f"{name}: torchrun does not name the first cause")
        if rank == 1 and not list((tmp_path / name / "crash").glob("*.json")):
            failed.append(f"{name}: no crash record")
        newest = CheckpointStore(tmp_path / name / "checkpoints", read_only=True).latest_valid()
        if newest is None:  # of step 2: that of step 4 may have been on its way
            failed.append(f"{name}: no checkpoint is left: {newest}")
    assert not failed, "\n".join(failed)


def test_sigterm_saves_the_step_that_all_are_at(tmp_path, tiny_model, capfd):
    """One process continues from there."""
    rows = conversations(tmp_path / "rows.jsonl")
    args = command("sft", tmp_path, tiny_model, rows, "run.name=r", "run.save_every_steps=0")
    process = start([*args, "run.total_steps=3000", f"data.cache_dir={tmp_path}/cache"], tmp_path)
    at_step(process, 5)
    process.terminate()
    said = ended(process)
    assert "SIGTERM: stopped before step" in said, said
    (step,) = CheckpointStore(tmp_path / "r" / "checkpoints", read_only=True).steps()
    assert step >= 5 and sorted(metrics_of(tmp_path / "r")) == list(range(1, step + 1))
    assert main([*args, f"run.total_steps={step + 1}", f"data.cache_dir={tmp_path}/cache"]) == 0
    assert f"after step {step} of {step + 1}" in capfd.readouterr().out


@pytest.mark.skipif(
    not os.environ.get("FULL_GRID"), reason="make test-all; unit/test_together has it without processes"
)
def test_what_is_refused_is_said_and_ends_all(tmp_path, tiny_model):
    """Found by the first rank alone, in the run directory, the others end with it; verl's own door."""
    rows = conversations(tmp_path / "rows.jsonl")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text("")
    args = command("sft", tmp_path, tiny_model, rows, "run.name=r", "run.resume=never")[1:]
    process = start([*args, f"data.cache_dir={tmp_path}/cache"], tmp_path, "verl.trainer.sft_trainer")
    said = ended(process)
    assert process.returncode and "error: run.resume=never, but" in said and "Traceback" not in said.partition("E1")[0]
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [".lock", "metrics.jsonl"]


def test_two_ranks_train_rows_with_images_as_one_process_does(tmp_path):
    """Two rows of five have images, so that a rank has steps with text alone."""
    folder, image = chat_folder(tmp_path / "vl", "qwen3_vl"), tmp_path / "a.png"
    image.write_bytes(png(12, 8))
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as out:
        for k in range(10):
            messages = [{"role": "user", "content": f"{k}+1="}, {"role": "assistant", "content": "7" * (k + 1)}]
            out.write(json.dumps({"messages": messages, "images": ["a.png"] * (k % 5 < 2)}) + "\n")
    for name in ("one", "two"):
        cache = f"data.cache_dir={tmp_path / f'cache_{name}'}"
        args = command("sft", tmp_path, folder, rows, f"run.name={name}", cache)
        if name == "one":
            assert main(args) == 0
        else:
            process = start(args, tmp_path)
            said = ended(process)
            assert process.returncode == 0, said
    assert not same_run(tmp_path / "one", tmp_path / "two", 3)
