"""The options of the Megatron engine, and what it cannot run. No torch and no Megatron: what reads the configuration
reads this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from verl.config.adapter import teacher_models
from verl.config.backends import layout_of
from verl.config.cluster import placed_roles
from verl.config.model_files import describe_model, folder_format, read_model_config, text_config
from verl.config.schema import Config
from verl.model_engine.layout import Layout, use
from verl.model_engine.lora_spec import trained_by
from verl.workers.pools import Pool

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""The families of which the engine has the names (megatron_names.py)."""
INSTEAD = "use model.engine=sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the Megatron engine."""

    max_skipped_updates: Annotated[int, Meta(ge=0)] = 3
    """How many non-finite gradients in a row are skipped, each with its batch written to disk, before the run stops."""
    distributed_optimizer: bool = True
    """Each data rank updates a part of the weights, and has the optimizer states of that part alone."""
    share_prefix: ClassVar[bool] = False
    attention: ClassVar[Literal["auto", "padded"]] = "padded"


def divisions_refused(layout: Layout) -> Iterator[str]:
    """Yield a line for each property of a layout that the Megatron engine does not support."""
    if layout.context > 1:
        yield (
            f"parallel.context={layout.context}: Megatron's context parallelism wants Transformer Engine, with which "
            "this engine was not run; use parallel.context=1, or model.engine=sharded"
        )
    if layout.sequence > 1:
        yield (
            f"parallel.sequence={layout.sequence}: Megatron has no such division (its sequence parallelism is part of "
            "parallel.tensor); use parallel.sequence=1, or model.engine=sharded"
        )
    if layout.replicate > 1:
        yield (
            f"parallel.replicate={layout.replicate}: all data ranks of Megatron are copies of the model; leave it out, "
            "or use model.engine=sharded"
        )


def sizes_refused(layout: Layout, config: Mapping[str, Any], what: str) -> Iterator[str]:
    """Yield a line for each size of a model that a layout does not divide. config: of config.json · what: the model."""
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    heads, pipeline = int(config["num_attention_heads"]), layout.pipeline
    numbers = (
        ("tensor", layout.tensor, "attention heads", heads),
        ("tensor", layout.tensor, "key-value heads", int(config.get("num_key_value_heads") or heads)),
        ("tensor", layout.tensor, "ids", int(config["vocab_size"])),
        ("tensor", layout.tensor, "channels of an MLP", int(config["intermediate_size"])),
        ("pipeline", pipeline, "layers", int(config["num_hidden_layers"])),
        ("expert", layout.expert, "experts", int(experts)),
    )
    for name, size, of, number in numbers:
        if number % size or (size > 1 and not number):
            fix = use(number) if number else f"leave parallel.{name} out"
            yield f"parallel.{name}={size}: {what} has {number} {of}, which {size} ranks cannot share equally; {fix}"


def megatron_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per fault."""
    if config.cluster.backend == "inproc":
        yield "model.engine=megatron with cluster.backend=inproc: it wants a process per rank; set cluster.backend=ray"
        return
    if config.optim.name != "adamw":
        yield f"optim.name={config.optim.name}: Megatron's optimizer here is adamw; set optim.name=adamw, or {INSTEAD}"
    if trained_by(config.model.lora) is not None:
        yield f"model.lora with model.engine=megatron: it trains all weights; leave model.lora out, or {INSTEAD}"
    if config.model.quantization != "none" or folder_format(config.model.path) != "none":
        yield f"model.path={config.model.path}: codes of quantised weights are not read by Megatron; {INSTEAD}"
    layout = layout_of(config)
    yield from divisions_refused(layout)
    critic = config.critic.path if "critic" in placed_roles(config) else None
    folders = {"model.path": config.model.path, "critic.path": critic, "reward.model": config.reward.model}
    folders |= {f"teacher ({role})": path for role, path in teacher_models(config).items()}
    for key, path in folders.items():
        if path is not None:
            yield from _model_faults(f"{key}={path}", path, layout)


def _model_faults(what: str, path: str, layout: Layout) -> Iterator[str]:
    """Yield why the engine cannot have this model, from its config.json."""
    try:
        text = text_config(read_model_config(Path(describe_model(path).folder)))
    except ValueError:
        return  # another check reports it
    if (kind := text.get("model_type")) not in MODEL_TYPES:
        yield f"{what} is a {kind}; model.engine=megatron has the names of {', '.join(MODEL_TYPES)}: {INSTEAD}"
    else:
        yield from sizes_refused(layout, text, what)
