"""Rows with images beside parts of a run that do not read them: refused, never computed from placeholders as text."""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision import chat_folder

from verl.config.schema import Config
from verl.data.source import TaskTable
from verl.driver.assemble_images import refuse_images
from verl.errors import Refused
from verl.models.sounds import MARK
from verl.transfer_queue.media import MemoryMedia
from verl.types import Task, TaskImage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("vl"), "qwen2_5_vl")


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Callable[..., str]:
    def made(name: str, **keys: Any) -> str:
        described = json.loads((folder / "config.json").read_text()) | keys
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(described))
        return str(tmp_path / name)

    return made


def table(*images: int, head: bytes = b"") -> TaskTable:
    """Return a table in which the entries with a number above 0 have an image, or a video that begins with `head`."""
    seen = np.frombuffer(marshal.dumps((("a.png", 1, 1, 0, 4, head, ()),)), np.uint8)
    lengths = {"ids_lengths": np.array(images), "images_lengths": np.array([len(seen) * (n > 0) for n in images])}
    content = np.concatenate([seen] * sum(n > 0 for n in images) or [seen[:0]])
    return TaskTable({**lengths, "ids": np.zeros(sum(images)), "images": content}, None, "")  # type: ignore[arg-type]


def task(index: int, *images: TaskImage) -> Task:
    return Task(task_id=str(index), index=index, prompt_ids=np.arange(3), row={}, messages=(), images=images)


TEXT, SEEN = task(0), task(1, TaskImage("a.png", 1, 1, 0, 4))


def test_rows_with_images_and_a_model_that_reads_text_are_refused(folder: Path, other: Callable[..., str]) -> None:
    config, store = Config(), MemoryMedia()
    config = replace(config, model=replace(config.model, path=str(folder)))
    text = other("text", model_type="qwen3")
    same, kin = str(folder), other("kin", model_type="qwen2_vl")
    moved, family = other("moved", image_token_id=58), other("family", model_type="internvl")
    cases: list[tuple[str, Any, str]] = [
        (
            "reward",
            {"model": text},
            "reward.model=.*text: it reads text alone, and rows have images.*row 1 of data.train_files",
        ),
        ("critic", {"path": text}, "critic.path=.*text: it reads text alone"),
        ("teacher", {"path": text}, "teacher.path=.*text: it reads text alone"),
        ("teacher", {"paths": {"a": same, "b": text}}, "teacher.paths.b=.*text: it reads text alone"),
        ("teacher", {"path": family}, "teacher.path=.*family: it is of another family than the policy"),
        ("critic", {"path": moved}, "critic.path=.*moved: its placeholder of images is the id 58, the policy's 60"),
        ("teacher", {"path": same}, ""),
        ("teacher", {"path": kin}, ""),
        ("teacher", {"path": "policy"}, ""),
        ("critic", {"path": same}, ""),
    ]
    for section, given, line in cases:
        built = replace(config, **{section: replace(getattr(config, section), **given)})
        refuse_images(built, table(0, 0), [TEXT], None)
        if not line:
            refuse_images(built, table(0, 7), [SEEN], store)
            continue
        with pytest.raises(Refused, match=line) as refused:
            refuse_images(built, table(0, 7), [TEXT], store)
        assert "\n" not in str(refused.value) and "Fix: " in str(refused.value)
        if section != "reward":
            refuse_images(built, table(0, 0), [TEXT, SEEN], store)


def test_images_of_the_evaluation_alone_need_a_store_and_a_reward_that_gets_them(
    folder: Path, other: Callable[..., str]
) -> None:
    config = replace(Config(), model=replace(Config().model, path=str(folder)))
    refuse_images(config, table(0), [TEXT, SEEN], MemoryMedia())
    with pytest.raises(Refused, match="queue.engine=memory: row 1 of data.eval_files has images, .* stores none. Fix"):
        refuse_images(config, table(0), [TEXT, SEEN], None)
    judged = replace(config, reward=replace(config.reward, model=str(folder)))
    refuse_images(judged, table(0), [TEXT, SEEN], MemoryMedia())
    judged = replace(config, reward=replace(config.reward, model=other("text", model_type="qwen3")))
    with pytest.raises(Refused, match="reward.model=.*row 1 of data.eval_files"):
        refuse_images(judged, table(0), [TEXT, SEEN], MemoryMedia())


def test_videos_for_a_server_and_for_models_that_read_them_otherwise_are_refused(
    folder: Path, other: Callable[..., str]
) -> None:
    config, store = Config(), MemoryMedia()
    config = replace(config, model=replace(config.model, path=str(folder)))
    film, heard = task(3, TaskImage("a.mp4", 1, 1, 0, 4, b"head")), task(2, TaskImage("a.wav", 1, 1, 0, 4, MARK))
    refuse_images(config, table(0, 7, head=b"head"), [film], store)
    kin = replace(config, teacher=replace(config.teacher, path=other("kin", model_type="qwen2_vl")))
    refuse_images(kin, table(0, 7), [film], store)
    with pytest.raises(Refused, match="teacher.path=.*kin: it does not read videos as the policy does, and row 1 of"):
        refuse_images(kin, table(0, 7, head=b"head"), [], store)
    served = replace(config, rollout=replace(config.rollout, engine="vllm"))
    refuse_images(served, table(0, 7), [SEEN], store)
    for given, line in (
        ((table(0, 7, head=b"head"), []), "rollout.engine=vllm: row 1 of data.train_files has a video"),
        ((table(0), [SEEN, film]), "rollout.engine=vllm: row 3 of data.eval_files has a video, and a server gets"),
        ((table(0, 7, head=MARK), []), "rollout.engine=vllm: row 1 of data.train_files has a sound, and a server gets"),
        ((table(0), [SEEN, heard]), "rollout.engine=vllm: row 2 of data.eval_files has a sound"),
    ):
        with pytest.raises(Refused, match=line):
            refuse_images(served, *given, store)
