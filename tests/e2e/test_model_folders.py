"""A model folder that cannot be trained is refused in one line, before a row is tokenised or a weight is loaded."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import small_args, small_run

from verl.cli import main
from verl.config.load import load_config
from verl.driver import assemble
from verl.driver.setup import eos_ids, load_tokenizer_of
from verl.model_engine.hf_model import load_causal_lm
from verl.models import tiny


def describe(folder, file="config.json", **changes):
    path = folder / file
    if path.exists():
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def store(folder, change):
    file = folder / "model.safetensors"
    save_file({n: change(n, t).contiguous() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})


def without_end(folder):
    describe(folder, "tokenizer_config.json", eos_token=None)
    describe(folder, "special_tokens_map.json", eos_token=None)
    describe(folder, "generation_config.json", eos_token_id=None)
    describe(folder, eos_token_id=None)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        unmarked = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        if (folder / file).is_file() and file.endswith(".jinja"):
            (folder / file).write_text(unmarked)
        else:
            describe(folder, file, chat_template=unmarked)


def larger_tokenizer(folder):
    tokenizer = tiny.character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+-=,;# ")
    tokenizer.save_pretrained(folder)


def to_int8(name, tensor):
    return tensor.to(torch.int8) if "proj" in name else tensor


BROKEN = {
    "unknown": (lambda f: describe(f, model_type="quokka"), ("quokka", "trust_remote_code")),
    "encoder-decoder": (lambda f: describe(f, model_type="t5"), ("t5", "decoder language model")),
    "hidden": (lambda f: describe(f, hidden_size=48), ("other shapes than config.json", "same model")),
    "ffn": (lambda f: describe(f, intermediate_size=96), ("mlp.", "96", "same model")),
    "vocabulary": (lambda f: describe(f, vocab_size=10), ("no embedding for", "10 rows", "same model")),
    "heads": (lambda f: describe(f, num_attention_heads=0), ("num_attention_heads",)),
    "activation": (lambda f: describe(f, hidden_act="quokka"), ("quokka",)),
    "gptq": (lambda f: describe(f, quantization_config={"quant_method": "gptq", "bits": 4}), ("gptq", "bfloat16")),
    "fp8": (lambda f: describe(f, quantization_config={"quant_method": "fp8"}), ("fp8", "bfloat16")),
    "int8": (lambda f: store(f, to_int8), ("proj", "I8", "scale", "bfloat16")),
    "no end": (without_end, ("end-of-sequence", "rollout.stop")),
    "other tokenizer": (larger_tokenizer, ("no embedding", "model.tokenizer_path")),
}


def test_folders_that_cannot_be_trained_are_one_line_before_any_work(
    tmp_path, tiny_model, arithmetic_data, monkeypatch, capsys
):
    monkeypatch.setattr(assemble, "load_tasks", lambda *a, **k: pytest.fail("rows were tokenised"))
    found = []
    for name, (spoil, words) in BROKEN.items():
        folder = tmp_path / name
        shutil.copytree(tiny_model, folder)
        spoil(folder)
        code = main(["train", *small_args(tmp_path, folder, arithmetic_data[:1])])
        said = capsys.readouterr().err.strip()
        last = said.splitlines()[-1]
        if code != 2 or "Traceback" in said or not all(w in last for w in (str(folder), *words)):
            found.append(f"{name}: {code}: {said[-500:]}")
    assert not found, "\n".join(found)


def test_whoever_loads_a_folder_gets_the_same_line(tmp_path, tiny_model):
    for name in ("gptq", "int8", "ffn", "unknown"):
        folder = tmp_path / name
        shutil.copytree(tiny_model, folder)
        BROKEN[name][0](folder)
        with pytest.raises(ValueError, match=BROKEN[name][1][0]) as caught:
            load_causal_lm(folder)
        assert "\n" not in str(caught.value)


def test_an_end_may_stand_anywhere_and_be_a_stop(tmp_path, tiny_model, arithmetic_data):
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    without_end(folder)
    for k, more in enumerate((["rollout.stop_token_ids=[1]"], ["rollout.ignore_eos=true"])):
        small_run(tmp_path, folder, arithmetic_data[:1], "run.total_steps=1", f"run.name={k}", *more)
    describe(folder, eos_token_id=[1, 2])
    config = load_config(small_args(tmp_path, folder, arithmetic_data[:1])).config
    assert eos_ids(config, load_tokenizer_of(config)) == (1, 2)


def test_a_special_token_that_nothing_writes_needs_no_embedding(tmp_path, tiny_model):
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    config = load_config([f"model.path={folder}"]).config
    tokenizer = load_tokenizer_of(config)
    tokenizer.add_tokens([f"<image{k}>" for k in range(40)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert load_tokenizer_of(config).get_vocab()["<image39>"] >= rows
    tokenizer.chat_template = "<image39>" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="'<image39>'"):
        load_tokenizer_of(config)


def test_a_row_that_spells_out_a_token_without_embedding_is_refused(tmp_path, tiny_model, monkeypatch, capsys):
    """Before a weight is loaded, with the row. A token that is in no row has no effect."""
    folder, rows = tmp_path / "m", tmp_path / "rows.jsonl"
    shutil.copytree(tiny_model, folder)
    tokenizer = load_tokenizer_of(load_config([f"model.path={folder}"]).config)
    tokenizer.add_tokens([f"<image{k}>" for k in range(40)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    own = {"chosen": "2", "rejected": "3", "answer": "2"}
    prompts = ["1+1=", "1+<image1>=", "1+<image39>=", "2+<image39>="]
    rows.write_text("".join(json.dumps({"prompt": p, "completion": "2", **own}) + "\n" for p in prompts))
    for module in ("assemble", "assemble_supervised"):
        monkeypatch.setattr(f"verl.driver.{module}.workers_of", lambda *a, **k: pytest.fail("a model was loaded"))
    found = []
    for verb in ("sft", "dpo"):
        code = main([verb, *small_args(tmp_path, folder, [rows], "data.max_tokens_per_row=64")])
        last = capsys.readouterr().err.strip().splitlines()[-1]
        wanted = ("'<image39>'", "no embedding", f"2 of {rows}, first {rows}:3", "Fix: ")
        if code != 2 or not all(w in last for w in wanted):
            found.append(f"{verb}: {code}: {last[-500:]}")
    rows.write_text("".join(json.dumps({"prompt": p, "answer": "2"}) + "\n" for p in prompts))
    code = main(["train", *small_args(tmp_path, folder, [rows])])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and "2 of" in last and not found, (code, last, found)
    monkeypatch.undo()
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    small_run(tmp_path, folder, [rows], "run.total_steps=1")
