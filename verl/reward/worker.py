"""The process that runs a user's reward function: one call at a time, in its main thread.

Forked by guardian.py, which loads this file by path: standard library only, until the user's code asks for more.
Requests arrive and answers leave over a socket of their own, so that prints cannot corrupt them. A request is a
pickle (it comes from the trainer); an answer is numbers or JSON (it comes from user code, which the trainer does not
unpickle).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

HEADER = struct.Struct(">I")
PLAIN = struct.Struct(">cIddd")
"""A score without components, which is what most calls give: PLAIN_TAG, id, value, grown_mb, took_s. Any other answer is JSON."""
PLAIN_TAG = b"="
CALL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
ID_NAMES = ("prompt_ids", "response_ids")
MAX_COMPONENTS = 1000
DETAIL_CHARS = 2000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Unloadable(Exception):
    """The user's target cannot be used; the text says why and what to do."""


class Settler:
    """Awaits results of async functions on one event loop that lives as long as the worker.

    One loop, not one per call: a client session or a reward manager made at load time stays usable.
    """

    def __init__(self) -> None:
        self._runner: Any = None  # asyncio.Runner: asyncio is imported only where it is needed

    def settle(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        import asyncio

        async def finish() -> Any:
            try:
                return await value
            finally:  # a stray task of this sample must not run on during the next one
                strays = asyncio.all_tasks() - {asyncio.current_task()}
                for task in strays:
                    task.cancel()
                await asyncio.gather(*strays, return_exceptions=True)

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(finish())


def serve(channel: socket.socket, note_baseline_mb: Callable[[float], None]) -> None:
    """Load the target named by the first request, then answer calls until the channel closes."""
    me = os.getpid()
    os.set_inheritable(channel.fileno(), False)
    # A child forked by user code must not hold the channel: its end is how the pool learns that we are gone.
    os.register_at_fork(after_in_child=channel.close)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    with contextlib.suppress(
        OSError
    ):  # if the machine runs out of memory, the kernel takes the grader, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    settler = Settler()
    frames = Frames(channel)
    frame = frames.receive()
    if frame is None:
        return
    init = pickle.loads(frame)
    sys.path[:] = init["sys_path"]
    try:
        grader = load(init, settler)
    except Unloadable as error:
        return send(channel, {"error": str(error)})
    except BaseException as error:  # user code: its module, or its factory
        return send(channel, {"error": f"loading it raised {_where(error)}"})
    if os.getpid() != me:
        os._exit(0)
    memory = Memory()
    start_mb = memory.address_space_mb()
    note_baseline_mb(memory.resident_mb())
    limit = _limit_address_space(start_mb + init["memory_limit_mb"])
    send(channel, {"pid": me})
    tidy = functools.partial(_tidy, sys.getrecursionlimit(), os.getcwd())
    while (frame := frames.receive()) is not None:
        began_s = time.perf_counter()
        answer = grade(grader, settler, frame, limit)
        if os.getpid() != me:  # a child that the grader forked came back with us
            os._exit(0)
        tidy()
        (number,) = HEADER.unpack_from(frame)
        grown_mb, took_s = memory.address_space_mb() - start_mb, time.perf_counter() - began_s
        if "value" in answer and not answer["components"]:
            send_body(channel, PLAIN.pack(PLAIN_TAG, number, answer["value"], grown_mb, took_s))
        else:
            send(channel, {**answer, "id": number, "grown_mb": grown_mb, "took_s": took_s})
        if answer.get("reason") == "memory" or grown_mb >= init["memory_limit_mb"] / 2:
            return  # calls that were sent with this one are for a fresh process


def _tidy(recursion_limit: int, folder: str) -> None:
    """What a call leaves behind must not hit the next sample, nor pile up."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.setrecursionlimit(recursion_limit)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None or getattr(sys, name).closed:
            setattr(sys, name, os.fdopen(fd, "w", 1, closefd=False))
    with contextlib.suppress(OSError):
        os.chdir(folder)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # children that ended, and that nobody waited for
            pass


def grade(grader: Callable[..., Any], settler: Settler, frame: bytes, limit: tuple[int, int] | None) -> dict[str, Any]:
    """One call of the user's function, as an answer without its id."""
    try:
        return plain_result(settler.settle(grader(**pickle.loads(frame[HEADER.size :]))))
    except MemoryError as error:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit[1], limit[1]))  # room to say what happened
        return {"reason": "memory", "detail": _trace(error)}
    except TimeoutError as error:
        return {"reason": "timeout", "detail": _trace(error)}
    except BaseException as error:  # user code; SystemExit and the like end the call, not the worker
        return {"reason": "exception", "detail": _trace(error)}


def plain_result(value: Any) -> dict[str, Any]:
    """What a reward function returned, as {"value", "components"} or {"reason": "bad_result", "detail"}.

    A number, a bool, anything with `.item()`, or a mapping with such a "score". Further finite numbers of the mapping
    become components; its other entries (texts, lists) are not rewards and are left out. Never raises on odd values
    of the standard kinds; an object whose own methods raise is the caller's to catch.
    """
    components: dict[str, float] = {}
    score = value
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(repr(k) for k in list(value)[:8])
            return _bad(f'the reward function returned a dict without "score" (keys: {keys or "none"})')
        score = value["score"]
        for name, item in value.items():
            number = _number(item)
            if isinstance(name, str) and name != "score" and number is not None and math.isfinite(number):
                components[name] = number
            if len(components) > MAX_COMPONENTS:
                return _bad(
                    f"the reward function returned {len(value)} values; at most {MAX_COMPONENTS} components are kept"
                )
    number = _number(score)
    if number is None:
        return _bad(
            f"the reward function returned {_short(score)}; a number or a dict with a number as score is needed"
        )
    if not math.isfinite(number):
        return _bad(f"the reward function returned {number}; a score must be finite")
    return {"value": number, "components": components}


