"""Parts of bench/workers.py: what a call of the driver costs, and what sharding a model costs beside one process."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.results import Spread, Table
from verl.batch import Batch, Columns, pack
from verl.driver.dispatch import shares
from verl.model_engine.base import EngineCapabilities
from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sharded import ShardedEngine
from verl.model_engine.torch_engine import TorchEngine
from verl.objective import Term, TermValue
from verl.types import Ref, Refs, Sample, Segment, ref_of
from verl.workers.compute import OptimizerStep
from verl.workers.group import Arguments, Broadcast
from verl.workers.inproc import InprocCluster
from verl.workers.model_workers import ModelWorkers
from verl.workers.pools import Pool

RANKS = (1, 4)
SIMULATED = (1, 4, 16, 64, 256)
WORLDS = (1, 2, 4)
SHAPE: dict[str, Any] = dict(
    vocab_size=4096,
    hidden_size=320,
    num_hidden_layers=6,
    num_attention_heads=5,
    num_key_value_heads=5,
    head_dim=64,
    intermediate_size=960,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
STEPS = 6  # of each world; the first is dropped
ROWS_PER_WORKER = 32


class Nothing:
    """A worker that does nothing."""

    def call(self) -> None:
        return None


def build(*, ranks: Sequence[object]) -> list[Nothing]:
    return [Nothing() for _ in ranks]


def no_set_up(place: object) -> None:
    """Nothing to set up."""


# -- one call, there and back ------------------------------------------------------------------------------------------


def calls(rounds: int) -> Table:
    from verl.workers.ray.cluster import RayCluster

    rows = []
    for world_size in RANKS:
        clusters: list[tuple[str, Any]] = [("in this process", InprocCluster(world_size))]
        pool = Pool(ranks_per_node=world_size)
        roles = {"nobody": "main"}
        clusters.append(
            ("ray", RayCluster({"main": pool}, roles, layout=Layout(world_size=world_size), set_up=no_set_up))
        )
        for name, cluster in clusters:
            group = cluster.start("nobody", build, (), world_size=world_size)
            for _ in range(10):
                group.submit(Nothing.call, Broadcast()).result(60)
            took = []
            for _ in range(20 * rounds):
                began = time.perf_counter()
                group.submit(Nothing.call, Broadcast()).result(60)
                took.append(1e3 * (time.perf_counter() - began))
            group.close()
            cluster.close()
            rows.append((name, str(world_size), Spread.of(took).text(2)))
            print(rows[-1], flush=True)
    return Table(
        "one call from the driver to its workers and back", ("", "ranks", "ms, median [quartiles]"), tuple(rows)
    )


# -- the driver's own time ---------------------------------------------------------------------------------------------


class Swallowing:
    """A worker group that pickles what it is given, as one in other processes does, and answers at once."""

    name = "simulated"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def submit(self, method: Callable[..., Any], args: Arguments) -> Future[Any]:
        assert not isinstance(args, Broadcast)
        for one in args:
            pickle.dumps((method, one), protocol=5)
        done: Future[Any] = Future()
        done.set_result([{}] * self.world_size)
        return done

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing to close."""


