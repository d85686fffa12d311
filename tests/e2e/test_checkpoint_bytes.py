"""The size of a checkpoint in `verl plan`, by which a start on a small disk is refused, is that on the disk."""

import pytest
import torch
from small_runs import small_args

from verl.config.load import load_config
from verl.driver.launch import run_rl, run_supervised
from verl.models import tiny
from verl.planner.disk import checkpoint_parts
from verl.planner.plan import make_plan
from verl.planner.text import render_plan
from verl.recipes import arithmetic


def folder_of(path, *, dtype=torch.float32, **shape):
    """A model of some million parameters, so that the numbers weigh more than the files around them."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, layers=2, hidden=128, ffn=256, vocab_size=6000, **shape)
    return tiny.save(model.to(dtype), tokenizer, path)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_size_that_is_planned_is_the_size_on_disk(tmp_path, arithmetic_data):
    """With a critic, of the policy's folder or of one of its own; stored in half precision; with a head of its own,
    which critics and reward models have not."""
    half = folder_of(tmp_path / "half", dtype=torch.bfloat16)
    whole = folder_of(tmp_path / "whole", tied=False)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 4)
    ppo = ("algorithm.name=ppo", "algorithm.kl_loss_coef=null")
    cases = [
        ("train", half, ()),
        ("train", half, ("model.lora.rank=32",)),
        ("train", whole, ppo),
        ("train", whole, (*ppo, f"critic.path={half}")),
        ("sft", half, ()),
        ("rm", whole, ()),
        ("rm", whole, ("model.lora.rank=32",)),
    ]
    wrong = []
    for k, (verb, model, more) in enumerate(cases):
        rows = arithmetic_data[:1] if verb == "train" else [pairs]
        own = ("run.total_steps=1", f"run.name={k}", "step.prompts_per_step=2", "data.max_tokens_per_row=64", *more)
        if verb == "sft":
            rows = [tmp_path / "sft.jsonl"]
            rows[0].write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
        resolved = load_config(small_args(tmp_path, model, rows, *own))
        planned = checkpoint_parts(resolved.config, verb)
        if verb == "train":
            plan = make_plan(resolved.config)
            assert plan.checkpoint_bytes == sum(planned.values())
            assert (" + critic " in render_plan(plan)) == (ppo[0] in more)
            run_rl(resolved, quiet=True)
        else:
            run_supervised(resolved, verb)
        made = tmp_path / str(k) / "checkpoints" / "step_1"
        there = sum(p.stat().st_size for p in made.rglob("*") if p.is_file())
        if abs(sum(planned.values()) - there) > 0.05 * there:
            wrong.append((verb, model.name, more, planned, there))
    assert not wrong, wrong
