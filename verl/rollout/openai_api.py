"""OpenAI's completions API with token ids, and TensorRT-LLM's form of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.errors import Refused
from verl.rollout.api import Api, Post, TokenBudget
from verl.rollout.http import ServerRefused
from verl.rollout.traits import OPENAI, TRTLLM
from verl.rollout.wire import NotUnderstood, ServerAnswer, prompt_scores
from verl.types import Sampling

PROBED_TOKENS = 4


class CompletionsApi(Api):
    """OpenAI's completions API with token ids. Its fields are set by the checks at the start of a server
    (`prepare`)."""

    generate = "/v1/completions"

    def __init__(self) -> None:
        self.scoring: str | None = None  # the field that requests log-probs of the prompt
        # without scores it cannot be checked if its log-probs are those of the sampled distribution
        self.traits = replace(OPENAI, raw_logprobs_only=True, score_temperatures=())

    def body(
        self, model: str, name: str, prompt: Sequence[int], sampling: Sampling, room: TokenBudget
    ) -> dict[str, Any]:
        s = sampling
        if self.traits.raw_logprobs_only:
            refuse_other_than_plain(s)
        found = {"model": model, "prompt": list(prompt), "top_p": s.top_p, "logprobs": 0, "return_token_ids": True}
        extra = {"top_k": s.top_k, "min_p": s.min_p}
        return room.request_fields(s) | found | {name: value for name, value in extra.items() if value > 0}

    def read(self, drawn: ServerAnswer, answer: Any) -> None:
        try:
            usage = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            drawn.cached_tokens = int(usage.get("cached_tokens") or drawn.cached_tokens)
            for choice in answer["choices"]:
                found = (choice.get("logprobs") or {}).get("token_logprobs") or []
                drawn.add(choice.get("token_ids") or [], found)
                drawn.finish = choice.get("finish_reason") or drawn.finish
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise NotUnderstood(f"the server's answer is no completion with ids: {type(e).__name__}: {e}") from e

    async def score(self, post: Post, model: str, ids: np.ndarray, timeout_s: float) -> np.ndarray:
        if self.scoring is None:
            raise Refused("this server tells no log-probs of prompts (prompt_logprobs, or echo with logprobs)")
        one = {"model": model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        if self.scoring == "prompt_logprobs":
            answer = await post(self.generate, one | {"prompt_logprobs": 0}, timeout_s)
            return prompt_scores(answer["choices"][0].get("prompt_logprobs"), ids)
        answer = await post(self.generate, one | {"echo": True, "logprobs": 0}, timeout_s)
        found = ((answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or [])[: len(ids)]
        if len(found) != len(ids) or None in found[1:]:
            raise NotUnderstood("the server's echo has no log-probs of the prompt")
        return np.array(found[1:], np.float32)

    async def prepare(self, post: Post, model: str, vocab: int) -> None:
        await self._require_ids(post, model, vocab)
        for field in ("prompt_logprobs", "echo"):
            if await self._scores_by(field, post, model):
                self.scoring, self.traits = field, OPENAI
                return

    async def _require_ids(self, post: Post, model: str, vocab: int) -> None:
        """Raise ValueError unless an answer has ids and log-probs, and ends at a given stop id."""
        ends: tuple[int, ...] = ()
        for wanted in (PROBED_TOKENS, 1):
            room = TokenBudget(tokens=PROBED_TOKENS, vocab=vocab, ends=ends)
            body = self.body(model, "probe", [0], Sampling(max_tokens=PROBED_TOKENS, temperature=0.0), room)
            drawn = ServerAnswer()
            try:
                self.read(drawn, await post(self.generate, body))
            except (ServerRefused, NotUnderstood) as e:
                message = (
                    "completions with stop_token_ids, ignore_eos, log-probs and the ids of their tokens are needed"
                )
                raise Refused(f"{message}, and this server does not give them: {e}") from e
            if len(drawn.ids) != wanted:
                message = "ids of the tokens (return_token_ids)" if not ends else "an end where stop_token_ids say"
                raise Refused(f"this server does not give {message}: {len(drawn.ids)} ids came of an answer to a probe")
            ends = (drawn.ids[0],)

    async def _scores_by(self, field: str, post: Post, model: str) -> bool:
        """Return true if the server scores a prompt by this field of a request. `scoring` is the field then, or
        None."""
        self.scoring = field
        try:
            found = await self.score(post, model, np.array([0, 1, 0]), 60.0)
        except (ServerRefused, NotUnderstood):
            self.scoring = None
            return False
        return bool(np.isfinite(found).all())


class TrtllmApi(CompletionsApi):
    """TensorRT-LLM's completions API. It refuses unknown fields, and by default cuts off the token that ended an
    answer."""

    def __init__(self) -> None:
        self.scoring, self.traits = None, TRTLLM

    def body(
        self, model: str, name: str, prompt: Sequence[int], sampling: Sampling, room: TokenBudget
    ) -> dict[str, Any]:
        refuse_other_than_plain(sampling)
        return room.request_fields(sampling) | {
            "model": model,
            "prompt": list(prompt),
            "logprobs": 1,
            "include_stop_str_in_output": True,
            "detokenize": False,  # ids in place of text
            "add_special_tokens": False,
        }

    async def prepare(self, post: Post, model: str, vocab: int) -> None:
        await self._require_ids(post, model, vocab)


def refuse_other_than_plain(sampling: Sampling) -> None:
    """Raise ValueError for settings that sample from another distribution than that of raw log-probs."""
    s = sampling
    if s.temperature not in (0.0, 1.0) or (s.temperature > 0 and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0)):
        message = f"temperature={s.temperature} top_p={s.top_p} top_k={s.top_k} min_p={s.min_p}"
        raise Refused(f"{message}: this server's log-probs are those at temperature 1 of all tokens; set 1, 1, 0 and 0")
