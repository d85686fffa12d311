"""Models with a quantised base, read from a folder tensor by tensor: in memory are at most the quantised weights and
one tensor that is not quantised yet. And models that are dequantised while they are read."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.config.model_files import folder_format
from verl.errors import Refused
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.hf_parts import Skeleton, open_skeleton
from verl.nn.quant import Int8, Kind, quantise_weight
from verl.nn.quant_linear import QuantLinear, quantised_names, replace_linear

logger = logging.getLogger(__name__)


def load_dequantised(path: Path, *, trust_remote_code: bool = False, needs_lm_head: bool = True) -> Any:
    """Load a causal LM as `load_causal_lm` does. Weights that bitsandbytes quantised are dequantised to float32: the
    configuration has refused to train them."""
    if (kind := folder_format(str(path))) == "none":
        return load_causal_lm(path, trust_remote_code=trust_remote_code, needs_lm_head=needs_lm_head)
    found = open_skeleton(path, trust_remote_code=trust_remote_code, needs_lm_head=needs_lm_head, quantised=True)
    assert found is not None, "its weights are in safetensors files"
    _fill_rest(found)
    mib = sum(p.nbytes for p in found.model.parameters()) / 2**20
    logger.warning("model: %s is quantised as %s, and dequantised here: %.0f MiB in float32", path, kind, mib)
    return found.model.eval()


def load_quantised(
    path: Path, kind: Kind, *, skip: Collection[str] = (), trust_remote_code: bool = False, needs_lm_head: bool = True
) -> Any:
    """Return a causal LM on the CPU with quantised linear layers in its decoder layers, everything else in float32.

    Weights that bitsandbytes quantised are taken as the folder has them, and its other weights stay as they are: the
    folder decides which layers are quantised. Of another folder, all but the layers of `skip` are quantised here. Raise
    ValueError for a folder that is quantised as another kind than `kind`, or by another method."""
    found = open_skeleton(path, trust_remote_code=trust_remote_code, needs_lm_head=needs_lm_head, quantised=True)
    if found is None:
        raise Refused(f"model.path={path}: weights are quantised while safetensors files are read, and it has none")
    for name in quantised_names(found.model, skip):
        _replace(found, name, kind, path)
    _fill_rest(found)
    return found.model.eval()


def load_base(context: EngineContext, kind: Kind) -> Any:
    """Return the quantised base of an engine that trains LoRA factors."""
    c = context
    trusted, head = c.trust_remote_code, c.head == "lm"
    return load_quantised(c.folder, kind, trust_remote_code=trusted, needs_lm_head=head)


def _replace(found: Skeleton, name: str, kind: Kind, path: Path) -> None:
    """Replace a linear layer without storage by a quantised one with the folder's weight."""
    layer = found.model.get_submodule(name)
    codes = found.codes(f"{name}.weight")
    if codes is None:
        if found.quantised:
            return
        weight = torch.empty(layer.weight.shape, dtype=torch.float32)
        found.fill({f"{name}.weight": weight})
        codes = quantise_weight(weight, kind, name=f"{name}.weight")
    if isinstance(codes, Int8) != (kind == "int8"):
        stored = "int8" if isinstance(codes, Int8) else "nf4"
        raise Refused(
            f"model.path={path}: its weights are quantised as {stored}, and {kind} was asked for; use {stored}"
        )
    # dequantised values are those of a float32 model, whatever was quantised: every engine computes with the same
    replace_linear(found.model, name, QuantLinear(replace(codes, dtype=torch.float32), layer.bias))


def _fill_rest(found: Skeleton) -> None:
    """Give storage and values to the parameters that are not quantised."""
    model, made = found.model, dict[int, nn.Parameter]()
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        holder, _, leaf = name.rpartition(".")
        new = made.setdefault(id(parameter), nn.Parameter(torch.empty_like(parameter, device="cpu")))
        setattr(model.get_submodule(holder), leaf, new)
    wanted = {name for one in found.made for name in one.targets} | {*found.spare}
    every = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found.fill({name: t for name, t in every.items() if name in wanted or isinstance(t, nn.Parameter)})
    model.requires_grad_(False)
