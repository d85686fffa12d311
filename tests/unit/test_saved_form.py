"""Exports have the tensors of a saved folder, by the names of the folder that the model was loaded from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from vision_families import model, published

from verl.checkpoint.hf import HfExport
from verl.checkpoint.saved_form import OtherOrder, SavedForm

FILE = "model.safetensors"


@pytest.mark.parametrize("kind", ["kimi_k25", "qwen3_vl_moe", "gemma4"])
@pytest.mark.parametrize("own_names", [True, False])
def test_an_export_is_the_folder_that_was_loaded(kind: str, own_names: bool, tmp_path: Path) -> None:
    made, source = model(kind), tmp_path / "source"
    made.save_pretrained(source)
    if own_names:
        renamed = {published(name): t for name, t in load_file(source / FILE).items()}
        assert (renamed.keys() != load_file(source / FILE).keys()) == (kind == "kimi_k25")
        save_file(renamed, source / FILE, {"format": "pt"})
    held = AutoModelForImageTextToText.from_pretrained(source).state_dict()
    assert held.keys() == made.state_dict().keys() and all(
        torch.equal(t, held[n]) for n, t in made.state_dict().items()
    )
    tensors = [*held.items()]
    random.Random(0).shuffle(tensors)
    HfExport(source).write(tmp_path / "export", tensors)
    before, after = load_file(source / FILE), load_file(tmp_path / "export" / FILE)
    assert before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())


def test_a_folder_that_names_the_class_of_its_own_code_is_exported_as_it_was(tmp_path: Path) -> None:
    made, source = model("kimi_k25"), tmp_path / "source"
    made.save_pretrained(source)
    described = json.loads((source / "config.json").read_text())
    assert described["architectures"] == ["Kimi_K25ForConditionalGeneration"]
    described["architectures"] = ["KimiK25ForConditionalGeneration"]  # as it is published
    (source / "config.json").write_text(json.dumps(described))
    HfExport(source).write(tmp_path / "export", made.state_dict().items())
    before, after = load_file(source / FILE), load_file(tmp_path / "export" / FILE)
    assert before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())


def test_a_tensor_that_is_saved_with_others_has_no_rows_of_its_own() -> None:
    form, at = SavedForm(model("kimi_k25")), "model.vision_tower.layers.0.attn."
    three = (f"{at}k_proj.weight", f"{at}q_proj.weight", f"{at}v_proj.weight")
    assert form.together(three[2]) == three and form.together(f"{at}proj.weight") == (f"{at}proj.weight",)
    with pytest.raises(OtherOrder, match="v_proj.weight: transformers saves it in one tensor with .*q_proj"):
        form.parts(three[2], (8, 8))
    # a name that transformers changes only behind another one
    (part,) = form.parts("model.vision_tower.layers.0.norm2.weight", (8,))
    assert part == ("vision_tower.encoder.blocks.0.norm1.weight", (8,), 0)


def test_an_export_without_one_of_the_tensors_that_are_saved_in_one_is_refused(tmp_path: Path) -> None:
    made = model("kimi_k25")
    made.save_pretrained(tmp_path / "source")
    tensors = {n: t for n, t in made.state_dict().items() if n != "model.vision_tower.layers.1.attn.k_proj.bias"}
    with pytest.raises(ValueError, match="1 weights of the model are missing in the export, e.g. .*blocks.1.wqkv.bias"):
        HfExport(tmp_path / "source").write(tmp_path / "export", tensors.items())
