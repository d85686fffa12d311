"""Run the tests that are marked `on_device` on one card, in parts, each with its own line of the result.

    python tests/gpu.py [--device cuda] [--only numerics,decode] [--no-install] [--jobs 4] [--limit-s 480]

Needed: a CUDA build of torch, pip, and what pyproject.toml lists beside torch, with pytest and pytest-timeout. Without
--no-install they are installed by pip, which keeps the torch that is there (on a machine without a network, set
PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of wheels). `make test-gpu` is the same.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMERICS, CONTRACTS, E2E = "tests/numerics", "tests/contracts", "tests/e2e"
PARTS: dict[str, tuple[str, ...]] = {
    "kernels": (f"{NUMERICS}/test_accel_table.py", "tests/unit/test_fp8.py"),
    "numerics": (
        f"{NUMERICS}/test_engine.py",
        f"{NUMERICS}/test_training_on_device.py",
        f"{NUMERICS}/test_linear_logprob.py",
    ),
    "decode": (
        f"{NUMERICS}/test_cuda_decode.py",
        f"{NUMERICS}/test_rollout_numerics.py",
        f"{NUMERICS}/test_mixed_steps.py",
        f"{NUMERICS}/test_idle_steps.py",
        f"{NUMERICS}/test_packed_prompts.py",
        f"{NUMERICS}/test_native_sets.py",
        f"{NUMERICS}/test_native_noise.py",
    ),
    "rollout": (f"{CONTRACTS}/test_rollout_contract.py", "-k", "native or hf"),
    "sync": (
        f"{CONTRACTS}/test_weight_sync_contract.py",
        "tests/unit/test_crc.py",
        "-k",
        "local or shm or ipc or disk",
    ),
    "memory": (f"{E2E}/test_offload.py", f"{NUMERICS}/test_offload_pinned.py"),
    "resume": (f"{E2E}/test_resume.py",),
    "quickstart": (f"{E2E}/test_quickstart.py",),
}
"""The arguments of pytest for each part, the cheapest first."""
PACKAGES = ("pytest>=9", "pytest-timeout>=2.4")


def install() -> None:
    """Install verl and what it needs, but not another torch."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", str(ROOT)]
    subprocess.run([*command, *PACKAGES], check=True)


def run_part(name: str, device: str, timeout_s: float) -> tuple[bool, str]:
    """Run a part; return whether all of its tests passed and at least one ran, and what is printed of it."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "on_device",
        "-p",
        "no:cacheprovider",
        "--show-capture=stdout",
    ]
    command += PARTS[name]
    environment = {**os.environ, "VERL_TEST_DEVICE": device}
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(timeout_s, 1.0)
        )
    except subprocess.TimeoutExpired as e:
        text = e.stdout if isinstance(e.stdout, str) else (e.stdout or b"").decode(errors="replace")
        return False, f"{name}: not done after {timeout_s:.0f} s\n{text[-3000:]}"
    last = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
    passed = done.returncode == 0 and re.search(r"\b[1-9]\d* passed", last) is not None
    line = f"{name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - began_s:.0f} s: {last}"
    return passed, line if passed else f"{line}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def main(argv: Sequence[str]) -> int:
    """Run the parts side by side and print each as it ends; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--no-install", action="store_true")
    parser.add_argument("--jobs", type=int, default=4, help="parts that run side by side")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds for all parts together")
    given = parser.parse_args(argv)
    parts = given.only.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(PARTS)}")
    if not given.no_install:
        install()
    deadline_s = time.monotonic() + given.limit_s
    results = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {
            pool.submit(lambda name=name: run_part(name, given.device, deadline_s - time.monotonic())): name
            for name in parts
        }
        for done in as_completed(running):
            results[running[done]], text = done.result()
            print(text, flush=True)
    failed = [name for name in parts if not results[name]]
    again = f"; again: python tests/gpu.py --no-install --device {given.device} --only {','.join(failed)}"
    print(f"{len(parts) - len(failed)} of {len(parts)} parts passed on {given.device}{again if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
