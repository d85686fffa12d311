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
    """Raised by `CallableSpec.convert` for a returned value that cannot be converted. The text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableSpec:
    """A user's callable, and how it is called."""

    path: str
    """A `.py` file or an importable module."""
    name: str
    """The name of the callable in it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call; with `factory`, of the one call of the named function."""
    factory: bool = False
    """True if the named function returns the callable."""
    parameters: tuple[str, ...] = ()
    """Names of the arguments that every call passes."""
    plural: tuple[str, ...] = ()
    """Names of these arguments in a callable that takes lists. It is called with lists of one item."""
    convert: Callable[[Any], Any] | None = None
    """An importable function that converts a returned value to plain data, in the worker."""
    returns: Any = Any
    """The type of the converted data. An answer of another type counts as a crash."""
    broken_by: tuple[type[Exception], ...] = ()
    """Exceptions that mean that something the callable needs no longer exists. Such a call has the Failure "broken"."""
    section: str
    """The section of the configuration, for error messages."""
    called: str = "function"
    """The noun for the callable in error messages."""
    given: str = "arguments"
    """The noun for its arguments in error messages."""

    def __str__(self) -> str:
        return f"{self.section}.path={self.path}:{self.name}"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a call has no value."""

    reason: Literal["timeout", "memory", "crash", "exception", "bad_result", "broken"]
    """`broken` is not an error of the called function: it raised one of `CallableSpec.broken_by` (a service that
    it needs is lost), or no worker was available."""
    detail: str
    """A description for the user."""


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """The message that a worker has loaded the callable, or why it cannot."""

    pid: int
    """Process id of the worker."""
    error: str = ""
    """Why the callable cannot be used; "" if it can."""


class CallRequest(msgspec.Struct, frozen=True, array_like=True):
    """One call for a worker."""

    number: int
    """Counts the calls of this worker."""
    arguments: bytes
    """A pickled mapping."""


class ReturnedCall(msgspec.Struct, Generic[T], frozen=True, array_like=True, tag="returned"):
    """The result of a call that returned a value."""

    number: int
    """The number of the request."""
    grown_mb: Finite
    """Growth of the worker's address space since it was ready, in MB."""
    took_s: Finite
    """Duration of the call."""
    value: T
    """Plain data, as `CallableSpec.returns` describes it."""


class FailedCall(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The result of a call that failed."""

    number: int
    """The number of the request."""
    grown_mb: Finite
    """Growth of the worker's address space since it was ready, in MB."""
    took_s: Finite
    """Duration of the call."""
    failure: Failure
    """The reason."""


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
