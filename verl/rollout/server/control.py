"""vLLM's control plane, for the trainer that owns this server: pause, abort, sleep, and new weights as a transaction.

    start_weight_update -> update_weights (once or more) -> finish_weight_update

The new weights are not live before finish. Finish makes them live at once. If it fails, the server answers no request
until a complete update has succeeded, because its weights are not those that its trainer expects. When the last segment
arrives (`whole`), all are read into further memory while requests continue with the live weights. Segments that are
overwritten after they were read (`passes`) are read over the live weights; nothing is sampled until finish.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from verl.processes.memory import return_device_memory
from verl.rollout.base import PauseMode
from verl.rollout.server.handling import SERVICE, Handler, as_json, computed
from verl.rollout.server.requests import ApiError, shown, typed
from verl.rollout.server.service import Service
from verl.weight_sync.base import SyncError, TensorStream, WeightSource, checksum, open_stream

SEGMENT = "verl-weights"  # the beginning of the names of sync.engine=shm's files; no other file is opened
TRANSPORT = "verl.weight_sync.shm:open_weights"
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
UNREADABLE = (SyncError, ValueError, OSError, KeyError, msgspec.MsgspecError)  # a file that is no whole segment
TAGS = {"weights": "weights", "kv_cache": "kv", "kv": "kv"}  # vLLM's names


class UpdateInfo(msgspec.Struct, kw_only=True):
    """A segment of shared memory that has weights of a new version."""

    path: str
    version: Annotated[int, Meta(ge=0)]
    names: list[str] | None = None
    """The tensors to read. Null: all."""
    checksums: dict[str, int] = {}
    """crc32 of the bytes of tensors, by name."""
    whole: bool = False
    """True for the last segment of an update: its tensors and those before are the whole model."""
    passes: bool = False
    """True if the segment is overwritten after the answer, and has to be read before."""


class UpdateBody(msgspec.Struct):
    """The body of a request to /update_weights."""

    update_info: UpdateInfo


class FinishBody(msgspec.Struct):
    """The body of a request to /finish_weight_update."""

    weight_version: str | None = None  # the name of the weights: the version, perhaps with "-" and more


class InitBody(msgspec.Struct):
    """The body of a request to /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class RpcBody(msgspec.Struct):
    """The body of a request to /collective_rpc."""

    method: str


class AbortBody(msgspec.Struct):
    """The body of a request to /abort_requests. Without ids all requests are aborted."""

    request_ids: list[str] | None = None


class PassingSegments:
    """A `WeightReader` of segments that are overwritten after they were read. The engine reads each as it arrives, in
    its own thread."""

    passes = True

    def __init__(self, version: int, loaded: list[str], wait_s: float) -> None:
        self.version, self._loaded, self._wait_s = version, loaded, wait_s
        self.seconds: dict[str, float] = {}
        self._parts: queue.SimpleQueue[tuple[UpdateInfo, Callable[[], object]] | SyncError | None] = queue.SimpleQueue()

    def tensors(self) -> Iterator[tuple[str, object]]:
        while (found := self._next()) is not None:
            part, done = found
            for name, tensor in _read(part):
                self._loaded.append(name)
                yield name, tensor
            done()

    def _next(self) -> tuple[UpdateInfo, Callable[[], object]] | None:
        """Wait for the next segment, and return it with the function to call after it was read; None: it was the last
        one."""
        try:
            found = self._parts.get(timeout=self._wait_s)
        except queue.Empty:
            found = SyncError(f"version {self.version}: no more of it came for {self._wait_s:g} s")
        if isinstance(found, SyncError):
            raise found
        return found

    def give(self, part: UpdateInfo) -> asyncio.Future[None]:
        """Give the next segment to the engine, and return a future that is done when the engine has read it."""
        loop = asyncio.get_running_loop()
        read: asyncio.Future[None] = loop.create_future()

        def done() -> None:
            if not read.done():
                read.set_result(None)

        self._parts.put((part, lambda: loop.call_soon_threadsafe(done)))
        return read

    def end(self, why: SyncError | None = None) -> None:
        """Record that there are no more segments; with `why`, the load of the engine fails."""
        self._parts.put(why)


