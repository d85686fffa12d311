"""`verl train` on rows with images: from the Parquet file to the gradient."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_tokenizers import KINDS as MARKED
from image_tokenizers import marked_folder, tokenizer_of
from small_runs import metrics_of, small_run
from transformers import AutoModelForImageTextToText
from vision import END, IMAGE, KINDS, chat_folder, png
from vision_families import model as model_of_family

from verl.driver import assemble
from verl.errors import Refused
from verl.models.families import family_of
from verl.rollout.embedded.features import EncodedImages
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia
from verl.transfer_queue.memory import MemoryQueue

REWARD = """
import pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert all(pathlib.Path(name).read_bytes().startswith(b"\\x89PNG") for name in extra_info["images"])
    return float(len(solution_str))
"""
SIZES = ((12, 8), (8, 8), (16, 8), (8, 12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("vl"), "qwen2_5_vl")


def written(path: Path, images: list[Any]) -> Path:
    prompt = [[{"role": "user", "content": f"<image>{k}?"}] for k in range(len(images))]
    pq.write_table(
        pa.table({"prompt": prompt, "images": [[i] for i in images], "ground_truth": ["1"] * len(images)}), path
    )
    return path


def run(root: Path, folder: Path, data: Path, *more: str) -> Any:
    (root / "reward.py").write_text(REWARD)
    given = ("data.max_prompt_tokens=96", f"reward.path={root / 'reward.py'}", *more)
    return small_run(root, folder, [data], "run.total_steps=2", *given)


def test_rows_with_images_train_and_each_image_is_encoded_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, real = list[str](), EncodedImages._of
    stores, make = list[MemoryMedia](), MemoryMedia.__init__

    def count(self: EncodedImages, name: str, picture: Any) -> Any:
        before = self.encoded
        found = real(self, name, picture)
        encoded.extend([name] * (self.encoded - before))
        return found

    monkeypatch.setattr(EncodedImages, "_of", count)
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    data = written(tmp_path / "rows.parquet", [png(*size, k) for k, size in enumerate(SIZES)])
    assert run(tmp_path, folder, data, f"data.eval_files=[{data}]", "run.eval_after=true").steps == 2
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 for step in (1, 2))
    for step in (1, 2):
        rows = read_samples(tmp_path / "r", step)
        assert len({row.group_id for row in rows}) == 4 and all(IMAGE in row.prompt_ids for row in rows)
    assert sorted(encoded) == sorted(name for name in {*encoded} for _ in range(3)), "once for each of three versions"
    assert len({*encoded}) == 4 and all(len(store) == 0 for store in stores), "nothing is kept after the run"


def test_a_queue_without_a_store_of_images_is_refused_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, make = list[str](), MemoryQueue.__init__
    monkeypatch.setattr(assemble, "workers_of", lambda *given: started.append("a model"))
    monkeypatch.setattr(MemoryQueue, "__init__", lambda self: (make(self), setattr(self, "media", None))[0])
    data = written(tmp_path / "rows.parquet", [png(*size, k) for k, size in enumerate(SIZES)])
    with pytest.raises(Refused, match="queue.engine=memory: row 0 of data.train_files has images, and this queue"):
        run(tmp_path, folder, data)
    assert started == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_rows_with_images_train_the_other_families_of_qwen(kind: str, tmp_path: Path) -> None:
    made = None
    if kind not in KINDS:
        made = copy.deepcopy(model_of_family(kind))
        made.config.vision_end_token_id = END
    data = written(tmp_path / "rows.parquet", [png(*size, k) for k, size in enumerate(SIZES)])
    assert run(tmp_path, chat_folder(tmp_path / "model", kind, made), data).steps == 2
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 < metrics[step]["actor/grad_norm"] for step in (1, 2))
    assert all(IMAGE in row.prompt_ids for row in read_samples(tmp_path / "r", 1))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("smolvlm", "gemma3") else pytest.mark.slow) for kind in MARKED]
)
def test_rows_with_images_train_families_whose_images_have_marks(kind: str, tmp_path: Path) -> None:
    """Marks are tokens of prompts, and no policy samples one. All parts of a model are trained, and its export is read
    by transformers."""
    data = written(tmp_path / "rows.parquet", [png(*size, k) for k, size in enumerate(SIZES)])
    folder = tmp_path / "model"
    assert run(tmp_path, marked_folder(kind, folder), data).steps == 2
    metrics, rows = metrics_of(tmp_path / "r"), [row for step in (1, 2) for row in read_samples(tmp_path / "r", step)]
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 < metrics[step]["actor/grad_norm"] for step in (1, 2))
    tokenizer = tokenizer_of(kind)
    marks = {*tokenizer.convert_tokens_to_ids([MARKED[kind].image, *MARKED[kind].tokens])}
    assert rows and all(row.banned and len(marks & {*row.prompt_ids.tolist()}) > (kind != "llava") for row in rows)
    assert not marks & {i for row in rows for i in row.response_ids.tolist()}
    exported = tmp_path / "r" / "checkpoints" / "step_2" / "hf"
    loaded, found = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    before = dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters())
    family = family_of(loaded.config)
    changed = {name for name, p in loaded.named_parameters() if not torch.equal(p, before[name])}
    assert family is not None and {*map(family.part_of, changed)} == {"vision", "projector", "language"}
