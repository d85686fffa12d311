"""A teacher that cannot be one is refused before anything expensive; the plan knows what it costs."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from adapters import write_adapter
from each import each
from handmade_model import write_rows
from safetensors.torch import load_file, save_file

from verl.algorithms.presets import knobs
from verl.config.adapter import base_of
from verl.config.compat.table import DISTILLATION, key_rows, unknown_key
from verl.config.compat.trl import TRAINER
from verl.config.load import load_config, validate
from verl.config.tree import leaves
from verl.driver.identity import compare, identity_of
from verl.driver.models import refuse_other_words
from verl.models import tiny
from verl.planner.cluster import cluster_plan
from verl.planner.plan import make_plan
from verl.planner.text import render_plan


def model(folder: Path, **sizes: int) -> Path:
    tokenizer = tiny.character_tokenizer("0123456789+= ")
    return tiny.save(tiny.qwen3(tokenizer, **SIZES | sizes), tokenizer, folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("teachers")
    rows = write_rows(folder / "rows.jsonl", 20)
    model(folder / "policy")
    model(folder / "same", seed=3, max_positions=256)
    model(folder / "larger", vocab_size=64)
    model(folder / "smaller", vocab_size=24)
    model(folder / "short", seed=4, max_positions=16)
    given = [f"model.path={folder}/policy", f"data.train_files={rows}", f"run.root_dir={folder}", "model.dtype=float32"]
    return [*given, "rollout.max_response_tokens=16", "data.max_prompt_tokens=16", "step.prompts_per_step=4"]


def folder_of(base: list[str]) -> str:
    return base[0].removeprefix("model.path=").removesuffix("/policy")


def faults(base: list[str], *args: str) -> list[str]:
    try:
        validate(load_config([*base, *(a.replace("@", folder_of(base)) for a in args)]).config)
    except ValueError as exc:
        return str(exc).splitlines()
    return []


GKD = ("algorithm.name=gkd", "teacher.path=@/same")
STORED = ("algorithm.options.on_policy_share=0.5", "algorithm.options.stored_key=said")
REFUSED = [
    (["algorithm.name=opd"], "teacher.path is missing: opd learns from a teacher; set teacher.path=FOLDER"),
    (["algorithm.name=grpo", "algorithm.loss=gkd"], "teacher.path is missing"),
    (["algorithm.name=grpo", "teacher.path=@/same"], "does nothing with algorithm.name=grpo: set algorithm.name=opd"),
    (["algorithm.name=gkd", "teacher.path=/no/where"], "teacher.path=/no/where: no such folder"),
    (["algorithm.name=opd", "teacher.path=@/smaller"], "its head has 24 tokens, the policy's 32"),
    (["algorithm.name=gkd", "teacher.path=@/larger"], "ids of padding would count on one side alone"),
    (["algorithm.name=gkd_topk", "teacher.path=@/larger"], "algorithm.name=opd, which reads the drawn tokens"),
    (["algorithm.name=gkd_topk", "teacher.path=@/same"], "teacher.top_k=64 is above the 32 tokens"),
    (["algorithm.name=gkd_topk", "teacher.path=@/same", "teacher.top_k=0"], "must be >= 1"),
    (["algorithm.name=gkd", "teacher.path=@/same", "teacher.temperature=0"], "must be > 0"),
    (["algorithm.name=gkd", "teacher.path=@/same", "algorithm.options.beta=2"], "must be >= 0 and <= 1"),
    (["algorithm.name=opd", "teacher.path=@/same", "algorithm.options.teacher_coef=0"], "nothing is learned from"),
    (["algorithm.name=opd", "teacher.path=@/same", "algorithm.options.agree_only=true"], "is of the reward's part"),
    (["algorithm.name=opd", "teacher.path=@/same", "algorithm.kl_reward_coef=0.1"], "does not reach opd's loss"),
    (["algorithm.name=gkd", "teacher.path=@/same", "algorithm.bypass=true"], "set ppo_clip or reinforce"),
    (
        ["algorithm.name=opd", "teacher.path=@/same", "teacher.paths.a=@/same"],
        "teacher.path=@/same beside teacher.paths",
    ),
    (["algorithm.name=opd", "teacher.paths={a-b: @/same}"], "teacher.paths.a-b: a name has letters, digits and _"),
    (["algorithm.name=gkd", "teacher.paths.a=@/same"], "teacher.paths: gkd compares with the head of one frozen model"),
    (["algorithm.name=gkd", "teacher.path=policy", "teacher.hint_key=h"], "teacher.path=policy: gkd compares with"),
    (
        ["algorithm.name=gkd_topk", "teacher.path=policy", "teacher.hint_key=h"],
        "teacher.top_k=64 is above the 32 tokens",
    ),
    (["algorithm.name=opd", "teacher.path=policy"], "it says what the policy says; give teacher.hint_key=COLUMN"),
    (
        ["algorithm.name=opd", "teacher.path=@/same", "teacher.pick=mix"],
        "teacher.pick=mix does nothing with one teacher",
    ),
    (["algorithm.name=opd", "teacher.path=@/same", "teacher.ema=0.9"], "set teacher.path=policy, or leave it out"),
    (["algorithm.name=opd", "teacher.path=policy", "teacher.ema=-1"], "must be >= 0"),
    (["algorithm.name=opd", "teacher.path=policy", "teacher.ema=1"], "teacher.ema=1: below 1 it is a decay, from 2 on"),
    (["algorithm.name=opd", "teacher.path=policy", "teacher.ema=2.5"], "from 2 on a whole number of publishes"),
    (["algorithm.name=grpo", "teacher.hint_key=h"], "teacher.hint_key=h does nothing with algorithm.name=grpo"),
    (["algorithm.name=opd", "teacher.paths.a=@/smaller"], "teacher.paths=@/smaller: its head has 24 tokens"),
    (["algorithm.name=opd", "teacher.paths.a=/no/where"], "teacher.paths=/no/where: no such folder"),
    (["algorithm.name=opd", "teacher.path=@/short"], "was made for 16 tokens, and rows have up to 32"),
    (["algorithm.name=opd", "teacher.paths.a=@/same", "teacher.weights.a=1"], "does nothing with teacher.pick=task"),
    (
        ["algorithm.name=opd", "teacher.paths.a=@/same", "teacher.pick=mix", "teacher.weights.b=1"],
        "teacher.weights={b: 1.0}: give a number above 0 for each of a",
    ),
    (
        ["algorithm.name=gkd_topk", "teacher.paths.a=@/same", "teacher.top_k=8", "teacher.pick=mix"],
        "teacher.pick=mix: gkd_topk reads their likeliest tokens: each names other tokens, and of what it does",
    ),
    (
        ["algorithm.name=gkd", "teacher.paths.a=@/same", "teacher.pick=best"],
        "teacher.paths: gkd compares with the head",
    ),
    (
        [*GKD, "algorithm.options.on_policy_share=0.5"],
        "on_policy_share=0.5: the other prompts have stored answers; set algorithm.options.stored_key=COLUMN",
    ),
    ([*GKD, "algorithm.options.stored_key=a"], "stored_key=a does nothing with algorithm.options.on_policy_share=1"),
    ([*GKD, "algorithm.options.on_policy_share=1.5"], "must be >= 0 and <= 1"),
    ([*GKD, *STORED, "algorithm.kl_loss_coef=0.1"], "on_policy_share=0.5 with a KL to the reference"),
    ([*GKD, *STORED, "algorithm.correction=truncate"], "on_policy_share=0.5 with a correction, which is of answers"),
    ([*GKD, *STORED, "algorithm.filter_groups=true"], "on_policy_share=0.5 with a selection of answers"),
    ([*GKD, *STORED, "algorithm.options.off_policy_delta=1"], "on_policy_share=0.5 with algorithm.options.off_policy"),
    (
        ["algorithm.name=ppo", "algorithm.loss=gkd", "algorithm.kl_reward_coef=0", "teacher.path=@/same", *STORED],
        "on_policy_share=0.5 with a critic",
    ),
    ([*GKD, *STORED, "pipeline.oversample=0.5"], "pipeline.oversample=0.5 with algorithm.options.on_policy_share"),
    (
        ["algorithm.name=opd", "teacher.path=@/same", *STORED],
        "on_policy_share=0.5 does nothing with algorithm.name=opd: its loss is of what the policy draws; set",
    ),
    (
        ["algorithm.name=gkd", "teacher.path=@/same", "cluster.backend=ray", "parallel.tensor=2"],
        "parallel.tensor=2: gkd compares whole rows of two heads, of which a rank would have a slice; use gkd_topk",
    ),
]


@each("args, expected", REFUSED)
def test_what_cannot_be_is_refused_with_the_fix(base, args, expected):
    found = faults(base, *args)
    assert any(expected.replace("@", folder_of(base)) in line for line in found), found


def test_what_can_be_is_not(base):
    one = "step.samples_per_prompt=1"
    assert not faults(base, "algorithm.name=opd", "teacher.path=@/larger", one)
    assert not faults(base, "algorithm.name=gkd", "teacher.path=@/same", one)
    assert not faults(base, "algorithm.name=gkd_topk", "teacher.path=@/same", "teacher.top_k=32", one)
    assert not faults(base, "algorithm.name=dapo", "algorithm.loss=gkd", "teacher.path=@/same")
    two = ("cluster.backend=ray", "cluster.ranks_per_node=2", "parallel.tensor=2")
    found = faults(base, "algorithm.name=gkd_topk", "teacher.path=@/same", "teacher.top_k=32", one, *two)
    assert len(found) == 2 and all("key-value heads" in line for line in found), "of the tiny models alone"
    assert not faults(base, *GKD, *STORED, "step.updates_per_step=2", "algorithm.entropy_coef=0.01")
    both = ("teacher.paths={a: @/same, b: @/policy}", one)
    assert not faults(base, "algorithm.name=gkd_topk", "teacher.top_k=8", *both)
    assert not faults(base, "algorithm.name=gkd_topk", "teacher.top_k=8", "teacher.pick=best", *both)
    assert not faults(base, "algorithm.name=opd", "teacher.pick=mix", "teacher.weights={a: 3, b: 1}", *both)
    assert not faults(base, "algorithm.name=opd", "teacher.path=policy", "teacher.hint_key=hint", one)


def test_what_is_said_of_attempts_is_not_of_stored_answers(base):
    given = [*GKD, "teacher.hint_key=attempt.feedback"]
    assert not faults(base, *given)
    assert any("attempt.feedback: nobody says anything of a stored answer" in x for x in faults(base, *given, *STORED))


def test_another_cut_of_the_same_vocabulary_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def made(merges) -> PreTrainedTokenizerFast:
        vocab = {token: i for i, token in enumerate(["a", "b", "ab", "ba"])}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=merges)))

    one, other = made([("a", "b"), ("b", "a")]), made([("b", "a"), ("a", "b")])
    refuse_other_words(one, made([("a", "b"), ("b", "a")]), "teacher.path=x")
    with pytest.raises(ValueError, match=r"teacher.path=x: its tokenizer reads '.*' as \[.*\], the policy's as \["):
        refuse_other_words(one, other, "teacher.path=x")


def test_the_plan_knows_what_a_teacher_costs(base):
    def planned(name: str) -> dict[str, int]:
        args = [f"algorithm.name={name}", f"teacher.path={folder_of(base)}/same"] if name != "grpo" else []
        return dict(make_plan(load_config([*base, *args]).config).memory.items)

    whole = planned("gkd")
    count = sum(p.numel() for p in tiny.qwen3(tiny.character_tokenizer("0123456789+= "), **SIZES).parameters())
    assert whole["teacher"] == planned("opd")["teacher"] == 4 * count
    assert whole["teacher's head"] == 4 * 32 * 16 and "teacher's head" not in planned("gkd_topk")
    assert whole["teacher's activations"] > 0 and not any("teacher" in item for item in planned("grpo"))


def test_the_plan_says_what_a_teacher_takes_of_time_and_that_it_is_dearer_than_memory(base, monkeypatch):
    folder, gkd = folder_of(base), "algorithm.name=gkd"

    def planned(*args: str):
        return make_plan(load_config([*base, "model.device=cpu", *args]).config)

    one = planned(gkd, f"teacher.path={folder}/same")
    assert one.teacher_share == pytest.approx(2 / 6, rel=0.05)  # a forward pass of a model of the policy's size
    assert f"its pass over a step takes {one.teacher_share:.2g} of the FLOPs" in render_plan(one)
    assert planned(gkd, f"teacher.path={folder}/same", "step.epochs_per_step=2").teacher_share == one.teacher_share / 2
    assert planned("algorithm.name=opd", "teacher.path=policy", "teacher.hint_key=x").teacher_share == 1 / 3
    lagged = planned("algorithm.name=opd", "teacher.path=policy", "teacher.ema=2")
    assert lagged.memory.items["teacher"] == lagged.checkpoint_parts["average"] == 4 * lagged.model.parameters
    two = f"teacher.paths={{a: {folder}/same, b: {folder}/same}}"
    assert planned("algorithm.name=opd", two, "teacher.pick=mix").teacher_share == pytest.approx(4 / 6, rel=0.05)
    assert planned("algorithm.name=opd", two).teacher_share == one.teacher_share
    served = planned("algorithm.name=opd", "teacher.path=http://127.0.0.1:9")
    assert served.teacher_share == 0 and "teacher   computed elsewhere" in render_plan(served)
    alone = planned("algorithm.name=grpo")
    assert alone.teacher_share is None and "\nteacher " not in render_plan(alone)

    assert one.memory.peak_bytes > alone.memory.peak_bytes
    monkeypatch.setattr("verl.workers.host.total_bytes", lambda: one.memory.peak_bytes - 1)
    (said,) = planned(gkd, f"teacher.path={folder}/same").warnings
    assert "without the teacher (" in said and "teacher.path=http://HOST:PORT" in said and "offload_frozen=true" in said
    assert not planned("algorithm.name=grpo").warnings
    monkeypatch.setattr("verl.workers.host.total_bytes", lambda: 1)
    assert "without the teacher" not in planned(gkd, f"teacher.path={folder}/same").warnings[-1]


TRL_OWN = """model_init_kwargs trust_remote_code teacher_model_name_or_path teacher_model_revision disable_dropout
teacher_model_init_kwargs max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of temperature
top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
vllm_tensor_parallel_size beta max_tool_calling_iterations log_completions num_completions_to_print log_unique_prompts
lmbda max_new_tokens seq_kd"""
"""Fields of TRL 1.16: those of DistillationConfig that TrainingArguments does not have, and those of GKDConfig that
SFTConfig does not have."""


def test_every_field_of_trl_is_in_the_table():
    assert {*TRL_OWN.split()} <= DISTILLATION.keys()


def test_verls_own_keys_come_before_names_of_trl():
    """One that ends like a field of TRL may be of another role: the critic's rate, the evaluation's temperature."""
    for key, row in key_rows().items():
        if row.action == "mapped" and key not in leaves() and not key.endswith(".*"):
            assert "TRL" not in unknown_key(key)
    assert "here it is critic.weight_decay" in unknown_key("critic.optim.weight_decay")
    assert "here it is eval.temperature" in unknown_key("actor_rollout_ref.rollout.val_kwargs.temperature")


GRPO_OWN = """beta cast_lm_head_to_fp32 delta entropy_coef epsilon epsilon_high generation_batch_size
importance_sampling_level learning_rate loss_type lr_scheduler_type mask_truncated_completions max_completion_length
max_steps num_generations num_generations_eval num_iterations num_train_epochs off_policy_mask_threshold
per_device_train_batch_size gradient_accumulation_steps reward_weights scale_rewards steps_per_generation temperature
top_entropy_quantile use_bias_correction_kl use_vllm vllm_importance_sampling_cap vllm_mode"""
"""Fields of TRL 1.16's GRPOConfig that its examples set, those of TrainingArguments included."""


