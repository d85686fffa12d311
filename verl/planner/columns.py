"""Tables of the planner as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return a line for each row, in which columns begin, or with `right` end, at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(f"{cell:{'>' if right else '<'}{w}}" for cell, w in zip(row, widths)).rstrip() for row in rows]
