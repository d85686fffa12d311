"""The Python forms of public introductions, and the trainers on the same loop."""

import warnings

import pytest
import torch
from small_runs import REWARD, metrics_of, small_args
from started import Started, script
from tokens import bpe_tokenizer

from verl import AutoModelForCausalLMWithValueHead, Policy, PPOTrainer, RewardModel, Trainer, VerlConfig, VerlTrainer


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A local folder for "gpt2": that architecture, and a byte-level BPE tokenizer without chat template."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from verl.models import tiny

    tokenizer = bpe_tokenizer(["Hello, how are you? I am fine. " * 3], vocab_size=300)
    tokenizer.chat_template = None
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=3, eos_token_id=3)
    return str(tiny.save(GPT2LMHeadModel(config), tokenizer, tmp_path_factory.mktemp("gpt2")))


def test_the_published_form_runs(gpt2):
    from transformers import AutoTokenizer

    from verl import create_reference_model

    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2)
    model_ref = create_reference_model(model)
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    config = VerlConfig(algorithm="GRPO", batch_size=1, rollout_backend="vllm", max_length=48)
    with pytest.warns(UserWarning) as seen:
        trainer = VerlTrainer(config=config, model=model, ref_model=model_ref, tokenizer=tokenizer)
    texts = [str(w.message) for w in seen]
    assert (
        sum("using the embedded engine" in t for t in texts) == 1 and sum("carries no signal" in t for t in texts) == 1
    )
    query = ["Hello, how are you?"]
    response = trainer.generate_rollout(query)
    stats = trainer.step(query, response, [0.5])
    assert isinstance(response[0], str) and stats["actor/grad_norm"] == 0.0
    trainer.close()


def test_on_gpus_a_backend_that_is_not_installed_is_replaced_only_where_that_is_allowed(monkeypatch):
    from verl import api

    monkeypatch.setattr(api, "local_gpus", lambda: 2)
    with pytest.raises(ValueError, match=r"^rollout_backend='sglang' .*GPUs \(2\): .*rollout_fallback=\"native\"$"):
        api._backend("sglang", None)
    with pytest.warns(UserWarning, match="using the embedded engine"):
        assert api._backend("sglang", "native") == "native"
    assert api._backend("hf", None) == "hf"


def test_a_text_that_the_policy_did_not_sample_has_no_log_probs_of_a_sampler(gpt2, tmp_path):
    """Its ratio to the sampler is not that of probability 1, and its reward counts like any other."""
    from transformers import AutoTokenizer

    def trainer(**settings):
        model, tokenizer = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2), AutoTokenizer.from_pretrained(gpt2)
        config = VerlConfig(rollout_backend="hf", max_length=24, samples_per_prompt=2, learning_rate=1e-2, **settings)
        return VerlTrainer(config=config, model=model, tokenizer=tokenizer)

    query, own = "Hello", " I am fine."
    made = trainer()
    (sampled, _), before = made.generate_rollout([query])[0], logprob(made, query, own, tmp_path)
    stats = made.step([query], [[sampled, own]], [[0.0, 1.0]])
    assert 0.99 < stats["mismatch/ratio_p99"] < 1.01, "of the sampled answer alone"
    assert stats["critic/rewards/mean"] == 0.5 and stats["actor/grad_norm"] > 0
    assert logprob(made, query, own, tmp_path) > before + 0.01, "the better answer is learned"
    only = made.step([query], [[own, " How are you?"]], [[1.0, 0.0]])
    assert not [name for name in only if "mismatch" in name] and only["actor/grad_norm"] > 0
    made.close()
    made = trainer(settings={"correction": "truncate", "correction_high": 2.0})
    with pytest.raises(ValueError, match="query 0: response ' I am fine.' was not sampled by generate_rollout"):
        made.step([query], [[own, " How are you?"]], [[1.0, 0.0]])
    made.close()


def logprob(trainer, query, text, folder):
    from transformers import AutoModelForCausalLM

    trainer.save_pretrained(folder / f"step_{trainer._steps}")
    model = AutoModelForCausalLM.from_pretrained(folder / f"step_{trainer._steps}")
    asked, answer = (trainer.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (query, text))
    with torch.no_grad():
        logprobs = model(torch.tensor([asked + answer])).logits[0].log_softmax(-1)
    return sum(float(logprobs[len(asked) - 1 + i, token]) for i, token in enumerate(answer))


