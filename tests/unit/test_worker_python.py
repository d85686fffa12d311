"""The interpreter of the workers of models: what is refused before anything starts."""

from __future__ import annotations

import re
import sys
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from verl.config import worker_python
from verl.config.cluster import cluster_faults
from verl.config.load import load_config
from verl.config.schema import Config
from verl.config.tree import changed
from verl.config.worker_python import worker_environment
from verl.driver import driver_host as driver_host_module
from verl.driver.driver_host import driver_host
from verl.driver.run_dir import open_run_dir
from verl.errors import Refused
from verl.processes.environment import CLUSTER_PACKAGES, FOLDER, TORCH_RANGE, WORKER_PACKAGES, source_digest


def test_the_group_of_the_project_is_what_is_checked():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    group = project["dependency-groups"]["worker"]
    assert [re.split(r"\W", one)[0] for one in group] == [*WORKER_PACKAGES]
    (first, least), (last, end) = TORCH_RANGE
    assert group[0] == project["project"]["dependencies"][0] == f"torch>={first}.{least},<{last}.{end}"


def test_this_interpreter_has_all_and_the_same_source():
    found = worker_environment(sys.executable)
    assert found.packages.keys() - {*CLUSTER_PACKAGES} == {*WORKER_PACKAGES}
    assert found.source == source_digest(FOLDER / "verl")
    assert found.python == ".".join(map(str, sys.version_info[:3]))


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """An environment with nothing in it."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


@pytest.mark.parametrize(
    "python, reason",
    [
        ("/no/such/python", "no such file; name the bin/python of an environment"),
        ("/bin/true", r"it is no Python of at least 3\.11 \(no output\)"),
        ("bare", r"torch, transformers, .* is not installed there: run pip install --group \S+/pyproject.toml:worker"),
    ],
)
def test_an_interpreter_that_cannot_compute_is_refused_in_one_line(python, reason, bare):
    python = str(bare / "bin" / "python") if python == "bare" else python
    with pytest.raises(ValueError, match=rf"^model\.python={python}: {reason}") as caught:
        worker_environment(python)
    assert "\n" not in str(caught.value)


def with_packages(environment: Path, torch: str) -> Path:
    """Give an environment the facts of all packages of a worker, with this torch; return where they are."""
    packages = next((environment / "lib").glob("python*/site-packages"))
    for name in WORKER_PACKAGES:
        (facts := packages / f"{name}-9.0.dist-info").mkdir(exist_ok=True)
        version = torch if name == "torch" else "9.0"
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    worker_environment.cache_clear()
    return packages


def run_notes(python: str, root: Path) -> tuple[str, ...]:
    """The lines that a run prints when it starts, with this interpreter for its models."""
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text("{}")
    given = (f"model.path={root}/model", f"run.root_dir={root}", "run.name=x", "model.device=cpu")
    opened = open_run_dir(load_config([*given, "cluster.backend=processes", f"model.python={python}"]), "train")
    opened.lock.close()
    return opened.notes


@pytest.mark.parametrize("found", ["2.10.1", "2.16.0", "2.16.0a0+git12", "3.0.0", "2", "1.13.1+cpu"])
def test_a_torch_that_verl_does_not_run_with_is_refused(found, bare, monkeypatch):
    """Before anything starts, and by the worker at its own start, since another node may have another one."""
    with_packages(bare, torch=found)
    python = str(bare / "bin" / "python")
    line = rf"torch is {re.escape(found)}, and verl runs with 2\.11 to 2\.15: pip install 'torch>=2\.11,<2\.16' there$"
    with pytest.raises(Refused, match=rf"^model\.python={python}: {line}"):
        worker_environment(python)
    made = driver_host(None)
    monkeypatch.setattr(driver_host_module, "version", lambda name: found)
    with pytest.raises(Refused, match=rf"^model\.python on node \S+: {line}"):
        made.enter(another_python=True)


@pytest.mark.parametrize("found", ["2.11.0", "2.14.1+cpu", "2.15.9"])
def test_another_torch_that_verl_runs_with_is_a_line_of_the_start(found, bare, tmp_path, monkeypatch):
    with_packages(bare, torch=found)
    python = str(bare / "bin" / "python")
    line = f"model.python={python}: models are computed by torch {found}; this process has torch {version('torch')}"
    assert line in run_notes(python, tmp_path)
    made = driver_host(None)
    monkeypatch.setattr(driver_host_module, "version", lambda name: found)
    made.enter(another_python=True)


def test_the_same_torch_is_no_line(tmp_path):
    assert not [line for line in run_notes(sys.executable, tmp_path) if "torch" in line]


def test_another_source_of_verl_is_refused(bare, monkeypatch):
    """One that is installed there is the one that it imports."""
    packages = with_packages(bare, torch="2.14.1")
    (packages / "verl").mkdir()
    (packages / "verl" / "__init__.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"the verl there \(\S+/bare0/\S+/verl, source \w+\) is another than this one"):
        worker_environment(str(bare / "bin" / "python"))
    ours = source_digest(packages / "verl")
    monkeypatch.setattr(worker_python, "source_digest", lambda folder: ours)
    found = worker_environment(str(bare / "bin" / "python"))
    assert found.packages["torch"] == "2.14.1" and found.verl == str(packages / "verl")


@pytest.mark.parametrize(
    "given, reason",
    [
        ({}, "model.python=p with cluster.backend=inproc: models are computed in this process"),
        ({"cluster.backend": "ray"}, "model.python=p: no such file"),
        ({"cluster.backend": "torchrun"}, "model.python=p with torchrun"),
        ({"cluster.backend": "processes"}, "model.python=p: no such file"),
        ({"cluster.backend": "processes", "cluster.nodes": 2}, "cluster.nodes=2 with cluster.backend=processes"),
        ({"cluster.backend": "processes", "cluster.address": "h:1"}, "cluster.address="),
    ],
)
def test_where_models_are_not_computed_by_it(given, reason):
    config = changed(Config(), {"model.path": "m", "model.python": "p", **given})
    assert any(line.startswith(reason) for line in cluster_faults(config, "train"))


@pytest.mark.parametrize(
    "engine, packages, line",
    [
        ("veomni", {"veomni": "0.1.12", "transformers": "5.9.0"}, None),
        (
            "veomni",
            {"veomni": "0.1.12", "transformers": "5.23.0"},
            r"transformers is 5\.23\.0 in the environment of /p",
        ),
        ("veomni", {"transformers": "5.9.0"}, "veomni is missing in the environment of /p/python; make veomni-env"),
        ("megatron", {"megatron-core": "0.16.1"}, r"megatron-core is 0\.16\.1"),
        ("megatron", {"megatron-core": "0.19.2"}, None),
        ("torch", {}, None),
    ],
)
def test_the_packages_of_an_engine_are_checked_in_the_environment_of_its_workers(engine, packages, line, monkeypatch):
    found = worker_environment(sys.executable)._replace(packages=packages)
    monkeypatch.setattr(worker_python, "worker_environment", lambda python: found)
    config = changed(Config(), {"cluster.backend": "processes", "model.python": "/p/python", "model.engine": engine})
    lines = [*worker_python.python_faults(config)]
    assert not lines if line is None else re.search(line, lines[0]), lines


@pytest.mark.parametrize(
    "backend, fix",
    [
        ("ray", "set model.python=.venv-megatron/bin/python, or model.engine=torch"),
        ("torchrun", "start torchrun by its Python, or model.engine=torch"),
        ("inproc", "set model.python=.venv-megatron/bin/python, or model.engine=torch"),
    ],
)
def test_the_fix_of_a_missing_package_is_possible_with_the_backend(backend, fix, monkeypatch):
    found = worker_environment(sys.executable)._replace(packages={})
    monkeypatch.setattr(worker_python, "worker_environment", lambda python: found)
    config = changed(Config(), {"cluster.backend": backend, "model.engine": "megatron"})
    (line,) = worker_python.python_faults(config)
    assert f"megatron-core is missing in the environment of {sys.executable}; make megatron-env makes one" in line
    assert fix in line and ("model.python" in line) == (backend != "torchrun")


@pytest.mark.parametrize(
    "ray, python, line",
    [
        ("2.9.0", "3.11.1", None),
        ("2.9.1", "3.11.9", "ray is 2.9.1 there, and 2.9.0 here; pip install ray==2.9.0 there, or set cluster.backend"),
        (None, "3.11.1", "ray is missing there, and 2.9.0 here; pip install ray==2.9.0 there"),
        ("2.9.0", "3.12.4", "Python is 3.12 there, and 3.11 here; name an interpreter of Python 3.11, or set"),
    ],
)
def test_another_ray_or_python_than_that_of_ray_is_refused(ray, python, line, monkeypatch):
    packages = {} if ray is None else {"ray": ray}
    found = worker_environment(sys.executable)._replace(packages=packages, python=python)
    monkeypatch.setattr(worker_python, "worker_environment", lambda python: found)
    monkeypatch.setattr(worker_python, "version", lambda name: "2.9.0")
    monkeypatch.setattr(worker_python.platform, "python_version", lambda: "3.11.7")
    config = changed(Config(), {"cluster.backend": "ray", "model.python": "/p/python"})
    lines = [*worker_python.python_faults(config)]
    if line is None:
        assert lines == []
    else:
        assert len(lines) == 1 and line in lines[0] and lines[0].startswith("model.python=/p/python with cluster."), (
            lines
        )
