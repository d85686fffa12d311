"""Rules for the optimizer of verl's command lines and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from verl.config.compat.given import ACTOR, Given, Result
from verl.errors import Refused


def schedule(given: Given) -> Result:
    """Map the learning rate, its warm-up and its decay."""
    names = (f"{ACTOR}optim.", "optim.")
    steps_keys, ratio_keys = ([f"{n}lr_warmup_steps{end}" for n in names] for end in ("", "_ratio"))
    out: Result = {}
    lr = given.own("optim.lr", given.get(f"{ACTOR}optim.lr"))
    if lr is not None and "optim.lr" not in given.native:
        out["optim.lr"] = lr
    steps, ratio = given.first(*steps_keys), given.first(*ratio_keys)
    if steps is not None and steps > 0:
        given.ignore("lr_warmup_steps is given", *ratio_keys)
        out |= {"optim.warmup_steps": steps, "optim.warmup_ratio": 0.0}
    elif steps is not None or ratio is not None:
        out |= {"optim.warmup_steps": 0, "optim.warmup_ratio": ratio or 0.0}
    styles = ("lr_decay_style", "lr_scheduler_type", "lr_scheduler", "warmup_style", "decay_type")
    style_keys = [n + s for s in styles for n in names]
    style = given.first(*(k for k in style_keys if given.value(k) is not None)) or (
        (given.schedule or given.first(*style_keys)) if given.use_defaults else None
    )
    if style is not None:
        out["optim.schedule"] = style
    for key in (f"{n}lr_decay_steps" for n in names):
        if given.value(key) is not None and style != "constant":
            raise Refused(f"{key}={given.value(key)}: the schedule ends with the run; leave it out")
        given.ignore("has no effect on a constant rate" if given.value(key) else "has no effect at null", key)
    if style == "wsd":
        stable = given.first(*(f"{n}lr_wsd_stable_steps_ratio" for n in names))
        out["optim.decay_ratio"] = 1 - (0.9 if stable is None else stable)
        for key in style_keys:
            given.remarks[key] = "the last part falls linearly here, whatever its shape in verl"
    else:
        given.ignore("only read with wsd", *(f"{n}lr_wsd_stable_steps_ratio" for n in names))
    floor = given.first(*(f"{n}{s}" for n in names for s in ("min_lr", "lr_min")))
    ratio_floor = given.first(*(f"{n}{s}" for n in names for s in ("min_lr_ratio", "min_lr_factor")))
    if floor is not None and not lr:
        raise Refused(f"optim.min_lr={floor}: give optim.lr beside it, or optim.min_lr_ratio in its place")
    if floor is not None or ratio_floor is not None:
        out["optim.min_lr_ratio"] = ratio_floor if floor is None else floor / lr
    return out


_MUON: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "momentum": ("muon_momentum", None),
        "nesterov": ("muon_nesterov", False),
        "iterations": ("muon_num_ns_steps", None),
        "scale": ("muon_extra_scale_factor", 1.0),
    }
)
"""Options of Muon: verl's key, and Megatron's default where it differs from ours."""
_OVERRIDES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "momentum": ("momentum", ("muon", "sgd")),
        "nesterov": ("nesterov", ("muon", "sgd")),
        "ns_steps": ("iterations", ("muon",)),
    }
)
"""Arguments of torch's optimizers in verl's override_optimizer_config: our option, and the optimizers that have it."""


_ADJUST, _MATCHED = "override_optimizer_config.adjust_lr_fn", "match_rms_adamw"
"""The argument of torch's Muon for the size of an update, and its value at which that is ours at scale 0.2."""


def optimizer(given: Given) -> Result:
    """Map the optimizer. The critic has that of the actor."""
    names = (f"{ACTOR}optim.", "optim.")
    keys = [f"{ACTOR}optim.name", *(f"{n}optimizer" for n in names)]
    of_verl = next((value for key in keys if (value := given.value(key)) is not None), None)
    name = of_verl or given.native.get("optim.name", "adamw")
    for key in ("critic.optim.optimizer", "critic.optim.name"):
        if (critics := given.value(key)) not in (None, name):
            message = f"the critic has the optimizer of the actor here ({name})"
            raise Refused(f"{key}={critics}: {message}; leave it out, or set the actor's")
        given.ignore("the critic has the optimizer of the actor", key)
    out: Result = {} if of_verl is None else {"optim.name": of_verl}
    of_torch = of_verl == "muon" and any(given.values.get(f"{n}optimizer_impl") == "torch.optim" for n in names)
    for own, (of, default) in _MUON.items():
        spelled = [f"{n}{of}" for n in names]
        value = next((value for key in spelled if (value := given.value(key)) is not None), None)
        if value is None and of_verl == "muon" and not of_torch:
            value = default
        if name == "muon" and value is not None:
            out[f"optim.options.{own}"] = value
        else:
            given.ignore("only read with optimizer=muon", *spelled)
    for of, (own, able) in _OVERRIDES.items():
        for key in (f"{n}override_optimizer_config.{of}" for n in names):
            if (value := given.value(key)) is None:
                continue
            if name not in able:
                raise Refused(f"{key}={value}: {name} has no such setting here; leave it out")
            out[f"optim.options.{own}"] = value
    return out | _torch_scale(given, name, of_torch, "optim.options.scale" in out)


def _torch_scale(given: Given, name: str, of_torch: bool, scaled: bool) -> Result:
    """Return the scale of Muon for the argument of torch's. Raise Refused for a size of updates that ours cannot have.

    of_torch: the optimizer is torch.optim.Muon · scaled: another key gives the scale"""
    keys = [f"{n}{_ADJUST}" for n in (f"{ACTOR}optim.", "optim.")]
    key = next((key for key in keys if given.value(key) is not None), None)
    if key is None and (not of_torch or scaled or "optim.options.scale" in given.native):
        return {}
    value = "original" if key is None else given.value(key)
    if key is not None and name != "muon":
        raise Refused(f"{key}={value}: {name} has no such setting here; leave it out")
    if value != _MATCHED:
        setting = f"{key}={value}" if key else f"optimizer_impl=torch.optim: its Muon has adjust_lr_fn={value}"
        size = "an update grows with the square root of rows / columns there, and of the longer side here"
        raise Refused(f"{setting}: {size}; set {_ADJUST}={_MATCHED}, or optim.options.scale")
    return {} if scaled else {"optim.options.scale": 0.2}
