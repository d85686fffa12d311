"""Answers to rows with images without training: a file of them, and an evaluation."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from small_runs import small_args
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision import IMAGE, chat_folder, png

from verl import cli
from verl.config.load import load_config
from verl.driver import generate
from verl.driver.generate import generate_file
from verl.driver.launch import run_eval
from verl.errors import Refused
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia

SIZES = ((12, 8), (8, 8), (16, 8))
BANNED = range(58, 62)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with the bytes of an image, one in two columns of text, and one without an image."""
    images: list[Any] = [[{"bytes": png(*size, k), "path": None}] for k, size in enumerate(SIZES)]
    prompts = [[{"role": "user", "content": f"<image>{k}?"}] for k in range(3)] + [[{"role": "user", "content": "q"}]]
    rows = {"prompt": prompts, "images": [*images, None], "ground_truth": list("1234")}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def greedy(folder: Path, data: Path, tokens: int) -> list[list[int]]:
    """Return the likeliest answers by transformers, without the ids that are never sampled."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    processor, found = Qwen2VLImageProcessorPil.from_pretrained(folder), []
    for k, row in enumerate(pq.read_table(data).to_pylist()):
        shown = [{"type": "image"}] if row["images"] else []
        text = [{"type": "text", "text": row["prompt"][0]["content"].removeprefix("<image>")}]
        messages = [{"role": "user", "content": [*shown, *text] if shown else text[0]["text"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        seen: dict[str, Any] = {}
        if shown:
            (data.parent / f"{k}.png").write_bytes(row["images"][0]["bytes"])
            seen = dict(processor(images=[Image.open(data.parent / f"{k}.png")], return_tensors="pt"))
            count = int(seen["image_grid_thw"].prod()) // 4
            ids = [i for token in ids for i in ([token] * count if token == IMAGE else [token])]
        start = len(ids)
        for _ in range(tokens):
            given = torch.tensor([ids])
            kinds = (torch.arange(len(ids)) < start) & (given == IMAGE)
            with torch.no_grad():
                logits = model(input_ids=given, mm_token_type_ids=kinds.long(), **seen).logits[0, -1]
            logits[list(BANNED)] = -torch.inf
            ids.append(int(logits.argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        found.append(ids[start:])
    return found


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_file_gets_the_answers_of_transformers_and_keeps_its_columns(
    engine: str, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, make = list[MemoryMedia](), MemoryMedia.__init__
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    given = ("rollout.temperature=0.0", "rollout.max_response_tokens=6", "data.max_prompt_tokens=32")
    args = small_args(tmp_path, folder, [data], *given, f"rollout.engine={engine}", "step.samples_per_prompt=2")
    assert generate_file(load_config(args).config, tmp_path / "out.parquet") == 4
    found, tokenizer = pq.read_table(tmp_path / "out.parquet").to_pylist(), AutoTokenizer.from_pretrained(folder)
    rows = pq.read_table(data).to_pylist()
    assert [{k: v for k, v in row.items() if k != "responses"} for row in found] == rows
    expected = [tokenizer.decode(ids, skip_special_tokens=True) for ids in greedy(folder, data, 6)]
    assert [row["responses"] for row in found] == [[text] * 2 for text in expected] and len({*expected}) > 1
    assert stores and all(len(store) == 0 for store in stores)


def files(tmp_path: Path) -> Path:
    """Return rows with the paths of images, of which the third is damaged behind its header, and one without."""
    for k, size in enumerate(SIZES):
        content = png(*size, k)
        if k == 2:
            at = content.index(b"IDAT") + 8
            content = content[:at] + bytes(8) + content[at + 8 :]
        (tmp_path / f"{k}.png").write_bytes(content)
    prompts = [[{"role": "user", "content": f"<image>{k}?"}] for k in range(3)] + [[{"role": "user", "content": "q"}]]
    rows = {"prompt": prompts, "images": [*([f"{k}.png"] for k in range(3)), None], "ground_truth": list("1234")}
    pq.write_table(pa.table(rows), tmp_path / "files.parquet")
    return tmp_path / "files.parquet"


def test_rows_with_an_image_that_is_lost_have_no_answers_and_the_others_are_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, put, held = list[tuple[str, bool]](), MemoryMedia.put, generate.images_held

    def recorded(self: MemoryMedia, content: bytes, owner: str) -> str:
        stored.append((owner, threading.current_thread() is threading.main_thread()))
        return put(self, content, owner)

    def lost(store: Any, images: Any, owner: str) -> Any:
        if owner == "generate/1":
            (tmp_path / "1.png").unlink(missing_ok=True)
        return held(store, images, owner)

    monkeypatch.setattr(MemoryMedia, "put", recorded)
    monkeypatch.setattr(generate, "images_held", lost)
    given = ("rollout.max_response_tokens=6", "data.max_prompt_tokens=32", "step.samples_per_prompt=2")
    args = small_args(tmp_path, folder, [files(tmp_path)], *given)
    out = tmp_path / "out.parquet"
    with pytest.raises(Refused, match=r"row 2 has no answer: .*1\.png: No such file.* 2 of 4 rows .*out.parquet\. Fix"):
        generate_file(load_config(args).config, out)
    assert [len(row["responses"] or ()) for row in pq.read_table(out).to_pylist()] == [2, 0, 0, 2]
    assert sorted(stored) == [("generate", False), ("generate/2", False)], "once for a prompt, each by a thread"


def test_an_image_that_changes_while_the_model_is_loaded_is_named_before_the_first_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = generate.rollout_engine

    def changed(*parts: Any, **more: Any) -> Any:
        (tmp_path / "1.png").write_bytes(b"another")
        return made(*parts, **more)

    monkeypatch.setattr(generate, "rollout_engine", changed)
    monkeypatch.setattr(generate, "images_held", lambda *given: pytest.fail("an answer is begun"))
    args = small_args(tmp_path, folder, [files(tmp_path)], "data.max_prompt_tokens=32")
    with pytest.raises(Refused, match=r"row 2: .*1\.png: the file was changed after the rows were read\. Fix"):
        generate_file(load_config(args).config, tmp_path / "out.parquet")


def test_an_evaluation_shows_the_images_to_the_model_and_to_the_reward(
    folder: Path, data: Path, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import pathlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    names = extra_info.get('images', [])\n"
        "    assert all(pathlib.Path(name).read_bytes().startswith(b'\\x89PNG') for name in names)\n"
        "    return float(len(names))\n"
    )
    given = ("rollout.max_response_tokens=6", "data.max_prompt_tokens=32", "eval.temperature=0.0")
    args = small_args(tmp_path, folder, [data], f"data.eval_files=[{data}]", f"reward.path={reward}", *given)
    done = run_eval(load_config(args))
    assert done.evals["eval/acc/greedy"] == 0.75 and done.evals["eval/invalid_share/greedy"] == 0
    rows = sorted(read_samples(tmp_path / "r", 0, "eval"), key=lambda row: json.dumps(row.group_id))
    tokenizer, expected = AutoTokenizer.from_pretrained(folder), greedy(folder, data, 6)
    assert sorted(row.response_text for row in rows) == sorted(
        tokenizer.decode(ids, skip_special_tokens=True) for ids in expected
    )
    assert sum(np.isin(IMAGE, row.prompt_ids) for row in rows) == 3


def test_a_prompt_with_images_gets_the_answer_of_transformers(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [AutoTokenizer.from_pretrained(folder).decode(ids) for ids in greedy(folder, data, 4)]
    given = ["rollout.temperature=0", "rollout.max_response_tokens=4", "model.dtype=float32", "run.threads=1"]
    for prompt, answer in (("<image>2?", expected[2]), ("2?", expected[2])):
        args = [f"model.path={folder}", f"prompt={prompt}", f"images=[{tmp_path / '2.png'}]", *given]
        assert cli.main(["generate", *args]) == 0
        assert answer.removesuffix("<|end|>") in capsys.readouterr().out
    for images, line in (("[/no/such.png]", "image 1: no file /no/such.png"), ("x.png", "a list of files: images=")):
        assert cli.main(["generate", f"model.path={folder}", "prompt=q", f"images={images}", *given]) == 2
        assert line in capsys.readouterr().err
    assert cli.main(["generate", f"model.path={folder}", "prompt=<image>what?", *given]) == 2
    assert "<image>, and no images are given. Fix: images=[FILE]" in capsys.readouterr().err
