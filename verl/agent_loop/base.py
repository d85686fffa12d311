"""Agent loops: how one attempt at a task is played. verl's signatures, and a recorder that keeps them honest.

A loop may rewrite text as it likes; what is trained on comes from the record of the server manager: a mask=1 token that
was not sampled there is an error, and log-probs and versions are the recorded ones (pitfalls 11, 13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from verl.rollout.base import Completion, RolloutEngine
from verl.types import Sampling, Segment, StopReason, as_ids, derive_seed


@dataclass(slots=True)
class AgentLoopMetrics:
    generate_sequences: float = 0.0
    """Seconds in generation."""
    tool_calls: float = 0.0
    """Seconds in tools."""


@dataclass(slots=True)
class AgentLoopOutput:
    """response_mask: 1 = sampled by the model, 0 = tool or environment. reward_score None: the reward function scores it."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    routed_experts: Any = None
    multi_modal_data: Mapping[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: StopReason


class ServerManager:
    """What a loop generates with. Keeps every completion by request id; one per trajectory."""

    def __init__(self, engine: RolloutEngine, sampling: Sampling, *, seed_parts: Sequence[object], prefix_key: str | None = None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._seed_parts = tuple(seed_parts)
        self._prefix_key = prefix_key
        self.record: list[Completion] = []

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        if image_data or video_data:
            raise ValueError("this model takes no images or videos; remove them from the rows")
        turn = len(self.record)
        sampling = replace(self._given(sampling_params), seed=derive_seed(*self._seed_parts, turn))
        completion = await self._engine.generate(request_id, as_ids(prompt_ids), sampling, prefix_key=self._prefix_key)
        self.record.append(completion)
        return TokenOutput(completion.ids.tolist(), completion.logprobs.tolist(), completion.stop_reason)

    def _given(self, params: Mapping[str, Any]) -> Sampling:
        """The run's sampling with what the loop asks for; temperature stays, since the trainer applies the same."""
        known = {"max_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "max_new_tokens"}
        unknown = set(params) - known - {"logprobs", "repetition_penalty", "n"}
        if unknown:
            raise ValueError(f"sampling_params {sorted(unknown)} are unknown; known: {sorted(known)}")
        if params.get("temperature", self._sampling.temperature) != self._sampling.temperature:
            raise ValueError("an agent loop cannot change the temperature of a sample; set rollout.temperature")
        length = params.get("max_tokens", params.get("max_new_tokens", self._sampling.max_tokens))
        return replace(
            self._sampling,
            max_tokens=min(int(length), self._sampling.max_tokens),
            stop=tuple(params.get("stop", self._sampling.stop)),
            stop_token_ids=tuple(params.get("stop_token_ids", self._sampling.stop_token_ids)),
        )


class AgentLoopBase:
    """Subclass and write `run`. One instance per trajectory."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: ServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
    ) -> None:
        self.config = trainer_config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raise AssertionError(f"{type(self).__name__} does not define run()")


class AgentLoopFactory(Protocol):
    """Makes the loop of one trajectory around its server manager."""

    def __call__(self, server_manager: ServerManager) -> AgentLoopBase: ...


def segments_of(output: AgentLoopOutput, record: Sequence[Completion]) -> tuple[Segment, ...]:
    """The trajectory of a loop's output: ids as it returned them, log-probs and versions from the record.

    Raises ValueError if a mask=1 token was not sampled by the server manager, in order.
    """
    ids, mask = as_ids(output.response_ids), np.asarray(output.response_mask, bool)
    if len(ids) != len(mask):
        raise ValueError(f"response_mask has {len(mask)} values for {len(ids)} response_ids")
    segments = [Segment(ids=as_ids(output.prompt_ids), source="prompt")]
    at, next_record = 0, 0
    while at < len(ids):
        end = at + 1
        while end < len(ids) and mask[end] == mask[at]:
            end += 1
        if not mask[at]:
            segments.append(Segment(ids=ids[at:end], source="env"))
        while mask[at] and at < end:
            found = _find(record, next_record, ids[at:end])
            if found is None:
                raise ValueError(
                    f"{end - at} tokens with mask 1 from response position {at} were not sampled by the model: the loop "
                    "changed or invented them; give them mask 0"
                )
            next_record, taken = found + 1, min(end - at, len(record[found].ids))
            segments.extend(_spans(record[found], taken))
            at += taken
            if at == end:
                break
        at = end
    return tuple(segments)


def _find(record: Sequence[Completion], first: int, run: np.ndarray) -> int | None:
    """The first unused completion that `run` starts with (whole, or cut at its end)."""
    for i in range(first, len(record)):
        n = min(len(run), len(record[i].ids))
        if n and np.array_equal(record[i].ids[:n], run[:n]):
            return i
    return None


def _spans(completion: Completion, length: int) -> list[Segment]:
    return [
        Segment(ids=completion.ids[a : min(b, length)], source="sampled", logprobs=completion.logprobs[a : min(b, length)], version=v)
        for v, a, b in completion.spans
        if a < min(b, length)
    ]
