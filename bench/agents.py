"""The cost of agents beside the model: runs in the sandbox, turns of the tool loop, slow tools, branches, search.

    python bench/agents.py [--only sandbox|turns|waiting|tools|branches|search|recipe] [--runs N] [--passages N]

sandbox: one-shot programs, one after the other and from 4 threads, and cells of one session, on each tier · turns: what
the tool loop itself takes for a turn (parse, call, render) after histories of unlike length, with a model that answers
at once, in the driver's process and beside it, and what of it each further turn takes · waiting: 2,000 trajectories
that wait for tools, likewise · tools: 64 trajectories of 8 turns with a model and a slow tool, in verl, beside the
driver, and in TRL (bench/slow_tools.py) · branches: the update of a trajectory that was cut (bench/branches.py) ·
search: queries of six words over made passages of forty, words drawn as often as in texts (the k-th of 200,000 with
1/k), from an index on disk · recipe: `tool_arithmetic` from nothing to its end. Writes its part of bench/RESULTS.md
(bench/sections/agents.md); with `--only` the other parts stay as they were measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil
import uvloop
from tools import hermes_tokenizer

from bench import branches, slow_tools
from bench.agent_loops import BESIDE, HERE, LONG_S, TICK_S, Says, opened, play, prompt_of
from bench.laptop import Settings
from bench.report import assemble
from bench.results import Spread, Table
from verl.driver.launch import GC_THRESHOLD
from verl.sandbox.code import TIERS, CodeSandbox
from verl.tools import bm25

ROOT = Path(__file__).resolve().parents[1]
WORDS = 200_000
THREADS, TURNS = 4, 8
CROWD, BEGUN_S, WATCHED_S = 2_000, 5.0, 15.0
UPDATES = 7
HISTORIES = (1_000, 4_000, 16_000, 64_000)


def sandbox(runs: int) -> Table:
    rows: list[tuple[str, ...]] = []
    for tier in TIERS:
        try:
            made = CodeSandbox(tier)
        except ValueError as e:
            rows.append((tier, f"not run: {e}", "", "", ""))
            continue
        with made:
            rows.append((tier, *of_tier(made, runs)))
    head = ("tier", "p50, ms", "p90, ms", f"runs/s, {THREADS} threads", "a cell of a session, ms")
    note = "Wanted: of the launcher p50 at most 8 ms and 200 runs/s, of bubblewrap 40 runs/s."
    return Table("one-shot programs in the sandbox", head, tuple(rows), (note,))


def of_tier(made: CodeSandbox, runs: int) -> tuple[str, ...]:
    once = [timed(lambda: made.run("print(sum(range(1000)))")) for _ in range(runs)]
    session = made.session()
    session.run("x = 1")
    cells = [timed(lambda: session.run("x += 1")) for _ in range(runs)]
    session.close()
    began = time.perf_counter()
    threads = [threading.Thread(target=repeat, args=(made, runs // THREADS)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    per_s = runs // THREADS * THREADS / (time.perf_counter() - began)
    p50, p90 = (float(np.quantile(once, q)) for q in (0.5, 0.9))
    return f"{p50:.1f}", f"{p90:.1f}", f"{per_s:,.0f}", Spread.of(cells).text(2)


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def repeat(made: CodeSandbox, runs: int) -> None:
    for _ in range(runs):
        assert made.run("print(1)").stdout == "1\n"


def turns(runs: int) -> Table:
    """Return wall clock time, and the processor time of both processes: they run in turn, and the time to wake a
    process is the machine's. Trajectories of 8 turns alternate with those of 16: the difference is the cost of 8 turns,
    without the cost of a trajectory, which is to send its prompt and to return its outputs."""

    async def measure(where: str, tokens: int) -> tuple[list[float], list[float], float]:
        prompt, tokenizer = prompt_of(tokens), hermes_tokenizer()
        async with opened(where, "look", Path()) as loops:

            async def took_ms(turns: int) -> float:
                said, began = Says(tokenizer, "look", turns + 1), time.perf_counter()
                await play(loops, said, prompt)
                return 1e3 * (time.perf_counter() - began)

            short, long, computed = [], [], 0.0
            await took_ms(TURNS)
            for _ in range(runs // 10):
                before = cpu_s()
                short.append(await took_ms(TURNS))
                computed += 1e3 * (cpu_s() - before) / TURNS / (runs // 10)
                long.append(await took_ms(2 * TURNS))
            return short, long, computed

    rows = []
    for where in (HERE, BESIDE):
        for tokens in HISTORIES:
            short, long, computed = uvloop.run(measure(where, tokens))
            further = Spread.of([(b - a) / TURNS for a, b in zip(short, long)])
            per_turn = Spread.of([a / TURNS for a in short])
            once = Spread.of([2 * a - b for a, b in zip(short, long)])
            texts = per_turn.text(2), f"{computed:.2f}", further.text(2), once.text(2)
            rows.append((where, f"{tokens:,}", *texts))
    head = (
        *("played", "tokens of history", f"ms per turn of {TURNS} (at most 1)"),
        *("of it computed, the model's answers too, ms", "ms of a further turn (at most 1)", "ms once per trajectory"),
    )
    note = (
        "Played in its own process, a turn is two messages between two processes: on a machine that is busy both wait. "
        f"A further turn: trajectories of {2 * TURNS} turns less those of {TURNS}, by {TURNS}; once: the rest of the "
        f"{TURNS}, the prompt's way there and the outputs' way back."
    )
    return Table("a turn of the tool loop, without the model", head, tuple(rows), (note,))


def cpu_s() -> float:
    """That this process and those below it have computed."""
    mine = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (mine, *mine.children(recursive=True)))


def waiting() -> Table:
    """Trajectories begin one after another and then wait for their tools, all of them at once."""
    prompt, tokenizer = prompt_of(HISTORIES[0]), hermes_tokenizer()

    def held() -> int:
        mine = psutil.Process()
        return sum(one.memory_info().rss for one in (mine, *mine.children(recursive=True)))

    async def every(where: str, told: Path) -> int:
        async with opened(where, "slow", told) as loops:
            await play(loops, Says(tokenizer, "slow", 1), prompt)  # what the first one of a process loads
            gc.collect()
            gc.freeze()  # as a run does
            before, tasks = held(), []
            for _ in range(CROWD):
                tasks.append(asyncio.create_task(play(loops, Says(tokenizer, "slow", TURNS), prompt)))
                await asyncio.sleep(BEGUN_S / CROWD)
            most = held() - before
            await asyncio.sleep(WATCHED_S - BEGUN_S)
            waits = sum(not task.done() for task in tasks)
            assert waits > CROWD * 0.9, f"{waits} of {CROWD} still wait"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return most

    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    rows = []
    for where in (HERE, BESIDE):
        with tempfile.TemporaryDirectory() as folder:
            most = uvloop.run(every(where, Path(folder) / "lags.json"))
            lags_ms = json.loads((Path(folder) / "lags.json").read_text())
        lags = (f"{np.quantile(lags_ms, q):.1f}" for q in (0.5, 0.99, 1.0))
        rows.append((where, f"{CROWD:,}", *lags, f"{most / CROWD / 1e3:.0f}"))
    head = (
        "played",
        "trajectories",
        "lag of the event loop that plays, p50, ms",
        "p99, ms (at most 20)",
        "most, ms",
        "KB each (at most 150)",
    )
    note = (
        f"Histories of {len(prompt):,} tokens; they begin within {BEGUN_S:g} s, a tool takes {LONG_S:g} s on average "
        f"(exponential), the loop is asked every {1e3 * TICK_S:g} ms for {WATCHED_S:g} s. KB: of both processes."
    )
    return Table("many trajectories that wait for their tools", head, tuple(rows), (note,))


def search(passages: int, runs: int) -> Table:
    rng, chances = np.random.default_rng(0), 1 / np.arange(1, WORDS + 1)
    edges = np.cumsum(chances / chances.sum())
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "passages.jsonl"
        with corpus.open("w") as file:
            for first in range(0, passages, 10_000):
                drawn = np.searchsorted(edges, rng.random((min(10_000, passages - first), 40)))
                file.writelines(f'{{"contents": "{" ".join(f"w{k}" for k in row)}"}}\n' for row in drawn.tolist())
        build_s = timed(lambda: bm25.build(corpus, Path(folder) / "index")) / 1e3
        size_mb = sum(path.stat().st_size for path in (Path(folder) / "index").iterdir()) / 1e6
        index = bm25.PassageIndex(Path(folder) / "index")
        asked = np.searchsorted(edges, rng.random((runs, 6))).tolist()
        took = [timed(lambda: index.search(" ".join(f"w{k}" for k in row), 3)) for row in asked]  # noqa: B023
    p50, p90, p99 = (f"{np.quantile(took, q):.1f}" for q in (0.5, 0.9, 0.99))
    head = ("passages", "index built in, s", "index, MB", "p50, ms", "p90, ms", "p99, ms")
    row = (f"{passages:,}", f"{build_s:.0f}", f"{size_mb:,.0f}", p50, p90, p99)
    return Table("BM25 over made passages, the best three of a query", head, (row,))


def recipe(*more: str) -> Table:
    """more: settings of a shorter one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "verl.quickstart", "task=tool_arithmetic", f"run.root_dir={folder}", *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "tool_arithmetic" / "summary.json").read_text())
    names = [f"{way}_{when}" for way in ("greedy", "sampled") for when in ("before", "after")]
    wanted = {"greedy_before": " (at most 0.30)", "greedy_after": " (at least 0.90)"}
    head = ("all of it, s (at most 480)", *(name.replace("_", ", ") + wanted.get(name, "") for name in names))
    row = (f"{found['seconds']['total']:.0f}", *(f"{found[name]:.2f}" for name in names))
    return Table("a model that learns to use a calculator, accuracy on held-out products", head, (row,))


