"""Run functions as tools in processes of their own. A call that hangs (even while it has the interpreter lock),
crashes, or uses too much memory is ended with its process, and the model gets an error as its answer. Other calls do
not wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from verl.sandbox.messages import CallableSpec, Failure
from verl.sandbox.pool import WorkerPool
from verl.tools.answers import ReturnedImage, ToolAnswer, answer_of, content_of, of_parts
from verl.tools.function_tool import ToolBroken

START_S, CLOSE_S = 300.0, 10.0


Sent = tuple[str, float | None, list[tuple[bool, bytes]]]
"""The text and the reward of an answer, and its parts if it has images: whether one is an image, and its bytes."""


def plain(value: Any) -> Sent:
    """Return a function's value in a form that can be sent to another process."""
    found = answer_of(value)
    parts = [
        (True, content_of(part.item, "its image")) if isinstance(part, ReturnedImage) else (False, str(part).encode())
        for part in found.parts
    ]
    return found.text, found.reward, parts


class InProcesses:
    """A `Held` that calls a function in a pool of processes. It has no state per trajectory.

    path, name: the function, which every process imports
    timeout_s: the deadline of a call
    processes: the number of parallel calls

    Raise ValueError if the function cannot be loaded in such a process.
    """

    def __init__(self, path: str, name: str, parameters: Iterable[str], *, timeout_s: float, processes: int) -> None:
        spec = CallableSpec(
            path=path,
            name=name,
            parameters=tuple(parameters),
            convert=plain,
            returns=Sent,
            broken_by=(ToolBroken,),
            section="agent.tools",
            called="tool",
        )
        self._name = name
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"tool {name}", daemon=True).start()
        self._pool: WorkerPool[Sent] = WorkerPool(spec, num_workers=processes, timeout_s=timeout_s)
        try:
            asyncio.run_coroutine_threadsafe(self._pool.start(), self._loop).result(START_S)
        except ValueError:
            self.close()
            raise

    async def open(self, given: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""

    async def call(self, state: None, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]) -> ToolAnswer:
        work = self._pool.call({**arguments, **given})
        found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        if not isinstance(found, Failure):
            text, reward, parts = found
            shown = [ReturnedImage(part) if is_image else part.decode() for is_image, part in parts]
            return ToolAnswer(**(of_parts(shown) if shown else {"text": text}), reward=reward)
        if found.reason == "timeout":
            raise TimeoutError
        if found.reason == "broken":
            raise ToolBroken(found.detail)
        why = found.detail.rstrip().rpartition("\n")[2]
        message = (
            why if found.reason in ("exception", "bad_result") else f"its process was ended ({found.reason}): {why}"
        )
        return ToolAnswer(f"Error: {self._name} failed: {message}", error="exception")

    async def score(self, state: None, given: Mapping[str, Any]) -> None:
        """Return None: there is no score."""

    async def release(self, state: None, given: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._pool.close(), self._loop).result(CLOSE_S)
        except TimeoutError:
            raise TimeoutError(f"the processes of the tool {self._name} did not end in {CLOSE_S:g} s") from None
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
