"""A run that offloads models for each other and for the rollout: the weights are those of the run without offloading,
and a device has only the parts in use."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from each import FULL_GRID
from on_device import DEVICE, ON_CPU
from safetensors.torch import load_file
from small_runs import same_tensors, small_args, small_run

from verl.config.load import load_config
from verl.model_engine.torch_engine import TorchEngine
from verl.models import tiny
from verl.planner.plan import make_plan
from verl.recipes import arithmetic
from verl.rollout.native.runner import NativeRunner

ALL = [f"model.engine_options.offload_{part}=true" for part in ("weights", "optimizer", "frozen")]
PPO = ["algorithm.name=ppo", "algorithm.kl_loss_coef=0.01"]  # actor, critic, reference


def weights(root: Path) -> dict[str, torch.Tensor]:
    (found,) = root.glob("r/checkpoints/step_*3/hf/model.safetensors")
    return load_file(found)


@pytest.mark.parametrize("more", [(), *([("cluster.virtual_ranks=2",), ("rollout.engine=hf",)] if FULL_GRID else [])])
def test_the_weights_are_those_of_a_run_without(more, tmp_path, tiny_model, arithmetic_data):
    for name, given in (("stays", ()), ("goes", ALL)):
        small_run(tmp_path / name, tiny_model, arithmetic_data, *PPO, *more, *given, "run.deterministic=true")
    same_tensors(weights(tmp_path / "goes"), weights(tmp_path / "stays"))


def tensor_bytes() -> int:
    storages = (
        t.untyped_storage()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and t.device.type == DEVICE.type
    )
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak(monkeypatch: pytest.MonkeyPatch, root: Path, *given: Any) -> int:
    """The most bytes of tensors in this process, looked at where most is held: around an optimizer step, at the end of
    a pass without gradients, when weights were delivered, and before the rollout gives its memory back."""
    gc.collect()
    gc.freeze()  # what was here before is not among its objects any more, and the run freezes nothing
    seen = [0]

    def watched(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watch(*args: Any, **more: Any) -> Any:
            seen.append(tensor_bytes())
            found = method(*args, **more)
            seen.append(tensor_bytes())
            return found

        monkeypatch.setattr(owner, name, watch)

    for owner, name in ((torch.optim.AdamW, "step"), (TorchEngine, "infer"), (NativeRunner, "prepare")):
        watched(owner, name)
    watched(NativeRunner, "drop_kv")
    small_run(root, *given)
    monkeypatch.undo()
    return max(seen)


@pytest.mark.full("distributed/test_memory.py")
def test_no_more_is_held_than_training_or_rollout_want(tmp_path, arithmetic_data, monkeypatch):
    """For a model of W bytes: without offloading 3W of the actor, 3W of the critic, the reference, the rollout's
    weights and a gradient are on the device; with it, one model, its gradients and its states at a time."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=384, layers=4, heads=4, kv_heads=2, ffn=1024, seed=1)
    folder = tiny.save(model, tokenizer, tmp_path / "model")
    size, largest = (f(4 * p.numel() for p in model.parameters()) for f in (sum, max))
    more = (folder, arithmetic_data[:1], *PPO, "rollout.engine_options.prefix_cache_tokens=0", "run.total_steps=2")
    stays = peak(monkeypatch, tmp_path / "stays", *more)
    goes = peak(monkeypatch, tmp_path / "goes", *more, *ALL)
    assert stays > 8.5 * size, stays / size
    assert goes < 4 * size + largest + size / 2, goes / size  # half: activations, and what the queue holds


CONTEXT_BYTES = 96 << 20  # on a GPU: workspaces of its libraries, whatever the model


@pytest.mark.on_device
@pytest.mark.parametrize("more", [(), tuple(ALL)], ids=["stays", "goes"])
def test_the_peak_is_at_most_a_tenth_above_the_plan(more, tmp_path, arithmetic_data, monkeypatch):
    """On a GPU the peak is that of its allocator; on a CPU that of the moments at which tensors are counted."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=384, layers=4, heads=4, kv_heads=2, ffn=1024, seed=1)
    folder = tiny.save(model, tokenizer, tmp_path / "model")
    given = (folder, arithmetic_data[:1], "run.total_steps=2", *more)
    planned = make_plan(load_config(small_args(tmp_path / "run", *given)).config).memory.peak_bytes
    if ON_CPU:
        found, beside = peak(monkeypatch, tmp_path / "run", *given), 0
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        small_run(tmp_path / "run", *given)
        found, beside = torch.cuda.max_memory_allocated(), CONTEXT_BYTES
    assert 2 * 4 * model.num_parameters() < found < 1.1 * planned + beside, (found, planned)


def test_the_plan_knows_what_is_away(tmp_path, tiny_model, arithmetic_data):
    stays, goes = (
        make_plan(load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *PPO, *more)).config).memory
        for more in ((), ALL)
    )
    assert {"reference policy", "master weights", "optimizer states"} <= {*stays.phases["rollout"]}
    assert not {"reference policy", "master weights", "optimizer states"} & {*goes.phases["rollout"]}
    assert "rollout weights" in goes.phases["rollout"] and "rollout weights" not in goes.phases["update"]
    assert goes.peaks["update"] < stays.peaks["update"] and goes.peaks["rollout"] < stays.peaks["rollout"]
