"""Modules under verl's names that stand on what is here: checkpoints copied, torchrun's ranks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from verl.agent_loop.registry import _own_loops
from verl.cli import main
from verl.config.load import load_config
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.one_step_off_policy import main_ppo as one_step
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
    assert take_part(section) == ClusterConfig() and not is_spare()
    with pytest.raises(ValueError, match="cluster.backend=torchrun, but torchrun did not start several processes"):
        take_part(ClusterConfig(backend="torchrun"))
    given = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "RANK": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    section = take_part(section)
    assert (section.backend, section.nodes, section.ranks_per_node) == ("torchrun", 2, 3) and is_spare()
    with pytest.raises(ValueError, match="cluster.backend=ray, but torchrun started 6 processes"):
        take_part(ClusterConfig(backend="ray"))


DOORS = (
    *(
        "verl.trainer.main_ppo",
        "verl.trainer.main_ppo_sync",
        "verl.trainer.sft_trainer",
        "verl.trainer.sft_trainer_ray",
    ),
    *("verl.trainer.main_generation_server", "verl.experimental.fully_async_policy.fully_async_main"),
    *("verl.experimental.one_step_off_policy.main_ppo", "verl.experimental.transfer_queue.main_ppo"),
)


@pytest.mark.parametrize("name", DOORS)
def test_every_entry_point_says_how_it_is_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        assert importlib.import_module(name).main([flag]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("usage: python -m verl.") and "key=value" in said.out and not said.err


def test_the_asynchronous_entry_point_has_verls_defaults_below_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(fully_async_main, "ppo", lambda args, module: ran.append(args) or 0)
    actor = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    fully_async_main.main([actor, "async_training.staleness_threshold=0.5", "model.path=m"])
    config = load_config(ran[0], verl_defaults="rl").config
    pipeline = config.pipeline
    assert (pipeline.staleness, pipeline.sync_every, pipeline.partial_rollout) == (0.5, 4, True)
    assert (config.step.prompts_per_step, config.step.updates_per_step) == (8, 1)
    fully_async_main.main(["--config-path=/a", "--config-name=b"])
    assert ran[1] == ["--config-path=/a", "--config-name=b"], "a file of the user's has its own"
    fully_async_main.main(["--config-path=config", "--config-name=fully_async_ppo_megatron_trainer.yaml", actor])
    assert len(ran[2]) == 3 + len(fully_async_main.DEFAULTS), "verl's own file has verl's defaults"
    monkeypatch.setattr(one_step, "ppo", lambda args, module: ran.append(args) or 0)
    one_step.main([actor, "data.train_batch_size=8", "model.path=m"])
    pipeline = load_config(ran[3], verl_defaults="rl").config.pipeline
    assert (pipeline.staleness, pipeline.sync_every, pipeline.partial_rollout) == (1, 1, False)


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("verl.interactions.base", "agent.loop=FILE.py:Class"),
        ("verl.single_controller.base", "verl.GRPOTrainer"),
        ("verl.workers.reward_manager", "reward.path=FILE.py"),
        ("verl.tools.sandbox_fusion_tools", "verl.tools.code_interpreter"),
        ("verl.tools.mcp_base_tool", "agent.tools=[FILE.json]"),
    ],
)
def test_a_module_of_verls_that_is_not_here_is_refused_with_the_fix(module: str, fix: str) -> None:
    with pytest.raises(ImportError, match="is not in this version") as refused:
        importlib.import_module(module)
    assert fix in str(refused.value)


def test_a_loop_is_found_under_verls_names(tmp_path: Path) -> None:
    from verl import AgentLoop
    from verl.experimental.agent_loop import AgentLoopBase, register
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    assert AgentLoop is AgentLoopBase and AgentLoopOutput.__name__ == "AgentLoopOutput" and callable(register)
    head = "from verl.experimental.agent_loop import AgentLoopBase, register\n"
    one = "class Mine(AgentLoopBase):\n    async def run(self, sampling_params, **kwargs):\n        pass\n"
    (tmp_path / "loops.py").write_text(f"{head}\n@register('my_agent')\n{one}\nclass Child(Mine):\n    pass\n")
    loops = _own_loops(f"{tmp_path / 'loops.py'}:Mine")
    assert loops["my_agent"] is loops["Mine"] and [c.registered for c in loops.values()].count("my_agent") == 3
