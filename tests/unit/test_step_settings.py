"""The effects of settings on a step: its passes, columns, schedule and warnings."""

import asyncio
from types import SimpleNamespace

import pytest

from verl.algorithms.presets import settled
from verl.algorithms.resolve import resolve
from verl.config.load import load_config
from verl.driver.models import ModelContext, trained
from verl.driver.roles import Controllers
from verl.driver.step import Step, _advantages
from verl.planner.plan import algorithm_warnings
from verl.planner.sizes import policy_updates
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Ref, Refs


def config_of(tiny_model, *given):
    return load_config([f"model.path={tiny_model}", "model.dtype=float32", *given]).config


def test_a_bypass_makes_the_pass_for_old_log_probs_only_where_it_rejects():
    bypass = {"bypass": True, "kl_loss_coef": 0.0}
    weighed = {**bypass, "loss": "reinforce", "correction": "truncate", "correction_high": 2.0}
    rejects = {"correction_reject": ["token_k1:2"]}
    cases = [
        ("grpo", bypass, 4, ()),
        ("grpo", weighed, 4, ()),
        ("grpo", {**bypass, **rejects}, 1, ("old_logprobs",)),
        ("grpo", {**weighed, "correction": "mask"}, 1, ("old_logprobs",)),
        ("otb", bypass, 4, ("old_logprobs", "sum_pi_squared")),
        ("reinforce_plus_plus", bypass, 4, ("ref_logprobs", "old_logprobs")),
    ]
    wrong = {
        (name, str(given)): found
        for name, given, updates, expected in cases
        if (found := tuple(n.column for n in settled(name, given).needs(updates))) != expected
    }
    assert not wrong


class Recorded:
    """A compute worker that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, tuple]] = []

    async def compute(self, refs, fn, inputs, outputs):
        self.calls.append((getattr(fn, "func", fn).__name__, inputs, outputs))
        return {}


async def _awaited(call, what):
    return await call


NUMBERS = {"prompt_tokens": 2, "total_tokens": 4, "loss_tokens": 2, "version_min": 0, "version_max": 0, "reward": 1.0}
ROW = Ref(sample_id="s", trajectory_id="t", group_id="g", purpose="train", **NUMBERS)
ONE = Refs([ROW])


def columns_asked(name, **given):
    learner = SimpleNamespace(compute=Recorded(), controllers=Controllers(0.0), done=_awaited)
    step = Step(0)
    written = asyncio.run(_advantages(learner, step, resolve(name, given), ONE))  # type: ignore[arg-type]
    return learner.compute.calls, written


def test_the_optimal_baseline_reads_importance_weights_where_a_correction_wrote_them():
    calls, _ = columns_asked("otb")
    assert calls == [("rewards_and_advantages", ("old_logprobs", "sum_pi_squared"), ("advantages",))]
    calls, _ = columns_asked("otb", correction="truncate", correction_high=2.0)
    assert [c[0] for c in calls] == ["correct", "rewards_and_advantages"]
    assert calls[1][1] == ("old_logprobs", "sum_pi_squared", "is_weights")
    calls, written = columns_asked("grpo", bypass=True, mask_truncated=True)
    assert [c[0] for c in calls] == ["rewards_and_advantages", "without_truncated", "rollout_is_old"]
    assert written == ["old_logprobs"] and calls[1][1:] == ((), ("keep",))


def test_the_policys_schedule_begins_when_the_critic_is_warm(tiny_model):
    given = ("algorithm.name=ppo", "algorithm.critic_warmup_steps=10", "step.updates_per_step=2", "optim.lr=1.0")
    config = config_of(tiny_model, *given, "optim.schedule=linear", "optim.warmup_ratio=0.1")
    assert policy_updates(config, 20) == 20 and policy_updates(config_of(tiny_model), 20) == 20
    context = ModelContext(config, MemoryQueue(), "cpu", updates=40)
    spec = trained(context, "actor", updates=policy_updates(config, 20)).context.optim
    assert (spec.total_steps, spec.warmup_steps) == (20, 2)


def test_answers_of_older_weights_without_a_correction_are_warned_of(tiny_model):
    stale = ("pipeline.staleness=1",)
    cases = [
        ((), False),
        (stale, True),
        (("pipeline.sync_every=2",), True),
        ((*stale, "algorithm.bypass=true"), False),
        ((*stale, "algorithm.correction=truncate", "algorithm.options.correction_high=2"), False),
        ((*stale, "algorithm.name=decoupled_ppo"), False),
    ]
    found = {
        given: any("older weights" in w for w in algorithm_warnings(config_of(tiny_model, *given)))
        for given, _ in cases
    }
    assert found == dict(cases)


def test_shaping_of_a_score_that_is_not_there_yet_is_refused(tiny_model):
    from verl.config.load import validate

    given = ("algorithm.options.stop_properly_coef=0.5", "reward.stage=batch", f"reward.model={tiny_model}")
    with pytest.raises(ValueError, match=r"stop_properly_coef with reward\.stage=batch"):
        validate(config_of(tiny_model, *given))
