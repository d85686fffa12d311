"""Runs of further families that read images, on rows of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from small_runs import metrics_of, small_run
from transformers import AutoModelForImageTextToText
from vision_families import model

from verl.models import tiny
from verl.models.families import family_of
from verl.recipes import arithmetic


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral3", "gemma3", "smolvlm", "qwen3_5", "qwen3_vl_moe"])
def test_a_run_trains_the_language_model_and_exports_the_whole(
    kind: str, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    tokenizer, made = tiny.character_tokenizer(arithmetic.CHARACTERS), model(kind)
    for config in (made.config, made.config.get_text_config(), made.generation_config):
        config.pad_token_id, config.eos_token_id, config.bos_token_id = (
            tokenizer.pad_token_id,
            tokenizer.eos_token_id,
            None,
        )
    small_run(tmp_path, tiny.save(made, tokenizer, tmp_path / "model"), arithmetic_data, "run.total_steps=2")
    last, family = metrics_of(tmp_path / "r")[2], family_of(made.config)
    assert last["mismatch/max_abs_dlogp"] < 1e-5 and last["sync/canary_mean_abs"] < 1e-5
    folder = tmp_path / "r" / "checkpoints" / "step_2" / "hf"
    loaded, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and family is not None
    before = dict(made.named_parameters())
    changed = {name for name, p in loaded.named_parameters() if not torch.equal(p, before[name])}
    assert {family.part_of(name) for name in changed} == {"language"}
    assert any("experts" in name for name in changed) == (kind == "qwen3_vl_moe"), "they are saved transposed"
