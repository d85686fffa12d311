"""`verl train` on rows with videos: from the file to the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_runs import metrics_of, small_run
from videos import frames_of, video, video_folder
from vision import VIDEO

from verl.models import pictures
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
