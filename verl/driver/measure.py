"""Metrics of the refs of a step, in the units of trajectories, groups and steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from verl.track.health import COMPONENT_PREFIX
from verl.types import Metric, Metrics, Ref, Refs, Unit

if TYPE_CHECKING:
    from verl.driver.rollouts import RolloutStats
    from verl.sandbox.pool import PoolLoad


def spread(name: str, values: Iterable[float], unit: Unit) -> Metrics:
    """Return the metrics name/mean, name/max and name/min."""
    found = list(values)
    if not found:
        return {}
    n = float(len(found))
    return {
        f"{name}/mean": Metric(math.fsum(found), n, unit),
        f"{name}/max": Metric(max(found), n, unit, "max"),
        f"{name}/min": Metric(min(found), n, unit, "min"),
    }


def _trajectories(refs: Refs) -> list[Ref]:
    """Return one ref per trajectory: the rows of a rewritten history must not count its reward several times."""
    rows: dict[str, list[Ref]] = {}
    for r in refs:
        if r.outcome == "ok" and r.reward == r.reward:
            rows.setdefault(r.trajectory_id, []).append(r)
    return [own[0] if len(own) == 1 else _joined(own) for own in rows.values()]


def _joined(rows: list[Ref]) -> Ref:
    first = rows[0]
    return replace(
        first,
        total_tokens=first.prompt_tokens + sum(r.total_tokens - r.prompt_tokens for r in rows),
        stop_reason=next((r.stop_reason for r in rows if r.truncated), first.stop_reason),
        version_min=min((r.version_min for r in rows if r.version_min >= 0), default=-1),
    )


def batch_metrics(refs: Refs, stats: RolloutStats, version: int, *, max_prompt_tokens: int) -> Metrics:
    """Compute scores, lengths, groups and staleness of the trained trajectories, the turns of all with a valid reward,
    and the released groups. The names are those of verl if it has the metric."""
    train = _trajectories(refs.of("train"))
    out: Metrics = {
        **spread("critic/rewards", (t.reward for t in train), "sequence"),
        **spread("critic/score", (t.components.get("score", t.reward) for t in train), "sequence"),
        **spread("response_length", (t.total_tokens - t.prompt_tokens for t in train), "sequence"),
        **spread("prompt_length", (t.prompt_tokens for t in train), "sequence"),
        **spread("num_turns", stats.turns.elements(), "sequence"),
        "prompt_length/clip_ratio": Metric(
            sum(t.prompt_tokens >= max_prompt_tokens for t in train), len(train), "sequence"
        ),
        "response_length/clip_ratio": Metric(sum(t.truncated for t in train), len(train), "sequence"),
    }
    for name in sorted({name for t in train for name in t.components} - {"score"}):
        values = [t.components[name] for t in train if name in t.components]
        out[f"{COMPONENT_PREFIX}{name}"] = Metric(math.fsum(values), len(values), "sequence")
    ages = spread("pipeline/staleness", (version - t.version_min for t in train if t.version_min >= 0), "sequence")
    out |= {name.replace("staleness/", "staleness_"): m for name, m in ages.items() if not name.endswith("min")}
    out["rollout/unread_share"] = Metric(stats.unread, max(1, stats.sampled), "token")
    out["reward/invalid_share"] = Metric(stats.invalid.total(), max(1, stats.played), "sequence")
    out["groups/zero_variance_share"] = Metric(stats.flat, max(1, stats.groups), "group")
    for reason in ("rejected", "invalid", "failed", "dropped"):
        out[f"groups/{reason}"] = Metric(stats.released[reason], 1, "group", "sum")
    for name, total in stats.agent.items():
        out[f"agent/{name}"] = Metric(total, 1, "step", "sum")
    if stats.agent:
        out["agent/trajectories"] = Metric(stats.played, 1, "step", "sum")
        called, wrong = stats.agent["tool_calls"], stats.agent["malformed_calls"]
        out["agent/tool_error_share"] = Metric(stats.agent["tool_errors"], max(1, called), "turn")
        out["agent/malformed_share"] = Metric(wrong, max(1, called + wrong), "turn")
        for name in ("no_progress", "turn_limit"):
            out[f"agent/{name}_share"] = Metric(stats.agent[name], max(1, stats.played), "sequence")
    out |= spread("groups/size", Counter(t.group_id for t in train).values(), "group")
    return out


def pool_metrics(load: PoolLoad) -> Metrics:
    """Compute how long answers waited for a grader, how long graders took, and how many graders would be enough."""
    n = max(1, load.calls)
    return {
        "reward/queue_s/mean": Metric(load.queued_s, n, "sequence"),
        "reward/queue_s/max": Metric(load.longest_queued_s, 1, "sequence", "max"),
        "reward/call_s/mean": Metric(load.busy_s, n, "sequence"),
        "reward/workers_needed": Metric(load.workers_that_would_do, 1, "step", "last"),
    }