@dataclass(slots=True)
class Update:
    """The segments of the running update. It is a `WeightReader` of them after the last one."""

    parts: list[UpdateInfo] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    """The tensors that the engine has read."""
    version: int = -1
    live: Callable[[PauseMode], Awaitable[int]] | None = None
    """Makes weights live that were read while requests continued. None: they are read later."""
    passing: tuple[PassingSegments, asyncio.Future[int]] | None = None
    """The source of overwritten segments that the engine reads as they arrive, and the engine's load of it."""
    passes: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    """As in `WeightReader`."""

    def tensors(self) -> Iterator[tuple[str, object]]:
        for part in self.parts:
            for name, tensor in _read(part):
                self.loaded.append(name)
                yield name, tensor


def _opened(part: UpdateInfo) -> TensorStream:
    """Open the segment of a part. Raise SyncError if it has another version."""
    stream = open_stream(WeightSource(part.version, TRANSPORT, part.path, {}))
    if stream.version != part.version:
        raise SyncError(f"version {part.version}: {part.path} holds version {stream.version}")
    return stream


def _read(part: UpdateInfo) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a part. Raise SyncError if version, checksums or names do not match."""
    at, wanted = f"version {part.version}", None if part.names is None else set(part.names)
    seen = set()
    for name, tensor in _opened(part).tensors():
        if wanted is not None and name not in wanted:
            continue
        seen.add(name)
        if name in part.checksums and checksum(tensor) != part.checksums[name]:
            raise SyncError(f"{at}: {name} is not what its checksum says")
        yield name, tensor
    if missing := sorted(((wanted or set()) | part.checksums.keys()) - seen):
        raise SyncError(f"{at}: {part.path} does not hold {missing[:3]}")


class ControlPlane:
    """The handlers of weight updates, with the running update."""

    def __init__(self) -> None:
        self.update: Update | None = None

    async def start(self, request: web.Request) -> web.Response:
        """Begin an update. An unfinished one before it is dropped."""
        self._drop("another one was begun")  # an unfinished update is not live
        self.update = Update()
        return as_json({"message": "Weight update started"})

    async def announce(self, request: web.Request) -> web.Response:
        """Add a segment to the update: check it, and read it now if it will be overwritten or is the last one."""
        service, update = request.app[SERVICE], self._begun()
        info = (await computed(request, lambda fields: typed(fields, UpdateBody))).update_info
        if not Path(info.path).name.startswith(SEGMENT):
            message = f"path={shown(info.path)}: a file of sync.engine=shm is wanted ({SEGMENT}...)"
            raise ApiError(400, message, param="path", code="invalid_value")
        try:
            if update.parts and (update.live is not None or update.version != info.version):
                raise SyncError(f"version {update.version} is being updated, and {info.path} is of {info.version}")
            if update.parts and (update.passing is not None) != info.passes:
                raise SyncError(f"version {update.version}: of its segments some stay where they are, and some do not")
            if info.passes:
                await self._read_passing(service, update, info)
            elif info.whole and (await service.engine.capabilities()).prepares_weights:
                whole = replace(update, parts=[*update.parts, info], version=info.version)
                async with asyncio.timeout(service.options.request_timeout_s):
                    update.live = await service.engine.prepare_weights(whole)
            elif info.checksums:  # read here, beside the engine's work, and not once more
                await asyncio.to_thread(deque, _read(info), 0)  # to its end
                info.checksums = {}
            else:
                _opened(info)
        except (*UNREADABLE, TimeoutError) as e:
            raise self._failed(service, e) from None
        update.parts.append(info)
        update.version = info.version
        return as_json({"message": "Weights updated"})

    async def finish(self, request: web.Request) -> web.Response:
        """Make the weights of the update live, and answer with the names of the tensors that were loaded."""
        service, update = request.app[SERVICE], self._begun()
        body = await computed(request, lambda fields: typed(fields, FinishBody), absent=b"{}")
        try:
            if not update.parts:
                raise SyncError("finish_weight_update came before any update_weights")
            name = str(update.version) if body.weight_version is None else body.weight_version
            if name.partition("-")[0] != str(update.version):
                raise SyncError(f"weight_version={name}, but version {update.version} was sent")
            service.call_weights(update.version, name)  # before anything is sampled with them
            mode, made = _mode(service), update.live
            async with asyncio.timeout(service.options.request_timeout_s):
                if update.passing is not None:
                    update.passing[0].end()
                    live = await update.passing[1]
                else:
                    load = service.engine.load_weights(update, on_inflight=mode) if made is None else made(mode)
                    live = await service.loads(load)
        except (*UNREADABLE, TimeoutError) as e:
            raise self._failed(service, e) from None
        self.update, service.failed = None, None
        assert live == update.version, f"version {live} is live, and {update.version} was sent"
        message = {"message": "Weight update finished", "weight_version": service.live}
        return as_json({**message, "loaded": update.loaded})

    async def _read_passing(self, service: Service, update: Update, info: UpdateInfo) -> None:
        """Wait until the engine has read a segment that is overwritten later. Raise the error of its load if that
        fails."""
        wait_s = service.options.request_timeout_s
        if update.passing is None:
            source = PassingSegments(info.version, update.loaded, wait_s)
            update.passing = source, service.loads(service.engine.load_weights(source, on_inflight=_mode(service)))
        source, loading = update.passing
        read = source.give(info)
        either: set[asyncio.Future[Any]] = {read, loading}
        await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            if not loading.done():
                raise TimeoutError
            loading.result()

    async def end(self, app: web.Application) -> None:
        """Drop the running update at the end of the server. Otherwise the process would wait for its further
        segments."""
        self._drop("the server ends")

    def _drop(self, why: str) -> None:
        """Drop the running update. A load of the engine fails with the reason."""
        if self.update is not None and self.update.passing is not None:
            source, loading = self.update.passing
            source.end(SyncError(f"version {source.version} was left in the middle: {why}"))
            loading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieved
        self.update = None

    def _begun(self) -> Update:
        """Return the running update. Raise ApiError 409 if there is none."""
        if self.update is None:
            raise ApiError(409, "no weight update has been started: POST /start_weight_update", code="no_update")
        return self.update

    def _failed(self, service: Service, why: BaseException) -> ApiError:
        """Drop the update, stop all generation until a complete one, and return the error."""
        self._drop("it failed")
        message = f"a weight update failed: {why or type(why).__name__}"
        service.failed = f"{message}; nothing is generated before a whole update has succeeded"
        return ApiError(500, message, code="weight_update_failed")


def _mode(service: Service) -> PauseMode:
    """Return the mode of a load: paused requests continue under the new weights, running ones finish first."""
    return "keep" if service.paused or service.asleep else "wait"


def answers_with(what: Callable[[Service], dict[str, Any]]) -> Handler:
    """Return a handler that answers with `what(service)` as JSON."""

    async def handle(request: web.Request) -> web.Response:
        return as_json(what(request.app[SERVICE]))

    return handle


async def init_weight_transfer(request: web.Request) -> web.Response:
    await computed(request, lambda fields: typed(fields, InitBody))
    return as_json({"message": "Weight transfer initialized"})


async def collective_rpc(request: web.Request) -> web.Response:
    """Answer vLLM's endpoint that calls a method of its workers. Only `served_model` is supported, which our client
    calls."""
    service, method = request.app[SERVICE], (await computed(request, lambda fields: typed(fields, RpcBody))).method
    if method != "served_model":
        raise ApiError(400, f"method={shown(method)}: served_model is known", param="method", code="invalid_value")
    return as_json({"results": [{"model": service.options.name, "vocab_size": service.vocab_size}]})


async def pause(request: web.Request) -> web.Response:
    service, mode = request.app[SERVICE], request.query.get("mode", "abort")
    chosen = next((known for known in MODES if known == mode), None)
    if chosen is None:
        raise ApiError(400, f"mode={mode}: one of {', '.join(MODES)}", param="mode", code="invalid_value")
    try:
        async with asyncio.timeout(service.options.request_timeout_s):
            await service.engine.pause(chosen)
    except ValueError as e:  # the requests of a paused engine do not end
        raise ApiError(409, str(e), param="mode", code="invalid_state") from None
    service.paused = True
    return as_json({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    await service.engine.resume()
    service.paused = False
    return as_json({"status": "resumed"})


async def abort_all(request: web.Request) -> web.Response:
    body = await computed(request, lambda fields: typed(fields, AbortBody), absent=b"{}")
    return as_json({"status": "aborted", "aborted": await request.app[SERVICE].abort(body.request_ids or None)})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Drop every prefix by a sleep of the KV; running requests compute theirs again. The engine is woken even if the
    caller disconnects."""
    service = request.app[SERVICE]

    async def drop() -> None:
        await service.engine.sleep(1)
        if "kv" not in service.asleep:
            await service.engine.wake(("kv",))

    await asyncio.shield(drop())
    return as_json({"success": True})