def _number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real):
        item = getattr(value, "item", None)
        if not callable(item) or isinstance(value, type):
            return None
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # numpy and torch on more than one element
            return None
        if not isinstance(value, numbers.Real):
            return None
    try:
        return float(value)
    except OverflowError:  # an int beyond 1e308
        return math.inf


def _bad(detail: str) -> dict[str, Any]:
    return {"reason": "bad_result", "detail": detail}


def _short(value: Any) -> str:
    if value is None:
        return "None"
    return f"the text {value[:60]!r}" if isinstance(value, str) else f"a {type(value).__name__}"


def load(init: Mapping[str, Any], settler: Settler) -> Callable[..., Any]:
    """The callable that the pool's target names, its kwargs bound. Raises Unloadable: the reason and the fix."""
    path, name, kwargs = init["path"], init["name"], dict(init["kwargs"])
    module = load_module(path)
    grader: Any = module
    for part in name.split("."):
        if not hasattr(grader, part):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            near = get_close_matches(name, known, n=1)
            hint = (
                f"did you mean reward.name={near[0]}?"
                if near
                else f"it defines: {', '.join(known[:8]) or 'no function'}"
            )
            raise Unloadable(f"{module.__file__} has no {name!r}; {hint}")
        grader = getattr(grader, part)
    if not callable(grader):
        raise Unloadable(f"{name!r} in {module.__file__} is a {type(grader).__name__}, not a function")
    if init["factory"]:
        _check_call(grader, name, (), kwargs)
        grader, kwargs = settler.settle(grader(**kwargs)), {}
    _check_call(grader, name, CALL_NAMES + (ID_NAMES if init["with_ids"] else ()), kwargs)
    return functools.partial(grader, **kwargs)


def load_module(path: str) -> ModuleType:
    """Import a `.py` file or an importable module."""
    path = path.removeprefix("pkg://")
    if path.endswith(".py") or os.sep in path or os.path.isfile(path):
        file = Path(path).expanduser().absolute()
        if not file.is_file():
            raise Unloadable(f"no such file: {file}. Fix: reward.path=/absolute/path/to/your_reward.py")
        # At the end: modules beside the file can be imported, and cannot shadow any other.
        sys.path.append(str(file.parent))
        where = importlib.util.spec_from_file_location(f"user_reward_{file.stem}", file)
        if where is None or where.loader is None:
            raise Unloadable(f"{file} is not a Python file. Fix: give it the suffix .py")
        module = importlib.util.module_from_spec(where)
        sys.modules[where.name] = module
        where.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            raise Unloadable(
                f"no module named {error.name!r}. Fix: reward.path=/path/to/file.py, or install it"
            ) from None
        raise


def _check_call(grader: Callable[..., Any], name: str, names: tuple[str, ...], kwargs: Mapping[str, Any]) -> None:
    """Fail at start, not at the first sample, when the function cannot take what it will be called with."""
    taken = sorted(set(names) & set(kwargs))
    if taken:
        raise Unloadable(f"reward.kwargs has {', '.join(taken)}, which every call sets itself. Fix: rename it")
    try:
        signature = inspect.signature(grader)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        signature.bind(**dict.fromkeys(names), **kwargs)
    except TypeError as error:
        said = ", ".join([*names, *kwargs])
        raise Unloadable(
            f"{name}{signature} cannot be called with ({said}): {error}. Fix its signature, or reward.kwargs"
        ) from None


def _where(error: BaseException) -> str:
    """One line: what was raised, and the deepest place of it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (at {error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    said = traceback.format_exception_only(error)[-1].strip()
    return f"{said} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else said


def _trace(error: BaseException) -> str:
    """The last frames of the user's traceback, bounded."""
    here = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, here and here.tb_next, limit=-8))[-DETAIL_CHARS:]


def _limit_address_space(limit_mb: float) -> tuple[int, int] | None:
    """Soft limit only: on MemoryError the worker lifts it to be able to answer. Returns (soft, hard) bytes."""
    if not sys.platform.startswith("linux"):
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(limit_mb * 2**20)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return soft, hard


class Memory:
    """What this process uses, from a file that stays open: it is asked after every call."""

    def __init__(self) -> None:
        self._file = -1

    def address_space_mb(self) -> float:
        return self._pages(0) * PAGE_BYTES / 2**20

    def resident_mb(self) -> float:
        return self._pages(1) * PAGE_BYTES / 2**20

    def _pages(self, field: int) -> int:
        try:
            return int(os.pread(self._file, 128, 0).split()[field])
        except (OSError, ValueError, IndexError):  # the first time, or user code has closed what is not its own
            try:
                self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
                return int(os.pread(self._file, 128, 0).split()[field])
            except OSError:  # not Linux: limits are off there
                return 0


class Frames:
    """What the pool sends: several calls may arrive at once."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._read = bytearray()

    def receive(self) -> bytes | None:
        """One frame, or None at end of file. Waits for as long as the pool has no work; the guardian ends us if it dies."""
        head = self._exactly(HEADER.size)
        return None if head is None else self._exactly(HEADER.unpack(head)[0])

    def _exactly(self, size: int) -> bytes | None:
        while len(self._read) < size:
            part = self._channel.recv(1 << 16)
            if not part:
                return None
            self._read += part
        found = bytes(self._read[:size])
        del self._read[:size]
        return found


def send(channel: socket.socket, answer: Mapping[str, Any]) -> None:
    send_body(channel, json.dumps(answer).encode())


def send_body(channel: socket.socket, body: bytes) -> None:
    channel.sendall(HEADER.pack(len(body)) + body)
