"""Real GSM8K rows, JSONL as published and verl's Parquet format, with a small model and a BPE tokenizer that is trained
on them."""

import json
from pathlib import Path

import pytest
from small_runs import metrics_of
from tokens import bpe_tokenizer

from verl.cli import main

ROWS = Path(__file__).parents[1] / "data"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from verl.models import tiny

    rows = [json.loads(line) for line in (ROWS / "gsm8k_train.jsonl").read_text().splitlines()]
    tokenizer = bpe_tokenizer((f"{r['question']} {INSTRUCTION} {r['answer']}" for r in rows), vocab_size=1024)
    built = tiny.qwen3(tokenizer, hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, max_positions=512)
    return tiny.save(built, tokenizer, tmp_path_factory.mktemp("gsm8k_model"))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """The same rows in verl's Parquet format, as its preprocessing script writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("parquet")
    out = []
    for split in ("train", "test"):
        rows = []
        for i, line in enumerate((ROWS / f"gsm8k_{split}.jsonl").read_text().splitlines()):
            r = json.loads(line)
            rows.append(
                {
                    "data_source": "openai/gsm8k",
                    "prompt": [{"role": "user", "content": f"{r['question']} {INSTRUCTION}"}],
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": r["answer"].split("#### ")[1].replace(",", "")},
                    "extra_info": {"split": split, "index": i, "answer": r["answer"], "question": r["question"]},
                }
            )
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
        out.append(folder / f"{split}.parquet")
    return out


def small(tmp_path, model):
    return [
        f"run.root_dir={tmp_path}",
        "run.name=g",
        "run.total_steps=2",
        f"model.path={model}",
        "run.threads=1",
        "model.dtype=float32",
        "step.prompts_per_step=4",
        "step.samples_per_prompt=2",
        "step.updates_per_step=1",
        "rollout.max_response_tokens=16",
        "data.max_prompt_tokens=300",
        "data.max_eval_rows=8",
        f"data.cache_dir={tmp_path}/cache",
        "reward.num_workers=1",
    ]


@pytest.mark.parametrize(
    "format", ["jsonl", pytest.param("parquet", marks=pytest.mark.full("jsonl; unit/test_data_source.py reads both"))]
)
def test_the_recipe_trains_on_real_rows(tmp_path, model, parquet, format, capsys):
    files = [ROWS / "gsm8k_train.jsonl", ROWS / "gsm8k_test.jsonl"] if format == "jsonl" else parquet
    code = main(
        [
            "train",
            "recipe=gsm8k_grpo",
            *small(tmp_path, model),
            f"data.train_files=[{files[0]}]",
            f"data.eval_files=[{files[1]}]",
        ]
    )
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "4 prompts x 2 = 8 trajectories" in out.out
    found = metrics_of(tmp_path / "g")
    assert set(found) >= {1, 2}
    assert "eval/openai/gsm8k/acc/greedy" in found[2] or "eval/openai/gsm8k/acc/greedy" in found[0]
    assert found[2]["mismatch/max_abs_dlogp"] < 1e-3


VERLS_SPREADS = ("critic/score", "critic/rewards", "critic/advantages", "response_length", "prompt_length", "num_turns")
VERLS_NAMES = (
    *(
        f"timing_s/{n}"
        for n in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "step")
    ),
    *(f"timing_s/{n}" for n in ("testing", "save_checkpoint")),
    *(f"timing_per_token_ms/{n}" for n in ("gen", "ref", "adv", "update_actor")),
    *(f"global_seqlen/{n}" for n in ("min", "max", "mean", "minmax_diff", "balanced_min", "balanced_max")),
    *(
        f"actor/{n}"
        for n in ("entropy", "pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "grad_norm")
    ),
    *("actor/lr", "perf/throughput", "perf/time_per_step", "perf/total_num_tokens", "response_length/clip_ratio"),
    *("prompt_length/clip_ratio", "response/aborted_ratio", "rollout_corr/kl", "rollout_corr/k3_kl"),
    *("training/global_step", "training/epoch", "val-core/openai/gsm8k/reward/mean@1"),
)
"""The metrics that verl writes for a step of this script."""


def test_a_published_grpo_launch_script_runs_unchanged(tmp_path, model, parquet, capsys):
    """Keys and values as the public example scripts write them; only paths and sizes are small."""
    from verl.trainer.main_ppo import main as main_ppo

    script = f"""
        algorithm.adv_estimator=grpo data.train_files={parquet[0]} data.val_files={parquet[1]} data.train_batch_size=8
        data.max_prompt_length=300 data.max_response_length=16 data.filter_overlong_prompts=True data.truncation=error
        actor_rollout_ref.model.path={model} actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
        actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
        actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
        actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=4
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.ref.fsdp_config.param_offload=True
        algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","mlflow"] trainer.project_name=verl_grpo_gsm8k
        trainer.experiment_name=tiny trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5
        trainer.total_epochs=1 trainer.total_training_steps=2 trainer.val_before_train=False
    """
    code = main_ppo(
        [
            *script.split(),
            f"run.root_dir={tmp_path}",
            "run.threads=1",
            f"data.cache_dir={tmp_path}/cache",
            "data.max_eval_rows=8",
        ]
    )
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "8 prompts x 4 = 32 trajectories -> 2 updates of 16" in out.out
    found = metrics_of(tmp_path / "tiny")
    assert set(found) >= {1, 2} and "actor/kl_loss" in found[2]
    assert "the native engine runs in its place" in out.out and "mlflow is not in this version" in out.out
    spread = [f"{name}/{how}" for name in VERLS_SPREADS for how in ("mean", "max", "min")]
    assert not [name for name in (*spread, *VERLS_NAMES) if name not in found[2]]
    assert found[2]["timing_s/gen"] < found[2]["timing_s/step"] and found[2]["training/global_step"] == 2
    assert found[2]["num_turns/mean"] == found[2]["num_turns/max"] == 2, "a question and an answer"


def test_eval_generate_export_show(tmp_path, model, capsys):
    args = small(tmp_path, model)
    assert (
        main(
            [
                "train",
                "recipe=gsm8k_grpo",
                *args,
                "run.total_steps=1",
                "run.eval_before=false",
                "run.eval_after=false",
                "run.eval_every_steps=0",
                "run.keep_best=null",
                f"data.train_files=[{ROWS}/gsm8k_train.jsonl]",
                "data.eval_files=[]",
            ]
        )
        == 0
    )
    assert main(["export", str(tmp_path / "g"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    args = [a for a in args if not a.startswith(("model.path", "run.name"))]
    assert main(["eval", *args, f"model.path={tmp_path}/out", f"data.eval_files=[{ROWS}/gsm8k_test.jsonl]"]) == 0
    assert "acc/greedy" in capsys.readouterr().out
    assert (
        main(
            [
                "generate",
                f"model.path={tmp_path}/out",
                "prompt=What is 2+2?",
                "n=2",
                "rollout.max_response_tokens=8",
                "data.max_prompt_tokens=64",
                "model.dtype=float32",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.count("mean log-prob") == 2
    assert main(["show", str(tmp_path / "g")]) == 0
    assert main(["doctor", str(tmp_path / "g")]) == 0
    assert "report.html" in capsys.readouterr().out
