"""The table of `verl show RUN [RUN ...]`: a row for each step, a column for each metric and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.table import Table

from verl.errors import Refused
from verl.track.console import compact
from verl.track.log import Note, logger
from verl.track.metrics import read_metrics

COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "eval/acc/greedy": "greedy",
        "eval/acc/sampled": "sampled",
        "critic/score/mean": "score",
        "train/loss": "loss",
        "val/loss": "val loss",
        "val/acc": "val acc",
        "actor/entropy": "entropy",
        "mismatch/k3": "k3",
        "actor/grad_norm": "grad",
        "train/grad_norm": "grad",
        "perf/time_per_step": "s/step",
    }
)
"""Metric -> its heading, the most important first. Metrics that no run has are left out."""
MOST_ROWS = 40
LETTERS = "ABCDEFGH"
CELL = 9  # characters of a column with its space


def print_runs(paths: Sequence[Path], console: Console | None = None, note: Note = logger.warning) -> None:
    """Print the metrics of one run, or of up to eight side by side: under each heading a column for every run. The
    lines below the table explain the headings, and list those for which the console is too narrow."""
    console = console or Console()
    if len(paths) > len(LETTERS):
        raise Refused(f"verl show takes up to {len(LETTERS)} runs, and {len(paths)} are given")
    runs = [{line.step: line.values for line in read_metrics(path, note)} for path in paths]
    there = {name for run in runs for values in run.values() for name in values}
    found = [name for name in COLUMNS if name in there]
    shown = found[: max(1, (console.width - CELL) // (CELL * len(runs)))]
    marks = [""] if len(runs) == 1 else [f"\n{letter}" for letter in LETTERS[: len(runs)]]
    table = Table("step", box=None, pad_edge=False)
    for name in shown:
        for mark in marks:
            table.add_column(COLUMNS[name] + mark, justify="right", no_wrap=True)
    for step in _some(sorted({step for run in runs for step in run})):
        row = [run.get(step, {}) for run in runs]
        table.add_row(str(step), *(compact(v[name]) if name in v else "" for name in shown for v in row))
    names = [str(path) for path in paths]
    console.print("\n".join(names if len(names) == 1 else [f"{LETTERS[i]}: {n}" for i, n in enumerate(names)]))
    console.print(table)
    stand_for = ", ".join(f"{COLUMNS[name]} {name}" for name in shown)
    left = f"; too narrow for {', '.join(found[len(shown) :])}" if len(shown) < len(found) else ""
    console.print(f"{stand_for}{left}", highlight=False, style="dim")


def _some(steps: Sequence[int]) -> Sequence[int]:
    """Return about MOST_ROWS of the steps, including the last one."""
    if len(steps) <= MOST_ROWS:
        return steps
    return sorted({*steps[:: -(-len(steps) // MOST_ROWS)], steps[-1]})
