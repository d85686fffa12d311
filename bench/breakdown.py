"""The parts of the time of a rollout and of an update on this machine, compared with the time of the arithmetic alone.

    python bench/breakdown.py [--size 10M] [--threads N]

The rollout with the compiled kernels and without, the update with shared prompts and without. Writes its part of
bench/RESULTS.md (bench/sections/breakdown.md).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.limits import FORWARD_FLOPS_PER_PARAMETER, TRAIN_FLOPS_PER_PARAMETER, measure
from bench.ragged import rollouts_of
from bench.report import write_section
from bench.results import Table
from bench.workloads import WORKLOADS, make_inputs
from verl.accel.cpu import rows
from verl.accel.cpu.kernels import Kernels
from verl.batch import pack
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.objective import Term, TermValue
from verl.rollout.base import GenerateRequest, RolloutContext
from verl.rollout.native import weights
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.serve import FolderWeights
from verl.types import Sample, Sampling, Segment

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "linear": "matrix products",
    "attend": "attention",
    "sample": "sampling",
    "rms_norm": "norms",
    "gated": "activations",
}
OPS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_"),
    "attention": ("aten::_scaled_dot_product", "aten::_softmax", "aten::_softmax_backward_data"),
    "optimizer": ("aten::_fused_adamw_", "Optimizer"),
}
Row = tuple[str, ...]


NLL = Term(name="loss", fn=lambda columns: TermValue(-columns["logprobs"]))


def sample_of(number: int, group: int, prompt: np.ndarray, answer: np.ndarray) -> Sample:
    """To train on: prompt [P], answer [R]."""
    segments = (
        Segment(ids=prompt, source="prompt"),
        Segment(ids=answer, source="sampled", logprobs=np.zeros(len(answer), np.float32), version=0),
    )
    return Sample(
        sample_id=str(number), trajectory_id=str(number), group_id=str(group), purpose="train", segments=segments
    )


class Seconds:
    """By part, summed over threads."""

    def __init__(self) -> None:
        self.of: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            out = work(*args)
            with self._lock:
                self.of[name] += time.perf_counter() - began
            return out

        return run


def rollout(model: Any, prompts: list[list[int]], lengths: list[int], gflops: float, compiled: bool) -> list[Row]:
    """64 sequences, lengths forced; one lane, so that seconds are core-seconds. Compiled, its parts are seen in a
    second run with a call for every one of them, where it has one for all layers."""
    seconds = Seconds()
    load, join = rows.load_kernels, weights.join_layers

    def instrumented(dtype: torch.dtype) -> Kernels | str:
        kernels = load(dtype)
        if isinstance(kernels, str):
            return kernels
        timed = {name: seconds.timed(name, kernels.functions[name]) for name in PARTS}
        return dataclasses.replace(kernels, functions={**kernels.functions, **timed})

    async def run() -> float:
        context = RolloutContext(hf_config=model.config, max_context_tokens=512, dtype=torch.float32)
        engine = build(Options(), context, lanes=1, compiled=compiled)
        await engine.load_weights(FolderWeights(model))
        wall = 0.0
        for number in range(2):  # the first is not counted
            seconds.of.clear()
            began = time.perf_counter()
            await asyncio.gather(
                *(
                    engine.generate(
                        GenerateRequest(
                            f"{number}/{i}", np.asarray(ids), Sampling(max_tokens=n, seed=i, ignore_eos=True)
                        )
                    )
                    for i, (ids, n) in enumerate(zip(prompts, lengths, strict=True))
                )
            )
            wall = time.perf_counter() - began
        await engine.close()
        return wall

    whole = asyncio.run(run()) if compiled else 0.0
    rows.load_kernels = instrumented  # type: ignore[assignment]
    weights.join_layers = lambda layers, shape, layout: None  # type: ignore[assignment]
    try:
        wall = asyncio.run(run())
    finally:
        rows.load_kernels, weights.join_layers = load, join
    tokens = sum(lengths) + sum(map(len, prompts))
    limit = FORWARD_FLOPS_PER_PARAMETER * _multiplied(model) * tokens / gflops / 1e9
    parts = [
        (PARTS[name], seconds.of[name], limit if name == "linear" else None) for name in PARTS if name in seconds.of
    ]
    if not compiled:
        return _rows(parts, wall, limit)
    as_it_runs = ("as it runs, all layers in one call", f"{whole:.2f}", f"{whole / wall:.0%}", f"{whole / limit:.1f}×")
    return [*_rows(parts, wall, limit), as_it_runs]


def update(model: Any, prompts: list[list[int]], lengths: list[int], gflops: float, share: bool) -> list[Row]:
    """8 groups of 8: forward, backward, optimizer on one thread."""
    engine = TorchEngine(
        model, EngineSettings(optim=OptimSpec(lr=1e-6), dtype="float32", max_tokens_per_microbatch=65536)
    )
    rng = np.random.default_rng(0)
    batch = pack(
        [
            sample_of(i, i // 8, np.asarray(prompts[i // 8]), rng.integers(0, model.config.vocab_size, lengths[i]))
            for i in range(64)
        ],
        share_prefix=share,
    )
    batch = batch.with_columns({"w/loss": torch.full((batch.num_loss_tokens,), 1e-4)})

    def step() -> None:
        engine.forward_backward(batch, (NLL,))
        engine.optim_step()

    step()
    began = time.perf_counter()
    step()
    wall = time.perf_counter() - began
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    found: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        part = next((part for part, names in OPS.items() if event.key.startswith(names)), "the rest")
        found[part] += event.self_cpu_time_total / 1e6
    share_of = wall / sum(found.values())  # the profiler itself takes time
    tokens = batch.num_tokens
    limit = (
        TRAIN_FLOPS_PER_PARAMETER
        * (_multiplied(model) * tokens - _head(model) * (tokens - batch.num_loss_tokens))
        / gflops
        / 1e9
    )
    parts = [
        (part, found[part] * share_of, limit if part == "matrix products" else None) for part in OPS if part in found
    ]
    return _rows(parts, wall, limit)


def _multiplied(model: Any) -> int:
    """Parameters that a token is multiplied with: the embedding is one matrix with the head, or is looked up."""
    lookup = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    return sum(p.numel() for p in model.parameters()) - lookup


def _head(model: Any) -> int:
    return int(model.get_output_embeddings().weight.numel())


def _rows(parts: Sequence[tuple[str, float, float | None]], wall: float, limit: float) -> list[Row]:
    rest = wall - sum(s for _, s, _ in parts)
    listed = [(name, s, at) for name, s, at in parts] + [("everything else", rest, None)]
    rows = [(name, f"{s:.2f}", f"{s / wall:.0%}", f"{s / at:.1f}×" if at else "") for name, s, at in listed]
    return [*rows, ("together", f"{wall:.2f}", "100%", f"{wall / limit:.1f}×")]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="10M", choices=("10M", "100M"))
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    work = WORKLOADS[f"ragged-{asked.size}"]
    gflops = measure("float32", threads=1, hidden=work.hidden, ffn=work.ffn, rows=64).gflop_per_core_s
    inputs = make_inputs(ROOT / "runs" / "bench", f"ragged-{asked.size}", 1)
    ((prompts, lengths),) = rollouts_of(f"ragged-{asked.size}", 1)
    head = ("", "core-s", "share", "of its limit")
    tables = []
    for title, make in (
        ("rollout, compiled kernels", lambda model: rollout(model, prompts, lengths, gflops, True)),
        ("rollout, torch's operations", lambda model: rollout(model, prompts, lengths, gflops, False)),
        ("update, prompts shared", lambda model: update(model, prompts, lengths, gflops, True)),
        ("update, prompts not shared", lambda model: update(model, prompts, lengths, gflops, False)),
    ):
        tables.append(
            Table(f"{title[0].upper()}{title[1:]}, {asked.size}", head, tuple(make(load_causal_lm(inputs.model))))
        )
        print(tables[-1].markdown(), flush=True)
    load = os.getloadavg()[0]
    about = (
        f"Command: `python bench/breakdown.py --size {asked.size}`. One thread, float32, 64 ragged answers, 8 x 8 in "
        f"the update; 1-minute load {load:.1f}. Limit: the products' FLOPs at {gflops:.0f} GFLOP/s, the best large "
        "product here."
    )
    write_section("breakdown", "## Inside the rollout and the update", about, *(t.markdown() for t in tables))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
