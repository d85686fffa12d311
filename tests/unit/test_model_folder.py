"""Folders that disagree with themselves are refused, or named in a line, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_model import write_model, write_rows
from safetensors.numpy import load_file, save_file

from verl.checkpoint.loadable import check_loadable
from verl.config import model_folder
from verl.config.load import load_config
from verl.config.model_files import chat_template_of, describe_model, read_weight_headers
from verl.config.model_folder import check_folder, folder_lines
from verl.config.schema import Config, ModelConfig
from verl.driver.setup import load_tokenizer_of
from verl.planner.plan import make_plan


def put(folder: Path, name: str, numbers: np.ndarray) -> None:
    """Write the numbers of one tensor into its file, as bfloat16 or float32."""
    header = read_weight_headers(folder)[name]
    data = numbers.astype("<f4")
    raw = (data.view("<u4") >> 16).astype("<u2") if header.dtype == "BF16" else data
    with header.file.open("r+b") as stream:
        stream.seek(header.begin)
        stream.write(raw.tobytes())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_beside_the_embedding_that_it_is_tied_to(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "COMPARED_BYTES", 8000)
    folder = write_model(tmp_path / "m", tied=False, shards=shards, config={"tie_word_embeddings": True})
    numbers = np.arange(1000 * 64) % 251 / 8
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        put(folder, name, numbers)
    check_folder(folder)
    put(folder, "lm_head.weight", np.r_[numbers[:-1], numbers[-1] + 1])
    with pytest.raises(ValueError, match=r"config\.json ties .*another lm_head\.weight.*tie_word_embeddings to false"):
        check_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    for other in ({"tie_word_embeddings": False}, {"tie_word_embeddings": None}):
        (folder / "config.json").write_text(json.dumps(config | other))
        check_folder(folder)


def plan(folder: Path, tmp_path: Path, *more: str) -> Any:
    write_rows(tmp_path / "train.jsonl", 8)
    named = [f"model.path={folder}", f"data.train_files={tmp_path}/train.jsonl", "step.prompts_per_step=4"]
    return make_plan(load_config([*named, f"run.root_dir={tmp_path}/runs", *more]).config)


def test_a_plan_refuses_what_a_run_does(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", tied=False, config={"tie_word_embeddings": True})
    put(folder, "lm_head.weight", np.ones(1000 * 64))
    with pytest.raises(ValueError, match="ties the output layer"):
        plan(folder, tmp_path)
    teacher, folder = folder, write_model(tmp_path / "n")
    with pytest.raises(ValueError, match=f"model.path={teacher}: .*ties the output layer"):
        plan(folder, tmp_path, "algorithm.name=opd", f"teacher.path={teacher}")
    added = [{"id": 1000, "content": "<|image|>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    assert not plan(folder, tmp_path).model.tied or plan(folder, tmp_path).warnings == ()
    for spoiled in (
        {"model": {"vocab": {"a": 0, "b": 1000}}},
        {"model": {"vocab": [["a", 0.0]] * 1001}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1000, "content": "<tool>", "special": False}]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1000, "content": "messages", "special": True}]},
    ):
        (folder / "tokenizer.json").write_text(json.dumps(spoiled))
        with pytest.raises(
            ValueError, match=r"the tokenizer has 1 tokens that the model has no embedding for \(1000 rows"
        ):
            plan(folder, tmp_path)


def test_an_adapter_is_no_model_and_none_stands_beside_one(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}))
    for look in (lambda path: describe_model(str(path)), check_loadable):
        with pytest.raises(ValueError, match=r"an adapter \(adapter_config\.json\) of org/base, and no model.*merge"):
            look(alone)
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        both = write_model(tmp_path / f"both-{name}")
        (both / name).write_text("{}")
        for look in (lambda path: describe_model(str(path)), check_loadable):
            with pytest.raises(ValueError, match=rf"a whole model \(model\.safetensors\) and an adapter \({name}\)"):
                look(both)


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=2)
    other = write_model(tmp_path / "n")
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors and model\.safetensors\.index\.json, .*two models"):
        describe_model(str(folder))
    shutil.copyfile(other / "model.safetensors", other / "consolidated.safetensors")
    before = describe_model(str(other)).stored_bytes
    (other / "consolidated.safetensors").unlink()
    assert describe_model(str(other)).stored_bytes == before, "transformers reads model.safetensors alone"


def test_two_chat_templates_that_differ(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert not list(folder_lines(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    assert not list(folder_lines(folder))
    for config in (
        {"chat_template": "{{ other }}"},
        {"chat_template": [{"name": "default", "template": "{{ other }}"}]},
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (line,) = folder_lines(folder)
        assert "chat_template.jinja and the chat_template of tokenizer_config.json are different" in line
    (line,) = (w for w in plan(folder, tmp_path).warnings if "different templates" in w)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert chat_template_of(folder) == "", "no tokenizer reads a processor's template"


def test_a_run_looks_at_the_tie_that_the_models_class_makes(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, refused in ((embedding, False), (embedding + 1, True)):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        with pytest.raises(ValueError, match="ties the output layer") if refused else nullcontext():
            load_tokenizer_of(Config(model=ModelConfig(path=str(folder))))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    load_tokenizer_of(Config(model=ModelConfig(path=str(folder))))