def test_several_answers_per_query_learn(gpt2, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl import AutoModelForCausalLMWithValueHead, VerlConfig, VerlTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = VerlTrainer(
            config=VerlConfig(
                algorithm="GRPO", rollout_backend="hf", max_length=24, samples_per_prompt=8, learning_rate=3e-3
            ),
            model=AutoModelForCausalLMWithValueHead.from_pretrained(gpt2),
            tokenizer=AutoTokenizer.from_pretrained(gpt2),
        )
    query, share = ["Hello", "I am"], []
    for _ in range(8):
        answers = trainer.generate_rollout(query)
        rewards = [[float("e" in a) for a in row] for row in answers]
        share.append(sum(map(sum, rewards)) / 16)
        stats = trainer.step(query, answers, rewards)
        assert stats["mismatch/max_abs_dlogp"] < 1e-3
    assert sum(share[-3:]) >= sum(share[:3])
    trainer.save_pretrained(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "gpt2"
    with pytest.raises(ValueError, match="as many"):
        trainer.step(query, answers, rewards[:1])
    trainer.close()


@pytest.mark.parametrize("name", ["GRPOTrainer", "DAPOTrainer"])
def test_trainers_run_the_loop(tmp_path, tiny_model, arithmetic_data, name):
    import verl

    sys_path_reward = _reward_function()
    trainer = getattr(verl, name)(
        tiny_model,
        train_data=arithmetic_data[0],
        reward=sys_path_reward,
        overrides=[
            f"run.root_dir={tmp_path}",
            "run.name=t",
            "step.prompts_per_step=4",
            "step.samples_per_prompt=4",
            "run.threads=1",
            "data.max_prompt_tokens=16",
            "rollout.max_response_tokens=12",
            "model.dtype=float32",
            f"data.cache_dir={tmp_path}/c",
            "algorithm.kl_loss_coef=0",
            "track.sinks=[jsonl]",
        ],
    )
    done = trainer.train(steps=2)
    assert done.steps == 2 and set(metrics_of(tmp_path / "t")) == {1, 2}
    with pytest.raises(ValueError, match="top level"):
        getattr(verl, name)(tiny_model, train_data=arithmetic_data[0], reward=lambda *a: 0.0)


def _reward_function():
    import importlib.util

    spec = importlib.util.spec_from_file_location("reward_length", REWARD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


# -- Trainer, PPOTrainer -----------------------------------------------------------------------------------------------


def dictionary(tmp_path, model, data, **more):
    overrides = {
        "run.root_dir": tmp_path,
        "run.name": "t",
        "run.threads": 1,
        "model.dtype": "float32",
        "data.cache_dir": tmp_path / "c",
        "reward.num_workers": 1,
        "run.eval_before": "false",
        "run.eval_after": "false",
        "optim.lr": 1e-3,
    }
    rollout = {"name": "native", "batch_size": 4, "max_length": 28, "max_prompt_length": 16}
    return {
        "algorithm": "ppo",
        "actor": Policy(model),
        "reward": _reward_function(),
        "data": data,
        "rollout": rollout,
        "overrides": overrides,
        **more,
    }


def test_the_dictionary_form_runs_ppo_with_a_critic(tmp_path, tiny_model, arithmetic_data):
    done = Trainer(dictionary(tmp_path, tiny_model, arithmetic_data[0])).train(steps=2)
    assert done.steps == 2 and done.values["critic/vf_loss"] > 0 and done.values["actor/grad_norm"] > 0
    assert done.values["response_length/max"] <= 12


def test_the_dictionary_form_says_what_is_missing_or_wrong(tmp_path, tiny_model, arithmetic_data):
    with pytest.raises(ValueError, match='"data"'):
        Trainer({"algorithm": "ppo", "actor": Policy(tiny_model)}).train(steps=1)
    with pytest.raises(ValueError, match="'rewrd'.*reward"):
        Trainer({"actor": tiny_model, "rewrd": None})
    with pytest.raises(ValueError, match="'max_lenght'.*max_length"):
        Trainer({"actor": tiny_model, "rollout": {"max_lenght": 3}})
    with pytest.raises(ValueError, match='"actor"'):
        Trainer({"algorithm": "ppo"})
    with pytest.raises(ValueError, match="reward.model=.*verl rm"):
        Trainer(dictionary(tmp_path, tiny_model, arithmetic_data[0], reward=RewardModel(tmp_path))).train(steps=1)


def test_ppo_trainer_and_the_step_form_have_a_critic(tmp_path, tiny_model, arithmetic_data):
    overrides = small_args(
        tmp_path, tiny_model, arithmetic_data[:1], "algorithm.name=ppo", "algorithm.kl_loss_coef=null"
    )
    overrides = [a for a in overrides if not a.startswith(("model.path", "data.train_files", "reward.path"))]
    done = PPOTrainer(tiny_model, train_data=arithmetic_data[0], reward=_reward_function(), overrides=overrides).train(
        steps=1
    )
    assert done.values["critic/grad_norm"] > 0

    from transformers import AutoTokenizer

    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_model)
    config = VerlConfig(algorithm="PPO", batch_size=2, max_length=24, samples_per_prompt=2, learning_rate=1e-3)
    trainer = VerlTrainer(config=config, model=model, tokenizer=AutoTokenizer.from_pretrained(tiny_model))
    try:
        answers = trainer.generate_rollout(["1+1=", "2+2="])
        found = trainer.step(["1+1=", "2+2="], answers, [[0.0, 1.0], [0.5, 0.0]])
        assert found["critic/grad_norm"] > 0 and found["actor/grad_norm"] > 0
    finally:
        trainer.close()


def facade(model: str, peft_config: object = None, **config: object) -> VerlTrainer:
    from transformers import AutoTokenizer

    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(model)
    return VerlTrainer(
        config=VerlConfig(**config),  # type: ignore[arg-type]
        model=loaded,
        tokenizer=AutoTokenizer.from_pretrained(loaded.path),
        peft_config=peft_config,
    )


def test_a_peft_config_trains_factors_in_the_step_form(tiny_model, tmp_path):
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    trainer = facade(tiny_model, peft_config=lora, max_length=16, samples_per_prompt=4, learning_rate=1e-2)
    before = {name: p.clone() for name, p in trainer._engine.model.named_parameters()}
    for _ in range(2):
        [answers] = trainer.generate_rollout(["1+1="])
        found = trainer.step(["1+1="], [answers], [[0.0, 1.0, 0.0, 1.0]])
        assert found["actor/grad_norm"] > 0 and found["mismatch/max_abs_dlogp"] < 1e-5, "the rollout has the factors"
    changed = {name for name, p in trainer._engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert len(changed) == 8 and all(name.endswith(("lora_A", "lora_B")) for name in changed)
    trainer.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    trainer.close()
    with pytest.raises(ValueError, match="its critic would hold a second base"):
        facade(tiny_model, peft_config=lora, algorithm="PPO")


def test_remax_compares_with_the_last_answer_and_learns_from_the_others(gpt2):
    trainer = facade(gpt2, algorithm="ReMax", max_length=24, samples_per_prompt=2, learning_rate=1e-3)
    [answers] = trainer.generate_rollout(["Hello"])
    assert len(answers) == 3 and answers[2] == trainer.generate_rollout(["Hello"])[0][2], "the last is greedy"
    flat = trainer.step(["Hello"], [answers], [[1.0, 1.0, 1.0]])
    assert flat["actor/grad_norm"] == 0 and flat["critic/advantages/max"] == 0, "as good as the greedy one"
    [answers] = trainer.generate_rollout(["Hello"])
    better = trainer.step(["Hello"], [answers], [[1.0, 0.5, 0.0]])
    assert better["actor/grad_norm"] > 0 and better["critic/rewards/mean"] == 0.75
    with pytest.raises(ValueError, match="comes last, and has a reward"):
        trainer.step(["Hello"], [answers[:1]], [[1.0]])
    trainer.close()


def test_max_length_may_be_all_positions_and_a_hub_id_is_found_in_the_cache(gpt2, tmp_path, monkeypatch):
    import shutil

    hub = tmp_path / "hub" / "models--some--gpt2"
    shutil.copytree(gpt2, hub / "snapshots" / "abc")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    trainer = facade("some/gpt2", algorithm="reinforce", max_length=128)
    [answer] = trainer.generate_rollout(["Hello, how are you?"])
    assert isinstance(answer, str)
    trainer.close()


def test_the_names_of_introductions_are_there():
    import verl

    for name in verl.__all__:
        assert getattr(verl, name) is not None
    assert verl.MultiController({"actor": "m"})._config["async_rollout"] is True
    assert "async_rollout" not in verl.SingleController({"actor": "m"})._config


def test_a_reward_of_an_unguarded_script_is_refused_with_the_line(tmp_path):
    text = (
        "import verl\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n{}"
        "trainer = verl.GRPOTrainer('m', train_data='rows.jsonl', reward=compute_score)\nprint(trainer.args)\n"
    )
    said = []
    for name, guard in (("bare", ""), ("guarded", "if __name__ == '__main__':\n    ")):
        (tmp_path / f"{name}.py").write_text(text.format(guard).replace("\nprint", ";print"))
        process = Started([str(tmp_path / f"{name}.py")], log := tmp_path / f"{name}.log", entry=script)
        said.append((process.wait(120), log.read_text()))
    assert said[0][0] == 1 and 'below `if __name__ == "__main__":`' in said[0][1]
    assert said[1][0] == 0 and "guarded.py:compute_score" in said[1][1]


def test_a_model_of_transformers_is_taken_with_its_weights_of_now(tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl import create_reference_model

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.25)
    wrapped = create_reference_model(model)
    taken = wrapped.pretrained_model.model.norm.weight
    assert taken.dtype == torch.float32 and torch.equal(taken, model.model.norm.weight.float())
    tokenizer, config = AutoTokenizer.from_pretrained(tiny_model), VerlConfig(algorithm="Dr.GRPO", samples_per_prompt=2)
    VerlTrainer(config=config, model=model, ref_model=model, tokenizer=tokenizer).close()
    for given in (3, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="without a folder: give AutoModelForCausalLM"):
            VerlTrainer(config=config, model=given, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"model is a Qwen3ForCausalLM: a run loads its weights itself"):
        PPOTrainer(model, train_data=[])
    for name, lacks in (("opd", "the role teacher"), ("gigpo", "rewards of turns")):
        with pytest.raises(ValueError, match=f"algorithm='{name}' reads {lacks}, which VerlTrainer has not"):
            VerlTrainer(config=VerlConfig(algorithm=name), model=model, tokenizer=tokenizer)


def test_a_hub_id_that_is_not_in_the_cache_is_told_how_it_gets_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="hf download org/model --local-dir FOLDER"):
        AutoModelForCausalLMWithValueHead.from_pretrained("org/model")
