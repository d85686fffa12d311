"""verl's keys: every published key is handled, values mean what verl means by them, contradictions are refused."""

from __future__ import annotations

import collections
import contextlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from handmade_model import write_model, write_rows
from translating import translate
from verl_lines import public_lines, write_places, write_seeing

from verl.config import worker_python
from verl.config.compat import rules
from verl.config.compat.rules import JOINT
from verl.config.compat.table import find_row, key_rows, keys_table
from verl.config.compat.translate import render_notes, verl_default_values
from verl.config.load import load_config
from verl.config.overrides import parse_argument, read_line
from verl.config.tree import leaf_of
from verl.config.validate import Command, validate
from verl.data.files import RawRow
from verl.data.formats import Players, task_row
from verl.recipes import tool_arithmetic

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
PUBLISHED = [
    line.split("\t")[0]
    for line in (Path(__file__).parents[1] / "data" / "verl_keys.tsv").read_text().splitlines()
    if not line.startswith("#")
]
PAGE = Path(__file__).parents[2] / "docs" / "from_verl.md"
GRPO_SCRIPT = shlex.split(r"""
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.train_files=/data/gsm8k/train.parquet "data.val_files=['/data/gsm8k/test.parquet']"
data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048
data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=/models/qwen3-8b
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.fsdp_config.param_offload=True
trainer.balance_batch=True trainer.critic_warmup=0 'trainer.logger=["console","wandb"]' trainer.project_name=verl_grpo
trainer.experiment_name=qwen3_8b trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15 trainer.val_before_train=False
""")

MADE_UP = {
    "ray_kwargs.ray_init.runtime_env.py_executable": "'uv run --isolated'",
    "algorithm.adv_estimator": "grpo",
    "data.truncation": "left",
    f"{ROLLOUT}name": "hf",
    f"{ACTOR}kl_loss_type": "low_var_kl",
    f"{ACTOR}strategy": "fsdp2",
    "actor_rollout_ref.ref.strategy": "fsdp",
    f"{ACTOR}policy_loss.loss_mode": "vanilla",
    "algorithm.kl_penalty": "kl",
    f"{ACTOR}loss_agg_mode": "token-mean",
    f"{ACTOR}megatron.dtype": "bfloat16",
    f"{ROLLOUT}dtype": "bfloat16",
    f"{ROLLOUT}top_k": "-1",
    f"{ROLLOUT}val_kwargs.top_k": "-1",
    f"{ROLLOUT}free_cache_engine": "True",
    "trainer.logger": "console",
    "trainer.device": "cpu",
    "trainer.resume_mode": "auto",
    "reward.reward_manager.name": "dapo",
    "reward_model.reward_manager": "naive",
    "optim.lr_decay_style": "cosine",
    "reward.custom_reward_function.name": "score",
    "data.train_files": "a.jsonl",
    "algorithm.rollout_correction.rollout_is": "null",
    "algorithm.rollout_correction.rollout_rs": "null",
    "optim.betas": "[0.9,0.95]",
    "optim.min_lr": "1e-6",
    "data.max_length": "64",
    "trainer.test_freq": "5",
    f"{ROLLOUT}val_kwargs.do_sample": "False",
    "reward.reward_kwargs.overlong_buffer_cfg.enable": "False",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "False",
}
"""A plausible value for the keys with a value that matters; 0 for numbers, False for switches that are refused when
on."""
DISTIL = "distillation.distillation_loss."
BESIDE = {
    f"{ACTOR}ppo_mini_batch_size": ["data.train_batch_size=8"],
    "optim.min_lr": ["optim.lr=1e-5"],
    "critic": ["algorithm.adv_estimator=grpo"],
    "distillation.enabled": [
        f"{DISTIL}loss_mode=k1",
        f"{DISTIL}use_policy_gradient=True",
        f"{DISTIL}use_task_rewards=False",
    ],
}


def overrides_of(*args: str) -> dict[str, object]:
    said = translate(list(args))
    return {setting.key: setting.value for setting in (*said.defaults, *said.settings)}


def refusal(*args: str) -> str:
    """Return the error of `translate` for a command line; empty: it is accepted."""
    try:
        translate(list(args))
    except ValueError as exc:
        return str(exc)
    return ""


# -- the table ---------------------------------------------------------------------------------------------------------


def test_counts_of_the_published_keys() -> None:
    counts = collections.Counter(key_rows()[key].action for key in PUBLISHED)
    assert counts == {"mapped": 147, "ignored": 118, "refused": 9}


def test_every_row_is_well_formed() -> None:
    for row in key_rows().values():
        for target in row.targets:
            assert leaf_of(target.removesuffix(".*")), f"{row.key} -> {target}"
        if row.action == "mapped":
            assert row.targets and row.rule, row.key
            name, _, kind = row.rule.partition(":")
            assert name in ("same", "off", "null", "unless_null", "map") or row.joint in JOINT, f"{row.key}: {row.rule}"
            words = r"[\w.+-]+=[\w.+-]+(,[\w.+-]+=[\w.+-]+)*"
            assert kind in ("", "number", "switch") or re.fullmatch(words, kind), f"{row.key}: {row.rule}"
        else:
            assert row.text, f"{row.key} is {row.action} without a reason"
            assert not row.rule or (row.action == "refused" and row.rule.startswith("except:")), row.key
        assert not (row.default_rl or row.default_sft) or row.action == "mapped", row.key
    for kind in ("rl", "sft"):
        for key, value in verl_default_values(kind).items():
            text = key_rows()[key].default_rl if kind == "rl" else key_rows()[key].default_sft
            assert repr(parse_argument(f"{key}={text}").value) == repr(value), "a default reads as on a command line"


def test_every_joint_rule_has_rows() -> None:
    assert {row.joint for row in key_rows().values() if row.joint} == set(JOINT)


def test_keys_table_is_printable() -> None:
    table = keys_table()
    assert len(table) == len(key_rows())
    assert all(key and action and said for key, action, said in table)


def plausible(key: str) -> str:
    row = find_row(key)
    assert row is not None, f"{key} is not in table.tsv"
    if key in MADE_UP:
        return MADE_UP[key]
    if row.action == "refused":
        return row.rule.removeprefix("except:").split(",")[0]
    if key.endswith(("path", "_dir", "_key", "_files", "name")):
        return "x"
    switch = any(leaf_of(t) and leaf_of(t)[0].type_name.startswith("bool") for t in row.targets)  # type: ignore[index]
    return "True" if switch or key.rsplit(".", 1)[-1].startswith(("use_", "enable")) else "1"


def test_every_published_key_is_handled() -> None:
    wrong = []
    for key in PUBLISHED:
        beside = BESIDE.get(key, BESIDE["critic"] if key.startswith("critic.") else [])
        args = [f"{key}={plausible(key)}", *beside]
        try:
            said = load_config(["model.path=m", *args])  # the types fit
        except ValueError as exc:
            wrong.append((key, str(exc)))
            continue
        if leaf_of(key) is None and not [n for n in said.notes if n.key == key]:
            wrong.append((key, "a key of verl's never passes in silence"))
    assert not wrong


def test_refusals_name_the_fix() -> None:
    rows = [row for row in key_rows().values() if row.action == "refused"]
    beside = {"critic": BESIDE["critic"]}
    said = {
        row.key: refusal(f"{row.key.replace('.*', '.x')}=something_else", *beside.get(row.key.split(".")[0], []))
        for row in rows
    }
    assert rows and not [row.key for row in rows if row.text not in said[row.key] or "\n" in said[row.key]]


OBJECTIVE = re.compile(
    r"loss|clip|coef|(^|[._])(lr|kl|eps|tau)([._]|$)|epoch|reward|adv|weight|mini_batch|temperature|top_|filter|ratio|beta|seed"
    r"|mask|norm|replay|quant|dtype|freeze|lora|sampl|correction|gamma|lam|distill|optim|warmup|decay|enable|mode"
)
HARMLESS = {
    "layout": r"(param|optimizer|grad)_offload|offload_fraction|layout: the actor's is that of all|where the \w+ live",
    "switched by another key": r"only read (with|by|beside)",
    "always on here": r"always|never|whenever|rows are packed",
    "chosen here": r"kernels are chosen here|attention is chosen|one seed|set model.gradient_checkpointing",
    "said elsewhere": r"read from rollout.n|micro-batches|in the order they were taken|when the algorithm needs it",
    "memory and speed": r"KV cache|scheduling|decided by pipeline|first come|weights wake first|go over inside",
    "its warm-up": r"the first update uses lr / \(warmup_steps \+ 1\)|constant after its warm-up|ends with the run",
    "of the critic": r"as the actor is|with the actor|packed by a token budget|in the same checkpoints",
    "elsewhere": r"one division|one pass per answer",
    "files and records": r"from the Hugging Face folder|kept in samples|read in place|no Ray|run directory|checkpoint",
    "not this model's": r"not trained|no NCCL|which is not in this version|which is refused",
    "evaluation": r"evaluation (runs|streams|scores)",
    "async": r"groups|staleness|one process|one loop|any number of turns|weights go by sync",
    "precision": r"float32|computes? (in model.dtype|as the model's own code says)|of the distribution drawn from",
    "other": r"one reward path here|stay in this process|continues its schedule|engines take tokens|the device serves",
}
"""The words that the reason in the table must contain for an ignored key with a name that sounds like the objective."""


def test_no_ignored_key_can_change_what_is_trained() -> None:
    """Every ignored row with a name that sounds like the objective has the reason why it is not. No row ignores a
    section with such keys, unless they have rows of their own above it."""
    reasons = re.compile("|".join(HARMLESS.values()))
    rows = [row for row in key_rows().values() if row.action == "ignored"]
    assert not [(r.key, r.text) for r in rows if OBJECTIVE.search(r.key) and not reasons.search(r.text)]
    owners = [f"actor_rollout_ref.{role}.{engine}" for role in ("actor", "ref") for engine in ("megatron", "veomni")]
    owners += ["critic.megatron", "critic.fsdp", "engine"]
    changing = {
        *(f"{owner}.{name}" for owner in owners for name in ("router_replay.mode", "qat.enable")),
        *(f"{ACTOR}policy_loss.{k}" for k in ("clip_cov_ratio", "kl_cov_ratio", "ppo_kl_coef", "dro_beta", "new")),
        *(f"critic.{k}" for k in ("ppo_epochs", "ppo_mini_batch_size", "loss_agg_mode", "enable", "cliprange", "new")),
        *(f"critic.optim.{k}" for k in ("lr", "betas", "weight_decay", "lr_scheduler_type", "clip_grad", "new")),
        *("critic.model.lora_rank", "critic.model.override_config.dropout", f"{ROLLOUT}quantization"),
        *(f"{ROLLOUT}engine_kwargs.vllm.{k}" for k in ("quantization", "hf_overrides", "kv_cache_dtype")),
        *(f"{ROLLOUT}multi_turn.{k}" for k in ("enable", "tool_config_path", "interaction_config_path")),
        *("algorithm.use_pf_ppo", "algorithm.pf_ppo.weight_pow", "reward.reward_model.enable", "distillation.enabled"),
        *("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.mtp.enable_train", f"{ACTOR}tau_pos"),
        f"{ACTOR}megatron.override_transformer_config.moe_aux_loss_coeff",
    }
    ignored = [key for key in sorted(changing) if (row := find_row(key)) is None or row.action == "ignored"]
    assert not ignored