def test_the_fields_of_a_grpo_script_of_trl_are_in_a_table():
    assert {*GRPO_OWN.split()} <= {*DISTILLATION, *TRAINER}


def test_a_name_of_trl_below_a_section_is_found_and_ours_go_first(base):
    for typed, ours in (
        ("optim.learning_rate", "TRL's name; here: optim.lr"),
        ("algorithm.epsilon", "write algorithm"),
        ("agent.max_steps", "did you mean"),
    ):
        with pytest.raises(ValueError, match=f"unknown key '{typed}': {ours}"):
            load_config([*base, f"{typed}=1"])


@each("field", [*DISTILLATION, *TRAINER])
def test_a_field_of_trl_is_told_what_it_is_here(base, field):
    with pytest.raises(ValueError, match=f"unknown key '{field}'.*TRL's name; here: ") as told:
        load_config([*base, f"{field}=1"])
    sections = "algorithm|teacher|rollout|step|model|data|sync|agent|track|pipeline|optim|run|eval|cluster"
    keys = re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z_]", str(told.value))
    options = {f"algorithm.options.{key}" for key, option in knobs().items() if option}
    named = [key for key in keys if key not in leaves() and key not in options]
    assert not named, "a key that is not there"


SIZES = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 16}


def test_a_teacher_lives_in_the_pool_that_it_is_given(base):
    args = [
        "algorithm.name=gkd",
        f"teacher.path={folder_of(base)}/same",
        "cluster.backend=ray",
        "cluster.roles.teacher=far",
    ]
    config = load_config([*base, *args, "cluster.pools={far: {ranks_per_node: 1}}"]).config
    spread = cluster_plan(config, 512)
    assert spread is not None and "teacher" in spread.pools["far"].roles and "actor" in spread.pools["main"].roles
    assert (
        spread.pools["far"].memory.items["teacher weights"] > 0 and "infer teacher" in spread.pools["far"].memory.phases
    )
    assert spread.pools["main"].memory.items["actor teacher's head"] == 4 * 32 * 16


