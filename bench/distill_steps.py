"""Whole steps of a distillation: beside TRL's two trainers, and beside the same steps without a teacher.

python bench/distill_steps.py [--rounds 3] [--steps 3] [--only overlapped|trl|trl_groups|trl_ragged|in_turn]
python bench/distill_steps.py --quick    a look of a few minutes: printed, not written
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console

from bench import results
from bench.environments import Unavailable, ensure
from bench.laptop import ROOT, TRL, Settings, arm_env, play, run_arm, said
from bench.report import assemble
from bench.results import CPU, WALL, Arm, Figure, Table, ratio, spread_of
from bench.start_checkpoint import Start, ensure_start
from bench.sweep import Tried, best, sweep
from bench.sweep import table as sweep_table

RESPONSE, LR, BETA = 48, 1e-6, 0.5
TRAINERS = ("GKDTrainer", "DistillationTrainer")
MEMORY = Figure("peak memory, MB", 0, of_round=lambda r: r["peak_rss_mb"])
FIGURES = (
    WALL,
    CPU,
    Figure("rollout, s", 2, lambda s: s["rollout_s"]),
    MEMORY,
    Figure("response tokens per step", 0, lambda s: s["response_tokens"], compared=False),
    results.OTHERS,
)
TAUGHT = ("opd", "gkd_topk", "gkd")
AT_MOST = 1.35  # of a step without a teacher
PARTS = ("overlapped", "trl", "trl_groups", "trl_ragged", "in_turn")
NULLS = ("algorithm.kl_loss_coef=null", "algorithm.aggregation=null")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step. lengths: of answers, forced: mean of an exponential distribution, least and most; without
    them an answer ends where the model ends it · passes: into so many TRL's trainers may cut a step."""

    prompts: int
    answers: int
    said: str
    lengths: tuple[int, int, int] | None = None
    passes: tuple[int, ...] = (1,)

    def drawn(self, steps: int) -> list[list[int]]:
        """[steps, rows] tokens of the answers."""
        assert self.lengths is not None, "nothing is forced"
        mean, least, most = self.lengths
        wanted = np.random.default_rng(0).exponential(mean, (steps, self.prompts * self.answers))
        return np.clip(wanted, least, most).astype(int).tolist()


BESIDE_TRL = {
    "trl": Rows(256, 1, "256 prompts, one answer each, at most 48 tokens"),
    "trl_groups": Rows(32, 8, "32 prompts x 8 answers, at most 48 tokens"),
    "trl_ragged": Rows(8, 8, "8 prompts x 8 ragged answers of 8 to 384 tokens", (96, 8, 384), (1, 4)),
}


def taught(name: str, start: Start) -> list[str]:
    """A teacher of the student's size, with other weights: a divergence of 0 would have no gradient to compute."""
    more = ["teacher.top_k=8"] if name == "gkd_topk" else []
    return [f"algorithm.name={name}", *NULLS, f"teacher.path={teacher_of(start)}", *more]


def teacher_of(start: Start) -> Path:
    return start.rows.parents[1] / "base"


def spec_of(start: Start, settings: Settings, name: str, rows: Rows, more: Sequence[str]) -> dict[str, Any]:
    lengths = None
    if rows.lengths is not None:
        lengths = settings.folder / f"distill_lengths_{rows.prompts}x{rows.answers}.json"
        lengths.write_text(json.dumps(rows.drawn(settings.steps + 2)))
    return {
        "model": str(start.model),
        "teacher": str(teacher_of(start)),
        "rows": str(start.rows),
        "threads": settings.threads,
        "compiled": False,
        "lr": LR,
        "beta": BETA,
        "dtype": "float32",
        "prompts_per_step": rows.prompts,
        "samples_per_prompt": rows.answers,
        "max_response_tokens": RESPONSE if rows.lengths is None else rows.lengths[2],
        "lengths": lengths and str(lengths),
        "micro_batches": 1,
        "steps": settings.steps + 1,
        "folder": str(settings.folder / "arms" / f"distill-{name}"),
        "overrides": list(more),
    }


