"""Every preset of the table on the quickstart's task, from one start checkpoint: does it learn, how fast, in how much
memory.

    python bench/algorithms.py [--seeds 0,1,2] [--steps 25] [--only grpo,ppo] [--threads 2]

Each arm is `verl train recipe=quickstart algorithm.name=NAME` with what the algorithm's card recommends, in a process
of its own. Writes its part of bench/RESULTS.md and runs/bench/algorithms.json; arms that are already there are not
run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from bench.cards import recommended
from bench.environments import why
from bench.report import assemble
from bench.start_checkpoint import Start, ensure_start
from verl.algorithms.presets import PRESETS
from verl.quickstart import make_inputs
from verl.recipes.arithmetic import write_rl
from verl.track.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
EVAL_EVERY = 5
TIMEOUT_S = 900.0
CLEARLY = 0.10  # above the start: four standard errors of 256 problems at 0.2


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    seed: int
    accuracy: dict[int, float]
    """Held-out greedy accuracy after so many steps."""
    sampled: float
    step_s: float
    """Median of rollout + experience + update + publish; evaluations are left out."""
    peak_mb: float
    error: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", default=",".join(n for n, p in PRESETS.items() if "teacher" not in p.roles()))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", action="store_true", help="only write the table again, from what is there")
    asked = parser.parse_args()
    console, folder = Console(), ROOT / "runs" / "bench"
    seeds, names = [int(s) for s in asked.seeds.split(",")], asked.only.split(",")
    unknown = [n for n in names if n not in PRESETS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: not in the table")
    if asked.table:
        write([_arm(a) for a in json.loads((folder / "algorithms.json").read_text())], asked.threads)
        return 0
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    start = ensure_start(folder, env, asked.threads, steps=500)  # the whole warm-up of the quickstart
    held_out = folder / "heldout.jsonl"
    make_inputs(folder / "data_seed", 0)
    write_rl(held_out, 256, seed=3000, held=True, three_digits=True)
    page = folder / "algorithms.json"
    arms = [_arm(a) for a in json.loads(page.read_text())] if page.exists() else []
    for seed in seeds:
        for name in names:
            if any((a.name, a.seed, max(a.accuracy, default=0)) == (name, seed, asked.steps) for a in arms):
                continue
            began = time.monotonic()
            arm = run(name, seed, asked.steps, start, held_out, folder, asked.threads, env)
            arms = [a for a in arms if (a.name, a.seed) != (name, seed)] + [arm]
            page.write_text(json.dumps([asdict(a) for a in arms], indent=1))
            said = arm.error or " ".join(f"{n}:{v:.3f}" for n, v in sorted(arm.accuracy.items()))
            console.print(f"{name} seed {seed}: {said}  ({time.monotonic() - began:.0f} s)", highlight=False)
            write(arms, asked.threads)
    return 1 if any(a.error for a in arms) else 0


def run(
    name: str, seed: int, steps: int, start: Start, held_out: Path, folder: Path, threads: int, env: dict[str, str]
) -> Arm:
    """One training run in a process of its own."""
    root, log = folder / "algorithms" / str(seed), folder / "logs" / f"{name}_{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "verl",
        "train",
        "recipe=quickstart",
        f"model.path={start.model}",
        f"data.train_files=[{start.rows}]",
        f"data.eval_files=[{held_out}]",
        f"run.root_dir={root}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"run.total_steps={steps}",
        f"run.eval_every_steps={EVAL_EVERY}",
        "run.resume=auto",
        f"run.threads={threads}",
        "track.sinks=[jsonl]",
        "model.device=cpu",
        *given(name),
    ]
    with open(log, "wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        deadline = threading.Timer(TIMEOUT_S, child.kill)
        deadline.start()
        _, status, used = os.wait4(child.pid, 0)
        deadline.cancel()
    if os.waitstatus_to_exitcode(status) != 0:
        return Arm(name, seed, {}, 0.0, 0.0, 0.0, why(log.read_text(errors="replace")))
    lines = {line.step: line.values for line in read_metrics(root / name)}
    accuracy = {n: v["eval/acc/greedy"] for n, v in lines.items() if "eval/acc/greedy" in v}
    spent = [
        sum(
            s
            for k, s in v.items()
            if k.startswith("timing_s/") and k.split("/")[1] not in ("evaluate", "checkpoint", "step")
        )
        for n, v in lines.items()
        if n > 1
    ]
    sampled = lines[steps].get("eval/acc/sampled", float("nan"))
    return Arm(name, seed, accuracy, sampled, statistics.median(spent), used.ru_maxrss / 1024)


def write(arms: list[Arm], threads: int) -> None:
    section = ROOT / "bench" / "sections" / "algorithms.md"
    section.parent.mkdir(exist_ok=True)
    section.write_text(document(arms, threads))
    assemble(ROOT / "bench")


def given(name: str) -> list[str]:
    """Return the recommendations of the algorithm's card (bench/cards.py), with paths of this repository."""
    values = {"reward.path": "verl.recipes.arithmetic", **recommended(name)}
    if values["reward.path"].endswith(".py"):
        values["reward.path"] = str(ROOT / values["reward.path"])
    return [f"{k}={v}" for k, v in values.items()]


