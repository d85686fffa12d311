"""A running server with vLLM's token-in-token-out API and control calls, such as `verl serve`.

No torch is imported at module level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.rollout.openai import Options as Options
from verl.rollout.traits import VERL_SERVE

if TYPE_CHECKING:
    from verl.rollout.base import RolloutContext
    from verl.rollout.client import ServedEngine

CONTROL = "start it with serve.control=true and a serve.api_key"


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
