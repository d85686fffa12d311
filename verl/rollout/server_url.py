"""A running server with vLLM's token-in-token-out API and control calls, such as `verl serve`.

No torch is imported at module level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.bounds import Positive
from verl.rollout.traits import VERL_SERVE

if TYPE_CHECKING:
    from verl.rollout.base import RolloutContext
    from verl.rollout.client import ServedEngine

CONTROL = "start it with serve.control=true and a serve.api_key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a server at a URL (rollout.engine_options)."""

    api_key: str | None = None
    """The key of `verl serve` (serve.api_key); write ${oc.env:NAME}."""
    start_timeout_s: Positive = 60.0
    """Seconds within which the server must answer its health check."""
    request_timeout_s: Positive = 3600.0
    """Seconds for one answer, the time in the queue included."""


def build(options: Options, context: RolloutContext) -> ServedEngine:
    """Return the engine. Its server gets weights with the first publish."""
    from verl.rollout.api import Deadlines, Expected
    from verl.rollout.base import capabilities_of
    from verl.rollout.client import ServedEngine
    from verl.rollout.vllm_api import VerlApi

    assert context.place is not None and context.place.url is not None, "a server that runs has a URL"
    able = capabilities_of(VERL_SERVE, max_context_tokens=context.max_context_tokens)
    paths = ("/pause", "/resume", "/reset_prefix_cache")
    needs = dict.fromkeys((*paths, "/init_weight_transfer_engine", "/collective_rpc"), CONTROL)
    deadlines = Deadlines(start_s=options.start_timeout_s, request_s=options.request_timeout_s)
    expected = Expected(name="the server", needs=needs)
    return ServedEngine(context, expected, VerlApi(), context.place.url, able, deadlines, options.api_key)
