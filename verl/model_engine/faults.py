"""Faults of configurations with the torch engine (models that are not compiled) and the sharded engine (layouts, and
models that its ranks cannot share).

No torch is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.accel.families import DELTA_TYPES, FUSED_TYPES, STATE_LAYERS, unpacked_states
from verl.config.adapter import teacher_models
from verl.config.backends import engine_name, layout_of, options_of
from verl.config.cluster import placed_roles
from verl.config.model_files import describe_model, folder_format, read_model_config, text_config
from verl.config.schema import Config
from verl.model_engine.layout import Layout
from verl.model_engine.options import EXPERT_PLANS, PIPELINE_PLANS, TENSOR_PLANS, cannot, image_faults
from verl.models.families import FAMILIES, name_of
from verl.workers.pools import Pool

COMPILE = "model.engine_options.compile=true"


def torch_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per fault."""
    options = options_of(config, "model")
    yield from _state_faults(config)
    if not options.compile:
        return
    if options.attention == "padded":
        yield f"{COMPILE}: only packed rows are compiled; leave it out, or set model.engine_options.attention=auto"
    try:
        kind = describe_model(config.model.path).model_type
    except ValueError:
        return  # another check reports it
    if kind not in FUSED_TYPES:
        able = ", ".join(FUSED_TYPES)
        yield f"{COMPILE}: model.path={config.model.path} is a {kind}; compiled are {able}; leave it out"


def _state_faults(config: Config) -> Iterator[str]:
    """Yield a line if packed rows are asked for and the policy's states are not computed for them."""
    try:
        text = text_config(read_model_config(Path(describe_model(config.model.path).folder)))
    except ValueError:
        return  # another check reports it
    kind = str(text.get("model_type"))
    states = STATE_LAYERS & {*(text.get("layer_types") or ())}
    if states and kind not in DELTA_TYPES and options_of(config, "model").attention != "padded":
        yield f"model.path={config.model.path} {unpacked_states(kind)}"


def sharded_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per fault of the engines that divide a model among ranks."""
    engine = engine_name(config, "model")
    if config.cluster.backend == "inproc":
        yield f"model.engine={engine} with cluster.backend=inproc: this process has no others; set model.engine=torch"
        return
    if options_of(config, "model").compile:
        yield f"{COMPILE} with model.engine={engine}: one process alone compiles; leave it out, or use one rank"
    if config.model.quantization != "none":
        fix = "use one rank (model.engine=torch), or leave model.quantization out"
        yield f"model.quantization={config.model.quantization}: codes are not divided among ranks; {fix}"
    elif (kind := folder_format(config.model.path)) != "none":
        yield f"model.path={config.model.path}: its {kind} codes are not divided among ranks; use model.engine=torch"
    yield from _state_faults(config)
    layout = layout_of(config)
    if layout.world_size == 1:
        yield f"model.engine={engine} wants several ranks: set cluster.ranks_per_node, or model.engine=torch"
    if impossible := [*cannot(layout)]:
        yield from impossible
        return
    for name, size in ((layout.tokens_key, layout.tokens), ("pipeline", layout.pipeline)):
        if size > 1 and options_of(config, "model").attention == "padded":
            yield f"parallel.{name}={size} shares packed rows: set model.engine_options.attention=auto"
    if layout.tokens * layout.tensor * layout.expert * layout.pipeline > 1:
        for key, path in model_folders(config):
            yield from _shared(f"{key}={path}", path, layout)


def model_folders(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each model folder of a run, with the role in place of the key for a teacher."""
    critic = config.critic.path if "critic" in placed_roles(config) else None
    folders = {"model.path": config.model.path, "critic.path": critic, "reward.model": config.reward.model}
    folders |= {f"teacher ({role})": path for role, path in teacher_models(config).items()}
    yield from ((key, path) for key, path in folders.items() if path is not None)


def _shared(what: str, path: str, layout: Layout) -> list[str]:
    """Return why the ranks cannot share this model, from its config.json."""
    try:
        facts = describe_model(path)
    except ValueError:
        return []  # another check reports it
    config = read_model_config(Path(facts.folder))
    family, text, planned = FAMILIES.get(name_of(config)), text_config(config), "auto_map" in config
    if family is not None and (found := [*image_faults(layout, what, mutual=bool(family.attends(text)))]):
        return found
    sizes = {"tensor": layout.tensor, "sequence": layout.sequence}
    wanted = " x ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)
    kind, both = str(text.get("model_type")), layout.tensor * layout.sequence
    alone = "(parameters are sharded over the data ranks then)"
    if layout.tokens > 1 and (kind in DELTA_TYPES or STATE_LAYERS & {*(text.get("layer_types") or ())}):
        why = f"{what} is a {kind}, and ranks that share the tokens of a row do not pass its states on"
        return [f"parallel.{layout.tokens_key}={layout.tokens}: {why}; leave it out {alone}"]
    if layout.tensor > 1 and not (planned or kind in TENSOR_PLANS):
        return [f"{wanted}: {what} is a {kind}, which cannot be cut over ranks here; use parallel.tensor=1 {alone}"]
    if layout.pipeline > 1 and not (planned or kind in PIPELINE_PLANS):
        fix = f"use parallel.pipeline=1 {alone}"
        return [f"parallel.pipeline={layout.pipeline}: {what} is a {kind}, which cannot be cut into stages here; {fix}"]
    if layout.pipeline > facts.layers:
        few = f"{what} has {facts.layers} layers, and each stage wants one; use at most {facts.layers}"
        return [f"parallel.pipeline={layout.pipeline}: {few}"]
    if layout.expert > 1 and not (planned or kind in EXPERT_PLANS):
        fix = f"use parallel.expert=1 (those of {', '.join(EXPERT_PLANS)} can be)"
        return [f"parallel.expert={layout.expert}: {what} is a {kind}, whose experts cannot be given to ranks; {fix}"]
    if (experts := text.get("num_experts") or text.get("num_local_experts") or 0) % layout.expert:
        fix = f"which its ranks cannot share equally; use {math.gcd(experts, layout.expert)}"
        return [f"parallel.expert={layout.expert}: {what} has {experts} experts, {fix}"]
    for name, number in (("attention heads", facts.heads), ("key-value heads", facts.kv_heads)):
        if number % both:
            fix = f"use {math.gcd(number, both)} in all"
            return [f"{wanted}: {what} has {number} {name}, which {both} ranks cannot share equally; {fix}"]
    cut = {"a vocabulary": facts.vocab, "an MLP": text.get("intermediate_size") or 0}
    cut["a shared expert"] = text.get("shared_expert_intermediate_size") or 0
    odd = [f"{name} of {number}" for name, number in cut.items() if number % layout.tensor]
    fix = "which its ranks cannot share equally; use a divisor of it"
    return [f"parallel.tensor={layout.tensor}: {what} has {size}, {fix}" for size in odd]
