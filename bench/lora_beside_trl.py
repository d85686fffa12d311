"""GRPO steps with LoRA beside TRL with PEFT, in the quickstart's workload; a part of bench/lora.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import torch
from rich.console import Console

from bench.environments import Unavailable
from bench.laptop import arm_env, find_programs, read_settings, run_arm, spec_of, try_settings
from bench.limits import precisions
from bench.start_checkpoint import ensure_start
from bench.sweep import best

RANKS = (8, 32)
ROUNDS, STEPS = 2, 3

Steps = Mapping[str, Sequence[Mapping[str, float]]]


def measured_steps() -> Iterator[tuple[str, int, Steps]]:
    """Yield (dtype, rank, the measured steps of verl and of TRL) for each rank in float32, and in bfloat16 on a machine
    that multiplies it; the two in turn. TRL has the threads and the compilation with which a short run was fastest in
    that dtype. Raise Unavailable if TRL cannot be installed, or does not run."""
    console, settings = Console(), read_settings(["--rounds", str(ROUNDS), "--steps", str(STEPS)])
    start = ensure_start(settings.folder, arm_env(settings.threads), settings.threads)
    programs, reasons = find_programs(settings, console)
    if reasons:
        raise Unavailable(reasons["TRL"])
    for dtype in precisions(torch.cpu.get_capabilities()):
        specs = {name: spec_of(settings, start, name, dtype) for name in ("verl", "TRL")}
        tried = try_settings(programs["TRL"], specs["TRL"] | {"lora_rank": RANKS[0]}, settings, "TRL")
        if (chosen := best(tried)) is None:
            raise Unavailable(tried[0].reason)
        console.print(f"{dtype}: TRL at its best: {chosen}", highlight=False)
        specs["TRL"] |= asdict(chosen)
        for rank in RANKS:
            found: dict[str, list[Mapping[str, float]]] = {name: [] for name in specs}
            for _ in range(settings.rounds):
                for name, spec in specs.items():
                    found[name] += run_arm(programs[name], spec | {"lora_rank": rank}, settings, name)["steps"]
            yield dtype, rank, found


def ratio(found: Steps, clock: str) -> float:
    """Return how many times longer the median step of TRL takes by a clock: wall_s or cpu_s."""
    return seconds(found, "TRL", clock) / seconds(found, "verl", clock)


def equal_rewards(found: Steps) -> float:
    """Return the mean share of the groups of verl's steps that have equal rewards."""
    return statistics.mean(step["equal_rewards_share"] for step in found["verl"])


def seconds(found: Steps, name: str, clock: str) -> float:
    """Return the median of the steps of an arm."""
    return statistics.median(step[clock] for step in found[name])
