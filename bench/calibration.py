"""Predicted and measured seconds of small runs that the planner's figures were not learned from.

    python bench/calibration.py

Reads bench/records/planner/runs.json, which `bench/plan_runs.py` measures. Five figures are learned from the first
runs; all others are predicted. Writes its part of bench/RESULTS.md (bench/sections/calibration.md).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import write_section
from bench.results import Table
from verl.planner.hardware import Device, Nodes
from verl.planner.latency import Division, ModelSize, StepWork, Stored
from verl.planner.learned import FITTED, Observation, fitted_nodes
from verl.planner.mapping import PlannedRole, Rules, stages_of, times_of

RECORD = Path(__file__).parent / "records" / "planner" / "runs.json"
LEARNED = 6
"""The first runs of the record are those that the figures are learned from."""
WITHIN, MEDIAN = 0.25, 0.15
MACHINE = Device(
    name="a CPU, one thread",
    memory_gb=16,
    bandwidth_gbs=10,
    matrix_tflops=0.15,
    link_gbs=5,
    source="a nominal rate: only its product with a share counts",
    item_bytes=4,
    overlap=0,
)


def observed(record: Mapping[str, Any]) -> Observation:
    """Return the times of a recorded run with the function that predicts them."""
    roles = tuple(
        PlannedRole(
            name=role["name"],
            model=ModelSize(**role["model"]),
            calls=tuple((stage, kind) for stage, kind in role["calls"]),
            base=role["base"],
        )
        for role in record["roles"]
    )
    rules = Rules(
        work=StepWork(**record["work"]), stored=Stored(**record["stored"]), layout=Division(1, 1, 1), engines=(1,)
    )

    def predicted(at: Nodes) -> Mapping[str, float]:
        found = times_of(roles, [at], rules)(tuple(role.name for role in roles), 0, 1)
        assert found is not None, "small models fit"
        return {stage: s for stage, s in zip(stages_of(roles), found.seconds) if s}

    return Observation(predicted, record["seconds"])


def learned(records: Sequence[Mapping[str, Any]]) -> Nodes:
    """Return the machine with the figures of the first runs."""
    at = Nodes(device=MACHINE, nodes=1, devices_per_node=1, network_gbs=5)
    return fitted_nodes([observed(one) for one in records[:LEARNED]], at)


def step_error(one: Observation, at: Nodes) -> float:
    """Return the relative error of the stages together."""
    found = one.predicted(at)
    return sum(found[stage] for stage in one.measured if stage in found) / sum(one.measured.values()) - 1


def rows_of(records: Sequence[Mapping[str, Any]], at: Nodes) -> list[tuple[str, ...]]:
    """Return the cells of the table: each run with its errors."""
    cells = list[tuple[str, ...]]()
    for number, record in enumerate(records):
        one, shape = observed(record), record["shape"]
        found = one.predicted(at)
        size = f"{shape['layers']} x {shape['hidden']}"
        sequences = f"{shape['prompts']} x {shape['samples']}"
        errors = [
            f"{found[stage] / one.measured[stage] - 1:+.0%}" if stage in found and stage in one.measured else "-"
            for stage in ("rollout", "experience", "update")
        ]
        total = sum(one.measured.values())
        kind = "learned" if number < LEARNED else "predicted"
        tokens = f"{shape['prompt_tokens']} + {shape['answer_tokens']}"
        cells.append((size, sequences, tokens, f"{total:.2f}", f"{step_error(one, at):+.0%}", *errors, kind))
    return cells


HEAD = ("layers x hidden", "rows", "tokens", "s, measured", "error", "rollout", "experience", "update", "")


def main(argv: Sequence[str]) -> int:
    records = json.loads(RECORD.read_text())
    at = learned(records)
    errors = [abs(step_error(observed(one), at)) for one in records[LEARNED:]]
    table = Table("CPU seconds of a step, one thread, float32", HEAD, tuple(rows_of(records, at)))
    figures = ", ".join(f"{name} {getattr(at.device, name):.3g}" for name in FITTED)
    about = (
        f"Command: `python bench/calibration.py`, on runs that `bench/plan_runs.py` measured. Five figures ({figures}) "
        f"are learned from {LEARNED} runs. Of the {len(errors)} others the error is {statistics.median(errors):.0%} on "
        f"the median and {max(errors):.0%} at most."
    )
    print(table.markdown(), about, sep="\n\n")
    write_section("calibration", "## The planner's seconds beside measured runs", about, table.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
