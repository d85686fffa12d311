"""The images of a run's rows: the store of those that are recorded, and the settings that rows with images cannot
have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from verl.algorithms.sections import TEACHER
from verl.checkpoint.loadable import exact_config
from verl.config.adapter import base_of
from verl.config.backends import engine_name
from verl.config.model_files import find_model_folder, read_model_config
from verl.config.schema import Config
from verl.data.source import TaskTable
from verl.errors import Refused
from verl.models.families import FAMILIES, ImageFamily, name_of
from verl.transfer_queue.base import MediaStore
from verl.transfer_queue.media import FolderMedia
from verl.types import Task


def media_of_run(run_dir: Path) -> MediaStore:
    """Return the store of the media of a run's recorded rows."""
    return FolderMedia(run_dir / "media")


def refuse_images(config: Config, tasks: TaskTable, eval_tasks: list[Task], media: MediaStore | None) -> None:
    """Raise Refused if there are rows with images, and a part of the run does not read them. media: the store of the
    queue."""
    trained = tasks.first_with_images()
    evaluated = next((task.index for task in eval_tasks if task.images), None)
    if trained is None and evaluated is None:
        return
    file, row = ("train_files", trained) if trained is not None else ("eval_files", evaluated)
    fix = f"Fix: rows of text (the first one with images is row {row} of data.{file})"
    if media is None:
        raise _unstored(config, f"row {row} of data.{file} has images")
    if config.reward.model is not None:
        why = "a reward model reads prompts and answers as text, placeholders in the place of images"
        raise Refused(f"reward.model={config.reward.model}: {why}. {fix}, or a reward function (reward.path)")
    for key, path in _readers(config) if trained is not None else ():
        if why := _unlike(config, path):
            raise Refused(f"{key}={path}: {why}. {fix}, or a model of the policy's family")


def refuse_unstored(config: Config, has_images: Sequence[bool], media: MediaStore | None) -> None:
    """Raise Refused if rows have images (one value per table or row), and the queue stores none."""
    if media is None and any(has_images):
        raise _unstored(config, "rows have images")


def _unstored(config: Config, found: str) -> Refused:
    fix = "Fix: queue.engine=shared, whose processes are on one host, or rows of text"
    return Refused(f"queue.engine={engine_name(config, 'queue')}: {found}, and this queue stores none. {fix}")


def _readers(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and the folder of each further model that computes the rows of training."""
    if config.critic.path is not None:
        yield "critic.path", config.critic.path
    for role, path in config.teacher.folders().items():
        yield f"teacher.path{role.removeprefix(TEACHER).replace('_', 's.', 1)}", path


def _unlike(config: Config, path: str) -> str:
    """Return why the model in a folder cannot read the images of the policy's rows; "" if it can."""
    (ours, placeholder), (theirs, other) = map(_images_of, (config.model.path, base_of(path, config.model.path)))
    if theirs is None:
        return "it reads text alone, and rows have images"
    if theirs is not ours:
        return "it is of another family than the policy, and reads other tokens in the place of an image"
    return "" if placeholder == other else f"its placeholder of images is the id {other}, the policy's {placeholder}"


def _images_of(path: str) -> tuple[ImageFamily | None, int | None]:
    """Return how the model in a folder reads images, and the id of their placeholder."""
    folder = find_model_folder(path)
    family = FAMILIES.get(name_of(read_model_config(folder)))
    return family, family.placeholder(exact_config(folder)) if family else None
