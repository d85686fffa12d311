"""LoRA in configuration, plan and identity: what is trained is known from the headers of a model's files, and what
cannot be trained is refused before anything starts."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from each import each
from handmade_model import write_model, write_qwen_half_billion, write_rows
from quantised import quantised_copy
from safetensors.torch import load_file, save_file

from verl.cli import VERBS, main
from verl.config.cluster import roles_on_base
from verl.config.devices import base_format, compute_dtype
from verl.config.load import load_config
from verl.config.lora_layers import TrainedFactors
from verl.config.model_files import describe_model
from verl.config.validate import validate
from verl.driver.identity import compare, identity_of, start_beside_folder
from verl.driver.setup import with_native_dtype
from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec, idle_excludes, target_modules
from verl.model_engine.memory import RankWork, memory
from verl.planner.plan import make_plan
from verl.planner.text import render_plan
from verl.rollout.vllm import vllm_faults
from verl.wire import cut_block

RANK = "model.lora.rank=8"
SHM = ("sync.engine=shm",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("lora")
    write_qwen_half_billion(where / "qwen")
    write_model(where / "tiny")
    write_rows(where / "train.jsonl", 64)
    return where


@pytest.fixture(scope="module")
def quantised(tmp_path_factory, tiny_model) -> Path:
    where = tmp_path_factory.mktemp("quantised")
    quantised_copy(tiny_model, where / "int8", "int8")
    write_rows(where / "train.jsonl", 64)
    return where


def resolved_of(folder: Path, *args: str, model: str = "tiny"):
    own = [f"model.path={folder}/{model}", f"data.train_files={folder}/train.jsonl", f"run.root_dir={folder}/runs"]
    return load_config([*own, *args])


def planned(folder: Path, *args: str, model: str = "tiny"):
    return make_plan(resolved_of(folder, *args, model=model).config)


def adapter(folder: Path, rank: int = 4, value: float = 0.5, **config) -> Path:
    """An adapter of the tiny model in PEFT's layout, with factors of q_proj."""
    folder.mkdir()
    factors = {"A": torch.full((rank, 64), value), "B": torch.full((64, rank), value)}
    every = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{name}.weight": factor.clone()
        for layer in range(2)
        for name, factor in factors.items()
    }
    save_file(every, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def test_trained_parameters_gradients_and_states_are_those_of_the_factors(folder):
    """4,399,104 is PEFT's number for rank 8 in all linear layers of Qwen2.5-0.5B."""
    plan, whole = (planned(folder, *args, model="qwen") for args in ((RANK,), ()))
    factors = plan.factors
    assert factors is not None and whole.factors is None and "\ntrained " not in render_plan(whole)
    assert factors.parameters == 4_399_104
    assert "trained   4,399,104 parameters (0.89%): LoRA of rank 8 in 168 layers" in render_plan(plan)
    assert plan.memory.items["gradients"] == 4 * factors.parameters
    assert plan.memory.items["optimizer states"] == 8 * factors.parameters
    assert plan.checkpoint_parts["state"] == 12 * factors.parameters
    assert 0 <= plan.checkpoint_parts["weights"] - 4 * factors.parameters < 100_000
    assert "head's gradient" in whole.memory.items and "head's gradient" not in plan.memory.items
    weights = [p.memory.items["master weights"] for p in (plan, whole)]
    assert weights[0] - weights[1] == 4 * factors.parameters, "the base as before, and the factors"
    assert plan.memory.items["rollout weights"] == whole.memory.items["rollout weights"]
    ranks = ("cluster.backend=ray", "cluster.ranks_per_node=4", "parallel.pipeline=2")
    spread = planned(folder, RANK, *ranks, model="qwen").cluster.pools["main"].memory
    assert spread.items["actor gathered factors"] == 2 * factors.parameters, "whole, of half of the layers"
    assert all("actor gathered factors" in phase for phase in spread.phases.values())
    lagged = ("algorithm.name=opd", "teacher.path=policy", "teacher.ema=0.9")
    averaged = planned(folder, RANK, *lagged, model="qwen")
    assert averaged.memory.items["teacher"] == averaged.checkpoint_parts["average"] == 4 * factors.parameters
    critic = planned(folder, RANK, "algorithm.name=ppo", model="qwen").checkpoint_parts["critic"]
    assert critic == plan.checkpoint_parts["state"]


def test_a_rank_gathers_the_gradients_of_factors_alone(folder):
    model, layout = describe_model(str(folder / "qwen")), Layout(world_size=2)
    whole, lora = (memory(model, layout, RankWork(tokens=64, passes=2, **w)) for w in ({}, {"factors": 4_399_104}))
    assert lora["gradients"] == 4 * 4_399_104 // 2 and lora["optimizer states"] == 2 * lora["gradients"]
    assert lora["gathered gradients"] == 2 * 4 * 4_399_104 // 24
    assert lora["reduced embeddings"] == 0 < whole["reduced embeddings"]
    slices = Layout(world_size=4, tensor=2)
    half = {"factors": 4_000_000, "expert_factors": 2_000_000}
    assert memory(model, slices, RankWork(tokens=64, **half))["gradients"] == 4 * (500_000 + 1_000_000), (
        "tensor ranks do not divide experts"
    )
    same = {"gathered embeddings", "gathered layers", "activations", "log-prob chunk"}
    assert {name: lora[name] for name in same} == {name: whole[name] for name in same}


def test_targets_of_the_plan(folder):
    some = planned(folder, RANK, "model.lora.targets=[q_proj, v_proj]", "model.lora.exclude=['.*layers.1.*']")
    assert [*some.factors.layers] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    assert some.factors.parameters == 8 * (64 + 64 + 64 + 32)


def test_an_exclude_without_the_word_experts_leaves_theirs():
    """PEFT excludes modules, and experts are named in another list."""
    linears, experts = ["mlp.shared_expert.down_proj", "q_proj"], ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]

    def left(exclude: str) -> tuple[str, ...]:
        spec = LoraSpec(rank=4, targets=["all-linear", "experts"], exclude=[exclude])
        return target_modules(spec, linears, linears, "M", experts)

    assert left("down_proj") == ("q_proj", *experts)
    assert left("experts.down_proj") == (*linears, experts[1])
    assert idle_excludes(LoraSpec(exclude=["gate_up_proj", "experts"]), linears, experts) == ["gate_up_proj"]


