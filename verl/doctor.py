"""`verl doctor`: this machine, what is installed and missing, and what a run waits for."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import time
from pathlib import Path

PINNED = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "hydra-core", "math-verify", "tensorboard")
EXTRAS = {
    "ray": "pip install 'verl[ray]'",
    "s3fs": "pip install 'verl[s3]'",
    "wandb": "pip install 'verl[wandb]'",
    "flash-attn": "optional on CUDA: pip install flash-attn",
}


def doctor(run_dir: Path | None) -> int:
    print(f"python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores")
    missing = [name for name in PINNED if _version(name) is None]
    print("core: " + ", ".join(f"{n} {_version(n) or 'MISSING'}" for n in PINNED))
    for name, fix in EXTRAS.items():
        print(f"extra: {name} {_version(name) or f'not installed ({fix})'}")
    print(_devices())
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
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"devices: {', '.join(names)}"


def _run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder")
    lock = run_dir / ".lock"
    holder = lock.read_text().strip() if lock.is_file() else ""
    if holder:
        print(f"run: process {holder} is {'alive' if Path(f'/proc/{holder}').exists() else 'gone'}")
    waits = run_dir / "waits.json"
    if waits.is_file():
        found = json.loads(waits.read_text())
        print(f"waits as of {time.time() - found['at_unix_s']:.0f} s ago:")
        for wait in found["pending"]:
            print(f"  {wait['who']} waits {wait['waiting_s']} s of {wait['timeout_s']:.0f} s for {wait['what']}")
    for record in sorted((run_dir / "crash").glob("*.json"))[-3:]:
        found = json.loads(record.read_text())
        print(f"crash {record.name}: {found['first_cause']}")
