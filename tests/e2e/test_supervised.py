"""The evaluation loss of a supervised run, compared with transformers on the same rows."""

import json

import numpy as np
import pytest
import torch

from verl.config.load import load_config
from verl.driver.launch import run_supervised


def say(who, text):
    return {"role": who, "content": text}


def trained(tmp_path, tiny_model, **given):
    """Rows of unlike lengths, and a run over them in batches of unlike sizes."""
    rng, path = np.random.default_rng(0), tmp_path / "rows.jsonl"
    rows = [(f"{rng.integers(1, 99)}+1=", "7" * int(rng.integers(1, 12))) for _ in range(7)]
    path.write_text("".join(json.dumps({"messages": [say("user", p), say("assistant", a)]}) + "\n" for p, a in rows))
    args = {
        "run.root_dir": tmp_path,
        "run.total_steps": 1,
        "run.threads": 1,
        "model.path": tiny_model,
        "model.dtype": "float32",
        "data.train_files": f"[{path}]",
        "data.eval_files": f"[{path}]",
        "data.cache_dir": tmp_path / "cache",
        "data.max_tokens_per_row": 64,
        "step.prompts_per_step": 3,
        "optim.lr": 1e-12,
        "track.sinks": "[jsonl]",
    } | given
    return rows, run_supervised(load_config([f"{k}={v}" for k, v in args.items()]), "sft")


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_factors_of_lora_learn_answers(base, tmp_path, tiny_model):
    factors = {"model.lora.rank": 4, "model.quantization": base, "run.name": "s"}
    _, before = trained(tmp_path, tiny_model, **factors)
    _, after = trained(tmp_path, tiny_model, **factors | {"run.name": "t", "optim.lr": 3e-2, "run.total_steps": 8})
    assert after.evals["val/loss"] < before.evals["val/loss"] - 0.1
    assert list(tmp_path.glob("t/checkpoints/step_8/hf/adapter_model.safetensors"))


def test_the_validation_loss_is_the_mean_over_all_answer_tokens(tmp_path, tiny_model):
    """Every supervised token counts once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows, done = trained(tmp_path, tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    total = count = 0.0
    for prompt, answer in rows:
        start = tokenizer.apply_chat_template([say("user", prompt)], add_generation_prompt=True, return_dict=False)
        rest = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*start, *rest]])).logits[0, len(start) - 1 : -1]
        total -= float(torch.log_softmax(logits, -1).gather(1, torch.tensor(rest)[:, None]).sum())
        count += len(rest)
    assert done.evals["val/loss"] == pytest.approx(total / count, rel=1e-5)
