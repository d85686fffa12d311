"""Settings that a model which reads images cannot have."""

from __future__ import annotations

from collections.abc import Iterator

from verl.algorithms.sections import is_url
from verl.config.backends import traits_of
from verl.config.model_files import find_model_folder, read_model_config
from verl.config.schema import Config
from verl.errors import Refused
from verl.model_engine.lora_spec import trained_by
from verl.models.families import family_name


def image_model_faults(config: Config, command: str, *, samples: bool) -> Iterator[str]:
    """Yield a line for each setting that does not work with a policy that reads images. samples: the command samples
    answers."""
    try:
        kind = family_name(read_model_config(find_model_folder(config.model.path)))
    except Refused as e:
        yield f"model.path={config.model.path}: {e}"
        return
    if kind is None:
        return
    what = f"model.path={config.model.path} is a {kind}, a model that reads images"
    if trained_by(config.model.lora) is not None:
        yield f"model.lora: {what}, and its factors are not trained here; leave it out"
    if command == "rm":
        yield f"verl rm: {what}, and has no head for scores; give a language model"
    if any(is_url(path) for path in config.teacher.roles().values()):
        yield f"teacher.path: {what}, which never samples placeholders; a server counts them: give a teacher's folder"
    if samples and traits_of(config.rollout.engine).server:
        fix = "use rollout.engine=native"
        yield f"rollout.engine={config.rollout.engine}: {what}, which no server was tested with; {fix}"