def test_each_of_several_teachers_is_a_role(base):
    folder = folder_of(base)
    args = ["algorithm.name=opd", f"teacher.paths={{a: {folder}/same, b: {folder}/larger}}"]
    items = dict(make_plan(load_config([*base, *args]).config).memory.items)
    one = [
        dict(make_plan(load_config([*base, args[0], f"teacher.path={folder}/{name}"]).config).memory.items)["teacher"]
        for name in ("same", "larger")
    ]
    assert items["teacher"] == sum(one) and one[0] < one[1]
    far = ["cluster.backend=ray", "cluster.roles={teacher_a: main, teacher_b: far}", "cluster.pools={far: {nodes: 1}}"]
    spread = cluster_plan(load_config([*base, *args, *far]).config, 512)
    assert spread is not None and "teacher_a" in spread.pools["main"].roles
    assert spread.pools["far"].roles == ("teacher_b",)
    assert spread.pools["far"].memory.items["teacher_b weights"] == one[1]
    assert "infer teacher_b" in spread.pools["far"].memory.phases
    far[1] = "cluster.roles.teacher_b=far"
    spread = cluster_plan(load_config([*base, *args, *far]).config, 512)
    assert spread is not None and spread.pools["far"].roles == ("teacher_a", "teacher_b"), "where least lives"


