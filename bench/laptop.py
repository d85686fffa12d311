"""verl beside TRL and a naive loop: step time and tokens/s of the quickstart's workload on this machine's CPU.

    python bench/laptop.py [--quick] [--rounds N] [--steps N] [--threads N] [--without-naive]

The arms run in turn, round by round, on the same prompts and from the same checkpoint. Writes its part of
bench/RESULTS.md (with
--quick runs/bench/RESULTS_quick.md) and runs/bench/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from rich.console import Console

from bench import limits, results
from bench.environments import Environment, Unavailable, ensure, run_logged
from bench.report import as_rich, assemble, document
from bench.start_checkpoint import Start, ensure_start
from bench.sweep import Tried, best, sweep
from bench.sweep import table as sweep_table

ROOT = Path(__file__).resolve().parents[1]
GROUPS, SAMPLES_PER_PROMPT, MAX_RESPONSE_TOKENS = 32, 8, 48
LR = 1e-6  # the policy hardly changes: every step is the same work
ARM_TIMEOUT_S = 600.0
TRL = Environment(
    ROOT / ".venv-bench-trl", ("torch==2.13.0", "trl==1.16.0", "peft==0.21.2"), ROOT / "bench" / "peers_constraints.txt"
)


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int
    steps: int
    """Measured steps per arm and round; one more is run and dropped."""
    threads: int
    folder: Path
    page: Path
    naive: bool = True
    """The naive loop is measured, which takes half of the time."""


@dataclass(slots=True)
class Found:
    """Everything measured, by precision."""

    arms: dict[str, dict[str, results.Arm]] = field(default_factory=dict)
    machines: dict[str, list[limits.Machine]] = field(default_factory=dict)
    tried: dict[str, list[Tried]] = field(default_factory=dict)
    """The peers' settings, by peer and precision: each is measured at its best."""
    loads: list[float] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    settings = read_settings(argv)
    console = Console()
    began_s = time.monotonic()
    env = arm_env(settings.threads)
    console.print(
        f"verl, TRL and a naive loop in turn: {settings.rounds} rounds of {settings.steps} measured steps, "
        f"{settings.threads} threads"
    )
    try:
        start = ensure_start(settings.folder, env, settings.threads)
    except Unavailable as e:
        console.print(f"error: the start checkpoint could not be made: {e}", style="red", highlight=False)
        return 1
    found = measure(settings, start, console)
    shape = limits.read_shape(start.model)
    tables, lines = [], []
    for dtype, arms in found.arms.items():
        tables += tables_of(arms, shape, limits.best(found.machines[dtype]), dtype)
        lines.append(results.verdict(arms, dtype))
    if found.tried:
        tables.append(
            sweep_table("The peers' settings, tried in short runs: each is measured at its best", found.tried)
        )
    for table in tables:
        console.print(as_rich(table), *table.notes, sep="\n", highlight=False)
    for line in lines:
        console.print(line, style="bold", highlight=False)
    about = about_run(settings, found, time.monotonic() - began_s)
    settings.page.parent.mkdir(parents=True, exist_ok=True)
    settings.page.write_text(document(about, lines, tables))
    assemble(ROOT / "bench")
    store(settings.folder / "results.json", about, shape, found)
    console.print(f"{settings.page} and {settings.folder / 'results.json'}; {time.monotonic() - began_s:.0f} s in all")
    return 0 if all(arms[results.OURS].rounds for arms in found.arms.values()) else 1


