"""A tool that searches: an index of our own (tools/bm25.py), or any HTTP retriever with Search-R1's contract, POST
{queries, topk, return_scores} gives {result: [[{document: {contents}, score}, ...] per query]}. verl's name and schema.

Calls of all trajectories that come within a few milliseconds are one request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from verl.errors import Refused
from verl.tools.base_tool import BaseTool
from verl.tools.bm25 import Index
from verl.tools.function_tool import ToolBroken
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

RETRY_S = 5.0  # a request waits so long for a retriever that is down
GATEWAY = (502, 503, 504)  # what stands before a retriever says of one that is down
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for passages that answer questions.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {"type": "array", "items": {"type": "string"}, "description": "One query or several."}
            },
            "required": ["query_list"],
        },
    },
}


class SearchTool(BaseTool):
    """config: retrieval_service_url, or index, the folder of one; topk (3), passages per query; timeout (30), seconds
    of a request; window_ms (5), how long a call waits for others; num_workers (16), requests at once; timeout_s, as of
    every tool: half of it at most is spent on a retriever that is down."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        folder, url = config.get("index"), config.get("retrieval_service_url", "")
        if folder is not None and url:
            raise Refused(f"search: index={folder} and retrieval_service_url={url}: give one of them")
        if folder is None and not str(url).startswith(("http://", "https://")):
            raise Refused(f"search: retrieval_service_url={url}: give http://HOST:PORT/retrieve, or index=FOLDER")
        self._index = None if folder is None else Index(Path(folder))
        self._url, self._topk = str(url), int(config.get("topk", 3))
        self._timeout_s, self._window_s = float(config.get("timeout", 30)), float(config.get("window_ms", 5)) / 1e3
        if self._topk < 1 or self._timeout_s <= 0 or self._window_s < 0:
            raise Refused(f"search: topk={self._topk}, timeout={self._timeout_s}, window_ms={1e3 * self._window_s}")
        self._retry_s = min(RETRY_S, float(config.get("timeout_s", 2 * RETRY_S)) / 2)
        self._places = asyncio.Semaphore(int(config.get("num_workers", 16)))
        self._waiting: list[tuple[list[str], asyncio.Future[list[list[str]]]]] = []
        self._asked: set[asyncio.Task[None]] = set()
        self._down_s, self._why = 0.0, ""  # when the retriever was found down last

    def content(self) -> str:
        return "" if self._index is None else self._index.content

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        queries = list(parameters["query_list"])
        if not queries:
            raise ValueError("query_list is empty; it takes one query or several")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[list[str]]] = loop.create_future()
        self._waiting.append((queries, answer))
        if len(self._waiting) == 1:
            loop.call_later(self._window_s, self._send)
        found = await answer
        return ToolResponse(text="\n---\n".join(told(passages) for passages in found)), None, {}

    def _send(self) -> None:
        """What has come within the window, as one request."""
        calls, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._ask(calls))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _ask(self, calls: Sequence[tuple[list[str], asyncio.Future[list[list[str]]]]]) -> None:
        """A failure goes to all who asked: it costs them their calls, and nobody else anything."""
        calls = [(queries, answer) for queries, answer in calls if not answer.done()]  # others were given up
        flat, came_s = [query for queries, _ in calls for query in queries], time.monotonic()
        try:
            async with self._places:
                if came_s < self._down_s:  # it waited for a place that long: it has no time to find out again
                    raise ToolBroken(self._why)
                found = await self._found(flat)
        except Exception as e:  # of the retriever: it is the caller's answer
            for _, answer in calls:
                if not answer.done():
                    answer.set_exception(e)
            return
        at = 0
        for queries, answer in calls:
            if not answer.done():
                answer.set_result(found[at : at + len(queries)])
            at += len(queries)

    async def _found(self, queries: list[str]) -> list[list[str]]:
        """The passages of each query. RuntimeError for a retriever that answers wrongly or late."""
        if (index := self._index) is not None:
            return await asyncio.to_thread(
                lambda: [[index.passage(number) for number, _ in index.search(query, self._topk)] for query in queries]
            )
        body = json.dumps({"queries": queries, "topk": self._topk, "return_scores": True}).encode()
        try:
            rows = json.loads(await self._posted(body))["result"]
            found = [[str(p.get("document", p)["contents"]) for p in row] for row in rows]
        except TimeoutError as e:
            raise RuntimeError(f"the retriever gave no result: timed out after {self._timeout_s:g} s") from e
        except (aiohttp.ClientError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise RuntimeError(f"the retriever gave no result: {type(e).__name__}: {e}") from e
        if len(found) != len(queries):
            raise RuntimeError(f"the retriever gave {len(found)} results for {len(queries)} queries")
        return found

    async def _posted(self, body: bytes) -> bytes:
        """What the retriever says. One that is down is asked again for a while; then ToolBroken: no answer of it may
        be held against the model."""
        limit = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(self._retry_s, self._timeout_s))
        end_s, pause_s, header = time.monotonic() + self._retry_s, 0.1, {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(timeout=limit, headers=header, trust_env=True) as session:
            while True:
                try:
                    async with session.post(self._url, data=body) as answer:
                        if answer.status not in GATEWAY:
                            answer.raise_for_status()
                            return await answer.read()
                        why = f"HTTP {answer.status}"
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as e:
                    why = f"{type(e).__name__}: {e}"
                if time.monotonic() + pause_s > end_s:
                    self._down_s, self._why = time.monotonic(), f"the retriever at {self._url} is down: {why}"
                    raise ToolBroken(self._why)
                await asyncio.sleep(pause_s)
                pause_s *= 2


def told(passages: Sequence[str]) -> str:
    """What the model reads: Search-R1's `Doc 1 (Title: ...)`, the title being a passage's first line."""
    parts = (passage.partition("\n") for passage in passages)
    text = "\n\n".join(f"Doc {k} (Title: {title})\n{rest}".rstrip() for k, (title, _, rest) in enumerate(parts, 1))
    return text or "(nothing found)"
