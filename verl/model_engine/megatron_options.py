"""The options of the Megatron engine, and what it cannot run. No torch and no Megatron: what reads the configuration
reads this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from verl.config.backends import layout_of, options_of
from verl.config.model_files import describe_model, folder_format, read_model_config, text_config
from verl.config.schema import Config
from verl.model_engine.faults import model_folders
from verl.model_engine.layout import Layout, use
from verl.model_engine.lora_spec import trained_by
from verl.model_engine.options import Offloading
from verl.workers.pools import Pool

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""The families of which the engine has the names (megatron_names.py)."""
INSTEAD = "use model.engine=sharded"
VIRTUAL, EXPERT_TENSOR = "model.engine_options.virtual_stages", "model.engine_options.expert_tensor"
ROPE_TYPES = ("default", "linear", "llama3")
"""The kinds of rotary frequencies that do not change with the length of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Offloading):
    """The options of the Megatron engine."""

    max_skipped_updates: Annotated[int, Meta(ge=0)] = 3
    """How many non-finite gradients in a row are skipped, each with its batch written to disk, before the run stops."""
    distributed_optimizer: bool = True
    """Each data rank updates a part of the weights, and has the optimizer states of that part alone."""
    virtual_stages: Annotated[int, Meta(ge=1)] = 1
    """Each pipeline stage has so many chunks of layers, which follow one another around the stages: the pipeline waits
    less, and keeps the activations of more passes."""
    expert_tensor: Annotated[int, Meta(ge=1)] = 1
    """So many ranks share the matrices of each expert; 1: a rank has its experts whole."""
    share_prefix: ClassVar[bool] = False
    attention: ClassVar[Literal["auto", "padded"]] = "padded"
    absent: ClassVar[Mapping[str, str]] = {
        name: f"model.engine=megatron was not run with Transformer Engine, which packed rows need, and {what}; leave "
        f"it out, or {INSTEAD}"
        for name, what in (("attention", "always pads rows"), ("share_prefix", "padded rows share no prompt"))
    }


def divisions_refused(layout: Layout, options: Options) -> Iterator[str]:
    """Yield a line for each property of a layout that the Megatron engine does not support."""
    if options.virtual_stages > 1 == layout.pipeline:
        yield (
            f"{VIRTUAL}={options.virtual_stages}: chunks follow one another around pipeline stages, and there is one; "
            "set parallel.pipeline, or leave it out"
        )
    over = layout.data * layout.tensor // layout.expert
    if over % options.expert_tensor:
        yield (
            f"{EXPERT_TENSOR}={options.expert_tensor} does not divide the {over} data and tensor ranks of each expert; "
            f"{use(over)}"
        )
    if layout.context > 1:
        yield (
            f"parallel.context={layout.context}: Megatron's context parallelism wants Transformer Engine, with which "
            "this engine was not run; use parallel.context=1, or model.engine=sharded"
        )
    if layout.sequence > 1:
        yield (
            f"parallel.sequence={layout.sequence}: Megatron has no such division (its sequence parallelism is part of "
            "parallel.tensor, and its context_parallel_size wants Transformer Engine); use parallel.sequence=1, or "
            "model.engine=sharded"
        )
    if layout.replicate > 1:
        yield (
            f"parallel.replicate={layout.replicate}: all data ranks of Megatron are copies of the model; leave it out, "
            "or use model.engine=sharded"
        )


def sizes_refused(layout: Layout, options: Options, config: Mapping[str, Any], what: str) -> Iterator[str]:
    """Yield a line for each size of a model that a layout does not divide. config: of config.json · what: the model."""
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    channels = config.get("moe_intermediate_size", 0) if experts else 0
    heads, pipeline = int(config["num_attention_heads"]), layout.pipeline
    numbers = (
        ("parallel.tensor", layout.tensor, "attention heads", heads),
        ("parallel.tensor", layout.tensor, "key-value heads", int(config.get("num_key_value_heads") or heads)),
        ("parallel.tensor", layout.tensor, "ids", int(config["vocab_size"])),
        ("parallel.tensor", layout.tensor, "channels of an MLP", int(config["intermediate_size"])),
        ("parallel.pipeline", pipeline, "layers", int(config["num_hidden_layers"])),
        ("parallel.expert", layout.expert, "experts", int(experts)),
        (EXPERT_TENSOR, options.expert_tensor, "channels of an expert", int(channels)),
    )
    for key, size, of, number in numbers:
        if number % size or (size > 1 and not number):
            fix = use(number) if number else f"leave {key} out"
            yield f"{key}={size}: {what} has {number} {of}, which {size} ranks cannot share equally; {fix}"
    each, rest = divmod(int(config["num_hidden_layers"]), pipeline)
    if rest == 0 and each % options.virtual_stages:
        yield (
            f"{VIRTUAL}={options.virtual_stages}: {what} has {each * pipeline} layers, {each} on each of {pipeline} "
            f"stages, which cannot be {options.virtual_stages} equal chunks; {use(each)}"
        )


def layer_windows(config: Mapping[str, Any]) -> set[int | None]:
    """Return the windows that transformers gives to the layers of a model, each once; None: all earlier tokens.
    config: of config.json, where what is left out has the default of transformers."""
    kind, window = config["model_type"], config.get("sliding_window", 4096)
    uses = kind == "mistral" or (kind.startswith("qwen") and config.get("use_sliding_window", False))
    if not uses or window is None:
        return {None}
    if kind in ("mistral", "qwen3_moe"):  # of all layers, whatever layer_types has
        return {int(window)}
    layers, first = int(config["num_hidden_layers"]), int(config.get("max_window_layers", 28))
    types = config.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(layers)]
    return {int(window) if of == "sliding_attention" else None for of in types}


def properties_refused(config: Mapping[str, Any], what: str) -> Iterator[str]:
    """Yield a line for each property of a model that the engine does not have. config: of config.json · what: the
    model."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    in_attention, in_mlp = (bool(config.get(f"{of}_bias")) for of in ("attention", "mlp"))
    if len(windows := layer_windows(config)) > 1:
        sizes = " and ".join(sorted("none" if size is None else str(size) for size in windows))
        yield f"{what} has layers with different windows ({sizes}); model.engine=megatron has one for all: {INSTEAD}"
    if rope_type not in ROPE_TYPES:
        yield f"{what} has rope_type={rope_type}; model.engine=megatron has {', '.join(ROPE_TYPES)}: {INSTEAD}"
    if (act := config.get("hidden_act", "silu")) != "silu":
        yield f"{what} has hidden_act={act}; model.engine=megatron has silu: {INSTEAD}"
    if in_attention != in_mlp and config["model_type"] != "qwen2":
        both = f"attention_bias={in_attention} with mlp_bias={in_mlp}"
        yield f"{what} has {both}; model.engine=megatron has both or neither: {INSTEAD}"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        yield f"{what} has layers without experts; model.engine=megatron has them in all layers: {INSTEAD}"


