"""The interpreter of the workers of models, `model.python`: what is installed in its environment."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl.config.backends import MODEL
from verl.config.schema import Config
from verl.errors import Refused
from verl.processes import environment
from verl.processes.child import output_of
from verl.processes.environment import FOLDER, WORKER_PACKAGES, PythonEnvironment, source_digest, torch_fault

LOOK_S = 120.0  # for reading the versions of an environment, on a cold disk
_START = {"torchrun": "start torchrun by its Python"}
INSTALL = f"pip install --group {FOLDER}/pyproject.toml:worker"


def python_faults(config: Config) -> Iterator[str]:
    """Yield a line if the models cannot be computed by the interpreter `model.python`."""
    python, backend = config.model.python, config.cluster.backend
    if python is None:
        yield from _engine_faults(config, sys.executable)
        return
    if backend == "torchrun":
        yield f"model.python={python} with torchrun, which has started this process: start torchrun by that Python"
    elif backend == "inproc":
        fix = "set cluster.backend=processes, or leave it out"
        yield f"model.python={python} with cluster.backend=inproc: models are computed in this process; {fix}"
    else:
        try:
            found = worker_environment(python)
            yield from _engine_faults(config, python)
            if backend == "ray":
                yield from _ray_faults(python, found)
        except Refused as e:
            yield str(e)


def _ray_faults(python: str, found: PythonEnvironment) -> Iterator[str]:
    """Yield a line if Ray cannot start its actors by this interpreter, which has another Ray than this process, or
    another minor version of Python, which Ray does not mix in a cluster."""
    try:
        ray = version("ray")
    except PackageNotFoundError:
        return  # another check reports it
    theirs, own = (_minor(of) for of in (found.python, platform.python_version()))
    checked = (
        ("Python", theirs, own, f"name an interpreter of Python {own}"),
        ("ray", found.packages.get("ray", "missing"), ray, f"pip install ray=={ray} there"),
    )
    for name, there, here, fix in checked:
        if there != here:
            what = f"model.python={python} with cluster.backend=ray: {name} is {there} there, and {here} here"
            yield f"{what}; {fix}, or set cluster.backend=processes"
            return


def _minor(of_python: str) -> str:
    """Return the first two numbers of a version of Python."""
    return ".".join(of_python.split(".")[:2])


def _engine_faults(config: Config, python: str) -> Iterator[str]:
    """Yield a line if this interpreter lacks a package that the model engine needs, or has it in a version with which
    the engine was not run."""
    engine = config.model.engine
    row = MODEL.get(engine)
    if row is None or not row.worker_packages:
        return
    packages = worker_environment(python).packages
    for name, wanted in row.worker_packages:
        if not packages.get(name, "").startswith(wanted):
            found = packages.get(name, "missing")
            start = _START.get(config.cluster.backend, f"set model.python=.venv-{engine}/bin/python")
            version = f"{wanted}x" if wanted.endswith(".") else wanted
            fix = f"make {engine}-env makes one with {name} {version}; {start}"
            instead = "or model.engine=torch, which computes the same in this one"
            yield f"model.engine={engine}: {name} is {found} in the environment of {python}; {fix}, {instead}"
            return


@cache
def worker_environment(python: str) -> PythonEnvironment:
    """Return the environment of an interpreter, which needs some 0.1 s. Raise Refused if it cannot be started, if a
    package is missing there, if its torch is one that verl does not run with, or if it imports another source of verl
    than this process."""
    if not (os.path.isfile(python) or shutil.which(python)):
        raise Refused(f"model.python={python}: no such file; name the bin/python of an environment")
    script = str(Path(environment.__file__))
    try:
        code, output = output_of([python, "-P", script, str(FOLDER)], timeout_s=LOOK_S)
    except OSError as e:
        raise Refused(f"model.python={python}: cannot be started ({e}); name the bin/python of an environment") from e
    last = (output.splitlines() or ["no output"])[-1]
    if code != 0 or not last.startswith("{"):
        raise Refused(f"model.python={python}: it is no Python of at least 3.11 ({last}); name one, of an environment")
    found = PythonEnvironment(**json.loads(last))
    if missing := [name for name in WORKER_PACKAGES if name not in found.packages]:
        raise Refused(f"model.python={python}: {', '.join(missing)} is not installed there: run {INSTALL} there")
    if (fault := torch_fault(found.packages["torch"])) is not None:
        raise Refused(f"model.python={python}: {fault}")
    if found.source != (ours := source_digest(FOLDER / "verl")):
        raise Refused(
            f"model.python={python}: the verl there ({found.verl}, source {found.source}) is another than this one "
            f"({FOLDER / 'verl'}, source {ours}); install the same commit there, or uninstall it: this one is used then"
        )
    return found


def other_torch(config: Config) -> list[str]:
    """Return one line if the workers of models compute with another torch than this process; else []."""
    python = config.model.python
    if python is None:
        return []
    theirs, ours = worker_environment(python).packages["torch"], version("torch")
    if theirs == ours:
        return []
    return [f"model.python={python}: models are computed by torch {theirs}; this process has torch {ours}"]


def environment_line(config: Config) -> str | None:
    """Return the versions with which the workers of models compute; None if they compute with those of this process."""
    python = config.model.python
    if python is None or os.path.abspath(python) == sys.executable:
        return None
    found = worker_environment(python)
    where = "" if found.verl != str(FOLDER / "verl") else ", verl of this folder"
    packages = ", ".join(f"{name} {found.packages[name]}" for name in ("torch", "transformers"))
    return f"Python {found.python}, {packages}{where} (model.python={python})"
