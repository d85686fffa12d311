"""Predictions of the simulator beside published tables.

    python bench/planner.py

Three constants are fitted to the rows that the table marks, over a grid: the time of a decode step beside that of the
keys and values, and the mean and the sigma of the lengths of answers. Everything else is an input or follows from the
model and the device. Writes its part of bench/RESULTS.md (bench/sections/planner.md).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from bench.report import write_section
from bench.results import Table
from verl.driver.scheduler import Scheduler
from verl.planner.simulate import Decoding, Simulated, Workload, lognormal, simulate

PUBLISHED = Path(__file__).parent / "published" / "verl_fully_async.yaml"
BASE_S, MEANS, SIGMAS = (0.005, 0.0055, 0.006, 0.0065), (4000, 4500, 5000), (0.6, 0.7, 0.8)
AS_GOOD = 0.03
"""Fits whose errors on the fitted rows are all below this are equally good: the data do not tell them apart."""
STREAM = 1e-4
"""The staleness of the row with 0: verl's trainer takes whichever groups are complete first, within one version. Here
staleness 0 takes groups in their order, and a staleness just above it does not."""


@dataclass(frozen=True, slots=True)
class Constants:
    """The fitted constants."""

    base_s: float
    mean_tokens: float
    sigma: float


FITTED = Constants(0.006, 4000, 0.8)
"""The result of `fit`."""


def predicted(page: Mapping[str, Any], row: Mapping[str, Any], fitted: Constants, publishes: int = 7) -> Simulated:
    """Return the simulated run of a row."""
    work, model = page["work"], page["model"]
    # while they are decoded, long answers count for longer: their mean context is that of answers weighted by length
    context = model["prompt_tokens"] + fitted.mean_tokens * math.exp(fitted.sigma**2) / 2
    kv_s = model["kv_bytes_per_token"] * context / (1e9 * page["device"]["bandwidth_gbs"])
    shared = "staleness" not in row  # a synchronous step of all prompts of a period
    prompts, sync_every = (row.get(key, work[key]) for key in ("prompts_per_step", "sync_every"))
    if shared:
        prompts, sync_every = prompts * sync_every, 1
    scheduler = Scheduler(
        prompts_per_step=prompts,
        total_steps=(publishes + 3) * sync_every,
        sync_every=sync_every,
        staleness=0 if shared else row["staleness"] or STREAM,
    )
    return simulate(
        scheduler,
        Workload(
            replicas=row["rollout"],
            sequences=work["sequences"],
            samples_per_prompt=work["samples_per_prompt"],
            lengths=lognormal(fitted.mean_tokens, fitted.sigma, work["most_tokens"]),
            decoding=Decoding(base_s=fitted.base_s, sequence_s=kv_s),
            update_s=row["update_s"] / sync_every,
            publish_s=0 if shared else work["publish_s"],  # which is in the rest of a synchronous step
            partial_rollout=not shared and row["staleness"] > 0,
            shared=shared,
        ),
        publishes=publishes,
    )


def fit(page: Mapping[str, Any]) -> list[tuple[float, Constants]]:
    """Return (the largest relative error over the fitted rows, constants) of the whole grid, best first."""
    rows = [row for row in page["rows"] if row.get("fitted")]

    def error(one: Constants) -> float:
        return max(abs(predicted(page, row, one).period_s / row["step_s"] - 1) for row in rows)

    grid = [Constants(*values) for values in itertools.product(BASE_S, MEANS, SIGMAS)]
    return sorted(((error(one), one) for one in grid), key=lambda found: found[0])


def rows_of(page: Mapping[str, Any], fitted: Constants) -> list[tuple[str, ...]]:
    """Return the cells of the table: each row beside its prediction."""
    cells = list[tuple[str, ...]]()
    for row in every_row(page):
        got, shared = predicted(page, row, fitted), "staleness" not in row
        mode = "synchronous" if shared else f"staleness {row['staleness']:g}"
        if "prompts_per_step" in row:
            mode += f", steps of {row['prompts_per_step']}"
        cells.append(
            (
                f"{row['rollout']}" if shared else f"{row['rollout']}:{row['rollout']}",
                mode,
                f"{row['step_s']:.1f}",
                f"{got.period_s:.1f}",
                f"{got.period_s / row['step_s'] - 1:+.1%}",
                f"{row['wait_s']:.1f}",
                f"{got.wait_s:.1f}",
                "fitted" if row.get("fitted") else "predicted",
            )
        )
    return cells


def every_row(page: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of all tables that are simulated."""
    return [*page["rows"], *page["local_steps"], *page["synchronous"]]


HEAD = ("rollout:training", "mode", "s, published", "s, simulated", "error", "wait, published", "simulated", "")


def main(argv: Sequence[str]) -> int:
    page = yaml.safe_load(PUBLISHED.read_text())
    grid = fit(page)
    (error, best), equal = grid[0], [one for off, one in grid if off <= AS_GOOD]
    table = Table("Fully asynchronous training, Qwen2.5-Math-7B on H20", HEAD, tuple(rows_of(page, best)))
    spans = ", ".join(
        f"{name} {min(values):g} to {max(values):g}"
        for name, values in (
            ("a decode step's base", [one.base_s for one in equal]),
            ("the mean", [one.mean_tokens for one in equal]),
            ("sigma", [one.sigma for one in equal]),
        )
    )
    about = (
        f"Command: `python bench/planner.py`. Fitted on two rows to {error:.1%}: {best.base_s:g} s, "
        f"{best.mean_tokens:g} tokens, sigma {best.sigma:g}. {len(equal)} of {len(grid)} fits are below {AS_GOOD:.0%} "
        f"there ({spans}): two rows do not determine three constants. What a sequence adds to a decode step follows "
        "from the model and the device's bandwidth. Requests continue under new weights at no cost in these rows: the "
        "time in which their keys and values are computed anew (`resume_s`) is 0, and the fitted constants may have "
        "some of it."
    )
    head = ("row", "s, published", "s of the trainer alone", "below by")
    bounds = [
        (row["name"], f"{row['step_s']:.1f}", f"{row['trainer_s']:.1f}", f"{1 - row['trainer_s'] / row['step_s']:.0%}")
        for row in page["trainer_bound"]
    ]
    others = Table("Rows whose generation the text does not determine", head, tuple(bounds))
    print(table.markdown(), about, others.markdown(), sep="\n\n")
    title = "## The simulator beside published tables"
    write_section("planner", title, about, table.markdown(), others.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
