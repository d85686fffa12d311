"""The process that runs a user's callable: one call at a time, in its main thread. guardian.py forks it.

Requests and answers have a socket of their own, so that printed text cannot corrupt them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from verl.sandbox import messages
from verl.sandbox.messages import LENGTH, MAX_VALUE_BYTES, BadResult, CallableSpec, Failure, framed

DETAIL_CHARS = 2000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Unloadable(Exception):
    """The user's callable cannot be used; the text has the reason and the fix."""


class Settler:
    """Runs the results of async functions on one event loop that lasts as long as the worker, so that client sessions
    and objects made at load time stay usable."""

    def __init__(self) -> None:
        self._runner: Any = None  # asyncio.Runner: asyncio is imported only where it is needed

    def settle(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        import asyncio

        async def finish() -> Any:
            try:
                return await value
            finally:  # a stray task of this call must not run on during the next one
                strays = asyncio.all_tasks() - {asyncio.current_task()}
                for task in strays:
                    task.cancel()
                await asyncio.gather(*strays, return_exceptions=True)

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(finish())


def serve_calls(channel: socket.socket, memory_limit_mb: float, note_baseline_mb: Callable[[float], None]) -> None:
    """Load the callable that the first request names, then answer calls until the channel closes."""
    me = os.getpid()
    os.set_inheritable(channel.fileno(), False)
    # A child forked by user code must not hold the channel: when it closes, the pool knows that this process ended.
    os.register_at_fork(after_in_child=channel.close)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends the worker and not the pool
        Path("/proc/self/oom_score_adj").write_text("1000")
    settler = Settler()
    requests = open(channel.fileno(), "rb", buffering=1 << 16, closefd=False)  # noqa: SIM115
    packed = _receive(requests)
    if packed is None:
        return
    spec: CallableSpec = pickle.loads(packed)
    try:
        function = load(spec, settler)
    except BaseException as error:  # user code: its module, or its factory
        reason = str(error) if isinstance(error, Unloadable) else f"loading it raised {_where(error)}"
        return channel.sendall(framed(messages.Loaded(me, _sendable(reason))))
    if os.getpid() != me:
        os._exit(0)
    memory = MemoryUse()
    start_mb, resident_mb = memory.used_mb()
    note_baseline_mb(resident_mb)
    limit = _limit_address_space(start_mb + memory_limit_mb)
    channel.sendall(framed(messages.Loaded(me)))
    decoder = msgspec.msgpack.Decoder(messages.CallRequest)
    tidy = functools.partial(_tidy, sys.getrecursionlimit(), os.getcwd())
    while (packed := _receive(requests)) is not None:
        began_s = time.perf_counter()
        call = decoder.decode(packed)
        outcome = run_call(function, spec, settler, call.arguments, limit)
        if os.getpid() != me:  # a child that the callable forked has returned from the call too
            os._exit(0)
        tidy()
        grown_mb, took_s = memory.used_mb()[0] - start_mb, time.perf_counter() - began_s
        answer: Any = messages.FailedCall if isinstance(outcome, Failure) else messages.ReturnedCall
        channel.sendall(framed(answer(call.number, grown_mb, took_s, outcome)))
        short = grown_mb >= memory_limit_mb / 2 or (isinstance(outcome, Failure) and outcome.reason == "memory")
        if short or not _has_output():
            return  # a fresh process gets the calls that were sent with this one


def _receive(requests: Any) -> bytes | None:
    """Wait for one message, and return None at end of file. If the pool's process ends, the guardian kills this one."""
    head = requests.read(LENGTH.size)
    return requests.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _tidy(recursion_limit: int, folder: str) -> None:
    """Undo changes by a call that would affect the next one, and reap its children."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.setrecursionlimit(recursion_limit)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None or getattr(sys, name).closed:
            setattr(sys, name, os.fdopen(fd, "w", 1, closefd=False))
    with contextlib.suppress(OSError):
        os.chdir(folder)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # children that the call did not wait for
            pass


def _has_output() -> bool:
    """Return False if user code closed descriptor 1 or 2, so that later prints would fail."""
    try:
        return bool(os.fstat(1) and os.fstat(2))
    except OSError:
        return False


def run_call(
    function: Callable[..., Any], spec: CallableSpec, settler: Settler, arguments: bytes, limit: tuple[int, int] | None
) -> msgspec.Raw | Failure:
    """Call the user's callable once; return its value, encoded, or the Failure."""
    try:
        value = settler.settle(function(**pickle.loads(arguments)))
        return _encoded(value if spec.convert is None else spec.convert(value), spec)
    except spec.broken_by as error:
        return Failure("broken", _sendable(str(error)[:DETAIL_CHARS]))
    except BadResult as error:
        return Failure("bad_result", _sendable(str(error)[:DETAIL_CHARS]))
    except MemoryError as error:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit[1], limit[1]))  # room to send the answer
        return Failure("memory", _trace(error))
    except TimeoutError as error:
        return Failure("timeout", _trace(error))
    except BaseException as error:  # user code; SystemExit and the like end the call, not the worker
        return Failure("exception", _trace(error))


