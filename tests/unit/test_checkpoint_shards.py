"""Tensors of a checkpoint: exact, without pickle, in files of bounded size, and loadable by name."""

from pathlib import Path

import pytest
import torch

from verl.checkpoint import shards
from verl.checkpoint.shards import load_tensors, save_tensors, tensor_names


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "model.a.weight": torch.randn(30, 20, generator=g),
        "model.b": torch.randn(7, generator=g).bfloat16(),
        "optimizer.step.a": torch.tensor(3.0),
        "counts": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "double": torch.tensor([1e-300, float("inf"), float("nan")], dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def test_a_round_trip_is_exact_and_in_place(tmp_path: Path) -> None:
    given = tensors()
    save_tensors(tmp_path / "t", given)
    assert tensor_names(tmp_path / "t") == frozenset(given)
    back = {name: torch.zeros_like(t) for name, t in given.items()}
    places = {name: t.data_ptr() for name, t in back.items()}
    load_tensors(tmp_path / "t", back)
    for name, t in given.items():
        assert back[name].dtype == t.dtype and torch.equal(back[name].nan_to_num(7), t.nan_to_num(7)), name
        assert back[name].data_ptr() == places[name], "into the tensors that were given"
    some = {"model.b": torch.zeros(7, dtype=torch.bfloat16)}
    load_tensors(tmp_path / "t", some)
    assert torch.equal(some["model.b"], given["model.b"]), "a part is enough"


def test_nothing_is_pickled_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_FILE_BYTES", 4000)
    given = {f"t{i}": torch.full((500,), float(i)) for i in range(6)}
    save_tensors(tmp_path / "t", given)
    files = sorted(p.name for p in (tmp_path / "t").iterdir())
    assert len([f for f in files if f.endswith(".safetensors")]) == 3
    assert all(f.endswith((".safetensors", ".json")) for f in files), files
    back = {name: torch.zeros(500) for name in given}
    load_tensors(tmp_path / "t", back)
    assert all(torch.equal(back[n], given[n]) for n in given)


def test_another_shape_and_no_tensors_are_told(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", {"a": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"a is \[3, 2\], but the model has \[2, 3\]"):
        load_tensors(tmp_path / "t", {"a": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="holds no tensors of a checkpoint"):
        tensor_names(tmp_path)
