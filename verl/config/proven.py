"""Backends of a run that the project itself has never run on this kind of device, by its own records."""

from __future__ import annotations

import json
from pathlib import Path

from verl.config.backends import engine_name
from verl.config.devices import default_device
from verl.config.schema import Config

SECTIONS = ("model", "rollout", "queue", "sync")
ANY_DEVICE = ("queue", "cluster")
"""The sections whose backends keep no tensors on a device: one record counts for all devices."""


def proven() -> dict[str, list[str]]:
    """Return the devices that each backend was run on, by `section.engine`; written by `bench/status.py`."""
    return json.loads(Path(__file__).with_name("proven.json").read_text())


def unproven(config: Config, sections: tuple[str, ...] = SECTIONS) -> list[str]:
    """Return one line that names what this run uses and the project never ran on its device, or no line."""
    device, records = default_device(config), proven()
    used = [(section, engine_name(config, section)) for section in sections] + [("cluster", config.cluster.backend)]
    missing = [
        f"{section}.{'backend' if section == 'cluster' else 'engine'}={engine}"
        for section, engine in used
        if ("cpu" if section in ANY_DEVICE else device) not in records.get(f"{section}.{engine}", ())
    ]
    if not missing:
        return []
    first = f"{', '.join(missing)}: no record of a run by the project itself on a {device} device (docs/status.md)"
    return [f"{first}; compare a short run with one on a CPU before a long one"]
