"""SGLang's HTTP API, as of 0.5.23."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.rollout.api import Api, Post, TokenBudget
from verl.rollout.base import PauseMode, Traits
from verl.rollout.http import ServerRefused
from verl.rollout.traits import SGLANG
from verl.rollout.vllm_api import WORDS
from verl.rollout.wire import NotUnderstood, ServerAnswer
from verl.types import Sampling
from verl.weight_sync.base import CheckedReader, FolderOfTensors, SyncError, WeightSource, open_stream

POLICY = "policy"
"""The name under which requests without an adapter are sent."""


class SglangApi(Api):
    """SGLang's API. The client itself waits for requests or aborts them before an update: SGLang's `abort` mode ends
    the requests of all clients and leaves the scheduler running. An abort before its request reaches the scheduler is
    lost, and so is every later one. Therefore requests are held back here during a pause.

    A policy of LoRA: the base is copied into a folder without the factors that are stored beside it, since SGLang reads
    all tensors of a folder.
    """

    generate = "/generate"

    def __init__(self, traits: Traits = SGLANG) -> None:
        self.traits = traits
        self._base: OwnFolder | None = None

    def body(
        self, model: str, name: str, prompt: Sequence[int], sampling: Sampling, room: TokenBudget
    ) -> dict[str, Any]:
        s, truncated = sampling, sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        most = self.traits.max_candidates
        top_k = s.top_k or (room.vocab if truncated and room.vocab <= most else -1)
        if truncated and s.temperature > 0 and not 0 < top_k <= most:
            why = f"SGLang tells the log-probs of truncated draws for top_k from 1 to {most} alone"
            raise Refused(f"top_p={s.top_p} min_p={s.min_p} top_k={s.top_k}: {why}; set top_k too, or top_p=1 min_p=0")
        params: dict[str, Any] = {
            "max_new_tokens": min(s.max_tokens, room.tokens),
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": top_k,
            "min_p": s.min_p,
            "stop_token_ids": room.stops(s),
            "ignore_eos": True,
            "sampling_seed": s.seed,
        }
        body = {"rid": name, "input_ids": list(prompt), "sampling_params": params, "return_logprob": True}
        body |= _adapter(model)
        return body | ({"return_sampling_mask": True} if truncated and s.temperature > 0 else {})

    def read(self, drawn: ServerAnswer, answer: Any) -> None:
        """Read an event. It has all tokens until now, or only the new ones, depending on how the server was started."""
        try:
            meta, ids = answer["meta_info"], answer["output_ids"]
            logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
            if (of_mask := meta.get("output_token_sampling_logprobs")) is not None:
                logprobs = of_mask
            if len(ids) == int(meta["completion_tokens"]):
                drawn.ids, drawn.logprobs = [], []
            drawn.add(ids, logprobs)
            if len(drawn.ids) != int(meta["completion_tokens"]):
                raise ValueError(f"{meta['completion_tokens']} tokens were told of, and {len(drawn.ids)} came")
            drawn.cached_tokens, drawn.live = int(meta.get("cached_tokens") or 0), meta.get("weight_version")
            spans = meta.get("weight_versions") or []
            drawn.versions = [(str(of["version"]), int(of["start"]), int(of["end"])) for of in spans if of["end"]]
            if (reason := meta.get("finish_reason")) is not None:
                drawn.finish = str(reason["type"])
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
            raise NotUnderstood(f"the server's answer is not SGLang's: {type(e).__name__}: {e}") from e

    async def score(self, post: Post, model: str, ids: np.ndarray, timeout_s: float) -> np.ndarray:
        params = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": ids.tolist(), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        body |= _adapter(model)
        found = (await post(self.generate, body, timeout_s))["meta_info"].get("input_token_logprobs")
        if not isinstance(found, list) or [entry[1] for entry in found] != ids.tolist():
            raise NotUnderstood("the server's input_token_logprobs are not those of the prompt")
        return np.array([entry[0] for entry in found[1:]], np.float32)

    def adapting(self, name: str, folder: str) -> tuple[str, dict[str, Any]]:
        return "/load_lora_adapter", {"lora_name": name, "lora_path": folder}

    def dropping(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the call that drops an adapter. SGLang answers it once no request uses the adapter."""
        return "/unload_lora_adapter", {"lora_name": name}

    async def abort(self, post: Post, names: Sequence[str]) -> None:
        for name in names:
            await post("/abort_request", {"rid": name})

    async def pause(self, post: Post, mode: PauseMode) -> None:
        """Pause. Running requests return to the queue, and their KV is computed again under the new weights."""
        await post("/pause_generation", {"mode": "retract"})

    async def resume(self, post: Post) -> None:
        await post("/continue_generation", {"torch_empty_cache": False})

    async def announce(self, post: Post, sent: WeightSource) -> None:
        if sent.parameters.whole:
            await asyncio.to_thread(lambda: [None for _ in CheckedReader(sent).tensors()])
            return
        self._base = OwnFolder("verl-lora-base-")
        stream = open_stream(sent)
        assert isinstance(stream, FolderOfTensors), "SGLang reads folders"
        await asyncio.to_thread(stream.write_some, sent, self._base.path / POLICY)

    async def deliver(self, post: Post, sent: WeightSource, name: str) -> None:
        base, self._base = self._base, None
        address = sent.address if base is None else str(base.path / POLICY)
        body = {"model_path": address, "load_format": "auto", "weight_version": name}
        try:
            found = await post("/update_weights_from_disk", body | {"flush_cache": True})
        except ServerRefused as e:
            raise SyncError(f"version {sent.version}: SGLang did not take it: {e}") from e
        finally:
            if base is not None:
                base.cleanup()
        if not isinstance(found, dict) or found.get("success") is not True:
            raise SyncError(f"version {sent.version}: SGLang did not take it: {found}")

    async def sleep(self, post: Post, level: int) -> int:
        """Free memory after a pause: SGLang ends if requests still run. Level 2 drops the weights."""
        await self.pause(post, "keep")
        await post("/release_memory_occupation", {"tags": ["kv_cache", "weights"][:level]})
        return 0

    async def wake(self, post: Post, part: str) -> None:
        await post("/resume_memory_occupation", {"tags": [WORDS[part]]})
        if part == "kv":
            await self.resume(post)

    def routable(self, body: dict[str, Any]) -> bool:
        """Return false for a request with a mask or an adapter: sglang-router 0.3.2 silently drops fields that it does
        not know."""
        return not body.keys() & {"return_sampling_mask", "lora_path"}

    async def behind(self, get: Post) -> set[str]:
        found = await get("/workers")
        try:
            return {str(one["url"]).rstrip("/") for one in found["workers"]}
        except (KeyError, TypeError) as e:
            raise NotUnderstood(f"/workers is not sglang-router's: {type(e).__name__}: {e}") from e

    async def release(self, get: Post) -> str:
        return str((await get("/server_info"))["version"])


def _adapter(model: str) -> dict[str, str]:
    """Return the field of a request that names its adapter, if it has one."""
    return {} if model == POLICY else {"lora_path": model}
