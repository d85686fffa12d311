"""A server of OpenAI's completions API with token ids, at a URL: a model to evaluate, a teacher, a judge.

Its weights are its own. A publish changes nothing there, and succeeds if the canary finds the same model. Real requests
at the start check the parts that OpenAI's API leaves open: whether token ids are returned (`return_token_ids`, as in
vLLM and `verl serve`), whether answers end at given ids, and how prompts are scored (`prompt_logprobs`, or `echo` with
log-probs). No torch is imported at module level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.bounds import Positive
from verl.rollout.traits import OPENAI

if TYPE_CHECKING:
    from verl.rollout.base import RolloutContext
    from verl.rollout.client import ServedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a server of OpenAI's completions API, and of `verl serve` (rollout.engine_options)."""

    api_key: str | None = None
    """The key that is sent as a bearer token (serve.api_key of `verl serve`); write ${oc.env:NAME}."""
    start_timeout_s: Positive = 60.0
    """Seconds within which the server must answer its health check."""
    request_timeout_s: Positive = 3600.0
    """Seconds for one answer, the time in the queue included."""


def build(options: Options, context: RolloutContext) -> ServedEngine:
    """Return the engine of the server at the URL of `context.place`. The first call checks the server."""
    from verl.rollout.api import Deadlines, Expected
    from verl.rollout.base import capabilities_of
    from verl.rollout.client import ServedEngine
    from verl.rollout.openai_api import CompletionsApi

    assert context.place is not None and context.place.url is not None, "a server that runs has a URL"
    able = capabilities_of(OPENAI, max_context_tokens=context.max_context_tokens)
    deadlines = Deadlines(start_s=options.start_timeout_s, request_s=options.request_timeout_s)
    expected = Expected(name="the server")
    at = context.place.url
    return ServedEngine(context, expected, CompletionsApi(), at, able, deadlines, api_key=options.api_key)
