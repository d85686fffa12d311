"""The layers of a model that LoRA trains and the number of its values, from the headers of the model's files. No torch,
and no model is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl.config.adapter import (
    TARGETS,
    Shape,
    base_of,
    linear_layers,
    model_weights,
    one_projection,
    read_factors,
    read_trained,
    refuse_not_finite,
)
from verl.config.backends import options_of, traits_of
from verl.config.cluster import TRAINS
from verl.config.devices import base_format, device_type_of, streams_buckets
from verl.config.experts import fused_experts
from verl.config.model_files import EMBEDDING, HEAD, codes_are_frozen, describe_model, find_model_folder, folder_format
from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine.lora_spec import (
    LoraSpec,
    check_rank,
    check_saved,
    idle_excludes,
    target_modules,
    trained_by,
    weights_to_save,
)
from verl.model_engine.optimizer_table import OPTIMIZERS, SMALL
from verl.parameter_set import is_experts
from verl.wire import FP8


@dataclass(frozen=True, slots=True)
class TrainedFactors:
    """The factors of LoRA in a model, which are trained, or those of a frozen role on its base; and the weights that
    are trained whole beside them."""

    rank: int
    layers: Mapping[str, tuple[int, ...]]
    """The shape of the weight of each layer with factors, by its name in the model: [outputs, inputs], of experts
    [experts, outputs, inputs]."""
    saved: Mapping[str, Shape] = field(default_factory=dict)
    """The shapes of the weights that are trained whole, by their names in the model."""

    def whole(self, *, head: bool = True) -> int:
        """Return the number of values in the weights that are trained whole. head: with those of the output head."""
        return sum(math.prod(shape) for name, shape in self.saved.items() if head or not name.endswith(HEAD))

    def whole_outside(self) -> int:
        """Return the number of values in an embedding and an output head that are trained whole."""
        return sum(math.prod(s) for name, s in self.saved.items() if EMBEDDING.search(name) or name.endswith(HEAD))

    @property
    def parameters(self) -> int:
        """The number of values in all factors."""
        return self._values(self.layers)

    @property
    def of_experts(self) -> int:
        """The number of values in the factors of experts."""
        return self._values({name: shape for name, shape in self.layers.items() if is_experts(name)})

    @property
    def largest(self) -> int:
        """The number of values in the largest factor; those of all experts of a layer are one."""
        return self.rank * max(math.prod(shape[:-2]) * max(shape[-2:]) for shape in self.layers.values())

    def _values(self, layers: Mapping[str, tuple[int, ...]]) -> int:
        return self.rank * sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in layers.values())


def trained_factors(config: Config, path: str | None = None) -> TrainedFactors | None:
    """Return the factors that a run trains in the model at `path` (the policy without one); None if it trains all
    weights. Raise ValueError for targets, a rank or an adapter that the model cannot have."""
    spec = trained_by(config.model.lora)
    if spec is None:
        return None
    folder = find_model_folder(path or config.model.path)
    coded = frozenset[str]()
    if base_format(config, path) != "none":
        coded = frozenset(f"{name}.weight" for name in linear_layers(folder))
    if spec.path is None:
        found = _drawn(spec, folder)
        _check_saved(found, folder, coded)
        return found
    try:
        found = _factors(*read_trained(Path(spec.path).expanduser(), folder))
        _check_saved(found, folder, coded)
    except ValueError as exc:
        text = str(exc).replace("model.path=", "model.lora.path=")
        raise type(exc)(text.replace("model.lora.modules_to_save:", f"model.lora.path={spec.path}:")) from exc
    return found


def _check_saved(found: TrainedFactors, folder: Path, coded: Collection[str]) -> None:
    facts = describe_model(str(folder))
    tied = [name for name in found.saved if facts.tied and (EMBEDDING.search(name) or name.endswith(HEAD))]
    check_saved(found.saved, found.layers, facts.architecture, tied=tied, coded=coded)


def factors_of(adapter: Path, base: Path, *, head: bool = False) -> TrainedFactors:
    """Return the factors of an adapter of the model in `base`. head: it has the head of a reward model too. Raise
    ValueError if it does not fit."""
    return _factors(read_factors(adapter, base, head=head), {})


def _factors(parts: Mapping[str, tuple[Shape, Shape]], saved: Mapping[str, Shape]) -> TrainedFactors:
    sizes = {name.removesuffix(".weight"): (a, b) for name, (a, b) in parts.items()}
    rank = max(a[-2] for a, _ in sizes.values())
    return TrainedFactors(rank, {name: (*a[:-2], b[-2], a[-1]) for name, (a, b) in sizes.items()}, saved)


def served_factors(config: Config) -> TrainedFactors | None:
    """Return the factors of the policy that rollout engines get unmerged, after their base; None if their weights have
    the factors added, or if all weights are trained. Raise ValueError as `trained_factors` does."""
    factors, options, url = trained_factors(config), config.rollout.engine_options, config.rollout.url
    traits = traits_of(config.rollout.engine)
    if factors is None or streams_buckets(config) or not traits.lora_policy:
        return None
    if factors.saved and not traits.lora_whole:
        return None
    if factors.of_experts and device_type_of(config, "rollout") not in traits.lora_experts_on:
        return None
    room = factors.rank if url is None else options.get("max_lora_rank") or 0
    how = getattr(options_of(config, "rollout"), "lora_policy", "adapter")
    return factors if how == "adapter" and room >= factors.rank else None


def unreachable_layers(config: Config, engine: str) -> Iterator[str]:
    """Yield the reason why a server of this engine cannot load the adapter of a policy that LoRA trains: the adapter of
    zeros, which other requests use, needs one of `TARGETS`."""
    try:
        factors = served_factors(config)
    except ValueError:  # reported with the settings of LoRA
        return
    if factors is not None and not one_projection(find_model_folder(config.model.path)):
        at, fix = f"model.lora with rollout.engine={engine}", "set rollout.engine_options.lora_policy=merged"
        yield f"{at}: {config.model.path} has none of {', '.join(TARGETS)}; {fix}"


def reads_codes(config: Config) -> bool:
    """Return True if the rollout computes with the codes of a base in 4 or 8 bits. Otherwise it gets that base
    dequantised, with the factors added or beside it, and has a copy of its own."""
    exact_rows = config.run.deterministic and device_type_of(config, "rollout") == "cuda"
    able = traits_of(config.rollout.engine).codes and not exact_rows
    return base_format(config) != "none" and able and served_factors(config) is not None


def lora_layer_faults(config: Config) -> Iterator[str]:
    """Yield the reason why LoRA cannot train a model of this run, as far as its files and those of an adapter to start
    from show it."""
    for path in dict.fromkeys((config.model.path, config.critic.path or config.model.path)):
        try:
            trained_factors(config, path)
        except ValueError as exc:
            yield str(exc)
            return
    spec = trained_by(config.model.lora)
    if spec is not None and spec.path is not None:
        try:
            refuse_not_finite(Path(spec.path).expanduser())
        except ValueError as exc:
            yield f"model.lora.path={exc}"


def idle_lora(config: Config) -> Iterator[str]:
    """Yield a warning for each entry of `exclude` that names no layer of the policy."""
    spec = trained_by(config.model.lora)
    if spec is not None and spec.path is None:
        folder = find_model_folder(config.model.path)
        for entry in idle_excludes(spec, linear_layers(folder), fused_experts(folder)):
            yield f"model.lora.exclude={entry}: no linear layer of {config.model.path} has this name; it does nothing"


def frozen_base_faults(config: Config, command: str) -> Iterator[str]:
    """Yield the contradictions between LoRA, or a quantised base, and other keys."""
    spec, name = trained_by(config.model.lora), config.optim.name
    if spec is not None and OPTIMIZERS[name].matrices_alone:
        able = ", ".join(other for other, row in OPTIMIZERS.items() if not row.matrices_alone)
        yield f"optim.name={name} with model.lora: AdamW would update the factors, not {name}; use {able}"
    if spec is not None and command == "rm":
        for entry in (one for one in spec.modules_to_save if HEAD.removesuffix(".weight").endswith(one)):
            why = "a reward model has no output head, and its score head is trained whole as it is"
            yield f"model.lora.modules_to_save={entry}: {why}; leave it out"
    if spec is not None and spec.path is not None and config.critic.path not in (None, config.model.path):
        why = "the adapter is of model.path, and the critic would start from its own model with it added"
        yield f"critic.path={config.critic.path} with model.lora.path: {why}; leave one of them out"
    yield from _format_faults(config, command, trains_factors=command in TRAINS and spec is not None)


def _format_faults(config: Config, command: str, *, trains_factors: bool) -> Iterator[str]:
    """Yield the contradictions between the format of the base, which is quantised here or in its folder, and other
    keys."""
    kind, given = config.model.quantization, f"model.quantization={config.model.quantization}"
    if kind != "none" and not trains_factors:
        fix = "set model.lora.rank=32, or leave it out" if command in TRAINS else "leave it out"
        yield f"{given}: only a base that LoRA does not change is quantised; {fix}"
    folders = {"model.path": config.model.path, "critic.path": config.critic.path if command == "train" else None}
    for key, path in folders.items():
        if path is None or (own := folder_format(path)) == "none":
            continue
        if command in TRAINS and not trains_factors:
            yield f"{key}={path}: {codes_are_frozen(own)}"
        elif kind not in ("none", own):
            yield f"{given}: {key}={path} is quantised as {own}, and codes are not converted; leave it out"
    own = folder_format(config.model.path)
    base = f"model.path={config.model.path}, which is quantised as {own}," if own != "none" else given
    if (kind != "none" or own != "none") and config.rollout.dtype == FP8:
        yield f"{base} with rollout.dtype=fp8: the rollout would quantise it once more; use rollout.dtype=bfloat16"
    if own != "none" and (command == "train" or command not in TRAINS) and traits_of(config.rollout.engine).server:
        why = "its server would read the codes in place of the weights that it is sent"
        yield f"rollout.engine={config.rollout.engine}: {why} ({base[:-1]}); use rollout.engine=native"


def base_warnings(config: Config) -> Iterator[str]:
    """Yield the warnings about the frozen base of LoRA: parts that stay float32, and an adapter of other weights."""
    spec, quantised = trained_by(config.model.lora), config.model.quantization != "none"
    facts = describe_model(config.model.path) if quantised else None
    if facts is not None and facts.expert_parameters and folder_format(config.model.path) == "none":
        share = facts.expert_parameters / facts.parameters
        yield f"model.quantization={config.model.quantization}: experts, {share:.0%} of the weights, stay float32"
    if (kind := base_format(config)) != "none" and not reads_codes(config):
        yield f"a base in {kind}: the rollout reads no codes here, and gets a dequantised copy of its own"
    if spec is not None and spec.path is not None:
        named = base_of(str(Path(spec.path).expanduser()), "")
        if named and Path(named).is_dir() and not Path(named).samefile(find_model_folder(config.model.path)):
            why = f"it was trained on {named}, and is added to {config.model.path}"
            yield f"model.lora.path={spec.path}: {why}: another model, unless both have the same weights"


def small_factors(config: Config) -> Iterator[str]:
    """Yield a warning if every factor is smaller than what an optimizer keeps in 8 bits."""
    if config.optim.name != "adamw_8bit" or (factors := trained_factors(config)) is None:
        return
    if factors.largest < SMALL:
        why = f"the largest factor has {factors.largest:,} values, and moments of less than {SMALL:,} stay float32"
        yield f"optim.name=adamw_8bit: {why}: it saves nothing; adamw is the same"


def unused_lora(config: Config, command: str) -> Iterator[str]:
    """Yield the reason why a command that trains nothing refuses an adapter."""
    if (path := config.model.lora.get("path")) is not None:
        why = f"`verl {command}` trains nothing, and reads model.path alone"
        yield f"model.lora.path={path}: {why}; leave it out"


def untrained(config: Config) -> Config:
    """Return the configuration of a command that trains nothing: a recipe may have settings of LoRA, which would add
    factors of zero to the model, and send it as base and factors."""
    return changed(config, {"model.lora": {}})


def _drawn(spec: LoraSpec, folder: Path) -> TrainedFactors:
    """Return the factors that the engine adds to a model's layers."""
    linears, experts, model = linear_layers(folder), fused_experts(folder), describe_model(str(folder)).architecture
    every: dict[str, tuple[int, ...]] = {**linears, **experts}
    layers = {name: every[name] for name in target_modules(spec, linears, linears, model, experts)}
    for name, shape in layers.items():
        check_rank(spec.rank, name, (shape[-2], shape[-1]), model)
    if not spec.modules_to_save:
        return TrainedFactors(spec.rank, layers)
    weights = {name: header.shape for name, header in model_weights(folder).items()}
    tied = {HEAD: ()} if describe_model(str(folder)).tied else {}
    saved = weights_to_save(spec, (tied | weights), model)
    return TrainedFactors(spec.rank, layers, {name: (tied | weights)[name] for name in saved})