def main(argv: Sequence[str]) -> int:
    threads, folder = os.cpu_count() or 1, ROOT / "runs" / "bench"
    settings = Settings(rounds=1, steps=2, threads=threads, folder=folder, page=folder)
    parts: dict[str, Callable[[argparse.Namespace], list[Table]]] = {
        "sandbox": lambda given: [sandbox(given.runs)],
        "turns": lambda given: [turns(given.runs)],
        "waiting": lambda given: [waiting()],
        "tools": lambda given: slow_tools.tables(settings),
        "branches": lambda given: [branches.table(UPDATES)],
        "search": lambda given: [search(given.passages, given.runs)],
        "recipe": lambda given: [recipe()],
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--passages", type=int, default=1_000_000)
    given = parser.parse_args(argv)
    folder.mkdir(parents=True, exist_ok=True)
    section = ROOT / "bench" / "sections" / "agents.md"
    for name in [given.only] if given.only else parts:
        load = os.getloadavg()[0]
        texts = [made.markdown() for made in parts[name](given)]
        found = "\n\n".join([*texts, f"1-minute load {load:.1f} at the start of this part."])
        print(found, flush=True)
        kept = parts_of(section.read_text()) | {name: found}  # what is measured is kept, whatever happens later
        about = (
            f"Command: `python bench/agents.py`, its parts one by one (`--only`). {given.runs} runs; {threads} cores."
        )
        told = [f"<!-- {n} -->\n\n{kept[n]}" for n in parts if n in kept]
        section.write_text("\n\n".join(["## Agents beside the model", about, *told]) + "\n")
    assemble(ROOT / "bench")
    return 0


def parts_of(section: str) -> dict[str, str]:
    """Return the earlier measurements, by part."""
    _, *found = re.split(r"^<!-- (\w+) -->$", section, flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(found[::2], found[1::2])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
