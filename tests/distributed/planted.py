"""Faults of a run's processes, each once: workers are built with these parts in place of their own, and record the
place of the fault."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.driver import assemble, record
from verl.model_engine import rank_engine, torch_engine
from verl.model_engine.snapshot import Snapshot

VARIABLE = "PLANTED"  # "KIND PHASE RUN_DIR", in the workers' environment
KINDS = ("raises", "exits", "killed", "stopped", "segfault", "memory")
PHASES = ("generate", "receive", "publish", "update", "save", "first-save", "eval", "end")
"""Where: the rollout engine (generate, receive weights, eval), the second rank of the policy (publish, the backward
pass, after its part of a checkpoint), the first before its part, the recorder after the last step."""
_rollout_engine, _build_recorder = assemble.rollout_engine, record.build_recorder


def strike(phase: str, *, at: str = "step_1") -> None:
    """The fault, if it is this phase's, the run has come to checkpoint `at`, and it has not been before."""
    kind, where, run_dir = os.environ[VARIABLE].split(" ", 2)
    if where != phase or not (Path(run_dir) / "checkpoints" / at).is_dir():
        return
    try:
        (Path(run_dir) / "struck").open("x").write(str(os.getpid()))
    except FileExistsError:
        return
    if kind == "raises":
        raise RuntimeError("planted")
    if kind == "exits":
        os._exit(3)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), -1))
        torch.empty(16 << 30, dtype=torch.uint8)
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[kind])


def before(phase: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def struck(*args: Any, **named: Any) -> Any:
        strike(phase)
        return fn(*args, **named)

    return struck


def model(options: Any, context: Any) -> Any:
    """The engine of a rank; see `PHASES`."""
    engine = rank_engine.build(options, context)
    if context.optim is None or dist.get_rank() > 1:
        return engine
    parts, save = engine.weight_parts, Snapshot.save
    if dist.get_rank() == 0:
        Snapshot.save = before("first-save", save)
        return engine

    def in_the_middle() -> Iterator[Any]:
        for i, found in enumerate(parts()):
            if i == 3:
                strike("publish")
            yield found

    def written(self: Snapshot, path: Path) -> None:
        save(self, path)
        strike("save")

    engine.weight_parts, Snapshot.save = in_the_middle, written
    (layer,) = (m for name, m in engine.local.trained().named_modules() if name.endswith("layers.0"))
    layer.register_full_backward_pre_hook(lambda *_: strike("update"))
    return engine


def one_rank(options: Any, context: Any) -> Any:
    """The engine of a model on one rank; a teacher's second pass is the phase `teach`."""
    engine, calls = torch_engine.build(options, context), itertools.count(1)
    infer = engine.infer

    def said(*args: Any, **named: Any) -> Any:
        if next(calls) == 2:
            strike("teach", at=".")  # whatever is saved by then
        return infer(*args, **named)

    if context.optim is None and context.top_k:
        engine.infer = said  # type: ignore[method-assign]
    return engine


def rollout_engine(config: Any, tokenizer: Any, device: str, replica: int, *more: Any) -> Any:
    engine = _rollout_engine(config, tokenizer, device, replica, *more)
    generate, load_weights = engine.generate, engine.load_weights

    async def generated(request: Any) -> Any:
        strike("generate" if request.sampling.temperature else "eval")
        return await generate(request)

    engine.generate, engine.load_weights = generated, before("receive", load_weights)
    return engine


def build_recorder(*given: Any, ranks: Sequence[Any]) -> list[Any]:
    found = _build_recorder(*given, ranks=ranks)
    for one in found:
        finish = type(one).finish
        type(one).finish = lambda self, finish=finish: strike("end", at="step_3") or finish(self)
    return found
