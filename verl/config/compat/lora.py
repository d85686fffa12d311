"""The rule for the keys of LoRA on verl's command lines: lora_rank and its neighbours, and Megatron's section lora."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from verl.config.compat.given import Given, Result
from verl.errors import Refused

SECTIONS = ("actor_rollout_ref.model.", "model.")
CRITIC = "critic.model."
_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
    }
)
"""Megatron's layers, and those of the Hugging Face model that they join."""
_WITHOUT_EFFECT = {
    "merge": "engines with adapters get factors; for vllm, rollout.engine_options.lora_policy=merged adds them",
    "dropout_position": "nothing is dropped",
    "lora_A_init_method": "factors A are drawn uniformly within 1 / sqrt(inputs), as PEFT draws them",
    "lora_dtype": "factors are float32 with the other masters",
    "dtype": "factors are float32 with the other masters",
    "a2a_experimental": "layouts of experts are chosen here",
    "fully_sharded_loras": "layouts are chosen here",
}
_HARMLESS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "type": ("lora", None),
        "dropout": (0, None),
        "lora_dropout": (0, None),
        "lora_B_init_method": ("zero", None),
        "use_dora": (False, None),
    }
)
"""Keys of the section lora, with the values that are what is done here."""
_WHY = {
    "type": "plain LoRA is trained here; set lora",
    "dropout": "a pass draws no random numbers, or the rollout would sample from another policy; set 0",
    "lora_dropout": "a pass draws no random numbers, or the rollout would sample from another policy; set 0",
    "lora_B_init_method": "training starts at the base model; set zero",
    "use_dora": "plain LoRA is trained here; set False",
}
_READ = {
    "rank": ("lora_rank", "lora.rank"),
    "alpha": ("lora_alpha", "lora.alpha"),
    "targets": ("target_modules", "lora.target_modules"),
    "exclude": ("exclude_modules", "lora.exclude_modules"),
    "path": ("lora_adapter_path", "lora.adapter_path"),
    "saved": ("modules_to_save",),
}
"""Our options, and verl's keys of them."""
_MEGATRON_ALPHA = 32.0


def lora(given: Given) -> Result:
    """Map the settings of LoRA. A critic has those of the actor."""
    found = {own: _first(given, SECTIONS, names) for own, names in _READ.items()}
    found["saved"] = _modules(given, SECTIONS)
    every = [*_keys(given, SECTIONS), *_keys(given, (CRITIC,))]
    own = given.native.get("model.lora.rank"), given.native.get("model.lora.path"), given.native.get("model.lora")
    if not any((found["rank"], found["path"], *own)):
        _check_critic(given, {})
        given.ignore("only read with lora_rank > 0", *every)
        return {}
    _check_critic(given, found)
    given.ignore("the critic is trained as the actor is", *_keys(given, (CRITIC,)))
    _unused(given)
    if found["path"] is not None:
        own_keys = ("rank", "alpha", "targets", "exclude", "saved")
        given.ignore("the adapter of lora_adapter_path has its own", *_spelled(own_keys))
        return {"model.lora.path": found["path"]}
    if own[1]:
        given.ignore("the adapter of model.lora.path has its own", *every)
        return {}
    out: Result = {"model.lora.rank": found["rank"]} if found["rank"] else {}
    alpha = found["alpha"]
    if alpha is None and given.use_defaults:
        in_section = any(f"{section}lora.rank" in given.values for section in SECTIONS)
        alpha = _MEGATRON_ALPHA if in_section else given.defaults.get(f"{SECTIONS[0]}lora_alpha")
    if alpha is not None:
        out["model.lora.alpha"] = alpha
    for key in ("targets", "exclude"):
        if layers := _layers(found[key]):
            out[f"model.lora.{key}"] = layers
    if found["saved"]:
        out["model.lora.modules_to_save"] = found["saved"]
    return out


def _first(given: Given, sections: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """Return the value of the first key that is not null; a rank of 0 counts as null."""
    values = (given.value(f"{section}{name}") for name in names for section in sections)
    return next((value for value in values if value not in (None, "", 0)), None)


def _keys(given: Given, sections: tuple[str, ...]) -> Iterator[str]:
    """Yield the given keys of LoRA in these sections of the command line."""
    return (key for key in given.values if key.startswith(sections) and given.reads(key, "lora"))


def _spelled(own: tuple[str, ...]) -> list[str]:
    return [f"{section}{name}" for key in own for name in _READ[key] for section in SECTIONS]


def _unused(given: Given) -> None:
    """Say why other keys of the section lora have no effect. Raise ValueError for one that would have one."""
    known = {name for names in _READ.values() for name in names}
    for key in _keys(given, SECTIONS):
        name = next(key.removeprefix(section) for section in SECTIONS if key.startswith(section))
        option, value = name.removeprefix("lora."), given.value(key)
        if name in known or option in _WITHOUT_EFFECT:
            if option in _WITHOUT_EFFECT:
                given.ignore(_WITHOUT_EFFECT[option], key)
        elif option not in _HARMLESS:
            known_here = "rank, alpha, rslora, targets, exclude, modules_to_save and path"
            fix = f"LoRA has {known_here} here (model.lora); leave it out"
            raise Refused(f"{key}={value}: no such option; {fix}")
        elif value not in _HARMLESS[option]:
            raise Refused(f"{key}={value}: {_WHY[option]}")
        else:
            given.ignore("this is what is done here", key)


def _check_critic(given: Given, actor: Mapping[str, Any]) -> None:
    """Raise ValueError for a critic with a rank, an adapter or whole modules that the actor has not."""
    if given.values.get("algorithm.adv_estimator", "gae") != "gae":
        return  # the only estimator with a critic, and verl's default
    for own in ("rank", "path"):
        for name in _READ[own]:
            key = f"{CRITIC}{name}"
            if key in given.values and (given.value(key) or None) != (actor.get(own) or None):
                raise Refused(f"{key}={given.value(key)}: the critic is trained as the actor is; make them agree")
    if (saved := _modules(given, (CRITIC,))) and actor and saved != actor["saved"]:
        key = f"{CRITIC}modules_to_save"
        raise Refused(f"{key}={given.value(key)}: the critic is trained as the actor is; make them agree")


def _modules(given: Given, sections: tuple[str, ...]) -> list[str]:
    """Return the modules that are trained whole beside the factors; none without the key. Raise ValueError for a value
    that is not a list of names."""
    found = list[str]()
    for key in (f"{section}{name}" for section in sections for name in _READ["saved"]):
        if (value := given.value(key)) is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise Refused(f"{key}={value}: not a list of names; write {key}=[visual.merger]")
        found = found or value
    return found


def _layers(value: Any) -> list[str]:
    """Return target_modules or exclude_modules as the options here: names, ends of names, or regular expressions."""
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return [name for entry in entries for name in _FUSED.get(str(entry), (str(entry),))]
