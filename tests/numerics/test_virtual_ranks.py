"""The gradient of a step does not depend on the number of ranks: the whole path from refs over dispatch, weights as
columns and two-pass terms to the engine's gradient, for every preset, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from each import matrix
from passes import turn

from verl.algorithms.presets import PRESETS
from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine.torch_engine import TorchEngine
from verl.types import Sample, Segment

MORE = {"drgrpo": {"horizon_tokens": 12}, "gdpo": {"reward_components": ["short", "digits"]}}


def samples(baselines: int, seed: int = 0) -> list[Sample]:
    """4 prompts x 4 answers of unlike lengths, one of which has no valid reward."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(4):
        prompt = Segment(ids=rng.integers(4, 19, 3 + g), source="prompt")
        for i in range(4 + baselines):
            n, reward = int(rng.integers(1, 12)), float(rng.random())
            baseline, invalid = i >= 4, (g, i) == (2, 1)
            name = f"g{g}/{'baseline' if baseline else 'train'}{i}.0"
            drawn = Segment(
                ids=rng.integers(4, 19, n),
                source="sampled",
                logprobs=(-2 - rng.random(n)).astype(np.float32),
                version=0,
                side={
                    "turn": np.arange(n) // 3,
                    "turn_reward": (np.arange(n) % 3 == 2).astype(np.float32) * reward,
                    "turn_state": np.arange(n) // 3 % 2,
                },
            )
            out.append(
                Sample(
                    sample_id=f"{name}#0",
                    trajectory_id=name,
                    group_id=f"g{g}",
                    purpose="baseline" if baseline else "train",
                    segments=(prompt, drawn),
                    reward=float("nan") if invalid else reward,
                    components={} if invalid else {"short": reward, "digits": float(rng.random())},
                    outcome="invalid" if invalid else "ok",
                )
            )
    return out


def config_of(name: str, model: Path, teacher: Path, ranks: int, budget: int) -> Config:
    config = Config()
    config = changed(config, {"model.path": str(model), "model.dtype": "float64"})
    config = changed(config, {"algorithm.name": name})
    if "teacher" in PRESETS[name].roles():
        config = changed(config, {"teacher.path": str(teacher), "teacher.top_k": 5})
    for key, value in MORE.get(name, {}).items():
        config.algorithm.options[key] = value
    config = changed(config, {"step.prompts_per_step": 4, "step.updates_per_step": 2, "step.epochs_per_step": 2})
    config = changed(config, {"step.max_tokens_per_microbatch": budget})
    config = changed(config, {"optim.lr": 1e-3, "cluster.virtual_ranks": ranks})
    return config


