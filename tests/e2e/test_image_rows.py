"""`verl train` on rows with images: from the Parquet file to the gradient."""

from __future__ import annotations

import gc
import pickle
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_tokenizers import KINDS as MARKED
from image_tokenizers import marked_folder, tokenizer_of
from safetensors.torch import load_file
from small_runs import metrics_of, small_run
from transformers import AutoModelForImageTextToText
from vision import END, IMAGE, KINDS, chat_folder, png
from vision_families import CLOSE
from vision_families import model as model_of_family

from verl.driver import assemble
from verl.driver.media_ahead import MediaAhead
from verl.driver.reporter import Reporter
from verl.driver.rollouts import RolloutManager
from verl.errors import Refused
from verl.medium import media_hash
from verl.models.families import family_of
from verl.models.pictures import Pictures
from verl.rollout.embedded.features import EncodedImages
from verl.track.events import read_events
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia
from verl.transfer_queue.memory import MemoryQueue
from verl.workers.inproc import InprocGroup

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
    read, process = list[str](), Pictures._read
    monkeypatch.setattr(Pictures, "_read", lambda self, *given: (read.append(given[0]), process(self, *given))[1])

    def count(self: EncodedImages, name: str, picture: Any) -> Any:
        before = self.encoded
        found = real(self, name, picture)
        encoded.extend([name] * (self.encoded - before))
        return found

    monkeypatch.setattr(EncodedImages, "_of", count)
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    data = written(tmp_path / "rows.parquet", [png(*size, k) for k, size in enumerate(SIZES)])
    assert (
        run(
            tmp_path, folder, data, f"data.eval_files=[{data}]", "run.eval_after=true", "algorithm.kl_loss_coef=0.1"
        ).steps
        == 2
    )
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 for step in (1, 2))
    for step in (1, 2):
        rows = read_samples(tmp_path / "r", step)
        assert len({row.group_id for row in rows}) == 4 and all(IMAGE in row.prompt_ids for row in rows)
    assert sorted(encoded) == sorted(name for name in {*encoded} for _ in range(3)), "once for each of three versions"
    assert sorted(read) == sorted({*encoded}), "processed once, for rollout, reference and updates"
    assert len({*encoded}) == 4 and all(len(store) == 0 for store in stores), "nothing is kept after the run"


def test_adapters_train_on_rows_with_images(folder: Path, tmp_path: Path) -> None:
    """Factors of the language model alone, which act in the rollout as in the trainer."""
    data = written(tmp_path / "rows.parquet", [png(*size, k) for k, size in enumerate(SIZES)])
    assert run(tmp_path, folder, data, "model.lora.rank=2", "optim.lr=0.01").steps == 2
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 for step in (1, 2))
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (1, 2))
    names = {name for file in (tmp_path / "r").rglob("adapter_model.safetensors") for name in load_file(file)}
    assert names and not [name for name in names if "visual" in name or "lora_" not in name]


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_adapters_train_a_projector_whole_on_rows_with_images(folder: Path, tmp_path: Path, engine: str) -> None:
    """Versions of factors and projector alone: the rollout encodes the images again with each."""
    data = written(tmp_path / "rows.parquet", [png(*size, k) for k, size in enumerate(SIZES)])
    lora = ("model.lora.rank=2", "model.lora.modules_to_save=[visual.merger]", "model.lora.exclude=[.*visual.*]")
    rates = ("optim.lr=0.01", "optim.options.lr={projector:0.02}", f"rollout.engine={engine}")
    more = ("algorithm.kl_loss_coef=0.1", "run.total_steps=3")
    assert run(tmp_path, folder, data, *lora, *rates, *more).steps == 3
    metrics = metrics_of(tmp_path / "r")
    for step in (1, 2, 3):
        assert metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 and metrics[step]["sync/canary_mean_abs"] < 1e-5
    (file,) = (tmp_path / "r").rglob("adapter_model.safetensors")
    found = {name: t for name, t in load_file(file).items() if "lora_" not in name}
    base = AutoModelForImageTextToText.from_pretrained(folder).named_parameters()
    before = {f"base_model.model.{name}": p for name, p in base if ".visual.merger." in name}
    assert before and found.keys() == before.keys()
    assert all((found[name] - before[name]).abs().max() > 1e-3 for name in found)


