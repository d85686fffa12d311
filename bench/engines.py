"""Megatron-Core beside `sharded`, in one layout: the steps of a 10M model, an export of 1 GB, the start of a worker.

    python -m bench.engines [--python .venv-megatron/bin/python] [--only step|export|start] [--steps N]

Ranks are child processes of that interpreter, on gloo, each with one thread. A step is counted in seconds of the
processor over all ranks, which depend little on other work of the machine; its rows share no prompt. Writes its part of
bench/RESULTS.md (bench/sections/engines.md); `--only` prints without writing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench import engine_rank
from bench.engine_rank import MeasuredRank
from bench.report import write_section
from bench.results import Spread, Table
from verl.batch import Batch, pack
from verl.driver.dispatch import shares
from verl.model_engine.base import EngineContext
from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec
from verl.types import Refs, Sample, Segment, ref_of
from verl.workers.children.cluster import ChildCluster
from verl.workers.group import Broadcast, WorkerGroup

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 900.0
SMALL: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 6}
SMALL |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1152, "tie_word_embeddings": True}
GIGABYTE: dict[str, Any] = {"vocab_size": 16384, "hidden_size": 1024, "num_hidden_layers": 14}
GIGABYTE |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "intermediate_size": 4096}
GIGABYTE |= {"tie_word_embeddings": True}
LAYOUTS = {"TP 2": Layout(world_size=2, tensor=2), "TP 2 x PP 2": Layout(world_size=4, tensor=2, pipeline=2)}
ENGINES = ("sharded", "megatron")
ROWS = {"92 tokens each": False, "40 to 272 tokens": True}
BUDGET = 4096
LIMITS = (
    "Intended: a step of at most 1.3 times the core-seconds of `sharded`, an export of at least 0.5 of the speed of a "
    "copy, and ranks that are built at most 15 s beyond their imports."
)
IMPORTS = """
import contextlib, importlib, json, sys
with open(sys.argv[1]) as file:
    names = json.load(file)
for name in names:
    with contextlib.suppress(Exception):  # of a name that was never imported: a module that a package has made
        importlib.import_module(name)