def published_table() -> str:
    """Return the table of all published keys and their treatment, as in docs/from_verl.md. This file, run as a script,
    writes it there."""
    rows = [key_rows()[key] for key in PUBLISHED]
    ignored: dict[str, list[str]] = {}
    for row in rows:
        if row.action == "ignored":
            ignored.setdefault(row.text, []).append(f"`{row.key}`")
    becomes = {key: said.replace("|", "\\|") for key, _, said in keys_table()}
    lines = ["| mapped | here |", "|---|---|"]
    lines += [f"| `{r.key}` | {becomes[r.key]} |" for r in rows if r.action == "mapped"]
    lines += ["", "| ignored, because | keys |", "|---|---|"]
    lines += [f"| {text} | {' '.join(keys)} |" for text, keys in ignored.items()]
    lines += ["", "| refused | what to do |", "|---|---|"]
    lines += [f"| `{r.key}` | {becomes[r.key]} |" for r in rows if r.action == "refused"]
    return "\n".join(lines)


def test_the_page_holds_the_table_of_the_published_keys() -> None:
    before, after = "<!-- keys -->\n\n", "\n\n<!-- end of keys -->"
    found = PAGE.read_text().partition(before)[2].partition(after)[0]
    assert found == published_table(), "write it anew: python tests/unit/test_compat.py"


# -- a published command line ------------------------------------------------------------------------------------------


def test_a_multi_turn_script_becomes_our_section() -> None:
    script = [
        "enable=True",
        "tool_config_path=tools.yaml",
        "max_assistant_turns=5",
        "max_user_turns=3",
        "format=hermes",
    ]
    keys = [*(f"{ROLLOUT}multi_turn.{key}" for key in script), "data.tool_config_path=tools.yaml"]
    loop = f"{ROLLOUT}agent.default_agent_loop=tool_agent"
    agent = load_config(["model.path=m", *keys, loop, f"{ROLLOUT}agent.num_workers=4"], verl_defaults="rl").config.agent
    assert (agent.loop, agent.tools, agent.max_turns, agent.format) == ("tool_agent", ["tools.yaml"], 4, "hermes")
    assert (agent.max_parallel_calls, agent.max_tool_result_tokens) == (1, 256)


def test_published_grpo_script_becomes_our_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: True)  # as if wandb were installed
    resolved = load_config([*GRPO_SCRIPT, "rollout.engine=native"], verl_defaults="rl")
    c = resolved.config
    assert (c.step.prompts_per_step, c.step.samples_per_prompt, c.step.updates_per_step, c.step.epochs_per_step) == (
        1024,
        5,
        4,
        1,
    )
    assert (c.data.max_prompt_tokens, c.rollout.max_response_tokens, c.step.max_tokens_per_microbatch) == (
        1024,
        2048,
        24576,
    )
    assert c.data.train_files == ["/data/gsm8k/train.parquet"] and c.data.eval_files == ["/data/gsm8k/test.parquet"]
    assert c.model.path == "/models/qwen3-8b" and c.model.gradient_checkpointing
    a = c.algorithm.options
    kl = (a["kl_loss_coef"], a["kl_loss_form"], a["kl_reward_coef"])
    assert (c.algorithm.name, *kl, a["entropy_coef"]) == ("grpo", 0.001, "k3", 0.0, 0.0)
    assert [a[f"clip_{side}"] for side in ("low", "high", "dual")] == [0.2, 0.2, 3.0]
    assert (a["aggregation"], a["normalize_by_std"]) == ("token-mean", True)
    assert (c.optim.lr, c.optim.weight_decay, c.optim.betas, c.optim.clip_grad_norm) == (1e-6, 0.01, [0.9, 0.999], 1.0)
    assert (c.run.name, c.track.project, c.track.sinks) == ("qwen3_8b", "verl_grpo", ["console", "wandb"])
    assert (c.run.save_every_steps, c.run.eval_every_steps, c.run.eval_before, c.run.eval_after) == (20, 5, False, True)
    assert (c.run.total_epochs, c.rollout.engine, c.eval.temperature) == (15, "native", 0.0)
    assert resolved.origins["step.samples_per_prompt"] == "verl key actor_rollout_ref.rollout.n=5"
    assert "ppo_mini_batch_size=256" in resolved.origins["step.updates_per_step"]
    assert resolved.origins["algorithm.clip_dual"] == "verl's default"
    assert resolved.origins["rollout.engine"] == "command line"
    assert {n.key for n in resolved.notes} == {a.partition("=")[0] for a in GRPO_SCRIPT} - {
        "data.train_files",
        "data.filter_overlong_prompts",
        "data.truncation",
    }


def test_layout_is_one_line_in_the_notes() -> None:
    text = render_notes(translate([*GRPO_SCRIPT, "rollout.engine=native"]).notes)
    (line,) = [line for line in text.splitlines() if "layout: the actor's is that of all" in line]
    assert all(k in line for k in ("trainer.n_gpus_per_node=8", "trainer.nnodes=1"))
    (line,) = [line for line in text.splitlines() if "rollout.engine=native has no such choice" in line]
    assert all(k in line for k in ("rollout.tensor_model_parallel_size=2", "rollout.gpu_memory_utilization="))
    assert "actor_rollout_ref.rollout.n=5 -> step.samples_per_prompt=5" in text


def test_verl_defaults_are_below_the_recipe_and_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("step: {prompts_per_step: 64}\nalgorithm: {clip_dual: null, aggregation: token-sum}\n")
    args = [
        f"recipe={recipe}",
        "model.path=m",
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}ppo_mini_batch_size=16",
        f"{ACTOR}clip_ratio_high=0.28",
    ]
    c = load_config(args, verl_defaults="rl").config
    assert (c.step.prompts_per_step, c.step.updates_per_step) == (64, 4)
    a = c.algorithm.given()
    assert (a["aggregation"], a.get("clip_dual"), a["clip_low"], a["clip_high"]) == ("token-sum", None, 0.2, 0.28)


def test_verl_default_estimator_is_ppo_with_verls_own_values() -> None:
    c = load_config(["model.path=m"], verl_defaults="rl").config
    keys = ("gamma", "lam", "value_clip", "kl_reward_coef", "critic_warmup_steps")
    assert c.algorithm.name == "ppo"
    assert [c.algorithm.options[key] for key in keys] == [1.0, 1.0, 0.5, 0.0, 0]
    given = [
        "model.path=m",
        "critic.model.path=rm",
        "critic.optim.lr=2e-6",
        "trainer.critic_warmup=5",
        "algorithm.adv_estimator=gae",
    ]
    c = load_config(given, verl_defaults="rl").config
    assert (c.critic.path, c.critic.lr, c.algorithm.options["critic_warmup_steps"]) == ("rm", 2e-6, 5)
    with pytest.raises(ValueError, match="critic.*adv_estimator=gae"):
        translate(["critic.model.path=m"])
    translate(["critic.model.path=m", "algorithm.adv_estimator=grpo"])


def test_sft_script() -> None:
    args = shlex.split("""model.path=/m data.train_files=/d/train.parquet data.messages_key=messages
    data.train_batch_size=32
    data.micro_batch_size_per_gpu=4 data.max_length=2048 data.max_token_len_per_gpu=8192 data.use_dynamic_bsz=True
    data.pad_mode=no_padding data.truncation=error optim.lr=2e-5 optim.lr_warmup_steps_ratio=0.1
    optim.lr_decay_style=cosine optim.min_lr=2e-6
    optim.betas=[0.9,0.95] optim.clip_grad=0.5 engine=fsdp engine.ulysses_sequence_parallel_size=2
    trainer.total_epochs=2 trainer.logger=console trainer.experiment_name=s trainer.default_local_dir=/ck/s""")
    c = load_config(args, verl_defaults="sft").config
    assert (c.step.prompts_per_step, c.data.max_tokens_per_row) == (32, 2048)
    assert c.step.max_tokens_per_microbatch == 16384, "8192 for each of two devices that share a sequence"
    assert (c.optim.lr, c.optim.warmup_ratio, c.optim.schedule, c.optim.clip_grad_norm) == (2e-5, 0.1, "cosine", 0.5)
    assert c.optim.min_lr_ratio == pytest.approx(0.1) and c.optim.betas == [0.9, 0.95]
    assert (c.run.root_dir, c.run.name, c.run.total_epochs, c.run.seed) == ("/ck", "s", 2, 1)


# -- values ------------------------------------------------------------------------------------------------------------

