"""The settings of LoRA training. No torch: configuration and plan read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.bounds import NonNegativeInt, Positive
from verl.errors import Refused
from verl.model_engine.options import EXPERT_FACTORS

ALL_LINEAR = "all-linear"
LR_FACTOR = 10.0
"""The usual learning rate of factors as a multiple of the one at which all weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The options below `model.lora`. With `rank` or `path` a LoRA adapter is trained, and the model's own weights are
    frozen."""

    rank: NonNegativeInt = 0
    """The rank of the factors. 0: all weights are trained."""
    alpha: Positive = 32.0
    """The product of the factors is multiplied by alpha / rank."""
    rslora: bool = False
    """It is multiplied by alpha / sqrt(rank) instead (rank-stabilised LoRA)."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """The layers with factors: ends of their names (q_proj), regular expressions of whole names, or all-linear: the
    linear layers of the decoder. Experts that are one tensor have factors if an entry names `experts`."""
    exclude: list[str] = field(default_factory=list)
    """Layers without factors, named in the same way: experts keep theirs unless an entry names `experts`."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole beside the factors: ends of their names, as PEFT has them."""
    path: str | None = None
    """The folder of an adapter, in PEFT's layout, that training starts from. Its rank, alpha, targets and whole weights
    are used."""
    seed: int = 0
    """Draws the factors A. In a run it is run.seed."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def trained_by(given: Mapping[str, Any], seed: int = 0) -> LoraSpec | None:
    """Return the settings of LoRA with these options, which have no fault; None if all weights are trained."""
    spec = LoraSpec(**given)
    return replace(spec, seed=seed) if spec.rank or spec.path else None


def lora_faults(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each fault of the options below `model.lora`, whose types are right."""
    if not given:
        return
    spec = LoraSpec(**given)
    if not spec.rank and spec.path is None:
        named = ", ".join(f"model.lora.{key}" for key in given if key != "rank")
        if named:
            yield f"{named} without a rank does nothing: set model.lora.rank=32, or leave it out"
        return
    if "seed" in given:
        yield f"model.lora.seed={spec.seed}: factors are drawn from run.seed; set that"
    if spec.path is not None:
        if own := sorted(given.keys() & {"rank", "alpha", "rslora", "targets", "exclude", "modules_to_save"}):
            prefix = f"model.lora.{own[0]}={given[own[0]]} beside model.lora.path"
            yield f"{prefix}: the adapter in it has its own; leave it out"
        if not Path(spec.path).expanduser().is_dir():
            yield f"model.lora.path={spec.path}: no such folder; give the folder of an adapter (adapter_config.json)"
    elif not spec.targets:
        yield "model.lora.targets=[]: name layers, or leave it out for all linear layers"