def driver(rounds: int) -> Table:
    able = EngineCapabilities(
        shares_prefix=True, max_tokens_per_microbatch=16384, outputs=("logprobs",), trains=True, one_pass=True
    )
    rows = []
    for workers in SIMULATED:
        refs = Refs(_ref(i) for i in range(ROWS_PER_WORKER * workers))
        models = ModelWorkers(Swallowing(workers), able)  # type: ignore[arg-type]
        took = []
        for _ in range(max(3, rounds // 2)):
            began = time.perf_counter()
            models.infer(refs, {"logprobs": "old_logprobs"}).result()
            models.update([OptimizerStep(refs)], (), ()).result()
            took.append(1e3 * (time.perf_counter() - began))
        each = [ms / workers for ms in took]
        rows.append((str(workers), f"{len(refs):,}", Spread.of(took).text(1), Spread.of(each).text(2)))
        print(rows[-1], flush=True)
    title = f"the driver's own time for a step (one pass, one update), {ROWS_PER_WORKER} rows per worker"
    return Table(title, ("simulated workers", "rows", "ms", "ms per worker"), tuple(rows))


def _ref(i: int) -> Ref:
    tokens = int(np.random.default_rng(i).exponential(400)) + 8
    ids = np.arange(tokens)
    return ref_of(_sample(i, np.arange(64), ids))


def _sample(i: int, prompt: np.ndarray, answer: np.ndarray) -> Sample:
    sampled = Segment(ids=answer, source="sampled", logprobs=np.zeros(len(answer), np.float32), version=0)
    return Sample(
        sample_id=str(i),
        trajectory_id=str(i),
        group_id=str(i // 8),
        purpose="train",
        segments=(Segment(ids=prompt, source="prompt"), sampled),
    )


# -- a sharded step ----------------------------------------------------------------------------------------------------


def likelihood(columns: Columns) -> TermValue:
    return TermValue(-columns["logprobs"])


TERMS = (Term(name="nll", fn=likelihood, outputs=("logprobs",)),)


def sharded() -> Table:
    """Core-seconds of an optimizer step over worlds: what the ranks of one model compute twice or exchange."""
    torch.set_num_threads(1)
    medians: dict[int, float] = {}
    rows = []
    for world_size in WORLDS:
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder, context.Pool(world_size) as pool:
            asked = [(rank, world_size, folder) for rank in range(world_size)]
            found = pool.starmap_async(_steps, asked, chunksize=1).get(600)
        took = [sum(of) for of in zip(*found)][1:]
        medians[world_size] = statistics.median(took)
        ratio = medians[world_size] / medians[1]
        rows.append((str(world_size), Spread.of(took).text(2), f"{ratio:.2f}×"))
        print(rows[-1], flush=True)
    title = "FSDP2 on gloo: a step of a 9.7M model over 8 groups of 8 answers, all ranks together"
    return Table(title, ("world", "core-seconds", "of one process"), tuple(rows))


def _steps(rank: int, world_size: int, folder: str) -> list[float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    optim, layout = OptimSpec(lr=1e-4), Layout(world_size=world_size)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        engine: TorchEngine = ShardedEngine(model, EngineSettings(optim=optim, dtype="float32"), layout=layout)
    else:
        engine = TorchEngine(model, EngineSettings(optim=optim, dtype="float32"))
    batch, passes = _batch(rank, world_size)
    out = []
    for _ in range(STEPS):
        began = time.process_time()
        engine.forward_backward(batch, TERMS, passes)
        engine.optim_step()
        out.append(time.process_time() - began)
    return out


# -- a save while training goes on -------------------------------------------------------------------------------------


def saves(rounds: int) -> Table:
    """How long the calls of a worker are held up by a checkpoint: for a copy of its state, the rest is another thread's
    work; and what the whole of it takes."""
    torch.manual_seed(0)
    engine = TorchEngine(
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)), EngineSettings(optim=OptimSpec(lr=1e-4), dtype="float32")
    )
    batch, passes = _batch(0, 1)
    engine.forward_backward(batch, TERMS, passes)
    engine.optim_step()
    held, whole = [], []
    for _ in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            snapshot = engine.snapshot()
            copied = time.perf_counter()
            snapshot.save(Path(folder) / "state")
            held.append(1e3 * (copied - began))
            whole.append(1e3 * (time.perf_counter() - began))
    share = [a / b for a, b in zip(held, whole)][1:]
    row = (Spread.of(held[1:]).text(0), Spread.of(whole[1:]).text(0), Spread.of(share).text(2))
    title = "a save of a 9.7M model and its optimizer (116 MB) while training goes on"
    return Table(title, ("held up, ms", "the whole save, ms", "share"), (row,))


@functools.cache
def _batch(rank: int, world_size: int) -> tuple[Batch, int]:
    r = np.random.default_rng(0)
    samples = []
    for group in range(8):
        prompt = r.integers(4, 4000, 32)
        lengths = np.clip(r.exponential(60, 8).astype(int), 8, 240)
        samples += [_sample(8 * group + i, prompt, r.integers(4, 4000, n)) for i, n in enumerate(lengths)]
    refs = Refs(ref_of(s) for s in samples)
    share = shares(refs, world_size, max_tokens=4096)[rank]
    batch = pack([samples[i] for i in share.rows], share_prefix=True)
    weight = torch.full((batch.num_loss_tokens,), 1.0 / sum(ref.loss_tokens for ref in refs), dtype=torch.float64)
    return batch.with_columns({"w/nll": weight}), share.num_microbatches
