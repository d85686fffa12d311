"""The asynchronous half of an engine: `RolloutEngine` over an `EngineCore`.

One task drives the core, and ends when there is no work. Steps run on ONE worker thread until the engine is called
again, so the event loop stays free; finished requests are delivered to it meanwhile. Everything else is done to the
core between such runs. Before a run the task waits until no more calls arrive, so that a burst of generate() calls is
admitted as a whole and in its order: the same calls give the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from verl.parameter_set import POLICY_SET, set_of
from verl.rollout.base import (
    IN_PROCESS,
    BaseEngine,
    Capabilities,
    Completion,
    GenerateRequest,
    Media,
    PauseMode,
    ReplicaLost,
    RolloutContext,
    Scores,
    WeightReader,
    capabilities_of,
    check_inputs,
)
from verl.rollout.embedded.checks import InputChecks
from verl.rollout.embedded.core import EngineCore, Explores, Finished, ReadsFormat, Runner, set_abilities
from verl.rollout.embedded.load_thread import LoadThread
from verl.rollout.embedded.requests import ActiveRequest, News
from verl.wire import AS_HELD

T = TypeVar("T")
DELIVER_S = 0.005  # between two deliveries of finished requests, which are scored while the rest is decoded
QUIET_TURNS = 2  # turns of the event loop without a new call, after which a burst is over


@dataclass(slots=True, eq=False)
class Control:
    """A change of state (pause, load, sleep, ...) that runs between steps, in order with the generate() calls."""

    run: Callable[[Control], Coroutine[Any, Any, Any]]
    done: asyncio.Future[Any]


class EmbeddedEngine(BaseEngine):
    """A `RolloutEngine` in this process. Its event loop serves calls while one thread runs the steps of the core."""

    def __init__(self, runner: Runner, context: RolloutContext, *, prefix_cache: bool, notes: tuple[str, ...]) -> None:
        self._core = EngineCore(runner, context.eos_token_ids, context.decode)
        self._runner, self._checks = runner, InputChecks(runner, context)
        form = runner.weight_format if isinstance(runner, ReadsFormat) else AS_HELD
        noisy, seen = isinstance(runner, Explores) and runner.noise_sigma is not None, self._checks.images.reads
        traits = replace(IN_PROCESS, prefix_cache=prefix_cache, media=seen, noise=noisy, codes=form.codes)
        self._capabilities = capabilities_of(
            replace(traits, fp8=context.fp8, stop_strings=context.decode is not None),
            max_context_tokens=context.max_context_tokens,
            sleep_levels=(1, 2),
            weights=form,
            **set_abilities(runner),
            notes=notes,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout", initializer=runner.enter_thread)
        self._loading = LoadThread(runner.enter_thread)
        self._driver: asyncio.Task[None] | None = None
        self._inbox: deque[ActiveRequest | Control] = deque()  # in the order of the calls
        self._held: list[ActiveRequest] = []  # submitted while paused
        self._aborts: list[tuple[list[ActiveRequest], asyncio.Future[int] | None]] = []
        self._pending: dict[str, tuple[ActiveRequest, asyncio.Future[Completion]]] = {}
        self._serving: Control | None = None
        self._orphans = False  # the core holds requests of an event loop that has ended
        self._paused = False  # nothing is admitted and nothing runs
        self._asleep: set[str] = set()
        self._failure: BaseException | None = None
        self._loaded = self._closed = False
        self._torn: BaseException | None = None  # why a load over the live weights failed

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample an answer. `prefix_key` is not used: equal prompts are found by their ids."""
        self._check_alive()
        check_inputs(self._capabilities, request.id, request.parameters, request.media, request.sampling.noise)
        self._core.check_set(request.id, request.parameters)
        self._check_weights("generate")
        active = self._checks.request(request, self._pending)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = (active, future)
        self._inbox.append(active)
        self._wake_driver()
        try:
            return await future
        finally:
            # the caller was cancelled: free its row (all rows, if the event loop ends)
            if self._pop_pending(active) and not (self._driver and self._driver.cancelling()):
                self._aborts.append(([active], None))
                self._wake_driver()

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str = POLICY_SET.id, media: Media = ()
    ) -> np.ndarray:
        check_inputs(self._capabilities, "score", parameters, media)
        return (await self._scored(ids, temperature, 0, parameters, media)).logprobs

    async def score_top(self, ids: np.ndarray, top: int) -> Scores:
        return await self._scored(ids, 1.0, top, POLICY_SET.id)

    async def _scored(self, ids: np.ndarray, temperature: float, top: int, name: str, media: Media = ()) -> Scores:
        ids, images = self._checks.scored(ids, temperature, top, media)
        if len(ids) < 2:
            return Scores(np.zeros(0, np.float32), np.zeros((0, top), np.int64), np.zeros((0, top), np.float32))

        async def run(control: Control) -> Scores:
            self._check_weights("score")
            self._core.check_set("score", name)
            return await self._in_thread(partial(self._runner.score, ids, temperature or 1.0, top, name, images))

        return await self._control(run)

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        """Load weights. With `keep`, requests stop only for the switch: new weights are read into further memory while
        requests use the old ones. If no request can run, they are read over the old ones; after a failure the engine
        has no weights."""
        if set_of(source).id != POLICY_SET.id:
            return await self._load_set(source, on_inflight)
        if on_inflight == "keep":
            return await (await self.prepare_weights(source))("keep")
        return await self._made_live(source, partial(self._core.load, source), 0.0, on_inflight)

    async def prepare_weights(self, source: WeightReader) -> Callable[[PauseMode], Awaitable[int]]:
        """Read weights while requests run, and return a function that makes them live."""
        self._check_alive()
        if source.passes or self._paused or self._asleep or not self._runner.ready:  # nothing is sampled meanwhile
            return partial(self._made_live, source, partial(self._core.load, source), 0.0)
        began = time.perf_counter()
        switch = await self._loading.run(partial(self._core.prepare, source))
        return partial(self._made_live, source, switch, time.perf_counter() - began)

    async def _made_live(self, source: WeightReader, load: Callable[[], int], read_s: float, mode: PauseMode) -> int:
        async def run(control: Control) -> int:
            await self._settle_inflight(mode, control, "load_weights(on_inflight='wait')")
            await self._finish_sets(control)
            began = time.perf_counter()
            try:
                live = await self._in_thread(load)
                self._loaded, self._torn = True, None
            except Exception as e:
                if self._loaded and not self._runner.ready:
                    await self._tear(e)
                raise
            paused_s = time.perf_counter() - began
            source.seconds.update(load=read_s + paused_s - source.seconds.get("transfer", 0.0), pause=paused_s)
            return live

        return await self._control(run)

    async def _load_set(self, source: WeightReader, mode: PauseMode) -> int:
        """Make a version of a LoRA set live. The mode is that of the running requests of this set."""
        name = set_of(source).id

        async def run(control: Control) -> int:
            self._check_weights("load_weights")
            await self._settle_inflight(mode, control, f"load_weights of {name!r}", name)
            began = time.perf_counter()
            live = await self._in_thread(partial(self._core.load_set, source))
            source.seconds["load"] = time.perf_counter() - began - source.seconds.get("transfer", 0.0)
            return live

        return await self._control(run)

    async def drop_set(self, name: str) -> None:
        async def run(control: Control) -> None:
            await self._settle_inflight("wait", control, f"drop_set({name!r})", name)
            await self._in_thread(partial(self._core.drop_set, name))

        await self._control(run)

    async def _finish_sets(self, control: Control) -> None:
        """Let the requests of LoRA sets finish before the weights under them change. If nothing can run, they end with
        the tokens that they have."""
        while self._core.in_sets():
            if not self._can_step:
                await self._abort([one for one in self._core.requests() if one.given.parameters != POLICY_SET.id])
            else:
                await self._run_and_serve(control)

    async def _tear(self, why: Exception) -> None:
        """End all requests after a failed load over the live weights."""
        self._torn = why
        requests = [request for request, _ in self._pending.values()]
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(self._lost("generate"))
        await self._abort(requests)

    def _lost(self, what: str) -> ReplicaLost:
        lost = ReplicaLost(f"{what}: the engine has not all of its new weights: {self._torn}")
        lost.__cause__ = self._torn
        return lost

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause: running requests stop where they are (keep), finish first (wait) or return (abort). New ones wait."""

        async def run(control: Control) -> None:
            await self._settle_inflight(mode, control, "pause('wait')")
            self._paused = True

        await self._control(run)

    async def resume(self) -> None:
        async def run(control: Control) -> None:
            self._paused = False
            held, self._held = self._held, []
            for request in held:
                self._add(request)

        await self._control(run)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Make requests (None: all) return with their partial tokens, and return how many did. This also works during a
        pause or while requests finish before one."""
        self._check_alive()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        names = self._pending.keys() if request_ids is None else self._pending.keys() & set(request_ids)
        self._aborts.append(([self._pending[name][0] for name in names], future))
        self._wake_driver()
        return await future

    async def sleep(self, level: int = 1) -> int:
        """Free KV (except a little of it on a CPU) and prefixes (1), the weights too (2), and return the bytes. Running
        requests keep their tokens, and continue with recomputed KV after wake."""
        if level not in (1, 2):
            raise ValueError(f"sleep level={level}: 1 frees the KV, 2 the weights too")

        async def run(control: Control) -> int:
            self._asleep |= {"kv"} if level == 1 else {"kv", "weights"}
            self._loaded = self._loaded and level == 1
            return await self._in_thread(partial(self._core.sleep, level))

        return await self._control(run)

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        """End the sleep. Memory is allocated on use. After sleep(2) there are no weights before load_weights."""
        if unknown := set(tags) - {"weights", "kv"}:
            raise ValueError(f"wake tags {sorted(unknown)}: known are 'weights' and 'kv'")

        async def run(control: Control) -> None:
            self._asleep -= set(tags)

        await self._control(run)

    async def capabilities(self) -> Capabilities:
        return self._capabilities

    async def close(self) -> None:
        """Close the engine. Pending calls fail; a running step ends in the background."""
        if self._closed:
            return
        self._closed = True
        if self._driver is not None and not self._driver.get_loop().is_closed():
            self._driver.cancel()
        self._abandon(RuntimeError("the rollout engine was closed"))
        self._thread.submit(self._runner.close)
        self._thread.shutdown(wait=False)
        self._loading.close()

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def base(self) -> str:
        return self._core.identity

    def stats(self) -> dict[str, int]:
        """Return counters since construction, and the number of resident requests."""
        return self._core.stats()

    def _check_weights(self, what: str) -> None:
        if self._torn is not None:
            raise self._lost(what)
        if not self._loaded:  # the runner itself has none during a load
            raise ValueError(
                f"{what}: the engine has no weights (never loaded or freed by sleep(2)): load_weights first"
            )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise ReplicaLost(f"the rollout engine has failed: {self._failure!r}") from self._failure
        if self._closed:
            raise RuntimeError("the rollout engine is closed")
        self._follow_loop()

    def _follow_loop(self) -> None:
        """Drop the state of an event loop that has ended: a script may call asyncio.run again."""
        if self._driver is None or (last := self._driver.get_loop()) is asyncio.get_running_loop():
            return
        if not last.is_closed() and (self._pending or not self._driver.done()):
            raise RuntimeError("the rollout engine is in use on another event loop: it serves one loop at a time")
        self._driver = None
        self._abandon(asyncio.CancelledError())

    async def _control(self, run: Callable[[Control], Coroutine[Any, Any, T]]) -> T:
        self._check_alive()
        control = Control(run, asyncio.get_running_loop().create_future())
        self._inbox.append(control)
        self._wake_driver()
        return await control.done

    async def _in_thread(self, run: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _wake_driver(self) -> None:
        if (self._driver is None or self._driver.done()) and not self._closed:
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="rollout-driver")
            self._driver.add_done_callback(self._driver_ended)

    async def _drive(self) -> None:
        if self._orphans:
            self._orphans = False
            await self._in_thread(partial(self._core.abort, None))
        while self._failure is None:
            await self._quiet()
            await self._serve_aborts()
            await self._serve_inbox()
            if self._can_step:
                await self._run_steps()
            elif not self._inbox and not self._aborts:
                return

    @property
    def _can_step(self) -> bool:
        held_back = self._paused or self._asleep or self._failure is not None
        return self._core.busy and self._runner.ready and not held_back

    async def _quiet(self) -> None:
        """Wait until `QUIET_TURNS` turns of the event loop have brought no new call."""
        turns, seen = 0, len(self._inbox)
        while turns < QUIET_TURNS:
            await asyncio.sleep(0)
            turns = turns + 1 if len(self._inbox) == seen else 0
            seen = len(self._inbox)

    async def _serve_inbox(self) -> None:
        while self._inbox and self._failure is None:
            item = self._inbox.popleft()
            if isinstance(item, Control):
                if not item.done.cancelled():
                    await self._serve(item)
            elif self._paused:
                self._held.append(item)
            else:
                self._add(item)

    def _add(self, request: ActiveRequest) -> None:
        """Add a request to the core, or fail its call if its LoRA set ended while it waited."""
        try:
            self._core.check_set(request.given.id, request.given.parameters)
        except ValueError as e:
            if (future := self._pop_pending(request)) is not None and not future.done():
                future.set_exception(e)
        else:
            self._core.add(request)

    async def _serve(self, control: Control) -> None:
        self._serving = control
        task = asyncio.ensure_future(control.run(control))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # no effect if it has ended; otherwise the driver itself was cancelled
        self._serving = None
        error = None if task.cancelled() else task.exception()
        if control.done.done():  # the caller was cancelled, or the engine failed
            return
        if task.cancelled():
            control.done.cancel()
        elif error is not None:
            control.done.set_exception(error)
        else:
            control.done.set_result(task.result())

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()

        def deliver(done: list[Finished], news: list[News]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._report_tokens, news)
                loop.call_soon_threadsafe(self._deliver, done)

        interrupted = lambda: self._wanted() or not loop.is_running()  # noqa: E731
        running = loop.run_in_executor(self._thread, partial(self._core.run, deliver, DELIVER_S, interrupted))
        await asyncio.wait({running})
        if error := running.exception():
            self._fail(error)
            self._check_alive()
        self._report_tokens(self._core.running.news())  # the thread runs no step
        self._deliver(running.result())

    def _wanted(self) -> bool:
        serving = self._serving  # read once: this is the engine's thread
        gave_up = serving is not None and serving.done.done()
        return bool(self._inbox or self._aborts or self._closed or self._orphans or gave_up)

    async def _settle_inflight(self, mode: PauseMode, control: Control, what: str, name: str | None = None) -> None:
        """Let running requests (with `name`: those of this LoRA set) finish, return or continue, by the mode."""
        if mode not in ("keep", "wait", "abort"):
            raise ValueError(f"{mode!r}: what happens to running requests is one of 'keep', 'wait', 'abort'")
        if mode == "abort":
            every = [*self._core.requests(), *self._held]
            await self._abort([one for one in every if name in (None, one.given.parameters)])
        while mode == "wait" and (self._core.busy if name is None else self._core.in_sets(name)):
            if not self._can_step:
                still = f"{len(self._pending)} requests stand still (paused or asleep) and cannot finish"
                raise ValueError(f"{what}: {still}; resume or wake first, or use 'keep' or 'abort'")
            await self._run_and_serve(control)

    async def _run_and_serve(self, control: Control) -> None:
        if control.done.done():
            raise asyncio.CancelledError  # the caller was cancelled
        await self._run_steps()
        await asyncio.sleep(0)
        await self._serve_aborts()

    async def _serve_aborts(self) -> None:
        while self._aborts:
            requests, future = self._aborts.pop(0)
            count = await self._abort(requests)
            if future is not None and not future.done():
                future.set_result(count)

    async def _abort(self, requests: Sequence[ActiveRequest]) -> int:
        """Abort requests, whether they wait or run, and return how many had a waiting caller."""
        stopped = set(requests)
        done = [(item, item.completion("abort")) for item in (*self._held, *self._inbox) if item in stopped]
        self._held = [item for item in self._held if item not in stopped]
        self._inbox = deque(item for item in self._inbox if item not in stopped)
        if self._core.busy:
            done += await self._in_thread(partial(self._core.abort, stopped))
        return self._deliver(done)

    def _deliver(self, done: Sequence[Finished]) -> int:
        """Give results to the callers, and return how many still waited."""
        futures = [(self._pop_pending(request), completion) for request, completion in done]
        for future, completion in futures:
            if future is not None and not future.done():
                future.set_result(completion)
        return sum(future is not None for future, _ in futures)

    def _report_tokens(self, news: Sequence[News]) -> None:
        for request, ids, logprobs in news:
            owner, _ = self._pending.get(request.given.id, (None, None))
            if owner is request and request.given.on_tokens is not None:
                request.given.on_tokens(ids, logprobs)

    def _pop_pending(self, request: ActiveRequest) -> asyncio.Future[Completion] | None:
        """Return the caller's future. An id may be used again after its call, so the request itself is compared."""
        owner, future = self._pending.get(request.given.id, (None, None))
        if owner is not request:
            return None
        del self._pending[request.given.id]
        return future

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        if driver.cancelled():  # its event loop is shutting down
            self._abandon(asyncio.CancelledError())
        elif (error := driver.exception()) and self._failure is None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        cause = ReplicaLost(f"the rollout engine has failed: {error!r}")
        cause.__cause__ = error
        self._abandon(cause)

    def _abandon(self, error: BaseException) -> None:
        """Fail every call with the error, and drop all requests."""
        controls = [item for item in (self._serving, *self._inbox) if isinstance(item, Control)]
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._pending.values()]
        waiting += [control.done for control in controls]
        waiting += [*(future for _, future in self._aborts if future is not None), *self._loading.waits]
        self._pending, self._held, self._inbox, self._aborts = {}, [], deque(), []
        self._serving, self._orphans = None, True
        for future in waiting:
            if future.done() or future.get_loop().is_closed():
                continue
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
