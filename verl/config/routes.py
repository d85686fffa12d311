"""Router replay: whether a run trains with the experts of its rollout, and configurations that it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from verl.accel.families import ROUTED_TYPES
from verl.config.backends import MODEL, backend_of, engine_name, layout_of, options_of
from verl.config.model_files import describe_model, read_model_config, text_config
from verl.config.schema import Config

KEY = "rollout.engine_options.replay_routes=true"
EXPERTS, CHOSEN = ("num_experts", "num_local_experts", "n_routed_experts"), "num_experts_per_tok"
"""The keys of config.json for the routed experts of a layer, and for those that a token passes through."""


@runtime_checkable
class HasRoutes(Protocol):
    """The options of a rollout engine that records routes."""

    replay_routes: bool


def replays_routes(config: Config) -> bool:
    """Return True if the policy is trained with the experts that the rollout chose for its tokens."""
    options = options_of(config, "rollout")
    return isinstance(options, HasRoutes) and options.replay_routes


def route_faults(config: Config) -> Iterator[str]:
    """Yield a line for each fault of a configuration that replays routes."""
    if not replays_routes(config):
        return
    try:
        text = text_config(read_model_config(Path(describe_model(config.model.path).folder)))
    except ValueError:
        return  # another check reports it
    path = f"model.path={config.model.path}"
    if text.get("model_type") not in ROUTED_TYPES and not any(text.get(name) for name in EXPERTS):
        yield f"{KEY}: {path} has no experts; leave it out"
    elif text.get("model_type") not in ROUTED_TYPES:
        able = ", ".join(ROUTED_TYPES)
        yield f"{KEY}: {path} is a {text.get('model_type')}, whose routers are not known; known are those of {able}"
    row = backend_of(config, "model")
    if not row.replays_routes:
        able = " or ".join(name for name, row in MODEL.items() if row.replays_routes)
        yield f"{KEY} with model.engine={engine_name(config, 'model')}: it takes no routes; set model.engine={able}"
    elif not row.routes_anywhere and options_of(config, "model").attention == "padded":
        yield f"{KEY}: routes are of packed rows; set model.engine_options.attention=auto"
    if not row.routes_anywhere and (stages := layout_of(config).pipeline) > 1:
        fix = "use parallel.pipeline=1, or model.engine=megatron"
        yield f"{KEY} with parallel.pipeline={stages}: a stage takes no routes; {fix}"
