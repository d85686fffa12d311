"""A run whose models give way to each other and to the rollout: the weights are those of the run in which all
stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import same_tensors, small_args, small_run

from verl.config.load import load_config
from verl.config.plan import make_plan

ALL = [f"model.engine_options.offload_{part}=true" for part in ("weights", "optimizer", "frozen")]
PPO = ["algorithm.name=ppo", "algorithm.kl_loss_coef=0.01"]  # actor, critic, reference


def weights(root: Path) -> dict[str, torch.Tensor]:
    (found,) = root.glob("r/checkpoints/step_*3/hf/model.safetensors")
    return load_file(found)


@pytest.mark.parametrize("more", [(), ("cluster.virtual_ranks=2",), ("rollout.engine=hf",)])
def test_the_weights_are_those_of_a_run_without(more, tmp_path, tiny_model, arithmetic_data):
    for name, given in (("stays", ()), ("goes", ALL)):
        small_run(tmp_path / name, tiny_model, arithmetic_data, *PPO, *more, *given, "run.deterministic=true")
    same_tensors(weights(tmp_path / "goes"), weights(tmp_path / "stays"))


def test_the_plan_knows_what_is_away(tmp_path, tiny_model, arithmetic_data):
    stays, goes = (
        make_plan(load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *PPO, *more)).config).memory
        for more in ((), ALL)
    )
    assert {"reference policy", "master weights", "optimizer states"} <= {*stays.phases["rollout"]}
    assert not {"reference policy", "master weights", "optimizer states"} & {*goes.phases["rollout"]}
    assert "rollout weights" in goes.phases["rollout"] and "rollout weights" not in goes.phases["update"]
    assert goes.peaks["update"] < stays.peaks["update"] and goes.peaks["rollout"] < stays.peaks["rollout"]
