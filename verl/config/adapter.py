"""Read the folder of a LoRA adapter in PEFT's layout, without torch, and check that it fits its base model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from verl.config.experts import fused_experts
from verl.config.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EMBEDDING,
    FURTHER,
    SCORE,
    TensorHeader,
    cached_model_folder,
    describe_model,
    json_object,
    read_model_config,
    read_weight_headers,
)
from verl.config.schema import Config
from verl.errors import Refused
from verl.models.families import FAMILIES, ImageFamily, name_of
from verl.parameter_set import DOWN, GATE_UP, ParameterSet, is_experts

CONFIG, WEIGHTS = ADAPTER_CONFIG, ADAPTER_WEIGHTS
EXPONENTS: Mapping[str, tuple[Any, int]] = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""The integers of the size of a dtype, and the bits of its exponent, all of which NaN and infinity have."""
_MERGE = "merge it into its base (merge_and_unload of PEFT), save that, and give its folder"
_ONLY: Mapping[str, tuple[Any, ...]] = {  # other initialisations change the base model
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_IGNORED = (  # parts that are in the weights too, and details of the adapter's training
    *("fan_in_fan_out", "modules_to_save", "layers_pattern", "lora_dropout", "inference_mode", "task_type", "revision"),
    *("auto_mapping", "peft_version", "qalora_group_size", "megatron_config", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config"),
)


Shape = tuple[int, ...]
LAYER = re.compile(r"(?!.*(vision|visual|audio)).*\.layers\.\d+\.")  # names of tensors in layers of the text model
TARGETS = ("q_proj", "o_proj", "down_proj")
_ROUTERS = (".gate", ".router", ".shared_expert_gate")
"""The ends of the names of routers of experts, which are not trained."""


def text_layers(base: Path) -> dict[str, tuple[int, int]]:
    """Return those of `linear_layers` that belong to the text model."""
    return {name: sides for name, sides in linear_layers(base).items() if LAYER.match(name)}


def one_projection(base: Path) -> Mapping[str, tuple[int, int]]:
    """Return the sides of the first projection of `TARGETS` that a model folder has, in all text layers, by module
    name; empty if it has none."""
    every = text_layers(base)
    found = ({name: shape for name, shape in every.items() if name.endswith(f".{kind}")} for kind in TARGETS)
    return next(filter(None, found), {})


def refuse_not_finite(folder: Path) -> None:
    """Raise Refused if a tensor of an adapter's folder has NaN or infinity, or values of 64 bits that float32 does not
    have. All its values are read."""
    for name, header in read_weight_headers(folder).items():
        if header.dtype == "F64":
            values = np.fromfile(header.file, np.float64, header.numel, offset=header.begin)
            finite = bool(np.all(np.abs(values) <= np.finfo(np.float32).max))
        elif (found := EXPONENTS.get(header.dtype)) is not None:
            kind, exponent = found
            bits = np.fromfile(header.file, kind, header.numel, offset=header.begin)
            finite = not np.any(bits & exponent == exponent)
        else:
            continue
        if not finite:
            fix = "take an earlier adapter, or train anew"
            raise Refused(f"{folder}: {name} has values that are not finite; {fix}")


def model_weights(base: Path) -> dict[str, TensorHeader]:
    """Return the headers of the weights of a model folder by their names in the model, experts as the folder has
    them."""
    return {_in_model(name): header for name, header in _model_headers(base).items()}


def linear_layers(base: Path) -> dict[str, tuple[int, int]]:
    """Return the sides of the weight of each linear layer in the decoder layers of a model folder, by its name in the
    model. Routers of experts are none: they get no factors."""
    found = dict[str, tuple[int, int]]()
    family = image_family(base)
    for name, header in _model_headers(base).items():
        module = name.removesuffix(".weight")
        read_by_tower = family is not None and family.part_of(name) != "language"
        if module != name and not read_by_tower and _is_linear(module, header):
            found[_in_model(module)] = (header.shape[0], header.shape[1])
    return found


def image_family(base: Path) -> ImageFamily | None:
    """Return the row of a folder's model; None: it reads text alone."""
    return FAMILIES.get(name_of(read_model_config(base)))


def _model_headers(base: Path) -> dict[str, TensorHeader]:
    """Return the headers of a folder's weights. Those of a model that reads images have their names in the model."""
    headers, family = read_weight_headers(base), image_family(base)
    headers = {name: header for name, header in headers.items() if not name.startswith(FURTHER)}
    return headers if family is None else {family.in_model(name): header for name, header in headers.items()}


def _is_linear(module: str, header: TensorHeader) -> bool:
    inside = any(part.isdigit() for part in module.split("."))
    return inside and len(header.shape) == 2 and ".experts." not in module and not module.endswith(_ROUTERS)


def _in_model(module: str) -> str:
    """Return the name of a module in the causal LM: some folders omit its first component."""
    prefixes = dict.fromkeys(("h", "wte", "wpe", "ln_f"), "transformer")
    prefixes |= dict.fromkeys(("layers", "embed_tokens", "norm"), "model")
    first = module.partition(".")[0]
    return f"{prefixes[first]}.{module}" if first in prefixes else module


def peft_config(parameters: ParameterSet, base: str) -> dict[str, Any]:
    """Return the adapter_config.json of a LoRA set on top of a model folder or hub id."""
    experts = [name for name in parameters.targets if is_experts(name)]
    return {
        "peft_type": "LORA",
        "r": parameters.rank,
        "lora_alpha": parameters.scale * parameters.rank,
        "target_modules": [name for name in parameters.targets if not is_experts(name)],
        **({"target_parameters": experts} if experts else {}),
        "bias": "none",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }


class _Lora(msgspec.Struct):
    """The keys of adapter_config.json that are used, by PEFT's names."""

    base_model_name_or_path: str | None = None
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None

    def scale(self, target: str, rank: int) -> float:
        """Return the factor of B A x. target: the name of a linear layer, or of a tensor of experts: PEFT compares its
        patterns with that, not with the module of the experts."""
        patterns = self.alpha_pattern or {}
        given = (a for pattern, a in patterns.items() if re.match(rf"(.*\.)?({pattern})$", target))
        return next(given, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)

    def aims_at(self, module: str) -> bool:
        """Return True if the adapter has factors for this module of the base model."""
        layer, layers = re.search(r"\.(\d+)\.", module), self.layers_to_transform

        def among(given: list[str] | str | None) -> bool:
            if isinstance(given, str):
                return re.fullmatch(given, module) is not None
            return any(f".{module}".endswith(f".{name}") for name in given or ())

        inside = layers is None or (layer and int(layer[1]) in (layers if isinstance(layers, list) else [layers]))
        return among(self.target_modules) and not among(self.exclude_modules) and bool(inside)

    def tensor_of(self, module: str) -> str:
        """Return the name of the tensor of experts that has the factors of this module. PEFT wraps a module of experts
        once for each of its tensors; the last of them is outside."""
        experts = module.removesuffix(".base_layer")
        every = [f"{experts}.{tensor}" for tensor in (GATE_UP, DOWN)]
        named = [t for t in every if any(f".{t}".endswith(f".{name}") for name in self.target_parameters or ())]
        inner = module != experts
        return named[-1 - inner] if len(named) > inner else f"{experts}.weight"


@dataclass(slots=True)
class AdaptedWeight:
    """The change of one weight of the base model: it is replaced by `whole`, or scale * B @ A is added to it."""

    whole: str = ""
    a: str = ""
    b: str = ""
    scale: float = 0.0
    experts: int = 0
    """The number of experts in a tensor of experts, of which each has its rows of A and columns of B, as PEFT has them:
    A [experts x rank, in] and B [out, rank x experts]."""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not [*folder.glob("model*.safetensors*")]


def base_of(path: str, policy: str) -> str:
    """Return the folder of an adapter's base model, or the policy's folder if that is not on this machine. The base of
    a whole model is the model itself."""
    if not is_adapter(folder := Path(path).expanduser()):
        return path
    named = _read(folder).base_model_name_or_path or ""
    base = Path(named).expanduser()
    return str(base) if named and base.is_dir() else str(cached_model_folder(named) or policy)


def own_base(folder: Path) -> Path:
    """Return the folder of an adapter's base. Raise ValueError if it is not on this machine, or if `folder` has no
    adapter."""
    if not is_adapter(folder):
        raise Refused(f"{folder}: no adapter ({CONFIG}), so there is nothing to merge; it is a whole model")
    if found := base_of(str(folder), ""):
        return Path(found)
    named = _read(folder).base_model_name_or_path
    raise Refused(f"{folder}: its base {named} is not on this machine; set base_model_name_or_path in {CONFIG}")


def teacher_models(config: Config) -> dict[str, str]:
    """Return, for each teacher that this run computes itself, its model folder, or the folder of its base model if the
    teacher is an adapter."""
    return {role: base_of(path, config.model.path) for role, path in config.teacher.folders().items()}


def read_adapter(folder: Path, base: Path, *, head: bool = False) -> dict[str, AdaptedWeight]:
    """Return the change of each weight of the base model, by name. head: with the head of a reward model, if it has
    one. Raise ValueError for an adapter that is not plain LoRA, or that belongs to another model."""
    lora, headers, parts = _read(folder), read_weight_headers(folder), dict[str, AdaptedWeight]()
    fused = fused_experts(base)
    if not (folder / WEIGHTS).is_file():
        raise Refused(f"model.path={folder}: an adapter without {WEIGHTS}; save it again with PEFT")
    for key, header in headers.items():
        name = key.removeprefix("base_model.model.")
        module, _, factor = name.rpartition(".lora_")
        if factor in ("A.weight", "B.weight"):
            of_experts = module.removesuffix(".base_layer").endswith(".experts")
            weight = lora.tensor_of(module) if of_experts else f"{module}.weight"
            part = parts.setdefault(weight, AdaptedWeight(experts=fused.get(weight, (0,))[0]))
            if factor == "A.weight":
                part.a = key
                rank = max(1, *header.shape[:1]) // max(1, part.experts)
                part.scale = lora.scale(weight.removesuffix(".weight"), rank)
            else:
                part.b = key
        else:
            parts.setdefault(name.replace(".base_layer.", "."), AdaptedWeight()).whole = key
    if prefix := next(_misfits(lora, parts, headers, base, head), None):
        fix = f"name the folder of its own base in {CONFIG} (base_model_name_or_path)"
        raise Refused(f"model.path={folder}: {prefix} ({base}); {fix}, or {_MERGE}")
    return parts


def read_factors(folder: Path, base: Path, *, head: bool = False) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of the factors A and B of each weight that an adapter changes, by its name. Raise ValueError as
    `factors_alone`."""
    headers, parts = read_weight_headers(folder), factors_alone(folder, base, head=head)
    return {name: _factor_shapes(part, headers) for name, part in parts.items()}


def read_trained(folder: Path, base: Path) -> tuple[dict[str, tuple[Shape, Shape]], dict[str, Shape]]:
    """Return what training continues from an adapter with: the shapes of its factors, as `read_factors` does, and those
    of the weights that it has whole, by name. Raise ValueError for one with factors of what gets none here."""
    headers, parts = read_weight_headers(folder), read_adapter(folder, base)
    able = {*linear_layers(base), *fused_experts(base)}
    if strange := next((n for n, part in parts.items() if part.a and n.removesuffix(".weight") not in able), None):
        what = "linear layers of the decoder and experts alone are trained with factors"
        raise Refused(f"model.path={folder}: an adapter with factors of {strange}, and {what}; {_MERGE}")
    factors = {name: _factor_shapes(part, headers) for name, part in parts.items() if not part.whole}
    if not factors:
        raise Refused(f"model.path={folder}: an adapter without factors, of whole weights alone; {_MERGE}")
    return factors, {name: headers[part.whole].shape for name, part in parts.items() if part.whole}


def _factor_shapes(part: AdaptedWeight, headers: Mapping[str, TensorHeader]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A [rank, in] and B [out, rank], of experts [experts, rank, in] and [experts, out, rank]; ()
    for one that is missing."""
    a, b = (headers[key].shape if key else () for key in (part.a, part.b))
    if not (n := part.experts) or len(a) != 2 or len(b) != 2:
        return a, b
    return (n, a[0] // n, a[1]), (n, b[0], b[1] // n)


def factors_alone(folder: Path, base: Path, *, head: bool = False) -> dict[str, AdaptedWeight]:
    """Return what `read_adapter` returns, but the head of a reward model. head: the adapter has one. Raise ValueError
    for an adapter with other whole tensors, or without the head, too."""
    parts = read_adapter(folder, base, head=head)
    if head and parts.pop(SCORE, None) is None:
        raise Refused(f"{folder}: an adapter without {SCORE}, of a language model; train a reward model with verl rm")
    if whole := sorted(name for name, part in parts.items() if part.whole or not part.a):
        raise Refused(f"{folder}: an adapter with the whole tensor {whole[0]}; only factors can be published as a set")
    return parts


def _read(folder: Path) -> _Lora:
    config = {"peft_type": None, **json_object(folder / CONFIG, (folder / CONFIG).read_bytes())}
    for key, value in config.items():
        known = value in _ONLY[key] if key in _ONLY else not value or key in (*_Lora.__struct_fields__, *_IGNORED)
        if not known:
            raise Refused(f"model.path={folder}: an adapter with {key}={value}, which is not read here; {_MERGE}")
    try:
        return msgspec.convert(config, _Lora)
    except msgspec.ValidationError as exc:
        raise Refused(f"{folder / CONFIG}: {exc}; save it again with PEFT") from exc


def _misfits(
    lora: _Lora, parts: Mapping[str, AdaptedWeight], headers: Mapping[str, TensorHeader], base: Path, head: bool
) -> Iterator[str]:
    """Yield the reasons why the adapter does not belong to this base model."""
    facts, fused = describe_model(str(base)), fused_experts(base)
    theirs = {name: header.shape for name, header in _model_headers(base).items()} | fused
    tied, hidden = facts.tied, facts.hidden
    ranks = {lora.r, *(lora.rank_pattern or {}).values()}
    for name, part in parts.items():
        found = theirs.get(name) or theirs.get(name.partition(".")[2])  # some folders omit the first name component
        a, b = _factor_shapes(part, headers)
        if head and name == SCORE and part.whole and found is None:
            if headers[part.whole].shape != (1, hidden):
                yield f"{name} is {list(headers[part.whole].shape)} in it, and a reward model's head is {[1, hidden]}"
        elif found is None or (".experts." in name and name not in fused):
            yield f"it changes {name}, which is no weight of a layer of its base"
        elif tied and (EMBEDDING.search(name) or name.endswith("lm_head.weight")):
            yield f"it changes {name}, which is tied to another weight in its base"
        elif part.whole and headers[part.whole].shape != found:
            yield f"{name} is {list(headers[part.whole].shape)} in it and {list(found)} in its base"
        elif (part.a or part.b) and not (len(a) == len(b) >= 2 and a[-2] == b[-1] and a[-2] in ranks):
            yield f"its factors of {name} are A {list(a)} and B {list(b)}, with r={lora.r} in {CONFIG}"
        elif a and found not in ((*b[:-1], a[-1]), (a[-1], b[-2])):
            yield f"it adds {[*b[:-1], a[-1]]} to {name}, which is {list(found)} in its base"
    named = {*parts} | {name.partition(".")[2] for name in parts}
    for name in (n for n, shape in theirs.items() if len(shape) == 2 and n not in named):
        if ".experts." not in name and lora.aims_at(name.removesuffix(".weight")):
            yield f"it has no factors of {name}, which its target_modules name"
    for target in lora.target_parameters or ():
        if not any(f".{name}".endswith(f".{target}") for name in fused):
            yield f"its target_parameters name {target}, which is no tensor of experts"
    for name in (n for n in fused if n not in named):
        if any(f".{name}".endswith(f".{target}") for target in lora.target_parameters or ()):
            yield f"it has no factors of {name}, which its target_parameters name"
