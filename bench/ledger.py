"""The simulator beside the time ledgers of real runs.

    python bench/ledger.py [--record]

Small runs of GRPO, each in one process and one thread, with answers of given lengths. They take turns, a step each,
so that a machine that is slower in some minutes serves all of them alike. The decode step and the seconds of each
phase are learned from the ledger of the first run; those of the others, with other groups, answers and batches, are
predicted by the simulated run and compared with their ledgers, in CPU seconds. With --record it writes
bench/records/planner/ledger.json, its part of bench/RESULTS.md and its line in docs/planning.md; without, it compares
what the record has.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[at]) for at in (1, 0))

from bench.calibration import MACHINE as NOMINAL
from bench.plan_runs import Shape, arguments_of
from bench.report import write_section
from bench.results import Table
from verl.config.load import load_config
from verl.config.schema import Config
from verl.planner.beside import PHASES, seconds_at
from verl.planner.hardware import Nodes
from verl.planner.simulate import lognormal
from verl.planner.what_if import decoding_of, simulated_run, workload_of

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "records" / "planner" / "ledger.json"
PAGE = ROOT / "docs" / "planning.md"
STEPS, WARM = 24, 4
"""The steps of a run, and the first of them, which do not count: kernels are compiled in them and memory grows to its
size, which no later step does."""
SIGMA, ALTERNATING = 0.6, (0.1, 1.0)
"""The spread of the lengths of answers; in the first run it alternates, so that decode steps and tokens differ."""
REFERENCE = ("algorithm.kl_loss_coef=0.01",)
"""A frozen reference is a phase of its own."""
SHAPES: Mapping[str, tuple[Shape, int]] = {
    "learned from": (Shape(4, 256, 8, 4, 24, 256, more=REFERENCE), 96),
    "groups of 8": (Shape(4, 256, 8, 8, 24, 256, more=REFERENCE), 96),
    "answers twice as long": (Shape(4, 256, 8, 4, 24, 512, more=REFERENCE), 192),
    "16 prompts, 2 updates": (Shape(4, 256, 16, 4, 24, 256, 2, more=REFERENCE), 96),
}
"""Name of a run -> its sizes, and the mean of its log-normal answers."""
STEP_WITHIN, PHASE_WITHIN = 0.10, 0.15
SMALL = 0.02
"""A stage with less than this share of a step is not compared."""
CPU, TURN, END_S = "bench_cpu_s/", "turn", 300.0
"""The prefix of a phase's CPU seconds, the line that ends a step, and the longest wait for the end of a run."""
MACHINE = Nodes(device=NOMINAL, nodes=1, devices_per_node=1, network_gbs=5)


def lengths_of(name: str) -> list[list[int]]:
    """Return the tokens of each answer of each step of a run."""
    shape, mean = SHAPES[name]
    drawn, spreads = random.Random(name), ALTERNATING if name == next(iter(SHAPES)) else (SIGMA,)
    each = [lognormal(mean, spreads[step % len(spreads)], shape.answer_tokens) for step in range(STEPS)]
    return [[lengths(drawn) for _ in range(shape.prompts * shape.samples)] for lengths in each]


def measure(name: str, folder: Path) -> None:
    """Run the steps of a run, and write the CPU seconds of the phases of each. After each step it prints a line, and
    waits for one before the next."""
    import torch

    import verl.driver.run
    from bench.verl_arm import force_lengths, step_of
    from verl.driver.launch import run_rl

    torch.set_num_threads(1)
    verl.driver.run.Step = step_of  # type: ignore[assignment, misc]
    force_lengths(lengths_of(name))
    steps = list[dict[str, float]]()

    def on_step(number: int, values: Mapping[str, float]) -> None:
        if CPU + "rollout" in values:
            steps.append(phases_of(values))
            print(TURN, flush=True)
            sys.stdin.readline()

    with tempfile.TemporaryDirectory() as made:
        args = arguments_of(SHAPES[name][0], Path(made), STEPS)
        run_rl(load_config(args), on_step=on_step, quiet=True)
    (folder / f"{name}.json").write_text(json.dumps(steps))


