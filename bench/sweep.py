"""Each peer at its best: its settings are tried in short runs before it is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.results import NOT_RUN, Table


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings with which a peer may be run; log-probs are always on, since training needs them."""

    threads: int
    compiled: bool

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads > 1)}, {'compiled' if self.compiled else 'eager'}"


@dataclass(frozen=True, slots=True)
class Tried:
    """wall_s: median of the repetitions of a short run; None where it did not run, with the reason."""

    setting: Setting
    wall_s: float | None
    reason: str = ""


EITHER = (False, True)


def settings(cores: int, compiled: Sequence[bool] = EITHER) -> list[Setting]:
    """One thread and all of them, eager and compiled."""
    return [Setting(threads, how) for threads in sorted({1, cores}) for how in compiled]


def sweep(
    cores: int,
    spec: Mapping[str, Any],
    run: Callable[[dict[str, Any]], Iterable[Mapping[str, float]]],
    compiled: Sequence[bool] = EITHER,
) -> list[Tried]:
    """`run(spec)` -> its repetitions, each with `wall_s`; what it raises as RuntimeError is the reason why not."""
    tried = []
    for setting in settings(cores, compiled):
        try:
            found = [one["wall_s"] for one in run({**spec, **asdict(setting)})]
            tried.append(Tried(setting, statistics.median(found)))
        except RuntimeError as e:
            tried.append(Tried(setting, None, str(e)))
    return tried


def best(tried: Sequence[Tried]) -> Setting | None:
    """The fastest setting; None where none ran."""
    ran = [(one.wall_s, i) for i, one in enumerate(tried) if one.wall_s is not None]
    return tried[min(ran)[1]].setting if ran else None


def table(title: str, found: Mapping[str, Sequence[Tried]]) -> Table:
    """Every peer's settings, the chosen one marked."""
    rows = []
    for name, tried in found.items():
        chosen = best(tried)
        for one in tried:
            said = NOT_RUN if one.wall_s is None else f"{one.wall_s:.2f}"
            rows.append((name, str(one.setting), said, "chosen" if one.setting == chosen else one.reason[:80]))
    return Table(title, ("peer", "setting", "s", ""), tuple(rows))