HARMLESS_OF_ENGINES = [
    *("mindspeed.tensor_model_parallel_size=4", "mindspeed.grad_offload=True", "mindspeed.use_mbridge=True"),
    *("mindspeed.llm_kwargs.spec=[a.b,c]", "mindspeed.llm_kwargs.recompute_method=block"),
    *("automodel_config.ep_size=8", "automodel_config.backend_config.attn=te", "automodel_config.model_dtype=bf16"),
    *("megatron.override_transformer_config.normalization=RMSNorm",),
    *("megatron.override_transformer_config.position_embedding_type=rope",),
    *("megatron.override_transformer_config.use_fused_rmsnorm=True",),
    *("megatron.override_transformer_config.mtp_num_layers=null",),
]
"""Keys of other model engines at values that change nothing of what is trained."""
TRANSFORMS = [
    ([f"{ROLLOUT}top_k=-1"], {"rollout.top_k": 0}),
    ([f"{ROLLOUT}val_kwargs.top_k=20"], {"eval.top_k": 20}),
    ([f"{ROLLOUT}quantization=fp8"], {"rollout.dtype": "fp8"}),
    (["trainer.save_freq=-1"], {"run.save_every_steps": 0}),
    (["trainer.test_freq=-1"], {"run.eval_every_steps": 0, "run.eval_after": False}),
    (["data.train_max_samples=-1"], {"data.max_rows": None}),
    (["trainer.total_training_steps=null"], {"run.total_steps": None}),
    (
        ["data.train_batch_size=8", f"{ACTOR}ppo_mini_batch_size=8"],
        {"step.prompts_per_step": 8, "step.updates_per_step": 1},
    ),
    (
        [
            "data.train_batch_size=0",
            f"{ACTOR}ppo_mini_batch_size=32",
            "async_training.require_batches=4",
            "rollout.total_rollout_steps=1280",
        ],
        {"step.prompts_per_step": 128, "step.updates_per_step": 4, "run.total_steps": 10},
    ),
    ([f"{ACTOR}use_kl_loss=False", f"{ACTOR}kl_loss_coef=0.001"], {"algorithm.kl_loss_coef": 0.0}),
    ([f"{ACTOR}kl_loss_coef=0.001"], {"algorithm.kl_loss_coef": 0.0}),
    ([f"{ACTOR}use_kl_loss=True"], {"algorithm.kl_loss_coef": 0.001, "algorithm.kl_loss_form": "k3"}),
    (
        [f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_type='mse+'", f"{ACTOR}kl_loss_coef=0.1"],
        {"algorithm.kl_loss_coef": 0.1, "algorithm.kl_loss_form": "k2+"},
    ),
    (
        ["algorithm.use_kl_in_reward=True"],
        {
            "algorithm.kl_reward_coef": 0.001,
            "algorithm.kl_reward_form": "k1",
            "algorithm.kl_reward_target": None,
            "algorithm.kl_reward_horizon": None,
        },
    ),
    (
        ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=6"],
        {
            "algorithm.kl_reward_coef": 0.001,
            "algorithm.kl_reward_form": "k1",
            "algorithm.kl_reward_target": 6,
            "algorithm.kl_reward_horizon": 10000,
        },
    ),
    (["algorithm.kl_ctrl.kl_coef=0.1"], {"algorithm.kl_reward_coef": 0.0}),
    ([f"{ACTOR}clip_ratio=0.1"], {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
    ([f"{ACTOR}clip_ratio=0.2", f"{ACTOR}clip_ratio_low=0.2"], {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}),
    (["algorithm.adv_estimator=grpo", f"{ACTOR}policy_loss.loss_mode=gspo"], {"algorithm.name": "gspo"}),
    (
        ["algorithm.adv_estimator=grpo", f"{ACTOR}policy_loss.loss_mode=gspo", f"{ACTOR}loss_agg_mode=token-mean"],
        {"algorithm.name": "gspo", "algorithm.aggregation": "token-mean"},
    ),
    (
        ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"],
        {"algorithm.name": "grpo", "algorithm.normalize_by_std": False},
    ),
    (["algorithm.adv_estimator=rloo"], {"algorithm.name": "rloo", "algorithm.loss": "ppo_clip"}),
    ([f"{ROLLOUT}val_kwargs.do_sample=False"], {"eval.temperature": 0.0}),
    ([f"{ROLLOUT}val_kwargs.do_sample=True", f"{ROLLOUT}val_kwargs.temperature=0.7"], {"eval.temperature": 0.7}),
    (
        [f"{ACTOR}optim.lr_warmup_steps=-1", f"{ACTOR}optim.lr_warmup_steps_ratio=0.05"],
        {"optim.warmup_steps": 0, "optim.warmup_ratio": 0.05},
    ),
    (
        [f"{ACTOR}optim.lr_warmup_steps=10", f"{ACTOR}optim.lr_warmup_steps_ratio=0.05"],
        {"optim.warmup_steps": 10, "optim.warmup_ratio": 0.0},
    ),
    (
        [
            "reward.reward_kwargs.overlong_buffer_cfg.enable=True",
            "reward.reward_kwargs.overlong_buffer_cfg.len=512",
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            "reward.reward_kwargs.max_resp_len=2048",
            "data.max_response_length=2048",
        ],
        {"reward.overlong_buffer_tokens": 512, "reward.overlong_penalty": 0.5, "rollout.max_response_tokens": 2048},
    ),
    (
        [
            "reward.reward_kwargs.overlong_buffer_cfg.enable=True",
            "reward.reward_kwargs.overlong_buffer_cfg.len=5",
            "reward.reward_kwargs.max_resp_len=100",
            "data.max_response_length=200",
        ],
        {
            "reward.overlong_buffer_tokens": 5,
            "reward.overlong_penalty": 1.0,
            "rollout.max_response_tokens": 200,
            "algorithm.options.overlong_tokens": 100,
            "algorithm.options.overlong_cap": False,
        },
    ),
    (
        [
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable=False",
            "reward_model.reward_kwargs.overlong_buffer_cfg.len=512",
        ],
        {"reward.overlong_buffer_tokens": 0},
    ),
    (["+custom_reward_function.reward_kwargs.scale=2"], {"reward.kwargs.scale": 2}),
    (["reward.custom_reward_function.path=null"], {}),
    (["custom_reward_function.path=f.py", "custom_reward_function.name=score"], {"reward.path": "f.py:score"}),
    (["reward.custom_reward_function.path=pkg://a.b"], {"reward.path": "pkg://a.b"}),
    (["reward.custom_reward_function.name=score"], {}),
    (["trainer.resume_mode=disable"], {"run.resume": "never"}),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/ck/step_3"], {"run.resume": "/ck/step_3"}),
    (["trainer.logger=['console','mlflow','file']"], {"track.sinks": ["console", "jsonl"]}),
    (["trainer.default_local_dir=/ck/p/e", "trainer.experiment_name=e"], {"run.root_dir": "/ck/p", "run.name": "e"}),
    (["trainer.default_local_dir=/ck", "trainer.experiment_name=e"], {"run.root_dir": "/ck", "run.name": "e"}),
    (
        ["trainer.default_local_dir=ck/${trainer.project_name}", "trainer.project_name=p"],
        {"track.project": "p", "run.root_dir": "ck", "run.name": "p"},
    ),
    (
        [
            "async_training.staleness_threshold=0.5",
            "async_training.trigger_parameter_sync_step=4",
            "async_training.partial_rollout=True",
            "rollout.test_freq=5",
        ],
        {
            "pipeline.staleness": 0.5,
            "pipeline.sync_every": 4,
            "pipeline.partial_rollout": True,
            "run.eval_every_steps": 20,
            "run.eval_after": True,
        },
    ),
    (
        ["async_training.staleness_threshold=0", "async_training.partial_rollout=True"],
        {"pipeline.staleness": 0, "pipeline.partial_rollout": False},
    ),
    (
        [
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.parameter_sync_step=4",
            "data.train_batch_size=64",
            f"{ACTOR}ppo_mini_batch_size=16",
            "trainer.v1.sampler.max_off_policy_threshold=8",
        ],
        {
            "step.prompts_per_step": 64,
            "step.updates_per_step": 4,
            "pipeline.staleness": 1,
            "pipeline.partial_rollout": True,
        },
    ),
    (["trainer.v1.trainer_mode=sync"], {"pipeline.staleness": 0}),
    (
        [
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=acc",
            "algorithm.filter_groups.max_num_gen_batches=10",
        ],
        {
            "algorithm.filter_groups": True,
            "algorithm.on_exhausted": "stop",
            "algorithm.filter_metric": "acc",
            "algorithm.max_draws_per_group": 10.0,
        },
    ),
    (
        [
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=seq_reward",
            "data.gen_batch_size=96",
            "data.train_batch_size=32",
            "algorithm.filter_groups.max_num_gen_batches=4",
        ],
        {
            "step.prompts_per_step": 32,
            "algorithm.filter_groups": True,
            "algorithm.on_exhausted": "stop",
            "algorithm.filter_metric": None,
            "algorithm.max_draws_per_group": 12.0,
        },
    ),
    (
        ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=max_min"],
        {"algorithm.name": "ppo", "algorithm.options.selection": "max_min", "algorithm.options.weight_pow": 2.0},
    ),
    (["algorithm.use_pf_ppo=False", "algorithm.pf_ppo.weight_pow=3.0"], {}),
    (
        [
            "algorithm.adv_estimator=grpo",
            f"{ACTOR}policy_loss.loss_mode=kl_cov",
            f"{ACTOR}policy_loss.kl_cov_ratio=0.02",
            f"{ACTOR}policy_loss.clip_cov_ub=9.0",
        ],
        {"algorithm.name": "kl_cov", "algorithm.options.cov_ratio": 0.02, "algorithm.options.cov_coef": 0.1},
    ),
    (
        [
            "algorithm.adv_estimator=grpo",
            f"{ACTOR}policy_loss.loss_mode=clip_cov",
            f"{ACTOR}policy_loss.clip_cov_lb=2.0",
        ],
        {
            "algorithm.name": "clip_cov",
            "algorithm.options.cov_ratio": 0.0002,
            "algorithm.options.cov_low": 2.0,
            "algorithm.options.cov_high": 5.0,
        },
    ),
    (
        [f"{ACTOR}tau_pos=0.9", f"{ACTOR}tau_neg=1.1"],
        {"algorithm.options.tau_positive": 0.9, "algorithm.options.tau_negative": 1.1},
    ),
    ([f"{ACTOR}use_rollout_log_probs=True"], {"algorithm.bypass": True}),
    ([f"{ACTOR}use_rollout_log_probs=False"], {}),
    (
        [
            "algorithm.adv_estimator=rloo",
            "algorithm.rollout_correction.bypass_mode=True",
            "algorithm.rollout_correction.loss_type=reinforce",
            "algorithm.rollout_correction.rollout_is=token",
        ],
        {
            "algorithm.name": "rloo",
            "algorithm.loss": "reinforce",
            "algorithm.bypass": True,
            "algorithm.correction": "truncate",
            "algorithm.options.correction_level": "token",
            "algorithm.options.correction_high": 2.0,
            "algorithm.options.correction_batch_normalize": False,
        },
    ),
    (
        [f"{ACTOR}optim.lr_scheduler_type=wsd", f"{ACTOR}optim.lr_wsd_stable_steps_ratio=0.75"],
        {"optim.schedule": "wsd", "optim.decay_ratio": 0.25},
    ),
    (["reward.reward_manager.name=gdpo"], {}),
    (["reward.reward_model.enable=True", "reward.reward_model.model_path=rm"], {"reward.model": "rm"}),
    (["reward_model.enable=True", "reward_model.model.path=rm"], {"reward.model": "rm"}),
    (["reward_model.enable=False", "reward_model.model.path=rm"], {}),
    (
        [
            *("algorithm.adv_estimator=gae", "critic.optim.lr_warmup_steps=7", "critic.ppo_epochs=1"),
            *("data.train_batch_size=64", f"{ACTOR}ppo_mini_batch_size=16", "critic.ppo_mini_batch_size=16"),
            *("critic.enable=True", "critic.strategy=megatron", "critic.fsdp.param_offload=True"),
        ],
        {"algorithm.name": "ppo", "critic.warmup_steps": 7, "step.prompts_per_step": 64, "step.updates_per_step": 4},
    ),
    (["trainer.device=npu"], {"model.device": "auto"}),
    (["trainer.device=gpu", f"{ACTOR}model_engine=megatron"], {"model.device": "auto", "model.engine": "megatron"}),
    (
        [f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=2048"],
        {
            "algorithm.aggregation": "seq-mean-token-sum-norm",
            "algorithm.horizon_tokens": 2048,
            "rollout.max_response_tokens": 2048,
        },
    ),
    (
        [f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor=100"],
        {"algorithm.aggregation": "seq-mean-token-sum-norm", "algorithm.horizon_tokens": 100},
    ),
    (["engine.override_transformer_config.attention_backend=auto"], {}),
    (
        [f"{ACTOR}ppo_max_token_len_per_gpu=4096", f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size=4"],
        {"step.max_tokens_per_microbatch": 16384},
    ),
    (
        ["data.max_prompt_length=2048", "data.max_response_length=8192", f"{ACTOR}ppo_max_token_len_per_gpu=4096"],
        {"data.max_prompt_tokens": 2048, "rollout.max_response_tokens": 8192, "step.max_tokens_per_microbatch": 10240},
    ),
    ([f"{ACTOR}fsdp_config.model_dtype=bf16"], {}),  # of the masters, which stay float32 here
    ([f"{ACTOR}fsdp_config.dtype=float32"], {"model.dtype": "float32"}),
    ([f"{ACTOR}policy_loss.tau_neg=1.2"], {"algorithm.options.tau_negative": 1.2}),
    (["trainer.test_freq=after_each_epoch"], {"run.eval_every_steps": 0, "run.eval_after": True}),
    (["rollout.total_epochs=3"], {"run.total_epochs": 3}),
    ([f"{ACTOR}optim.lr_decay_style=constant", f"{ACTOR}optim.lr_decay_steps=99"], {"optim.schedule": "constant"}),
    ([f"{ACTOR}{key}" for key in HARMLESS_OF_ENGINES], {}),
    (
        ["actor_rollout_ref.model.override_config.resid_pdrop=0.", "reward_model.overlong_buffer.enable=False"],
        {"reward.overlong_buffer_tokens": 0},
    ),
    (
        ["reward_model.enable=True", "reward_model.model_path=rm", "reward_model.inference.name=x"],
        {"reward.model": "rm"},
    ),
    *(
        (
            [f"{of}.overlong_buffer.{key}" for key in ("enable=True", "len=512", "penalty_factor=0.5")],
            {"reward.overlong_buffer_tokens": 512, "reward.overlong_penalty": 0.5},
        )
        for of in ("reward_model", "custom_reward_function")
    ),
    ([f"{ACTOR}use_token_level_loss=True"], {"algorithm.aggregation": "token-mean"}),
    ([f"{ACTOR}use_token_level_loss=False"], {"algorithm.aggregation": "seq-mean-token-mean"}),
    (
        ["algorithm.adv_estimator=gae", "critic.optim.lr_warmup_steps_ratio=0.05"],
        {"algorithm.name": "ppo", "critic.warmup_steps": 0, "critic.warmup_ratio": 0.05},
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.optim.lr_warmup_steps_ratio=0.05", "critic.optim.lr_warmup_steps=3"],
        {"algorithm.name": "ppo", "critic.warmup_steps": 3, "critic.warmup_ratio": 0.0},
    ),
    (["algorithm.adv_estimator=grpo", "critic.optim.lr_warmup_steps_ratio=0.05"], {"algorithm.name": "grpo"}),
    (["trainer.test_freq=False"], {"run.eval_every_steps": 0, "run.eval_after": False}),
    (
        [f"{ACTOR}strategy=fsdp_turbo", f"{ACTOR}fsdp_config.turbo_config.memory.recompute=True"],
        {"model.engine": "torch"},
    ),
    (["data.response_key=response", "use_remove_padding=True"], {}),
    (["data.multiturn.tools_key=t"], {"data.tools_key": "t"}),
    (["data.max_token_len_per_gpu=10", "ulysses_sequence_parallel_size=4"], {"step.max_tokens_per_microbatch": 40}),
    (
        [
            f"{ACTOR}megatron.context_parallel_size=2",
            f"{ACTOR}megatron.override_transformer_config.context_parallel_size=2",
        ],
        {},
    ),
]


def test_values_mean_what_they_mean_in_verl() -> None:
    found = [(args, overrides_of(*args), expected) for args, expected in TRANSFORMS]
    assert not [(args, got, expected) for args, got, expected in found if got != expected]


REFUSALS = [
    (
        [
            f"{ACTOR}megatron.context_parallel_size=2",
            f"{ACTOR}megatron.override_transformer_config.context_parallel_size=4",
        ],
        "write it there",
    ),
    ([f"{ACTOR}use_token_level_loss=True", f"{ACTOR}loss_agg_mode=seq-mean-token-mean"], "contradict"),
    (["reward_model.overlong_buffer.enable=True"], "overlong_buffer.len"),
    (["reward_model.enable=True", "reward_model.model_path=a", "reward_model.model.path=b"], "contradict"),
    (["reward_model.enable=True", "reward_model.model.path=a", "reward_model.model.update=before"], "PRIME"),
    (["reward_model.rm_mode=generator"], "generat"),
    (["data.filter_accuracy=True"], "algorithm.filter_groups"),
    (["data.response_dict_keys=[answer]"], "{prompt, response}"),
    ([f"{ROLLOUT}agent.custom_agent_loop_loader=a.b"], "agent.loop=FILE.py:Class"),
    (["trainer.test_freq=True"], "expected a number"),
    ([f"{ROLLOUT}name=vllm", "rollout.fallback=none"], "refuses the native engine"),
    ([f"{ROLLOUT}name=mine"], "there are hf, native, vllm, sglang, trtllm"),
    (["model_engine=mine"], "no model engine of the public project"),
    ([f"{ACTOR}clip_ratio=0.3", f"{ACTOR}clip_ratio_low=0.2"], "contradict"),
    ([f"{ACTOR}clip_ratio=0.3", f"{ACTOR}clip_ratio_high=0.28"], "contradict"),
    (["data.train_batch_size=100", f"{ACTOR}ppo_mini_batch_size=64"], "does not divide the 100 prompts"),
    (["data.train_batch_size=64", f"{ACTOR}ppo_mini_batch_size=128"], "does not divide the 64 prompts"),
    ([f"{ACTOR}ppo_mini_batch_size=64"], "counts prompts"),
    (["data.max_prompt_length=512", f"{ROLLOUT}prompt_length=1024"], "contradicts"),
    (
        ["data.max_prompt_length=512", "data.max_response_length=512", f"{ROLLOUT}max_model_len=1000"],
        "holds no prompt of 512",
    ),
    ([f"{ROLLOUT}val_kwargs.do_sample=False", f"{ROLLOUT}val_kwargs.temperature=1.0"], "leave one of them out"),
    (["reward.reward_kwargs.overlong_buffer_cfg.enable=True"], "overlong_buffer_cfg.len"),
    (["algorithm.adv_estimator=mine"], "not in this version"),
    (["algorithm.adv_estimator=rloo", f"{ACTOR}policy_loss.loss_mode=mine"], "module:function"),
    (["algorithm.rollout_correction.rollout_is=word"], "there are token, sequence"),
    (
        ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=x"],
        "LOW_HIGH",
    ),
    (["algorithm.rollout_correction.rollout_rs=token_k1"], "rollout_rs_threshold"),
    ([f"{ACTOR}policy_loss.loss_mode=gspo"], "adv_estimator=grpo"),
    ([f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_type=full"], "not in this version"),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=pid"], "there are fixed, adaptive"),
    (["optim.min_lr=1e-7"], "give optim.lr"),
    ([f"{ACTOR}optim.lr_scheduler_type=step"], "there are constant, linear, cosine, wsd"),
    (["trainer.resume_mode=resume_path"], "resume_from_path"),
    (["trainer.resume_mode=never"], "there are auto, disable, resume_path"),
    (
        [
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.parameter_sync_step=2",
            "data.train_batch_size=64",
            f"{ACTOR}ppo_mini_batch_size=16",
        ],
        "train_batch_size / ppo_mini_batch_size = 4",
    ),
    (["trainer.v1.trainer_mode=separate_async", "async_training.staleness_threshold=0.5"], "contradict"),
    (
        [
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.num_warmup_batches=3",
            "trainer.v1.sampler.max_off_policy_threshold=2",
        ],
        "below the staleness",
    ),
    ([f"{ACTOR}megatron.dtype=float16"], "bfloat16 or float32"),
    ([f"{ACTOR}use_kl_loss=1"], "True or False"),
    (["data.train_batch_size=many"], "expected a number"),
    (["trainer.device=tpu"], "cpu and cuda"),
    (
        [
            *("algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=True"),
            f"{ACTOR}policy_loss.loss_mode=gspo",
        ],
        "leave one of them out",
    ),
    ([f"{ACTOR}megatron.router_replay.mode=R2"], "only R3 is supported; set R3"),
    (
        [f"{ACTOR}router_replay.mode=R3", f"{ROLLOUT}name=hf"],
        "=R3: rollout.engine=hf records no routes; set rollout.engine",
    ),
    ([f"{ACTOR}router_replay.mode=R3", "rollout.engine=vllm"], "=R3: rollout.engine=vllm records no routes"),
    (["actor_rollout_ref.ref.veomni.router_replay.mode=R3"], "only the policy is trained with the routes"),
    (
        ["model_engine=veomni", f"{ACTOR}veomni.router_replay.mode=R3"],
        "router replay with model.engine=veomni is not here; set model.engine=torch or sharded or megatron",
    ),
    (["engine.qat.enable=True"], "quantisation-aware"),
    ([f"{ROLLOUT}quantization=fp8", f"{ROLLOUT}dtype=bfloat16"], "both set rollout.dtype; leave one out"),
    ([f"{ROLLOUT}engine_kwargs.vllm.quantization=fp8"], "the trainer quantises weights (rollout.quantization=fp8)"),
    ([f"{ROLLOUT}multi_turn.interaction_config_path=i.yaml"], "interactions are not"),
    ([f"{ROLLOUT}multi_turn.format=morse"], "agent.format"),
    ([f"{ROLLOUT}multi_turn.tool_response_truncate_side=left"], "loses its middle"),
    ([f"{ROLLOUT}agent.default_agent_loop=mine"], "FILE.py:Class"),
    ([f"{ACTOR}policy_loss.dro_beta=0.1"], "not in this version"),
    (["algorithm.adv_estimator=grpo", f"{ACTOR}policy_loss.loss_mode=nothing"], "not in this version"),
    (["algorithm.adv_estimator=gae", "critic.ppo_epochs=4"], "follows the actor here (ppo_epochs=1)"),
    (
        [
            *("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=64"),
            *("data.train_batch_size=256", f"{ACTOR}ppo_mini_batch_size=256"),
        ],
        "ppo_mini_batch_size=256",
    ),
    (["algorithm.adv_estimator=gae", "critic.loss_agg_mode=seq-mean-token-mean"], "mean over tokens"),
    (["algorithm.adv_estimator=gae", f"{ACTOR}loss_agg_mode=seq-mean-token-mean"], "mean over tokens"),
    (["algorithm.adv_estimator=gae", "critic.enable=False"], "reads its values"),
    (["algorithm.adv_estimator=gae", "critic.optim.lr_scheduler_type=cosine"], "constant after its warm-up"),
    (["algorithm.adv_estimator=gae", "critic.optim.betas=[0.5,0.6]"], "optim.betas"),
    (["algorithm.adv_estimator=gae", "critic.anything=1"], "follows the actor here"),
    (["reward.reward_model.enable=True"], "reward.model=FOLDER"),
    (
        [
            *("reward.reward_model.enable=True", "reward.reward_model.model_path=rm"),
            "reward.custom_reward_function.path=f.py",
        ],
        "at an address",
    ),
    (["trainer.default_local_dir=${data.custom}/x"], "not given on this command line"),
    (["trainer.test_freq=often"], "expected a number, or after_each_epoch"),
    (["optim.lr_decay_style=cosine", "optim.lr_decay_steps=99"], "the schedule ends with the run"),
    ([f"{ACTOR}mindspeed.llm_kwargs.hidden_dropout=0.1"], "MindSpeed-LLM"),
    (["model.mtp.enable=True"], "multi-token prediction"),
    (["data.continuous_token.enable=True"], "later version"),
    (["remote_backend=other"], "another service"),
    (["actor_rollout_ref.model.override_config.attention_dropout=0.1"], "nothing is dropped"),
    (["algorithm.rollout_correction.use_policy_gradient=true"], "loss_type=reinforce"),
    (["algorithm.rollout_correction.rollout_token_veto_threshold=1e-4"], "older verl"),
    *(
        ([f"engine.override_transformer_config.{key}"], reason)
        for key, reason in (
            ("normalization=LayerNorm", "the model's own code"),
            ("position_embedding_type=mrope", "the model's own code"),
            ("mtp_num_layers=2", "multi-token prediction"),
            ("dsa_indexer_loss_coeff=0.1", "indexer's loss"),
            ("moe_router_bias_update_rate=0.001", "router's bias"),
        )
    ),
]


def test_contradictions_and_refusals_say_the_fix() -> None:
    said = [(args, refusal(*args), reason) for args, reason in REFUSALS]
    assert not [(args, got) for args, got, reason in said if reason not in got or "\n" in got]


def test_the_positions_of_a_model_are_what_its_folder_says(tmp_path: Path) -> None:
    """Fewer positions than the folder has change nothing; with more the model would be another one."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 32768}')
    args = [f"actor_rollout_ref.model.path={tmp_path}", "data.max_prompt_length=8"]
    for key in ("max_position_embeddings", "model_config.max_position_embeddings"):
        key = f"actor_rollout_ref.model.override_config.{key}"
        assert refusal(*args, f"{key}=32768") == refusal(*args, f"{key}=4096") == ""
        assert f"{key}=65536: {tmp_path} has 32768; edit config.json" in refusal(*args, f"{key}=65536")


def test_an_interpolation_may_name_a_key_that_has_verls_default() -> None:
    assert overrides_of("trainer.default_local_dir=${trainer.project_name}/x")["run.root_dir"] == "verl_examples"


def test_all_faults_of_a_command_line_are_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        load_config(
            [
                *("run@x.seed=1", "run.seed", "nothing.like.it=3", "run.total_steps=many", f"{ROLLOUT}n=two"),
                *("actor_rollout_ref.model.lora_rank=32", "distillation.enabled=True", "model.path=/no/where"),
                *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.top_p=0.9", "data.train_files=none.jsonl"),
            ],
            verl_defaults="rl",
        )
    said = str(caught.value)
    wanted = ("run@x.seed", "'run.seed' is not", "nothing.like.it", "run.total_steps=many", f"{ROLLOUT}n=two")
    wanted += ("distillation", "/no/where", "top_p", "none.jsonl")
    assert not [word for word in wanted if word not in said], said
    assert len(set(said.splitlines())) == len(said.splitlines())


# -- both vocabularies -------------------------------------------------------------------------------------------------


def test_a_key_of_ours_wins_over_one_of_verls() -> None:
    said = translate(
        [
            f"{ROLLOUT}name=vllm",
            "rollout.engine=native",
            "step.samples_per_prompt=4",
            f"{ROLLOUT}n=8",
            "data.train_batch_size=64",
            "step.prompts_per_step=32",
            f"{ACTOR}ppo_mini_batch_size=8",
        ]
    )
    values = {setting.key: setting.value for setting in said.settings}
    assert (values["rollout.engine"], values["step.samples_per_prompt"]) == ("native", 4)
    assert (values["step.prompts_per_step"], values["step.updates_per_step"]) == (32, 4)
    assert {n.key: n.text for n in said.notes if n.action == "ignored"} == {
        f"{ROLLOUT}name": "rollout.engine is given",
        f"{ROLLOUT}n": "step.samples_per_prompt is given",
    }


def test_plus_is_accepted_and_the_last_of_two_equal_keys_counts() -> None:
    assert overrides_of(f"+{ROLLOUT}n=4", f"++{ROLLOUT}n=8") == {"step.samples_per_prompt": 8}


TYPOS = [
    ("rollout.temprature", "rollout.temperature"),
    ("step.prompt_per_step", "step.prompts_per_step"),
    ("samples_per_prompt", "step.samples_per_prompt"),
    ("data.train_batchsize", "data.train_batch_size"),
    ("actor_rollout_ref.actor.ppo_mini_batchsize", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    ("actor_rollout_ref.rollout.nn", "actor_rollout_ref.rollout.n"),
    ("trainer.total_epoch", "trainer.total_epochs"),
    ("optim.learning_rate_warmup_steps", "optim.warmup_steps"),
    ("lr", "optim.lr"),
    ("rollout.max_kv_token", "rollout.engine_options.max_kv_tokens"),
]


def test_unknown_keys_name_the_nearest_of_both_vocabularies() -> None:
    said = {typo: refusal(f"{typo}=1") for typo, _ in TYPOS}
    right = {typo: f"unknown key '{typo}': did you mean .*{re.escape(meant)}" for typo, meant in TYPOS}
    assert not [text for typo, text in said.items() if not re.search(right[typo], text)]


def test_a_sequence_ratio_keeps_its_mean_over_answers_where_none_is_said() -> None:
    """verl's newer trainers fix it for these losses; by the older ones' default a script ran something else."""
    for mode, expected in (("gspo", None), ("geo_mean", None), ("sapo", None), ("cispo", "token-mean")):
        args = ["model.path=/m", "algorithm.adv_estimator=grpo", f"{ACTOR}policy_loss.loss_mode={mode}"]
        found = load_config(args, verl_defaults="rl").config.algorithm.options
        assert found.get("aggregation") == expected, mode


def test_dppos_cap_is_verls_clip_ratio_c() -> None:
    for more, cap in (([], 3.0), ([f"{ACTOR}clip_ratio_c=10"], 10.0)):
        args = ["model.path=/m", "algorithm.adv_estimator=grpo", f"{ACTOR}policy_loss.loss_mode=dppo_tv", *more]
        assert load_config(args, verl_defaults="rl").config.algorithm.options["ratio_max"] == cap


def test_values_of_ignored_keys_need_not_be_readable() -> None:
    (note,) = translate(["ray_kwargs.ray_init.runtime_env.py_executable=uv run --with 'x[y]>1' (z"]).notes
    assert note.action == "ignored"


NOT_TAKEN = [
    ("~run.seed", "cannot be deleted"),
    ("--config-name=x", "no such file"),
    ("--multirun", "--config-name are taken"),
    ("run.seed", "not key=value"),
    ("run.seed=1,2", r"run.seed=\[1,2\]"),
    ("run.name='x", "quote the value"),
    ("run@x.seed=1", "unknown key"),
    ("actor@actor_rollout_ref.actor=my_actor", "write its keys"),
]


def test_hydra_forms_that_are_not_taken() -> None:
    assert not [(a, refusal(a)) for a, reason in NOT_TAKEN if not re.search(reason, refusal(a))]


def test_hydras_own_ways_of_saying_keys(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_megatron_trainer, _self_]\nhydra: {searchpath: [x]}\n"
        "data: {train_batch_size: 64}\nactor_rollout_ref: {rollout: {n: 4, name: sglang}, "
        "actor: {ppo_mini_batch_size: 8}}\n"
        "reward: {custom_reward_function: {reward_kwargs: {scale: 2}}}\n"
    )
    args = [f"--config-path={tmp_path}", "--config-name", "mine", "data.train_batch_size=32"]
    found = overrides_of(*args, "algorithm.rollout_correction={rollout_is:token,rollout_is_threshold:3.0}")
    assert (found["step.prompts_per_step"], found["step.updates_per_step"], found["step.samples_per_prompt"]) == (
        32,
        4,
        4,
    )
    assert (found["model.engine"], found["rollout.engine"], found["reward.kwargs.scale"]) == ("megatron", "native", 2)
    assert found["algorithm.options.correction_high"] == 3.0
    groups = ["model=hf_model", "optim=megatron", "engine=megatron", "actor@actor_rollout_ref.actor=megatron_actor"]
    assert overrides_of("--config-path=config", "--config-name=ppo_trainer.yaml", *groups) == {
        "model.engine": "megatron"
    }


def test_a_word_of_hydras_may_be_the_name_of_a_section_of_ours(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("data: {train_batch_size: 64}\n")
    line = read_line(["--config-name", "data", "run.seed=1", "--config-path", "run.seed", "data"])
    assert line.rest == ["--config-name", "data", "--config-path", "run.seed", "data"] and not line.faults
    given = ["model.path=m", "data.train_files=[f]", f"--config-path={tmp_path}", "--config-name", "data"]
    assert load_config(given).config.step.prompts_per_step == 64


def test_a_config_path_alone_reads_the_file_that_the_entry_point_names(tmp_path: Path) -> None:
    (tmp_path / "ppo_trainer.yaml").write_text("data: {train_batch_size: 64}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    (tmp_path / "sft_trainer_engine.yaml").write_text("data: {train_batch_size: 32}\n")
    alone = [f"--config-path={tmp_path}", "model.path=m", "algorithm.adv_estimator=grpo"]
    step = load_config([*alone, f"{ACTOR}ppo_mini_batch_size=8"], verl_defaults="rl").config.step
    assert (step.prompts_per_step, step.samples_per_prompt) == (64, 4)
    assert load_config(["-cp", str(tmp_path), "model.path=m"], verl_defaults="sft").config.step.prompts_per_step == 32
    assert load_config(["--config-path=config", *alone[1:], f"{ACTOR}ppo_mini_batch_size=8"], verl_defaults="rl")
    (tmp_path / "ppo_trainer.yaml").unlink()
    with pytest.raises(ValueError, match=f"--config-path={tmp_path}: no ppo_trainer.yaml there; give --config-name"):
        load_config(alone, verl_defaults="rl")
    assert "give --config-name=FILE" in refusal(alone[0])


def test_an_engine_that_is_not_here_is_one_line() -> None:
    args = [
        f"{ROLLOUT}name=vllm",
        "model_engine=megatron",
        f"{ACTOR}strategy=megatron",
        "actor_rollout_ref.ref.strategy=veomni",
    ]
    said = translate([*args, "critic.strategy=fsdp", "algorithm.adv_estimator=grpo"])
    assert {s.key: s.value for s in said.settings if s.key.endswith("engine")} == {
        "rollout.engine": "native",
        "model.engine": "megatron",
    }
    (line,) = [line for line in render_notes(said.notes).splitlines() if "vllm" in line]
    assert "native" in line and "rollout.fallback=none refuses" in line


@pytest.mark.parametrize(
    ("args", "engine"),
    [
        (("--config-name=ppo_megatron_trainer",), "megatron"),
        (("--config-name=ppo_megatron_trainer", f"{ACTOR}strategy=fsdp2"), "torch"),
        (("--config-name=ppo_megatron_trainer", f"{ACTOR}strategy=megatron"), "megatron"),
        ((f"{ACTOR}strategy=veomni", "actor_rollout_ref.ref.strategy=fsdp", "critic.strategy=megatron"), "veomni"),
        (("actor@actor_rollout_ref.actor=megatron_actor", "critic@critic=megatron_critic"), "megatron"),
        (("engine=megatron", "model.strategy=megatron"), "megatron"),
        (("model_engine=torchtitan", f"{ACTOR}strategy=fsdp2"), "torch"),
        (("model_engine=megatron", "model.engine=sharded"), "sharded"),
        (("critic.strategy=megatron", "actor_rollout_ref.ref.strategy=veomni"), None),
    ],
)
def test_the_engine_of_the_policy_is_that_of_all_models(args: tuple[str, ...], engine: str | None) -> None:
    said = translate([*args, "algorithm.adv_estimator=grpo"])
    assert {s.key: s.value for s in said.settings}.get("model.engine") == engine
    others = [note for note in said.notes if note.key.startswith(("critic.", "actor_rollout_ref.ref."))]
    words = [note.text for note in others if engine is None or note.value not in (engine, f"{engine}_critic")]
    assert all(text == "every model is computed by the engine of the policy" for text in words)
    if "torchtitan" in args[0]:
        assert any("torchtitan is not here, and computes the same" in note.text for note in said.notes)


def test_two_engines_of_the_policy_are_refused() -> None:
    note = render_notes(translate(["--config-name=ppo_megatron_trainer", f"{ACTOR}strategy=fsdp2"]).notes)
    assert f"ignored (the file's engine; {ACTOR}strategy=fsdp2 replaces it): model_engine@_here_=megatron" in note
    line = refusal("model_engine=megatron", f"{ACTOR}strategy=fsdp")
    assert line == (
        f"model_engine=megatron and {ACTOR}strategy=fsdp contradict each other: all models are computed by one engine; "
        "leave one out"
    )
    assert "there are dp_actor" in refusal("actor@actor_rollout_ref.actor=own_actor")


@pytest.mark.parametrize("name", ["vllm", "trtllm"])
def test_on_gpus_an_engine_that_is_not_here_is_replaced_only_where_that_is_allowed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules.layout, "local_gpus", lambda: 8)
    args = [f"{ROLLOUT}name={name}", "algorithm.adv_estimator=grpo"]
    said = f"{ROLLOUT}name={name}: it is not here, and this machine has GPUs (8): rollout.python="
    assert said in refusal(*args) and refusal(*args).endswith(
        "rollout.fallback=native runs the native engine in its place"
    )
    allowed = translate([*args, "rollout.fallback=native"])
    assert ("rollout.engine", "native") in [(s.key, s.value) for s in allowed.settings]
    assert f"{name} is not here: the native engine runs in its place" in render_notes(allowed.notes)
    here = translate([*args, "rollout.python=/opt/python"])
    assert ("rollout.engine", name) in [(s.key, s.value) for s in here.settings]


def test_a_schedule_that_is_not_given_is_that_of_verls_optimizer_group() -> None:
    schedules = {"fsdp": "constant", "megatron": "constant", "veomni": "cosine", "torchtitan": "linear"}
    for engine, schedule in schedules.items():
        beside = ["model.path=m", "data.train_batch_size=256", "algorithm.adv_estimator=grpo"]
        assert load_config([*beside, f"model_engine={engine}"], verl_defaults="rl").config.optim.schedule == schedule
        given = [*beside, f"model_engine={engine}", f"{ACTOR}optim.lr_scheduler_type=linear"]
        assert load_config(given, verl_defaults="rl").config.optim.schedule == "linear"
    with pytest.raises(ValueError, match="critic.optim.lr_scheduler_type=constant"):
        load_config(["model.path=m", "model_engine=veomni"], verl_defaults="rl")
    sft = ["model.path=m", "engine=veomni", "optim=veomni"]
    assert load_config(sft, verl_defaults="sft").config.optim.schedule == "cosine"


def test_an_optimizer_of_verl_is_ours_with_the_settings_that_it_has_there() -> None:
    def optim(*args: str) -> tuple[str, dict[str, Any]]:
        config = load_config(["model.path=m", "data.train_batch_size=256", *args], verl_defaults="rl").config
        return config.optim.name, config.optim.options

    assert optim() == ("adamw", {})
    eight_bits = [f"{ACTOR}optim.optimizer=AdamW8bit", f"{ACTOR}optim.optimizer_impl=bitsandbytes.optim"]
    assert optim("algorithm.adv_estimator=grpo", *eight_bits) == ("adamw_8bit", {})
    assert optim(f"{ACTOR}optim.optimizer=muon") == ("muon", {"nesterov": False, "scale": 1.0})
    own = [f"{ACTOR}optim.muon_{key}" for key in ("momentum=0.9", "nesterov=true", "extra_scale_factor=0.2")]
    given = {"momentum": 0.9, "nesterov": True, "scale": 0.2}
    assert optim(f"{ACTOR}optim.optimizer=muon", *own) == ("muon", given)
    assert optim(*own) == ("adamw", {}), "they are of Muon"
    overrides = [f"{ACTOR}optim.override_optimizer_config.{one}" for one in ("momentum=0.8", "nesterov=true")]
    assert optim(f"{ACTOR}optim.optimizer=SGD", *overrides) == ("sgd", {"momentum": 0.8, "nesterov": True})
    steps = f"{ACTOR}optim.override_optimizer_config.ns_steps=4"
    assert optim(f"{ACTOR}optim.optimizer=muon", overrides[0], steps)[1]["iterations"] == 4
    for momentum in ("override_optimizer_config.momentum=0.8", "muon_momentum=0.8"):
        assert optim("optim.name=muon", f"{ACTOR}optim.{momentum}") == ("muon", {"momentum": 0.8}), "our defaults"
    assert optim("optim.name=sgd", overrides[0]) == ("sgd", {"momentum": 0.8})
    of_torch = [f"{ACTOR}optim.optimizer=Muon", f"{ACTOR}optim.optimizer_impl=torch.optim"]
    matched = f"{ACTOR}optim.override_optimizer_config.adjust_lr_fn=match_rms_adamw"
    assert optim(*of_torch, matched) == ("muon", {"scale": 0.2}), "nesterov is torch's default, and ours"
    for scale in (own[2], "optim.options.scale=0.2"):
        assert optim(*of_torch, scale) == ("muon", {"scale": 0.2})
    supervised = load_config(["model.path=m", "optim.override_optimizer_config={}"], verl_defaults="sft")
    assert supervised.config.optim.options == {}
    for wrong, line in (
        (f"{ACTOR}optim.optimizer=lion", "adamw_8bit, muon, adam_mini"),
        (f"{ACTOR}optim.optimizer_impl=dion", "the optimizers are those of optim.name"),
        (matched.replace("match_rms_adamw", "original"), "adjust_lr_fn=original: adamw has no such setting here"),
        (steps, "override_optimizer_config.ns_steps=4: adamw has no such setting here"),
        (f"{ACTOR}optim.override_optimizer_config.foreach=false", "settings of an optimizer are optim.options"),
        (f"{ACTOR}optim.muon_scale_mode=unit_rms_norm", "spectral"),
        ("critic.optim.optimizer=muon", "the critic has the optimizer of the actor here"),
    ):
        with pytest.raises(ValueError, match=line):
            optim("algorithm.adv_estimator=gae", wrong)
    for given in (of_torch, [of_torch[0], matched.replace("match_rms_adamw", "original")]):
        with pytest.raises(ValueError, match="=original: an update grows .* set override_optimizer_config.adj"):
            optim("algorithm.adv_estimator=grpo", *given)
    with pytest.raises(ValueError, match="override_optimizer_config.momentum=0.8: adam_mini has no such setting"):
        optim("optim.name=adam_mini", overrides[0])


def test_a_logger_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    said = translate(["trainer.logger=[console,wandb,mlflow]"])
    assert {s.key: s.value for s in said.settings} == {"track.sinks": ["console"]}
    assert "wandb is not installed, mlflow is not in this version" in render_notes(said.notes)


def options_of(engine: str, *words: str) -> tuple[dict[str, object], str]:
    """Return the options of a server's adapter for these keys of verl, and the lines about the other keys."""
    here = [f"{ROLLOUT}name={engine}", "rollout.python=/opt/bin/python"]
    said = translate([*here, *(ROLLOUT + word for word in words)])
    found = {s.key.removeprefix("rollout.engine_options."): s.value for s in said.settings}
    return {k: v for k, v in found.items() if k not in ("rollout.engine", "rollout.python")}, render_notes(said.notes)


def test_options_of_a_server_are_its_adapters_own_or_its_args() -> None:
    share, whole = (
        "gpu_memory_utilization=0.6",
        "engine_kwargs.vllm={max_num_seqs: 64, disable_mm_preprocessor_cache: true}",
    )
    graphs = "engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL"
    found, notes = options_of(
        "vllm", share, whole, graphs, "load_format=dummy_dtensor", "engine_kwargs.vllm.swap_space=null"
    )
    assert found == {
        "gpu_memory_utilization": 0.6,
        "max_num_seqs": 64,
        "args.disable_mm_preprocessor_cache": True,
        "args.compilation_config.cudagraph_mode": "FULL",
        "load_format": "dummy",
    }
    kwargs = ["engine_kwargs.sglang.attention_backend=fa3", "engine_kwargs.vllm.max_num_seqs=64", "load_format=gguf"]
    found, notes = options_of("sglang", share, *kwargs)
    assert found == {"mem_fraction_static": 0.6, "args.attention_backend": "fa3"}
    assert "rollout.engine_options.mem_fraction_static=0.6" in notes
    assert "ignored (read by rollout.engine=vllm)" in notes
    assert "rollout.engine=sglang has no such choice; rollout.engine=vllm has" in notes
    assert "load_format=gguf: not in this version; there are dummy" in refusal(
        f"{ROLLOUT}name=vllm", "rollout.python=p", f"{ROLLOUT}load_format=gguf"
    )
    args = [
        *(ROLLOUT + word for word in (share, whole, graphs, "load_format=auto")),
        "model.path=m",
        "rollout.engine=vllm",
    ]
    config = load_config([*args, "rollout.python=p"]).config.rollout.engine_options
    assert config["args"] == {"disable_mm_preprocessor_cache": True, "compilation_config": {"cudagraph_mode": "FULL"}}
    assert (config["max_num_seqs"], config["load_format"]) == (64, "auto")
    native = load_config([*args[:-1], f"{ROLLOUT}name=vllm"])
    assert "ignored (read by rollout.engine=vllm)" in render_notes(native.notes)


def test_an_engine_that_keeps_its_cache_runs_beside_the_trainer() -> None:
    for word, placement in (("True", "auto"), ("False", "split")):
        assert overrides_of(f"{ROLLOUT}free_cache_engine={word}") == {"pipeline.placement": placement}


def test_weights_travel_as_asked_where_they_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = f"{ROLLOUT}checkpoint_engine.backend="
    assert overrides_of(f"{backend}nccl") == {} and overrides_of(f"{backend}naive") == {"sync.engine": "local"}
    ray = ["cluster.backend=ray", "model.device=cpu"]
    found = [overrides_of(*ray, f"{backend}{way}").get("sync.engine") for way in ("naive", "nccl", "nixl", "mooncake")]
    assert found == ["local", "collective", "nixl", None]
    monkeypatch.setattr(rules.layout, "local_gpus", lambda: 8)
    assert overrides_of(ray[0], f"{backend}nccl")["sync.engine_options.backend"] == "nccl"
    bucket = f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes=512"
    for engine in ("shm", "tcp"):
        assert overrides_of(bucket, f"sync.engine={engine}")["sync.engine_options.bucket_mb"] == 512
    assert overrides_of(bucket) == {}
    assert "sync.engine=shm or tcp lets them pass" in render_notes(translate([bucket]).notes)
    notes = render_notes(translate([*ray, f"{backend}mooncake"]).notes)
    assert "there is no such transport: sync.engine is one of local, shm, ipc, tcp" in notes


PRESETS = [
    ("remax", "vanilla", ("remax", "ppo_clip")),
    ("gpg", "vanilla", ("gpg", "ppo_clip")),
    ("opo", "vanilla", ("opo", None)),
    ("grpo", "geo_mean", ("gmpo", None)),
    ("grpo", "clip_cov", ("clip_cov", None)),
    ("grpo", "gpg", ("grpo", "reinforce")),
    ("rloo", "gspo", ("rloo", "gspo")),
    ("gae", "gspo", ("ppo", "gspo")),
    ("grpo_passk", "vanilla", ("pass_at_k", None)),
    ("optimal_token_baseline", "vanilla", ("otb", None)),
]


def test_estimator_and_loss_mode_name_a_preset_and_its_loss() -> None:
    wrong = []
    for adv, loss, expected in PRESETS:
        args = [f"algorithm.adv_estimator={adv}", f"{ACTOR}policy_loss.loss_mode={loss}"]
        a = load_config(["model.path=m", *args]).config.algorithm
        wrong += [] if (a.name, a.loss) == expected else [(adv, loss, a.name, a.loss)]
    assert not wrong


TEACH = ("distillation.enabled=True", "algorithm.adv_estimator=grpo", "distillation.teacher_models.gsm8k.model_path=T")


TEACHERS = "distillation.teacher_models."
SECOND = (f"{TEACHERS}teacher_model.model_path=U", f"{TEACHERS}teacher_model.key=math")


def distilled(mode: str, gradient: bool, rewards: bool, *more: str) -> list[str]:
    words = [f"loss_mode={mode}", f"use_policy_gradient={gradient}", f"use_task_rewards={rewards}", *more]
    return ["model.path=m", *TEACH, *(DISTIL + word for word in words)]


def test_distillation_is_opd_or_the_likeliest_tokens() -> None:
    found = {}
    for name, args in {
        "alone": distilled("k1", True, False, "topk=32"),
        "beside": distilled("k1", True, True, "distillation_loss_coef=0.5"),
        "topk": distilled("forward_kl_topk", False, False, "topk=32"),
        "term": distilled("forward_kl_topk", False, True, "topk=32", "distillation_loss_coef=0.5"),
        "reverse": distilled("reverse_kl_topk", False, False, "topk=32"),
    }.items():
        config = load_config(args).config
        found[name] = (config.algorithm.name, config.algorithm.options, config.teacher.path, config.teacher.top_k)
    assert found == {
        "alone": ("opd", {"teacher_coef": 1.0, "reward_coef": 0.0}, "T", 64),
        "beside": ("opd", {"teacher_coef": 0.5, "reward_coef": 1.0}, "T", 64),
        "topk": ("gkd_topk", {"beta": 0.0}, "T", 32),
        "term": ("grpo", {"divergence_coef": 0.5, "divergence_beta": 0.0}, "T", 32),
        "reverse": ("gkd_topk", {"beta": 1.0}, "T", 32),
    }


def test_two_teachers_are_those_of_their_keys() -> None:
    found = load_config([*distilled("k1", True, False), *SECOND, f"{TEACHERS}gsm8k.key=gsm8k"])
    assert found.config.teacher.paths == {"gsm8k": "T", "math": "U"} and found.config.teacher.path is None
    one = load_config([*distilled("k1", True, False), f"{TEACHERS}gsm8k.key=openai/gsm8k"])
    assert one.config.teacher.path == "T" and not one.config.teacher.paths


def test_a_teacher_has_any_name_and_the_rows_name_it_by_their_source() -> None:
    keys = {"geo3k": '"hiyouga/geometry3k"', "gsm8k": '"openai/gsm8k"'}
    parts = ("key={}", "model_path=T", "num_replicas=1", "inference.name=vllm", "inference.expert_parallel_size=2")
    named = [f"+{TEACHERS}{name}.{part.format(key)}" for name, key in keys.items() for part in parts]
    args = [*distilled("k1", True, False), *named, "distillation.teacher_key=data_source", "distillation.nnodes=1"]
    config = load_config(args, verl_defaults="rl").config
    assert config.teacher.paths == {"hiyouga_geometry3k": "T", "openai_gsm8k": "T"}
    players = Players(teachers=tuple(config.teacher.paths))
    row = {"prompt": [{"role": "user", "content": "x"}], "answer": "1", "data_source": "openai/gsm8k"}
    assert task_row(RawRow("f:1", row), config.data, players).teacher == "openai_gsm8k"
    with pytest.raises(ValueError, match="the row's teacher is 'math'"):
        task_row(RawRow("f:1", row | {"data_source": "math"}), config.data, players)


def test_what_verl_clamps_is_clamped() -> None:
    clamps = ("loss_max_clamp=10.0", "log_prob_min_clamp=-9.0")
    for args, prefix in (
        (distilled("k1", True, False, *clamps), "teacher"),
        (distilled("forward_kl_topk", False, False, *clamps), "teacher"),
        (distilled("forward_kl_topk", False, True, *clamps), "divergence"),
    ):
        options = load_config(args).config.algorithm.options
        assert (options[f"{prefix}_clamp"], options[f"{prefix}_floor"]) == (10.0, -9.0), args


def test_a_refused_algorithm_says_nothing_of_the_default_one(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    args = [f"model.path={write_model(tmp_path / 'm')}", f"data.train_files={rows}", "data.val_files=null"]
    with pytest.raises(ValueError, match="loss_mode=k3") as refused:
        load_config([*args, *distilled("k3", False, False)[1:], f"{ROLLOUT}n=1"], verl_defaults="rl")
    assert "compares the answers" not in str(refused.value) and "grpo" not in str(refused.value)


def test_a_distillation_that_is_not_here_is_refused_with_those_that_are() -> None:
    for args, said in (
        (["model.path=m", *TEACH], "give distillation.distillation_loss.loss_mode"),
        (distilled("k3", False, False), "with False forward_ and reverse_kl_topk"),
        (distilled("k1", False, False), "k1 with use_policy_gradient=True (algorithm.name=opd)"),
        ([*distilled("forward_kl_topk", False, True), "algorithm.adv_estimator=rloo"], "not mapped; set grpo"),
        (distilled("k1", True, False, "policy_loss_mode=gspo"), "write actor.policy_loss.loss_mode"),
        ([*distilled("k1", True, True), "algorithm.adv_estimator=rloo"], "its part is GRPO's here"),
        ([*distilled("k1", True, False), *SECOND[:1]], "gsm8k.key=null beside other teachers"),
        ([*distilled("k1", True, False), *SECOND, f"{TEACHERS}gsm8k.key=math"], "one teacher would be left out"),
        ([*distilled("k1", True, False), f"{ACTOR}policy_loss.loss_mode=gspo"], "leave one of them out"),
        (["model.path=m", "distillation.teacher_key=domain"], "rename the column teacher"),
        (["model.path=m", "distillation.new=1"], "write teacher.* and algorithm.*"),
        ([*distilled("k1", True, False), f"{TEACHERS}x.inference.quantization=fp8"], "computes in model.dtype"),
    ):
        assert said in refusal(*args), (args, refusal(*args))
    off = ["model.path=m", "distillation.enabled=False", f"{DISTIL}loss_max_clamp=10.0", "algorithm.adv_estimator=grpo"]
    assert load_config(off).config.algorithm.name == "grpo"


def test_cispo_keeps_verls_floor_and_cap_of_the_ratio() -> None:
    args = ["model.path=m", "algorithm.adv_estimator=grpo", f"{ACTOR}policy_loss.loss_mode=cispo"]
    a = load_config([*args, f"{ACTOR}clip_ratio_low=10", f"{ACTOR}clip_ratio_high=0.2"]).config.algorithm
    assert (a.name, a.options["ratio_min"], a.options["ratio_max"]) == ("cispo", 0.0, 1.2)
    a = load_config(args).config.algorithm
    assert (a.options["ratio_min"], a.options["ratio_max"]) == (0.8, 1.2)


def test_rollout_correction_becomes_ours_with_the_bounds_turned_over() -> None:
    key = "algorithm.rollout_correction."
    args = [
        "model.path=m",
        "algorithm.adv_estimator=grpo",
        f"{key}rollout_is=token",
        f"{key}rollout_is_threshold=3.0",
        f"{key}rollout_is_batch_normalize=True",
        f"{key}rollout_rs='token_k1,seq_max_k2'",
        f"{key}rollout_rs_threshold='0.5_4,2.5'",
    ]
    a = load_config(args).config.algorithm
    o = a.options
    assert (o["correction"], o["correction_level"], o["correction_high"], o["correction_batch_normalize"]) == (
        "truncate",
        "token",
        3.0,
        True,
    )
    assert o["correction_reject"] == ["token_k1:0.25:2", "seq_max_k2:2.5"], (
        "verl bounds sampler/trainer in k1, we trainer/sampler"
    )
    a = load_config([*args[:3], f"{key}rollout_is_threshold=0.5_5.0"]).config.algorithm
    assert (a.options["correction"], a.options["correction_low"], a.options["correction_high"]) == ("icepop", 0.5, 5.0)
    a = load_config([*args[:3], f"{key}bypass_mode=True"]).config.algorithm
    assert (a.options["bypass"], a.loss, a.options.get("correction")) == (True, "ppo_clip", None)


# -- values that switch a feature off, and keys that both sides have ---------------------------------------------------

OVERRIDE = f"{ACTOR}megatron.override_transformer_config."


@pytest.mark.parametrize(
    ("given", "harmless", "acts"),
    [
        (f"{OVERRIDE}fp8", ("False", "null", "none"), ("hybrid", "e4m3", "True")),
        (f"{OVERRIDE}context_parallel_size", ("1", "null"), ("2",)),
        (f"{OVERRIDE}tensor_model_parallel_size", ("1",), ("4",)),
        (f"{OVERRIDE}moe_input_jitter_eps", ("null", "0"), ("0.1",)),
        (f"{OVERRIDE}fp32_residual_connection", ("False",), ("True",)),
        (f"{ACTOR}engine.qat.enable", ("False",), ("True",)),
        (f"{ACTOR}engine.router_replay.mode", ("disabled",), ("R2",)),
        (f"{ACTOR}engine.use_dist_checkpointing", ("False",), ("True",)),
        (f"{ACTOR}engine.override_transformer_config.fp8", ("False",), ("e4m3",)),
        ("data.output_path", ("null",), ("out.parquet",)),
        ("data.image_key", ("images", "image", "null"), ("image_path", "pictures")),
        ("data.mm_processor_kwargs.max_pixels", ("null",), ("200704",)),
        ("data.mm_processor_kwargs", ("null",), ("true",)),
        (f"{ROLLOUT}engine_kwargs.vllm.mm_processor_kwargs.max_pixels", ("null",), ("200704",)),
    ],
)
def test_a_value_that_switches_a_feature_off_is_accepted(
    given: str, harmless: tuple[str, ...], acts: tuple[str, ...]
) -> None:
    for value in harmless:
        assert [note.action for note in translate([f"{given}={value}"]).notes] == ["ignored"], value
    for value in acts:
        with pytest.raises(ValueError, match=re.escape(f"{given}={value}: ")):
            translate([f"{given}={value}"])


def test_settings_of_an_image_processor_are_refused_in_each_spelling() -> None:
    assert not refusal("data.mm_processor_kwargs={}") and not refusal("+data.mm_processor_kwargs={max_pixels: null}")
    for key in ("data.mm_processor_kwargs", f"{ROLLOUT}engine_kwargs.sglang.mm_processor_kwargs"):
        line = refusal(f"+{key}={{max_pixels: 200704}}")
        assert line.startswith(f"{key}.max_pixels=200704: ") and "preprocessor_config.json" in line


def test_our_keys_win_over_verls_and_over_its_defaults() -> None:
    script = ["model.path=m", "data.train_batch_size=1024", f"{ACTOR}ppo_mini_batch_size=256", f"{ACTOR}optim.lr=1e-5"]
    ours = ["step.prompts_per_step=4", "step.updates_per_step=1", "optim.lr=1e-4", "algorithm.clip_high=0.3"]
    for options in ({}, {"verl_defaults": "rl"}):
        config = load_config([*script, *ours], **options).config  # type: ignore[arg-type]
        assert (config.step.prompts_per_step, config.step.updates_per_step, config.optim.lr) == (4, 1, 1e-4)
        assert config.algorithm.given()["clip_high"] == 0.3
    alone = load_config(["model.path=m", *ours[:2]], verl_defaults="rl").config
    assert (alone.step.prompts_per_step, alone.step.updates_per_step) == (4, 1), "verl's default of 256 is not read"


@pytest.mark.parametrize(("steps", "rollouts", "expected"), [(5, 80, 5), (500, 80, 10), (7, None, 7)])
def test_a_run_ends_with_the_first_of_two_bounds(steps: int, rollouts: int | None, expected: int) -> None:
    more = [] if rollouts is None else [f"rollout.total_rollout_steps={rollouts}"]
    args = ["model.path=m", "data.train_batch_size=8", f"{ACTOR}ppo_mini_batch_size=8"]
    resolved = load_config([*args, f"trainer.total_training_steps={steps}", *more], verl_defaults="rl")
    assert resolved.config.run.total_steps == expected


def test_a_device_that_is_not_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("npu", "gpu"):
        (note,) = translate([f"trainer.device={name}"]).notes
        assert "model.device=auto" in note.text and f"{name} is not here" in note.text and "its CPU" in note.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "is not here" not in translate(["trainer.device=gpu"]).notes[0].text
    assert translate(["trainer.device=cuda"]).settings[0].value == "cuda"


def test_a_list_in_one_pair_of_quotes_more_is_that_list() -> None:
    assert load_config(["model.path=m", "optim.betas='[0.9,0.95]'"]).config.optim.betas == [0.9, 0.95]
    assert load_config(["model.path=m", "data.train_files='[a.jsonl, b.jsonl]'"]).config.data.train_files == [
        "a.jsonl",
        "b.jsonl",
    ]
    assert load_config(["model.path=m", "data.train_files=a[1].jsonl"]).config.data.train_files == ["a[1].jsonl"]


def test_router_replay_of_the_rollout_is_an_option_of_the_native_engine() -> None:
    for key in (f"{ACTOR}router_replay.mode", f"{ACTOR}engine.router_replay.mode"):
        found = overrides_of(f"{key}=R3", f"{ROLLOUT}enable_rollout_routing_replay=True")
        assert found["rollout.engine_options.replay_routes"] is True
    for engine in ("megatron", "sharded"):
        given = [f"{ACTOR}megatron.router_replay.mode=R3", "model_engine=megatron", f"model.engine={engine}"]
        assert overrides_of(*given)["rollout.engine_options.replay_routes"] is True


def test_sizes_of_an_engine_group_are_the_layout() -> None:
    args = [f"{ACTOR}engine.{key}" for key in ("tp_size=2", "pp_size=1", "ep_size=4", "distributed_strategy=fsdp2")]
    found = {s.key: s.value for s in translate([*args, "cluster.backend=ray", "trainer.n_gpus_per_node=8"]).settings}
    assert (found["parallel.tensor"], found["parallel.expert"]) == (2, 4) and "parallel.pipeline" not in found


# -- public scripts ----------------------------------------------------------------------------------------------------

ALLOWED = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "multi-token prediction")
"""The reasons for which a line may be refused until a later version supports them."""
OTHERWISE = {
    "PRIME": "its own reward model, which learns with the policy",
    "calls the model at an address": "a server of a generating model, which verl starts for a reward function",
    "compares the answers to one prompt": "a group of one, of which verl trains the bare score",
    "sampler of one's own": "a curriculum, whose state no checkpoint of here holds",
    "codapo": "an estimator with keys of its own",
    "float16": "a precision that needs a scaled loss",
    "correction_batch_normalize": "weights normalised over a batch that is the policy's own",
}
"""The other reasons for which a line is refused, with their texts."""


@pytest.mark.slow
def test_public_lines_are_taken_or_refused_for_what_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the validation of the whole: what is left is the reading of rows and of weights. An engine without its
    environment is refused in one line, whose last part is a replacement that is taken."""
    monkeypatch.setattr(rules, "find_spec", lambda name: None)  # as if no tracker were installed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows, model = write_rows(tmp_path / "rows.jsonl", 2000), write_model(tmp_path / "m", context=32768)
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sparse = write_model(tmp_path / "sparse", context=32768, config=experts)
    for folder in (model, sparse):
        (folder / "chat_template.jinja").write_text(tool_arithmetic.CHAT_TEMPLATE)
    paths = {**write_places(tmp_path), "TRAIN": rows, "VAL": rows, "MODEL": model, "CLASSIFIER": model}
    paths |= {"SPARSE": sparse, "SEEING": write_seeing(tmp_path / "seeing"), "IMAGES": rows}
    paths["ADAPTER"] = write_adapter(tmp_path / "adapter", model)
    wrong, lines, replaced = [], public_lines(), list[str]()
    for line in lines:
        try:
            small = (
                ["model.lora.rank=8"] if any(re.search(r"lora.rank=[1-9]", arg) for arg in line.args) else []
            )  # of the small model
            given = [*line.with_paths(paths), *small]
            config = load_config(given, verl_defaults=line.kind).config
            if (engine := config.model.engine) != "torch":
                with pytest.raises(ValueError) as caught:
                    validate(config, COMMANDS[line.kind])
                assert re.fullmatch(NO_ENVIRONMENT.format(engine=engine), str(caught.value)), caught.value
                replaced += [] if line.reason else [engine]
                config = load_config([*given, "model.engine=torch"], verl_defaults=line.kind).config
            validate(config, COMMANDS[line.kind])
            said = ""
        except ValueError as exc:
            said = str(exc)
        if bool(said) != bool(line.reason) or line.reason not in said:
            wrong.append((line.name, said))
        elif said and not any(words in line.reason or words in said for words in (*ALLOWED, *OTHERWISE)):
            wrong.append((line.name, f"no reason that is allowed: {said}"))
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong)
    assert {*replaced} == {"megatron", "veomni"}
    taken = [line for line in lines if not line.reason]
    assert (len(lines), len(taken) - len(replaced), len(replaced)) == (LINES, AS_WRITTEN, IN_ENVIRONMENT)
    said = f"**{AS_WRITTEN} are accepted as written**, on one machine in one process, and **{IN_ENVIRONMENT} more**"
    assert said in PAGE.read_text()


@pytest.mark.slow
def test_public_lines_of_an_engine_are_taken_where_its_environment_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models with sizes that most layouts divide, with the packages of the engine taken as present."""
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    monkeypatch.setattr(worker_python, "_engine_faults", lambda *given: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows, sizes = (
        write_rows(tmp_path / "rows.jsonl", 2000),
        {"context": 32768, "heads": 16, "kv_heads": 16, "layers": 48},
    )
    experts = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = write_model(tmp_path / "m", **sizes)
    sparse = write_model(tmp_path / "sparse", **sizes, config=experts)
    for folder in (model, sparse):
        (folder / "chat_template.jinja").write_text(tool_arithmetic.CHAT_TEMPLATE)
    paths = {
        **write_places(tmp_path),
        "TRAIN": rows,
        "VAL": rows,
        "MODEL": model,
        "CLASSIFIER": model,
        "SPARSE": sparse,
        "ADAPTER": write_adapter(tmp_path / "adapter", model),
    }
    taken = list[str]()
    for line in public_lines():
        given = line.with_paths(paths)
        if line.reason or load_config(given, verl_defaults=line.kind).config.model.engine == "torch":
            continue
        fallback = ["rollout.fallback=native"] if line.kind == "rl" else []
        with contextlib.suppress(ValueError):
            there = [*given, *fallback, f"model.python={sys.executable}"]
            validate(load_config(there, verl_defaults=line.kind).config, COMMANDS[line.kind])
            taken.append(line.name)
    assert len(taken) == AS_WRITTEN_THERE, taken
    assert f"{AS_WRITTEN_THERE} of the {IN_ENVIRONMENT} are taken as\nwritten" in PAGE.read_text()


LINES, AS_WRITTEN, IN_ENVIRONMENT, AS_WRITTEN_THERE = 113, 70, 29, 17
NO_ENVIRONMENT = (
    r"model\.engine={engine}: \S+ is missing in the environment of \S+; make {engine}-env makes one with .*; set "
    r"model\.python=\.venv-{engine}/bin/python, or model\.engine=torch, which computes the same in this one"
)
COMMANDS: dict[str, Command] = {"rl": "train", "sft": "sft"}


def test_own_sizes_take_the_place_of_those_of_an_asynchronous_script() -> None:
    own = ["step.prompts_per_step=4", "step.updates_per_step=1"]
    keys = ["data.train_batch_size=0", f"{ACTOR}ppo_mini_batch_size=64", "async_training.require_batches=2"]
    step = load_config(["model.path=m", *keys, *own]).config.step
    assert (step.prompts_per_step, step.updates_per_step) == (4, 1)


def test_a_loop_that_a_file_of_loops_registers_is_the_loop(tmp_path: Path) -> None:
    """verl's agent_loop_config_path: the class of the entry with the name that default_agent_loop has."""
    file = tmp_path / "agent.yaml"
    file.write_text("- {name: other, _target_: pkg.other.Other}\n- {name: mine, _target_: pkg.mine.Mine}\n")
    keys = [f"{ROLLOUT}agent.default_agent_loop=mine", f"{ROLLOUT}agent.agent_loop_config_path={file}"]
    assert overrides_of(*keys) == {"agent.loop": "pkg.mine.Mine"}
    assert overrides_of(keys[0].replace("mine", "tool_agent")) == {"agent.loop": "tool_agent"}
    assert "agent.loop=FILE.py:Class" in refusal(keys[0]) and "other, mine" in refusal(
        keys[0].replace("mine", "x"), keys[1]
    )
    assert "default_agent_loop" in refusal(keys[1])
    file.write_text("- {name: mine, _target_: pkg.mine.Mine, rounds: 3}\n")
    assert "rounds" in refusal(*keys)
    assert "no such file" in refusal(keys[0], f"{keys[1]}x")


def test_the_turns_of_a_trajectory_are_bounded_by_every_key_that_says_so() -> None:
    base = ["model.path=m", "agent.tools=[x]"]
    for keys, most in ((["max_turns=8"], 8), (["max_turns=8", "max_assistant_turns=5"], 5), (["max_user_turns=3"], 4)):
        assert load_config([*base, *(f"{ROLLOUT}multi_turn.{key}" for key in keys)]).config.agent.max_turns == most
    for key in ("max_tokens_per_assistant_turn=9", "use_xml_tool_parser=true", "num_repeat_rollouts=2"):
        assert "write the turns as a loop" in refusal(*base, f"{ROLLOUT}multi_turn.{key}")
    assert "agent.loop=FILE.py:Class" in refusal(*base, f"{ROLLOUT}agent.agent_loop_manager_class=a.B")


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition("<!-- keys -->")
    tail = rest.partition("<!-- end of keys -->")[2]
    PAGE.write_text(f"{head}<!-- keys -->\n\n{published_table()}\n\n<!-- end of keys -->{tail}")
