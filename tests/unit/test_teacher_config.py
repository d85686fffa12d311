"""A teacher that cannot be one is refused before anything expensive; the plan knows what it costs."""

import re
from pathlib import Path

import pytest
from handmade_model import write_rows

from verl.algorithms.presets import knobs
from verl.config.compat.table import DISTILLATION
from verl.config.load import load_config, validate
from verl.config.plan import make_plan
from verl.config.spread import spread_of
from verl.config.tree import leaves
from verl.driver.identity import compare, identity_of
from verl.driver.models import refuse_other_words
from verl.models import tiny


def model(folder: Path, **sizes: int) -> Path:
    tokenizer = tiny.character_tokenizer("0123456789+= ")
    return tiny.save(
        tiny.qwen3(tokenizer, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16, **sizes), tokenizer, folder
    )


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
    (["algorithm.name=opd", "teacher.path=policy", "teacher.ema=1"], "must be >= 0 and < 1"),
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
        ["algorithm.name=gkd_topk", "teacher.paths.a=@/same", "teacher.top_k=8", "teacher.pick=best"],
        "teacher.pick=best: gkd_topk reads other tokens of each teacher",
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
        "parallel.tensor=2: gkd reads whole rows of the head",
    ),
]


@pytest.mark.parametrize("args, expected", REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_what_cannot_be_is_refused_with_the_fix(base, args, expected):
    found = faults(base, *args)
    assert any(expected.replace("@", folder_of(base)) in line for line in found), found


def test_what_can_be_is_not(base):
    one = "step.samples_per_prompt=1"
    assert not faults(base, "algorithm.name=opd", "teacher.path=@/larger", one)
    assert not faults(base, "algorithm.name=gkd", "teacher.path=@/same", one)
    assert not faults(base, "algorithm.name=gkd_topk", "teacher.path=@/same", "teacher.top_k=32", one)
    assert not faults(base, "algorithm.name=dapo", "algorithm.loss=gkd", "teacher.path=@/same")
    assert not faults(base, *GKD, *STORED, "step.updates_per_step=2", "algorithm.entropy_coef=0.01")
    both = ("teacher.paths={a: @/same, b: @/policy}", one)
    assert not faults(base, "algorithm.name=gkd_topk", "teacher.top_k=8", *both)
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


TRL_OWN = """model_init_kwargs trust_remote_code teacher_model_name_or_path teacher_model_revision disable_dropout
teacher_model_init_kwargs max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of temperature
top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
vllm_tensor_parallel_size beta max_tool_calling_iterations log_completions num_completions_to_print log_unique_prompts
lmbda max_new_tokens seq_kd"""
"""Of TRL 1.16: the fields of DistillationConfig that TrainingArguments has not, and of GKDConfig that SFTConfig has
not."""


def test_every_field_of_trl_is_in_the_table():
    assert {*TRL_OWN.split()} <= DISTILLATION.keys()


@pytest.mark.parametrize("field", DISTILLATION)
def test_a_field_of_trl_is_told_what_it_is_here(base, field):
    with pytest.raises(ValueError, match=f"unknown key '{field}'.*TRL's name; here: ") as told:
        load_config([*base, f"{field}=1"])
    keys = re.findall(
        r"\b(?:algorithm|teacher|rollout|step|model|data|sync|agent|track|pipeline)\.[a-z_.]*[a-z_]", str(told.value)
    )
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
    spread = spread_of(config, 512)
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
    spread = spread_of(load_config([*base, *args, *far]).config, 512)
    assert spread is not None and "teacher_a" in spread.pools["main"].roles
    assert spread.pools["far"].roles == ("teacher_b",)
    assert spread.pools["far"].memory.items["teacher_b weights"] == one[1]
    assert "infer teacher_b" in spread.pools["far"].memory.phases
    far[1] = "cluster.roles.teacher_b=far"
    spread = spread_of(load_config([*base, *args, *far]).config, 512)
    assert spread is not None and spread.pools["far"].roles == ("teacher_a", "teacher_b"), "where least lives"


def test_another_teacher_is_another_run(base):
    def of(name: str):
        args = ["algorithm.name=gkd", f"teacher.path={folder_of(base)}/{name}"]
        return identity_of(load_config([*base, *args]), "train")

    others, _ = compare(of("same"), of("policy"))
    assert [line.partition(":")[0] for line in others] == ["teacher.path"]
    assert compare(of("same"), of("same")) == ([], {})