def measure(settings: Settings, start: Start, console: Console) -> Found:
    """All rounds, in turn: machine, verl, TRL, naive, machine, verl, ..."""
    programs, reasons = find_programs(settings, console)
    if not settings.naive:
        reasons["naive"] = "left out by --without-naive"
    found = Found()
    for dtype in limits.precisions(torch.cpu.get_capabilities()):
        arms = found.arms[dtype] = {name: results.Arm(name, reason=reasons.get(name)) for name in results.ARMS}
        machines = found.machines[dtype] = []
        specs = {name: spec_of(settings, start, name, dtype) for name in arms}
        for name in results.PEERS:
            if arms[name].reason is None:
                tried = found.tried[f"{name}, {dtype}"] = try_settings(programs[name], specs[name], settings, name)
                chosen = best(tried)
                console.print(f"{dtype} {name} at its best: {chosen}", highlight=False)
                if chosen is None:
                    arms[name].reason = tried[0].reason
                else:
                    specs[name] |= asdict(chosen)
        for number in range(1, settings.rounds + 1):
            machines.append(measure_machine(start, dtype, settings.threads))
            for name, arm in arms.items():
                if arm.reason is None:
                    load = os.getloadavg()[0]
                    found.loads.append(load)
                    play(arm, programs[name], specs[name], settings)
                    console.print(
                        f"{dtype} round {number} {name}: {said(arm)}; load before {load:.1f}", highlight=False
                    )
    return found


