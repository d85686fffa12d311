"""`verl doctor`: this machine, the installed and missing packages, and the pending waits of a run."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.bounds import size_text
from verl.errors import Refused
from verl.sandbox.code import describe

if TYPE_CHECKING:
    import torch

PINNED = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "hydra-core", "math-verify", "tensorboard")
EXTRAS = {
    "ray": "pip install '.[ray]' in verl's folder",
    "s3fs": "pip install '.[s3]' in verl's folder",
    "av": "pip install '.[video]' in verl's folder: rows with videos",
    "wandb": "pip install '.[wandb]' in verl's folder",
    "flash-attn": "optional on CUDA: pip install flash-attn",
    "triton": "part of a CUDA build of torch; kernels of the native engine's decode step",
}


PROBE_S = 2.0
PROBE_BYTES = 256 << 20  # above every cache
HELD_SHARE = 0.05  # of a card; the context of this process is below it


def doctor(run_dir: Path | None) -> int:
    if run_dir is not None and not run_dir.is_dir():
        raise Refused(f"{run_dir} is not a folder")
    print(f"python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores")
    missing = [name for name in PINNED if _version(name) is None]
    print("core: " + ", ".join(f"{n} {_version(n) or 'MISSING'}" for n in PINNED))
    for name, fix in EXTRAS.items():
        print(f"extra: {name} {_version(name) or f'not installed ({fix})'}")
    print(_devices())
    if _version("torch") is not None:
        print("\n".join([*_kernels(), *(_probes() if run_dir is None else ())]))  # a run needs its devices itself
    print(describe())
    free = shutil.disk_usage(run_dir or Path.cwd()).free
    print(f"disk: {free / 2**30:.1f} GiB free")
    if missing:
        print(f"fix: pip install -c constraints.txt {' '.join(missing)}")
    if run_dir is not None:
        _run(run_dir)
    return 1 if missing else 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> str:
    if _version("torch") is None:
        return "devices: unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return f"devices: CPU only ({torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()})"
    cards = (_card_text(i, *torch.cuda.mem_get_info(i)) for i in range(torch.cuda.device_count()))
    return "devices: " + "; ".join(cards)


def _card_text(number: int, free_bytes: int, total_bytes: int) -> str:
    """Return the name, capability and memory of a card, and the memory that other processes hold."""
    import torch

    name, (major, minor) = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
    text = f"cuda:{number} {name}, capability {major}.{minor}, {size_text(total_bytes)}"
    held = total_bytes - free_bytes
    if held <= HELD_SHARE * total_bytes:
        return text
    return f"{text}, of which other processes hold {size_text(held)} (nvidia-smi lists them)"


def _kernels() -> list[str]:
    """Return lines with the kernel of each operation on the devices of this machine, and the reason if a faster one is
    not used."""
    import torch

    from verl.accel.operations import Use
    from verl.accel.table import decode_launches, lines_of

    lines = []
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in (torch.float32, torch.bfloat16):
            lines.append(f"kernels on {kind} in {str(dtype).removeprefix('torch.')}:")
            lines += [f"  {line}" for line in lines_of(torch.device(kind), dtype)]
            use = Use(torch.device(kind), dtype)
            if (most := decode_launches(use)) and (plain := decode_launches(use, split=False)):
                each = f"at most {plain[0]} launches for each layer of a dense model and {plain[1]} for the rest"
                split = f"{most[0]} and {most[1]} where the depth of all products is split"
                lines.append(f"  a decode step: {each}; {split}")
    return lines


def _probes() -> list[str]:
    """Return a line with the bandwidth of the memory of each device, measured by copies."""
    import torch

    cards = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [_probe(device) for device in (cards or [torch.device("cpu")])]


def _probe(device: torch.device) -> str:
    import torch

    from verl.machine_figures import bandwidth

    what = f"memory of {device}"
    try:
        rate = bandwidth(device, PROBE_BYTES, PROBE_S)
    except torch.OutOfMemoryError:
        return f"{what}: no {size_text(2 * PROBE_BYTES)} are free to measure its bandwidth"
    return f"{what}: {rate / 1e9:.3g} GB/s by copies during {PROBE_S:.1f} s, bytes read and written"


def _holder(lock: Path) -> tuple[str, bool]:
    """Return the text that the last process with a claim on a run directory wrote to its lock, and True if that process
    still holds the lock (its process number may have been reused)."""
    if not lock.is_file():
        return "", False
    with lock.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return handle.read().strip(), True
        return handle.read().strip(), False


def _record(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file; None if there is no file, or it is damaged."""
    try:
        found = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _run(run_dir: Path) -> None:
    from verl.track.events import FINISHED, read_events
    from verl.track.metrics import read_metrics

    holder, alive = _holder(run_dir / ".lock")
    steps = [line.step for line in read_metrics(run_dir)]
    ended = [event for event in read_events(run_dir, {"resumed", FINISHED})][-1:]
    done = f"after step {steps[-1]}" if steps else "before its first step"
    if alive:
        print(f"run: process {holder} is alive, {done}")
    elif ended and ended[0].kind == FINISHED:
        print(f"run: finished, {ended[0].step} steps")
    elif holder:
        print(f"run: dead (process {holder} is gone) {done}; the same command goes on from the last checkpoint")
    waits = run_dir / "waits.json"
    found = _record(waits)
    if alive and found is not None:
        print(f"waits as of {time.time() - found['at_unix_s']:.0f} s ago:")
        for wait in found["pending"]:
            print(f"  {wait['who']} waits {wait['waiting_s']} s of {wait['timeout_s']:.0f} s for {wait['what']}")
    for record in sorted((run_dir / "crash").glob("*.json"))[-3:]:
        cause = _record(record)
        print(f"crash {record.name}: {'cannot be read' if cause is None else cause.get('first_cause')}")
