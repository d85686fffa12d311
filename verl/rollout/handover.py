"""What is expected of a server, and what it is told of new weights and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.rollout.base import RolloutContext
from verl.weight_sync.base import SyncError, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a server must be. name: in errors · versions: from, below; None: any · needs: how it gets a path that it
    lacks."""

    name: str
    versions: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    needs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds: to start · for one answer, however long · for a control call."""

    start_s: float = 600.0
    request_s: float = 600.0
    control_s: float = 300.0


def compare(sent: WeightSource, told: Mapping[str, Any]) -> None:
    """SyncError where a worker of the server did not load what was sent. told: `loaded`: the tensors that it read, by
    the names that they were sent under · `missing`: parts of its model that got nothing."""
    wanted, loaded, at = set(sent.delivered), set(told["loaded"]), f"version {sent.version}"
    if absent := sorted(wanted - loaded):
        raise SyncError(f"{at}: the server did not load {len(absent)} of {len(wanted)} tensors, e.g. {absent[:3]}")
    if more := sorted(loaded - set(sent.manifest)):
        raise SyncError(f"{at}: the server loaded {len(more)} tensors that nobody sent, e.g. {more[:3]}")
    if left := sorted(told.get("missing", ())):
        raise SyncError(f"{at}: {len(left)} parts of the server's model got no weights, e.g. {left[:3]}")


def positions_of(context: RolloutContext) -> int | None:
    """That the model was made for, if it says so."""
    return getattr(context.hf_config.get_text_config(), "max_position_embeddings", None)
