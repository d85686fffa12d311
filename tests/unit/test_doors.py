"""Modules under verl's names that stand on what is here: checkpoints copied, torchrun's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.cli import main
from verl.model_merger.__main__ import main as merge
from verl.trainer import is_spare_rank
from verl.trainer.main_ppo import main as ppo
from verl.workers.sections import ClusterConfig
from verl.workers.torchrun import is_spare, take_part


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


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_what_has_one_driver_is_refused_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main([verb, "model.path=/no/where"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: torchrun started 8 processes of verl {verb}, which is one process")
    assert line.endswith("without torchrun, with cluster.backend=ray cluster.ranks_per_node=4")


def test_what_torchrun_started_and_what_is_asked_for_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    section = ClusterConfig()
    take_part(section)
    assert section == ClusterConfig() and not is_spare()
    with pytest.raises(ValueError, match="cluster.backend=torchrun, but torchrun did not start several processes"):
        take_part(ClusterConfig(backend="torchrun"))
    given = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "RANK": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    take_part(section)
    assert (section.backend, section.nodes, section.ranks_per_node) == ("torchrun", 2, 3) and is_spare()
    with pytest.raises(ValueError, match="cluster.backend=ray, but torchrun started 6 processes"):
        take_part(ClusterConfig(backend="ray"))