def test_an_exclude_that_names_no_layer_is_a_warning(folder):
    """Public scripts exclude the vision towers that a text model has not."""
    (line,) = planned(folder, RANK, "optim.lr=1e-4", "model.lora.exclude=['.*visual.*', o_proj]").warnings
    assert line.startswith("model.lora.exclude=.*visual.*: no linear layer of ") and "does nothing" in line


def test_an_adapter_that_training_starts_from_has_its_own_size(folder, tmp_path):
    plan, whole = (planned(folder, *more) for more in ((f"model.lora.path={adapter(tmp_path / 'a')}",), ()))
    assert plan.factors.parameters == 2 * 4 * 128 and plan.factors.rank == 4
    weights, base = (one.memory.items["master weights"] for one in (plan, whole))
    assert weights - base == 2 * 4 * plan.factors.parameters, "those of the start are kept"


@each("args, low", [((RANK,), True), ((RANK, "optim.lr=9e-6"), True), ((RANK, "optim.lr=1e-5"), False), ((), False)])
def test_a_learning_rate_of_full_training_is_a_warning(folder, args, low):
    found = [line for line in planned(folder, *args).warnings if "is low for LoRA" in line]
    assert len(found) == low
    if args == (RANK,):
        assert found == [
            "optim.lr=1e-06 is low for LoRA with optim.name=adamw: factors want about 10 times the rate of training "
            "all weights; try 1e-05"
        ]


def test_a_critics_learning_rate_of_full_training_is_a_warning_too(folder):
    for lr, low in ((1e-5, 1), (1e-4, 0)):
        given = planned(folder, RANK, "optim.lr=1e-4", "algorithm.name=ppo", f"critic.lr={lr}").warnings
        assert sum(line.startswith("critic.lr=1e-05 is low for LoRA") for line in given) == low
    assert not any("critic.lr" in line for line in planned(folder, RANK, "critic.lr=1e-5").warnings)


