"""TRL's `peft_config` in Python: PEFT's LoraConfig, or a dict of its fields, as the keys of LoRA here. PEFT is not
imported."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from verl.config.compat.table import PEFT
from verl.errors import Refused
from verl.model_engine.lora_spec import LoraSpec

_PEFT_RANK, _PEFT_ALPHA = 8, 8
"""PEFT's defaults, which are not those of `model.lora`."""
_ROUNDED = "it changes the base model, which the reference and the rollout keep as it is in its folder"
_INITIALISATIONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("pissa", "olora", "corda", "loftq", "lora_ga"), _ROUNDED),
        "False": "B would not start at 0, and the first answers would not be the base model's",
    }
)
_NO_EFFECT: Collection[str] = frozenset(
    {
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "fan_in_fan_out"),
        *("qalora_group_size", "megatron_core", "runtime_config"),
    }
)
"""Fields about files, or about features that another field switches on."""


def lora_keys(peft_config: Any) -> dict[str, Any]:
    """Return the keys below `model.lora` that train what this LoraConfig of PEFT trains.

    peft_config: the object, or a dict of its fields, in which missing ones have PEFT's defaults. Raise ValueError for
    a field that would train something else, by its name."""
    fields = _fields(peft_config)
    for name, (harmless, why) in _CHECKED.items():
        if name in fields and _plain(fields[name]) not in harmless:
            value = _plain(fields[name])
            reason = _INITIALISATIONS.get(str(value).partition("_niter")[0], why) if name == _INIT else why
            raise Refused(f"peft_config.{name}={value}: {reason}; {_instead(name)}")
    for name, value in fields.items():
        if value and name not in _READ and name not in _CHECKED and name not in _NO_EFFECT:
            raise Refused(f"peft_config.{name}={value}: {_instead(name)}")
    targets = _layers(fields.get("target_modules")) + (experts := _layers(fields.get("target_parameters")))
    if strange := [name for name in experts if "experts" not in name]:
        why = "only experts get factors beside linear layers; give names as mlp.experts.down_proj"
        raise Refused(f"peft_config.target_parameters={strange[0]}: {why}")
    if experts and (strange := [name for name in _layers(fields.get("exclude_modules")) if _EXPERTS.search(name)]):
        why = "PEFT excludes modules alone, and these experts would keep their factors"
        raise Refused(f"peft_config.exclude_modules={strange[0]}: {why}; name the others in target_parameters")
    if not targets:
        why = "PEFT chooses layers by the model's family, and some have no choice"
        raise Refused(f"peft_config.target_modules={fields.get('target_modules')}: {why}; name them, or all-linear")
    given = {
        "rank": fields.get("r", _PEFT_RANK),
        "alpha": fields.get("lora_alpha", _PEFT_ALPHA),
        "rslora": bool(fields.get("use_rslora", False)),
        "targets": targets,
        "exclude": _layers(fields.get("exclude_modules")),
        "modules_to_save": _layers(fields.get("modules_to_save")),
    }
    return {f"model.lora.{name}": value for name, value in given.items() if value is not False and value != []}


def lora_arguments(peft_config: Any) -> list[str]:
    """Return the keys of a LoraConfig as arguments of a command line. Raise ValueError as `lora_keys`."""
    return [f"{key}={_argument(value)}" for key, value in lora_keys(peft_config).items()]


def _argument(value: Any) -> str:
    if isinstance(value, list):
        quoted = (entry.replace("'", r"\'") for entry in value)  # a backslash before another character is one
        return "[" + ",".join(f"'{entry}'" for entry in quoted) + "]"
    return str(value).lower()


def lora_spec(peft_config: Any, seed: int) -> LoraSpec | None:
    """Return the settings of LoRA that a LoraConfig asks for; None without one. Raise ValueError as `lora_keys`."""
    if peft_config is None:
        return None
    return LoraSpec(**{key.rpartition(".")[2]: value for key, value in lora_keys(peft_config).items()}, seed=seed)


_READ = (
    *("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "exclude_modules"),
    "modules_to_save",
)
_EXPERTS = re.compile("(?<!shared_)experts")
_INIT = "init_lora_weights"
_CHECKED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "peft_type": (("LORA", None), "plain LoRA is trained here"),
        "task_type": (("CAUSAL_LM", None), "a policy is a causal language model"),
        "bias": (("none", None), "biases of layers stay those of the base"),
        "use_dora": ((False, None), "magnitudes of columns are not trained here"),
        "lora_dropout": ((0, None), "a pass draws no random numbers"),
        _INIT: ((True, None), "A is drawn uniformly within 1 / sqrt(inputs), PEFT's default, and B is 0"),
    }
)
"""Fields that have one meaning here: its values, and why it has no other."""


def _fields(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if type(given).__module__.partition(".")[0] == "peft" and hasattr(given, "to_dict"):
        found: dict[str, Any] = given.to_dict()
        return found
    raise Refused(f"peft_config is a {type(given).__name__}: give a LoraConfig of PEFT, or a dict of its fields")


def _plain(value: Any) -> Any:
    """Return the value of an enumeration of PEFT; others as they are."""
    return getattr(value, "value", value)


def _layers(given: Any) -> list[str]:
    """Return layers as `model.lora` names them: a list of ends of names, or one regular expression."""
    if given is None:
        return []
    return [given] if isinstance(given, str) else sorted(map(str, given))


def _instead(name: str) -> str:
    """Return what is used in place of a field."""
    return f"here: {PEFT[name]}" if name in PEFT else "no such setting here; leave it out"
