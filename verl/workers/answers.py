"""The answers of a worker in another process: a value, or an error that can be raised here. No torch, no Ray."""

from __future__ import annotations

import asyncio
import pickle
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FENCE_S = 5.0  # the time that the other ranks of a call get to finish after one has raised
GLOO_LATE = re.compile(r"Timed out waiting (\d+)ms for (\w+) operation")


class RankLate(TimeoutError):
    """Another rank is slow or stopped: it did not reach an exchange, or did not finish it."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer of a worker: a value, or an error with its traceback in the worker."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def late(error: BaseException) -> BaseException:
    """Translate gloo's error about a rank that does not answer into a `RankLate`; return any other error unchanged."""
    if not isinstance(error, RuntimeError) or (found := GLOO_LATE.search(str(error))) is None:
        return error
    return RankLate(f"waited {int(found[1]) / 1000:g} s for another rank, which is slow or stopped ({found[2]}, gloo)")


def failed_answer(error: BaseException) -> RankAnswer:
    text = "".join(traceback.format_exception(error))
    error = late(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return RankAnswer(error=error, trace=text)


def first_failure(found: Sequence[RankAnswer]) -> RankAnswer | None:
    """Return the first failure that was not caused by the failure of another rank, or else the first failure."""
    errors = [answer for answer in found if answer.error is not None]
    own = [answer for answer in errors if not is_consequence(answer)]
    return next(iter(own or errors), None)


def is_consequence(answer: RankAnswer) -> bool:
    """Return True if the error reports that another rank has failed or ended."""
    by_name = type(answer.error).__name__ in ("MeetingEnded", "RankLate")
    return by_name or "by peer" in str(answer.error)  # gloo's, of a connection


def raised(answer: RankAnswer, what: str) -> BaseException:
    """Return the worker's error, to be raised here, with its traceback in the worker as a note."""
    assert answer.error is not None
    error = answer.error
    if isinstance(error, StopIteration | asyncio.CancelledError) or type(error).__name__ == "CancelledError":
        error = RuntimeError(f"{what} ended with {type(error).__name__}: {error}")
    error.add_note(f"in a worker:\n{answer.trace}")
    return error
