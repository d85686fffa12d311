"""Every model of a run is proven before it trains: its packed or padded forward pass, and its vocabulary."""

import json
from dataclasses import replace

import numpy as np
import psutil
import pytest
from small_runs import small_args

from verl.algorithms.resolve import resolve
from verl.config.load import load_config
from verl.driver import assemble
from verl.driver.launch import run_rl, run_supervised
from verl.driver.models import ModelContext, critic
from verl.models import tiny
from verl.nn import attention
from verl.rollout.embedded.front import EmbeddedEngine
from verl.transfer_queue.memory import MemoryQueue
from verl.workers.group import WorkerDied
from verl.workers.inproc import InprocCluster

real_plan = attention.plan_attention


def one_tree(batch, device, **options):
    parent = np.where(np.arange(len(batch.parent)) > 0, 0, -1)  # other trees hang under the first: they see it
    return real_plan(replace(batch, parent=parent), device, **options)


def test_sft_reward_models_and_preferences_refuse_a_packing_that_leaks(tmp_path, tiny_model, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    turn = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    row = {"messages": turn, "prompt": "1+1=", "chosen": "2", "rejected": "3"}
    rows.write_text(json.dumps(row) + "\n")
    base = [f"run.root_dir={tmp_path}", f"model.path={tiny_model}", f"data.train_files=[{rows}]", "track.sinks=[jsonl]"]
    base += [
        "model.dtype=float32",
        "data.max_tokens_per_row=64",
        "run.total_steps=1",
        "step.prompts_per_step=1",
        f"data.cache_dir={tmp_path}/c",
    ]
    monkeypatch.setattr(attention, "plan_attention", one_tree)
    closed = []
    monkeypatch.setattr(InprocCluster, "close", lambda self: closed.append(self))
    for command in ("sft", "rm", "dpo"):
        with pytest.raises(ValueError, match="packed log-probs differ"):
            run_supervised(load_config([*base, f"run.name={command}"]), command)
    assert len({id(cluster) for cluster in closed}) == 3, "what a refused start has started is ended"


@pytest.mark.parametrize("broken", ["_publisher", "models_of"])
def test_a_start_that_fails_leaves_no_graders_and_no_engine(broken, tmp_path, tiny_model, arithmetic_data, monkeypatch):
    """As where a rank dies while it loads: the run starts again in this process, and every start has graders of its
    own."""
    before, closed, close = set(psutil.Process().children(recursive=True)), [], EmbeddedEngine.close

    async def closing(engine):
        closed.append(engine)
        await close(engine)

    def dies(*given, **named):
        assert set(psutil.Process().children(recursive=True)) - before, "graders are there"
        raise WorkerDied("rank 0 of actor died")

    monkeypatch.setattr(EmbeddedEngine, "close", closing)
    monkeypatch.setattr(assemble, broken, dies)
    config = load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], "cluster.max_restarts=0"))
    with pytest.raises(WorkerDied, match="rank 0 of actor died"):
        run_rl(config, quiet=True)
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, 30)
    assert left == [] and len(closed) == (broken == "_publisher")


def context(tiny_model, folder) -> ModelContext:
    given = [f"model.path={tiny_model}", "model.dtype=float32", f"critic.path={folder}", "algorithm.name=ppo"]
    return ModelContext(load_config(given).config, MemoryQueue(), "cpu", updates=1)


def test_a_critic_of_another_vocabulary_or_whose_packing_leaks_is_refused(tmp_path, tiny_model, monkeypatch):
    tokenizer = tiny.character_tokenizer("9876543210+-=,;# ")
    model = tiny.qwen3(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, seed=1)
    other = tiny.save(model, tokenizer, tmp_path / "other")
    with pytest.raises(ValueError, match=r"critic\.path=.*another vocabulary than the policy"):
        critic(context(tiny_model, other), resolve("ppo"))
    critic(context(tiny_model, tiny_model), resolve("ppo")).close()
    monkeypatch.setattr(attention, "plan_attention", one_tree)
    with pytest.raises(ValueError, match="packed log-probs differ"):
        critic(context(tiny_model, tiny_model), resolve("ppo"))