async def sleep(request: web.Request) -> web.Response:
    service, level = request.app[SERVICE], request.query.get("level", "1")
    levels = (await service.engine.capabilities()).sleep_levels
    if level not in map(str, levels):
        raise ApiError(400, f"level={level}: this engine knows {list(levels)}", param="level", code="invalid_value")
    freed = await service.engine.sleep(int(level))
    return_device_memory()
    service.asleep |= {"kv"} if level == "1" else {"kv", "weights"}
    if level == "2":
        service.failed = "the weights were freed by sleep level 2; send new ones"
    return as_json({"status": "asleep", "freed_bytes": freed})


async def wake_up(request: web.Request) -> web.Response:
    service, given = request.app[SERVICE], request.query.getall("tags", ["weights", "kv_cache"])
    if unknown := [tag for tag in given if tag not in TAGS]:
        raise ApiError(400, f"tags={unknown}: known are weights and kv_cache", param="tags", code="invalid_value")
    tags = [TAGS[tag] for tag in given]
    await service.engine.wake(tags)
    service.asleep -= set(tags)
    return as_json({"status": "awake"})


def routes(plane: ControlPlane) -> list[web.RouteDef]:
    posts: dict[str, Handler] = {
        "/pause": pause,
        "/resume": resume,
        "/abort_requests": abort_all,
        "/init_weight_transfer_engine": init_weight_transfer,
        "/collective_rpc": collective_rpc,
        "/start_weight_update": plane.start,
        "/update_weights": plane.announce,
        "/finish_weight_update": plane.finish,
        "/reset_prefix_cache": reset_prefix_cache,
        "/sleep": sleep,
        "/wake_up": wake_up,
    }
    gets: dict[str, Handler] = {
        "/is_paused": answers_with(lambda service: {"is_paused": service.paused}),
        "/is_sleeping": answers_with(lambda service: {"is_sleeping": bool(service.asleep)}),
        "/weight_info": answers_with(lambda service: {"weight_version": service.live}),
        "/get_world_size": answers_with(lambda service: {"world_size": 1}),
    }
    made = [web.post(path, handler) for path, handler in posts.items()]
    return [*made, *(web.get(path, handler, allow_head=False) for path, handler in gets.items())]


PATHS = frozenset(route.path for route in routes(ControlPlane()))
