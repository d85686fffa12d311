"""This checkout beside another commit of this project, in one run: quickstart steps, ragged rollouts and steps, peak
memory.

    python bench/against.py COMMIT [--rounds N] [--parts quickstart rollout step memory]

The other commit is checked out into runs/bench/against. Both arms run in turn, each in a process of its own with its
own code and its own bench programs, on the same models, rows and lengths. Writes its part of bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from bench.environments import run_logged
from bench.laptop import ROOT, arm_env, read_settings, spec_of
from bench.ragged import Bench, rollouts_of
from bench.report import write_section
from bench.results import Table
from bench.start_checkpoint import ensure_start
from bench.workloads import make_inputs

THREADS, STEPS = 2, 5
SIZE = "10M"
OLD_KEYS = {"model.engine_options.": "model.", "rollout.engine_options.": "rollout."}
Measure = Callable[[Mapping[str, float]], float]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["quickstart", "rollout", "step", "memory"])
    given = parser.parse_args(argv)
    console, folder = Console(), ROOT / "runs" / "bench"
    trees = {"old": checkout(given.commit, folder / "against"), "new": ROOT}
    page = folder / "against.json"
    found: dict[str, Any] = json.loads(page.read_text()) if page.exists() else {}
    for part in given.parts:
        program, spec, kind = specs(folder)[part]()
        runs: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
        for number in range(given.rounds):
            for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
                steps = play(part, name, trees[name], program, spec, kind, folder)
                runs[name] += steps
                said = " ".join(f"{s['wall_s']:.2f}" for s in steps)
                console.print(f"{part} {number + 1} {name}: {said} s; load {os.getloadavg()[0]:.1f}", highlight=False)
        found[part] = runs
        page.write_text(json.dumps(found, indent=1))
    write_section("against", document(given.commit, found))
    return 0


def checkout(commit: str, folder: Path) -> Path:
    git = ["git", "-C", str(ROOT)]
    if folder.exists():
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([*git, "worktree", "add", "--detach", str(folder), commit], check=True, capture_output=True)
    return folder


def specs(folder: Path) -> dict[str, Callable[[], tuple[str, dict[str, Any], str]]]:
    """part -> (bench program, what it is given, where its result has the repetitions)."""
    bench = Bench(1, THREADS, Console(quiet=True), STEPS)

    def quickstart() -> tuple[str, dict[str, Any], str]:
        settings = read_settings(["--rounds", "1", "--steps", str(STEPS), "--threads", str(THREADS)])
        return (
            "verl_arm.py",
            spec_of(settings, ensure_start(folder, arm_env(THREADS), THREADS), "verl", "float32"),
            "steps",
        )

    def rollout() -> tuple[str, dict[str, Any], str]:
        inputs, rollouts = make_inputs(folder, f"ragged-{SIZE}", STEPS + 1), rollouts_of(f"ragged-{SIZE}", STEPS + 1)
        common = {"threads": THREADS, "dtype": "float32", "max_context_tokens": 512, "temperature": 1.0}
        return "rollout_arm.py", {"model": str(inputs.model), **common, "rollouts": rollouts}, "rollouts"

    def step() -> tuple[str, dict[str, Any], str]:
        return "verl_arm.py", bench._spec(f"ragged-{SIZE}", "verl"), "steps"

    def memory() -> tuple[str, dict[str, Any], str]:
        return "verl_arm.py", {**bench._spec(f"ragged-{SIZE}", "verl"), "steps": 2, "count_bytes": True}, "steps"

    return {"quickstart": quickstart, "rollout": rollout, "step": step, "memory": memory}


def play(
    part: str, name: str, tree: Path, program: str, spec: dict[str, Any], kind: str, folder: Path
) -> list[dict[str, float]]:
    """One round of one arm: its repetitions."""
    place = folder / "arms" / f"against-{part}-{name}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    given, result = place / "spec.json", place / "result.json"
    overrides = spec.get("overrides", [])
    if name == "old":
        for new, old in OLD_KEYS.items():
            overrides = [o.replace(new, old) for o in overrides]
    older = {"draft_tokens": 0} if name == "old" else {}
    given.write_text(json.dumps({**spec, **older, "folder": str(place), "overrides": overrides}))
    env = {**arm_env(THREADS), "PYTHONPATH": str(tree)}
    command = [sys.executable, str(tree / "bench" / program), str(given), str(result)]
    run_logged(command, folder / "logs" / f"against-{part}.log", timeout_s=900.0, env=env)
    found = json.loads(result.read_text())
    return [dict(s, peak_rss_mb=found.get("peak_rss_mb", 0.0)) for s in found[kind]]


MEASURES: Mapping[str, Sequence[tuple[str, Measure]]] = {
    "quickstart": (
        ("step, s", lambda s: s["wall_s"]),
        ("step, core-s", lambda s: s["cpu_s"]),
        ("rollout, s", lambda s: s["rollout_s"]),
        ("update, s", lambda s: s["update_s"]),
        ("driver, % of the step", lambda s: 100 * s["driver_s"] / s["wall_s"]),
    ),
    "rollout": (("64 answers, s", lambda s: s["wall_s"]), ("64 answers, core-s", lambda s: s["cpu_s"])),
    "step": (
        ("step, s", lambda s: s["wall_s"]),
        ("step, core-s", lambda s: s["cpu_s"]),
        ("rollout, s", lambda s: s["rollout_s"]),
        ("update, s", lambda s: s["update_s"]),
    ),
    "memory": (("peak tensor MB of the update", lambda s: s["peak_tensor_mb"]),),
}


def document(commit: str, found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> str:
    lines = [
        f"## This code against {commit}",
        f"Command: `python bench/against.py {commit}`, {THREADS} threads, float32; both in turn in one run. Medians "
        "over "
        "all repetitions (their number in brackets); the ratio is that of the medians.",
    ]
    for part, runs in found.items():
        rows = []
        for label, measure in MEASURES[part]:
            old, new = ([measure(s) for s in runs[name]] for name in ("old", "new"))
            a, b = statistics.median(old), statistics.median(new)
            ratio = f"{b / a:.3f}" if a else ""
            rows.append((label, f"{a:.3f} ({len(old)})", f"{b:.3f} ({len(new)})", ratio))
        title = f"{part}, {SIZE} parameters, ragged" if part != "quickstart" else part
        lines.append(Table(title, ("", commit, "this code", "new / old"), tuple(rows), ()).markdown())
    return "\n\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
