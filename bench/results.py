"""The measurements of the arms as medians, ratios and tables. Pure: no clock, no process, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.limits import Limit, Machine

OURS = "verl"
PEERS = ("TRL", "naive")
ARMS = (OURS, *PEERS)
NOT_RUN = "not run"
QUIET_CORES = 0.2  # above this, wall time depends on the neighbours
Steps = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ValueError("a spread of no values")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} [{self.low:,.{digits}f}–{self.high:,.{digits}f}]"


@dataclass(slots=True)
class Arm:
    """All rounds of one arm in one precision. `reason` is why it did not run."""

    name: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None

    @property
    def steps(self) -> list[Mapping[str, float]]:
        return [step for found in self.rounds for step in found["steps"]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table. `of_step` reads it from a step, `of_round` from a round (once per process)."""

    label: str
    digits: int
    of_step: Callable[[Mapping[str, float]], float] | None = None
    of_round: Callable[[Mapping[str, Any]], float] | None = None
    higher_is_better: bool = False
    compared: bool = True

    def values(self, found: Mapping[str, Any]) -> list[float]:
        if self.of_step is not None:
            return [self.of_step(step) for step in found["steps"]]
        assert self.of_round is not None, "a figure reads a step or a round"
        return [self.of_round(found)]


WALL = Figure("step, s", 2, lambda s: s["wall_s"])
CPU = Figure("step, core-s", 2, lambda s: s["cpu_s"])
OTHERS = Figure("cores taken by others meanwhile", 2, lambda s: s["others_cores"], compared=False)
FIGURES = (
    WALL,
    CPU,
    Figure("response tokens/s", 0, lambda s: s["response_tokens"] / s["wall_s"], higher_is_better=True),
    Figure("response tokens per core-s", 0, lambda s: s["response_tokens"] / s["cpu_s"], higher_is_better=True),
    Figure("rollout, s", 2, lambda s: s["rollout_s"]),
    Figure("rollout, core-s", 2, lambda s: s["rollout_cpu_s"]),
    Figure("update, s", 2, lambda s: s["update_s"]),
    Figure("update, core-s", 2, lambda s: s["update_cpu_s"]),
    Figure("the rest of the step, s", 3, lambda s: s["wall_s"] - s["rollout_s"] - s["update_s"]),
    Figure("peak memory, MB", 0, of_round=lambda r: r["peak_rss_mb"]),
    Figure("start to first step done, s", 1, of_round=lambda r: r["first_step_done_s"]),
    Figure("response tokens per step", 0, lambda s: s["response_tokens"], compared=False),
    OTHERS,
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better verl is: of the medians over everything, and the least and most of any round."""

    overall: float
    low: float
    high: float

    def text(self) -> str:
        rounds = "" if self.low == self.high else f" [{self.low:.2f}–{self.high:.2f}]"
        return f"{self.overall:.2f}×{rounds}"


def spread_of(arm: Arm, figure: Figure) -> Spread:
    return Spread.of([value for found in arm.rounds for value in figure.values(found)])


def ratio(figure: Figure, ours: Arm, peer: Arm) -> Ratio:
    """Above 1: verl is better. The bracket compares medians within each round, where both saw about the same load."""

    def better(ours_value: float, peer_value: float) -> float:
        low, high = (peer_value, ours_value) if figure.higher_is_better else (ours_value, peer_value)
        return high / low if low > 0 else float("inf")

    rounds = [
        better(statistics.median(figure.values(a)), statistics.median(figure.values(b)))
        for a, b in zip(ours.rounds, peer.rounds)
    ]
    return Ratio(better(spread_of(ours, figure).median, spread_of(peer, figure).median), min(rounds), max(rounds))


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _line(self.head), _line(["---"] + ["---:"] * (len(self.head) - 1))]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def comparison(arms: Mapping[str, Arm], dtype: str) -> Table:
    """One line per figure: the three arms, then verl against each peer."""
    rows = []
    for figure in FIGURES:
        cells = [spread_of(arms[name], figure).text(figure.digits) if arms[name].rounds else NOT_RUN for name in ARMS]
        for peer in PEERS:
            both = arms[OURS].rounds and arms[peer].rounds
            cells.append(ratio(figure, arms[OURS], arms[peer]).text() if both and figure.compared else "")
        rows.append((figure.label, *cells))
    notes = [f"{arm.name}: {NOT_RUN}: {arm.reason}" for arm in arms.values() if arm.reason]
    return Table(
        f"Step of the quickstart, {dtype}",
        ("median [quartiles]", *ARMS, *(f"verl vs {p} [by round]" for p in PEERS)),
        tuple(rows),
        tuple(notes),
    )


def multiples(arms: Mapping[str, Arm], limits: Mapping[str, Limit], machine: Machine, dtype: str) -> Table:
    """How far from the machine's limit each arm is, per part, by wall time and by CPU time. 1.0 would be perfect."""
    keys = {
        "rollout": ("rollout_s", "rollout_cpu_s"),
        "update": ("update_s", "update_cpu_s"),
        "step": ("wall_s", "cpu_s"),
    }
    rows = []
    for part, (wall, cpu) in keys.items():
        limit = limits[part]
        core_s = limit.gflop / machine.gflop_per_core_s
        cells = [_multiple(arms[name], wall, limit.seconds) for name in ARMS]
        cpu_cells = [_multiple(arms[name], cpu, core_s) for name in ARMS]
        rows.append((f"{part}, wall", f"{limit.gflop:.1f}", f"{limit.gbyte:.2f}", f"{limit.seconds:.3f} s", *cells))
        rows.append((f"{part}, CPU", f"{limit.gflop:.1f}", "", f"{core_s:.3f} core-s", *cpu_cells))
    return Table(
        f"Multiple of this machine's limit, {dtype}",
        ("part", "GFLOP", "GB", "limit", *ARMS),
        tuple(rows),
        (
            f"Measured here: {machine.gflop_per_core_s:.0f} GFLOP/s per core "
            f"({machine.gflop_per_core_s_model_shapes:.0f} with the "
            f"model's own matrix shapes), {machine.gflop_per_s:.0f} with {machine.threads} threads as loaded, "
            f"{machine.gbyte_per_s:.0f} GB/s from memory; the limit uses {machine.peak_gflop_per_s:.0f} GFLOP/s. That "
            "of the update counts a backward pass of all groups, also of those with equal rewards, for which verl has "
            "none.",
        ),
    )


def _multiple(arm: Arm, key: str, limit: float) -> str:
    if not arm.rounds:
        return NOT_RUN
    return f"{statistics.median(step[key] for step in arm.steps) / limit:.1f}×"


def ledger(arm: Arm, dtype: str) -> Table:
    """Return the time of verl's step, phase by phase, from its own time ledger."""
    steps = arm.steps
    wall_s = statistics.median(step["wall_s"] for step in steps)

    def median_ms(key: str) -> float:
        return 1000 * statistics.median(step.get(key, 0.0) for step in steps)

    names = [key.removeprefix("phase_s/") for key in steps[0] if key.startswith("phase_s/")]
    wall = {name: median_ms(f"phase_s/{name}") for name in names}
    rows = [
        (name, f"{wall[name]:.0f}", f"{wall[name] / 1000 / wall_s:.1%}", f"{median_ms(f'phase_cpu_s/{name}'):.0f}")
        for name in sorted(names, key=lambda name: -wall[name])
    ]
    if "driver_s" in steps[0]:
        driver = statistics.median(step["driver_s"] / step["wall_s"] for step in steps)
        rows.append(("driver, queue, reward dispatch, logging", f"{median_ms('driver_s'):.0f}", f"{driver:.1%}", ""))
    return Table(f"verl's time ledger, {dtype}", ("phase", "ms (median)", "of the step", "core-ms"), tuple(rows))


def verdict(arms: Mapping[str, Arm], dtype: str) -> str:
    """The table in a line."""
    if not arms[OURS].rounds:
        return f"{dtype}: verl did not run: {arms[OURS].reason}"
    said = []
    for peer in PEERS:
        if arms[peer].rounds:
            wall, cpu = (ratio(figure, arms[OURS], arms[peer]) for figure in (WALL, CPU))
            said.append(f"{wall.overall:.2f}× {peer}'s speed ({cpu.overall:.2f}× by CPU time)")
        else:
            said.append(f"{peer} {NOT_RUN} ({arms[peer].reason})")
    noise = max(spread_of(arm, OTHERS).median for arm in arms.values() if arm.rounds)
    caution = f". Others used up to {noise:.1f} cores meanwhile: trust the CPU time more" if noise > QUIET_CORES else ""
    equal = [step["equal_rewards_share"] for step in arms[OURS].steps if "equal_rewards_share" in step]
    idle = f"; {statistics.mean(equal):.0%} of its groups have equal rewards, and no backward pass" if equal else ""
    return f"{dtype}: a step of verl takes {spread_of(arms[OURS], WALL).median:.2f} s{idle}: {'; '.join(said)}{caution}"
