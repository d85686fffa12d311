"""Small rollout engines without an event loop, for tests that watch them step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.on_device import DEVICE
from verl.accel.cpu.kernels import Kernels, load_kernels
from verl.accel.cpu.linear import Packed, PanelProducts
from verl.accel.linear import Plain, Products, SingleProducts
from verl.accel.uniforms import GAMMA, MIX_1, MIX_2
from verl.rollout.base import Completion, GenerateRequest, RolloutContext
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.embedded.sampler import SamplingMetadata
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.rollout.native.runner import NativeRunner
from verl.rollout.noise import NoiseSchedule


def context_of(config: Any, rows: int = 16, **given: Any) -> RolloutContext:
    known = {"max_context_tokens": 256, "dtype": torch.float32, "max_concurrent_sequences": rows, "device": DEVICE}
    return RolloutContext(hf_config=config, **{**known, **given})


def products_of(layout: str, dtype: torch.dtype = torch.float32) -> Products:
    """A layout of weights, whatever this machine would choose. Skips the test if it cannot compute the layout."""
    if layout == "panels":
        kernels = load_kernels(dtype)
        assert isinstance(kernels, Kernels), kernels
        if not kernels.multiplies:
            pytest.skip(f"this CPU has no compiled products in {dtype}")
        return PanelProducts(kernels)
    return SingleProducts(Packed if layout == "packed" else Plain, keeps=layout == "plain")


def native_core(
    config: Any,
    weights: Any,
    *,
    rows: int = 16,
    max_context_tokens: int = 256,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    max_prefill_tokens: int = 512,
    prefix_cache_tokens: int = 4096,
    max_kv_tokens: int | None = None,
    lanes: int = 1,
    layout: str | None = None,
    fp8: bool = False,
    noise: NoiseSchedule | None = None,
    replay_routes: bool = False,
    **rest: Any,
) -> EngineCore:
    """Return the synchronous native engine with `weights` as version 0; `rest` are arguments of the runner."""
    options = Options(
        max_prefill_tokens=max_prefill_tokens,
        prefix_cache_tokens=prefix_cache_tokens,
        max_kv_tokens=max_kv_tokens,
        replay_routes=replay_routes,
    )
    known = {"max_context_tokens": max_context_tokens, "dtype": dtype, "deterministic": deterministic, "fp8": fp8}
    known |= {"noise": noise}
    context = context_of(config, rows, **known)
    products = None if layout is None else products_of(layout)
    core = EngineCore(NativeRunner(options, context, lanes=lanes, products=products, **rest), (), None)
    core.load(weights)
    return core


def source_of(module: Any, version: int = 0) -> Any:
    return SimpleNamespace(version=version, passes=False, seconds={}, tensors=lambda: module.state_dict().items())


def finish(core: EngineCore, requests: Iterable[ActiveRequest] = ()) -> dict[str, Completion]:
    for request in requests:
        core.add(request)
    done: dict[str, Completion] = {}
    while core.busy:
        done |= {c.request_id: c for _, c in core.step()}
    return done


def draws_of(uniform: Any, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0) -> Any:
    """The sampling settings of rows with these uniform numbers [n], from streams that give them at position 5."""
    n, z = len(uniform), (np.asarray(uniform, np.float64) * 2.0**53).astype(np.uint64) << np.uint64(11)
    for shift, factor in ((31, MIX_2), (27, MIX_1), (30, 1)):  # the inverse of `mixed`
        z = _unshifted(z, shift) * np.uint64(pow(factor, -1, 2**64))
    columns = ((temperature, np.float32), (top_k, np.int64), (top_p, np.float32), (min_p, np.float32))
    filled = [np.broadcast_to(np.asarray(value, kind), n).copy() for value, kind in columns]
    drawn = SamplingMetadata(*filled, z - np.uint64(6 * GAMMA % 2**64), np.full(n, 5))
    assert (drawn.uniform == uniform).all()
    return drawn


def _unshifted(z: np.ndarray, shift: int) -> np.ndarray:
    """The y with y ^ (y >> shift) = z."""
    y = z.copy()
    for _ in range(64 // shift):
        y = z ^ (y >> np.uint64(shift))
    return y


class Interrupted:
    """An engine that stops in the middle of a request on demand, in any process."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def begin(self, ids: Any, sampling: Any) -> int:
        """A request that has some of its tokens, and no more until `resume`."""
        before = self._inner.stats()["sampled_tokens"]
        self._asked = asyncio.ensure_future(self._inner.generate(GenerateRequest("interrupted", ids, sampling)))
        while self._inner.stats()["sampled_tokens"] == before:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        await self._inner.pause("keep")
        return self._inner.stats()["sampled_tokens"] - before

    async def end(self) -> Completion:
        return await self._asked


def interrupted(context: RolloutContext) -> Interrupted:
    return Interrupted(build(Options(), context))
