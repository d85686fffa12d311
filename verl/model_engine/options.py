"""The options of the torch engine. No torch: configuration and plan read this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    attention: Literal["auto", "padded"] = "auto"
    """auto: the best packed attention here · padded: one row per sequence, the oracle."""
    max_skipped_updates: Annotated[int, Meta(ge=0)] = 3
    """Non-finite gradients in a row that are skipped, each with its batch written down, before the run stops."""
    share_prefix: bool = True
    """A prompt is computed once per group and micro-batch in training."""
