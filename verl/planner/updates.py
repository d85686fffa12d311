"""The number of values that an optimizer updates otherwise than its name says, from the headers of a model. No torch,
and no model is loaded."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from verl.config.adapter import image_family
from verl.config.image_models import frozen_parts
from verl.config.lora_layers import trained_factors
from verl.config.model_files import (
    EMBEDDING,
    EXPERT,
    FURTHER,
    HEAD,
    describe_model,
    find_model_folder,
    read_weight_headers,
)
from verl.config.schema import Config
from verl.model_engine.optimizer_table import OPTIMIZERS, SMALL, keeps_float32, role_by_name, updates_by_rule

_POSITIONS = re.compile(r"(wpe|pos_embed|position_embedding|position_embeddings)\.weight$")
Sizes = tuple[int, int]
"""The dimensions of a tensor, and its values."""


def update_text(config: Config) -> str:
    """Return the optimizer of the policy, with the number of values that it updates otherwise: those of tensors that
    an optimizer of matrices leaves to AdamW, or that are too small for moments in 8 bits."""
    name = config.optim.name
    if not (OPTIMIZERS[name].matrices_alone or name == "adamw_8bit"):
        return name
    tensors = list(_trained_tensors(config))
    total = sum(values for _, (_, values) in tensors)
    if OPTIMIZERS[name].matrices_alone:
        own = sum(values for role, (dims, values) in tensors if updates_by_rule(name, role, dims))
        others = "embeddings, heads, norms, biases, routers and fused experts"
        return f"{name} for the matrices of layers, {own:,} values; adamw for the other {total - own:,} ({others})"
    small = sum(values for _, (dims, values) in tensors if keeps_float32(dims, values))
    why = f"of tensors with one dimension, or of less than {SMALL:,} values"
    return f"{name}; the moments of {small:,} of {total:,} values stay float32: those {why}"


def _trained_tensors(config: Config) -> Iterator[tuple[str, Sizes]]:
    """Yield (role, sizes) of each tensor of the policy that is trained."""
    if (factors := trained_factors(config)) is not None:
        for shape in factors.layers.values():
            *experts, out, into = shape
            for side in (into, out):
                yield "adapter", (len(shape), math.prod(experts) * factors.rank * side)
        shapes = dict(factors.saved)
    else:
        folder, frozen = find_model_folder(config.model.path), frozen_parts(config)
        family, tied = image_family(folder), describe_model(config.model.path).tied
        shapes = {name: header.shape for name, header in read_weight_headers(folder).items()}
        for name in [*shapes]:
            untrained = family is not None and family.part_of(name) in frozen
            if untrained or name.startswith(FURTHER) or (tied and name.endswith(HEAD)):
                del shapes[name]
    joined = defaultdict[str, list[tuple[int, ...]]](list)  # the experts of a layer are two tensors of the model
    for name, shape in shapes.items():
        joined[EXPERT.sub(r".experts.\1", name)].append(shape)
    for name, parts in joined.items():
        dims = len(parts[0]) + (name not in shapes)
        role = role_by_name(name, dims, embedding=bool(EMBEDDING.search(name) or _POSITIONS.search(name)))
        yield role, (dims, sum(map(math.prod, parts)))
