"""Causal language models from Hugging Face folders: complete, and without randomness in their forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.checkpoint.loadable import BUILD_ERRORS, cannot_load, check_loadable
from verl.checkpoint.score import WEIGHT as SCORE_WEIGHT
from verl.errors import Refused
from verl.models.families import auto_class


def load_causal_lm(path: Path, *, trust_remote_code: bool = False, needs_lm_head: bool = True) -> Any:
    """Load a causal LM from a Hugging Face folder in float32. Raise ValueError if the folder has no model, if it is
    quantised, or if its weights are not those that config.json describes.

    needs_lm_head: False for a model that gets another head; a reward model's folder has no language-model head."""
    from transformers.utils import logging

    if not (path / "config.json").is_file():
        raise Refused(f"model.path={path}: no config.json there; give a Hugging Face model folder")
    config = check_loadable(path, trust_remote_code=trust_remote_code)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing weights is a warning; below they are an error
    try:
        loaded: Any = auto_class(config).from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except BUILD_ERRORS as e:
        raise cannot_load(path, e) from e
    finally:
        logging.set_verbosity(verbosity)
    model, found = loaded
    refuse_other_weights(path, model, found["missing_keys"], found["unexpected_keys"], needs_lm_head=needs_lm_head)
    return model


def saved_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of the parameters and saved buffers of a model; tied ones once."""
    saved = model.state_dict()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def refuse_other_weights(
    path: Path, model: Any, missing: Iterable[str], unexpected: Iterable[str], *, needs_lm_head: bool
) -> frozenset[str]:
    """Raise ValueError if the folder lacks weights of the model, or has tensors that are not part of it. Return the
    names of the missing weights that are allowed: without `needs_lm_head` those of the language-model head."""
    body = f"{model.base_model_prefix}."
    spare = frozenset(n for n in missing if not needs_lm_head and not n.startswith(body))
    if lacking := sorted({*missing} - spare):
        raise Refused(
            f"model.path={path}: {len(lacking)} weights of the model are not there and would start at random, e.g. "
            f"{lacking[:3]}"
            " (a reward model's folder has no language-model head)"
        )
    if foreign := sorted(n for n in unexpected if n.removeprefix(body) != SCORE_WEIGHT):
        raise Refused(
            f"model.path={path}: {len(foreign)} tensors in its weights are none of the model that config.json "
            f"describes, and would be left out, e.g. {foreign[:3]}; take both from the same model"
        )
    return spare


def switch_dropout_off(model: Any) -> None:
    """Set every dropout rate of the model to 0, since equal log-probs need a forward pass without randomness. The
    modules stay in training mode, for checkpointing. Some models call `functional.dropout` with a rate of the module or
    of the configuration."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for holder in (*model.modules(), model.config, model.config.get_text_config()):
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)


def refuse_altered_logits(model: Any) -> None:
    """Raise ValueError for a model that scales its logits after the head: the log-probs in chunks would omit the
    scale."""
    config = model.config.get_text_config()
    for name, neutral in (("logit_scale", 1.0), ("logits_scaling", 1.0)):
        found = vars(config).get(name, neutral)
        if found not in (neutral, None):
            raise Refused(f"{type(model).__name__} changes its logits after the head ({name}={found}); not supported")
