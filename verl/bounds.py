"""Numbers and words with their bounds, for the fields of the configuration."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

_FINITE = sys.float_info.max
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=_FINITE)]
NonNegative = Annotated[float, Meta(ge=0, le=_FINITE)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Betas = Annotated[list[Annotated[float, Meta(ge=0, lt=1)]], Meta(min_length=2, max_length=2)]


def words(choices: str) -> Meta:
    """One of the words between the bars."""
    return Meta(pattern=f"^({choices})$", extra={"words": tuple(choices.split("|"))})


def size_text(size: int) -> str:
    """Three significant digits: 942 MiB, 1.84 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            value = size / scale
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{size} B"
