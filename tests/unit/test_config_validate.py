"""A configuration that cannot run is refused before anything expensive, in one line with the fix."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from handmade_model import write_model, write_rows

from verl.algorithms.presets import LOSSES, PRESETS, knobs
from verl.config.backends import option_keys
from verl.config.load import load_config, validate
from verl.config.tree import changed, leaves
from verl.model_engine.lora_spec import LoraSpec


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line that is right."""
    folder = tmp_path_factory.mktemp("validate")
    rows = write_rows(folder / "rows.jsonl", 200)
    return [f"model.path={write_model(folder / 'model')}", f"data.train_files={rows}", f"data.eval_files={rows}"]


def faults(base: list[str], *args: str, command: str = "train", **options: object) -> list[str]:
    try:
        validate(load_config([*base, *args]).config, command, **options)  # type: ignore[arg-type]
    except ValueError as exc:
        return str(exc).splitlines()
    return []


def test_a_right_configuration_passes(base: list[str]) -> None:
    assert faults(base) == []
    for command in ("sft", "rm", "dpo", "eval", "generate"):
        assert faults(base, command=command) == []


NOISE = "rollout.engine_options.noise_sigma_"
ROUTED = ("rollout.engine=sglang", "rollout.url=http://127.0.0.1:30001")
FAULTS = [
    (["step.samples_per_prompt=1"], "set at least 2"),
    (["step.prompts_per_step=10", "step.updates_per_step=4"], "use 1, 2, 5, 10"),
    (["step.prompts_per_step=-4"], "must be >= 1"),
    (["step.max_tokens_per_microbatch=2000", "rollout.max_response_tokens=1500"], "set it to at least 2524"),
    (["pipeline.partial_rollout=true"], "nothing is in flight"),
    (["pipeline.sync_every=0"], "must be >= 1"),
    (["pipeline.staleness=-1"], "must be >= 0"),
    (["pipeline.staleness=0.001"], "less than one group ahead"),
    (["pipeline.placement=colocated", "pipeline.staleness=1"], "would sleep with requests in flight"),
    (
        [
            "rollout.engine=server",
            "rollout.url=http://127.0.0.1:1",
            "pipeline.placement=colocated",
            "pipeline.staleness=2",
        ],
        "set pipeline.placement=split, or staleness=0",
    ),
    (["pipeline.max_invalid_share=1.5"], "must be >= 0 and <= 1"),
    (["rollout.top_p=0.9"], "set rollout.top_p=1"),
    (["rollout.top_k=50"], "set rollout.top_k=0"),
    (["rollout.min_p=0.1"], "set rollout.min_p=0"),
    (["rollout.top_k=-1"], "0 is off"),
    (["rollout.top_p=1.2"], "must be > 0 and <= 1"),
    (["eval.top_p=0"], "must be > 0"),
    (["rollout.temperature=0"], "use 1.0"),
    (["rollout.stop=['']"], "empty string"),
    (["rollout.engine_options.max_kv_tokens=100"], "max_kv_tokens=100 holds no sequence of 2048 tokens"),
    (
        [f"{NOISE}end=0.1"],
        "noise_sigma_end=0.1 without noise does nothing: set rollout.engine_options.noise_sigma_start",
    ),
    ([f"{NOISE}start=0.1"], "its stages are tenths of the run; set run.total_steps"),
    ([f"{NOISE}start=0.1", f"{NOISE}end=0.2", "run.total_steps=9"], "noise falls during a run; swap them"),
    ([f"{NOISE}start=0"], "must be > 0"),
    (["rollout.engine_options.replay_routes=true"], "has no experts; leave it out"),
    (["rollout.engine=hf", f"{NOISE}start=0.1"], "The options of the hf engine are none"),
    (["rollout.engine=vllm", f"rollout.python={sys.executable}", f"{NOISE}start=0.1"], "unknown"),
    (["rollout.engine_options.draft_token=4"], "The options of the native engine are "),
    (["rollout.engine=hf", "rollout.engine_options.max_kv_tokens=4"], "The options of the hf engine are none"),
    (["rollout.engine_options.max_prefill_tokens=0"], "must be >= 1"),
    (["rollout.engine_options.max_prefill_tokens=true"], "expected int"),
    (["rollout.engine=sglang"], "sglang is not installed beside verl; set rollout.python"),
    ([*ROUTED, "rollout.engine_options.router=:30000"], "router=:30000: expected http://HOST:PORT"),
    (
        ["rollout.engine=sglang", "rollout.python=/bin/sh", "rollout.engine_options.router=http://127.0.0.1:30000"],
        "it stands before servers that run already; name them in rollout.url",
    ),
    (
        [*ROUTED, "rollout.engine_options.router=http://127.0.0.1:30000", "cluster.backend=ray"],
        "router=http://127.0.0.1:30000 with cluster.backend=ray: who connects to one server has to know",
    ),
    (
        [*ROUTED, "rollout.engine_options.router=http://127.0.0.1:30000", "pipeline.staleness=1"],
        "router=http://127.0.0.1:30000 with pipeline.staleness=1: an update waits",
    ),
    (["rollout.engine=natve"], "did you mean native"),
    (["rollout.dtype=float16"], "bfloat16"),
    (["rollout.dtype=fp8", "rollout.engine=hf"], "which gets no weights in 8 bits: set rollout.engine=native"),
    (
        ["rollout.dtype=fp8", "rollout.engine=server", "rollout.url=http://127.0.0.1:1"],
        "server, which gets no weights in",
    ),
    (
        ["rollout.dtype=fp8", "rollout.engine=vllm", "rollout.url=http://127.0.0.1:1"],
        "dtype=fp8 with rollout.url=http://127.0.0.1:1: a server that runs was not started with a model of such",
    ),
    (
        ["rollout.dtype=fp8", "rollout.engine=vllm", f"rollout.python={sys.executable}"],
        "vllm: model.layers.0.self_attn.q_proj.weight [64, 64]: a server appends another projection, and no block of",
    ),
    (["model.dtype=bf16"], "did you mean bfloat16"),
    (["model.device=gpu"], "auto, cpu, cuda"),
    (["model.engine_options.attention=flash"], "auto, padded"),
    (["optim.schedule=cosin"], "did you mean cosine"),
    (["optim.betas=[0.9]"], "must be 2 values"),
    (["optim.betas=[0.9,1.0]"], "must be 2 values"),
    (["optim.lr=0"], "must be > 0"),
    (["optim.lr=inf"], "must be > 0 and finite"),
    (["optim.warmup_steps=5", "optim.warmup_ratio=0.1"], "leave one out"),
    (["critic.warmup_steps=5", "critic.warmup_ratio=0.1"], "leave one out"),
    (["algorithm.name=grop"], "did you mean grpo"),
    (["algorithm.aggregation=token_mean"], "did you mean token-mean"),
    (
        ["algorithm.options.correction=truncate"],
        "write algorithm.correction=truncate algorithm.options.correction_high",
    ),
    (["algorithm.horizon_tokens=100"], "does nothing here"),
    (["algorithm.kl_loss_form=k4"], "k1, abs, k2"),
    (["algorithm.kl_loss_coef=-0.1"], "must be >= 0"),
    (["algorithm.kl_reward_target=0.1"], "set algorithm.kl_reward_coef"),
    (["algorithm.kl_reward_horizon=100"], "set algorithm.kl_reward_target"),
    (["algorithm.clip_dual=0.9"], "above 1"),
    (["algorithm.clip_low=1.5"], "below 1"),
    (["algorithm.clip_high=-0.1"], "must be >= 0"),
    (["algorithm.filter_metric=acc"], "algorithm.filter_groups=true"),
    (["algorithm.options.curriculum=m:f", "data.shuffle=false"], "the curriculum says which rows come"),
    (["algorithm.name=dapo", "algorithm.max_draws_per_group=0.5"], "must be >= 1"),
    (["algorithm.on_exhausted=go"], "stop, smaller"),
    (["algorithm.advantage=mine"], "module:function"),
    (["algorithm.advantage=no_such_module:fn"], "cannot import 'no_such_module'"),
    (["algorithm.loss=no_such_module:fn"], "is it on PYTHONPATH?"),
    (["algorithm.loss=json:dump_it"], "module 'json' has no 'dump_it'"),
    (["algorithm.loss=sys:path"], "is a list: give a function of columns"),
    (["data.truncation=lft"], "did you mean left"),
    (["data.train_files=[]"], "data.train_files=[FILE.jsonl]"),
    (["data.train_files=/no/such.jsonl"], "/no/such.jsonl"),
    (["data.eval_files=/no/such.jsonl"], "data.eval_files: "),
    (["track.sinks=[console,mlflow]"], "mlflow is unknown"),
    (["run.keep_best=eval/acc/greedy"], "nothing is evaluated during the run; set run.eval_every_steps"),
    (
        ["run.keep_best=eval/acc/greedy", "run.eval_every_steps=5", "run.save_every_steps=5", "data.eval_files=[]"],
        "or set 0 and run.keep_best=null",
    ),
    (["run.keep_best=eval/acc/greedy", "run.eval_every_steps=5"], "set run.save_every_steps"),
    (["run.eval_every_steps=5", "data.eval_files=[]"], "name a file, or set 0"),
    (["run.resume=atuo"], "did you mean auto"),
    (["run.resume=/no/step_3"], "no such checkpoint"),
    (["run.name=../x"], "folder name"),
    (["run.wait_timeout_s=0"], "must be > 0"),
    (["reward.path=/no/reward.py"], "no such file"),
    (["reward.path=verl.recipes.arithmetic:a-b"], "no name of a function"),
    (["reward.overlong_buffer_tokens=5000"], "last part of that length"),
    (
        ["reward.overlong_buffer_tokens=50", "algorithm.options.overlong_tokens=40"],
        "is above algorithm.options.overlong_tokens=40",
    ),
    (["algorithm.options.overlong_cap=false"], "does nothing without an overlong penalty"),
    (["health.mismatch_warn=1"], "above health.mismatch_stop"),
    (["model.path=/no/model"], "no such folder"),
    (["model.path=Org/Name"], "hf download Org/Name"),
    (["model.chat_template=/no/t.jinja"], "Jinja file"),
    (["model.tokenizer_path=/no/tokenizer"], "no tokenizer"),
    (
        ["data.max_prompt_tokens=9000", "step.max_tokens_per_microbatch=65536", "rollout.max_response_tokens=30000"],
        "above the 32768 positions",
    ),
]