def megatron_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per fault."""
    if config.cluster.backend == "inproc":
        fix = "set cluster.backend=processes, cluster.ranks_per_node=2"
        yield f"model.engine=megatron with cluster.backend=inproc: it wants a process per rank; {fix}"
        return
    layout = layout_of(config)
    if layout.world_size == 1:
        yield "model.engine=megatron wants several ranks: set cluster.ranks_per_node, or model.engine=torch"
    if config.optim.name != "adamw":
        yield f"optim.name={config.optim.name}: Megatron's optimizer here is adamw; set optim.name=adamw, or {INSTEAD}"
    elif config.optim.options:
        yield f"optim.options={config.optim.options}: Megatron's adamw has none of them; leave them out, or {INSTEAD}"
    if config.teacher.ema:
        yield f"teacher.ema={config.teacher.ema:g}: Megatron keeps no average of the weights; set 0, or {INSTEAD}"
    if trained_by(config.model.lora) is not None:
        yield f"model.lora with model.engine=megatron: it trains all weights; leave model.lora out, or {INSTEAD}"
    if config.model.quantization != "none" or folder_format(config.model.path) != "none":
        yield f"model.path={config.model.path}: codes of quantised weights are not read by Megatron; {INSTEAD}"
    options = options_of(config, "model")
    assert isinstance(options, Options)
    yield from divisions_refused(layout, options)
    for key, path in model_folders(config):
        yield from _model_faults(f"{key}={path}", path, layout, options)


def _model_faults(what: str, path: str, layout: Layout, options: Options) -> Iterator[str]:
    """Yield why the engine cannot have this model, from its config.json."""
    try:
        text = text_config(read_model_config(Path(describe_model(path).folder)))
    except ValueError:
        return  # another check reports it
    if (kind := text.get("model_type")) not in MODEL_TYPES:
        yield f"{what} is a {kind}; model.engine=megatron has the names of {', '.join(MODEL_TYPES)}: {INSTEAD}"
    else:
        yield from sizes_refused(layout, options, text, what)
        yield from properties_refused(text, what)
