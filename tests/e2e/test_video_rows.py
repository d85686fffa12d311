"""`verl train` on rows with videos: from the file to the gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_runs import metrics_of, small_run, small_supervised
from transformers import AutoModelForImageTextToText
from videos import frames_of, video, video_folder
from vision import VIDEO, image_tokenizer

from verl.chat import Rendered
from verl.config.schema import DataConfig
from verl.data.preference import load_pairs
from verl.data.source import load_conversations
from verl.driver.task_media import images_stored
from verl.models import pictures
from verl.models.pictures import Pictures
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia

REWARD = """
import pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert all(pathlib.Path(name).read_bytes().startswith(b"\\x1aE\\xdf\\xa3") for name in extra_info["videos"])
    return float(len(solution_str))
"""


def written(path: Path, root: Path) -> Path:
    for k in range(4):
        (root / f"{k}.mkv").write_bytes(video(frames_of(6 + 2 * k, 12, 8, k)))
    prompt = [[{"role": "user", "content": f"<video>{k}?"}] for k in range(4)]
    names = [[f"{k}.mkv"] for k in range(4)]
    pq.write_table(pa.table({"prompt": prompt, "videos": names, "ground_truth": ["1"] * 4}), path)
    return path


@pytest.mark.parametrize(
    "kind, rollout",
    [
        ("qwen3_vl", "native"),
        pytest.param("qwen2_5_vl", "hf", marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "native", marks=pytest.mark.slow),
        pytest.param("qwen2_vl", "native", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "hf", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", "native", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "native", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "native", marks=pytest.mark.slow),
    ],
)
def test_rows_with_videos_train(kind: str, rollout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video is decoded once by the rollout and once by the trainer in a run, and nothing is kept after it."""
    stores, make, decoded, real = list[Any](), MemoryMedia.__init__, list[str](), pictures.video_picture
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    monkeypatch.setattr(pictures, "video_picture", lambda *given: (decoded.append(given[2]), real(*given))[1])
    data = written(tmp_path / "rows.parquet", tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    given = ("data.max_prompt_tokens=96", f"reward.path={tmp_path / 'reward.py'}", f"rollout.engine={rollout}")
    folder = video_folder(tmp_path / "model", kind)
    assert small_run(tmp_path, folder, [data], "run.total_steps=2", *given).steps == 2
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 < metrics[step]["actor/grad_norm"] for step in (1, 2))
    for step in (1, 2):
        rows = read_samples(tmp_path / "r", step)
        assert len({row.group_id for row in rows}) == 4 and all(VIDEO in row.prompt_ids for row in rows)
        assert not any(VIDEO in row.response_ids for row in rows)
    assert len({*decoded}) == 4 and len(decoded) in (4, 8), "twice at most"
    assert stores and all(len(store) == 0 for store in stores)


def losses(folder: Path, rows: list[Rendered], model: Any) -> list[tuple[torch.Tensor, int]]:
    """Return the sum of the losses of each row's answers by transformers, and their number."""
    found = []
    for row in rows:
        store = MemoryMedia()
        with images_stored(store, "test") as stored:
            names = [stored(image) for image in row.images]
            pictures_of = Pictures(folder, store).of(names)
        ids, kinds = torch.from_numpy(row.ids)[None], torch.zeros(1, len(row.ids), dtype=torch.int64)
        labels = torch.where(torch.from_numpy(row.mask)[None], ids, -100)
        given: dict[str, Any] = {}
        if row.images:
            kinds[ids == VIDEO] = 2
            clips = [pictures_of[name] for name in names]
            given = {"pixel_values_videos": torch.cat([clip.patches for clip in clips])}
            given["video_grid_thw"] = torch.tensor([clip.grid for clip in clips])
            if model.config.model_type == "qwen2_5_vl":
                given["second_per_grid_ts"] = torch.tensor(
                    [clip.clip.step / model.config.vision_config.tokens_per_second for clip in clips]
                )
        count = int(row.mask.sum())
        found.append((model(input_ids=ids, labels=labels, mm_token_type_ids=kinds, **given).loss * count, count))
    return found


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_conversations_and_pairs_with_videos_train_as_in_transformers(kind: str, tmp_path: Path) -> None:
    folder = video_folder(tmp_path / "model", kind)
    for k in range(2):
        (tmp_path / f"{k}.mkv").write_bytes(video(frames_of(4 + 4 * k, 32, 8, k)))
    user, answer = {"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "a cat"}
    talks = [
        {"messages": [user, answer], "videos": ["0.mkv"]},
        {"messages": [user, answer, user, {"role": "assistant", "content": "so"}], "videos": ["1.mkv", "0.mkv"]},
        {"messages": [{"role": "user", "content": "hi"}, answer]},
    ]
    pairs = [{"prompt": [user], "videos": [f"{k}.mkv"], "chosen": "a cat", "rejected": "no"} for k in range(2)]
    for name, rows in (("talks", talks), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), max_tokens_per_row=128)
    given: tuple[Any, ...] = (image_tokenizer(), cfg)
    table = load_conversations([str(tmp_path / "talks.jsonl")], *given, model=folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    sums, counts = zip(*losses(folder, [table[k] for k in range(3)], model))
    loss = sum(sums) / sum(counts)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    plain = ("optim.clip_grad_norm=1e9", "data.max_tokens_per_row=128")
    done = small_supervised("sft", tmp_path, folder, tmp_path / "talks.jsonl", *plain)
    assert done.evals["val/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics_of(tmp_path / "r")[1]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    moved = ("optim.lr=1e-3", "preference.beta=0.5", "data.max_tokens_per_row=128", "run.name=dpo")
    done = small_supervised("dpo", tmp_path, folder, tmp_path / "pairs.jsonl", *moved)
    compared = load_pairs([str(tmp_path / "pairs.jsonl")], *given, model=folder)
    margins = []
    for of in (tmp_path / "dpo" / "checkpoints" / "step_1" / "hf", folder):
        model = AutoModelForImageTextToText.from_pretrained(of, dtype=torch.float32)
        both = [losses(folder, [row for row in (pair.chosen, pair.rejected) if row], model) for pair in compared.pairs]
        margins.append(torch.stack([worse[0] - better[0] for better, worse in both]).detach())
    expected = -torch.nn.functional.logsigmoid(0.5 * (margins[0] - margins[1])).mean()
    assert done.evals["val/loss"] == pytest.approx(float(expected), abs=2e-5)
    assert float((margins[0] - margins[1]).abs().min()) > 1e-3