def _encoded(value: Any, spec: CallableSpec) -> msgspec.Raw:
    try:
        body = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadResult(f"the {spec.called} returned a {type(value).__name__}, which cannot be sent: {error}") from None
    if len(body) > MAX_VALUE_BYTES:
        raise BadResult(f"the {spec.called} returned {len(body)} bytes; at most {MAX_VALUE_BYTES} are sent")
    return msgspec.Raw(body)


def load(spec: CallableSpec, settler: Settler) -> Callable[..., Any]:
    """Return the callable that the spec names, with its kwargs bound. Raises Unloadable."""
    module, kwargs = load_module(spec.path, spec.section), dict(spec.kwargs)
    found: Any = module
    for part in spec.name.split("."):
        if not hasattr(found, part):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            near = get_close_matches(spec.name, known, n=1)
            defined = f"it defines: {', '.join(known[:8]) or 'no function'}"
            hint = f"did you mean {spec.section}.path={spec.path}:{near[0]}?" if near else defined
            raise Unloadable(f"{module.__file__} has no {spec.name!r}; {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise Unloadable(f"{spec.name!r} in {module.__file__} is a {type(found).__name__}, not a function")
    if spec.factory:
        _check_call(found, spec, (), kwargs)
        found, kwargs = settler.settle(found(**kwargs)), {}
    if spec.plural and (signature := _signature(found)) and set(spec.plural) <= set(signature.parameters):
        return functools.partial(_of_lists, found, spec, settler, kwargs)
    _check_call(found, spec, spec.parameters, kwargs)
    return functools.partial(found, **kwargs)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return None


def _of_lists(
    function: Callable[..., Any], spec: CallableSpec, settler: Settler, kwargs: Mapping[str, Any], **given: Any
) -> Any:
    """Call a function that takes lists with lists of one item, and return the one item of its result."""
    lists = {many: [given[one]] for one, many in zip(spec.parameters, spec.plural)}
    found = settler.settle(function(**lists, **kwargs))
    if not hasattr(found, "__len__") or isinstance(found, str | Mapping) or len(found) != 1:
        raise BadResult(
            f"the {spec.called} was given lists of 1 and returned a {type(found).__name__}: give a list of 1"
        )
    return found[0]


def load_module(path: str, section: str) -> ModuleType:
    """Import a `.py` file or an importable module. section: the section of the configuration that names it."""
    path = path.removeprefix("pkg://")
    if path.endswith(".py") or os.sep in path or os.path.isfile(path):
        file = Path(path).expanduser().absolute()
        if not file.is_file():
            raise Unloadable(f"no such file: {file}. Fix: {section}.path=/absolute/path/to/your_{section}.py")
        # At the end of the path: modules beside the file can be imported, and cannot shadow any other.
        sys.path.append(str(file.parent))
        where = importlib.util.spec_from_file_location(f"user_{section}_{file.stem}", file)
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
            fix = f"{section}.path=/path/to/file.py, or install it"
            raise Unloadable(f"no module named {error.name!r}. Fix: {fix}") from None
        raise


def _check_call(
    function: Callable[..., Any], spec: CallableSpec, names: tuple[str, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise Unloadable at start, not at the first call, if the function cannot take its arguments."""
    if taken := sorted(set(names) & set(kwargs)):
        raise Unloadable(f"{spec.section}.kwargs has {', '.join(taken)}, which every call sets itself. Fix: rename it")
    if (signature := _signature(function)) is None:
        return
    try:
        signature.bind(**dict.fromkeys(names), **kwargs)
    except TypeError as error:
        given, fix = ", ".join([*names, *kwargs]), f"Fix its signature, or {spec.section}.kwargs"
        raise Unloadable(f"{spec.name}{signature} cannot be called with ({given}): {error}. {fix}") from None


def _where(error: BaseException) -> str:
    """Return one line with the exception and the innermost line of its traceback."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (at {error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{text} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _trace(error: BaseException) -> str:
    """Return the last frames of the user's traceback, at most DETAIL_CHARS."""
    here = error.__traceback__
    lines = traceback.format_exception(type(error), error, here and here.tb_next, limit=-8)
    return _sendable("".join(lines)[-DETAIL_CHARS:])


def _sendable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 does not have."""
    return text.encode(errors="backslashreplace").decode()


def _limit_address_space(limit_mb: float) -> tuple[int, int] | None:
    """Set the soft limit, which the worker lifts after a MemoryError to be able to answer. Return (soft, hard) bytes,
    or None where there are no such limits."""
    if not sys.platform.startswith("linux"):
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = int(limit_mb * 2**20) if hard == resource.RLIM_INFINITY else min(int(limit_mb * 2**20), hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return soft, hard


class MemoryUse:
    """The memory of this process, from a file that stays open: it is read after every call."""

    def __init__(self) -> None:
        self._file = -1

    def used_mb(self) -> tuple[float, float]:
        """Return address space and resident memory; zeros where there is no /proc (limits are off there)."""
        try:
            return self._read()
        except (OSError, ValueError):  # the first time, or after user code closed the file
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
                return self._read()
            return 0.0, 0.0

    def _read(self) -> tuple[float, float]:
        space, resident, *_ = os.pread(self._file, 128, 0).split()
        return int(space) * PAGE_BYTES / 2**20, int(resident) * PAGE_BYTES / 2**20