def in_turn(
    arms: Mapping[str, Arm], programs: Mapping[str, list[str]], specs: Mapping[str, Any], settings: Settings, c: Console
) -> None:
    for number in range(1, settings.rounds + 1):
        for name, arm in arms.items():
            if arm.reason is None:
                play(arm, programs[name], specs[name], settings)
                c.print(f"round {number} {name}: {said(arm)}; load {os.getloadavg()[0]:.1f}", highlight=False)


def beside_trl(start: Start, settings: Settings, console: Console, rows: Rows) -> list[Table]:
    """The whole distribution of the teacher, both models alike in every arm."""
    arms = {name: Arm(name) for name in (results.OURS, *TRAINERS)}
    specs: dict[str, Any] = {
        name: spec_of(start, settings, name, rows, [*taught("gkd", start), f"algorithm.options.beta={BETA}"])
        for name in arms
    }
    programs = {results.OURS: [sys.executable, str(ROOT / "bench" / "verl_arm.py")]}
    tried: dict[str, list[Tried]] = {}
    for name in TRAINERS:
        specs[name]["trainer"] = name
        try:
            python = ensure(TRL, settings.folder / "logs" / "install_trl.log")
        except Unavailable as e:
            arms[name].reason = str(e)
            continue
        programs[name] = [str(python), str(ROOT / "bench" / "peers" / "trl_distill.py")]
        fastest = []
        for passes in rows.passes:
            spec = {**specs[name], "micro_batches": passes}
            found = tried[f"{name}, {passes} pass{'es' * (passes > 1)}"] = try_eager(
                programs[name], spec, settings, name
            )
            if chosen := best(found):
                ran = min(one.wall_s for one in found if one.wall_s is not None)
                fastest.append((ran, passes, chosen))
        if fastest:
            _, passes, chosen = min(fastest, key=lambda one: one[0])
            console.print(f"{name} at its best: {passes} passes, {chosen}", highlight=False)
            specs[name] |= {**asdict(chosen), "micro_batches": passes}
        else:
            arms[name].reason = next(iter(tried.values()))[0].reason
    in_turn(arms, programs, specs, settings, console)
    return [
        compared(arms, f"a step of on-policy distillation beside TRL's trainers: {rows.said}"),
        sweep_table(f"Settings of TRL's trainers, tried in short runs: {rows.said}", tried),
    ]


def try_eager(program: list[str], spec: dict[str, Any], settings: Settings, name: str) -> list[Tried]:
    """Short runs of a measured step. Not compiled: answers of other lengths are compiled anew at every step."""

    def run(one: dict[str, Any]) -> list[dict[str, float]]:
        return run_arm(program, one, settings, f"distill-{name}")["steps"]

    return sweep(settings.threads, {**spec, "steps": 2}, run, compiled=(False,))


def compared(arms: Mapping[str, Arm], title: str) -> Table:
    rows = []
    ours = arms[results.OURS]
    for figure in FIGURES:
        cells = [spread_of(a, figure).text(figure.digits) if a.rounds else results.NOT_RUN for a in arms.values()]
        for name in TRAINERS:
            both = ours.rounds and arms[name].rounds and figure.compared
            cells.append(ratio(figure, ours, arms[name]).text() if both else "")
        rows.append((figure.label, *cells))
    head = ("median [quartiles]", "verl gkd", *TRAINERS, *(f"verl vs {name} [by round]" for name in TRAINERS))
    notes = tuple(f"{arm.name}: {results.NOT_RUN}: {arm.reason}" for arm in arms.values() if arm.reason)
    return Table(title, head, tuple(rows), notes)


