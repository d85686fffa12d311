"""An adapter merged into its base: a whole model that every program can load."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from verl.checkpoint.hf import HfExport
from verl.checkpoint.score import ADAPTER_SCORE, classifier_config, classifier_tensors
from verl.config.adapter import WEIGHTS, own_base
from verl.model_engine.adapter import open_adapter
from verl.model_engine.hf_model import saved_weights
from verl.model_engine.quantised_parts import load_dequantised

DTYPES = ("float32", "bfloat16", "float16")


def write_merged(adapter: Path, out: Path, dtype: str) -> Path:
    """Write the model of an adapter's folder: its base with the product of the factors added in float32, each weight
    then cast to `dtype`. The tokenizer is the adapter's, or the base's if it has none. Return the base's folder. Raise
    ValueError if the base is not on this machine, or is another model."""
    base = own_base(adapter)
    with safe_open(adapter / WEIGHTS, "pt") as file:
        head = file.get_tensor(ADAPTER_SCORE) if ADAPTER_SCORE in file.keys() else None  # noqa: SIM118 - not a mapping
    model = load_dequantised(base, needs_lm_head=head is None)
    open_adapter(adapter, base, model, head=True).add(dict(model.named_parameters()))
    weights = saved_weights(model)
    if head is not None:
        weights = classifier_tensors(model.base_model_prefix, weights, head)
    source = adapter if any(adapter.glob("tokenizer*")) else base
    export = HfExport(
        source_dir=base,
        tokenizer_dir=source,
        config_overrides={} if head is None else classifier_config(base, _pad_id(source)),
    )
    export.write(out, ((name, tensor.detach().to(getattr(torch, dtype))) for name, tensor in weights))
    return base


def _pad_id(folder: Path) -> int | None:
    """Return the id with which the tokenizer of a folder pads: its own, or that of its end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found: int | None = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return found
