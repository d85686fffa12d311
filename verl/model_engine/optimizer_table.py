"""The optimizers that a model can be trained with: their options, states and layouts. No torch: the plan reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from verl.names import did_you_mean

PARTS = ("vision", "projector", "audio")
"""The parts of a model that encode images and sounds. All parameters of each may have a learning rate of their own."""
ROLES = ("embedding", "head", "norm", "matrix", "router", "adapter", *PARTS)
"""The kinds of parameters. Each may have a learning rate of its own."""
HEADS = ("lm_head", "score", "value_head")
ROUTERS = ("gate", "router", "shared_expert_gate")
BLOCK = 256
"""Values of an 8-bit state that share a scale."""
SMALL = 4096
"""The number of values below which a tensor keeps 32-bit states in an 8-bit optimizer, as in bitsandbytes."""


@dataclass(frozen=True, slots=True)
class NoSettings:
    """The settings of an optimizer that has none of its own."""


@dataclass(frozen=True, slots=True)
class Sgd:
    """The settings of stochastic gradient descent."""

    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, slots=True)
class Muon:
    """The settings of Muon."""

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    """Newton-Schulz iterations of a step."""
    scale: float = 0.2
    """A factor of the update, beside the square root of the longer side; at 0.2 an update has the size of AdamW's."""


@dataclass(frozen=True, slots=True)
class Apollo:
    """The settings of APOLLO: moments of a random projection of the gradient scale the gradient."""

    rank: int = 256
    """Rows of the projection; at most the shorter side of a matrix."""
    scale: float = 1.0
    """The update is multiplied by the square root of this number."""
    renew_every: int = 200
    """Optimizer steps between two projections."""


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One row of the table."""

    settings: Any = NoSettings()
    """The defaults of its settings, a dataclass."""
    matrix_bytes: float = 8.0
    """Bytes of its states per value of a matrix. Other parameters have 8, those of AdamW."""
    others_bytes: float = 8.0
    """Bytes of its states per value of an embedding or a head."""
    splits_rows: bool = False
    """It works where the ranks of tensor parallelism have parts of a row (parallel.tensor above 1)."""
    lr_factor: float = 1.0
    """Its usual learning rate as a multiple of AdamW's."""
    matrices_alone: bool = False
    """It updates the matrices of layers; AdamW updates all other parameters, factors of LoRA too."""
    by_rank: bool = False
    """The bytes of its states per value are `matrix_bytes` times the rank over the shorter side of the matrix."""


OPTIMIZERS: Mapping[str, OptimizerRow] = MappingProxyType(
    {
        "adamw": OptimizerRow(splits_rows=True),
        "adamw_8bit": OptimizerRow(matrix_bytes=2 + 8 / BLOCK, others_bytes=2 + 8 / BLOCK),
        "muon": OptimizerRow(settings=Muon(), matrix_bytes=4, matrices_alone=True),
        "adam_mini": OptimizerRow(matrix_bytes=4, others_bytes=4),
        "apollo": OptimizerRow(settings=Apollo(), by_rank=True, matrices_alone=True, lr_factor=3),
        "apollo_mini": OptimizerRow(
            settings=Apollo(rank=1, scale=128.0), by_rank=True, matrices_alone=True, lr_factor=1.5
        ),
        "sgd": OptimizerRow(settings=Sgd(), matrix_bytes=4, others_bytes=4, splits_rows=True, lr_factor=1e4),
    }
)
"""The optimizers by their name in `optim.name`."""

LR = "lr"
"""The option with the learning rates of roles."""


def role_by_name(name: str, dimensions: int, *, embedding: bool) -> str:
    """Return the role of a parameter with this name and number of dimensions, one of `ROLES`. embedding: it is that of
    an embedding, perhaps of a head too."""
    *above, last = name.split(".")
    if "lora_" in name:
        return "adapter"
    if dimensions < 2:
        return "norm"  # and biases
    if embedding:
        return "embedding"
    if any(part in HEADS for part in above):
        return "head"
    return "router" if last == "weight" and above and above[-1] in ROUTERS and dimensions == 2 else "matrix"


def updates_by_rule(name: str, role: str, dimensions: int) -> bool:
    """Return True if an optimizer updates a parameter by its own rule: what one of matrices does not do, AdamW does."""
    return not OPTIMIZERS[name].matrices_alone or (role == "matrix" and dimensions == 2)


def keeps_float32(dimensions: int, values: int) -> bool:
    """Return True for a tensor whose moments an 8-bit optimizer keeps in float32."""
    return dimensions < 2 or values < SMALL


def settings_of(name: str, options: Mapping[str, Any]) -> Any:
    """Return the settings of an optimizer with these options, which have no fault."""
    own = {key: value for key, value in options.items() if key != LR}
    return dataclasses.replace(OPTIMIZERS[name].settings, **own)


def faults(name: str, options: Mapping[str, Any], tensor: int = 1) -> Iterator[str]:
    """Yield a line for each option of an optimizer that it does not have or cannot use, and for a layout that it cannot
    do. tensor: the ranks of tensor parallelism."""
    defaults = OPTIMIZERS[name].settings
    known = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    for key, value in options.items():
        at = f"optim.options.{key}={value}"
        if key == LR:
            yield from _rate_faults(value)
        elif key not in known:
            near = did_you_mean(key, [*known, LR])
            yield f"{at}: no option of optim.name={name}; {near}it has {', '.join([*known, LR])}"
        elif isinstance(known[key], bool):
            if not isinstance(value, bool):
                yield f"{at}: true or false"
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            yield f"{at}: a number of at least 0"
        elif isinstance(known[key], int) and (value != int(value) or value < 1):
            yield f"{at}: a whole number of at least 1"
    if tensor > 1 and not OPTIMIZERS[name].splits_rows:
        able = ", ".join(other for other, row in OPTIMIZERS.items() if row.splits_rows)
        yield (
            f"optim.name={name} with parallel.tensor={tensor}: its states are of whole rows, which tensor "
            f"parallelism splits; use parallel.tensor=1, or one of {able}"
        )


def _rate_faults(rates: Any) -> Iterator[str]:
    if not isinstance(rates, Mapping):
        yield f"optim.options.lr={rates}: a learning rate per role, e.g. optim.options.lr={{embedding: 1e-6}}"
        return
    for role, rate in rates.items():
        if role not in ROLES:
            near = did_you_mean(role, ROLES)
            yield f"optim.options.lr.{role}: no role of a parameter; {near}one of {', '.join(ROLES)}"
        elif isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate <= 0:
            yield f"optim.options.lr.{role}={rate}: a learning rate above 0"


def optimizer_bytes(name: str, options: Mapping[str, Any], *, matrices: int, others: int, short_side: int) -> int:
    """Return the bytes of an optimizer's states. matrices: values in the matrices of layers · others: values in
    embeddings, heads and norms · short_side: the shorter side of a typical matrix."""
    row = OPTIMIZERS[name]
    per_value = row.matrix_bytes
    if row.by_rank:
        per_value *= min(settings_of(name, options).rank, short_side) / short_side
    if name == "sgd" and not settings_of(name, options).momentum:
        return 0
    return int(per_value * matrices + row.others_bytes * others)
