"""Stand-ins that implement the real protocols: a rollout engine without a model, a reward that is a function, a
clock."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable

import numpy as np

from verl.rollout.base import BaseEngine, Capabilities, Completion
from verl.types import Invalid, Refs, Sampling, Score, Segment


def put(queue, samples) -> Refs:
    """Rows into a queue, outside of any event loop."""
    return asyncio.run(queue.put(samples))


def unscored(prompt: np.ndarray, answer: np.ndarray) -> tuple[Segment, ...]:
    """Return a row of these ids."""
    return Segment(ids=prompt, source="prompt"), Segment(ids=answer, source="env")


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop with a clock that jumps to the next timer when nothing is left to do: hours pass in no time, in an
    order that depends on no machine. Nothing to wait for at all is an error instead of a hang. No threads, no
    sockets."""

    class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
        now_s = 0.0

        def select(self, timeout=None):
            events = super().select(0)
            if not events:
                if timeout is None:
                    raise RuntimeError("deadlock: nothing will ever happen")
                self.now_s += timeout
            return events

    def __init__(self) -> None:
        self._virtual = self._Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


class FakeEngine(BaseEngine):
    """Tokens are a function of the request's seed; a version bump while a request runs splits its span.

    delay_s, fail, hang: what happens to the request with a given seed. All requests are in `requests` and the running
    ones in `live`; an id that is already running is refused, as by the real engines.
    """

    def __init__(
        self,
        *,
        delay_s: Callable[[int], float] = lambda seed: 0.0,
        fail: Callable[[int], bool] = lambda seed: False,
        hang: Callable[[int], bool] = lambda seed: False,
    ):
        self.version = -1
        self.asleep = False
        self.requests: list[tuple[str, list[int], Sampling]] = []
        self.live: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._delay_s = delay_s
        self._fail = fail
        self._hang = hang

    @property
    def calls(self) -> int:
        return len(self.requests)

    @property
    def running(self) -> int:
        return len(self.live)

    async def generate(self, request):
        request_id, prompt_ids, sampling = request.id, request.prompt_ids, request.sampling
        assert not self.asleep, "generate while the engine sleeps"
        assert request_id not in self.live, f"{request_id} is already running"
        self.requests.append((request_id, list(prompt_ids), sampling))
        self.live.add(request_id)
        self._idle.clear()
        start = self.version
        try:
            await self.work(request_id, sampling.seed)
            if self._fail(sampling.seed):
                raise RuntimeError("the engine broke this request")
            rng = random.Random(sampling.seed)
            n = rng.randint(1, min(5, sampling.max_tokens))
            ids = np.array([rng.randint(4, 19) for _ in range(n)], np.int64)
            half = n // 2
            spans = (
                ((start, 0, n),) if start == self.version or not half else ((start, 0, half), (self.version, half, n))
            )
            return Completion(request_id, ids, np.full(n, -1.0, np.float32), spans, "eos")
        finally:
            self.live.remove(request_id)
            if not self.live:
                self._idle.set()

    async def work(self, request_id: str, seed: int) -> None:
        """Wait as long as the request takes."""
        await asyncio.sleep(1e6 if self._hang(seed) else self._delay_s(seed))

    async def score(self, ids, *, temperature=1.0, parameters="policy", media=()):
        return np.zeros(len(ids) - 1, np.float32)

    async def load_weights(self, source, *, on_inflight="wait"):
        for _ in source.tensors():
            pass
        if on_inflight == "wait":
            await asyncio.wait_for(self._idle.wait(), 60)
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
        return Capabilities(logprobs="processed", in_flight_update=True, max_context_tokens=1024)

    async def close(self): ...


class FunctionReward:
    """A reward function called in place."""

    def __init__(self, fn: Callable[[object], Score | Invalid]):
        self._fn = fn

    async def score(self, request):
        return self._fn(request)

    async def close(self): ...
