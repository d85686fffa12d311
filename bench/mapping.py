"""The planner's placements beside those of HybridFlow.

    python bench/mapping.py

Nothing is fitted to placements: devices and shares are those of verl/planner/hardware.py, models train in the paper's
layouts, and two figures of its system follow from other measurements of the paper: the rate between nodes, and what the
host of an engine adds for each sequence. For each row the planner's best placement is compared with the best devices of
the paper's sets. Writes its part of bench/RESULTS.md (bench/sections/mapping.md).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from bench.report import write_section
from bench.results import Table
from verl.planner.hardware import DEVICES, Nodes
from verl.planner.latency import (
    PIPELINE,
    RESERVE,
    Division,
    ModelSize,
    StepWork,
    Stored,
    generate_s,
    held_bytes,
    resharded_bytes,
)
from verl.planner.mapping import PlannedRole, RolePlacement, Rules, placements, times_of

PUBLISHED = Path(__file__).parent / "published" / "hybridflow.yaml"
CLOSE = 0.1
"""A placement of the paper's is close to the planner's best one if it takes at most this much longer."""


TIE = 0.03
"""And it is a tie if it takes at most this much longer."""
SHARES = ("compute_share", "bandwidth_share", "network_share")


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

    @property
    def verdict(self) -> str:
        if self.same or self.gap is None:
            return "the same" if self.same else "does not fit"
        return "a tie" if self.gap <= TIE else "close" if self.gap <= CLOSE else "different"


def roles_of(page: Mapping[str, Any], actor: str, critic: str) -> tuple[PlannedRole, ...]:
    """Return the roles of PPO: the answers, what the other models compute of them, the updates. Models train in the
    layouts of the page, or in fewer stages where these do not divide the devices."""

    def role(name: str, model: str, *calls: tuple[str, Any]) -> PlannedRole:
        tensor, most = page["layouts"][model]
        trained = any(kind == "train" for _, kind in calls)
        parts = tuple((tensor, stages) for stages in PIPELINE if stages <= most) if trained else ()
        return PlannedRole(name=name, model=model_size(page["models"][model]), calls=calls, parts=parts)

    return (
        role("actor", actor, ("generation", "generate"), ("training", "train")),
        role("critic", critic, ("preparation", "infer"), ("training", "train")),
        role("ref", actor, ("preparation", "infer")),
        role("reward", critic, ("preparation", "infer")),
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


def network_gbs(page: Mapping[str, Any]) -> float:
    """Return the gigabytes per second between nodes: the bytes that the devices of a node receive from others between
    an update and the next answers, over the published seconds of it."""
    of, each = page["transition"], page["cluster"]["devices_per_node"]
    tensor, pipeline = page["layouts"][of["model"]]
    parameters = model_size(page["models"][of["model"]]).parameters
    seconds = of["less_s"] / of["less"] - of["less_s"]
    return each * resharded_bytes(parameters, Division(tensor, pipeline, 1), of["engine"]) / seconds / 1e9


def nodes_of(page: Mapping[str, Any], devices: int) -> Nodes:
    """Return so many devices of the page, with what its system reaches between nodes."""
    of = page["cluster"]
    device = replace(DEVICES[of["device"]], sequence_us=page["engines"]["sequence_us"])
    return Nodes(
        device=device,
        nodes=devices // of["devices_per_node"],
        devices_per_node=of["devices_per_node"],
        network_gbs=min(of["network_gbs"], network_gbs(page) / device.network_share),
    )


def found_on(page: Mapping[str, Any], actor: str, critic: str, at: Nodes) -> list[RolePlacement]:
    """Return the placements of PPO on these nodes, best first."""
    roles = roles_of(page, actor, critic)
    rules = Rules(work=StepWork(**page["work"]), stored=Stored(**page["stored"]))
    return placements(roles, (at,), times_of(roles, (at,), rules))


def compared(page: Mapping[str, Any], row: Sequence[Any], at: Nodes | None = None) -> Compared:
    """Return a row's best placement and the paper's. at: other nodes than those of the page."""
    actor, critic, devices, chosen = row
    found = found_on(page, actor, critic, nodes_of(page, devices) if at is None else at)
    papers = _with_sets(page, found, chosen)
    return Compared(found[0], papers, papers is found[0])


def _with_sets(page: Mapping[str, Any], found: Sequence[RolePlacement], name: str) -> RolePlacement | None:
    wanted = {frozenset(one) for one in page["sets"][name]}
    return next((p for p in found if {frozenset(one.roles) for one in p.sets} == wanted), None)


def gaps_of(page: Mapping[str, Any], row: Sequence[Any]) -> list[float]:
    """Return how much longer the paper's sets take where each share of the device is as known, or more or less by its
    spread."""
    at, out = nodes_of(page, row[2]), list[float]()
    factors = (1 / at.device.spread, 1.0, at.device.spread)
    for chosen in itertools.product(factors, repeat=len(SHARES)):
        shares: dict[str, Any] = {
            share: min(1.0, factor * getattr(at.device, share)) for share, factor in zip(SHARES, chosen)
        }
        gap = compared(page, row, replace(at, device=replace(at.device, **shares))).gap
        out += [] if gap is None else [gap]
    return out


def engine_seconds(page: Mapping[str, Any], model: str) -> dict[int, float | None]:
    """Return the seconds of all answers by engines of 1, 2, 4 and 8 devices, with all models on the same devices; None
    where they do not fit."""
    of, size = page["engines"], model_size(page["models"][model])
    at, stored = nodes_of(page, of["devices"]), Stored(**page["stored"])
    by = Division(8, 1, of["devices"] // 8)
    held = 2 * sum(held_bytes(size, by, trained, stored) for trained in (True, False))
    room = (1 - RESERVE) * 1e9 * at.device.memory_gb - held
    work = StepWork(**page["work"])
    return {
        n: generate_s(size, of["devices"], n, at, work, room - resharded_bytes(size.parameters, by, n))
        for n in (1, 2, 4, 8)
    }


def engines_less(page: Mapping[str, Any], model: str) -> float:
    """Return how much less time the answers of a model take by engines of its published size than by those of 8."""
    seconds = engine_seconds(page, model)
    some, most = (seconds[n] for n in (page["engines"]["less"][model][0], 8))
    assert some is not None and most is not None, "both fit"
    return 1 - some / most


def scaling_of(page: Mapping[str, Any]) -> dict[str, float]:
    """Return by model the speed on the most devices over that on the fewest ones times their ratio."""
    of = page["scaling"]
    out = dict[str, float]()
    for name, fewest in of["fewest"].items():
        few, many = (found_on(page, name, name, nodes_of(page, n))[0].step_s for n in (fewest, of["devices"]))
        out[name] = few / many * fewest / of["devices"]
    return out


def together_faster(page: Mapping[str, Any]) -> float:
    """Return by how much all models of 13B and 70B together are faster than the page's other placements, on average
    over the devices on which the paper has them together."""
    of, out = page["together"], list[float]()
    for actor, critic, devices, chosen in page["rows"]:
        if actor == critic or chosen != "together":
            continue
        found = found_on(page, actor, critic, nodes_of(page, devices))
        own, *others = (_with_sets(page, found, name) for name in (chosen, *of["others"]))
        out += [other.step_s / own.step_s - 1 for other in others if other is not None and own is not None]
    return sum(out) / len(out)


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


def _text(placement: RolePlacement | None) -> str:
    if placement is None:
        return "does not fit"
    return " \\| ".join(f"{' + '.join(one.roles)} {one.times.devices}" for one in placement.sets)


VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "passes of one row": {"work": {"micro_tokens": 2048}},
    "passes of four rows": {"work": {"micro_tokens": 8192}},
    "25 GB/s between nodes": {"transition": {"less": 0.999}},
    "no time of the host": {"engines": {"sequence_us": 0}},
    "gradients that are summed in 16 bits": {"stored": {"reduced": 2}},
}
"""What the paper does not say, or another reading of it, otherwise than in the table."""


def counted(rows: Sequence[Compared]) -> tuple[int, int, int]:
    """Return the number of rows with the paper's sets, of those with them or a tie, and of those in which the paper's
    are at most close to the best ones."""
    gaps = [got.gap for got in rows if got.gap is not None]
    return sum(got.same for got in rows), sum(gap <= TIE for gap in gaps), sum(gap <= CLOSE for gap in gaps)


def varied(page: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> tuple[int, int, int]:
    """Return the counts with some values of the page changed."""
    other = {**page, **{key: {**page[key], **values} for key, values in changes.items()}}
    return counted([compared(other, row) for row in page["rows"]])


HEAD = ("actor, critic", "devices", "the planner's best", "s per step", "the paper's sets", "longer by", "range", "")


def main(argv: Sequence[str]) -> int:
    page = yaml.safe_load(PUBLISHED.read_text())
    cells, every = list[tuple[str, ...]](), [compared(page, row) for row in page["rows"]]
    for row, got in zip(page["rows"], every):
        (actor, critic, devices, chosen), gaps = row, gaps_of(page, row)
        longer = "-" if got.same or got.gap is None else f"{got.gap:.1%}"
        span, best = f"{min(gaps):.1%} to {max(gaps):.1%}", _text(got.best)
        step_s = f"{got.best.step_s:.0f}"
        cells.append((f"{actor}, {critic}", str(devices), best, step_s, chosen, longer, span, got.verdict))
    (same, ties, close), rows = counted(every), len(every)
    others = "; ".join("{}: {}, {} and {}".format(name, *varied(page, changes)) for name, changes in VARIANTS.items())
    table = Table("Placements of PPO on A100-80GB beside HybridFlow's", HEAD, tuple(cells))
    about = (
        f"Command: `python bench/mapping.py`. Nothing is fitted to placements. The planner chooses the paper's sets in "
        f"{same} of {rows} rows; in {ties} these are the same or a tie, at most {TIE:.0%} slower, and in {close} at "
        f"most {CLOSE:.0%}. The range is that of shares of the device which are more or less by its spread. With "
        f"{others}."
    )
    less, scaling = page["engines"]["less"], scaling_of(page)
    efficiency = sum(scaling.values()) / len(scaling)
    by_model = ", ".join(f"{name} {value:.0%}" for name, value in scaling.items())
    checks = Table(
        "Other figures of the paper",
        ("figure", "published", "planner", ""),
        (
            ("GB/s between nodes, by the transition of 70B", "25 (sheet)", f"{network_gbs(page):.1f}", "taken"),
            *(
                (
                    f"{name}: less time by engines of {n} than of 8",
                    f"{wanted:.1%}",
                    f"{engines_less(page, name):.1%}",
                    "fitted" if name == "7B" else "predicted",
                )
                for name, (n, wanted) in less.items()
            ),
            ("strong scaling to 128", f"{page['scaling']['efficiency']:.1%}", f"{efficiency:.1%}", "predicted"),
            (
                "13B, 70B up to 64: together is faster by",
                f"{page['together']['faster']:.1%}",
                f"{together_faster(page):.1%}",
                "predicted",
            ),
        ),
    )
    savings, of = resharding_savings(page), page["resharding"]
    shares = ", ".join(f"{saving:.0%} for engines of {tensor}" for tensor, saving in savings.items())
    copied = (
        f"Scaling by model: {by_model}. From {of['tensor']} tensor devices in training, devices that gather their "
        f"parts alone receive less than those that gather the whole model first: {shares}. The mean is "
        f"{sum(savings.values()) / len(savings):.0%}; the paper measured {of['saving']:.0%} less time on average."
    )
    print(table.markdown(), about, checks.markdown(), copied, sep="\n\n")
    title = "## Placements beside published ones"
    write_section("mapping", title, about, table.markdown(), checks.markdown(), copied)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
