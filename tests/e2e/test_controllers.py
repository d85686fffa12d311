"""The values that an algorithm adapts from step to step are restored by a resume: the KL coefficient, the warm
critic."""

import asyncio
from copy import copy

from small_runs import metrics_of, small_args, small_run

from verl.config.load import load_config
from verl.driver.assemble import assemble

PPO = (
    *("algorithm.name=ppo", "algorithm.kl_loss_coef=null"),
    *("algorithm.kl_reward_coef=0.5", "algorithm.kl_reward_target=0.1", "algorithm.kl_reward_horizon=32"),
    "run.save_every_steps=1",
)


async def restored(args):
    run = await assemble(load_config(args))
    try:
        before = copy(run.learner.controllers)
        await run.checkpointer.restore()
        return before, run.learner.controllers
    finally:
        await run.close()


def test_a_resumed_run_has_the_adapted_coefficient_and_the_warm_critic(tmp_path, tiny_model, arithmetic_data):
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *PPO, "run.total_steps=1")
    args = small_args(tmp_path, tiny_model, arithmetic_data[:1], *PPO, "run.total_steps=2")
    before, after = asyncio.run(restored(args))
    assert (before.kl_coef, before.critic_warm) == (0.5, False), "those of a new run"
    assert (round(after.kl_coef, 9), after.critic_warm) == (0.45, True), (
        "16 answers, no KL yet: 0.5 x (1 - 0.2 x 16/32)"
    )
    fork = f"run.resume={tmp_path / 'r' / 'checkpoints' / 'step_1'}"
    asked = small_args(tmp_path, tiny_model, arithmetic_data[:1], *PPO, "run.total_steps=2", "run.name=b", fork)
    asked = [a.replace("kl_reward_coef=0.5", "kl_reward_coef=0.2") for a in asked]
    _, after = asyncio.run(restored(asked))
    assert (after.kl_coef, after.critic_warm) == (0.2, True), "a fork pays what it was asked to pay"


def test_a_critic_that_warms_up_for_the_whole_run_is_said(tmp_path, tiny_model, arithmetic_data, capsys):
    more = ("algorithm.critic_warmup_steps=2", "run.total_steps=2", "algorithm.name=ppo", "algorithm.kl_loss_coef=null")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *more, "optim.schedule=cosine")
    said = " ".join(capsys.readouterr().out.split())
    assert "critic_warmup_steps=2: in 2 steps the critic learns alone and the policy stays as it is" in said
    assert "actor/grad_norm" not in metrics_of(tmp_path / "r")[2]