"""


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a random model of this shape; return its folder."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


@contextmanager
def ranks(python: str, engine: str, context: EngineContext) -> Iterator[WorkerGroup]:
    """The ranks of an engine, which end with the context."""
    with tempfile.TemporaryDirectory() as logs:
        cluster = ChildCluster(context.layout, engine_rank.one_thread, Path(logs), python=python)
        try:
            yield cluster.start("actor", engine_rank.build, (engine, context), world_size=context.layout.world_size)
        finally:
            cluster.close()


def rows(ragged: bool) -> tuple[Batch, int]:
    """64 rows, each with its own prompt of 32 tokens, with the weights of their mean; and the number of passes."""
    r, samples = np.random.default_rng(0), []
    for i in range(64):
        answer = int(np.clip(r.exponential(60), 8, 240)) if ragged else 60
        prompt = Segment(ids=r.integers(4, 4000, 32), source="prompt")
        ids, logprobs = r.integers(4, 4000, answer), np.zeros(answer, np.float32)
        sampled = Segment(ids=ids, source="sampled", logprobs=logprobs, version=0)
        made = Sample(
            sample_id=str(i), trajectory_id=str(i), group_id=str(i), purpose="train", segments=(prompt, sampled)
        )
        samples.append(made)
    refs = Refs(ref_of(s) for s in samples)
    (share,) = shares(refs, 1, max_tokens=BUDGET, shares_prefix=False)
    batch = pack([samples[i] for i in share.rows], share_prefix=False)
    weight = torch.full((batch.num_loss_tokens,), 1.0 / batch.num_loss_tokens, dtype=torch.float64)
    return batch.with_columns({"w/nll": weight}), share.num_microbatches


def step(python: str, number: int) -> Table:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SMALL)
        for name, layout in LAYOUTS.items():
            context = EngineContext(
                folder=model, optim=OptimSpec(lr=1e-4), dtype="float32", max_tokens_per_microbatch=BUDGET, layout=layout
            )
            took: dict[tuple[str, str], list[float]] = {}
            for engine in ENGINES:
                with ranks(python, engine, context) as group:
                    for kind, ragged in ROWS.items():
                        batch, passes = rows(ragged)
                        given = [(batch, passes, number + 1)] * layout.world_size
                        of_ranks = group.submit(MeasuredRank.steps, given).result(WAIT_S)
                        took[engine, kind] = [sum(of) for of in zip(*of_ranks, strict=True)][1:]
            for kind in ROWS:
                ours, theirs = (took[engine, kind] for engine in ENGINES)
                ratio = statistics.median(theirs) / statistics.median(ours)
                found.append((name, kind, Spread.of(ours).text(2), Spread.of(theirs).text(2), f"{ratio:.2f}×"))
                print(found[-1], flush=True)
    title = "an optimizer step of a 9.9M model over 64 rows, core-seconds of all ranks together"
    return Table(title, ("layout", "rows", "sharded", "megatron", "of sharded"), tuple(found))


def export(python: str, rounds: int) -> Table:
    layout, found = LAYOUTS["TP 2"], []
    with tempfile.TemporaryDirectory() as folder:
        context = EngineContext(folder=write_model(Path(folder), GIGABYTE), dtype="float32", layout=layout)
        for engine in ENGINES:
            with ranks(python, engine, context) as group:
                of_ranks = group.submit(MeasuredRank.export, [(rounds + 1,)] * layout.world_size).result(WAIT_S)
            size = sum(of[0][0] for of in of_ranks)
            staged, copied, whole = (
                [max(of[i][k] for of in of_ranks) for i in range(1, rounds + 1)] for k in (1, 2, 3)
            )
            share = [b / a for a, b in zip(staged, copied, strict=True)]
            cells = (Spread.of(staged).text(2), Spread.of(copied).text(2), Spread.of(share).text(2))
            found.append((engine, f"{size / 1e9:.2f}", *cells, Spread.of(whole).text(2)))
            print(found[-1], flush=True)
    head = ("engine", "GB", "staged, core-s", "a copy, core-s", "share of a copy", "gathered whole, s")
    return Table("an export of two tensor ranks, each its parts (the slower one counts)", head, tuple(found))


def imports_s(python: str, modules: Path) -> float:
    """The seconds in which two bare processes import the modules that this file names."""
    began = time.perf_counter()
    both = [subprocess.Popen([python, "-W", "ignore", "-c", IMPORTS, str(modules)], cwd=ROOT) for _ in range(2)]
    assert not any(process.wait(WAIT_S) for process in both), modules
    return time.perf_counter() - began


def built_s(python: str, engine: str, context: EngineContext, modules: Path) -> float:
    """The seconds until two ranks of an engine are built and answer a call. Their modules are written to the file."""
    began = time.perf_counter()
    with ranks(python, engine, context) as group:
        found = group.submit(MeasuredRank.modules, Broadcast()).result(WAIT_S)
        took_s = time.perf_counter() - began
    modules.write_text(json.dumps(found[0]))
    return took_s


def start(python: str, rounds: int) -> Table:
    """Rounds alternate the engines. In each, bare processes import what the ranks have imported, right after them, so
    that other work of the machine is in both."""
    layout, found = LAYOUTS["TP 2"], []
    took: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        context = EngineContext(
            folder=write_model(Path(folder), SMALL), optim=OptimSpec(lr=1e-4), dtype="float32", layout=layout
        )
        for number in range(rounds + 1):  # the first one reads the files of packages from the disk
            for engine in ENGINES[:: 1 if number % 2 else -1]:
                modules = Path(folder) / f"{engine}.json"
                took[engine].append((built_s(python, engine, context, modules), imports_s(python, modules)))
    for engine, pairs in took.items():
        whole, alone = zip(*pairs[1:], strict=True)
        beyond = [a - b for a, b in pairs[1:]]
        found.append((engine, *(Spread.of(one).text(1) for one in (alone, whole, beyond))))
        print(found[-1], flush=True)
    head = ("engine", "imports alone, s", "until the ranks are built, s", "beyond the imports, s")
    return Table("the start of two ranks by another interpreter, with a 9.9M model", head, tuple(found))


PARTS: dict[str, Callable[[str, int], Table]] = {"step": step, "export": export, "start": start}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=str(ROOT / ".venv-megatron" / "bin" / "python"))
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--steps", type=int, default=5, help="steps, or rounds, after one that is dropped")
    given = parser.parse_args(argv)
    if not Path(given.python).exists():
        print(f"{given.python}: no such interpreter: make megatron-env", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    tables = [part(given.python, given.steps) for name, part in PARTS.items() if given.only in (None, name)]
    if given.only is None:
        loads = f"{load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end"
        about = (
            f"Command: `python -m bench.engines`, {given.steps} steps or rounds after one that is dropped; "
            f"{os.cpu_count()} cores, 1-minute load {loads}; torch {torch.__version__}. {LIMITS}"
        )
        tables_text = (table.markdown() for table in tables)
        write_section("engines", "## Model engines in another environment", about, *tables_text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
