"""`verl export` of LoRA runs: the adapter in PEFT, and merged into its base in transformers, are the trained model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import small_args
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from verl.cli import main
from verl.config.load import load_config
from verl.driver.launch import run_supervised

LORA = ("model.lora.rank=4", "optim.lr=1e-2", "run.total_steps=2")
IDS = torch.arange(1, 12)[None]


@pytest.fixture
def peft(reference):
    """The PEFT library of `make reference-packages`."""
    return reference("peft")


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_the_adapter_of_a_run_and_its_merged_model_have_equal_logits(
    peft, tmp_path, tiny_model, arithmetic_data, capsys
):
    assert main(["train", *small_args(tmp_path, tiny_model, arithmetic_data[:1], *LORA)]) == 0
    shown = capsys.readouterr().out
    assert "LoRA of rank 4 in" in shown and "is low for LoRA" not in shown
    for out, more in (("adapter", ()), ("merged", ("--merge",)), ("half", ("--merge", "--dtype", "bfloat16"))):
        assert main(["export", str(tmp_path / "r"), str(tmp_path / out), *more]) == 0
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-5, atol=1e-5)
    assert (adapted - plain).abs().max() > 1e-3, "the factors matter"
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert all(torch.equal(p, half.get_parameter(n)) for n, p in merged.to(torch.bfloat16).named_parameters())
    for folder in ("adapter", "merged"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).get_vocab()
    again = tmp_path / "again"  # an adapter's folder is a source too
    assert main(["export", str(tmp_path / "adapter"), str(again), "--merge"]) == 0
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", again))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()) and one.keys() == other.keys()


def test_a_reward_models_adapter_is_a_sequence_classifier(peft, tmp_path, tiny_model):
    """Of a base whose configuration has no id of padding: it is the tokenizer's."""
    base_folder, pairs = tmp_path / "base", tmp_path / "pairs.jsonl"
    shutil.copytree(tiny_model, base_folder)
    described = json.loads((base_folder / "config.json").read_text())
    (base_folder / "config.json").write_text(json.dumps({**described, "pad_token_id": None}))
    pairs.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 16)
    run_supervised(load_config(small_args(tmp_path, base_folder, [pairs], *LORA)), "rm")
    for out, more in (("adapter", ()), ("merged", ("--merge",))):
        assert main(["export", str(tmp_path / "r"), str(tmp_path / out), *more]) == 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, dtype=torch.float32, num_labels=1)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.pad_token_id == AutoTokenizer.from_pretrained(base_folder).pad_token_id is not None
    base.config.pad_token_id = merged.config.pad_token_id
    adapted = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert adapted.abs().max() > 0
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_merged_is_one_line(tmp_path, tiny_model, arithmetic_data, capsys):
    assert main(["train", *small_args(tmp_path, tiny_model, arithmetic_data[:1], *LORA)]) == 0
    run, adapter, out = (str(tmp_path / name) for name in ("r", "adapter", "out"))
    assert main(["export", run, adapter]) == 0

    def refused(*args: str) -> str:
        capsys.readouterr()
        assert main([*args]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "--dtype=int8: one of float32, bfloat16, float16" in refused("export", run, out, "--merge", "--dtype=int8")
    assert "[--merge [--dtype=bfloat16]]" in refused("export", run, out, "--dtype=bfloat16")
    assert "is not empty" in refused("export", run, adapter, "--merge")
    shutil.copytree(tiny_model, tmp_path / "whole" / "hf")
    assert "no adapter (adapter_config.json)" in refused("export", str(tmp_path / "whole"), out, "--merge")
    for verb in ("eval", "generate", "serve"):
        given = ("prompt=1+1=",) if verb == "generate" else (f"data.eval_files={arithmetic_data[0]}",)
        line = refused(verb, f"model.path={adapter}", *given)
        assert f"merge it (verl export {adapter} OUT_DIR --merge), and give that folder" in line
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "/gone"}))
    assert "its base /gone is not on this machine" in refused("export", adapter, out, "--merge")
    assert not Path(out).exists()
