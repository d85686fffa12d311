"""The environment of a Python interpreter: the versions of Python, verl, and the packages that the worker of a model
needs. As a script, run by that interpreter, it prints them; standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import site
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # variables that another interpreter does not inherit
WORKER_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "msgspec", "psutil", "pillow")
"""The packages that the worker of a model needs: the dependency group `worker` of pyproject.toml."""
TORCH_RANGE = ((2, 11), (2, 16))
"""The releases of torch that verl runs with, as in pyproject.toml: from the first on, below the second."""
ENGINE_PACKAGES = ("megatron-core", "veomni")
"""The packages of model engines; each environment has at most what its engine needs."""
CLUSTER_PACKAGES = ("ray",)
"""The packages of clusters with workers that may be of another environment."""
BUILT = {"__pycache__", ".pyc", ".so"}  # made from the sources, maybe just now, and different on every node
FOLDER = Path(__file__).parents[2]  # which contains verl


class PythonEnvironment(NamedTuple):
    """The versions of one interpreter."""

    python: str
    packages: dict[str, str]
    """Version by name, of those of WORKER_PACKAGES, ENGINE_PACKAGES and CLUSTER_PACKAGES that are installed."""
    verl: str
    """The folder of the verl that it imports."""
    source: str
    """The digest of that verl's source."""


def this_environment(folder: str) -> PythonEnvironment:
    """Return the environment of this interpreter. folder: contains the verl that it imports if none is installed."""
    sys.path.append(folder)
    found = importlib.util.find_spec("verl")
    (verl,) = found.submodule_search_locations or [""] if found is not None else [""]
    packages = {}
    for name in (*WORKER_PACKAGES, *ENGINE_PACKAGES, *CLUSTER_PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return PythonEnvironment(platform.python_version(), packages, verl, source_digest(Path(verl)))


def source_digest(package: Path) -> str:
    """Return a digest of the source files of a package. A changed file gives another digest."""
    source = hashlib.sha256()
    for path in sorted(p for p in package.rglob("[!.]*") if BUILT.isdisjoint((p.suffix, *p.parts)) and p.is_file()):
        source.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return source.hexdigest()[:12]


def torch_fault(found: str) -> str | None:
    """Return a line with the fix if verl does not run with this version of torch, else None."""
    (first, least), (last, end) = TORCH_RANGE
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (first, least) <= (int(numbers[1]), int(numbers[2])) < (last, end):
        return None
    line = f"torch is {found}, and verl runs with {first}.{least} to {last}.{end - 1}"
    return f"{line}: pip install 'torch>={first}.{least},<{last}.{end}' there"


def foreign_variables(ours: Mapping[str, str]) -> dict[str, str]:
    """Return our environment variables without those of our Python, for another interpreter."""
    return {name: value for name, value in ours.items() if name not in OF_OUR_PYTHON}


def import_folders() -> list[str]:
    """Return the folders from which this process imports modules of the user: all but those of its Python and of the
    packages that are installed there."""
    ours = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours |= {*site.getsitepackages(), site.getusersitepackages()}
    own = {os.path.realpath(folder) for folder in ours}
    found = dict.fromkeys(os.path.realpath(folder) for folder in sys.path if os.path.isdir(folder or "."))
    return [folder for folder in found if folder not in own and os.path.basename(folder) != "lib-dynload"]


if __name__ == "__main__":
    print(json.dumps(this_environment(sys.argv[1])._asdict()))
