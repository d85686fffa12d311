"""The quickstart on the device of the tests; and its wrong overrides are refused before the minutes of its warm-up."""

from __future__ import annotations

import json

import pytest
from on_device import DEVICE, ON_CPU
from small_runs import metrics_of

from verl import quickstart


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("step.promts_per_step=3", "step.prompts_per_step"),
        ("optim.lr=fast", "optim.lr"),
        ("--verbose", "--verbose"),
        ("run.seed=x", "run.seed=x: it is a whole number"),
        ("task=poems", "task=poems: there are arithmetic, tool_arithmetic, shapes, look"),
    ],
)
def test_a_wrong_override(override, said, tmp_path, monkeypatch, capsys):
    for name in ("SFT_ROWS", "RL_ROWS", "HELD_OUT_ROWS"):
        monkeypatch.setattr(quickstart, name, 8)
    assert quickstart.main([f"run.root_dir={tmp_path}", override]) == 2
    out = capsys.readouterr()
    assert said in (out.err + out.out).replace("\n", " ")
    assert not list(tmp_path.glob("*/warmup"))


def test_help(capsys):
    assert quickstart.main(["--help"]) == 0
    assert "python -m verl.quickstart task=tool_arithmetic" in capsys.readouterr().out


@pytest.mark.on_device
def test_it_runs_and_on_a_gpu_it_learns(tmp_path, monkeypatch):
    """In full on a GPU, where it takes a minute; on a CPU its first steps."""
    given = [f"run.root_dir={tmp_path}", f"model.device={DEVICE.type}"]
    if ON_CPU:
        for name, rows in (("SFT_ROWS", 2000), ("RL_ROWS", 256), ("HELD_OUT_ROWS", 16)):
            monkeypatch.setattr(quickstart, name, rows)
        given += ["warmup_steps=6", "run.total_steps=2", "run.eval_every_steps=2"]
    assert quickstart.main(given) == 0
    found = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    mismatch = [m["mismatch/k3"] for step, m in metrics_of(tmp_path / "quickstart").items() if step]
    assert mismatch and max(map(abs, mismatch)) < 1e-3, "the rollout computes what the trainer does"
    if not ON_CPU:
        assert found["greedy_before"] < 0.5 and found["greedy_after"] > 0.85