def gradients(
    name: str,
    model: Path,
    teacher: Path,
    ranks: int,
    budget: int = 16384,
    dtype: str | None = None,
    options: Mapping[str, object] | None = None,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradient of every optimizer step of a turn, in order, and the metrics of the turn."""
    config = config_of(name, model, teacher, ranks, budget)
    config = changed(config, {"model.dtype": dtype or config.model.dtype})
    config.algorithm.options.update(options or {})
    found, metrics, _, _ = turn(config, samples(PRESETS[name].group.baselines))
    return [torch.cat([grad.flatten() for grad in grads.values()]) for grads in found], metrics


EDGES = {  # losses with an edge where the policy is the old one or the reference
    "kl_cov": {},
    "abs": {"kl_loss_coef": 0.5, "kl_loss_form": "abs"},
    "no room": {"clip_low": 0.0, "clip_high": 0.0},
}


@pytest.mark.parametrize("name", EDGES)
def test_the_rounding_of_other_passes_changes_the_first_gradient_by_rounding(
    name, tiny_model, tiny_teacher, monkeypatch
):
    found, infer = [], TorchEngine.infer
    for sign in (1e-7, -1e-7):

        def rounded(self, batch, columns, average=False, start=False, *, sign=sign):
            noise = sign * torch.linspace(1, 2, batch.num_loss_tokens, dtype=torch.float64)
            out = infer(self, batch, columns, average)
            return {n: x + noise if n == "logprobs" else x for n, x in out.items()}

        monkeypatch.setattr(TorchEngine, "infer", rounded)
        preset = name if name in PRESETS else "grpo"
        found.append(gradients(preset, tiny_model, tiny_teacher, 1, options=EDGES[name])[0][0])
    assert float(found[0].abs().max()) > 0
    assert float((found[0] - found[1]).abs().max()) <= 1e-6 * float(found[0].abs().max())


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_in_float32_the_gradient_of_the_first_step_is_that_of_one_rank_but_for_rounding(name, tiny_model, tiny_teacher):
    first = []
    for ranks, budget in ((1, 16384), (2, 40)):
        torch.manual_seed(0)
        first.append(gradients(name, tiny_model, tiny_teacher, ranks, budget, "float32")[0][0])
    assert first[0].dtype == torch.float32
    assert 0 < float((first[0] - first[1]).abs().max()) <= 1e-6 * float(first[0].abs().max())


@matrix("name", PRESETS, quick=("grpo", "ppo", "gkd", "kl_cov"))
def test_the_gradient_of_every_optimizer_step_is_that_of_one_rank(name, tiny_model, tiny_teacher):
    torch.manual_seed(0)  # of the critic's head
    expected, metrics = gradients(name, tiny_model, tiny_teacher, 1)
    assert len(expected) >= 4 and sum(float(g.abs().max()) > 0 for g in expected) >= 2
    for ranks, budget in ((2, 40), *([(3, 16384)] if name in ("grpo", "ppo", "kl_cov") else [])):
        torch.manual_seed(0)
        found, theirs = gradients(name, tiny_model, tiny_teacher, ranks, budget)
        assert len(found) == len(expected)
        for i, (a, b) in enumerate(zip(expected, found)):
            scale = float(a.abs().max())
            assert float((a - b).abs().max()) <= 1e-10 * max(1.0, scale), (ranks, i)
        assert set(metrics) == set(theirs)
        for metric, value in metrics.items():
            assert theirs[metric] == pytest.approx(value, rel=1e-8, abs=1e-9), (ranks, metric)


def test_one_update_reports_the_mismatch_that_several_report(tiny_model):
    """With one update the first pass is the policy that was sampled from; with several, or several epochs, it is a pass
    of its own."""
    found = {}
    for shape in ((1, 1), (2, 1), (1, 2)):
        config = config_of("grpo", tiny_model, tiny_model, 1, 16384)
        config = changed(config, dict(zip(("step.updates_per_step", "step.epochs_per_step"), shape)))
        _, metrics, queue, refs = turn(config, samples(0))
        found[shape] = {n: v for n, v in metrics.items() if n.startswith("mismatch/")}
        assert ("old_logprobs" in queue.columns(refs)) == (shape != (1, 1)), shape
    assert len(found[1, 1]) == 5
    for shape, theirs in found.items():
        assert theirs == pytest.approx(found[1, 1], rel=1e-9), shape


def test_baselines_are_compared_with_and_not_trained_on(tiny_model):
    config = config_of("remax", tiny_model, tiny_model, 1, 16384)
    config = changed(config, {"step.updates_per_step": 1, "step.epochs_per_step": 1})
    _, _, queue, refs = turn(config, samples(1))
    assert queue.having(refs, "w/pg_loss") == refs.of("train") and len(refs) == 20


@pytest.mark.parametrize(
    ("name", "options"),
    [("dapo", {"top_entropy_quantile": 0.3}), ("vespo", {"correction": "truncate", "correction_high": 1.5})],
)
def test_options_that_look_at_the_whole_step_see_no_rank_and_no_micro_batch(name, options, tiny_model):
    found = []
    for ranks, budget in ((1, 16384), (2, 40)):
        config = config_of(name, tiny_model, tiny_model, ranks, budget)
        config.algorithm.options.update(options)
        grads = turn(config, samples(0))[0]
        found.append([torch.cat([grad.flatten() for grad in each.values()]) for each in grads])
    plain = turn(config_of(name, tiny_model, tiny_model, 1, 16384), samples(0))[0]
    first = torch.cat([grad.flatten() for grad in plain[0].values()])
    assert float((first - found[0][0]).abs().max()) > 1e-3 * float(first.abs().max())
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max()) <= 1e-10 * max(1.0, float(a.abs().max()))
