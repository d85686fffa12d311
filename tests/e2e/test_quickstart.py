"""What is wrong with a quickstart's overrides is said before the minutes of its warm-up."""

from __future__ import annotations

import pytest

from verl import quickstart


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("step.promts_per_step=3", "step.prompts_per_step"),
        ("optim.lr=fast", "optim.lr"),
        ("--verbose", "--verbose"),
        ("run.seed=x", "run.seed=x: it is a whole number"),
        ("task=poems", "task=poems: there are arithmetic, tool_arithmetic"),
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
