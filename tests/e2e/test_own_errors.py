"""An error that is not the user's: its traceback, its crash record, its first cause last, and exit code 1."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import small_args
from started import Started, program

from verl.cli import guarded, main
from verl.errors import CRASH_RECORD, Refused

ROOT = Path(__file__).parents[2] / "verl"
PLANTED = """
import sys
import numpy as np
from verl.cli import main
from verl.model_engine.torch_engine import TorchEngine

def broken(self):
    np.zeros(2) + np.zeros(3)

TorchEngine.optim_step = broken
sys.exit(main(["train", *sys.argv[1:]]))
"""
SHAPES = "operands could not be broadcast together with shapes (2,) (3,) "


@pytest.fixture
def args(tmp_path, tiny_model, arithmetic_data):
    return lambda *more: small_args(tmp_path, tiny_model, arithmetic_data[:1], *more)


def test_a_value_error_of_numpy_in_a_step_is_no_typo_of_the_user(args, tmp_path):
    errors = tmp_path / "errors"
    code = Started([PLANTED, *args()], tmp_path / "log", errors=errors, entry=program).wait(300)
    *before, record, last = errors.read_text().strip("\n").splitlines()
    assert (code, last) == (1, f"error: ValueError: {SHAPES}"), errors.read_text()
    (path,) = (tmp_path / "r" / "crash").glob("*.json")
    assert record == f"{CRASH_RECORD}{path}"
    assert any("Traceback" in line for line in before) and any("in broken" in line for line in before)
    found = json.loads(path.read_text())
    assert "in broken" in "".join(found["traceback"]) and found["first_cause"] == SHAPES


def test_memory_that_is_not_there_is_one_line_with_the_keys_that_help(args, tmp_path, capsys, monkeypatch):
    def full(*_given, **_named):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB "
            "is free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=...\nSee the docs"
        )

    monkeypatch.setattr("verl.model_engine.torch_engine.TorchEngine.forward_backward", full)
    assert main(["train", *args()]) == 1
    *before, record, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("error: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10")
    for key in ("step.max_tokens_per_microbatch", "rollout.max_concurrent_sequences", "model.gradient_checkpointing"):
        assert key in last
    assert "Traceback" not in "".join(before) and "reserved" not in last
    (path,) = (tmp_path / "r" / "crash").glob("*.json")
    assert record == f"{CRASH_RECORD}{path}" and "in full" in "".join(json.loads(path.read_text())["traceback"])


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_a_value_error_of_ours_after_the_start(verb, args, tmp_path, arithmetic_data, capsys, monkeypatch):
    def broken(*_given, **_named):
        raise ValueError("a sum of ours is wrong")

    monkeypatch.setattr("verl.driver.rollouts.RolloutManager.take", broken)
    monkeypatch.setattr("verl.driver.launch.evaluate", broken)
    eval_files = (f"data.eval_files=[{arithmetic_data[0]}]",) if verb == "eval" else ()
    assert main([verb, *args(*eval_files)]) == 1
    *before, record, last = capsys.readouterr().err.strip().splitlines()
    assert last == "error: ValueError: a sum of ours is wrong" and "Traceback" in "".join(before)
    (path,) = (tmp_path / "r" / "crash").glob("*.json")
    assert record == f"{CRASH_RECORD}{path}"


def test_a_value_error_of_ours_at_the_start_has_a_traceback(args, capsys, monkeypatch):
    def broken(*_given, **_named):
        raise ValueError("a table of ours is wrong")

    monkeypatch.setattr("verl.driver.launch.make_plan", broken)
    assert main(["train", *args()]) == 1
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1] == "error: ValueError: a table of ours is wrong" and "Traceback" in shown[0]


def test_a_worker_that_died_has_no_traceback_and_the_path_of_its_record(args, tmp_path, capsys, monkeypatch):
    from verl.model_engine.torch_engine import TorchEngine
    from verl.workers.group import WorkerDied

    def broken(self):
        raise WorkerDied("rank 0 of actor was killed")

    monkeypatch.setattr(TorchEngine, "optim_step", broken)
    assert main(["train", *args("cluster.max_restarts=0")]) == 1
    record, last = capsys.readouterr().err.strip().splitlines()[-2:]
    (path,) = (tmp_path / "r" / "crash").glob("*.json")
    assert (record, last) == (f"{CRASH_RECORD}{path}", "error: rank 0 of actor was killed")


def test_a_refusal_is_one_line_whatever_raised_it(capsys):
    def refuses():
        try:
            np.zeros(2) + np.zeros(3)
        except ValueError as e:
            raise Refused("rollout.n=3: this row has two") from e

    assert guarded(lambda: refuses()) == 2
    assert capsys.readouterr().err == "error: rollout.n=3: this row has two\n"


CATCHES = {  # where the command line, the driver and the workers catch a ValueError, and why it is not a step's
    "driver/checked.py check_output": "an output of a user's loop, whose error gets the number of its branch",
    "driver/fleet.py Fleet._answer": "an error of a request of `verl replicas`, and its answer",
    "driver/identity.py _read": "a text that is no JSON",
    "driver/media_ahead.py MediaAhead._read": "a file that cannot be read: the attempts of its task report it",
    "driver/reporter.py Reporter.write_report": "a damaged record: it is printed, and the run continues",
    "driver/stopping.py _leave": "a console that is closed",
    "driver/together.py open_together": "an error at the start, which every process raises as it is",
    "workers/host.py _groups": "one file of the kernel that cannot be read",
}


def handlers(tree: ast.AST, inside: str = ""):
    for node in ast.iter_child_nodes(tree):
        here = inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            here = f"{inside}.{node.name}".strip(".")
        kinds = []
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            kinds = [ast.unparse(node.type)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            kinds = [ast.unparse(one) for one in node.args]
        if any("ValueError" in kind for kind in kinds):
            yield here
        yield from handlers(node, here)


def test_no_value_error_of_a_step_is_caught_as_the_users():
    paths = [ROOT / "cli.py", *(ROOT / "trainer").rglob("*.py"), *(ROOT / "driver").rglob("*.py")]
    paths += (ROOT / "workers").rglob("*.py")
    found = {f"{path.relative_to(ROOT)} {where}" for path in paths for where in handlers(ast.parse(path.read_text()))}
    assert found == CATCHES.keys()
