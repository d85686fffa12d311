"""Runs with images: the memory that their steps leave, the time in which all waits for media, and the start on many
rows; parts of bench/vlm.py."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil

from bench.parts import Row
from bench.vlm_beside_trl import enlarged
from verl.recipes import shapes

MEGABYTE = 1 << 20
ROWS, PICTURES = 20_000, 64
Span = tuple[float, float]


@contextmanager
def folder() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="bench_vlm"))
    try:
        yield home
    finally:
        shutil.rmtree(home)


def started(size: str) -> Iterator[Row]:
    """Yield the seconds in which the rows of a file with 20,000 images of 1 MB are read, and the memory that they
    take. `size` tiny: a hundred."""
    from verl.config.schema import DataConfig
    from verl.data.source import load_tasks

    count = 100 if size == "tiny" else ROWS
    with folder() as home:
        model, rows = shapes.write_model(home / "base", seed=0), written_rows(home, count)
        cfg = DataConfig(cache_dir=str(home / "cache"), max_prompt_tokens=64)
        own, before = psutil.Process(), [time.perf_counter(), spent_s(), psutil.Process().memory_info().rss]
        table = load_tasks([str(rows)], shapes.tokenizer(), cfg, model=model)
        assert len(table) == count and len(table[count - 1].images) == 1
        wall_s, cpu_s = time.perf_counter() - before[0], spent_s() - before[1]
        yield Row(f"{count} rows with an image each: CPU s until they are read, on each of two cores", cpu_s / 2, 5.0)
        yield Row(f"{count} rows with an image each: s until they are read, beside what else ran", wall_s)
        grown = (own.memory_info().rss - before[2]) / MEGABYTE
        yield Row(f"{count} rows with an image each: MB of the process for them", grown, 256.0)
        again_s = time.perf_counter()
        assert load_tasks([str(rows)], shapes.tokenizer(), cfg, model=model).report.from_cache
        yield Row(f"{count} rows with an image each: s of the next start", time.perf_counter() - again_s, 5.0)


def spent_s() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def written_rows(home: Path, count: int) -> Path:
    """Write rows of which each has a file of 1 MB with a picture; what is behind the picture takes no disk."""
    rng, rows = Random(0), []
    pictures = [shapes.drawing(rng.choices(shapes.KINDS, k=4), rng) for _ in range(PICTURES)]
    contents = [shapes.image_item(picture)["bytes"] for picture in pictures]
    for k in range(count):
        path = home / f"{k}.png"
        path.write_bytes(contents[k % PICTURES] + k.to_bytes(4, "big"))
        os.truncate(path, MEGABYTE)
        prompt = [{"role": "user", "content": shapes.PROMPT}]
        rows.append({"prompt": prompt, "images": [path.name], "ground_truth": "circle"})
    return shapes.write_parquet(home / "rows.parquet", rows)


def memory(size: str) -> Iterator[Row]:
    """Yield the bytes by which the process of a run grows in a step with another image of 1 MB, without the processed
    images, which are kept within a number of bytes. `size` tiny: a few steps."""
    from verl.models.pictures import Pictures

    steps = 12 if size == "tiny" else 300
    traced, resident = list[int](), list[int]()

    def measure(number: int, values: Any) -> None:
        gc.unfreeze()  # a run freezes what it keeps, and frozen objects are not listed
        gc.collect()
        kept = sum(one.kept_bytes for one in gc.get_objects() if type(one) is Pictures)
        traced.append(tracemalloc.get_traced_memory()[0] - kept)
        resident.append(psutil.Process().memory_info().rss)

    with folder() as home:
        rows = written_rows(home, steps)
        tracemalloc.start()
        try:
            run(home, rows, steps, measure, "step.prompts_per_step=1", "step.samples_per_prompt=2")
        finally:
            tracemalloc.stop()
    for name, sizes, limit in (("Python's memory", traced, 20.0), ("the process", resident, None)):
        quarter = len(sizes) // 4
        early, late = min(sizes[quarter : 2 * quarter]), min(sizes[-quarter:])
        grown = (late - early) / (len(sizes) - 2 * quarter) / 1024
        yield Row(f"{steps} steps with an image of 1 MB each: KB a step by which {name} grows", grown, limit)


def overlap(size: str) -> Iterator[Row]:
    """Yield the share of a run in which media are read or processed, and neither the rollout nor the trainer
    computes."""
    from verl.model_engine.torch_engine import TorchEngine
    from verl.models.pictures import Pictures
    from verl.rollout.embedded.core import EngineCore

    steps = 3 if size == "tiny" else 12
    media, computing, ends = list[Span](), list[Span](), list[float]()
    with folder() as home, noted(Pictures, "_read", media):
        trained = noted(TorchEngine, "forward_backward", computing), noted(TorchEngine, "optim_step", computing)
        with noted(EngineCore, "step", computing), trained[0], trained[1]:
            rows = enlarged(shapes.write_problems(home / "rows.parquet", 8 * steps, seed=0))
            given = ("step.prompts_per_step=8", "step.samples_per_prompt=8", "data.max_prompt_tokens=288")
            run(home, rows, steps, lambda *_: ends.append(time.perf_counter()), *given)
    begin, end = ends[0], ends[-1]
    alone_s = length_of(media, begin, end, computing)
    what = "pictures of 256 tokens: share of the time in which media are processed"
    yield Row(f"{what} and nothing else computes", alone_s / (end - begin), 0.03)
    yield Row(what, length_of(media, begin, end) / (end - begin))


@contextmanager
def noted(owner: type, name: str, spans: list[Span]) -> Iterator[None]:
    """Write down the begin and end of each call of a method."""
    real: Callable[..., Any] = getattr(owner, name)

    def timed(*given: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return real(*given, **more)
        finally:
            spans.append((began, time.perf_counter()))

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, real)


def length_of(spans: Sequence[Span], begin: float, end: float, without: Sequence[Span] = ()) -> float:
    """Return the seconds between begin and end that are in a span, and in none of `without`."""
    marks = sorted({begin, end, *(t for span in (*spans, *without) for t in span if begin < t < end)})
    total = 0.0
    for a, b in zip(marks, marks[1:]):
        at = (a + b) / 2
        if any(s <= at < e for s, e in spans) and not any(s <= at < e for s, e in without):
            total += b - a
    return total


def run(home: Path, rows: Path, steps: int, on_step: Callable[[int, Any], None], *more: str) -> None:
    """Train the recipe `shapes` with random weights."""
    from verl.config.load import load_config
    from verl.driver.launch import run_rl

    model = shapes.write_model(home / "base", seed=0)
    given = {
        "recipe": "shapes",
        "model.path": model,
        "model.dtype": "float32",
        "data.train_files": f"[{rows}]",
        "data.cache_dir": home / "cache",
        "data.shuffle": "false",
        "reward.path": "verl.recipes.shapes",
        "rollout.max_response_tokens": 4,
        "run.root_dir": home,
        "run.name": "r",
        "run.total_steps": steps,
        "run.threads": 1,
        "run.eval_every_steps": 0,
        "run.eval_before": "false",
        "run.eval_after": "false",
        "run.save_every_steps": 0,
    }
    run_rl(load_config([*(f"{key}={value}" for key, value in given.items()), *more]), on_step=on_step, quiet=True)
