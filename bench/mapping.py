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
from verl.planner.latency import Division, ModelSize, StepWork, Stored, resharded_bytes
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


def resharding_savings(page: Mapping[str, Any]) -> dict[int, float]:
    """Return the share of the bytes between an update and the next answers that a device does not receive if it gathers
    its part alone and not the whole model first, by the tensor devices of an engine. The link is the same one, so this
    is the share of the time too."""
    of = page["resharding"]
    by = Division(of["tensor"], of["pipeline"], 1)
    parts = {
        tensor: (resharded_bytes(1.0, by, tensor), resharded_bytes(1.0, by, tensor, True)) for tensor in of["engines"]
    }
    return {tensor: 1 - part / whole for tensor, (part, whole) in parts.items()}


def _sets(placement: RolePlacement) -> set[frozenset[str]]:
    return {frozenset(one.roles) for one in placement.sets}


def _text(placement: RolePlacement | None) -> str:
    if placement is None:
        return "does not fit"
    return " \\| ".join(f"{' + '.join(one.roles)} {one.times.devices}" for one in placement.sets)


VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "passes of one row": {"work": {"micro_tokens": 2048}},
    "gradients that are summed in float32": {"stored": {"reduced": 4}},
    "both": {"work": {"micro_tokens": 2048}, "stored": {"reduced": 4}},
}
"""What the paper does not say, otherwise than in the table."""


def counted(rows: Sequence[Compared]) -> tuple[int, int]:
    """Return the number of rows with the paper's sets, and of those in which they are close to the best ones."""
    return sum(got.same for got in rows), sum(got.gap is not None and got.gap <= CLOSE for got in rows)


def varied(page: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """Return the counts with some values of the page changed."""
    other = {**page, **{key: {**page[key], **values} for key, values in changes.items()}}
    return counted([compared(other, row) for row in page["rows"]])


HEAD = ("actor, critic", "devices", "the planner's best", "s per step", "the paper's sets", "longer by")


def main(argv: Sequence[str]) -> int:
    page = yaml.safe_load(PUBLISHED.read_text())
    cells, all_rows = list[tuple[str, ...]](), [(row, compared(page, row)) for row in page["rows"]]
    for (actor, critic, devices, chosen), got in all_rows:
        gap = "the same" if got.same else "-" if got.gap is None else f"{got.gap:.1%}"
        best = _text(got.best)
        cells.append((f"{actor}, {critic}", str(devices), best, f"{got.best.step_s:.0f}", chosen, gap))
    same, close = counted([got for _, got in all_rows])
    others = "; ".join("{}: {} and {}".format(name, *varied(page, changes)) for name, changes in VARIANTS.items())
    table = Table("Placements of PPO on A100-80GB beside HybridFlow's", HEAD, tuple(cells))
    about = (
        f"Command: `python bench/mapping.py`. Nothing is fitted. The planner chooses the paper's sets in {same} of "
        f"{len(all_rows)} rows; in {close} the paper's sets are at most {CLOSE:.0%} slower than its best. With "
        f"{others}."
    )
    savings, of = resharding_savings(page), page["resharding"]
    shares = ", ".join(f"{saving:.0%} for engines of {tensor}" for tensor, saving in savings.items())
    copied = (
        f"From {of['tensor']} tensor devices in training, devices that gather their parts alone receive less than "
        f"those that gather the whole model first: {shares}. The mean is {sum(savings.values()) / len(savings):.0%}; "
        f"the paper measured {of['saving']:.0%} on an average of layouts that it does not print."
    )
    print(table.markdown(), about, copied, sep="\n\n")
    write_section("mapping", "## Placements beside published ones", about, table.markdown(), copied)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
