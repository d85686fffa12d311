"""The choice of model.gradient_checkpointing=auto by the plan's memory. No torch."""

from __future__ import annotations

from dataclasses import replace

from verl.bounds import size_text
from verl.config.load import Resolved
from verl.config.schema import Config
from verl.config.tree import changed
from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.planner.cluster import cluster_plan, memory_on_this_machine
from verl.planner.memory import HELD, fullest_moment, process_memory, role_items
from verl.planner.sizes import step_sizes

KEY = "model.gradient_checkpointing"
AUTO = "auto"
CHOICES = ("none", "selective", "full")
"""From the fastest to the smallest."""


def settle_checkpointing(resolved: Resolved, has: int | None, *, supervised: bool = False) -> tuple[Resolved, str]:
    """Return the configuration with the first of CHOICES with a peak that fits in the memory, and a line that names it;
    without `auto` the configuration as it is, and "". has: the bytes of the device or machine; None: unknown."""
    if resolved.config.model.gradient_checkpointing != AUTO:
        return resolved, ""
    if has is None:
        raise Refused(f"{KEY}={AUTO}: the memory of the devices is not known here; set {', '.join(CHOICES)}")
    small = []
    for choice in CHOICES:
        config = changed(resolved.config, {KEY: choice})
        wants = _supervised_bytes(config) if supervised else _peak_bytes(config)
        if wants <= has or choice == CHOICES[-1]:
            break
        small.append(f"{choice} wants {size_text(wants)}")
    why = f"it wants {size_text(wants)}, and there are {size_text(has)}"
    line = f"{KEY}={AUTO}: {choice} ({'; '.join([*small, why])})"
    return replace(resolved, config=config, origins={**resolved.origins, KEY: f"{AUTO}, by the plan's memory"}), line


def left_to_placement(resolved: Resolved) -> tuple[Resolved, str]:
    """Return the configuration for the table of a plan with `none`, where a placement settles `auto` on the devices of
    a cluster file, and a line that says so; without `auto` the configuration as it is, and ""."""
    if resolved.config.model.gradient_checkpointing != AUTO:
        return resolved, ""
    line = f"{KEY}={AUTO}: {CHOICES[0]} in this table; the arguments of the placement have its value on its devices"
    return replace(resolved, config=changed(resolved.config, {KEY: CHOICES[0]})), line


def _peak_bytes(config: Config) -> int:
    """Return the peak of a run in this process, or of all processes on this machine."""
    step = step_sizes(config)
    update_tokens = step.max_tokens // step.updates
    placement = cluster_plan(config, update_tokens)
    if placement is None:
        return process_memory(config, update_tokens).peak_bytes
    here = memory_on_this_machine(placement)
    if here is None:
        raise Refused(f"{KEY}={AUTO}: other machines or cards hold the models; set {', '.join(CHOICES)}")
    return here.peak_bytes


def _supervised_bytes(config: Config) -> int:
    """Return the peak of an update of the model alone, in one process."""
    if config.cluster.backend != "inproc":
        raise Refused(f"{KEY}={AUTO}: a run of several processes has no plan here; set {', '.join(CHOICES)}")
    items = role_items(config, "actor", Layout(), config.step.max_tokens_per_microbatch)
    named = {f"actor {name}": size for name, size in items.items()}
    moment = {*(f"actor {name}" for name in HELD), *fullest_moment(named, "actor", "update")}
    return sum(named.get(name, 0) for name in moment)
