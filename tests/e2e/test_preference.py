"""`verl rm` and `verl dpo` through the command line's own path: they learn, resume bitwise, export, refuse; RL
against the model."""

import json
import shutil

import numpy as np
import pytest
import torch
from each import matrix
from fakes import unscored
from small_runs import metrics_of, small_run, tensors_of

from verl.algorithms.presets import PREFERENCES
from verl.checkpoint.score import classifier_config
from verl.config.load import load_config
from verl.driver.launch import run_supervised
from verl.track.samples import read_samples

ROWS = 24


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The chosen answers are sevens, the rejected ones are nines."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for _ in range(ROWS):
        prompt = f"{rng.integers(10, 99)}+{rng.integers(10, 99)}="
        good, bad = "7" * int(rng.integers(3, 8)), "9" * int(rng.integers(3, 8))
        rows.append({"prompt": prompt, "chosen": good, "rejected": bad, "chosen_score": 1.0, "rejected_score": 0.25})
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(scope="module")
def unpaired(pairs, tmp_path_factory):
    path = tmp_path_factory.mktemp("unpaired") / "rows.jsonl"
    out = []
    for line in pairs.read_text().splitlines():
        row = json.loads(line)
        out += [{"prompt": row["prompt"], "completion": row[k], "label": k == "chosen"} for k in ("chosen", "rejected")]
    path.write_text("".join(json.dumps(r) + "\n" for r in out))
    return path


def args(root, model, files, *more):
    base = {
        "run.root_dir": root,
        "run.name": "p",
        "run.total_steps": 6,
        "run.threads": 1,
        "model.path": model,
        "model.dtype": "float32",
        "data.train_files": f"[{files}]",
        "data.eval_files": f"[{files}]",
        "data.cache_dir": root / "cache",
        "data.max_tokens_per_row": 64,
        "step.prompts_per_step": 8,
        "optim.lr": 3e-3,
        "track.sinks": "[jsonl]",
        "step.max_tokens_per_microbatch": 512,
    }
    given = {m.partition("=")[0] for m in more}
    return [f"{k}={v}" for k, v in base.items() if k not in given] + list(more)


def train(command, root, model, files, *more, on_step=None):
    return run_supervised(load_config(args(root, model, files, *more)), command, on_step=on_step)


