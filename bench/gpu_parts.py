"""The measurements of bench/gpu.py: a model of one shape on one device, and what the device itself can do."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import limits
from bench.breakdown import NLL, sample_of
from verl.accel.devices import device_facts
from verl.batch import pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.rollout.base import GenerateRequest, RolloutContext
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.rollout.native.paged import MIXED_PROMPTS, whole_pages
from verl.serve import FolderWeights
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Sampling
from verl.weight_sync.buckets import BucketOutlet
from verl.weight_sync.local import LocalCheckpointEngine, LocalOutlet
from verl.weight_sync.sender import WeightSender
from verl.weight_sync.shm import PREFIX
from verl.workers.inproc import InprocGroup
from verl.workers.model_workers import ModelWorkers
from verl.workers.role import Role

REPEATS = 3
TRACE_S = 2.0
STEPS = 5
BUCKET_BYTES = 256 << 20
FREE_SHARE = 0.9  # of the free memory, that a part may need


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    vocab: int = 151_936


SHAPES = {
    "0.6B": Shape(1024, 28, 16, 8, 3072),
    "4B": Shape(2560, 36, 32, 8, 9728),
    "tiny": Shape(64, 2, 4, 2, 96, head_dim=16, vocab=512),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is computed in each part."""

    rows: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (512, 4096)
    tokens: int = 160
    """Tokens of an answer after all prompts have been computed; the first two and the last fifth are not timed."""
    prompts: tuple[int, int] = (16, 1024)
    """Number and tokens of the prompts of a prefill."""
    sequences: tuple[int, int] = (32, 1024)
    """Number and tokens of the sequences of an update."""
    square: int = 8192
    copied_bytes: int = 1 << 30
    publishes: int = 7
    """Publishes of unchanged weights; the first three of them have every checksum, and are not timed."""
    step: tuple[int, int, int] = (16, 8, 512)
    """Prompts, answers of each, and tokens of an answer of a GRPO step."""


