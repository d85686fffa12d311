"""Stand-ins that implement the real protocols: a rollout engine without a model, a reward that is a function."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np

from verl.rollout.base import Capabilities, Completion
from verl.types import Invalid, Sampling, Score


class FakeEngine:
    """Tokens are a function of the request's seed; a version bump while a request runs splits its span."""

    def __init__(self, *, delay_s: Callable[[int], float] = lambda seed: 0.0, fail: Callable[[int], bool] = lambda seed: False):
        self.version = -1
        self.calls = 0
        self.running = 0
        self.asleep = False
        self._delay_s = delay_s
        self._fail = fail

    async def generate(self, request_id, prompt_ids, sampling: Sampling, *, prefix_key=None):
        assert not self.asleep, "generate while the engine sleeps"
        self.calls += 1
        self.running += 1
        start = self.version
        try:
            delay = self._delay_s(sampling.seed)
            await asyncio.sleep(delay)
            if self._fail(sampling.seed):
                raise RuntimeError("the engine broke this request")
            rng = random.Random(sampling.seed)
            n = rng.randint(1, min(5, sampling.max_tokens))
            ids = np.array([rng.randint(4, 19) for _ in range(n)], np.int64)
            half = n // 2
            spans = ((start, 0, n),) if start == self.version or not half else ((start, 0, half), (self.version, half, n))
            return Completion(request_id, ids, np.full(n, -1.0, np.float32), spans, "eos")
        finally:
            self.running -= 1

    async def score(self, ids, *, temperature=1.0):
        return np.zeros(len(ids) - 1, np.float32)

    async def load_weights(self, source, *, on_inflight="wait"):
        for _ in source.tensors():
            pass
        while on_inflight == "wait" and self.running:
            await asyncio.sleep(0.001)
        self.version = source.version
        return self.version

    async def pause(self, mode="keep"): ...
    async def resume(self): ...

    async def abort(self, request_ids=None):
        return 0

    async def sleep(self, level=1):
        assert not self.running, "sleep with requests running"
        self.asleep = True
        return 0

    async def wake(self, tags=("weights", "kv")):
        self.asleep = False

    async def capabilities(self):
        return Capabilities("processed", False, True, ("any",), 1024)

    async def close(self): ...


class FunctionReward:
    """A reward function called in place."""

    def __init__(self, fn: Callable[[object], Score | Invalid]):
        self._fn = fn

    async def score(self, request):
        return self._fn(request)

    async def close(self): ...
