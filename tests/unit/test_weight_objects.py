"""Weights through storages with an fsspec URL: their content, and what a reader accepts of it."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from started import Program
from transformers import AutoModelForCausalLM

from verl.models import tiny
from verl.rollout.vllm_api import VllmApi
from verl.weight_sync import shm
from verl.weight_sync.base import CheckedReader, SyncContext, SyncError, WeightSource
from verl.weight_sync.disk import build
from verl.weight_sync.objects import INDEX, ObjectOutlet, open_weights
from verl.weight_sync.options import Disk
from verl.weight_sync.record import entry_of

WEIGHTS = {
    "a.bias": torch.arange(3, dtype=torch.bfloat16),
    "b.weight": torch.randn(2, 5),
    "c.empty": torch.empty(0, 4),
    "e.scalar": torch.tensor(2.5, dtype=torch.float64),
}


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/bucket"
    yield url
    fsspec.filesystem("memory").store.clear()


def stage(outlet: ObjectOutlet, version: int, more: float = 0) -> str:
    tensors = {name: tensor + more for name, tensor in WEIGHTS.items()}
    return outlet.stage(version, {n: entry_of(t) for n, t in tensors.items()}, tensors.items())


def there(root: str) -> list[str]:
    """Paths below it."""
    fs, path = fsspec.core.url_to_fs(root)
    fs.invalidate_cache()
    return sorted(found.removeprefix(path).lstrip("/") for found in fs.find(path))


def same(address: str, more: float = 0) -> bool:
    found = {name: tensor.clone() for name, tensor in open_weights(address).tensors()}
    assert found.keys() == WEIGHTS.keys()
    return all(found[n].dtype == t.dtype and torch.equal(found[n], t + more) for n, t in WEIGHTS.items())


def test_tensors_come_back_bit_for_bit_and_the_two_latest_versions_stay(root: str) -> None:
    outlet = pickle.loads(pickle.dumps(ObjectOutlet(root)))
    addresses = [stage(outlet, version, version) for version in (5, 6, 7)]
    assert same(addresses[2], 7) and open_weights(addresses[2]).version == 7
    versions = {"/".join(path.split("/")[1:]) for path in there(root)}
    assert versions == {f"version_{v}/{name}" for v in (6, 7) for name in ("model.safetensors", INDEX)}
    again = stage(outlet, 7, 70)  # a run that went back
    assert same(again, 70), "not what this host has of that number"


def test_all_goes_with_the_engine_here_and_in_the_store(root: str) -> None:
    engine = build(Disk(folder=root), SyncContext(probes=()))
    outlet = engine.outlet()
    assert isinstance(outlet, ObjectOutlet)
    fetched = Path(open_weights(stage(outlet, 1)).segment())
    assert len(there(root)) == 2 and fetched.exists()
    del engine, outlet
    assert there(root) == [] and not fetched.exists()


@pytest.mark.parametrize("root", ["file"], indirect=True)
def test_a_model_folder_lies_there_which_another_process_reads(root: str, tmp_path: Path) -> None:
    model = tiny.qwen3(tiny.character_tokenizer("ab"), hidden=32, layers=1, heads=2, kv_heads=1, ffn=32, tied=True)
    model.save_pretrained(tmp_path / "model")
    state = {name: tensor + 1 for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    outlet = ObjectOutlet(root, tmp_path / "model")
    address = outlet.stage(3, {n: entry_of(t) for n, t in state.items()}, state.items())
    names = {path.rpartition("/")[2] for path in there(root)}
    assert {"config.json", "model.safetensors", INDEX} <= names
    loaded = AutoModelForCausalLM.from_pretrained(address.removeprefix("file://"), local_files_only=True).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    reads = "import sys; from verl.weight_sync.objects import open_weights as o; s = o(sys.argv[1])\n"
    reads += "print(s.version, dict(s.tensors())['model.norm.weight'].sum().item())"
    assert Program(reads, address, log=tmp_path / "log").output(120).split() == ["3", "64.0"]


def test_an_upload_that_breaks_leaves_nothing_and_the_version_before_is_read(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlet = ObjectOutlet(root)
    first = stage(outlet, 0)
    fs, _ = fsspec.core.url_to_fs(root)
    before, seen, pipe = there(root), [], type(fs).pipe_file

    def breaks(self: Any, path: str, *more: Any, **named: Any) -> None:
        seen.append(there(root))
        raise ConnectionResetError("the store went away")

    monkeypatch.setattr(type(fs), "pipe_file", breaks)
    with pytest.raises(SyncError, match=r"version_1 could not be written: ConnectionResetError: the store went away"):
        stage(outlet, 1)
    assert [path for path in seen[0] if "version_1/" in path and not path.endswith("/model.safetensors")] == []
    assert any(path.endswith("version_1/model.safetensors") for path in seen[0]), (
        "the tensors were there, told of or not"
    )
    assert there(root) == before and same(first)
    monkeypatch.setattr(type(fs), "pipe_file", pipe)
    assert same(stage(outlet, 1, 1), 1)


@pytest.mark.parametrize(
    "harm, said",
    [
        ("index", r"^version 2 is not at .*: it was never whole, two later ones have come, or this process does not"),
        ("short", r"is not what was written: version 2, \d+ bytes with crc32"),
        ("bit", r"is not what was written: version 2, \d+ bytes with crc32"),
        ("words", r"version_2/verl_version.json does not tell of its tensors"),
        ("number", r"is not what was written: version 3"),
    ],
)
def test_what_is_not_whole_is_never_read(root: str, harm: str, said: str) -> None:
    address = stage(ObjectOutlet(root), 2)
    fs, path = fsspec.core.url_to_fs(address)
    weights, index = (fs.cat_file(f"{path}/{name}") for name in ("model.safetensors", INDEX))
    if harm == "index":
        fs.rm_file(f"{path}/{INDEX}")
    elif harm in ("short", "bit"):
        changed = weights[:-1] if harm == "short" else weights[:-1] + bytes([weights[-1] ^ 1])
        fs.pipe_file(f"{path}/model.safetensors", changed)
    else:
        fs.pipe_file(
            f"{path}/{INDEX}", b"{" if harm == "words" else json.dumps(json.loads(index) | {"version": 3}).encode()
        )
    with pytest.raises(SyncError, match=said):
        list(open_weights(address).tensors())


def test_a_server_of_this_host_reads_the_segment_that_was_fetched(root: str) -> None:
    from asyncio import run

    from verl.rollout.api import source_of

    address = stage(ObjectOutlet(root), 4)
    manifest = {name: entry_of(tensor) for name, tensor in WEIGHTS.items()}
    source = WeightSource(4, ObjectOutlet.transport, address, manifest)
    _, sent = run(source_of(VllmApi(), CheckedReader(source)))
    assert sent.transport == "verl.weight_sync.shm:open_weights"
    assert torch.equal(dict(shm.open_weights(sent.address).tensors())["b.weight"], WEIGHTS["b.weight"])
    assert dict(CheckedReader(source).tensors()).keys() == WEIGHTS.keys()


def test_what_a_store_lacks_is_one_line_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str) -> None:
        build(Disk(folder=url), SyncContext(probes=()))

    monkeypatch.setitem(sys.modules, "s3fs", None)  # importing it fails, as if it were not installed
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(
        ValueError, match=r"^s3://b/x.*: s3:// needs a package .*Fix: pip install '\.\[s3\]' in verl's folder$"
    ):
        refused("s3://b/x")
    with pytest.raises(ValueError, match=r"^nowhere://b.*Fix: a path or a URL that fsspec knows"):
        refused("nowhere://b")
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"folder=file://.*/file: (NotADirectory|FileExists)Error.*; make it first, with a"
    ):
        refused(f"file://{tmp_path}/file")
