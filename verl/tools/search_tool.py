"""A search tool with verl's name and schema, over an index of tools/bm25.py or an HTTP retriever.

The retriever has Search-R1's interface: POST {queries, topk, return_scores} returns {result: [[{document: {contents},
score}, ...] per query]}. Calls of all trajectories within a few milliseconds are sent as one request.
"""

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
from verl.tools.bm25 import PassageIndex
from verl.tools.function_tool import ToolBroken
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

RETRY_S = 5.0  # longest wait of a request for a retriever that is down
GATEWAY = (502, 503, 504)  # the answers of a gateway before a retriever that is down
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
    """A BaseTool that returns passages for queries. Its config has:

    retrieval_service_url: the retriever; or index: the folder of an index
    topk: number of passages per query; 3
    timeout: time limit of a request in seconds; 30
    window_ms: how long a call waits for further calls, to be sent in one request; 5
    num_workers: number of parallel requests; 16
    timeout_s: the limit that every tool has; at most half of it is spent on a retriever that is down
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        folder, url = config.get("index"), config.get("retrieval_service_url", "")
        if folder is not None and url:
            raise Refused(f"search: index={folder} and retrieval_service_url={url}: give one of them")
        if folder is None and not str(url).startswith(("http://", "https://")):
            raise Refused(f"search: retrieval_service_url={url}: give http://HOST:PORT/retrieve, or index=FOLDER")
        self._index = None if folder is None else PassageIndex(Path(folder))
        self._url, self._topk = str(url), int(config.get("topk", 3))
        self._timeout_s, self._window_s = float(config.get("timeout", 30)), float(config.get("window_ms", 5)) / 1e3
        if self._topk < 1 or self._timeout_s <= 0 or self._window_s < 0:
            raise Refused(f"search: topk={self._topk}, timeout={self._timeout_s}, window_ms={1e3 * self._window_s}")
        self._retry_s = min(RETRY_S, float(config.get("timeout_s", 2 * RETRY_S)) / 2)
        self._places = asyncio.Semaphore(int(config.get("num_workers", 16)))
        self._waiting: list[tuple[list[str], asyncio.Future[list[list[str]]]]] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._down_s, self._why = 0.0, ""  # when the retriever was last found to be down, and how

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
        return ToolResponse(text="\n---\n".join(passages_text(passages) for passages in found)), None, {}

    def _send(self) -> None:
        """Send the calls that arrived within the window as one request."""
        calls, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._ask(calls))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _ask(self, calls: Sequence[tuple[list[str], asyncio.Future[list[list[str]]]]]) -> None:
        """Search for all calls of a request, and set their answers. If the search fails, each of them gets the
        failure."""
        calls = [(queries, answer) for queries, answer in calls if not answer.done()]  # the others were cancelled
        flat, came_s = [query for queries, _ in calls for query in queries], time.monotonic()
        try:
            async with self._places:
                if came_s < self._down_s:  # it waited for its turn meanwhile: it has no time to try again
                    raise ToolBroken(self._why)
                found = await self._found(flat)
        except Exception as e:  # an error of the retriever is the answer of the calls
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
        """Return the passages of each query. Raises RuntimeError for a wrong or late answer of the retriever."""
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
        """Return the retriever's answer. While it is down, repeat the request for some seconds, then raise ToolBroken,
        which makes the attempt invalid."""
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


def passages_text(passages: Sequence[str]) -> str:
    """Return the text for the model: Search-R1's `Doc 1 (Title: ...)`; the title is a passage's first line."""
    parts = (passage.partition("\n") for passage in passages)
    text = "\n\n".join(f"Doc {k} (Title: {title})\n{rest}".rstrip() for k, (title, _, rest) in enumerate(parts, 1))
    return text or "(nothing found)"
