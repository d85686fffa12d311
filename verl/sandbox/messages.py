"""The messages between a pool and its workers: a pickled `CallableSpec`, then msgpack, each behind its length.

Only the pool writes pickles. A worker shares its process with user code, so its answers are decoded against a type.
"""

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
    """Raised by `CallableSpec.convert` for a returned value that is no result. The text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableSpec:
    """A user's callable."""

    path: str
    """A `.py` file or an importable module."""
    name: str
    """The name of the callable in it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to every call; with `factory` once, to the named function."""
    factory: bool = False
    """The named function returns the callable."""
    parameters: tuple[str, ...] = ()
    """Names of the arguments that every call passes."""
    plural: tuple[str, ...] = ()
    """Their names in a callable that takes lists instead; its lists have one item."""
    convert: Callable[[Any], Any] | None = None
    """An importable function that makes plain data of a returned value, in the worker."""
    returns: Any = Any
    """The type of that data; an answer of another shape counts as a crash."""
    gone: tuple[type[Exception], ...] = ()
    """Exceptions that mean that something it needs no longer exists: such a call has the Failure "broken"."""
    section: str
    """Its section of the configuration, for error messages."""
    called: str = "function"
    """The word for the callable in error messages."""
    given: str = "arguments"
    """The word for its arguments in error messages."""

    def __str__(self) -> str:
        return f"{self.section}.path={self.path} {self.section}.name={self.name}"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a call has no value."""

    reason: Literal["timeout", "memory", "crash", "exception", "bad_result", "broken"]
    """`broken` is no fault of the call: it raised one of `CallableSpec.gone`, or no worker was available."""
    detail: str
    """The text for people."""


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """A worker has loaded the callable, or cannot."""

    pid: int
    """Process id of the worker."""
    error: str = ""
    """Why the callable cannot be used."""


class CallRequest(msgspec.Struct, frozen=True, array_like=True):
    """One call for a worker."""

    number: int
    """Counts the calls of this worker."""
    arguments: bytes
    """A pickled mapping."""


class ReturnedCall(msgspec.Struct, Generic[T], frozen=True, array_like=True, tag="returned"):
    """A call that has a value."""

    number: int
    """The number of the request."""
    grown_mb: Finite
    """Address space that the worker has gained since it was ready."""
    took_s: Finite
    """Duration of the call."""
    value: T
    """Plain data, as `CallableSpec.returns` describes it."""


class FailedCall(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A call that has no value."""

    number: int
    """The number of the request."""
    grown_mb: Finite
    """Address space that the worker has gained since it was ready."""
    took_s: Finite
    """Duration of the call."""
    failure: Failure
    """The reason."""


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
