"""Devices and nodes as the planner computes with them: figures of data sheets, and those of a user's cluster file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from verl.errors import Refused
from verl.names import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The figures of one device. A figure that is not known is 0."""

    name: str
    memory_gb: float
    bandwidth_gbs: float
    """Gigabytes per second that its memory reads."""
    matrix_tflops: float
    """10^12 floating-point operations per second of dense products in bfloat16."""
    link_gbs: float
    """Gigabytes per second to the other devices of its node, in one direction."""
    source: str
    compute_share: float = 0.5
    """The share of `matrix_tflops` that a pass over long rows reaches."""
    bandwidth_share: float = 0.7
    """The share of `bandwidth_gbs` that a decode step reaches."""
    network_share: float = 0.8
    """The share of `link_gbs`, and of the network between nodes, that a collective reaches."""
    spread: float = 1.4
    """The factor by which each share may be wrong, in both directions. The default covers what published runs reach:
    36% to 70% of the matrix rate, 50% to 98% of the bandwidth."""
    item_bytes: float = 2
    """The bytes of a weight, a hidden value, a key or a value when it is computed with; `matrix_tflops` is of these."""
    step_ms: float = 0.0
    """The milliseconds of a decode step beside memory and products: launches, sampling, scheduling."""
    sequence_us: float = 0.0
    """The microseconds that the host of an engine adds to a decode step for each sequence, on however many devices."""
    decode_share: float = 0.0
    """The share of `matrix_tflops` that the few rows of a decode step reach; 0: `compute_share`."""
    overlap: float = 1.0
    """The share of the shorter of reads and products of a decode step that the longer one hides."""
    link_us: float = 15.0
    """The microseconds of an all-reduce of few bytes between devices of a node."""
    fp8_tflops: float = 0.0
    """10^12 floating-point operations per second of dense products in FP8; 0: it has none, and multiplies in
    bfloat16."""
    half_width: float = 0.0
    """The hidden size at which a pass takes twice the time of its products: the work beside them grows with the size,
    products with its square."""

    def flops(self, hidden: float) -> float:
        """Return the operations per second that a pass of a model of this hidden size reaches."""
        return 1e12 * self.matrix_tflops * self.compute_share / (1 + self.half_width / hidden)

    def decode_flops(self, hidden: float) -> float:
        """Return those that a decode step reaches."""
        return self.flops(hidden) * (self.decode_share or self.compute_share) / self.compute_share

    def faster(self, fp8: bool) -> float:
        """Return how many times as fast products of rollout engines are: in FP8, if they multiply in it."""
        return self.fp8_tflops / self.matrix_tflops if fp8 and self.fp8_tflops else 1.0

    @property
    def read(self) -> float:
        """Bytes per second that a decode step reads."""
        return 1e9 * self.bandwidth_gbs * self.bandwidth_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of one kind."""

    device: Device
    nodes: int
    devices_per_node: int
    network_gbs: float
    """Gigabytes per second from one node to the others, in one direction, for all its devices together."""
    network_us: float = 0.0
    """The microseconds of a collective of few bytes between nodes."""
    price_per_hour: float = 0.0
    """The price of one device."""
    host_memory_gb: float = 0.0
    """The memory of a node's host; 0: not known."""
    disk_gb: float = 0.0
    """The disk on which a run may write; 0: not known."""

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def link(self) -> float:
        """Bytes per second of a collective inside a node, per device."""
        return 1e9 * self.device.link_gbs * self.device.network_share

    @property
    def network(self) -> float:
        """Bytes per second of collectives between nodes, for all devices of a node together."""
        return 1e9 * self.network_gbs * self.device.network_share


_SHEET = "data sheet of"
_ROWS = (
    # name, memory GB, memory GB/s, bfloat16 and FP8 TFLOP/s without sparsity, GB/s to the other devices, source
    ("A100-40", 40, 1555, 312, 0, 300, f"{_SHEET} A100 SXM4 40 GB"),
    ("A100-80", 80, 2039, 312, 0, 300, f"{_SHEET} A100 SXM4 80 GB"),
    ("H20", 96, 4000, 148, 296, 450, f"{_SHEET} HGX H20"),
    ("H100", 80, 3350, 989, 1979, 450, f"{_SHEET} H100 SXM5"),
    ("H200", 141, 4800, 989, 1979, 450, f"{_SHEET} H200 SXM"),
    ("B200", 180, 7700, 2250, 4500, 900, f"{_SHEET} HGX B200"),
    ("L40S", 48, 864, 362, 733, 32, f"{_SHEET} L40S, PCIe 4.0 x16 between devices"),
    ("MI300X", 192, 5300, 1307, 2615, 448, f"{_SHEET} MI300X, seven links of 64 GB/s"),
    ("Ascend-910B", 64, 0, 320, 0, 196, "press reports, which do not agree on its memory bandwidth"),
)
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        name: Device(
            name=name,
            memory_gb=gb,
            bandwidth_gbs=gbs,
            matrix_tflops=tflops,
            fp8_tflops=fp8,
            link_gbs=link,
            source=source,
        )
        for name, gb, gbs, tflops, fp8, link, source in _ROWS
    }
)
"""The devices that a cluster file can name."""
SHARES = ("compute_share", "bandwidth_share", "network_share", "decode_share", "overlap")
NEEDED = ("memory_gb", "bandwidth_gbs", "matrix_tflops", "link_gbs")
FIGURES = (*NEEDED, *SHARES, "spread", "item_bytes", "step_ms", "sequence_us", "link_us", "half_width", "fp8_tflops")
"""The fields of `Device` that a cluster file can replace."""
MAY_BE_ZERO = ("step_ms", "sequence_us", "link_us", "half_width", "overlap", "fp8_tflops")
_MAY_LACK = ("network_us", "price_per_hour", "host_memory_gb", "disk_gb")
_OF_NODES = ("nodes", "devices_per_node", "network_gbs", *_MAY_LACK)


