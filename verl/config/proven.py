"""Find the backends of a run that the project itself has not yet run on this kind of device, by its records."""

from __future__ import annotations

import json
from pathlib import Path

from verl.config.backends import engine_name
from verl.config.devices import default_device
from verl.config.schema import Config

SECTIONS = ("model", "rollout", "queue", "sync")
ANY_DEVICE = ("queue", "cluster")
"""The sections with backends that keep no tensors on a device, so that one record counts for all devices."""


def proven() -> dict[str, list[str]]:
    """Return, for each `section.engine`, the devices on which it was run. `bench/status.py` writes these records."""
    return json.loads(Path(__file__).with_name("proven.json").read_text())


def unproven(config: Config, sections: tuple[str, ...] = SECTIONS) -> list[str]:
    """Return one line that names the backends of this run without a record for its device; [] if all have one."""
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
