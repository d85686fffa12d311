"""Whole runs with LoRA: what is sent, what is saved, and the base that several roles share."""

import json

import numpy as np
import pytest
import torch
from quantised import quantised_copy
from safetensors.torch import load_file
from small_runs import REWARD, metrics_of, small_run, tensors_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.checkpoint.hf import HfExport
from verl.cli import main
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.lora import read_lora
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.merging import write_merged
from verl.model_engine.quantised_parts import load_dequantised
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models import tiny
from verl.track.packed import unpacked_segments
from verl.track.samples import read_samples
from verl.types import NO_ROUTE, ROUTES

LORA = ("model.lora.rank=4", "model.lora.alpha=8", "optim.lr=3e-3")


def adapter_bytes(folder):
    return sum(t.nbytes for t in load_file(folder / "adapter_model.safetensors").values())


def test_a_run_sends_and_saves_the_factors_alone(tmp_path, tiny_model, arithmetic_data):
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *LORA, "algorithm.kl_loss_coef=0.1")
    found = metrics_of(tmp_path / "r")
    (checkpoint,) = [p for p in (tmp_path / "r" / "checkpoints").iterdir() if p.name == "step_3"]
    size = adapter_bytes(checkpoint / "hf")
    for step in (1, 2, 3):
        assert found[step]["sync/bytes"] == size, "the base is sent once, before the first step"
        assert found[step]["mismatch/max_abs_dlogp"] < 1e-5
        assert found[step]["actor/grad_norm"] > 0
    assert found[1]["actor/kl_loss"] == 0 < found[3]["actor/kl_loss"], "the reference is the base"
    state = sum(p.stat().st_size for p in (checkpoint / "state" / "actor").iterdir())
    assert state < 4 * size + 100_000
    names = {p.name for p in (checkpoint / "hf").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith("model") for name in names) and "config.json" not in names
    config = json.loads((checkpoint / "hf" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    _, factors = read_lora("a", checkpoint / "hf", tiny_model)
    assert any(float(t.abs().max()) > 0 for n, t in factors.items() if "lora_B" in n)


def test_training_goes_on_from_an_adapter_with_it_as_reference(tmp_path, tiny_model, arithmetic_data):
    small_run(tmp_path / "a", tiny_model, arithmetic_data[:1], *LORA)
    adapter = tmp_path / "a" / "r" / "checkpoints" / "step_3" / "hf"
    more = (f"model.lora.path={adapter}", "algorithm.kl_loss_coef=0.1", "optim.lr=3e-3")
    small_run(tmp_path / "b", tiny_model, arithmetic_data[:1], *more)
    found = metrics_of(tmp_path / "b" / "r")
    assert abs(found[1]["actor/kl_loss"]) < 1e-9 < found[3]["actor/kl_loss"], (
        "the reference is the adapter of the start"
    )
    before, after = (
        load_file(p / "adapter_model.safetensors") for p in (adapter, tmp_path / "b/r/checkpoints/step_3/hf")
    )
    assert before.keys() == after.keys() and any(not np.array_equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_engines_compute_with_the_factors_unmerged(tmp_path, tiny_model, arithmetic_data, engine):
    more = (f"rollout.engine={engine}", "rollout.replicas=2", "run.total_steps=2")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *LORA, *more)
    found = metrics_of(tmp_path / "r")
    assert found[2]["sync/bytes"] == adapter_bytes(tmp_path / "r" / "checkpoints" / "step_2" / "hf")
    assert found[2]["mismatch/max_abs_dlogp"] < 1e-5


def test_ppo_trains_critic_and_policy_on_one_base(tmp_path, tiny_model, arithmetic_data):
    more = ("algorithm.name=ppo", "algorithm.kl_loss_coef=0.1", "critic.lr=3e-3")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *LORA, *more)
    found = metrics_of(tmp_path / "r")
    for step in (1, 2, 3):
        assert found[step]["critic/grad_norm"] > 0 and found[step]["actor/grad_norm"] > 0
        assert found[step]["mismatch/max_abs_dlogp"] < 1e-5, "the critic leaves the policy's factors alone"
    saved = tensors_of(tmp_path / "r", 3, "critic")
    assert any("value_head" in name for name in saved) and not any(name.endswith("proj.weight") for name in saved)
    policy = tensors_of(tmp_path / "r", 3)
    unlike = [n for n in policy if n.endswith("lora_B") and not torch.equal(policy[n], saved[n])]
    assert unlike, "each role has factors of its own"


def test_embedding_and_head_are_trained_whole_beside_the_factors(tmp_path, tiny_teacher, arithmetic_data):
    """PPO with a reference, killed after a step: the rollout computes with what is trained, the reference and the
    critic's start are the base, and a run that goes on is the one that was not ended."""
    more = ("algorithm.name=ppo", "algorithm.kl_loss_coef=0.1", "critic.lr=3e-3")
    args = (*LORA, *more, "model.lora.modules_to_save=[embed_tokens, lm_head]")
    for name, steps in (("a", (3,)), ("b", (2, 3))):
        for count in steps:
            small_run(tmp_path / name, tiny_teacher, arithmetic_data[:1], *args, f"run.total_steps={count}")
    found = metrics_of(tmp_path / "a" / "r")
    whole = {"model.embed_tokens.weight", "lm_head.weight"}
    base = load_file(tiny_teacher / "model.safetensors")
    for step in (1, 2, 3):
        assert found[step]["mismatch/max_abs_dlogp"] < 1e-5 and found[step]["critic/grad_norm"] > 0
        assert found[step]["sync/bytes"] == adapter_bytes(tmp_path / "a" / "r" / "checkpoints" / "step_3" / "hf"), (
            "the factors and these modules, without the base"
        )
    assert found[1]["actor/kl_loss"] == 0 < found[3]["actor/kl_loss"], "the reference is the base"
    states = [{role: tensors_of(tmp_path / name / "r", 3, role) for role in ("actor", "critic")} for name in "ab"]
    for role, one in states[0].items():
        assert all(torch.equal(t, states[1][role][n]) for n, t in one.items()), "resumed bitwise"
        names = {n for n in one if n.startswith("model.") and "lora_" not in n and "value_head" not in n}
        assert {n.removeprefix("model.") for n in names} == (
            whole if role == "actor" else {"model.embed_tokens.weight"}
        )
    written = load_file(tmp_path / "a" / "r" / "checkpoints" / "step_3" / "hf" / "adapter_model.safetensors")
    for name in whole:
        assert not torch.equal(written[f"base_model.model.{name}"], base[name].float()), "trained"


@pytest.mark.parametrize("kind", ["nf4", "folder in int8"])
def test_ppo_on_a_quantised_base(tmp_path, tiny_model, arithmetic_data, kind):
    more, base = ("algorithm.name=ppo", "algorithm.kl_loss_coef=0.1"), tiny_model
    if kind == "nf4":
        more += ("model.quantization=nf4",)
    else:
        base = quantised_copy(tiny_model, tmp_path / "int8", "int8")
    small_run(tmp_path, base, arithmetic_data[:1], *LORA, *more)
    found = metrics_of(tmp_path / "r")
    for step in (1, 2, 3):
        assert found[step]["critic/grad_norm"] > 0 and found[step]["actor/grad_norm"] > 0
        assert found[step]["mismatch/max_abs_dlogp"] < 1e-5, "the rollout computes with the same codes"
    assert found[1]["actor/kl_loss"] == 0 < found[3]["actor/kl_loss"]
    checkpoint = tmp_path / "r" / "checkpoints" / "step_3" / "hf"
    assert found[2]["sync/bytes"] == adapter_bytes(checkpoint)
    if base != tiny_model:
        merged_of_codes(tmp_path, checkpoint, base, arithmetic_data[1])


def merged_of_codes(tmp_path, checkpoint, base, rows):
    """The adapter merged into the dequantised base is a model that is not quantised; the base itself is evaluated."""
    merged, exact = write_merged(checkpoint, tmp_path / "merged", "float32"), load_dequantised(base)
    assert merged == base and "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    lora, factors = read_lora("a", checkpoint, base)
    name = "model.layers.0.self_attn.q_proj"
    a, b = (factors[one] for one in lora.factors(name))
    wanted = exact.get_submodule(name).weight + lora.scale * b @ a
    torch.testing.assert_close(load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"], wanted)
    given = (
        f"model.path={base}",
        f"data.eval_files=[{rows}]",
        f"run.root_dir={tmp_path}",
        "data.max_eval_rows=4",
        f"reward.path={REWARD}",
    )
    assert main(["eval", *given, "run.name=e", "eval.max_response_tokens=4", "data.max_prompt_tokens=16"]) == 0


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, tiny_model):
    """Adapters of the tiny model, as a policy and as a reward model, and the same merged into it."""
    where, found = tmp_path_factory.mktemp("adapters"), {}
    for head in ("lm", "score"):
        settings = EngineSettings(
            head=head, lora=LoraSpec(rank=4), score=torch.ones(1, 32) if head == "score" else None
        )
        e = TorchEngine(load_causal_lm(tiny_model), settings)
        with torch.no_grad():
            for name, p in e.model.named_parameters():
                if name.endswith("lora_B"):
                    p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        HfExport(tiny_model).write(where / head, e.exported(), e.exported_set)
        write_merged(where / head, where / f"{head} merged", "float32")
        found[head] = where / head, where / f"{head} merged"
    return found


@pytest.mark.parametrize("role", ["teacher", "reward_model"])
def test_an_adapter_on_the_policys_base_is_a_set_and_no_model(tmp_path, tiny_model, arithmetic_data, adapters, role):
    """The numbers of a run with it are those of a run with a merged model of its own."""
    teaches = role == "teacher"
    more = ("algorithm.name=gkd_topk", "teacher.top_k=8") if teaches else ("reward.path=null",)
    found = []
    for number, path in enumerate(adapters["lm" if teaches else "score"]):
        given = (*LORA, *more, f"teacher.path={path}" if teaches else f"reward.model={path}", "run.total_steps=2")
        small_run(tmp_path / str(number), tiny_model, arithmetic_data[:1], *given)
        found.append(metrics_of(tmp_path / str(number) / "r"))
        plan = json.loads((tmp_path / str(number) / "r" / "plan.json").read_text())
        assert plan["on_base"] == ([role] if number == 0 else [])
    name = "actor/teacher_divergence" if teaches else "critic/score/mean"
    for step in (1, 2):
        own, merged = (metrics[step][name] for metrics in found)
        assert own == pytest.approx(merged, rel=1e-3) and own != 0


def test_an_adapter_as_reward_model_without_a_frozen_base_is_refused(tmp_path, tiny_model, arithmetic_data, adapters):
    folder, _ = adapters["score"]
    for more, why in (
        ((f"reward.model={folder}",), "an adapter is read on the frozen base of a policy that trains LoRA"),
        ((*LORA, f"reward.model={adapters['lm'][0]}"), "an adapter without score.weight, of a language model"),
    ):
        with pytest.raises(ValueError, match=why):
            small_run(tmp_path, tiny_model, arithmetic_data[:1], "reward.path=null", *more)


def experts_folder(tmp_path, tiny_model):
    """A tiny model with experts in a folder, with the tokenizer of another one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sizes = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    sizes |= dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, pad_token_id=0)
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, eos_token_id=tokenizer.eos_token_id))
    return tiny.save(model, tokenizer, tmp_path / "base")


def test_a_run_replays_the_experts_of_its_rollout(tmp_path, tiny_model, arithmetic_data):
    base = experts_folder(tmp_path, tiny_model)
    more = ("rollout.engine_options.replay_routes=true", "run.total_steps=2", "step.updates_per_step=2")
    small_run(tmp_path, base, arithmetic_data[:1], *more, "algorithm.kl_loss_coef=0.1", "rollout.replicas=2")
    found = metrics_of(tmp_path / "r")
    for step in (1, 2):
        assert 0.7 < found[step]["actor/replayed_routes"] < 1, "all tokens but the last of each answer"
        assert found[step]["mismatch/max_abs_dlogp"] < 1e-5 and found[step]["actor/grad_norm"] > 0
    for row in read_samples(tmp_path / "r", 2):
        routes = np.concatenate([s.side[ROUTES] for s in unpacked_segments(row.segments)[1]])
        assert routes.shape == (len(row.prompt_ids) + len(row.response_ids), 2, 2)
        assert (routes[:-1] >= 0).all() and (routes[-1] == NO_ROUTE).all()


def test_a_run_trains_sends_and_merges_factors_of_experts(tmp_path, tiny_model, arithmetic_data):
    base = experts_folder(tmp_path, tiny_model)
    small_run(tmp_path, base, arithmetic_data[:1], *LORA, "model.lora.targets=[q_proj, experts]", "run.total_steps=2")
    found = metrics_of(tmp_path / "r")
    adapter = tmp_path / "r" / "checkpoints" / "step_2" / "hf"
    assert found[2]["sync/bytes"] == adapter_bytes(adapter) and found[2]["actor/grad_norm"] > 0
    assert max(found[step]["mismatch/max_abs_dlogp"] for step in (1, 2)) < 1e-5
    write_merged(adapter, tmp_path / "merged", "float32")
    before, after = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (base, tmp_path / "merged"))
    changed = {name.rpartition("layers.")[2][2:] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_answers_under_noise_are_recorded_and_corrected_and_evaluated_without_it(tmp_path, tiny_model, arithmetic_data):
    noise = ("rollout.engine_options.noise_sigma_start=0.2", "rollout.engine_options.noise_sigma_end=0.05")
    more = (*noise, "run.total_steps=2", "rollout.replicas=2")
    small_run(tmp_path, tiny_model, arithmetic_data, *LORA, *more)
    found = metrics_of(tmp_path / "r")
    for step, sigma in ((1, 0.2), (2, 0.2 * (0.05 / 0.2) ** (5 / 9))):
        assert found[step]["noise/sigma"] == pytest.approx(sigma)
        assert found[step]["sync/canary_mean_abs"] < 1e-5, "a publish is verified without noise"
        assert not any(name.startswith("mismatch/") for name in found[step]), "their difference is wanted"
        assert found[step]["rollout_corr/rollout_is_max"] > 1
        rows = read_samples(tmp_path / "r", step)
        assert {row.noise_sigma for row in rows if row.purpose == "train"} == {float(np.float32(sigma))}
        for row in rows:
            of_sampled = row.tokens["token_noise_sigma"][row.response_mask == 1]
            assert {*of_sampled.tolist()} == {float(np.float32(row.noise_sigma))}
    assert found[2]["noise/k3"] < found[1]["noise/k3"]
    assert found[1]["noise/max_abs_dlogp"] > 1e-3
