"""Checks that a Hugging Face folder is a causal language model that can be trained, before it is loaded; failures are
one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl.config.model_files import (
    codes_are_frozen,
    quantisation_of,
    read_model_config,
    read_weight_headers,
    refuse_adapter,
    refuse_foreign,
    refuse_quantised,
)
from verl.errors import Refused
from verl.models.families import auto_class, family_name

# Errors of transformers and of a model's own code for a config.json that they cannot build.
BUILD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, ArithmeticError)


def cannot_load(folder: Path, exc: BaseException) -> ValueError:
    """Return the one-line error for an exception that transformers raised."""
    found, model_type = " ".join(str(exc).split())[:300], read_model_config(folder).get("model_type")
    return Refused(
        f"model.path={folder}: model_type {model_type!r} cannot be loaded as a causal language model "
        f"({type(exc).__name__}: {found}); give a decoder language model that this transformers knows, or a newer "
        "transformers, or model.trust_remote_code=true where the folder brings its code"
    )


def exact_config(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a folder as transformers reads it, without a `quantization_config`: models are built
    with weights that are not quantised, and get the folder's codes afterwards."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def check_loadable(folder: Path, *, trust_remote_code: bool = False, quantised: bool = False) -> Any:
    """Return the model's configuration, which describes weights that are not quantised. Raise ValueError for quantised
    weights, for an architecture that is no causal language model here, and for weights with other shapes than
    config.json has. No weight is read: the model is built without storage. quantised: weights that bitsandbytes
    quantised are allowed."""

    refuse_adapter(folder)
    described = read_model_config(folder)
    refuse_foreign(folder, described, trust_remote_code=trust_remote_code)
    try:
        family_name(described)
    except Refused as e:
        raise Refused(f"model.path={folder}: {e}") from e
    tensors = read_weight_headers(folder) if any(folder.glob("*.safetensors")) else {}
    refuse_quantised(folder, described, tensors)
    if not quantised and (kind := quantisation_of(tensors)) != "none":
        raise Refused(f"model.path={folder}: {codes_are_frozen(kind)}")
    try:
        config = exact_config(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except BUILD_ERRORS as exc:
        raise cannot_load(folder, exc) from exc
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [
        f"{name} is {list(tensor.shape)} in the weights and {list(wanted)} by config.json"
        for name, tensor in tensors.items()
        if (wanted := shapes.get(name, shapes.get(f"{model.base_model_prefix}.{name}"))) not in (None, tensor.shape)
    ]
    if wrong:
        raise Refused(
            f"model.path={folder}: {len(wrong)} weights have other shapes than config.json says, e.g. {wrong[0]}; "
            "take both from the same model"
        )
    return config