def test_another_teacher_is_another_run(base):
    def of(name: str):
        args = ["algorithm.name=gkd", f"teacher.path={folder_of(base)}/{name}"]
        return identity_of(load_config([*base, *args]), "train")

    others, _ = compare(of("same"), of("policy"))
    assert [line.partition(":")[0] for line in others] == ["teacher.path"]
    assert compare(of("same"), of("same")) == ([], {})


# -- an adapter --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(base) -> Path:
    """Beside the models: `one` and `two` are of `same`, `away` is of a model that is not here."""
    folder = Path(folder_of(base))
    write_adapter(folder / "one", folder / "same", seed=1)
    write_adapter(folder / "two", folder / "same", seed=2)
    write_adapter(folder / "away", folder / "policy", base_model_name_or_path="some/model")
    return folder


ADAPTERS = [
    (dict(use_dora=True), "an adapter with use_dora=True, which is not read here; merge it into its base"),
    (dict(peft_type="IA3"), "an adapter with peft_type=IA3"),
    (dict(peft_type=None), "an adapter with peft_type=None"),
    (dict(bias="all"), "an adapter with bias=all"),
    (dict(lora_bias=True), "an adapter with lora_bias=True"),
    (dict(init_lora_weights="pissa_niter_4"), "an adapter with init_lora_weights=pissa_niter_4"),
    (dict(target_parameters=["a"]), "its target_parameters name a, which is no tensor of experts"),
    (dict(a_key_of_a_later_version=1), "an adapter with a_key_of_a_later_version=1"),
    (dict(lora_alpha="much"), "Expected `float`, got `str` - at `$.lora_alpha`; save it again with PEFT"),
    (dict(rank_pattern={"q_proj": "2"}), "Expected `int`, got `str` - at `$.rank_pattern[...]`"),
    (
        dict(left_out=["layers.0.self_attn.q_proj.lora_B.weight"]),
        "its factors of model.layers.0.self_attn.q_proj.weight",
    ),
    (
        dict(left_out=["q_proj.lora_A.weight", "q_proj.lora_B.weight"]),
        "it has no factors of model.layers.0.self_attn.q_proj.weight, which its target_modules name",
    ),
    (dict(r=2, rank_pattern={"x": 3}, lora_r=4), "A [4, 16] and B [16, 4], with r=2 in adapter_config.json"),
    (dict(base="wide"), "it adds [32, 32] to model.layers.0.self_attn.q_proj.weight, which is [16, 16] in its base"),
    (dict(base="deep"), "it changes model.layers.1.self_attn.q_proj.weight, which is no weight of a layer of its base"),
    (dict(targets=["embed_tokens"]), "it changes model.embed_tokens.weight, which is tied to another weight"),
    (dict(extra="base_model.model.model.norm.weight"), "model.norm.weight is [3] in it and [16] in its base"),
    (dict(extra="base_model.model.score.weight"), "it changes score.weight, which is no weight of a layer of its base"),
    (dict(broken="adapter_config.json"), "adapter_config.json: not JSON"),
    (dict(broken="adapter_model.safetensors"), "not a safetensors file"),
    (dict(gone=True), "no *.safetensors (there is adapter_model.bin: save it again"),
    (dict(name="weights.safetensors"), "an adapter without adapter_model.safetensors; save it again with PEFT"),
]


