"""The ids that the policy of a run must not sample."""

from __future__ import annotations

from typing import Any

from verl.chat import load_tokenizer
from verl.checkpoint.loadable import exact_config
from verl.config.model_files import find_model_folder, read_model_config
from verl.config.schema import Config
from verl.models.expand import banned_tokens
from verl.models.families import FAMILIES, banned_ids, name_of


def policy_banned(config: Config, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids that the policy must not sample: the tokens of images of a model that reads them. tokenizer: that
    of the policy; None: it is loaded if it has such tokens."""
    model = config.model
    family = FAMILIES.get(name_of(read_model_config(find_model_folder(model.path))))
    if family is None:
        return ()
    described = exact_config(model.path)
    if not family.marks and family.optional_marks is None:
        return banned_ids(described)
    if tokenizer is None:
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    return banned_tokens(described, tokenizer)
