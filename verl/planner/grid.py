"""`verl simulate grid={KEY: [VALUES], ...}`: every combination of values under the virtual clock, and the points that
no other one beats; `verl simulate trace=FILE`: what each part of the simulated run did, for chrome://tracing."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.schema import Config
from verl.config.tree import changed, leaves, text_of
from verl.config.validate import validate
from verl.errors import Refused
from verl.names import did_you_mean
from verl.planner.columns import aligned
from verl.planner.simulate import SimulatedRun
from verl.planner.what_if import PRICED, REPLAYS, Replayed, hourly_price

MOST_POINTS = 1000
POINTS_OF_PROCESS = 32
"""The fewest points for which a further process is started."""
SIMULATED_KEYS = (
    *("step.prompts_per_step", "step.samples_per_prompt", "rollout.replicas", "rollout.max_concurrent_sequences"),
    *("pipeline.staleness", "pipeline.sync_every", "pipeline.oversample", "pipeline.partial_rollout"),
    *("pipeline.placement", "rollout.max_response_tokens"),
)
"""The keys on which a simulated run depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A combination of values with its pace."""

    values: Mapping[str, Any]
    staleness: float
    step_s: float
    step_error_s: float
    """Two standard deviations over plays with other lengths, as the other errors."""
    tokens_per_s: float
    tokens_per_s_error: float
    price: float
    """The price of a step; 0 without prices."""
    price_error: float
    price_per_million_error: float
    replicas: int

    @property
    def price_per_million_tokens(self) -> float:
        return 1e6 * self.price / (self.tokens_per_s * self.step_s)

    @property
    def worse_is_more(self) -> tuple[float, float, float]:
        """The numbers of which less is better: seconds per answer token, price per token (or replicas), staleness."""
        per_token = 1 / self.tokens_per_s
        return per_token, self.price_per_million_tokens or self.replicas, self.staleness


def combinations(config: Config, grid: Mapping[str, Any]) -> list[tuple[dict[str, Any], Config]]:
    """Return the values and the configuration of each point of a grid. Raise Refused for a key that no simulated run
    reads, a value that is no list, and a combination that cannot run."""
    for key, values in grid.items():
        if key not in SIMULATED_KEYS:
            why = "no simulated run reads it" if key in leaves() else "there is no such key"
            raise Refused(f"grid: {key}: {why}{did_you_mean(key, SIMULATED_KEYS)}; one of {', '.join(SIMULATED_KEYS)}")
        if not isinstance(values, list) or not values:
            raise Refused(f"grid: {key}={text_of(values)}: a list of values is expected")
    points = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    if len(points) > MOST_POINTS:
        raise Refused(f"grid: {len(points):,} points; at most {MOST_POINTS:,}")
    made = [(values, changed(config, values)) for values in points]
    for _, one in made:
        validate(one)
    return made


def played(points: Sequence[Config], pace: Callable[[Config], Replayed]) -> list[Replayed]:
    """Return the pace of each point; of many points in as many processes as this one has processors."""
    processes = min(len(points) // POINTS_OF_PROCESS, len(os.sched_getaffinity(0)))
    if processes < 2:
        return [*map(pace, points)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return [*pool.map(pace, points, chunksize=POINTS_OF_PROCESS // 4)]


def point_of(values: Mapping[str, Any], config: Config, got: Replayed, prices: tuple[float, float]) -> Point:
    """Return a point. prices: per hour, of a replica and of the trainer."""
    steps = config.pipeline.sync_every
    step_s = got.pace.period_s / steps
    hourly = hourly_price(config, prices)
    return Point(
        values=values,
        staleness=config.pipeline.staleness,
        step_s=step_s,
        step_error_s=got.error(lambda pace: pace.period_s / steps),
        tokens_per_s=got.pace.tokens_per_s,
        tokens_per_s_error=got.error(lambda pace: pace.tokens_per_s),
        price=hourly * step_s / 3600,
        price_error=got.error(lambda pace: hourly * pace.period_s / steps / 3600),
        price_per_million_error=got.error(lambda pace: 1e6 * hourly / 3600 / pace.tokens_per_s),
        replicas=config.rollout.replicas,
    )


def front_of(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats: none is at most as bad in each number and better in one."""

    def beaten(one: Point) -> bool:
        own = one.worse_is_more
        every = (other.worse_is_more for other in points)
        return any(other != own and all(a <= b for a, b in zip(other, own)) for other in every)

    return [one for one in points if not beaten(one)]


def grid_table(points: Sequence[Point]) -> str:
    """Return a line for each point of the front, the fastest first."""
    front = sorted(front_of(points), key=lambda one: one.worse_is_more)
    keys, priced = [*points[0].values], any(one.price for one in points)
    rows = [(*keys, "s per step", "tokens/s", *(PRICED if priced else ()))]
    for one in front:
        figures = [
            f"{one.step_s:.4g} ± {one.step_error_s:.1g}",
            f"{one.tokens_per_s:,.0f} ± {one.tokens_per_s_error:,.0f}",
        ]
        if priced:
            figures.append(f"{one.price:.4g} ± {one.price_error:.1g}")
            figures.append(f"{one.price_per_million_tokens:.4g} ± {one.price_per_million_error:.1g}")
        rows.append((*(text_of(one.values[key]) for key in keys), *figures))
    less = "price per token" if priced else "replicas"
    about = f"{len(front)} of {len(points)} points are not beaten in tokens per second, {less} and staleness together:"
    error = f"±: two standard deviations over {REPLAYS} plays with other lengths"
    return "\n".join([about, *aligned(rows, right=True), error])


def write_trace(file: Path, run: SimulatedRun) -> None:
    """Write what trainer and replicas of a run did, in the trace format of Chrome. Raise Refused if the file exists."""
    if file.exists() or not file.parent.is_dir():
        raise Refused(f"trace={file}: {'it exists' if file.exists() else 'its folder does not'}: name another file")
    parts = {"trainer": run.spans, **{f"replica {i}": one.spans for i, one in enumerate(run.replicas)}}
    events: list[dict[str, Any]] = []
    for number, (part, spans) in enumerate(parts.items()):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": part}})
        events += (
            {"name": name, "ph": "X", "pid": 0, "tid": number, "ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s)}
            for name, start_s, end_s in spans
        )
    file.write_text(json.dumps({"traceEvents": events}))
