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
GLOO_LOST = re.compile(r"^\[\S*/gloo/transport/\S+\] ")


class RankLate(TimeoutError):
    """Another rank is slow or stopped: it did not reach an exchange, or did not finish it."""


class MeetingEnded(RuntimeError):
    """Another rank of this call has failed, so the exchange cannot take place."""


class PeerLost(RuntimeError):
    """The connection to another rank ended in the middle of an exchange."""


CONSEQUENCES = (RankLate, MeetingEnded, PeerLost)
"""The errors of a rank that are caused by another rank."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer of a worker: a value, or an error with its traceback in the worker."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def typed_error(error: BaseException) -> BaseException:
    """Give an error of torch.distributed about another rank its type: a `RankLate` or a `PeerLost`. Return any other
    error unchanged. gloo raises plain RuntimeErrors, of which only the text is known."""
    if type(error).__name__ == "DistNetworkError":  # of a store; torch is not imported here
        return PeerLost(str(error))
    if type(error) is not RuntimeError:
        return error
    if (found := GLOO_LATE.search(str(error))) is not None:
        waited_s = int(found[1]) / 1000
        return RankLate(f"waited {waited_s:g} s for another rank, which is slow or stopped ({found[2]}, gloo)")
    return PeerLost(str(error)) if GLOO_LOST.match(str(error)) else error


def failed_answer(error: BaseException) -> RankAnswer:
    """Return the answer of a worker that raised this error, with its traceback as text. An error that cannot be pickled
    becomes a RuntimeError."""
    text = "".join(traceback.format_exception(error))
    error = typed_error(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return RankAnswer(error=error, trace=text)


def first_failure(found: Sequence[RankAnswer]) -> RankAnswer | None:
    """Return the first failure that was not caused by the failure of another rank, or else the first failure."""
    errors = [answer for answer in found if answer.error is not None]
    own = [answer for answer in errors if not isinstance(answer.error, CONSEQUENCES)]
    return next(iter(own or errors), None)


def raised(answer: RankAnswer, what: str) -> BaseException:
    """Return the worker's error, to be raised here, with its traceback in the worker as a note."""
    assert answer.error is not None
    error = answer.error
    if isinstance(error, StopIteration | asyncio.CancelledError) or type(error).__name__ == "CancelledError":
        error = RuntimeError(f"{what} ended with {type(error).__name__}: {error}")
    error.add_note(f"in a worker:\n{answer.trace}")
    return error
