"""The columns of samples, declared once: name, type, unit and default. No torch.

Rows of the queue, the records in samples/, replays, and the columns that algorithms may read are derived from this
table. A new column or side channel is one row here. Other columns of the queue need no row: outputs of models that are
not recorded (`NEEDS` in algorithms/specs.py), and the weights and masks of terms, all per loss token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl.types import Segment

SIDE = "side/"
"""The prefix of a side channel's column: the channel `turn` of segments is the column `side/turn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A named array of a sample."""

    name: str
    """The name in the queue and in batches."""
    dtype: str
    """The name of a numpy type."""
    per: Literal["token", "loss token", "segment", "row"]
    """The unit of its first dimension."""
    width: int = 0
    """The length of its second dimension. 0: it has none."""
    default: float = math.nan
    """The recorded value for response tokens without a value."""
    written: bool = False
    """True if the column exists in every step without a pass of a model, so that an algorithm may read it."""
    recorded: str = ""
    """The name of the column in samples/. Empty: it is not recorded."""
    instead: str = ""
    """The column that is recorded for rows without this one. Empty: none."""
    replayed: bool = False
    """True if a replay computes the column again and compares it with the record."""

    @property
    def sampled(self) -> bool:
        """True if segments have the values, so that the record takes them from segments and not from the queue."""
        return self.name in ("rollout_logprobs", "versions") or self.optional

    @property
    def optional(self) -> bool:
        """True for side channels: segments need not have them."""
        return self.name.startswith(SIDE)

    def fill(self, count: int) -> np.ndarray:
        """Return the default value `count` times."""
        return np.full(count, self.default, self.dtype)

    def typed(self, values: object) -> np.ndarray:
        """Return values as an array of the declared type and shape. Raise ValueError for values of another kind of
        type."""
        array = np.asarray(values)
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise ValueError(f"column {self.name!r} is declared as {self.dtype}, and its values are {array.dtype}")
        shaped = array.reshape(-1, self.width) if self.width else array
        return shaped.astype(self.dtype, copy=False)

    def of_segment(self, segment: Segment) -> np.ndarray | None:
        """Return this column's values for the tokens of a segment; None if the segment has none."""
        if self.optional:
            return segment.side.get(self.name.removeprefix(SIDE))
        if segment.source == "sampled" and self.name == "versions":
            return np.full(len(segment.ids), segment.version)
        return segment.logprobs if self.name == "rollout_logprobs" else None


COLUMNS = (
    Column(name="ids", dtype="int64", per="token"),
    Column(name="mask", dtype="bool", per="token"),
    Column(name="segments", dtype="int64", per="segment", width=3),
    Column(name="facts", dtype="uint8", per="row"),
    Column(name="context", dtype="int64", per="row"),
    Column(name="extras", dtype="uint8", per="row"),
    Column(name="rollout_logprobs", dtype="float32", per="loss token", written=True, recorded="rollout_logprobs"),
    Column(name="versions", dtype="int32", per="token", default=-1, recorded="token_versions"),
    Column(name="side/turn", dtype="int64", per="token", default=-1),
    Column(name="side/turn_reward", dtype="float32", per="token"),
    Column(name="side/turn_state", dtype="int64", per="token", default=-1),
    Column(name="side/noise_sigma", dtype="float32", per="token", default=0.0, recorded="token_noise_sigma"),
    Column(
        name="old_logprobs",
        dtype="float32",
        per="loss token",
        recorded="old_logprobs",
        instead="train_logprobs",
        replayed=True,
    ),
    Column(name="ref_logprobs", dtype="float32", per="loss token", recorded="ref_logprobs", replayed=True),
    Column(name="advantages", dtype="float32", per="loss token", written=True, recorded="advantages", replayed=True),
    Column(name="train_entropy", dtype="float32", per="loss token", recorded="entropy"),
    Column(name="old_values", dtype="float32", per="loss token", recorded="values"),
    Column(name="returns", dtype="float32", per="loss token", recorded="returns"),
)
"""Every column with a fixed meaning.

ids, mask (sampled by the policy, or stored) and segments (length, source, weight version) are a sample's tokens. facts
is the msgpack of `Facts`, context is `Sample.context`, extras has media references and the owners of side channels as
msgpack. rollout_logprobs are of the distribution that was sampled from, NaN for a stored answer. versions are in
batches, derived from segments. The columns from old_logprobs on are written by roles during a step."""


def declared(name: str) -> Column | None:
    """Return the column of this name, if the table has one."""
    return next((c for c in COLUMNS if c.name == name), None)


def recorded() -> Iterator[Column]:
    """Yield the columns that samples/ contains."""
    return (c for c in COLUMNS if c.recorded)


def side_columns() -> tuple[str, ...]:
    """Return the names of the declared side channels' columns, which an algorithm may read."""
    return tuple(c.name for c in COLUMNS if c.optional)
