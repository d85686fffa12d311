"""vLLM's token-in-token-out API and control calls, which `verl serve` has too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import Refused
from verl.rollout.api import Api, Post, TokenBudget
from verl.rollout.base import PauseMode
from verl.rollout.http import ServerRefused
from verl.rollout.traits import VERL_SERVE, VLLM
from verl.rollout.vllm_images import vllm_features
from verl.rollout.wire import NotUnderstood, ServerAnswer, prompt_scores
from verl.types import Sampling
from verl.weight_sync.base import Bucket, SyncError, WeightSource

if TYPE_CHECKING:
    import torch

    from verl.rollout.embedded.images import RequestImages

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
REQUEST_PREFIX = "generate-tokens-"  # the server adds it to a request's id, and an abort needs it
COUNTED = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")  # metrics that grow with the work done
WORDS = {"weights": "weights", "kv": "kv_cache"}  # the server's names of the parts that sleep
NEVER = -1e30  # added to the logit of a banned id; JSON has no infinity
LEFT_S = 5.0  # for ending an update in the middle
FOLLOWED_S = 0.25  # between two events of a stream: the tokens since then are lost with a server
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "ignore_eos": True}


class VllmApi(Api):
    """The API of `vllm serve`: requests with token ids, and the calls that pause it, update its weights and load
    adapters."""

    generate = GENERATE

    def __init__(self, *, resumable_stream: bool = False, lora_policy: bool = True, media: bool = False) -> None:
        self.traits = replace(VLLM, resumable_stream=resumable_stream, lora_policy=lora_policy, media=media)

    def body(
        self, model: str, name: str, prompt: Sequence[int], sampling: Sampling, room: TokenBudget
    ) -> dict[str, Any]:
        params = room.request_fields(sampling) | {"logprobs": 0, "detokenize": False}
        params |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        if sampling.banned:
            params["logit_bias"] = dict.fromkeys(map(str, sampling.banned), NEVER)
        return {"model": model, "request_id": name, "token_ids": list(prompt), "sampling_params": params}

    def image_fields(self, images: RequestImages, dtype: torch.dtype) -> dict[str, Any]:
        return {"features": vllm_features(images, dtype)}

    def read(self, drawn: ServerAnswer, answer: Any) -> None:
        try:
            usage = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            drawn.cached_tokens = int(usage.get("cached_tokens") or drawn.cached_tokens)
            for choice in answer["choices"]:
                found = choice.get("logprobs") or {}
                drawn.add(choice["token_ids"] or [], [of["logprob"] for of in found.get("content") or ()])
                for span in choice.get("weight_versions") or ():
                    drawn.versions.append((str(span["version"]), int(span["start"]), int(span["end"])))
                drawn.finish = choice.get("finish_reason") or drawn.finish
                drawn.live = choice.get("weight_version") or drawn.live  # only `verl serve` has it
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise NotUnderstood(f"the server's answer is not vLLM's: {type(e).__name__}: {e}") from e

    async def score(self, post: Post, model: str, ids: np.ndarray, timeout_s: float) -> np.ndarray:
        params = ONE_TOKEN | {"prompt_logprobs": 0}  # scoring needs one sampled token
        body = {"model": model, "token_ids": ids.tolist(), "sampling_params": params}
        return prompt_scores((await post(GENERATE, body, timeout_s)).get("prompt_logprobs"), ids)

    def adapting(self, name: str, folder: str) -> tuple[str, dict[str, Any]]:
        return "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}

    def dropping(self, name: str) -> tuple[str, dict[str, Any]]:
        return "/v1/unload_lora_adapter", {"lora_name": name}

    async def abort(self, post: Post, names: Sequence[str]) -> None:
        await post(ABORT, {"request_ids": [REQUEST_PREFIX + name for name in names]})

    async def pause(self, post: Post, mode: PauseMode) -> None:
        await post(f"/pause?mode={mode}")

    async def resume(self, post: Post) -> None:
        await post("/resume")

    async def announce(self, post: Post, sent: WeightSource) -> None:
        checksums = {name: e.checksum for name, e in sent.delivered.items() if e.checksum is not None}
        names = None if sent.parameters.whole else list(sent.delivered)  # LoRA factors are stored beside them
        info = {"path": sent.address, "version": sent.version, "names": names, "checksums": checksums}
        await post("/start_weight_update")
        info |= ({"whole": True} if self.traits.prepares_weights else {}) | (
            {"parts": sent.parts} if sent.parts else {}
        )
        await post("/update_weights", {"update_info": info})

    async def send_buckets(self, post: Post, sent: WeightSource, buckets: AsyncIterator[Bucket]) -> None:
        await post("/start_weight_update")
        async for bucket in buckets:
            checksums = {name: found for name, found in bucket.checksums.items() if found is not None}
            info = {"path": bucket.path, "version": sent.version, "names": None, "checksums": checksums, "passes": True}
            if parts := {name: sent.parts[name] for name in bucket.checksums if name in sent.parts}:
                info |= {"parts": parts}
            await post("/update_weights", {"update_info": info})

    async def deliver(self, post: Post, sent: WeightSource, name: str) -> None:
        found = await post("/finish_weight_update", {"weight_version": name})
        if not isinstance(found, dict) or "loaded" not in found:
            workers = (await post("/collective_rpc", {"method": "loaded_weights"}))["results"]
        else:
            workers = [found]
        for worker in workers:
            compare_loaded(sent, worker)
        if self.traits.media:  # what the tower returned under older weights
            await post("/reset_encoder_cache")
        found = await post("/reset_prefix_cache")
        if not isinstance(found, dict) or found.get("success") is False:
            raise SyncError(f"version {sent.version}: the server keeps prefixes of older weights ({found})")

    async def sleep(self, post: Post, level: int) -> int:
        found = await post(f"/sleep?level={level}")
        return int(found.get("freed_bytes", 0)) if isinstance(found, dict) else 0

    async def wake(self, post: Post, part: str) -> None:
        await post(f"/wake_up?tags={WORDS[part]}")

    async def paused(self, get: Post) -> bool | None:
        try:
            return bool((await get("/is_paused"))["is_paused"])
        except ServerRefused:  # a missing path is reported by the call that needs it
            return None

    async def progress(self, get: Post) -> Any:
        found = (await get("/metrics", text=True)).splitlines()
        return [line for line in found if line.startswith(COUNTED)] or None

    async def unlike(self, post: Post, model: str, config: Any) -> str:
        """Compare the model's sizes, which vLLM's workers report: an id outside of the vocabulary would end vLLM."""
        found = dict((await post("/collective_rpc", {"method": "served_model"}))["results"][0])
        found.pop("float32", None)
        if found.pop("splits", False):
            why = "a seeded request whose prefill is split would end it, as it runs on a CPU"
            raise Refused(f"this vLLM splits prefills: {why}; start it with --no-enable-chunked-prefill")
        if found.pop("normalises", False) and self.traits.media:
            why = "the patches of images, which verl did already"
            raise Refused(f"this vLLM normalises {why}; start it with --no-mm-device-do-normalize")
        name, ours = found.pop("model"), {key: getattr(config, key, size) for key, size in found.items()}
        differ = [f"{key}={size} and not {ours[key]}" for key, size in found.items() if size != ours[key]]
        return f"{name} has {', '.join(differ)}" if differ else ""

    async def float32_tensors(self, post: Post) -> set[str]:
        workers = (await post("/collective_rpc", {"method": "served_model"}))["results"]
        return {name for worker in workers for name in worker.get("float32", ())}

    async def prepare(self, post: Post, model: str, vocab: int) -> None:
        await post("/init_weight_transfer_engine", {"init_info": {}})


class VerlApi(VllmApi):
    """The API of `verl serve`. It is vLLM's, with the position at which sampling continues, and the interval between
    two events of a stream."""

    def __init__(self) -> None:
        self.traits = VERL_SERVE

    async def send_buckets(self, post: Post, sent: WeightSource, buckets: AsyncIterator[Bucket]) -> None:
        try:
            await super().send_buckets(post, sent, buckets)
        except BaseException:  # the engine waits for the rest until the update is ended
            with contextlib.suppress(Exception):
                async with asyncio.timeout(LEFT_S):
                    await post("/start_weight_update")
            raise

    def body(
        self, model: str, name: str, prompt: Sequence[int], sampling: Sampling, room: TokenBudget
    ) -> dict[str, Any]:
        body = super().body(model, name, prompt, sampling, room)
        body["sampling_params"]["position"] = sampling.position
        return body | {"stream_interval_s": 0.0 if sampling.stop else FOLLOWED_S}


def compare_loaded(sent: WeightSource, report: Mapping[str, Any]) -> None:
    """Raise SyncError if a worker of the server did not load what was sent. Its report has `loaded`, the names of the
    tensors that it read as they were sent, and `missing`, parts of its model that got no weights."""
    wanted, loaded, at = sent.read_as, set(report["loaded"]), f"version {sent.version}"
    if absent := sorted(wanted - loaded):
        raise SyncError(f"{at}: the server did not load {len(absent)} of {len(wanted)} tensors, e.g. {absent[:3]}")
    if more := sorted(loaded - wanted - set(sent.manifest)):
        raise SyncError(f"{at}: the server loaded {len(more)} tensors that nobody sent, e.g. {more[:3]}")
    if left := sorted(report.get("missing", ())):
        raise SyncError(f"{at}: {len(left)} parts of the server's model got no weights, e.g. {left[:3]}")
