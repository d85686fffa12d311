"""Meetings of the ranks that publish a version: each rank sends a value to the first rank and gets an answer from it.

A rank waits for the first rank alone, and the first rank for each of the others. So if a process dies, its closed
connections end every wait at once. In a collective of all ranks, some would wait for ranks that have failed already,
until torch's deadline. If a rank raises an exception, all ranks raise an error that names it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from verl.errors import Refused
from verl.weight_sync.base import SyncError

T = TypeVar("T")
A = TypeVar("A")
GLOO_REASON = re.compile(r"Timed out waiting \w+|Connection [a-z ]+")
Fault = tuple[str, bool]
"""(the text of an error, True for a mistake of the user); the text is "" without an error."""
NONE: Fault = ("", False)


def several_ranks() -> bool:
    """Return True if this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def meet(at: str, what: str, work: Callable[[], T], answers: Callable[[list[T]], Sequence[A]]) -> A:
    """Run `work` on every rank and return this rank's answer. All ranks call this. at: the beginning of error texts,
    e.g. `version 3` · what: the work in words, e.g. `store its slices` · answers: called on the first rank with the
    values of all ranks; returns the answer of each. Raise SyncError on all ranks if a rank raises an exception or
    dies; Refused for a mistake of the user."""
    rank, cause = dist.get_rank(), None
    try:
        mine, fault = [work()], NONE
    except Exception as e:  # any error of one rank ends the publish on all of them
        mine, fault, cause = [], _fault_of(f"rank {rank} could not {what}: ", e), e
    if rank == 0:
        found = [(fault, mine), *(_received_from(other) for other in range(1, dist.get_world_size()))]
        fault = next((one for one, _ in found if one[0]), NONE)
        given: list[Any] = [None] * len(found)
        if not fault[0]:
            try:
                given = list(answers([value for _, (value,) in found]))
            except Exception as e:  # as above
                fault, cause = _fault_of("", e), e
        for other, answer in enumerate(given[1:], 1):
            with contextlib.suppress(RuntimeError):  # it has ended
                dist.send_object_list([(fault, answer)], other)
        answer = given[0]
    else:
        fault, answer = _sent_to_first((fault, mine))
    if fault[0]:
        raise (Refused if fault[1] else SyncError)(f"{at}: {fault[0]}") from cause
    return answer


def of_first(at: str, what: str, work: Callable[[], T]) -> T:
    """Return the value of `work` of the first rank, which alone calls it, on all ranks. Errors are as those of
    `meet`."""

    def answers(found: list[list[T]]) -> list[T]:
        return found[0] * len(found)

    first = dist.get_rank() == 0
    return meet(at, what, lambda: [work()] if first else [], answers)


def by_all(at: str, what: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank, and return its value once all ranks have finished. Errors are as those of `meet`; the
    error of a single process is raised unchanged."""
    return meet(at, what, work, lambda found: found) if several_ranks() else work()


def _fault_of(prefix: str, error: Exception) -> Fault:
    """Return the fault of a rank that raised this error. prefix: the beginning of its text."""
    text = str(error) if isinstance(error, OSError | SyncError | Refused) else ""  # which need no name of a class
    return prefix + (text or f"{type(error).__name__}: {error}"), isinstance(error, Refused)


def _received_from(rank: int) -> tuple[Fault, Any]:
    """Return (fault, value) of a rank, in which the value is a list of one or none."""
    came: list[Any] = [None]
    try:
        dist.recv_object_list(came, rank)
    except RuntimeError as e:
        return _lost(rank, e), []
    fault, value = came[0]
    return fault, value


def _sent_to_first(found: tuple[Fault, Any]) -> tuple[Fault, Any]:
    """Send (fault, value) to the first rank, and return (fault, answer) from it."""
    came: list[Any] = [None]
    try:
        dist.send_object_list([found], 0)
        dist.recv_object_list(came, 0)
    except RuntimeError as e:
        return _lost(0, e), None
    fault, answer = came[0]
    return fault, answer


def _lost(rank: int, error: RuntimeError) -> Fault:
    """Return the fault of a rank that did not answer. error: gloo's, with paths of its source around the reason."""
    reason = found[0] if (found := GLOO_REASON.search(str(error))) else str(error)
    what = "did not finish its part in time" if reason.startswith("Timed out") else "ended in the middle of the publish"
    return f"rank {rank} {what} ({reason})", False
