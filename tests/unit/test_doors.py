"""Modules under verl's names that stand on what is here: checkpoints copied, torchrun's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.model_merger.__main__ import main as merge
from verl.trainer import is_spare_rank
from verl.trainer.main_ppo import main as ppo


def test_a_checkpoint_is_merged_by_copying_its_folder(tmp_path: Path) -> None:
    (tmp_path / "step_1" / "hf").mkdir(parents=True)
    (tmp_path / "step_1" / "hf" / "config.json").write_text("{}")
    args = ["merge", "--backend", "fsdp", f"--local_dir={tmp_path}/step_1/actor", f"--target_dir={tmp_path}/out"]
    assert merge(args) == 0 and (tmp_path / "out" / "config.json").read_text() == "{}"


def test_of_torchruns_processes_the_first_is_the_run_in_rl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_spare_rank()
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert ppo(["actor_rollout_ref.model.path=/no/where"]) == 0, "the second has nothing to do"
    monkeypatch.setenv("RANK", "0")
    assert ppo(["actor_rollout_ref.model.path=/no/where"]) == 2
    said = capsys.readouterr()
    assert "trains alone" in said.out and "/no/where" in said.err