def test_each_fault_is_one_line_with_the_fix(base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    wrong = []
    for args, reason in FAULTS:
        found = faults(base, *args)
        names_the_key = found and re.search(r"[a-z]+\.[a-z_]+", found[0])
        wrong += [] if len(found) == 1 and reason in found[0] and names_the_key else [(args, reason, found)]
    assert not wrong


def test_a_tree_that_was_changed_is_checked_again(base: list[str]) -> None:
    """The Python face writes into the tree."""
    config = load_config(base).config
    config = changed(
        config, {"step.prompts_per_step": 0, "optim.lr": -1.0, "rollout.engine_options": {"max_kv_tokens": "many"}}
    )
    with pytest.raises(ValueError) as caught:
        validate(config)
    assert str(caught.value).splitlines() == [
        "step.prompts_per_step=0: must be >= 1",
        "optim.lr=-1.0: must be > 0 and finite",
        "rollout.engine_options.max_kv_tokens=many: expected int or null",
    ]


def test_all_faults_are_said_at_once(base: list[str]) -> None:
    assert len(faults(base, "step.samples_per_prompt=1", "rollout.top_p=0.5", "pipeline.partial_rollout=true")) == 3


def test_what_is_allowed(base: list[str]) -> None:
    assert faults(base, "eval.top_p=0.7", "eval.top_k=20", "eval.temperature=0.6", "eval.samples_per_prompt=4") == []
    assert faults(base, "algorithm.name=reinforce", "step.samples_per_prompt=1") == []
    assert faults(base, "algorithm.advantage=json:dumps", "step.samples_per_prompt=1") == []
    assert faults(base, "algorithm.name=cispo", "algorithm.clip_low=10") == []
    assert faults(base, "algorithm.name=drgrpo", "algorithm.horizon_tokens=1024") == []
    assert faults(base, "pipeline.staleness=0.5", "pipeline.partial_rollout=true") == []
    assert faults(base, "data.train_files=s3://bucket/x.parquet") == []
    assert faults(base, "health.mismatch_stop=inf") == []


def test_commands_ask_for_what_they_need(base: list[str]) -> None:
    assert "data.eval_files is empty" in faults(base[:1], command="eval")[0]
    assert faults(base[:1], command="generate") == []
    assert not faults(base, "cluster.backend=ray", "model.device=cuda", "sync.engine=ipc", command="generate")
    own = ("rollout.engine=openai", "rollout.url=http://127.0.0.1:1", "model.device=cuda")
    (said,) = faults(base, *own, "sync.engine=ipc", command="generate")
    assert said.startswith("sync.engine=ipc with rollout.engine=openai: its weights are its own, and pass nowhere")
    assert (
        "data.max_tokens_per_row=9000"
        in faults(base, "data.max_tokens_per_row=9000", "step.max_tokens_per_microbatch=8192", command="sft")[0]
    )
    assert faults(base, "rollout.top_p=0.9", "step.samples_per_prompt=1", command="sft") == []


def test_rules_name_keys_of_the_tree() -> None:
    rooms = Path(__file__).parents[2] / "verl" / "config"
    source = (rooms / "validate.py").read_text()
    sections = "|".join({key.split(".")[0] for key in leaves()})
    texts = " ".join(re.findall(r'"([^"\n]*)"', source))
    named = set(re.findall(rf"(?<![\w./])(?:{sections})\.[a-z_]+(?:\.[a-z_]+)?", texts))
    known = {f"model.lora.{field.name}" for field in fields(LoraSpec)}
    known |= {*leaves(), *option_keys(), *(f"algorithm.options.{name}" for name, option in knobs().items() if option)}
    assert named and not named - known, "a message names a key that is not there"


def test_the_keys_of_the_tree_are_the_settings_of_the_specs() -> None:
    keys = {key.removeprefix("algorithm.") for key in leaves() if key.startswith("algorithm.")}
    assert keys - {"name", "options", "loss", "advantage"} == {key for key, option in knobs().items() if not option}
    assert "ppo_clip" in LOSSES, "compat/rules.py names it for verl's rloo"
    assert len(PRESETS) == 39


ALGORITHM_FAULTS = [
    (["algorithm.options.clip_low=0.1"], "algorithm.options.clip_low: a key of its own: write algorithm.clip_low=0.1"),
    (["algorithm.options.tau_positve=1"], "did you mean tau_positive?"),
    (["algorithm.name=sapo", "algorithm.options.tau_positive=hot"], "must be a number"),
    (["algorithm.options.leave_one_out=1"], "must be true or false"),
    (["algorithm.name=sapo", "algorithm.options.tau_negative=0"], "must be > 0"),
    (["algorithm.name=cispo", "algorithm.options.ratio_max=-1"], "must be > 0"),
    (["algorithm.loss=cispo"], "set it to 5.0"),
    (["algorithm.loss=ppo_clp"], "did you mean ppo_clip?"),
    (["algorithm.loss=a.b.c"], "module:function"),
    (["algorithm.name=gdpo"], "algorithm.options.reward_components=[a,b]"),
    (["algorithm.name=ppo", "algorithm.gamma=1.5"], "must be >= 0 and <= 1"),
    (["algorithm.name=ppo", "algorithm.critic_warmup_until=2"], "an explained variance"),
    (["algorithm.name=ppo", "algorithm.value_clip=0"], "must be > 0"),
    (["algorithm.critic_warmup_steps=5"], "grpo has no critic"),
    (["algorithm.options.selection=best"], "bon, br, bw"),
    (["algorithm.correction=truncate"], "set algorithm.options.correction_high"),
    (["algorithm.correction=tis", "algorithm.options.correction_high=2"], "truncate, clamp, icepop, mask"),
    (
        ["algorithm.correction=clamp", "algorithm.options.correction_low=3", "algorithm.options.correction_high=2"],
        "need low <= high",
    ),
    (["algorithm.options.correction_level=turn"], "token, sequence, geometric"),
    (["algorithm.options.correction_reject=[token_k1]"], "write STAT:HIGH or STAT:LOW:HIGH"),
    (["algorithm.options.correction_reject=[seq_max_k1:2]"], "statistic 'seq_max_k1' is unknown"),
    (["algorithm.options.correction_reject=['token_k1:2:1']"], "need 0 <= low <= high"),
    (["algorithm.options.correction_denominator=all"], "after_rejection, before_rejection"),
    (["algorithm.bypass=true", "algorithm.loss=sapo"], "set ppo_clip or reinforce"),
    (["algorithm.bypass=true", "algorithm.loss=reinforce"], "its importance weights"),
    (
        ["algorithm.bypass=true", "algorithm.correction=truncate", "algorithm.options.correction_high=2"],
        "would count it twice",
    ),
    (["algorithm.bypass=true", "algorithm.options.correction_batch_normalize=true"], "leave it out"),
    (["algorithm.name=sapo", "algorithm.options.tau_positive=inf"], "must be finite"),
    (["preference.loss=dop"], "did you mean"),
]


def test_each_fault_of_an_algorithm_is_one_line_too(base: list[str]) -> None:
    wrong = []
    for args, reason in ALGORITHM_FAULTS:
        found = faults(base, *args)
        if len(found) != 1 or reason not in found[0] or not re.search(r"(algorithm|preference)\.[a-z_]+", found[0]):
            wrong.append((args, reason, found))
    assert not wrong, wrong