def test_what_is_sent_to_workers_has_no_content_of_images(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, submit = list[bytes](), InprocGroup.submit

    def noted(self: InprocGroup, method: Any, args: Any) -> Any:
        sent.append(pickle.dumps(args))
        return submit(self, method, args)

    monkeypatch.setattr(InprocGroup, "submit", noted)
    contents = [png(32, 16 + 4 * k, k) for k in range(4)]
    assert run(tmp_path, folder, written(tmp_path / "rows.parquet", contents)).steps == 2
    assert not [one for one in sent if b"\x89PNG" in one]
    assert len(sent) > 4 and max(map(len, sent)) < 4 * 3 * 32 * 16, "fewer bytes than one processed image"


def test_a_file_that_is_lost_makes_the_attempts_of_its_row_invalid_and_the_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, real = [f"{k}.png" for k in range(8)], RolloutManager.on_published
    for k, name in enumerate(names):
        (tmp_path / name).write_bytes(png(*SIZES[k % 4], k))

    def then_lost(self: RolloutManager, version: int) -> None:
        if version == 1:
            (tmp_path / "5.png").unlink()
        real(self, version)

    monkeypatch.setattr(RolloutManager, "on_published", then_lost)
    given = ("run.total_steps=4", "data.shuffle=false")
    assert run(tmp_path, folder, written(tmp_path / "rows.parquet", names), *given).steps == 4
    scored = [e for e in read_events(tmp_path / "r") if e.kind == "scored"]
    lost = [e.data for e in scored if {*e.data["outcomes"]} != {"ok"}]
    assert [(e["group_id"], {*e["outcomes"]}) for e in lost] == [("g00000005", {"invalid"}), ("g00000013", {"invalid"})]
    line = f"media: {tmp_path / '5.png'}: No such file or directory"
    assert all({*e["errors"]} == {line} and {*e["rewards"]} == {None} for e in lost)
    for step, invalid in ((1, 0), (2, 1), (3, 0), (4, 1)):
        assert metrics_of(tmp_path / "r")[step]["groups/invalid"] == invalid
        rows = read_samples(tmp_path / "r", step)
        assert len({row.group_id for row in rows}) == 4 and not {row.group_id for row in rows} & {"g00000005"}


def test_images_of_the_next_step_are_processed_during_an_update_and_change_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second step one image is damaged, which its own attempts report."""
    contents = [png(*SIZES[k % 4], k) for k in range(8)]
    at = contents[6].index(b"IDAT") + 6
    contents[6] = contents[6][:at] + bytes(20) + contents[6][at + 20 :]
    for k, content in enumerate(contents):
        (tmp_path / f"{k}.png").write_bytes(content)
    data = written(tmp_path / "rows.parquet", [str(tmp_path / f"{k}.png") for k in range(8)])
    read, real, end = list[tuple[str, bool]](), Pictures._read, MediaAhead.end

    def noted(self: Pictures, name: str, content: bytes) -> Any:
        read.append((name, threading.current_thread().name.startswith("media-ahead")))
        return real(self, name, content)

    def when_ready(self: MediaAhead) -> None:
        if self._thread is not None:
            self._thread.submit(int).result(60)
        end(self)

    def played(name: str) -> Any:
        read.clear()
        run(tmp_path, folder, data, "data.shuffle=false", f"run.name={name}")
        rows = [row for step in (1, 2) for row in read_samples(tmp_path / name, step)]
        scored = {e.data["group_id"]: e.data for e in read_events(tmp_path / name) if e.kind == "scored"}
        losses = [metrics_of(tmp_path / name)[step]["actor/pg_loss"] for step in (1, 2)]
        tokens = [{key: values.tolist() for key, values in row.tokens.items()} for row in rows]
        return [(r.group_id, [*r.prompt_ids], [*r.response_ids]) for r in rows], tokens, scored, losses

    monkeypatch.setattr(Pictures, "_read", noted)
    monkeypatch.setattr(MediaAhead, "end", when_ready)
    ahead, names = played("ahead"), [media_hash(content) for content in contents]
    whole = [name for name in names if name != names[6]]
    assert sorted(name for name, _ in read if name != names[6]) == sorted(whole), "each is processed once"
    assert {name for name, early in read if early} == {*names[4:]}, "those of the second step"
    monkeypatch.setattr(MediaAhead, "begin", lambda self, indices: None)
    assert played("r") == ahead and not any(early for _, early in read)
    assert {*ahead[2]["g00000006"]["outcomes"]} == {"failed"} and "damaged PNG" in ahead[2]["g00000006"]["errors"][0]


@pytest.mark.slow
def test_the_memory_of_a_run_does_not_grow_with_the_images_of_its_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images of 1 MB a step, each another one; the process contains the engines too."""
    steps, traced, resident = 80, list[int](), list[int]()
    names, real = [f"{k}.png" for k in range(2 * steps)], Reporter.log
    for k, name in enumerate(names):
        (tmp_path / name).write_bytes(png(*SIZES[k % 4], k) + bytes(1 << 20))

    def measure(self: Reporter, *given: Any, **more: Any) -> Any:
        gc.collect()
        traced.append(tracemalloc.get_traced_memory()[0])
        resident.append(psutil.Process().memory_info().rss)
        return real(self, *given, **more)

    monkeypatch.setattr(Reporter, "log", measure)
    given = ("step.prompts_per_step=2", "step.samples_per_prompt=2", "rollout.max_response_tokens=2")
    data = written(tmp_path / "rows.parquet", names)
    tracemalloc.start()
    try:
        run(tmp_path, folder, data, f"run.total_steps={steps}", *given)
    finally:
        tracemalloc.stop()
    assert len(resident) == steps
    for sizes, most in ((traced, 20 << 10), (resident, 500 << 10)):  # that of a process is uneven by some MB
        least = [min(sizes[first : first + 20]) for first in (19, 59)]  # without the images that are read just then
        assert (least[1] - least[0]) / 40 < most, sizes


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
        made = model_of_family(kind)
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
    mismatch = [metrics[step]["mismatch/max_abs_dlogp"] for step in (1, 2)]
    assert max(mismatch) < CLOSE.get(kind, 1e-5) and all(metrics[step]["actor/grad_norm"] > 1e-5 for step in (1, 2))
    tokenizer = tokenizer_of(kind)
    marks = {*tokenizer.convert_tokens_to_ids([MARKED[kind].image, *MARKED[kind].tokens])}
    bans = kind != "mllama"  # its token of images is outside the vocabulary
    several = kind not in ("kimi_k25", "llava", "llava_next", "mllama")
    assert rows and all(row.banned == bans and len(marks & {*row.prompt_ids.tolist()}) > several for row in rows)
    assert not marks & {i for row in rows for i in row.response_ids.tolist()}
    exported = tmp_path / "r" / "checkpoints" / "step_2" / "hf"
    loaded, found = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    before = dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters())
    family = family_of(loaded.config)
    changed = {name for name, p in loaded.named_parameters() if not torch.equal(p, before[name])}
    assert family is not None and {*map(family.part_of, changed)} == {"vision", "projector", "language"}