@each(
    "args, text",
    [
        (
            ("model.lora.rank=33",),
            "model.lora.rank=33: model.layers.0.self_attn.k_proj of Qwen2ForCausalLM is [32, 64]",
        ),
        ((RANK, "model.lora.targets=[w_proj]"), "model.lora.targets=w_proj: no linear layer of Qwen2ForCausalLM"),
        ((RANK, "model.lora.targets=['*']"), "model.lora.targets=*: not a regular expression"),
        ((RANK, "model.lora.targets=[lm_head]"), "model.lora.targets=lm_head: embeddings and the output head"),
        ((RANK, "model.lora.targets=[embed_tokens]"), "model.lora.targets=embed_tokens: embeddings and the output"),
        ((RANK, "model.lora.exclude=[all-linear]"), "no layer is left to train"),
        (("model.lora.path={tmp}/other",), "model.lora.path={tmp}/other: it changes"),
        (("model.lora.path={tmp}/fits", "model.path={folder}/qwen"), "in its base ({folder}/qwen)"),
        (("model.lora.path={tmp}/nan",), "model.lora.path={tmp}/nan: base_model.model.model.layers.0.self_attn.q_proj"),
    ],
)
def test_what_cannot_be_trained_is_refused_without_a_model(folder, tmp_path, capsys, monkeypatch, args, text):
    monkeypatch.setattr("verl.driver.launch.make_plan", lambda *args: pytest.fail("the run has started"))
    other = adapter(tmp_path / "other")
    tensors = {"base_model.model.model.layers.7.mlp.up.lora_A.weight": torch.zeros(4, 8)}
    save_file(tensors, other / "adapter_model.safetensors")
    adapter(tmp_path / "fits")
    adapter(tmp_path / "nan", value=float("nan"))
    at = {"tmp": tmp_path, "folder": folder}
    given = [a.format(**at) if a.startswith("model.") and "path" in a else a for a in args]
    run = [f"model.path={folder}/tiny", f"data.train_files={folder}/train.jsonl", f"run.root_dir={tmp_path}/runs"]
    for verb in ("train", "plan"):
        assert main([verb, *run, *given]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert text.format(**at) in lines[-1], lines
        assert sum("model.lora" in line for line in lines) == 1 or "in its base" in text, lines
    assert not (tmp_path / "runs").exists()


NO_TRAINING = {
    "eval": ("verl.driver.launch.assemble", ()),
    "generate": ("verl.driver.generate._generate", ("prompt=1",)),
    "serve": ("verl.serve._serve", ("serve.port=0",)),
}


def test_an_adapter_beside_what_trains_nothing_is_refused(folder, tmp_path, capsys):
    path = adapter(tmp_path / "a")
    rows = f"data.eval_files={folder}/train.jsonl"
    for verb, (_, more) in NO_TRAINING.items():
        assert main([verb, f"model.path={folder}/tiny", rows, f"model.lora.path={path}", *more]) == 2
        assert f"`verl {verb}` trains nothing" in capsys.readouterr().err


@each("verb", [*NO_TRAINING])
def test_what_trains_nothing_has_no_factors_of_a_recipe(folder, tiny_model, tmp_path, monkeypatch, verb):
    at, more = NO_TRAINING[verb]

    async def seen(given, *_, **__):
        raise Refused(f"{dict((given if verb != 'eval' else given.config).model.lora)}")

    monkeypatch.setattr(at, seen)
    own = [f"model.path={tiny_model}", f"data.eval_files={folder}/train.jsonl", f"run.root_dir={tmp_path}"]
    with pytest.raises(Refused, match="^{}$"):
        VERBS[verb]([*own, "model.lora.rank=640", "optim.name=muon", *more])


def test_another_rank_scale_target_or_adapter_is_another_run(folder, tmp_path):
    def identity(*args: str):
        return identity_of(resolved_of(folder, *args), "train")

    start = identity(RANK)
    assert compare(start, identity(RANK, "model.lora.alpha=32", "model.lora.targets=[all-linear]")) == ([], {})
    assert compare(identity(), identity("model.lora.rank=0")) == ([], {})
    for more in (("model.lora.rank=4",), (RANK, "model.lora.alpha=16"), (RANK, "model.lora.targets=[q_proj]"), ()):
        (line,), changed = compare(start, identity(*more))
        assert line.startswith("model.lora: ") and not changed
    one, same, other = (adapter(tmp_path / n, value=v) for n, v in (("a", 0.5), ("b", 0.5), ("c", 0.25)))
    first = identity(f"model.lora.path={one}")
    assert compare(first, identity(f"model.lora.path={same}")) == ([], {}), "the place does not matter"
    assert compare(first, identity(f"model.lora.path={other}"))[0]


@each(
    "args, text",
    [
        (("model.quantization=nf4",), "model.quantization=nf4: only a base that LoRA does not change is quantised"),
        ((RANK, "model.quantization=nf4", "rollout.dtype=fp8"), "the rollout would quantise it once more"),
        ((RANK, "model.quantization=nf5"), "model.quantization=nf5"),
        (
            (RANK, "model.quantization=int8", "cluster.backend=ray", "cluster.ranks_per_node=2"),
            "model.quantization=int8: codes are not divided among ranks",
        ),
    ],
)
def test_a_base_that_cannot_be_quantised_is_refused(folder, args, text):
    with pytest.raises(ValueError, match=text):
        validate(resolved_of(folder, *args).config)


@each(
    "args, text",
    [
        ((), "quantised as int8 by bitsandbytes, and codes have no gradient; train factors on it (model.lora.rank=32)"),
        ((RANK, "model.quantization=nf4"), "is quantised as int8, and codes are not converted; leave it out"),
        ((RANK, "rollout.engine=vllm"), "its server would read the codes"),
        ((RANK, "rollout.dtype=fp8"), "which is quantised as int8, with rollout.dtype=fp8"),
        ((RANK, "cluster.backend=ray", "cluster.ranks_per_node=2"), "its int8 codes are not divided among ranks"),
        (("model.path={exact}", "algorithm.name=ppo", "critic.path={quantised}"), "critic.path="),
    ],
)
def test_a_quantised_folder_is_the_base_of_lora_alone(quantised, tiny_model, args, text):
    at = {"exact": tiny_model, "quantised": quantised / "int8"}
    with pytest.raises(ValueError, match=re.escape(text)):
        validate(resolved_of(quantised, *(a.format(**at) for a in args), model="int8").config)


def test_a_quantised_folder_is_planned_as_a_base_that_is_quantised_here(quantised, tiny_model):
    exact = planned(quantised, RANK, "model.quantization=int8", f"model.path={tiny_model}")
    for more in ((), ("model.quantization=int8",)):
        plan = planned(quantised, RANK, *more, model="int8")
        assert plan.memory.items == exact.memory.items and plan.factors == exact.factors
    trained = resolved_of(quantised, RANK, model="int8").config
    assert base_format(trained) == "int8" and base_format(trained, str(tiny_model)) == "none"
    validate(trained)
    for command in ("eval", "generate"):
        given = resolved_of(quantised, f"data.eval_files={quantised}/train.jsonl", model="int8").config
        validate(given, command)


@each("rank, small", [(8, True), (16, True), (32, False)])
def test_factors_below_what_is_kept_in_8_bits_are_a_warning(folder, rank, small):
    """The longest side of a matrix of this model is 128: 32 x 128 values have moments in 8 bits."""
    given = (f"model.lora.rank={rank}", "optim.name=adamw_8bit", "optim.lr=1e-4")
    found = [line for line in planned(folder, *given).warnings if "it saves nothing" in line]
    assert len(found) == small
    assert not small or f"the largest factor has {128 * rank:,} values" in found[0]
    assert TrainedFactors(rank, {"mlp.experts.up_proj": (6, 64, 128)}).largest == 6 * 128 * rank, "of all experts"


def test_the_plan_says_what_an_optimizer_updates_otherwise(folder):
    """40,960 and 32,768 values of two layers, and 67,200 of embedding, norms and biases."""
    assert "optimizer" not in planned(folder).optimizer and planned(folder).optimizer == "adamw"
    text = render_plan(planned(folder, "optim.name=muon"))
    assert re.search(r"^optimizer muon for the matrices of layers, 73,728 values; adamw for the other 6", text, re.M), (
        text
    )


@pytest.mark.parametrize("name", ["muon", "apollo", "apollo_mini"])
def test_an_optimizer_of_matrices_does_not_train_factors(folder, name):
    with pytest.raises(ValueError, match=f"optim.name={name} with model.lora: AdamW would update the factors"):
        validate(resolved_of(folder, RANK, f"optim.name={name}").config)


def test_an_adapter_of_the_policy_is_not_added_to_another_critic(folder, tmp_path):
    given = (f"model.lora.path={adapter(tmp_path / 'a')}", f"critic.path={folder}/qwen", "algorithm.name=ppo")
    with pytest.raises(ValueError, match="with model.lora.path: the adapter is of model.path"):
        validate(resolved_of(folder, *given).config)


def test_an_adapter_of_other_weights_is_a_warning(folder, tmp_path):
    write_model(tmp_path / "other")
    path = adapter(tmp_path / "a", base_model_name_or_path=str(tmp_path / "other"))
    (line,) = [w for w in planned(folder, f"model.lora.path={path}", "optim.lr=1e-4").warnings if "trained on" in w]
    assert f"it was trained on {tmp_path / 'other'}" in line
    own = adapter(tmp_path / "b", base_model_name_or_path=str(folder / "tiny"))
    assert not [w for w in planned(folder, f"model.lora.path={own}").warnings if "trained on" in w]


def test_what_the_start_weights_are_made_of_is_known(folder, tmp_path):
    """The log-probs of a reference are kept by it, since the folder of the model is not all."""
    one, two = adapter(tmp_path / "a"), adapter(tmp_path / "b", value=2.0)
    given = ((), (f"model.lora.path={one}",), (f"model.lora.path={two}",), (RANK, "model.quantization=nf4"), (RANK,))
    found = [start_beside_folder(resolved_of(folder, *args).config) for args in given]
    assert found[0] == found[4] == "" and len({*found}) == 4


def test_the_plan_counts_a_quantised_base(folder):
    """Embeddings (136 million values, tied) stay in float32, and 358 million values have 0.516 bytes, or 1.004. The
    rollout in this process reads the same codes, one that gets them by shared memory has its own."""
    plans = [
        planned(folder, RANK, "model.dtype=float32", *more, model="qwen")
        for more in ((), ("model.quantization=nf4",), ("model.quantization=int8",), ("model.quantization=nf4", *SHM))
    ]
    found, rollout = ([p.memory.items[f"{of} weights"] for p in plans] for of in ("master", "rollout"))
    assert found[0] - found[1] == pytest.approx(357_900_000 * (4 - 0.51587), rel=1e-3)
    assert found[0] - found[2] == pytest.approx(357_900_000 * (4 - 1.0039), rel=1e-3)
    assert rollout[1] == rollout[2] < 0.001 * rollout[0], "norms and biases: it reads the trainer's embedding too"
    assert rollout[3] == pytest.approx(357_900_000 * 0.51587 + 136_134_656 * 4, rel=1e-3)
    assert plans[1].memory.items["incoming weights"] == 4 * plans[1].factors.parameters
    copied = planned(folder, RANK, "model.quantization=nf4", "rollout.engine=hf", model="qwen")
    assert [w for w in copied.warnings if "the rollout reads no codes here" in w]
    assert not [w for w in plans[3].warnings if "codes" in w]


def test_a_quantised_base_computes_in_float32_on_a_cpu_in_the_plan_and_in_the_run(folder):
    config = resolved_of(folder, RANK, "model.quantization=nf4", "model.device=cpu").config
    assert config.model.dtype == "auto"
    assert compute_dtype(config) == with_native_dtype(config).model.dtype == "float32"


def test_a_critic_and_a_reference_on_the_policys_base_are_no_further_copies_of_it(folder):
    ppo = ("algorithm.name=ppo", "algorithm.kl_loss_coef=0.1")
    whole, lora = (planned(folder, *ppo, *more, model="qwen").memory.items for more in ((), (RANK,)))
    assert whole["reference policy"] == whole["master weights"] and "reference policy" not in lora
    values = planned(folder, RANK, model="qwen").factors.parameters
    assert lora["critic with its optimizer"] == pytest.approx(16 * values, rel=0.01)


def test_ranks_hold_one_base_of_policy_critic_and_reference(folder):
    ppo = (RANK, "algorithm.name=ppo", "algorithm.kl_loss_coef=0.1", "cluster.backend=ray", "cluster.ranks_per_node=2")
    plan, apart = (planned(folder, *ppo, *more, model="qwen") for more in ((), ("cluster.roles={critic: main}",)))
    memory, own = (one.cluster.pools["main"].memory for one in (plan, apart))
    factors = plan.factors.parameters
    assert memory.items["critic weights"] == 2 * factors and memory.items["critic optimizer states"] == 4 * factors
    assert own.items["critic weights"] - 2 * factors == pytest.approx(memory.items["actor weights"], rel=0.3)
    assert "update critic" in memory.phases and "ref weights" not in memory.items
    line = "base      one, frozen, of actor (the trained factors), critic (its own factors and head), ref (the factors"
    assert line in render_plan(plan) and "critic (" not in render_plan(apart)
    assert (
        apart.cluster.pools["main"].roles[:2] == ("actor", "critic") and plan.cluster.pools["main"].roles[0] == "actor"
    )


def test_an_adapter_of_the_policys_weights_is_a_set_on_its_base(folder, tmp_path):
    """The same bytes in another folder are the same base; one other byte, or another RoPE, is another model."""
    for name in ("same", "other", "renamed", "turned"):
        shutil.copytree(folder / "tiny", tmp_path / name)
    for name, more in (("renamed", {"_name_or_path": "x", "dtype": "bfloat16"}), ("turned", {"rope_theta": 5e5})):
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    other = tmp_path / "other" / "model.safetensors"
    changed = bytearray(other.read_bytes())
    changed[-1] ^= 1
    other.write_bytes(changed)
    for base, more, on in (
        ("same", (RANK,), True),
        ("other", (RANK,), False),
        ("renamed", (RANK,), True),
        ("turned", (RANK,), False),
        ("same", (), False),
        ("same", (RANK, "model.engine_options.offload_weights=true"), False),
    ):
        named = {"base_model_name_or_path": str(tmp_path / base)}
        path = adapter(tmp_path / f"{base}{len(more)}{on}", **named)
        plan = planned(folder, *more, "algorithm.name=opd", f"teacher.path={path}")
        assert plan.on_base == (("teacher",) if on else ())
        assert ("teacher (the factors of its adapter)" in render_plan(plan)) == on
        assert (plan.memory.items["teacher"] == 4 * 2 * 4 * 128) == on
    coded = planned(folder, RANK, "model.quantization=nf4", "algorithm.name=opd", f"teacher.path={path}")
    assert "base      one, frozen in nf4, of actor (the trained factors), teacher (the factors" in render_plan(coded)
    apart = ("cluster.backend=ray", "cluster.ranks_per_node=2", "cluster.roles={teacher: main}")
    config = resolved_of(folder, RANK, *apart, "algorithm.name=opd", f"teacher.path={path}").config
    assert roles_on_base(config) == (), "a role with a place has a model of its own"


def test_an_adapter_with_factors_of_an_untied_head_is_a_model_of_its_own(folder, tmp_path):
    """A set has factors of linear layers in decoder layers and of experts; merged, the head has its own too."""
    base = write_model(tmp_path / "untied", tied=False)
    path = adapter(tmp_path / "teacher", base_model_name_or_path=str(base))
    given = (RANK, f"model.path={base}", "algorithm.name=opd", f"teacher.path={path}")
    assert planned(folder, *given).on_base == ("teacher",)
    factors = load_file(path / "adapter_model.safetensors")
    head = {"A": torch.ones(4, 64), "B": torch.ones(1000, 4)}
    factors |= {f"base_model.model.lm_head.lora_{name}.weight": factor for name, factor in head.items()}
    save_file(factors, path / "adapter_model.safetensors")
    assert planned(folder, *given).on_base == ()


VLLM = ("rollout.engine=vllm", "rollout.python=/bin/true")


def test_vllm_gets_factors_or_merged_weights_and_the_plan_names_which(folder, monkeypatch):
    def faults(*args: str, model: str = "tiny") -> list[str]:
        return [*vllm_faults(resolved_of(folder, *VLLM, *args, model=model).config, {}, {})]

    apart = "served    rollout engines get the base once, then the factors of each version, unmerged"
    merged = "served    rollout engines get all weights in each version, with the factors added in float32 and rounded"
    url, by_merging = ("rollout.url=http://127.0.0.1:1",), "rollout.engine_options.lora_policy=merged"
    for given, line in {
        VLLM: apart,
        (*VLLM, by_merging): merged,
        ("rollout.engine=vllm", *url): merged,
        ("rollout.engine=vllm", *url, "rollout.engine_options.max_lora_rank=8"): apart,
        ("rollout.engine=vllm", *url, "rollout.engine_options.max_lora_rank=4"): merged,
        (*VLLM, "sync.engine=shm", "sync.engine_options.bucket_mb=8"): merged,
        (): apart,
        ("cluster.backend=ray",): apart,
    }.items():
        assert line in render_plan(planned(folder, RANK, *given)), given
    assert "served" not in render_plan(planned(folder))
    wide = ("model.lora.rank=640", "model.lora.targets=[down_proj]")
    large = faults(*wide, model="qwen")
    assert (
        large
        and "rank 640, and it loads adapters of at most 512; set rollout.engine_options.lora_policy=merged" in large[0]
    )
    assert not faults(*wide, by_merging, model="qwen") and not faults(RANK)
    monkeypatch.setattr(TrainedFactors, "of_experts", 8)
    assert merged in render_plan(planned(folder, RANK, *VLLM)), "it takes no factors of experts"
    for given, line, coded in (((), apart, True), (("model.device=cuda",), merged, False)):
        plan = planned(folder, RANK, *given, "model.quantization=nf4")
        assert line in render_plan(plan) and coded != any("reads no codes here" in found for found in plan.warnings)
    assert apart in render_plan(planned(folder, RANK, "model.device=cuda", "rollout.engine=hf")), "not in pages"


def test_sglang_gets_merged_weights_or_factors_where_it_is_told_to(folder):
    sglang, adapter_ = (
        ("rollout.engine=sglang", "rollout.python=/bin/true"),
        "rollout.engine_options.lora_policy=adapter",
    )
    apart, merged = "rollout engines get the base once, then the factors", "rollout engines get all weights in each"
    url = ("rollout.engine=sglang", "rollout.url=http://127.0.0.1:1", adapter_)
    for given, line in {
        sglang: merged,
        (*sglang, adapter_): apart,
        url: merged,
        (*url, "rollout.engine_options.max_lora_rank=8"): apart,
    }.items():
        assert line in render_plan(planned(folder, RANK, *given)), given
    routed = (*url, "rollout.engine_options.router=http://127.0.0.1:2")
    with pytest.raises(ValueError, match="router=.* with lora_policy=adapter: it drops the name of an adapter"):
        validate(resolved_of(folder, RANK, *routed).config)


def test_ranks_of_vllm_that_would_cut_a_block_of_8_bits_are_refused(folder):
    def faults(ranks: int) -> list[str]:
        args = (*VLLM, "rollout.dtype=fp8", f"rollout.engine_options.tensor_parallel_size={ranks}")
        return [*vllm_faults(resolved_of(folder, *args, model="qwen").config, {}, {})]

    assert not faults(1)
    (found,) = faults(2)
    with pytest.raises(ValueError, match="no block of 128 ends there"):
        cut = ("rollout.dtype=fp8", "rollout.engine_options.tensor_parallel_size=2")
        validate(resolved_of(folder, *VLLM, *cut, model="qwen").config)
    assert "q_proj.weight [896, 896]: a rank of 2 has 448 of 896, and no block of 128 ends there; set" in found
    assert not cut_block("model.layers.0.mlp.down_proj.weight", (896, 4864), 2, 2)
    assert "a rank of 4 has 1216 of 4864" in cut_block("model.layers.0.mlp.down_proj.weight", (896, 4864), 4, 2)
    assert not cut_block("model.layers.0.self_attn.k_proj.weight", (256, 896), 8, 2), "two ranks divide it"
