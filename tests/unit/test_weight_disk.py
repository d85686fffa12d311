"""Weights through a folder: its content, and which versions are kept."""

from __future__ import annotations

import copy
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from families import QWEN3_MOE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from verl.models import tiny
from verl.recipes import arithmetic
from verl.weight_sync.base import SyncContext, SyncError
from verl.weight_sync.disk import DiskOutlet, build, open_weights
from verl.weight_sync.options import Disk
from verl.weight_sync.record import entry_of
from verl.weight_sync.shm import PIDS
from verl.weight_sync.version_folder import PREFIX

MIXED = {
    "a.bias": torch.arange(3, dtype=torch.bfloat16),
    "b.weight": torch.randn(2, 5),
    "c.empty": torch.empty(0, 4),
    "d.flag": torch.tensor([True]),
    "e.scalar": torch.tensor(2.5, dtype=torch.float64),
}


def stage(outlet: DiskOutlet, version: int, tensors: dict[str, torch.Tensor]) -> Path:
    return Path(outlet.stage(version, {n: entry_of(t) for n, t in tensors.items()}, tensors.items()))


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    stream = open_weights(str(stage(DiskOutlet(tmp_path), 7, MIXED)))
    found = dict(stream.tensors())
    assert stream.version == 7 and found.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_lie_there_as_transformers_saves_them_and_come_back_as_one_tensor(tmp_path: Path, dtype: Any) -> None:
    """Servers read them one by one; a model in memory has them in one."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(QWEN3_MOE)).to(dtype)
    folder, root = tmp_path / "model", tmp_path / "root"
    model.save_pretrained(folder)
    root.mkdir()
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    outlet = DiskOutlet(root, folder)
    for version in (1, 2):
        at = stage(outlet, version, state)
    saved, written = (load_file(of / "model.safetensors") for of in (folder, at))
    assert any(".experts.3.gate_proj.weight" in name for name in saved) and written.keys() == saved.keys()
    stream = open_weights(str(at))
    came = dict(stream.tensors())
    assert stream.version == 2 and came.keys() == state.keys()
    for of, expected in ((written, saved), (came, state)):
        for name, tensor in expected.items():
            assert of[name].dtype == dtype and torch.equal(of[name], tensor), name
    loaded = AutoModelForCausalLM.from_pretrained(at, local_files_only=True, dtype=dtype).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_version_is_a_model_folder_that_transformers_loads(tmp_path: Path) -> None:
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64}
    old, new = (tiny.qwen3(tokenizer, **sizes, seed=seed, tied=True) for seed in (1, 2))
    folder, root = tmp_path / "model", tmp_path / "root"
    old.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    root.mkdir()
    state = {name: tensor for name, tensor in new.state_dict().items() if name != "lm_head.weight"}
    at = stage(DiskOutlet(root, folder), 1, state)
    assert not (at / "model.safetensors").is_symlink() and (at / "config.json").is_symlink()
    loaded = AutoModelForCausalLM.from_pretrained(at, local_files_only=True).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in new.state_dict().items())


def test_the_two_latest_stay_and_a_reader_of_an_old_one_reads_on(tmp_path: Path) -> None:
    outlet, weights = DiskOutlet(tmp_path), {f"{i}.w": torch.full((1000,), float(i)) for i in range(4)}
    reading = open_weights(str(stage(outlet, 5, weights))).tensors()
    first = next(reading)
    for version in (6, 7, 3):  # a run that went back counts from there
        stage(outlet, version, {n: t + 10 for n, t in weights.items()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_3", "version_7"]
    rest = dict([first, *reading])
    assert all(torch.equal(rest[name], tensor) for name, tensor in weights.items())
    again = stage(outlet, 3, weights)
    assert torch.equal(dict(open_weights(str(again)).tensors())["2.w"], weights["2.w"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_3", "version_7"]


def test_a_version_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    outlet = DiskOutlet(tmp_path)
    stage(outlet, 0, MIXED)

    def broken() -> Any:
        yield next(iter(MIXED.items()))
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        outlet.stage(1, {n: entry_of(t) for n, t in MIXED.items()}, broken())
    assert [path.name for path in tmp_path.iterdir()] == ["version_0"]
    with pytest.raises(SyncError, match=r"version_1 is not here.*engine_options\.folder"):
        open_weights(str(tmp_path / "version_1"))


def test_a_version_is_moved_to_its_place_whole(tmp_path: Path) -> None:
    outlet, seen = DiskOutlet(tmp_path), []

    def watched() -> Any:
        for item in MIXED.items():
            (coming,) = tmp_path.iterdir()
            seen.append((coming.name.startswith("."), coming.stat().st_ino))
            yield item

    folder = Path(outlet.stage(0, {n: entry_of(t) for n, t in MIXED.items()}, watched()))
    assert set(seen) == {(True, folder.stat().st_ino)}


def test_a_full_disk_is_known_before_the_first_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(9, 9, 10))
    with pytest.raises(OSError, match=r"0 MB of weights do not fit into .* \(0 MB free\)"):
        stage(DiskOutlet(tmp_path), 0, MIXED)
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_of_the_dead_is_swept_and_our_own_goes_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu")
    here = f"verl-versions-gpu.{PIDS}"
    others = {f"{here}-{os.getpid()}-b", "verl-versions-elsewhere-999999999-c", f"{here}-b-999999999-d", "other"}
    others |= {f"verl-versions-gpu.{PIDS + 1}-999999999-e"}  # of a container with processes that are not visible here
    for name in (f"{here}-999999999-a", *others):
        (tmp_path / name).mkdir()
    engine = build(Disk(folder=str(tmp_path)), SyncContext(probes=()))
    (mine,) = {p.name for p in tmp_path.iterdir()} - others
    assert mine.startswith(f"{here}-{os.getpid()}-")
    del engine
    assert not (tmp_path / mine).exists()
    with pytest.raises(ValueError, match=r"folder=.*no such folder; make it first"):
        build(Disk(folder=str(tmp_path / "none")), SyncContext(probes=()))


def test_a_trainer_that_does_not_see_the_drivers_folder_has_one_of_its_own_that_goes_with_it(tmp_path):
    other = f"import os, socket; print(f'{{socket.gethostname()}}.{PIDS}-{{os.getpid()}}')"
    killed = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, timeout=60).stdout.strip()
    (tmp_path / f"{PREFIX}-{killed}-0" / "version_1").mkdir(parents=True)
    away = DiskOutlet(tmp_path / f"{PREFIX}-driver-1-x")  # of another machine, in its own temporary files
    folder = stage(away, 7, MIXED)
    assert open_weights(str(folder)).version == 7 and stage(away, 8, MIXED).parent == folder.parent
    assert [path.name for path in tmp_path.iterdir()] == [folder.parent.name], "and what a killed one left is gone"
    assert folder.parent.name.startswith(f"{PREFIX}-{socket.gethostname()}.{PIDS}-{os.getpid()}-")
    del away
    assert not list(tmp_path.iterdir())
