"""The tests of `make test-gpu` are those that are marked, and without a GPU the reason is one line."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("tests_gpu", TESTS / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_part_has_marked_tests_and_each_marked_file_has_a_part(script):
    marked = {
        str(p.relative_to(TESTS.parent)) for p in TESTS.rglob("test_*.py") if "pytest.mark.on_device" in p.read_text()
    }
    named = [name for part in script.PARTS.values() for name in part if name.endswith(".py")]
    assert sorted(named) == sorted(marked - {"tests/unit/test_on_device.py"})


def test_the_commands_on_the_page_of_gpus_name_parts_that_exist(script, monkeypatch, capsys):
    page = (TESTS.parent / "docs" / "gpu.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^\|.*\| `([^`]+)` \|$", page, re.MULTILINE)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    measured, tested = set(), set()
    for command in commands:
        if command[:2] == ["python", "bench/gpu.py"]:
            assert gpu.main(command[2:]) == 0 and "nothing was measured" in capsys.readouterr().out
            measured |= set(command[command.index("--only") + 1].split(","))
        elif command[:2] == ["python", "tests/gpu.py"]:
            tested |= set(command[command.index("--only") + 1].split(","))
    assert measured == set(gpu.PARTS) - {"limits"} and {"resume", "memory"} <= tested <= script.PARTS.keys()


def test_a_part_passes_by_its_tests_alone(script, monkeypatch):
    monkeypatch.setattr(script, "ROOT", TESTS.parent)
    for arguments, passes in (("--version", False), ("tests/unit/test_on_device.py", False)):  # nothing is marked there
        monkeypatch.setitem(script.PARTS, "numerics", (arguments,))
        passed, text = script.run_part("numerics", "cpu", 60)
        assert passed == passes and text.startswith("numerics: FAILED"), text


def test_without_a_gpu_nothing_runs():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/numerics/test_engine.py"]
    done = subprocess.run(
        command, cwd=TESTS.parent, env={**os.environ, "VERL_TEST_DEVICE": "cuda"}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "sees no GPU; nothing was tested" in done.stdout + done.stderr
    assert " passed" not in done.stdout