def document(arms: list[Arm], threads: int) -> str:
    """The page: one line per preset, medians over its seeds."""
    points = sorted({n for a in arms for n in a.accuracy})
    steps = max(points, default=0)
    rows, weak = [], []
    for name in PRESETS:
        mine = [a for a in arms if a.name == name and not a.error]
        if not mine:
            failed = [a for a in arms if a.name == name]
            rows.append(
                f"| {name} | {'failed: ' + failed[0].error if failed else 'not run'} |" + " |" * (len(points) + 4)
            )
            continue
        curve = [_of([a.accuracy[n] for a in mine if n in a.accuracy]) for n in points]
        ends = ", ".join(f"{a.accuracy[steps]:.2f}" for a in mine if steps in a.accuracy)
        peak = max(a.peak_mb for a in mine)
        rows.append(
            f"| {name} | {len(mine)} | " + " | ".join(curve) + f" | {ends} | {_of([a.sampled for a in mine])} | "
            f"{statistics.median(a.step_s for a in mine):.2f} | {peak:,.0f} |"
        )
        gained = [a.accuracy[steps] - a.accuracy[0] for a in mine if steps in a.accuracy]
        if not gained or min(gained) < CLEARLY:
            weak.append(name)
    head = (
        "| preset | seeds | "
        + " | ".join(f"step {n}" for n in points)
        + " | each seed at the end | sampled | step, s | peak MB |"
    )
    rule = "| --- | ---: |" + " ---: |" * (len(points) + 4)
    learned = (
        "Every preset that was run is clearly above its start on every seed."
        if not weak
        else (f"Not clearly (by {CLEARLY:.2f}) above its start on every seed: {', '.join(weak)}.")
    )
    return "\n".join(
        [
            "## Every preset on the quickstart's task",
            "",
            "Command: `python bench/algorithms.py`. Held-out greedy accuracy (256 problems, medians over the",
            f"seeds), {threads} CPU threads, float32 or bfloat16 as the machine has it, 32 prompts x 8 answers per "
            "step, one start",
            "checkpoint for all. Hyper-parameters: recipe=quickstart plus what the card recommends. Peak: of the "
            "whole process.",
            "",
            head,
            rule,
            *rows,
            "",
            learned,
            "ppo, vapo and pf_ppo train only their critic for the first steps, so their policy starts late. gspo, "
            "cispo, sapo, gmpo, kl_cov,",
            "clip_cov and decoupled_ppo make 4 updates per step, without which their ratio is 1 and they are GRPO; "
            "dapo refills its batch.",
            "",
        ]
    )


def _of(values: list[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else ""


def _arm(saved: dict[str, object]) -> Arm:
    return Arm(**{**saved, "accuracy": {int(k): v for k, v in saved["accuracy"].items()}})  # type: ignore[arg-type,attr-defined]


if __name__ == "__main__":
    sys.exit(main())
