"""`verl sft` and `verl dpo` on rows with images: the losses and gradients of transformers, resumed and refused runs."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small_runs import metrics_of, same_tensors, small_run, tensors_of
from small_runs import small_supervised as run
from transformers import AutoModel, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision import IMAGE, chat_folder, png

from verl.checkpoint.score import read_score
from verl.driver import assemble_supervised
from verl.errors import Refused
from verl.nn.kept_features import KeptFeatures
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia
from verl.transfer_queue.memory import MemoryQueue

NAMES = ("cat", "dog", "fox")
SIZES = ((12, 8), (8, 8), (16, 8))
Content = str | list[dict[str, str]]


def said(role: str, *parts: str) -> dict[str, Any]:
    """Return a message with an image in the place of each file name."""
    shown = [{"type": "image"} if p.endswith(".png") else {"type": "text", "text": p} for p in parts]
    return {"role": role, "content": shown if {"type": "image"} in shown else "".join(parts)}


def files(*messages: Sequence[str]) -> list[str]:
    return [part for _, *parts in messages for part in parts if part.endswith(".png")]


TALKS = (
    [("user", "cat.png", "what?"), ("assistant", "a cat")],
    [("user", "hi"), ("assistant", "yes"), ("user", "and ", "dog.png", "?"), ("assistant", "a dog here")],
    [("user", "1+1="), ("assistant", "2")],
    [("user", "fox.png", "or", "cat.png", "dog.png"), ("assistant", "both"), ("user", "why?"), ("assistant", "so")],
)
PAIRS = (
    ([("user", "cat.png", "what?")], "a cat", "a dog here"),
    ([("user", "is ", "dog.png", "it?"), ("assistant", "yes"), ("user", "fox.png")], "a fox", "no"),
    ([("user", "1+1=")], "2", "33"),
)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("vl"), request.param)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for k, (name, size) in enumerate(zip(NAMES, SIZES)):
        (tmp_path / f"{name}.png").write_bytes(png(*size, k))
    talks = [{"messages": [said(*m) for m in talk], "images": files(*talk)} for talk in TALKS]
    return written(tmp_path / "talks.jsonl", talks)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row_of(folder: Path, messages: list[dict[str, Any]], images: list[Path], trained: int) -> dict[str, Any]:
    """Return the arguments of transformers for a conversation whose answers from message `trained` are learned."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found = processor(images=[Image.open(i) for i in images], return_tensors="pt") if images else {}
    tokens = iter((found["image_grid_thw"].prod(-1) // 4).tolist() if images else ())

    def ids_of(count: int, prompt: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(messages[:count], add_generation_prompt=prompt, return_dict=False))

    labels = torch.full((len(ids_of(len(messages), False)),), -100)
    whole = torch.tensor(ids_of(len(messages), False))
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= trained:
            own = slice(len(ids_of(i, True)), len(ids_of(i + 1, False)))
            labels[own] = whole[own]
    times = torch.tensor([next(tokens) if i == IMAGE else 1 for i in whole.tolist()])
    ids, labels = whole.repeat_interleave(times), labels.repeat_interleave(times)
    return {**found, "input_ids": ids[None], "labels": labels[None], "mm_token_type_ids": (ids == IMAGE).long()[None]}


def losses(model: Any, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the sum of each row's loss over its learned tokens, and their number."""
    for row in rows:
        count = int((row["labels"] >= 0).sum())
        yield model(**row).loss * count, count


def model_of(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("attention", ["auto", "padded"])
def test_sft_has_the_loss_and_the_gradient_of_transformers(
    folder: Path, rows: Path, tmp_path: Path, attention: str
) -> None:
    done = run("sft", tmp_path, folder, rows, f"model.engine_options.attention={attention}", "optim.clip_grad_norm=1e9")
    given = [row_of(folder, [said(*m) for m in talk], [tmp_path / name for name in files(*talk)], 0) for talk in TALKS]
    model = model_of(folder)
    sums, counts = zip(*losses(model, given))
    loss = sum(sums) / sum(counts)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert model.model.visual.patch_embed.proj.weight.grad.norm() > 0
    assert done.evals["val/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics_of(tmp_path / "r")[1]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_dpo_compares_answers_to_images_with_the_logprobs_of_transformers(folder: Path, tmp_path: Path) -> None:
    """The loss is that of the true margins, once the policy is another one than its start."""
    for k, (name, size) in enumerate(zip(NAMES, SIZES)):
        (tmp_path / f"{name}.png").write_bytes(png(*size, k))
    pairs = [
        {"prompt": [said(*m) for m in p], "images": files(*p), "chosen": good, "rejected": bad}
        for p, good, bad in PAIRS
    ]
    data = written(tmp_path / "pairs.jsonl", pairs)
    done = run("dpo", tmp_path, folder, data, "optim.lr=1e-3", "preference.beta=0.5")

    def margins(of: Path) -> torch.Tensor:
        found, model = [], model_of(of)
        for prompt, good, bad in PAIRS:
            images, messages = [tmp_path / name for name in files(*prompt)], [said(*m) for m in prompt]
            given = [row_of(folder, [*messages, said("assistant", a)], images, len(prompt)) for a in (good, bad)]
            (better, _), (worse, _) = losses(model, given)
            found.append(float((worse - better).detach()))
        return torch.tensor(found)

    moved = margins(tmp_path / "r" / "checkpoints" / "step_1" / "hf") - margins(folder)
    assert done.evals["val/loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(0.5 * moved).mean()), abs=2e-5)
    assert float(moved.abs().min()) > 1e-3


def scores(folder: Path, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the score of each row by the body of a reward model in transformers and its weights of the head."""
    model, head = AutoModel.from_pretrained(folder, dtype=torch.float32), read_score(folder)
    assert head is not None
    with torch.no_grad():
        hidden = [model(**{k: v for k, v in row.items() if k != "labels"}).last_hidden_state[0, -1] for row in rows]
    return [float(head[0] @ one) for one in hidden]


def test_a_reward_model_of_images_learns_and_scores_rollouts_as_transformers(folder: Path, tmp_path: Path) -> None:
    for k, (name, size) in enumerate(zip(NAMES, SIZES)):
        (tmp_path / f"{name}.png").write_bytes(png(*size, k))
    pairs = [
        {"prompt": [said(*m) for m in p], "images": files(*p), "chosen": good, "rejected": bad}
        for p, good, bad in PAIRS
    ]
    data = written(tmp_path / "pairs.jsonl", pairs)
    done, trained = run("rm", tmp_path, folder, data, "optim.lr=3e-3", "run.total_steps=3"), tmp_path / "hf"
    shutil.copytree(tmp_path / "r" / "checkpoints" / "step_3" / "hf", trained)
    assert metrics_of(tmp_path / "r")[3]["train/grad_norm"] > 0
    before, after = (AutoModel.from_pretrained(f, dtype=torch.float32).state_dict() for f in (folder, trained))
    assert before.keys() == after.keys() and "lm_head.weight" not in load_file(trained / "model.safetensors")
    assert any(not torch.equal(p, after[name]) for name, p in before.items() if name.startswith("visual."))
    given = [
        row_of(folder, [*(said(*m) for m in p), said("assistant", a)], [tmp_path / name for name in files(*p)], len(p))
        for p, *answers in PAIRS
        for a in answers
    ]
    chosen, rejected = torch.tensor(scores(trained, given)).reshape(-1, 2).T
    assert done.evals["val/loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()))
    assert done.evals["val/score/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-4, abs=1e-5)
    assert float((chosen - rejected).abs().max()) > 1e-3
    rows = [
        {"prompt": [said("user", f"{name}.png", "what?")], "images": [f"{name}.png"], "ground_truth": ""}
        for name in NAMES
    ]
    tasks = written(tmp_path / "tasks.jsonl", rows)
    for stage in ("stream", "batch"):
        own = (f"run.name={stage}", "run.total_steps=1", "data.max_prompt_tokens=64", f"reward.stage={stage}")
        keys = ("step.prompts_per_step=3", "step.samples_per_prompt=2", f"reward.model={trained}", "data.shuffle=false")
        small_run(tmp_path, folder, [tasks], *own, *keys)
        played = read_samples(tmp_path / stage, 1)
        assert len(played) == 6
        for row in played:
            ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
            image = Image.open(tmp_path / f"{NAMES[int(row.group_id.removeprefix('g'))]}.png")
            found = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[image], return_tensors="pt")
            inputs = {**found, "input_ids": ids[None], "mm_token_type_ids": (ids == IMAGE).long()[None]}
            assert row.components["reward_model"] == pytest.approx(*scores(trained, [inputs]), rel=1e-4, abs=1e-5)


def test_a_frozen_tower_encodes_each_image_once_and_no_image_is_left_in_the_store(
    folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, stores, make, real = list[Any](), list[MemoryMedia](), MemoryMedia.__init__, KeptFeatures._on_host
    monkeypatch.setattr(KeptFeatures, "_on_host", lambda self, p: (encoded.append(p.grid), real(self, p))[1])
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    here, put = list[bool](), MemoryMedia.put

    def recorded(self: MemoryMedia, content: bytes, owner: str) -> str:
        here.append(threading.current_thread() is threading.main_thread())
        return put(self, content, owner)

    monkeypatch.setattr(MemoryMedia, "put", recorded)
    frozen = "model.freeze=[vision,projector]"
    run("sft", tmp_path, folder, rows, frozen, "run.total_steps=3", "step.prompts_per_step=4", "optim.lr=1e-3")
    assert sorted(encoded) == sorted((1, h // 2, w // 2) for w, h in SIZES), "once in three steps and evaluations"
    assert stores and all(len(store) == 0 for store in stores)
    assert here and not any(here), "a large file does not hold the event loop up"
    before, after = (model_of(f).state_dict() for f in (folder, tmp_path / "r" / "checkpoints" / "step_3" / "hf"))
    changed = {name for name, p in before.items() if not torch.equal(p, after[name])}
    assert changed and not any(".visual." in name for name in changed)


def test_a_file_that_is_lost_ends_the_run_with_its_name_and_the_run_continues_with_it(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    steps = (
        "run.total_steps=4",
        "step.prompts_per_step=1",
        "run.save_every_steps=1",
        "optim.lr=1e-3",
        "data.eval_files=[]",
    )
    run("sft", tmp_path, folder, rows, *steps, "run.name=whole")
    content, real = (tmp_path / "fox.png").read_bytes(), assemble_supervised.reporter_of

    def then_lost(*given: Any, **more: Any) -> Any:
        (tmp_path / "fox.png").unlink()
        return real(*given, **more)

    times = (tmp_path / "fox.png").stat()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble_supervised, "reporter_of", then_lost)
        with pytest.raises(Refused, match=r"fox.png: No such file.*Fix: the file as it was, and the same command"):
            run("sft", tmp_path, folder, rows, *steps)
    assert sorted(metrics_of(tmp_path / "r")) == [1, 2, 3]
    (tmp_path / "fox.png").write_bytes(content)
    os.utime(tmp_path / "fox.png", ns=(times.st_atime_ns, times.st_mtime_ns))
    run("sft", tmp_path, folder, rows, *steps)
    same_tensors(tensors_of(tmp_path / "whole", 4, "trainer"), tensors_of(tmp_path / "r", 4, "trainer"))


def test_what_would_have_no_effect_or_no_store_is_refused_before_a_model_is_loaded(
    folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble_supervised, "workers_of", lambda *given: pytest.fail("a model is loaded"))
    text = written(tmp_path / "text.jsonl", [{"messages": [said(*m) for m in TALKS[2]]}])
    with pytest.raises(Refused, match=r"optim.options.lr.vision: the 1 rows of .* are text alone; text does not train"):
        run("sft", tmp_path, folder, text, "optim.options.lr={vision:1e-4}")
    make = MemoryQueue.__init__
    monkeypatch.setattr(MemoryQueue, "__init__", lambda self: (make(self), setattr(self, "media", None))[0])
    with pytest.raises(Refused, match="queue.engine=memory: rows have images, and this queue stores none. Fix: queue."):
        run("sft", tmp_path, folder, rows)
