"""The content of a process with one rank: it builds the worker, and answers its calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from verl.model_engine.layout import Layout
from verl.workers.answers import RankAnswer, failed_answer
from verl.workers.group import DevicePlace


class RankHost:
    """One rank in a process of its own. `build` comes first; then one thread serves one call after the other."""

    def __init__(self, loads: Callable[[bytes], Any] = pickle.loads) -> None:
        self._loads = loads
        self._ranks: Any = None
        self._worker: object = None
        self._store: Any = None

    def serve_at(self, host: str) -> str:
        """Start the store with which the ranks of this group connect, and return its address."""
        from verl.workers.dist import serve_store

        self._store, address = serve_store(host)
        return address

    def build(
        self, address: str, number: int, layout: Layout, place: DevicePlace, wait_timeout_s: float, made: bytes
    ) -> RankAnswer:
        """Build the worker. Return an empty answer, or the error that becomes the answer of every call. wait_timeout_s:
        the deadline of a rank for the others."""
        try:
            build, (set_up, args) = self._loads(made)
            set_up(place)
            if layout.world_size > 1:
                from verl.workers.dist import join_ranks

                self._ranks = join_ranks(address, layout, number, device=place.device, timeout_s=wait_timeout_s)
                (self._worker,) = build(*args, ranks=[self._ranks])
            else:
                from verl.model_engine.base import OneRank

                (self._worker,) = build(*args, ranks=[OneRank()])
        except BaseException as e:
            return failed_answer(e)
        return RankAnswer()

    def call(self, number: int, payload: bytes) -> RankAnswer:
        """Run call `number` of the group."""
        if self._ranks is not None:
            self._ranks.begin(number)
        found = self.call_at_once(payload)
        if found.error is not None and self._ranks is not None:
            self._ranks.abort(f"{type(found.error).__name__}: {found.error}")
        return found

    def call_at_once(self, payload: bytes) -> RankAnswer:
        """Run a call that exchanges nothing with other ranks."""
        try:
            method, args = self._loads(payload)
            return RankAnswer(method(self._worker, *args))
        except BaseException as e:
            return failed_answer(e)