def read_settings(argv: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round of three steps: a look, not a measurement")
    parser.add_argument("--rounds", type=int, help="3 (with --quick 1)")
    parser.add_argument("--steps", type=int, help="measured steps per arm and round: 5 (with --quick 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every arm; all cores")
    parser.add_argument("--without-naive", action="store_true", help="leave out the naive loop: half of the time")
    given = parser.parse_args(argv)
    rounds = given.rounds if given.rounds is not None else (1 if given.quick else 3)
    steps = given.steps if given.steps is not None else (3 if given.quick else 5)
    for name, value in (("rounds", rounds), ("steps", steps), ("threads", given.threads)):
        if value < 1:
            parser.error(f"--{name}={value}: must be at least 1")
    folder = ROOT / "runs" / "bench"
    page = folder / "RESULTS_quick.md" if given.quick else ROOT / "bench" / "sections" / "laptop.md"
    return Settings(rounds, steps, given.threads, folder, page, naive=not given.without_naive)


def arm_env(threads: int) -> dict[str, str]:
    """The same for every arm: CPU only, no network, threads that do not spin while they wait."""
    return {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def find_programs(settings: Settings, console: Console) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The command of each arm, and why an arm has none."""
    peers = ROOT / "bench" / "peers"
    programs = {
        "verl": [sys.executable, str(ROOT / "bench" / "verl_arm.py")],
        "naive": [sys.executable, str(peers / "naive_grpo.py")],
    }
    try:
        if not TRL.python.exists():
            console.print(f"installing {' '.join(TRL.requirements)} into {TRL.folder.name} (once, about two minutes)")
        programs["TRL"] = [str(ensure(TRL, settings.folder / "logs" / "install_trl.log")), str(peers / "trl_grpo.py")]
    except Unavailable as e:
        console.print(f"TRL: {results.NOT_RUN}: {e}", style="red", highlight=False)
        return programs, {"TRL": str(e)}
    return programs, {}


def spec_of(settings: Settings, start: Start, arm: str, dtype: str) -> dict[str, Any]:
    return {
        "model": str(start.model),
        "rows": str(start.rows),
        "threads": settings.threads,
        "compiled": False,
        "lr": LR,
        "dtype": dtype,
        "prompts_per_step": GROUPS,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
        "steps": settings.steps + 1,
        "folder": str(settings.folder / "arms" / arm),
    }


def try_settings(program: list[str], spec: dict[str, Any], settings: Settings, name: str) -> list[Tried]:
    """A peer's short runs, of two measured steps each."""
    return sweep(settings.threads, {**spec, "steps": 3}, lambda one: run_arm(program, one, settings, name)["steps"])


def run_arm(program: list[str], spec: dict[str, Any], settings: Settings, name: str) -> dict[str, Any]:
    """One process of an arm: what it wrote."""
    folder = Path(spec["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given, result = folder / "spec.json", folder / "result.json"
    given.write_text(json.dumps(spec, indent=1))
    log, env = settings.folder / "logs" / f"{name}.log", arm_env(spec["threads"])
    run_logged([*program, str(given), str(result)], log, timeout_s=ARM_TIMEOUT_S, env=env)
    return json.loads(result.read_text())


def play(arm: results.Arm, program: list[str], spec: dict[str, Any], settings: Settings) -> None:
    """One round of one arm in a process of its own. A failure ends the arm, with its reason."""
    try:
        arm.rounds.append(run_arm(program, spec, settings, arm.name))
    except Unavailable as e:
        arm.reason = str(e)


def said(arm: results.Arm) -> str:
    if arm.reason is not None:
        return f"{results.NOT_RUN}: {arm.reason}"
    last = results.Arm(arm.name, arm.rounds[-1:])
    return f"{results.spread_of(last, results.WALL).text(2)} s per step, {results.spread_of(last, results.CPU).text(2)} core-s"


def measure_machine(start: Start, dtype: str, threads: int) -> limits.Machine:
    config = json.loads((start.model / "config.json").read_text())
    return limits.measure(
        dtype,
        threads=threads,
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        rows=GROUPS * SAMPLES_PER_PROMPT * MAX_RESPONSE_TOKENS // 2,
    )


def tables_of(
    arms: Mapping[str, results.Arm], shape: limits.Shape, machine: limits.Machine, dtype: str
) -> list[results.Table]:
    ran = [arm for arm in arms.values() if arm.rounds]
    if not ran:
        return [results.comparison(arms, dtype)]
    limit = limits.part_limits(shape, work_of(ran[0].steps), machine, dtype)
    tables = [results.comparison(arms, dtype), results.multiples(arms, limit, machine, dtype)]
    return [*tables, results.ledger(arms[results.OURS], dtype)] if arms[results.OURS].rounds else tables


def work_of(steps: Sequence[Mapping[str, float]]) -> limits.Work:
    """The mean step's."""
    rows = GROUPS * SAMPLES_PER_PROMPT

    def mean(name: str) -> float:
        return sum(step[name] for step in steps) / len(steps)

    return limits.Work(
        GROUPS,
        SAMPLES_PER_PROMPT,
        mean("prompt_tokens") / rows,
        mean("response_tokens") / rows,
        mean("longest_response_tokens"),
    )


def about_run(settings: Settings, found: Found, seconds: float) -> dict[str, str]:
    """Return the facts with which the figures can be judged or repeated."""
    versions = {
        f"{name} arm": ", ".join(f"{k} {v}" for k, v in arm.rounds[-1]["versions"].items())
        for arms in found.arms.values()
        for name, arm in arms.items()
        if arm.rounds
    }
    capabilities, loads = torch.cpu.get_capabilities(), found.loads
    bf16 = "native" if limits.has_native_bf16(capabilities) else "emulated, so every arm ran in float32 only"
    return {
        "command": " ".join(["python", "bench/laptop.py", *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()) + f", {seconds:.0f} s in all",
        "machine": f"{cpu_name(capabilities)}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()} "
        f"{platform.machine()}; bf16 is {bf16}",
        "load": f"1-minute load average before an arm: {min(loads):.1f} to {max(loads):.1f}"
        if loads
        else "nothing was run",
        "workload": f"{GROUPS} prompts x {SAMPLES_PER_PROMPT} answers, at most {MAX_RESPONSE_TOKENS} new tokens, temperature 1, one update, lr {LR:g}; "
        f"{settings.rounds} rounds x {settings.steps} measured steps per arm, {settings.threads} threads (the peers: as their sweep found best)",
        "python": platform.python_version(),
        **versions,
    }


def cpu_name(capabilities: Mapping[str, Any]) -> str:
    """Return the name that Linux reports, else torch's, else the architecture."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return (names or [capabilities.get("cpu_name") or platform.processor() or platform.machine()])[0]


def store(path: Path, about: Mapping[str, str], shape: limits.Shape, found: Found) -> None:
    """Every measured step."""
    path.write_text(json.dumps({"about": about, "shape": asdict(shape), **asdict(found)}, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