def take_turns(folder: Path) -> None:
    """Run all runs, of which one at a time makes a step.

    Raises:
        CalledProcessError: a run failed.
    """
    command = [sys.executable, __file__, "one"]
    each = list[subprocess.Popen[str]]()
    try:
        for turn in range(STEPS):
            for at, name in enumerate(SHAPES):
                if turn == 0:
                    started = [*command, name, str(folder)]
                    each.append(subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
                else:
                    print(file=each[at].stdin, flush=True)
                if not any(line.strip() == TURN for line in each[at].stdout or ()):
                    raise subprocess.CalledProcessError(each[at].wait(), [*command, name])
        for one in each:
            one.communicate(timeout=END_S)
            if one.returncode:
                raise subprocess.CalledProcessError(one.returncode, one.args)
    finally:
        for one in each:
            one.kill()


def phases_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return the CPU seconds of a step by stage; phases of no stage are its rest, without what only the last step
    has."""
    ledger = {name.removeprefix(CPU): s for name, s in values.items() if name.startswith(CPU)}
    stages = {**PHASES, "publish": ("publish",)}
    out = {stage: sum(ledger.pop(name, 0.0) for name in names) for stage, names in stages.items()}
    return out | {"rest": sum(s for name, s in ledger.items() if name not in ("evaluate", "checkpoint"))}


def predicted(records: Mapping[str, Any], name: str, folder: Path) -> list[dict[str, float]] | None:
    """Return the predicted seconds of a run's steps by stage, of the ledger of the first run and its own lengths. None
    if the first run does not determine its decode step."""
    first = next(iter(SHAPES))
    (known, at_first), (config, at) = (_planned(one, folder / one) for one in (first, name))
    ledger = counted(records[first])
    rollouts = zip((step["rollout"] for step in ledger), counted(lengths_of(first)))
    decoding = decoding_of(list(rollouts), known.rollout.max_concurrent_sequences)
    if decoding is None:
        return None
    seconds = {stage: statistics.median(step[stage] for step in ledger) for stage in ledger[0]}
    seconds |= {stage: seconds[stage] * at[stage] / at_first[stage] for stage in ("experience", "update")}
    seconds["rest"] *= len(lengths_of(name)[0]) / len(lengths_of(first)[0])
    times = {
        "token_s": decoding.base_s,
        "sequence_s": decoding.sequence_s,
        "update_s": seconds["experience"] + seconds["update"] + seconds["rest"],
        "publish_s": seconds["publish"],
    }
    each = iter([tokens for step in lengths_of(name) for tokens in step])
    run = simulated_run(config, workload_of(config, times, lambda drawn: next(each, 1)), STEPS)
    waits = [end_s - start_s for part, start_s, end_s in run.spans if part == "wait"]
    return counted([{**seconds, "rollout": wait_s} for wait_s in waits[:STEPS]])


def counted(steps: Sequence[Any]) -> list[Any]:
    """Return the steps of the steady state: without the first `WARM`, and without the last, which saves."""
    return list(steps[WARM:-1])


def _planned(name: str, folder: Path) -> tuple[Config, Mapping[str, float]]:
    """Return the configuration of a run, and the seconds of its stages at nominal rates."""
    (shape, _), lengths = SHAPES[name], lengths_of(name)
    config = load_config(arguments_of(shape, folder, STEPS)).config
    mean = statistics.mean(tokens for step in lengths for tokens in step)
    return config, seconds_at(config, shape.prompt_tokens, mean, MACHINE)


def errors_of(records: Mapping[str, Any], name: str, folder: Path) -> dict[str, tuple[float, float, float]]:
    """Return (predicted, measured, error) of a step of a run and of each stage: medians over its steps, and the median
    of the relative errors. None of them if the first run does not determine its decode step."""
    if (found := predicted(records, name, folder)) is None:
        return {}
    pairs = list(zip(found, counted(records[name]), strict=True))

    def of(seconds: Callable[[Mapping[str, float]], float]) -> tuple[float, float, float]:
        both = [(seconds(one), seconds(other)) for one, other in pairs]
        ours, theirs, error = (statistics.median(x) for x in zip(*((a, b, a / b - 1) for a, b in both)))
        return ours, theirs, error

    step = of(lambda one: sum(one.values()))
    stages = {stage: of(lambda one, stage=stage: one[stage]) for stage in pairs[0][0]}  # type: ignore[misc]
    return {"step": step, **{stage: found for stage, found in stages.items() if found[1] >= SMALL * step[1]}}


TITLE = "CPU seconds of a step, one thread, float32"
HEAD = ("run", "", "predicted, s", "measured, s", "error")


def compared(records: Mapping[str, Any], folder: Path) -> tuple[Table, str]:
    """Return the table of the predicted runs, and a sentence about it."""
    cells, steps, stages = list[tuple[str, ...]](), list[float](), list[float]()
    for name in list(SHAPES)[1:]:
        for stage, (ours, theirs, error) in errors_of(records, name, folder).items():
            cells.append((name, stage, f"{ours:.3g}", f"{theirs:.3g}", f"{error:+.0%}"))
            (steps if stage == "step" else stages).append(abs(error))
    if not steps:
        undetermined = [(name, "step", *["not determined"] * 3) for name in list(SHAPES)[1:]]
        return Table(TITLE, HEAD, tuple(undetermined)), "The first run does not determine its decode step."
    within = sum(error <= PHASE_WITHIN for error in stages)
    about = (
        f"The seconds of a step are off by {max(steps):.0%} at most, and {within} of {len(stages)} phases are within "
        f"{PHASE_WITHIN:.0%} (at most {max(stages):.0%})."
    )
    return Table(TITLE, HEAD, tuple(cells)), about


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["one"]:
        measure(argv[1], Path(argv[2]))
        return 0
    records = json.loads(RECORD.read_text()) if "--record" not in argv else {}
    with tempfile.TemporaryDirectory() as made:
        if not records:
            take_turns(Path(made))
            records = {name: json.loads((Path(made) / f"{name}.json").read_text()) for name in SHAPES}
        table, line = compared(records, Path(made))
    about = (
        f"Command: `python bench/ledger.py --record`: {len(SHAPES)} runs of {STEPS} steps in turns, of which the "
        f"first {WARM} and the last do not count, with answers of given log-normal lengths. The decode step and "
        "the seconds of each phase are learned from the first one's time ledger, and scaled by the planner's "
        f"work; the others are simulated. {line}"
    )
    print(table.markdown(), about, sep="\n\n")
    if "--record" in argv:
        RECORD.write_text(json.dumps(records, indent=1) + "\n")
        write_section("ledger", "## Simulated steps beside the time ledgers of runs", about, table.markdown())
        lines = PAGE.read_text().splitlines()
        at = next(i for i, text in enumerate(lines) if text.startswith(STARTS))
        PAGE.write_text("\n".join([*lines[:at], f"{STARTS}{line}", *lines[at + 1 :]]) + "\n")
    return 0


STARTS = "`python bench/ledger.py` compares simulated steps with the time ledgers of runs. "
"""The line of docs/planning.md that is written here."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
