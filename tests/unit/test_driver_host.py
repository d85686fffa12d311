"""A node with other versions, or without the run directory, is reported with its name and both values."""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver import driver_host as host_module
from verl.driver.assemble import context_of
from verl.driver.driver_host import driver_host
from verl.workers.group import ClusterContext, DevicePlace


def test_the_same_node_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    made = pickle.loads(pickle.dumps(driver_host(Path("run"))))
    monkeypatch.chdir("/")
    made.enter()
    assert os.getcwd() == str(tmp_path), "relative paths mean what they mean to the driver"
    replace(made, folder="/no/such/folder").enter()


@pytest.mark.parametrize("which", range(3))
def test_other_versions_are_named(which: int) -> None:
    made = driver_host(None)
    name, ours = made.versions[which]
    others = tuple((n, "another" if n == name else v) for n, v in made.versions)
    with pytest.raises(ValueError) as caught:
        replace(made, host="head", versions=others).enter()
    said = str(caught.value)
    assert said.startswith(f"node {socket.gethostname()} has {name} {ours}, and the driver on head has another:")
    with pytest.raises(ValueError) if name == "verl source" else nullcontext():
        replace(made, versions=others).enter(another_python=True)


def test_a_changed_line_of_verl_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "SOURCE", tmp_path)
    found = set()
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (tmp_path / "a.py").write_text(text)
        found.add(host_module.versions()[2])
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len(found | {host_module.versions()[2]}) == 3
    (tmp_path / "accel" / "__pycache__").mkdir(parents=True)
    for name in ("accel/kernels.c", "table.tsv"):
        before = host_module.versions()
        (tmp_path / name).write_text("int x;")
        assert host_module.versions() != before, name
    before = host_module.versions()
    for name in (
        "accel/__pycache__/b.pyc",
        "accel/__pycache__/b.cpython-311.pyc.140105",
        "accel/kernels.so",
        ".b.py.swp",
    ):
        (tmp_path / name).write_text("made here")
    assert host_module.versions() == before


def test_a_run_directory_that_is_another_folder_of_the_same_name(tmp_path: Path) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    made = driver_host(tmp_path / "shared")
    made.enter()
    driver_host(tmp_path / "own")  # of an earlier run there
    for folder in (tmp_path / "own", tmp_path / "none"):
        with pytest.raises(ValueError, match=rf"does not see the run directory {folder}.*run.root_dir"):
            replace(made, run_dir=folder).enter()


def test_every_worker_elsewhere_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cluster with other processes makes this check first in its workers."""
    contexts: list[ClusterContext] = []
    monkeypatch.setattr("verl.workers.ray.cluster.build", lambda section, context: contexts.append(context))
    monkeypatch.setattr(
        "verl.driver.driver_host.DriverHost.enter",
        lambda self, **_: (_ for _ in ()).throw(ValueError(str(self.run_dir))),
    )
    config = Config()
    config = changed(config, {"model.device": "cpu", "cluster.backend": "ray", "queue.engine": "memory"})
    monkeypatch.setattr("verl.driver.assemble.backend_of", lambda config, section: backend)
    context_of(config, crash_dir=tmp_path / "crash")
    with pytest.raises(ValueError, match=str(tmp_path)):
        contexts[0].set_up(DevicePlace())


class backend:
    build = "verl.transfer_queue.memory:build"
