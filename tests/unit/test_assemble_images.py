"""Rows with images beside parts of a run that do not read them: refused, never computed from placeholders as text."""

from __future__ import annotations

import json
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


def table(*images: int) -> TaskTable:
    """Return a table whose entries have these numbers of bytes of images."""
    lengths = {f"{name}_lengths": np.array(images) for name in ("ids", "images")}
    return TaskTable({**lengths, "ids": np.zeros(sum(images)), "images": np.zeros(sum(images))}, None, "")  # type: ignore[arg-type]


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
        ("reward", {"model": text}, "reward.model=.*text: a reward model reads .* as text.*row 1 of data.train_files"),
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


def test_images_of_the_evaluation_alone_need_a_store_and_a_reward_that_gets_them(folder: Path) -> None:
    config = Config()
    refuse_images(config, table(0), [TEXT, SEEN], MemoryMedia())
    with pytest.raises(Refused, match="queue.engine=memory: row 1 of data.eval_files has images, .* stores none. Fix"):
        refuse_images(config, table(0), [TEXT, SEEN], None)
    judged = replace(config, reward=replace(config.reward, model=str(folder)))
    with pytest.raises(Refused, match="reward.model=.*row 1 of data.eval_files"):
        refuse_images(judged, table(0), [TEXT, SEEN], MemoryMedia())
