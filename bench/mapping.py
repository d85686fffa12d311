"""The planner's placements beside those of HybridFlow.

    python bench/mapping.py

Nothing is fitted: devices and shares are those of verl/planner/hardware.py. For each row the planner's best placement
is compared with the best devices of the paper's sets. Writes its part of bench/RESULTS.md (bench/sections/mapping.md).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from bench.report import write_section
from bench.results import Table
from verl.planner.hardware import DEVICES, Nodes
from verl.planner.latency import ModelSize, StepWork, Stored
from verl.planner.mapping import PlannedRole, RolePlacement, Rules, placements, times_of

PUBLISHED = Path(__file__).parent / "published" / "hybridflow.yaml"
CLOSE = 0.1
"""A placement of the paper's is close to the planner's best one if it takes at most this much longer."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of the table."""

    best: RolePlacement
    papers: RolePlacement | None
    """The best devices of the paper's sets; None: they do not fit."""
    same: bool

    @property
    def gap(self) -> float | None:
        return None if self.papers is None else self.papers.step_s / self.best.step_s - 1


def roles_of(page: Mapping[str, Any], actor: str, critic: str) -> tuple[PlannedRole, ...]:
    """Return the roles of PPO: the answers, what the other models compute of them, the updates."""
    own, other = (model_size(page["models"][name]) for name in (actor, critic))
    return (
        PlannedRole(name="actor", model=own, calls=(("generation", "generate"), ("training", "train"))),
        PlannedRole(name="critic", model=other, calls=(("preparation", "infer"), ("training", "train"))),
        PlannedRole(name="ref", model=own, calls=(("preparation", "infer"),)),
        PlannedRole(name="reward", model=other, calls=(("preparation", "infer"),)),
    )


def model_size(row: Sequence[float]) -> ModelSize:
    parameters, layers, hidden, kv_width = map(float, row)
    return ModelSize(
        parameters=parameters,
        active_parameters=parameters,
        layers=int(layers),
        hidden=int(hidden),
        kv_width=int(kv_width),
    )


def compared(page: Mapping[str, Any], row: Sequence[Any]) -> Compared:
    """Return a row's best placement and the paper's."""
    actor, critic, devices, chosen = row
    of, work = page["cluster"], StepWork(**page["work"])
    cluster = (
        Nodes(
            device=DEVICES[of["device"]],
            nodes=devices // of["devices_per_node"],
            devices_per_node=of["devices_per_node"],
            network_gbs=of["network_gbs"],
        ),
    )
    roles = roles_of(page, actor, critic)
    found = placements(roles, cluster, times_of(roles, cluster, Rules(work=work, stored=Stored(**page["stored"]))))
    wanted = {frozenset(one) for one in page["sets"][chosen]}
    papers = next((p for p in found if _sets(p) == wanted), None)
    return Compared(found[0], papers, _sets(found[0]) == wanted)


def _sets(placement: RolePlacement) -> set[frozenset[str]]:
    return {frozenset(one.roles) for one in placement.sets}


def _text(placement: RolePlacement | None) -> str:
    if placement is None:
        return "does not fit"
    return " \\| ".join(f"{' + '.join(one.roles)} {one.times.devices}" for one in placement.sets)


HEAD = ("actor, critic", "devices", "the planner's best", "s per step", "the paper's sets", "longer by")


def main(argv: Sequence[str]) -> int:
    page = yaml.safe_load(PUBLISHED.read_text())
    cells, all_rows = list[tuple[str, ...]](), [(row, compared(page, row)) for row in page["rows"]]
    for (actor, critic, devices, chosen), got in all_rows:
        gap = "the same" if got.same else "-" if got.gap is None else f"{got.gap:.1%}"
        best = _text(got.best)
        cells.append((f"{actor}, {critic}", str(devices), best, f"{got.best.step_s:.0f}", chosen, gap))
    same = sum(got.same for _, got in all_rows)
    close = sum(got.gap is not None and got.gap <= CLOSE for _, got in all_rows)
    table = Table("Placements of PPO on A100-80GB beside HybridFlow's", HEAD, tuple(cells))
    about = (
        f"Command: `python bench/mapping.py`. Nothing is fitted. The planner chooses the paper's sets in {same} of "
        f"{len(all_rows)} rows; in {close} the paper's sets are at most {CLOSE:.0%} slower than its best."
    )
    print(table.markdown(), about, sep="\n\n")
    write_section("mapping", "## Placements beside published ones", about, table.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