def spoiled(folder: Path, root: Path, what: dict) -> Path:
    """An adapter of `same` with this wrong in it."""
    what = dict(what)
    extra, broken, gone, name = (what.pop(k, None) for k in ("extra", "broken", "gone", "name"))
    left_out, targets = what.pop("left_out", []), what.pop("targets", ["q_proj", "v_proj"])
    own, r = root / what.pop("base", "same"), what.pop("lora_r", 4)
    said = {"r": r, "base_model_name_or_path": str(root / "same")}
    write_adapter(folder, own, *targets, without=left_out, **what | said)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | what))
    if extra:
        save_file({**load_file(weights), extra: torch.zeros(3)}, weights)
    if broken:
        (folder / broken).write_bytes((folder / broken).read_bytes()[:7])
    if gone or name:
        weights.rename(folder / (name or "adapter_model.bin"))
    return folder


def test_an_adapter_that_cannot_be_read_is_refused_with_the_fix(base, adapters, tmp_path):
    model(adapters / "wide", seed=3, hidden=32)
    model(adapters / "deep", seed=3, layers=2)
    wrong = []
    for i, (what, expected) in enumerate(ADAPTERS):
        folder = spoiled(tmp_path / str(i), adapters, what)
        for given in (f"teacher.path={folder}", f"teacher.paths.a={folder}"):
            found = faults(base, "algorithm.name=opd", given)
            if len(found) != 1 or expected not in found[0] or "model.path" in found[0]:
                wrong.append((what, found))
    assert not wrong, wrong
    found = faults(base, "algorithm.name=opd", f"teacher.path={adapters}/wrong")
    assert "no such folder" in found[0]