def beside_none(start: Start, settings: Settings, console: Console, overlapped: bool) -> Table:
    """The quickstart's GRPO, and the same rows with a teacher. overlapped: the next answers are drawn meanwhile."""
    more = ["pipeline.staleness=1"] if overlapped else []
    label = "answers drawn beside it (pipeline.staleness=1)" if overlapped else "one after the other"
    arms = {name: Arm(name) for name in ("grpo", *TAUGHT)}
    specs = {
        name: spec_of(
            start, settings, name, BESIDE_TRL["trl_groups"], [*more, *([] if name == "grpo" else taught(name, start))]
        )
        for name in arms
    }
    program = [sys.executable, str(ROOT / "bench" / "verl_arm.py")]
    in_turn(arms, dict.fromkeys(arms, program), specs, settings, console)
    return Table(
        f"a teacher of the student's size: {label}",
        ("", "step, s", "× without [by round]", "step, core-s", "× without [by round]", "at most", "peak MB"),
        tuple(against(arm, arms["grpo"]) for arm in arms.values()),
        tuple(f"{arm.name}: {results.NOT_RUN}: {arm.reason}" for arm in arms.values() if arm.reason),
    )


def against(arm: Arm, without: Arm) -> tuple[str, ...]:
    """A row: times and what they are of the arm without a teacher."""
    if not arm.rounds or not without.rounds:
        return (arm.name, *[results.NOT_RUN] * 6)
    cells = []
    for figure in (WALL, CPU):
        of = [statistics.median(figure.values(r)) for r in arm.rounds]
        base = [statistics.median(figure.values(r)) for r in without.rounds]
        by_round = [a / b for a, b in zip(of, base)]
        overall = spread_of(arm, figure).median / spread_of(without, figure).median
        cells += [spread_of(arm, figure).text(2), f"{overall:.2f} [{min(by_round):.2f}–{max(by_round):.2f}]"]
    return (arm.name, *cells, "-" if arm is without else f"{AT_MOST:g}", spread_of(arm, MEMORY).text(0))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=PARTS, help="one part; the others stay as they were measured")
    given = parser.parse_args(argv)
    folder, console, threads = ROOT / "runs" / "bench", Console(), os.cpu_count() or 1
    rounds = given.rounds or (1 if given.quick else 3)
    settings = Settings(rounds, given.steps, threads, folder, ROOT / "bench" / "sections" / "distill_steps.md")
    load, start = os.getloadavg()[0], ensure_start(folder, arm_env(threads), threads)
    about = (
        f"Command: `{' '.join(['python', 'bench/distill_steps.py', *argv])}`. The quickstart's student, float32, "
        f"{threads} threads, and a teacher of its size with other weights; at most {RESPONSE} new tokens. The arms run "
        f"in turn, {rounds} rounds of {given.steps} steps after one that is dropped; 1-minute load {load:.1f} at the "
        "start of this command; parts that it left out are as an earlier one measured them: where others took cores, "
        "trust the CPU time. Without a teacher is GRPO of 32 prompts x 8 answers; opd, "
        "gkd_topk (8 tokens) and gkd are taught on as many rows, and the teacher's own pass is in them. Beside TRL: "
        f"the same prompts in the same order, the whole distribution at beta {BETA:g}; TRL without gradient "
        "checkpointing, lmbda 1, a prompt as many times as it has answers, at the best of the settings below."
    )
    measure: Mapping[str, Callable[[], list[Table]]] = {
        "overlapped": lambda: [beside_none(start, settings, console, True)],
        **{name: partial(beside_trl, start, settings, console, rows) for name, rows in BESIDE_TRL.items()},
        "in_turn": lambda: [beside_none(start, settings, console, False)],
    }
    kept, page = dict[str, list[str]](), folder / "distill_steps.json"
    if given.only and page.exists():
        kept = json.loads(page.read_text())
    for part in [given.only] if given.only else PARTS:
        kept[part] = [made.markdown() for made in measure[part]()]
        print(*kept[part], sep="\n\n")
        if not given.quick:  # what is measured is kept, whatever happens later
            page.write_text(json.dumps(kept))
            texts = [text for name in PARTS for text in kept.get(name, [])]
            settings.page.write_text("\n\n".join(["## Distillation, whole steps", about, *texts]) + "\n")
            assemble(ROOT / "bench")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
