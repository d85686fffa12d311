"""The ids that the policy of a run must not sample."""

from __future__ import annotations

from verl.checkpoint.loadable import exact_config
from verl.config.model_files import find_model_folder, read_model_config
from verl.config.schema import Config
from verl.models.families import FAMILIES, banned_ids, name_of


def policy_banned(config: Config) -> tuple[int, ...]:
    """Return the ids that the policy must not sample: the placeholders of a model that reads images."""
    path = config.model.path
    reads_images = name_of(read_model_config(find_model_folder(path))) in FAMILIES
    return banned_ids(exact_config(path)) if reads_images else ()