def test_an_adapter_is_a_teacher_of_its_base_s_sizes(base, adapters):
    one = "step.samples_per_prompt=1"
    for name in ("opd", "gkd", "gkd_topk"):
        assert not faults(base, f"algorithm.name={name}", "teacher.path=@/one", "teacher.top_k=8", one)
    both = ["algorithm.name=opd", f"teacher.paths={{a: {adapters}/one, b: {adapters}/two}}"]
    assert not faults(base, *both, one)

    def items(*args: str) -> dict[str, int]:
        return dict(make_plan(load_config([*base, *args]).config).memory.items)

    def of(name: str) -> dict[str, int]:
        return items("algorithm.name=gkd", f"teacher.path={adapters}/{name}")

    assert of("one") == of("same") and of("away") == of("policy")
    assert items(*both)["teacher"] == 2 * of("same")["teacher"]
    far = ["cluster.backend=ray", "cluster.pools={far: {nodes: 1}}", "cluster.roles.teacher=far"]
    spreads = [
        cluster_plan(load_config([*base, "algorithm.name=gkd", f"teacher.path={adapters}/{n}", *far]).config, 512)
        for n in ("one", "same")
    ]
    assert spreads[0] is not None and spreads[0].pools["far"] == spreads[1].pools["far"]


def test_where_its_base_is_not_the_policy_s_model_is_taken_if_it_fits(base, adapters, tmp_path):
    away, policy = f"{adapters}/away", f"{adapters}/policy"
    assert base_of(away, policy) == policy and base_of(f"{adapters}/one", policy) == f"{adapters}/same"
    assert base_of(policy, "x") == policy and base_of("http://a:1", "x") == "http://a:1"
    assert not faults(base, "algorithm.name=opd", f"teacher.path={away}", "step.samples_per_prompt=1")
    model(adapters / "wider", hidden=32, ffn=32)
    other = write_adapter(tmp_path / "other", adapters / "wider", base_model_name_or_path="some/model")
    (found,) = faults(base, "algorithm.name=opd", f"teacher.path={other}")
    assert f"({policy}); name the folder of its own base in adapter_config.json" in found
    for copied in (*(adapters / "policy").glob("*.json"),):  # some save the model's own files beside the adapter's
        shutil.copy(copied, adapters / "one")
    assert base_of(f"{adapters}/one", policy) == f"{adapters}/same"


def test_an_adapter_is_known_by_its_content_and_its_base_s(base, adapters, tmp_path):
    def of(*args: str):
        return identity_of(load_config([*base, "algorithm.name=opd", *args]), "train")

    shutil.copytree(adapters / "same", tmp_path / "base")
    write_adapter(tmp_path / "a", tmp_path / "base", seed=1)
    given = (f"teacher.path={tmp_path}/a",), (f"teacher.paths={{x: {tmp_path}/a, y: {adapters}/two}}",)
    before = [of(*args) for args in given]
    assert [compare(was, of(*args)) for was, args in zip(before, given)] == [([], {})] * 2
    config = tmp_path / "a" / "adapter_config.json"
    for change in (
        lambda: write_adapter(tmp_path / "a", tmp_path / "base", seed=2),
        lambda: config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9')),
        lambda: shutil.copy(adapters / "policy" / "model.safetensors", tmp_path / "base"),
    ):
        change()
        now = [of(*args) for args in given]
        for key, was, is_now in zip(("teacher.path", "teacher.paths"), before, now):
            (line,) = compare(was, is_now)[0]
            assert line.startswith(f"{key}: ") and "another content" in line
        before = now
