"""`verl doctor cluster_file=FILE`: the measured figures of this machine, as a cluster file of the planner."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from verl.errors import Refused
from verl.planner.hardware import NEEDED
from verl.workers import host

MEASURE_S = 4.0
"""The time for which each rate is measured."""
COPIED_BYTES = 256 << 20
"""The bytes of a copy: above every cache."""
CALLS = 10
"""The calls that are made before their end is waited for."""
CPU_WIDTH, CARD_WIDTH = 2048, 8192
"""Rows and columns of the matrices that are multiplied."""


def write_figures(file: Path) -> str:
    """Measure the devices of this machine and write their cluster file. Return its text. Raise Refused if the file
    exists."""
    if file.exists() or not file.parent.is_dir():
        why = "exists" if file.exists() else f"there is no folder {file.parent}"
        raise Refused(f"{file}: {why}: name another file")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", 0) if cards else torch.device("cpu")
    dtype = torch.bfloat16 if cards else torch.float32
    rates = bandwidth(device, COPIED_BYTES, MEASURE_S), matrix_rate(device, dtype), link(device, cards)
    figures = dict(zip(NEEDED, (_memory_bytes(device) / 1e9, rates[0] / 1e9, rates[1] / 1e12, rates[2] / 1e9)))
    entry: dict[str, object] = {"device": _name(device), "nodes": 1, "devices_per_node": max(1, cards)}
    entry |= {name: float(f"{value:.4g}") for name, value in figures.items()} | {"item_bytes": dtype.itemsize}
    beside = {"host_memory_gb": host.total_bytes(), "disk_gb": shutil.disk_usage(file.parent).free}
    entry |= {name: float(f"{value / 1e9:.4g}") for name, value in beside.items()}
    if not cards:
        entry["overlap"] = 0  # a core that waits for memory does not multiply
    when = time.strftime("%Y-%m-%d")
    text = (
        f"# measured by `verl doctor cluster_file={file.name}` on {when}: copies, {_width(device)}-wide products in"
        f" {str(dtype).removeprefix('torch.')}\n" + yaml.safe_dump([entry], sort_keys=False)
    )
    file.write_text(text)
    return text


def bandwidth(device: torch.device, copied_bytes: int, measure_s: float) -> float:
    """Return the bytes per second that copies inside a device's memory read and write. Raise torch.OutOfMemoryError if
    two blocks of this size are not free."""
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * copied_bytes * _rate(lambda: target.copy_(source), device, measure_s)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of products of square matrices."""
    width = _width(device)
    a, b = torch.zeros(2, width, width, dtype=dtype, device=device).fill_(0.01).unbind()
    out = torch.empty_like(a)
    return 2 * width**3 * _rate(lambda: torch.mm(a, b, out=out), device, MEASURE_S)


def link(device: torch.device, cards: int) -> float:
    """Return the bytes per second from one device to another one of this machine; of a single card those from the
    memory of its host, of a CPU those between two processes, which a copy reads and writes."""
    if device.type == "cpu":
        return bandwidth(device, COPIED_BYTES, MEASURE_S) / 2
    other = torch.device("cuda", 1) if cards > 1 else torch.device("cpu")
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=other, pin_memory=other.type == "cpu")
    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    return COPIED_BYTES * _rate(lambda: target.copy_(source), device, MEASURE_S)


def _width(device: torch.device) -> int:
    return CPU_WIDTH if device.type == "cpu" else CARD_WIDTH


def _rate(call: Callable[[], object], device: torch.device, measure_s: float) -> float:
    """Return how often per second a call is made, over `measure_s` after a first call."""

    def wait() -> None:
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    call()
    wait()
    calls, began, spent = 0, time.perf_counter(), 0.0
    while spent < measure_s:
        for _ in range(CALLS):
            call()
        wait()
        calls, spent = calls + CALLS, time.perf_counter() - began
    return calls / spent


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return host.total_bytes()
    return torch.cuda.mem_get_info(device)[1]


def _name(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.get_num_threads()} threads"
