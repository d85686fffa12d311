"""When the log-probs of the start weights that are kept on disk are those of a run."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision import chat_folder, image_tokenizer, png

from verl.config.schema import DataConfig
from verl.data.preference import load_pairs
from verl.driver.stages import PreferenceStage, reference_logprobs

PICTURES = "preprocessor_config.json"


def kept(data: Path, folder: Path) -> bool:
    """Return whether the log-probs of the start weights in a folder were kept by an earlier call."""
    cache = str(data.parent / "cache")
    table = load_pairs([str(data)], image_tokenizer(), DataConfig(cache_dir=cache, max_tokens_per_row=64), model=folder)
    computed: list[int] = []

    async def logprobs_of(made: Callable[[Any], list[Any]]) -> list[np.ndarray]:
        samples = made(lambda image: image.path)
        computed.append(len(samples))
        return [np.zeros(sample.loss_tokens, np.float32) for sample in samples]

    where = {"model_dir": folder, "dtype": "float32", "cache_dir": cache, "note": lambda line: None}
    asyncio.run(reference_logprobs(PreferenceStage(table, ()), logprobs_of, **where))
    return not computed


@pytest.mark.parametrize("shown", [True, False], ids=["images", "text"])
def test_what_decides_the_pixels_of_an_image_decides_whether_kept_logprobs_are_those_of_the_run(
    shown: bool, tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(png(12, 8))
    rows = {"prompt": "<image>q" if shown else "q", "chosen": "a", "rejected": "b"}
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(rows | ({"images": ["cat.png"]} if shown else {})) + "\n")
    folder = chat_folder(tmp_path / "model", "qwen2_5_vl")
    assert not kept(data, folder) and kept(data, folder)
    assert kept(data, Path(shutil.copytree(folder, tmp_path / "same")))
    settings = json.loads((folder / PICTURES).read_text())
    darker = settings | {"image_mean": [0.1, 0.2, 0.3]}
    assert darker["image_mean"] != settings["image_mean"]
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / PICTURES).write_text(json.dumps(darker))
    assert kept(data, other) is not shown
    nested = Path(shutil.copytree(folder, tmp_path / "nested"))
    (nested / "processor_config.json").write_text(json.dumps({"image_processor": darker}))  # counts before the other
    assert kept(data, nested) is not shown
