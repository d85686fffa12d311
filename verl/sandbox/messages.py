"""What crosses between a pool and its workers: a pickled `CallableSpec`, then msgpack messages, each behind its length.
Only the pool writes pickles. Answers come from a process that user code shares: they are decoded against a type."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

LENGTH = struct.Struct(">I")
MAX_VALUE_BYTES = 4 << 20
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
T = TypeVar("T")


class BadResult(ValueError):
    """Raised by `CallableSpec.convert`: what the callable returned is no result. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableSpec:
    """A user's callable: a `.py` file or an importable module, and a name in it. kwargs: passed to every call; or, with
    `factory`, once, to the named function, which returns the callable. parameters: the names of the arguments that
    every call passes. plural: those of a callable that takes lists instead; its lists have one item. convert: an
    importable function that makes plain data of a returned value, in the worker. returns: the type of that data; an
    answer of another shape is a crash. gone: exceptions by which it says that
    what it needs is gone. section, called, given: how error messages name its configuration, the callable and its
    arguments."""

    path: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    factory: bool = False
    parameters: tuple[str, ...] = ()
    plural: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None
    returns: Any = Any
    gone: tuple[type[Exception], ...] = ()
    section: str
    called: str = "function"
    given: str = "arguments"

    def __str__(self) -> str:
        return f"{self.section}.path={self.path} {self.section}.name={self.name}"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a call has no value. broken: no fault of the call: see `CallableSpec.gone`, or there is no worker for it."""

    reason: Literal["timeout", "memory", "crash", "exception", "bad_result", "broken"]
    detail: str


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    error: str = ""  # why the callable cannot be used


class Call(msgspec.Struct, frozen=True, array_like=True):
    number: int
    arguments: bytes  # a pickled mapping


class Returned(msgspec.Struct, Generic[T], frozen=True, array_like=True, tag="returned"):
    number: int
    grown_mb: Finite  # address space that the worker has gained since it was ready
    took_s: Finite
    value: T


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    number: int
    grown_mb: Finite
    took_s: Finite
    failure: Failure


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
