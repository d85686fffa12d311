"""The images and videos of a run's rows: the store of those that are recorded, and the settings that such rows cannot
have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from verl.algorithms.sections import TEACHER
from verl.checkpoint.loadable import exact_config
from verl.config.adapter import base_of
from verl.config.backends import engine_name, traits_of
from verl.config.model_files import find_model_folder, read_model_config
from verl.config.schema import Config
from verl.data.source import TaskTable, kind_with_length
from verl.driver.task_media import ToolImages
from verl.errors import Refused
from verl.models.clips import CLIPS, ClipRules
from verl.models.families import FAMILIES, ImageFamily, name_of
from verl.track.samples import MEDIA_FOLDER
from verl.transfer_queue.base import MediaStore
from verl.transfer_queue.media import FolderMedia
from verl.types import Task


def media_of_run(run_dir: Path) -> MediaStore:
    """Return the store of the media of a run's recorded rows."""
    return FolderMedia(run_dir / MEDIA_FOLDER)


def tool_images(config: Config, run_dir: Path, media: MediaStore | None) -> ToolImages:
    """Return the store of the images that tools return in a run. media: the store of the queue."""
    images = ToolImages(FolderMedia(run_dir / "tool_images"), media, _no_tool_images(config, media))
    images.clear()
    return images


def _no_tool_images(config: Config, media: MediaStore | None) -> str:
    """Return why no tool can return an image in this run; "" if one can."""
    if name_of(read_model_config(find_model_folder(config.model.path))) not in FAMILIES:
        return f"model.path={config.model.path} reads text alone"
    if media is None:
        return f"queue.engine={engine_name(config, 'queue')} stores none; use queue.engine=shared, on one host"
    if config.teacher.hint_key is not None:
        return f"teacher.hint_key={config.teacher.hint_key}: images beside hints are not read; leave it out"
    for key, path in (*_readers(config), *_scorers(config)):
        if why := _unlike(config, path):
            return f"{key}={path}: {why}; use a model of the policy's family"
    return ""


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
    for key, path in (*(_readers(config) if trained is not None else ()), *_scorers(config)):
        if why := _unlike(config, path):
            raise Refused(f"{key}={path}: {why}. {fix}, or a model of the policy's family")
    _refuse_videos(config, tasks, eval_tasks)


def _refuse_videos(config: Config, tasks: TaskTable, eval_tasks: list[Task]) -> None:
    """Raise Refused if there are rows with videos, and a part of the run reads images alone, or videos in another
    way."""
    readers, server = dict((*_readers(config), *_scorers(config))), traits_of(config.rollout.engine).server
    if not (server or readers):
        return
    policy = _clips_of(config.model.path)
    others = [(key, path) for key, path in readers.items() if _clips_of(base_of(path, config.model.path)) != policy]
    file, found = "train_files", tasks.first_with_length()
    if found is None:
        evaluated = ((task.index, kind) for task in eval_tasks if (kind := kind_with_length(task.images)))
        file, found, others = "eval_files", next(evaluated, None), [o for o in others if o in [*_scorers(config)]]
    if found is not None and others:
        (key, path), (row, kind) = others[0], found
        why = f"it does not read {kind}s as the policy does, and row {row} of data.{file} has one"
        raise Refused(f"{key}={path}: {why}. Fix: a model of the policy's family, or rows without {kind}s")
    refuse_served_videos(config, f"data.{file}", found)


def refuse_served_videos(config: Config, file: str, found: tuple[int, str] | None) -> None:
    """Raise Refused if a server would answer rows with videos or sounds. found: the first of them, and which of the two
    it has; None: there is none."""
    if found is not None and traits_of(config.rollout.engine).server:
        why = f"row {found[0]} of {file} has a {found[1]}, and a server gets images alone"
        raise Refused(f"rollout.engine={config.rollout.engine}: {why}. Fix: rollout.engine=native")


def _clips_of(path: str) -> ClipRules | None:
    """Return how the model in a folder reads videos; None if it reads none."""
    return CLIPS.get(name_of(read_model_config(find_model_folder(path))))


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


def _scorers(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and the folder of the reward model, which computes the rows of evaluations too."""
    if config.reward.model is not None:
        yield "reward.model", config.reward.model


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