def read_cluster(path: Path) -> tuple[Nodes, ...]:
    """Return the node groups of a cluster file: a YAML list of mappings with `device`, the fields of `Nodes`, and
    figures that replace those of the device. Raise Refused with the line's place, the value and the fix."""
    try:
        page = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise Refused(f"{path}: no cluster file that can be read: {e}") from e
    if not isinstance(page, list) or not page or not all(isinstance(entry, dict) for entry in page):
        raise Refused(f"{path}: a list of node groups is expected: - {{device: H100, nodes: 2, network_gbs: 50}}")
    return tuple(_nodes(entry, f"{path}, group {i}") for i, entry in enumerate(page, 1))


def _nodes(entry: Mapping[str, Any], where: str) -> Nodes:
    if unknown := [key for key in entry if key not in ("device", *_OF_NODES, *FIGURES)]:
        raise Refused(f"{where}: {unknown[0]!r} is no figure{did_you_mean(unknown[0], (*_OF_NODES, *FIGURES))}")
    name = str(entry.get("device"))
    figures: dict[str, Any] = {
        key: 0.0 if key in MAY_BE_ZERO and entry[key] == 0 else _positive(entry[key], key, where)
        for key in FIGURES
        if key in entry
    }
    if any(figures.get(share, 1) > 1 for share in SHARES):
        raise Refused(f"{where}: a share is at most 1")
    if figures.get("spread", 1) < 1:
        raise Refused(f"{where}: spread={figures['spread']:g}: a factor of 1 or more is expected")
    known = DEVICES.get(name)
    if known is None:
        if missing := [key for key in NEEDED if key not in figures]:
            known_ones = f"one of {', '.join(DEVICES)}, or give its {', '.join(missing)}"
            raise Refused(f"{where}: device {name!r} is not known{did_you_mean(name, DEVICES)}; {known_ones}")
        known = Device(name=name, memory_gb=0, bandwidth_gbs=0, matrix_tflops=0, link_gbs=0, source=where)
    device = replace(known, **figures)
    if missing := [key for key in NEEDED if not getattr(device, key)]:
        raise Refused(f"{where}: {name} has no {missing[0]} ({known.source}); give it")
    nodes, each = (_count(entry.get(key, 1), key, where) for key in ("nodes", "devices_per_node"))
    if nodes > 1 and "network_gbs" not in entry:
        raise Refused(f"{where}: {nodes} nodes without network_gbs, the gigabytes per second between them")
    return Nodes(
        device=device,
        nodes=nodes,
        devices_per_node=each,
        network_gbs=_positive(entry["network_gbs"], "network_gbs", where)
        if "network_gbs" in entry
        else device.link_gbs,
        **{key: _positive(entry[key], key, where) for key in _MAY_LACK if key in entry},
    )


def _positive(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise Refused(f"{where}: {key}={value!r}: a number above 0 is expected")
    return float(value)


def _count(value: Any, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"{where}: {key}={value!r}: a whole number above 0 is expected")
    return value


def scaled(at: Nodes, factor: float) -> Nodes:
    """Return the nodes with the shares that their devices reach multiplied by this factor, each at most 1."""
    shares: dict[str, Any] = {share: min(1.0, factor * getattr(at.device, share)) for share in SHARES[:-1]}
    return replace(at, device=replace(at.device, **shares))


def some_devices(at: Nodes, devices: int) -> Nodes:
    """Return this number of the devices: a part of one node, or whole nodes."""
    if devices < at.devices_per_node:
        return replace(at, nodes=1, devices_per_node=devices)
    return replace(at, nodes=devices // at.devices_per_node)


def total(groups: Sequence[Nodes]) -> int:
    """Return the number of devices of a cluster."""
    return sum(group.devices for group in groups)