def same_state(a, b):
    """The trainer's weights and moments of two checkpoints."""
    assert a.keys() == b.keys() and any(name.startswith("optimizer.") for name in a)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_a_reward_model_learns_and_is_a_transformers_classifier(tmp_path, tiny_model, pairs):
    done = train("rm", tmp_path, tiny_model, pairs, "preference.center_coef=0.01", "run.total_steps=12")
    assert done.evals["val/accuracy"] == 1.0 and done.evals["val/score/chosen"] > done.evals["val/score/rejected"]
    folder = tmp_path / "p" / "checkpoints" / "step_12" / "hf"
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for row in map(json.loads, pairs.read_text().splitlines()):  # by transformers alone: which answer is the better one
        scores = []
        for side in ("chosen", "rejected"):
            start = tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
            )
            rest = [*tokenizer(row[side], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(float(model(torch.tensor([[*start, *rest]])).logits[0, 0]))
        assert scores[0] > scores[1], row
    messages = [{"role": "user", "content": "11+22="}, {"role": "assistant", "content": "777"}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer("777", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        theirs = float(model(torch.tensor([[*prompt, *answer]])).logits[0, 0])
    from verl.driver.models import ModelContext, reward_model
    from verl.transfer_queue.memory import MemoryQueue

    config = load_config(["model.path=" + str(tiny_model), "model.dtype=float32", f"reward.model={folder}"]).config
    role = reward_model(ModelContext(config, MemoryQueue(), "cpu", updates=1))
    [ours] = role.score_rows([unscored(np.array(prompt), np.array(answer))]).result(timeout=60)
    assert ours == pytest.approx(theirs, abs=1e-4)
    role.close()


def answer_logprobs(folder, rows):
    """[rows] of what a folder's model gives each answer in full, end of turn included; transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt, answer in rows:
        messages = [{"role": "user", "content": prompt}]
        start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        rest = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*start, *rest]])).logits[0]
        logprobs = torch.log_softmax(logits[len(start) - 1 : -1], -1)
        out.append(float(logprobs.gather(1, torch.tensor(rest)[:, None]).sum()))
    return np.array(out)


@pytest.fixture(scope="module")
def at_the_start(tiny_model, pairs):
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    return {k: answer_logprobs(tiny_model, [(r["prompt"], r[k]) for r in rows]) for k in ("chosen", "rejected")}


@matrix("loss", PREFERENCES, quick=("dpo", "kto"))
def test_every_preference_loss_learns(loss, tmp_path, tiny_model, pairs, unpaired, at_the_start):
    """Measured with the exported model: chosen answers gain on rejected ones to the same prompt."""
    done = train(
        "dpo", tmp_path, tiny_model, pairs if PREFERENCES[loss].paired else unpaired, f"preference.loss={loss}"
    )
    found = metrics_of(tmp_path / "p")
    assert np.isfinite(done.evals["val/loss"]) and found[1]["train/grad_norm"] > 0
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    folder = tmp_path / "p" / "checkpoints" / "step_6" / "hf"
    gained = {
        side: answer_logprobs(folder, [(r["prompt"], r[side]) for r in rows]) - at_the_start[side]
        for side in ("chosen", "rejected")
    }
    margin = gained["chosen"] - gained["rejected"]
    assert (margin > 0).all() and margin.mean() > 1, margin
    if PREFERENCES[loss].paired:
        assert done.evals["val/rewards/accuracies"] == 1.0 and done.evals["val/rewards/margins"] > 0
    else:
        assert done.evals["val/loss"] < found[1]["train/loss"]
        assert gained["chosen"].mean() > 0 > gained["rejected"].mean(), "each by itself: KTO has no pairs"


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_factors_of_lora_learn_preferences(base, tmp_path, tiny_model, pairs):
    """The adapter switched off is the reference, so that the first loss is that of equal models."""
    more = ("model.lora.rank=4", "optim.lr=3e-2", f"model.quantization={base}")
    done = train("dpo", tmp_path, tiny_model, pairs, *more)
    assert metrics_of(tmp_path / "p")[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert done.evals["val/loss"] < 0.6 and done.evals["val/rewards/margins"] > 0
    folder = tmp_path / "p" / "checkpoints" / "step_6" / "hf"
    assert {path.name for path in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


@matrix("command,more", [("dpo", ()), ("rm", ()), ("dpo", ("preference.loss=kto",))])
def test_a_cut_run_equals_a_straight_one_bitwise(command, more, tmp_path, tiny_model, pairs, unpaired):
    files = unpaired if "preference.loss=kto" in more else pairs
    shape = ("run.total_steps=4", "run.save_every_steps=1", "run.keep_last_checkpoints=9", *more)
    train(command, tmp_path / "straight", tiny_model, files, *shape)

    def crash(step, values):
        if step == 2:
            raise OSError("pulled the plug")

    with pytest.raises(OSError, match="pulled"):
        train(command, tmp_path / "cut", tiny_model, files, *shape, on_step=crash)
    train(command, tmp_path / "cut", tiny_model, files, *shape)
    same_state(tensors_of(tmp_path / "straight" / "p", 4, "trainer"), tensors_of(tmp_path / "cut" / "p", 4, "trainer"))


def test_reference_logprobs_are_computed_once_and_kept(tmp_path, tiny_model, pairs, capsys):
    train("dpo", tmp_path, tiny_model, pairs, "run.total_steps=2", "run.name=a")
    train("dpo", tmp_path, tiny_model, pairs, "run.total_steps=2", "run.name=b")
    said = capsys.readouterr().out
    assert "computed for" in said and "reference log-probs: from" in said
    first = metrics_of(tmp_path / "a")[1]
    assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-4), "at the start the policy is the reference"
    same_state(tensors_of(tmp_path / "a", 2, "trainer"), tensors_of(tmp_path / "b", 2, "trainer"))


@pytest.mark.parametrize(
    "row,message",
    [
        ({"prompt": "1+1=", "chosen": "2"}, "no 'rejected' beside 'chosen'"),
        ({"chosen": "2", "rejected": "3"}, "do not begin with the same text"),
        ({"chosen": [{"role": "user", "content": "2"}], "rejected": "3"}, "do not begin with the same messages"),
        ({"prompt": "1+1=", "chosen": [{"role": "user", "content": "2"}], "rejected": "3"}, "assistant"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(row, message, tmp_path, tiny_model):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message) as found:
        train("dpo", tmp_path, tiny_model, path)
    assert "rows.jsonl" in str(found.value) and "2" in str(found.value).partition(":")[2][:12]


def test_wrong_settings_are_refused_before_a_model_is_loaded(tmp_path, tiny_model, pairs, unpaired):
    with pytest.raises(ValueError, match="did you mean label_smoothing"):
        train("dpo", tmp_path, tiny_model, pairs, "preference.options.label_smoothin=0.1")
    with pytest.raises(ValueError, match="preference.loss=dpoo"):
        train("dpo", tmp_path, tiny_model, pairs, "preference.loss=dpoo")
    with pytest.raises(ValueError, match="'label' must be true"):
        path = tmp_path / "labelled.jsonl"
        path.write_text(json.dumps({"prompt": "1+1=", "completion": "2", "label": "maybe"}) + "\n")
        train("dpo", tmp_path, tiny_model, path, "preference.loss=kto")
    with pytest.raises(ValueError, match="no true rewards"):
        path = tmp_path / "plain.jsonl"
        path.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
        train("dpo", tmp_path, tiny_model, path, "preference.loss=rpo_sq")


def test_hh_transcripts_and_whole_conversations_load(tmp_path, tiny_model):
    path = tmp_path / "rows.jsonl"
    hh = {"chosen": "\n\nHuman: 1+1=\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1=\n\nAssistant: 3"}
    user = {"role": "user", "content": "1+2="}
    whole = {
        "chosen": [user, {"role": "assistant", "content": "3"}],
        "rejected": [user, {"role": "assistant", "content": "4"}],
    }
    beside = {
        "prompt": [user],
        "chosen": [{"role": "assistant", "content": "3"}],
        "rejected": [{"role": "assistant", "content": "4"}],
    }
    path.write_text("".join(json.dumps(r) + "\n" for r in (hh, whole, beside)))
    from verl.chat import load_tokenizer
    from verl.data.preference import load_pairs

    config = load_config([f"model.path={tiny_model}"]).config
    tokenizer = load_tokenizer(str(tiny_model))
    table = load_pairs([str(path)], tokenizer, config.data)
    assert len(table) == 3 and np.array_equal(table[1].chosen.ids, table[2].chosen.ids)
    assert "1+1=" in tokenizer.decode(table[0].chosen.ids)


SHAPED = pytest.mark.full("shaped and summed batch")


@matrix(
    "more",
    [
        pytest.param((), id="stream"),
        pytest.param(("reward.stage=batch",), id="batch", marks=SHAPED),
        pytest.param(("reward.model_coef=0.5", "with_function"), id="summed", marks=SHAPED),
        pytest.param(
            ("reward.stage=batch", "reward.overlong_buffer_tokens=12", "reward.overlong_penalty=3"),
            id="shaped batch",
            marks=SHAPED,
        ),
        pytest.param(
            ("reward.stage=batch", "reward.model_coef=0.5", "reward.overlong_buffer_tokens=12", "with_function"),
            id="shaped and summed batch",
        ),
    ],
)
def test_rl_against_a_trained_reward_model(more, request, tmp_path, tiny_model, pairs, arithmetic_data):
    train("rm", tmp_path, tiny_model, pairs)
    folder = tmp_path / "p" / "checkpoints" / "step_6" / "hf"
    function = () if "with_function" in more else ("reward.path=null",)
    extra = [m for m in more if m != "with_function"]
    small_run(
        tmp_path,
        tiny_model,
        arithmetic_data[:1],
        "algorithm.name=ppo",
        "algorithm.kl_loss_coef=null",
        f"reward.model={folder}",
        *function,
        *extra,
    )
    rows = read_samples(tmp_path / "r", 2)
    assert len(rows) == 16 and len({round(r.reward, 6) for r in rows}) > 4
    for r in rows:
        expected = r.components["reward_model"] * (0.5 if function == () else 1.0) + (
            r.components["function"] if function == () else 0.0
        )
        if "shaped" in request.node.callspec.id:
            tokens = len(r.response_ids)
            most = 3.0 if function else 1.0
            assert r.components["overlong_penalty"] == pytest.approx(-most * tokens / 12, abs=1e-6)
            expected -= most * tokens / 12
            assert r.components["score"] == pytest.approx(r.reward + most * tokens / 12, abs=1e-5)
        assert r.reward == pytest.approx(expected, abs=1e-5)
    assert metrics_of(tmp_path / "r")[2]["critic/score/mean"] == pytest.approx(
        np.mean([r.components.get("score", r.reward) for r in rows]), abs=1e-4
    )


def test_any_one_label_classifier_is_a_reward_model_and_training_goes_on_from_it(tmp_path, tiny_model, pairs):
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    torch.manual_seed(3)
    folder = tmp_path / "theirs"
    theirs = Qwen3ForSequenceClassification(AutoConfig.from_pretrained(tiny_model, num_labels=1, pad_token_id=0)).eval()
    theirs.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        expected = float(theirs(ids, attention_mask=torch.ones_like(ids)).logits[0, 0])
    from verl.driver.models import ModelContext, reward_model
    from verl.transfer_queue.memory import MemoryQueue

    config = load_config([f"model.path={tiny_model}", "model.dtype=float32", f"reward.model={folder}"]).config
    role = reward_model(ModelContext(config, MemoryQueue(), "cpu", updates=1))
    [ours] = role.score_rows([unscored(np.array([3, 4, 5]), np.array([6, 7]))]).result(timeout=60)
    role.close()
    assert ours == pytest.approx(expected, abs=1e-4)
    done = train("rm", tmp_path, folder, pairs, "run.total_steps=2", "optim.lr=1e-12")
    assert np.isfinite(done.evals["val/accuracy"])
    with safe_open(tmp_path / "p" / "checkpoints" / "step_2" / "hf" / "model.safetensors", "pt") as f:
        assert torch.allclose(f.get_tensor("score.weight"), theirs.score.weight)
        assert not any(name.startswith("lm_head") for name in list(f.keys()))


def test_a_family_without_a_classifier_is_refused_before_the_rows_are_read(tmp_path, tiny_model, pairs):
    folder = tmp_path / "odd"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3NoSuchForCausalLM"]}))
    with pytest.raises(ValueError, match="no sequence classifier"):
        train("rm", tmp_path, folder, pairs)


def test_a_model_of_text_with_an_encoder_is_no_reward_model(tmp_path):
    """Transformers has a classifier of it, which is of other weights than a causal model's."""
    described = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="no sequence classifier for .'T5ForConditionalGeneration'."):
        classifier_config(tmp_path, 0)


def test_a_policy_with_missing_weights_does_not_start_at_random(tmp_path, tiny_model):
    from safetensors.torch import load_file, save_file

    from verl.model_engine.hf_model import load_causal_lm

    folder = tmp_path / "holes"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    gone = next(n for n in tensors if "q_proj" in n)
    save_file({n: t for n, t in tensors.items() if n != gone}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="q_proj"):
        load_causal_lm(folder)


def test_a_language_model_is_no_reward_model(tmp_path, tiny_model, arithmetic_data):
    with pytest.raises(ValueError, match="verl rm"):
        small_run(tmp_path, tiny_model, arithmetic_data[:1], f"reward.model={tiny_model}", "reward.path=null")


def test_two_ranks_measure_and_train_what_one_does(tmp_path, tiny_model, pairs):
    """Also where the last evaluation rows are fewer than the ranks: an idle rank counts for nothing."""
    shape = ("run.total_steps=2", "step.prompts_per_step=3", "data.max_eval_rows=4")
    one = train("dpo", tmp_path / "one", tiny_model, pairs, *shape)
    two = train("dpo", tmp_path / "two", tiny_model, pairs, *shape, "cluster.virtual_ranks=2")
    assert one.evals.keys() == two.evals.keys() and len(one.evals) > 3
    for name, value in one.evals.items():
        assert two.evals[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert two.values["train/grad_norm"] == pytest.approx(one.values["train/grad_norm"], rel=1e-4)


TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{{ ';#' }}{% endif %}{% endfor %}"
)


def test_a_score_is_read_where_the_template_ends_a_turn_in_training_in_rl_and_elsewhere(tmp_path, tiny_model, pairs):
    """A template that puts two tokens behind the end of turn: `verl rm`, RL and transformers read the same number."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from verl.driver.models import ModelContext, reward_model
    from verl.transfer_queue.memory import MemoryQueue

    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"prompt": "11+22=", "chosen": "777", "rejected": "99"}) + "\n")
    more = ("run.total_steps=2", f"data.eval_files=[{one}]", f"model.chat_template={template}")
    evals = train("rm", tmp_path, tiny_model, pairs, *more).evals
    folder = tmp_path / "p" / "checkpoints" / "step_2" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    config = load_config(["model.path=" + str(tiny_model), "model.dtype=float32", f"reward.model={folder}"]).config
    role = reward_model(ModelContext(config, MemoryQueue(), "cpu", updates=1))
    prompt = tokenizer("11+22=", add_special_tokens=False)["input_ids"]
    for side, text in (("chosen", "777"), ("rejected", "99")):
        answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        [ours] = role.score_rows([unscored(np.array(prompt), np.array(answer))]).result(timeout=60)
        messages = [{"role": "user", "content": "11+22="}, {"role": "assistant", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, return_dict=False)
        assert rendered == [*prompt, *answer, *tokenizer(";#", add_special_tokens=False)["input_ids"]]
        with torch.no_grad():
            outside = float(theirs(torch.tensor([rendered])).logits[0, 0])
        assert ours == pytest.approx(outside, abs=1e-4), side
        assert ours == pytest.approx(evals[f"val/score/{side}"], abs=1e-4), side
        [cut] = role.score_rows([unscored(np.array(prompt), np.array(answer[:-1]))]).result(timeout=60)
        with torch.no_grad():
            alone = float(theirs(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, 0])
        assert cut == pytest.approx(alone, abs=1e-4), "behind an answer that was cut stands nothing"
    role.close()