TINY = Sizes(
    rows=(1, 3),
    contexts=(40, 72),
    tokens=20,
    prompts=(2, 64),
    sequences=(2, 64),
    square=128,
    copied_bytes=1 << 20,
    publishes=4,
    step=(2, 2, 8),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number, and the limit of the device for it, if it has one."""

    part: str
    what: str
    value: float | None
    unit: str
    limit: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The share of the limit: of rates value / limit, of times limit / value."""
        if self.value is None or self.limit is None:
            return None
        return self.limit / self.value if self.unit == "s" else self.value / self.limit


def busy_share(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> float:
    """Return the share of the time from `begin` to `end` that is covered by at least one of the intervals."""
    covered, reached = 0, begin
    for start, stop in sorted(intervals):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return covered / (end - begin) if end > begin else 0.0


def decode_sizes(rows: int, context: int, timed: int, device: str) -> tuple[int, int]:
    """Return the tokens of a prompt and of an answer with which rows have `context` tokens on average in `timed` steps
    after the last prompt: the first rows get tokens while the prompts of the last ones are computed."""
    at_once = (device_facts(device).mixed_tokens or (Options().max_prefill_tokens,))[-1]
    prompt = max(1, round((context - timed / 2) / (1 + rows / (2 * at_once))))
    waiting = math.ceil(rows * prompt / at_once) + math.ceil(rows / MIXED_PROMPTS) + 4
    return prompt, waiting + timed


class Bench:
    """A model of one shape on one device, with the limits of the device."""

    def __init__(self, name: str, device: str, sizes: Sizes) -> None:
        from transformers import AutoModelForCausalLM, Qwen3Config

        self.name, self.shape, self.sizes, self.device = name, SHAPES[name], sizes, torch.device(device)
        shape = self.shape
        self.config = Qwen3Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.ffn,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            eos_token_id=None,
        )
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        self.params = sum(p.numel() for p in self.model.parameters())
        self.kv_bytes = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
        self.flops = self._matmul_rate()
        self.bytes_per_s = self._bandwidth()

    def limits(self) -> Iterator[Row]:
        """The device's own rates, by torch."""
        yield Row("limits", "product of bf16 matrices", self.flops / 1e12, "TFLOP/s")
        yield Row("limits", "copy on the device, read and write counted", self.bytes_per_s / 1e9, "GB/s")
        yield Row("limits", "copy from the host", self._from_host() / 1e9, "GB/s")

    def decode(self) -> Iterator[Row]:
        """Tokens per second of steps without prompts; the limit reads the weights and each row's keys and values once
        per step, those of the tokens that the rows had on average."""
        for context in self.sizes.contexts:
            for rows in self.sizes.rows:
                prompt, answer = decode_sizes(rows, context, self.sizes.tokens, self.device.type)
                what, kept = f"{rows} x {context}", rows * whole_pages(prompt + answer) * self.kv_bytes
                if (needed := 2 * 2 * self.params + kept) > FREE_SHARE * self._free_bytes():
                    yield Row("decode", what, None, "tokens/s", note=f"it needs {needed / 1e9:.0f} GB")
                    continue
                rate, mean, note = asyncio.run(self._decode_rate(rows, prompt, answer))
                read = rows * mean * self.kv_bytes
                limit = rows * self.bytes_per_s / (2 * self.params + read)
                note = note or f"{mean:.0f} tokens before each on average, {read / 1e9:.3g} GB of keys and values"
                yield Row("decode", what, rate, "tokens/s", limit, note)

    def prefill(self) -> Iterator[Row]:
        """Prompt tokens per second; the limit is that of the products, the head for one token of each prompt."""
        count, tokens = self.sizes.prompts
        seconds = asyncio.run(self._prefill_s(count, tokens))
        body = self.params - self.shape.vocab * self.shape.hidden
        flops = 2 * body + 2 * self.shape.layers * self.shape.heads * self.shape.head_dim * tokens
        yield Row("prefill", f"{count} x {tokens}", count * tokens / seconds, "tokens/s", self.flops / flops)

    def update(self) -> Iterator[Row]:
        """Trained tokens per second: forward, backward and optimizer; recomputed layers do not raise the limit."""
        count, length = self.sizes.sequences
        flops = 6 * self.params + 6 * self.shape.layers * self.shape.heads * self.shape.head_dim * length
        for checkpointing, kind in (("none", "full"), ("selective", "selective"), ("full", "checkpointed")):
            try:
                rate, peak = self._update_rate(count, length, checkpointing)
            except torch.OutOfMemoryError:
                yield Row("update", kind, None, "tokens/s", note="out of memory")
                continue
            finally:
                self._release()
            yield Row("update", kind, rate, "tokens/s", self.flops / flops)
            if peak:
                yield Row("update", f"{kind}, peak memory", peak / 1e9, "GB")

    def publish(self) -> Iterator[Row]:
        """Bytes of weights per second from trainer to rollout, read and write counted, through verl's own publish."""
        gpu = self.device.type == "cuda"
        buckets = lambda: BucketOutlet(f"{PREFIX}-{os.getpid()}-{time.time_ns()}", BUCKET_BYTES, on_gpu=gpu)  # noqa: E731
        for what, outlet in (("in process", LocalOutlet), ("ipc" if gpu else "shm, buckets", buckets)):
            seconds = asyncio.run(self._publish_s(outlet()))
            self._release()
            yield Row("publish", what, 2 * 2 * self.params / seconds / 1e9, "GB/s", self.bytes_per_s / 1e9)

    def idle(self) -> Iterator[Row]:
        """The share of a trace of decoding in which the device computes nothing, and its launches per step."""
        rows = self.sizes.rows[min(1, len(self.sizes.rows) - 1)]
        found, note = asyncio.run(self._trace(rows)), "the profiler recorded nothing"
        idle, launches = found or (None, None)
        share = None if idle is None else 100 * idle
        note = "" if found else note
        yield Row("idle", f"decoding {rows} rows, share of the time", share, "%", note=note)
        yield Row("idle", f"decoding {rows} rows, launches per step", launches, "", note=note)

    def step(self, folder: Path) -> Iterator[Row]:
        """A GRPO step through `verl train`; its limit reads and computes what rollout and update need at least."""
        prompts, answers, tokens = self.sizes.step
        seconds = grpo_step_s(self, folder)
        shape = limits.Shape(self.params, self.shape.layers, self.shape.heads, self.shape.kv_heads, self.shape.head_dim)
        work = limits.Work(prompts, answers, 8.0, tokens, tokens)
        rate = self.flops / 1e9
        machine = limits.Machine(1, rate, rate, rate, self.bytes_per_s / 1e9)
        limit = limits.part_limits(shape, work, machine, "bfloat16")["step"].seconds
        yield Row("step", f"{prompts} x {answers} answers of {tokens}", seconds["perf/time_per_step"], "s", limit)
        for name in ("rollout", "update", "publish"):
            yield Row("step", name, seconds.get(f"timing_s/{name}", 0.0), "s")

    # -- how each is measured ------------------------------------------------------------------------------------------

    def _engine(self, rows: int, context: int) -> Any:
        return build(
            Options(prefix_cache_tokens=0),
            RolloutContext(
                hf_config=self.config,
                max_context_tokens=context,
                dtype=torch.bfloat16,
                device=self.device,
                max_concurrent_sequences=rows,
            ),
        )

    def _asked(self, engine: Any, name: str, rows: int, prompt: int, tokens: int) -> Any:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        sampling = [Sampling(max_tokens=tokens, seed=i, ignore_eos=True) for i in range(rows)]
        prompts = [rng.integers(0, self.shape.vocab, prompt) for _ in range(rows)]
        return asyncio.gather(
            *(engine.generate(GenerateRequest(f"{name}/{i}", prompts[i], sampling[i])) for i in range(rows))
        )

    async def _decode_rate(self, rows: int, prompt: int, answer: int) -> tuple[float, float, str]:
        """Return the tokens per second while all rows are decoded and no prompt is left, the tokens before each on
        average, and a note: if a row ended before it was counted, both are of all tokens."""
        engine = self._engine(rows, prompt + answer)
        await engine.load_weights(FolderWeights(self.model))
        await self._asked(engine, "warm", rows, 4, 8)
        before, asked_s = engine.stats(), time.perf_counter()
        running = asyncio.ensure_future(self._asked(engine, "timed", rows, prompt, answer))

        async def reaches(name: str, count: float) -> tuple[int, float]:
            while engine.stats()[name] - before[name] < count and not running.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return engine.stats()["sampled_tokens"] - before["sampled_tokens"], time.perf_counter()

        first, _ = await reaches("resident", rows)
        first, began_s = await reaches("sampled_tokens", first + 2 * rows)
        last, ended_s = await reaches("sampled_tokens", first + 0.8 * rows * self.sizes.tokens)
        whole = engine.stats()["resident"] == rows
        await running
        done_s = time.perf_counter()
        await engine.close()
        if not whole:
            return rows * answer / (done_s - asked_s), prompt + answer / 2, "of all tokens: they ended too early"
        return (last - first) / (ended_s - began_s), prompt + (first + last) / 2 / rows, ""

    async def _prefill_s(self, count: int, tokens: int) -> float:
        engine = self._engine(count, tokens + 1)
        await engine.load_weights(FolderWeights(self.model))
        walls = []
        for repeat in range(REPEATS + 1):
            began_s = time.perf_counter()
            await self._asked(engine, str(repeat), count, tokens, 1)
            walls.append(time.perf_counter() - began_s)
        await engine.close()
        return statistics.median(walls[1:])

    async def _trace(self, rows: int) -> tuple[float, float] | None:
        """Return the idle share of the device, and the number of its launches per step; None if the profiler recorded
        nothing. On a CPU it records only the thread that starts it."""
        tiny = self.sizes is TINY
        tokens = 60 if tiny else 4096
        engine = self._engine(rows, 64 + tokens)
        await engine.load_weights(FolderWeights(self.model))
        await self._asked(engine, "warm", rows, 4, 8)
        running = asyncio.ensure_future(self._asked(engine, "traced", rows, 64, tokens))
        before = engine.stats()["sampled_tokens"]
        while engine.stats()["sampled_tokens"] < before + 4 * rows:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA] if self.device.type == "cuda" else [activity.CPU]
        with torch.profiler.profile(activities=kinds) as profile:
            first = engine.stats()["sampled_tokens"]
            await asyncio.sleep(0.05 if tiny else TRACE_S)
            steps = max(1.0, (engine.stats()["sampled_tokens"] - first) / rows)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()
        found: Any = profile.profiler
        wanted = "CUDA" if self.device.type == "cuda" else "CPU"
        events = [e for e in found.kineto_results.events() if e.device_type().name == wanted]
        spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]
        if not spans:
            return None
        return 1 - busy_share(spans, min(a for a, _ in spans), max(b for _, b in spans)), len(spans) / steps

    def _update_rate(self, count: int, length: int, checkpointing: str) -> tuple[float, int]:
        settings = EngineSettings(
            optim=OptimSpec(lr=1e-6),
            dtype="bfloat16",
            device=str(self.device),
            emulate_bf16=False,
            gradient_checkpointing=checkpointing,
            max_tokens_per_microbatch=count * length,  # the peak is that of one pass over all of them
        )
        engine = TorchEngine(self.model, settings)
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, self.shape.vocab, length) for _ in range(count)]
        samples = [sample_of(i, i, ids[: length // 4], ids[length // 4 :]) for i, ids in enumerate(rows)]
        batch = pack(samples, share_prefix=True)
        batch = batch.with_columns({"w/loss": torch.ones(batch.num_loss_tokens)})
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def step() -> None:
            engine.forward_backward(batch, (NLL,))
            engine.optim_step()

        rate = batch.num_tokens / self._timed(step)
        return rate, torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    async def _publish_s(self, outlet: Any) -> float:
        """Return the seconds of a publish of unchanged weights in bf16, of which a sample has checksums."""
        trainer = TorchEngine(
            self.model, EngineSettings(optim=None, dtype="bfloat16", device=str(self.device), emulate_bf16=False)
        )
        role = Role("actor", MemoryQueue(), trainer, sender=WeightSender(outlet, dtype="bfloat16"))
        group = InprocGroup("actor", [role])
        streamed = {} if isinstance(outlet, LocalOutlet) else {"outlet": outlet}
        sync = LocalCheckpointEngine(probes=(), tolerance=None, copies=bool(streamed), **streamed)
        replica, walls = self._engine(1, 64), []
        given: Any = {"exclusive": True, "on_inflight": ["wait"], "timeout_s": 120.0}
        for version in range(self.sizes.publishes):
            began_s = time.perf_counter()
            await sync.publish(ModelWorkers(group, trainer.capabilities), [replica], version=version, **given)
            walls.append(time.perf_counter() - began_s)
        await replica.close()
        group.close()
        return statistics.median(walls[3:])

    def _timed(self, work: Callable[[], object]) -> float:
        walls = []
        for _ in range(REPEATS + 1):
            began_s = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            walls.append(time.perf_counter() - began_s)
        return statistics.median(walls[1:])

    def _matmul_rate(self) -> float:
        n = self.sizes.square
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return 2 * n**3 / self._timed(lambda: a @ b)

    def _bandwidth(self) -> float:
        source = torch.empty(self.sizes.copied_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._timed(lambda: target.copy_(source))

    def _from_host(self) -> float:
        pinned = self.device.type == "cuda"
        source = torch.empty(self.sizes.copied_bytes, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty_like(source, device=self.device)
        return source.nbytes / self._timed(lambda: target.copy_(source, non_blocking=pinned))

    def _free_bytes(self) -> float:
        self._release()
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else float("inf")

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def grpo_step_s(bench: Bench, folder: Path) -> dict[str, float]:
    """Return the seconds of a GRPO step and of its parts: the median of a run of its own, without its
    first and its last step."""
    from transformers import AutoModelForCausalLM

    from verl.config.load import load_config
    from verl.driver.launch import run_rl
    from verl.models import tiny
    from verl.recipes import arithmetic
    from verl.track.metrics import read_metrics

    prompts, answers, tokens = bench.sizes.step
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(bench.config, dtype=torch.bfloat16)
    base = tiny.save(model.cpu(), tokenizer, folder / "model")
    del model
    rows = arithmetic.write_rl(folder / "rows.jsonl", 8 * prompts, seed=1, held=False)
    given = {
        "run.root_dir": folder,
        "run.name": "step",
        "run.total_steps": STEPS,
        "run.save_every_steps": 0,
        "run.eval_before": "false",
        "run.eval_after": "false",
        "model.path": base,
        "model.device": bench.device.type,
        "model.dtype": "bfloat16",
        "data.train_files": f"[{rows}]",
        "data.max_prompt_tokens": 16,
        "algorithm.name": "grpo",
        "algorithm.kl_loss_coef": 0.0,
        "step.prompts_per_step": prompts,
        "step.samples_per_prompt": answers,
        "rollout.max_response_tokens": tokens,
        "reward.path": "verl.recipes.arithmetic",
    }
    run_rl(load_config([f"{key}={value}" for key, value in given.items()]), quiet=True)
    # its last step has a checkpoint
    lines = [line.values for line in read_metrics(folder / "step") if 1 < line.step < STEPS]
    names = ("perf/time_per_step", "timing_s/rollout", "timing_s/update", "timing_s/publish")
    return {name: statistics.median(line.get(name, 0.0) for line in lines) for name in names}


def line_of(row: Row, shape: str) -> str:
    """Return the printed line of a row."""
    value = "not run" if row.value is None else f"{row.value:,.4g} {row.unit}".strip()
    share = "" if row.share is None else f", {row.share:.0%} of the limit of {row.limit:,.4g}"
    return f"{shape} {row.part}: {row.what}: {value}{share}{f' ({row.note})' if row.note else ''}"


def table_rows(found: Sequence[tuple[str, Row]]) -> list[tuple[str, ...]]:
    """Return rows of a table: what, value, limit, share."""
    out = list[tuple[str, ...]]()
    for shape, row in found:
        value = f"not run: {row.note}" if row.value is None else f"{row.value:,.4g}"
        limit = "" if row.limit is None else f"{row.limit:,.4g}"
        share = "" if row.share is None else f"{row.share:.0%}"
        unit = f", {row.unit}" if row.unit else ""
        out.append((f"{shape} {row.part}: {row.what}{unit}", value, limit, share))
    return out