def target_modules(
    spec: LoraSpec, linears: Iterable[str], inner: Iterable[str], model: str, fused: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the names of the layers that get factors, in the model's order, and then of tensors of experts.

    linears: the names of all linear layers but the output head · inner: those in decoder layers, for all-linear ·
    model: its class, for messages · fused: the tensors of experts. Raise ValueError for a target that names no
    layer."""
    every, experts = list(linears), list(fused)
    wanted = set[str]()
    for entry in spec.targets:
        if not (found := _named(entry, every, inner, "targets", experts)):
            raise Refused(f"model.lora.targets={entry}: {_no_layer(entry, every, model)}")
        wanted |= found
    for entry in spec.exclude:
        wanted -= _named(entry, every, inner, "exclude", experts)
    if not wanted:
        raise Refused(f"model.lora.exclude={spec.exclude}: no layer is left to train; leave some of it out")
    return tuple(name for name in (*every, *experts) if name in wanted)


def weights_to_save(spec: LoraSpec, weights: Iterable[str], model: str) -> tuple[str, ...]:
    """Return the weights that are trained whole, in the model's order: those of each module with a name that ends
    with an entry of `modules_to_save`.

    weights: the names of all weights · model: its class, for the message. Raise ValueError for an entry that names
    none."""
    holders = {name: [*_holders(name)] for name in weights}
    for entry in spec.modules_to_save:
        if not entry or not any(module.endswith(entry) for modules in holders.values() for module in modules):
            ends = ", ".join(sorted({modules[0].rpartition(".")[2] for modules in holders.values() if modules}))
            raise Refused(
                f"model.lora.modules_to_save={entry}: no module of {model} with weights has a name that ends so; "
                f"they are {ends}"
            )
    entries = tuple(spec.modules_to_save)
    return tuple(name for name, modules in holders.items() if any(module.endswith(entries) for module in modules))


def _holders(weight: str) -> Iterator[str]:
    """Yield the names of the modules that have a weight, the innermost first."""
    while weight := weight.rpartition(".")[0]:
        yield weight


def check_saved(
    saved: Iterable[str], targets: Collection[str], model: str, *, tied: Collection[str], coded: Collection[str]
) -> None:
    """Raise ValueError for a weight that cannot be trained whole.

    saved: the names of such weights · targets: what has factors · model: its class, for messages · tied: the names of
    weights that are one tensor with another · coded: those that are quantised"""
    for name in saved:
        module, why = name.rpartition(".")[0], ""
        if name in tied:
            why = "the embedding and the output head are one tied tensor, and one of them cannot be trained apart"
            why += "; leave it out, or train all weights"
        elif name in coded:
            why = "its weights are quantised, and codes are not trained; leave it out, or model.quantization"
        elif ".experts." in name:
            why = "experts are not trained whole beside factors; name them in model.lora.targets"
        elif module in targets:
            why = "it has factors, and would be trained twice; name it in model.lora.exclude too, or leave it out"
        if why:
            raise Refused(f"model.lora.modules_to_save: {module} of {model}: {why}")


def check_rank(rank: int, module: str, sides: tuple[int, int], model: str) -> None:
    """Raise ValueError for a rank above the shorter side of a layer's weight. model: its class, for the message."""
    if rank > min(sides):
        raise Refused(
            f"model.lora.rank={rank}: {module} of {model} is {list(sides)}, and a rank is at most its shorter side; "
            "lower the rank"
        )


def idle_excludes(spec: LoraSpec, linears: Iterable[str], fused: Iterable[str]) -> list[str]:
    """Return the entries of `exclude` that name none of these layers. A list for a family may have them: PEFT takes
    it."""
    every, experts = list(linears), list(fused)
    return [entry for entry in spec.exclude if not _named(entry, every, every, "exclude", experts)]


def _named(entry: str, every: Iterable[str], inner: Iterable[str], key: str, fused: Iterable[str]) -> set[str]:
    """Return the layers that an entry of `targets` or `exclude` names. fused: the tensors of experts . An entry with
    `experts` in it names each by its own name or by that of its module; PEFT has them in lists apart, and a name such
    as down_proj is that of linear layers alone."""
    if entry == ALL_LINEAR:
        return {*inner}
    fused = fused if "experts" in entry else ()
    names = [(name, name) for name in (*every, *fused)] + [(name.rpartition(".")[0], name) for name in fused]
    found = {layer for name, layer in names if f".{name}".endswith(f".{entry}")}
    try:
        found |= {layer for name, layer in names if re.fullmatch(entry, name)}
    except re.error as e:
        raise Refused(f"model.lora.{key}={entry}: not a regular expression ({e}); name layers") from e
    return found


def _no_layer(entry: str, every: Iterable[str], model: str) -> str:
    """Return why an entry names no layer."""
    if "embed" in entry or "lm_head" in entry or "wte" in entry:
        why = "embeddings and the output head, which may be one tied tensor, get no factors"
        return f"{why}; name linear layers of the decoder, or leave it out"
    if "experts" in entry:
        kinds = ", ".join(EXPERT_FACTORS)
        return f"{model} has no experts with this name that are one tensor, as {kinds} have; leave it out"
    ends = ", ".join(sorted({name.rpartition(".")[2] for name in every}))
    return f"no linear layer of {model} has this name; they are {ends}"
