"""What a batch says of itself: metrics of refs, in the units of trajectories, groups and steps (pitfalls 35)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from verl.types import Metric, Metrics, Refs, Unit

if TYPE_CHECKING:
    from verl.driver.play import PlayStats


def spread(name: str, values: Iterable[float], unit: Unit) -> Metrics:
    """name/mean, name/max, name/min."""
    found = list(values)
    if not found:
        return {}
    n = float(len(found))
    return {
        f"{name}/mean": Metric(sum(found), n, unit),
        f"{name}/max": Metric(max(found), n, unit, "max"),
        f"{name}/min": Metric(min(found), n, unit, "min"),
    }


def batch_metrics(refs: Refs, stats: PlayStats, version: int, max_response_tokens: int) -> Metrics:
    """Scores, lengths, groups, staleness of the trained rows; what was released on the way. verl's names where they exist."""
    train = refs.of("train")
    rewards = [r.reward for r in train]
    out: Metrics = {
        **spread("critic/rewards", rewards, "sequence"),
        **spread("critic/score", (r.components.get("score", r.reward) for r in train), "sequence"),
        **spread("response_length", (r.total_tokens - r.prompt_tokens for r in train), "sequence"),
        **spread("prompt_length", (r.prompt_tokens for r in train), "sequence"),
        "response_length/clip_ratio": Metric(sum(r.truncated for r in train), len(train), "sequence"),
    }
    names = {name for r in train for name in r.components}
    for name in sorted(names - {"score"}):
        values = [r.components[name] for r in train if name in r.components]
        out[f"reward/{name}"] = Metric(sum(values), len(values), "sequence")
    ages = [version - r.version_min for r in train if r.version_min >= 0]
    out |= {
        f"pipeline/staleness_{k.split('/')[-1]}": m
        for k, m in spread("s", ages, "sequence").items()
        if not k.endswith("min")
    }
    invalid = sum(stats.invalid.values())
    out["reward/invalid_share"] = Metric(invalid, max(1, stats.played), "sequence")
    out["groups/zero_variance_share"] = Metric(stats.flat, max(1, stats.groups), "group")
    for reason in ("rejected", "invalid", "failed", "dropped"):
        out[f"groups/{reason}"] = Metric(stats.released[reason], 1, "group", "sum")
    sizes = [len(g.of("train")) for g in train.groups().values()]
    out |= spread("groups/size", sizes, "group")
    return out
