"""A nested state goes to disk and comes back bit for bit and type for type."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from verl.checkpoint.safetensors_file import DTYPES, Shard, write_tensors
from verl.checkpoint.tensors import load_state, save_state


def same(a: object, b: object) -> bool:
    """Equal in type, value and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        same_bytes = a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
        return a.dtype == b.dtype and a.shape == b.shape and same_bytes
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def round_trip(tmp_path: Path, state: dict) -> dict:
    save_state(tmp_path / "s", state)
    return load_state(tmp_path / "s")


def test_every_kind_of_value(tmp_path: Path) -> None:
    state = {
        "none": None,
        "yes": True,
        "int": 2**200,
        "negative": -1,
        "zero": -0.0,
        "pi": math.pi,
        "tiny": 5e-324,
        "inf": [math.inf, -math.inf, math.nan],
        "text": "ä\n\ud800$",
        "bytes": bytes(range(256)),
        "empty": {},
        "lists": [[], (), [()], ((1,), [2])],
        "$dollar": 1,
        "inner": {"$tensor": "not one"},
        "keys": {1: "a", "1": "b", None: "c", 2.5: "d", False: "e", (0, "x"): "f"},
        "ordered": OrderedDict([("b", 1), ("a", torch.ones(2))]),
        "scalars": [np.float32(0.1), np.float64(0.1), np.int64(-3), np.bool_(True), np.str_("s")],
        "arrays": [
            np.arange(6, dtype=">i2").reshape(2, 3),
            np.zeros((0, 4), np.float16),
            np.array(7),
            np.array(["ab", "c"]),
            np.array([1 + 2j]),
            np.array("2024-01-01", dtype="datetime64[D]"),
            np.asfortranarray(np.ones((2, 3))),
        ],
    }
    assert same(round_trip(tmp_path, state), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24,), dtype=torch.uint8)
    filled = raw.view(dtype)  # any bit pattern: also nan payloads and denormals
    state = {"m": filled[: filled.numel() // 3 * 3].reshape(-1, 3), "empty": filled[:0].reshape(0, 5), "0d": filled[0]}
    assert same(round_trip(tmp_path, state), state)


def test_views_and_shared_storage_become_independent(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "a": base,
        "t": base.t(),
        "row": base[1],
        "strided": base[:, ::2],
        "p": torch.nn.Parameter(base),
        "z": base.conj(),
    }
    back = round_trip(tmp_path, state)
    assert all(back[k].equal(state[k].detach()) and back[k].is_contiguous() for k in state)
    assert type(back["p"]) is torch.Tensor and not back["p"].requires_grad
    back["a"][0, 0] = -1
    assert back["row"].equal(base[1]) and back["t"][0, 0] == 0
    assert (tmp_path / "s" / "tensors.safetensors").stat().st_mode & 0o044, "others may read it"


def test_complex_conjugates_are_resolved(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    back = round_trip(tmp_path, {"conj": z.conj(), "imag": z.conj().imag})
    assert back["conj"].tolist() == [1 - 2j, 3 + 1j] and back["imag"].tolist() == [-2.0, 1.0]


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    python, generator, legacy = random.Random(3), np.random.default_rng(4), np.random.RandomState(5)
    mersenne = np.random.Generator(np.random.MT19937(7))
    torch_rng = torch.Generator().manual_seed(6)
    for r in (python, generator, legacy, mersenne):
        r.random()
    state = {
        "python": python.getstate(),
        "numpy": generator.bit_generator.state,
        "legacy": legacy.get_state(),
        "mersenne": mersenne.bit_generator.state,
        "torch": torch_rng.get_state(),
    }
    back = round_trip(tmp_path, state)
    assert same(back, state)
    expected = [python.random(), generator.random(), legacy.random_sample(), mersenne.random()]
    again = random.Random(), np.random.default_rng(), np.random.RandomState(), np.random.Generator(np.random.MT19937())
    again[0].setstate(back["python"])
    again[1].bit_generator.state = back["numpy"]
    again[2].set_state(back["legacy"])
    again[3].bit_generator.state = back["mersenne"]
    assert [again[0].random(), again[1].random(), again[2].random_sample(), again[3].random()] == expected
    other = torch.Generator()
    other.set_state(back["torch"])
    assert torch.rand(3, generator=other).equal(torch.rand(3, generator=torch_rng))


def test_a_model_with_its_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = round_trip(tmp_path, state)
    assert same(back["optimizer"], state["optimizer"]), "int keys, tuples of betas and 0-d steps"
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])


def test_names_that_clash_stay_apart(tmp_path: Path) -> None:
    state = {
        "a": {"b": torch.tensor(1)},
        "a/b": torch.tensor(2),
        "a/b#1": torch.tensor(3),
        "__metadata__": torch.tensor(4),
    }
    assert same(round_trip(tmp_path, state), state)


keys = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.booleans(), st.none())
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=9),
    st.integers(0, 5).map(lambda n: torch.arange(n)),
    st.floats(width=32).map(np.float32),
)
trees = st.recursive(
    leaves,
    lambda t: st.one_of(
        st.lists(t, max_size=4), st.lists(t, max_size=3).map(tuple), st.dictionaries(keys, t, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=5), trees, max_size=4))
def test_any_tree(tmp_path: Path, state: dict) -> None:
    assert same(round_trip(tmp_path, state), state)


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "a builtins.set"),
        (object(), "a builtins.object"),
        (Level.LOW, "Level"),
        (lambda: 0, "function"),
        (torch.Size([1]), "Size"),
        (torch.float32, "dtype"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), "without data"),
        (torch.ones(1, dtype=torch.complex128), "torch.complex128"),
        (np.array([object()]), "numpy array of object"),
        (np.zeros(1, dtype=[("x", "i4")]), "numpy array of"),
        ({b"key": 1}, "a key of type bytes"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_held_is_refused_with_its_path(tmp_path: Path, value: object, what: str) -> None:
    with pytest.raises(ValueError, match=r"state\[outer/1.*which a checkpoint cannot hold: ") as caught:
        save_state(tmp_path / "s", {"outer": [0, value]})
    assert what in str(caught.value)
    assert not (tmp_path / "s").exists(), "nothing is written before the whole tree is known to fit"


def test_damaged_files_are_named(tmp_path: Path) -> None:
    save_state(tmp_path, {"x": torch.ones(4)})
    tree, tensors = tmp_path / "state.json", tmp_path / "tensors.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=r"tensors\.safetensors is damaged"):
        load_state(tmp_path)
    tensors.write_bytes(whole)
    content = json.loads(tree.read_text())
    tree.write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version reads 1"):
        load_state(tmp_path)
    tree.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_state(tmp_path)


# ---- the file format, read back by the library


def test_mixed_item_sizes_stay_aligned(tmp_path: Path) -> None:
    tensors = {
        "bool": torch.ones(3, dtype=torch.bool),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "long": torch.arange(3),
        "byte": torch.ones(1, dtype=torch.uint8),
        "float": torch.rand(7),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert all(back[k].equal(v) for k, v in tensors.items())


def test_a_shard_grows_and_knows_when_it_is_full(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "x.safetensors", header_bytes=2048)
    tensors = {}
    while shard.fits(name := f"layer.{len(tensors)}.weight", t := torch.rand(2, 3), max_bytes=10**9):
        shard.add(name, t)
        tensors[name] = t
    shard.finish()
    assert 5 < len(tensors) < 40, "the header was full"
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys() and all(back[k].equal(v) for k, v in tensors.items())
    large = Shard(tmp_path / "y.safetensors")
    assert large.fits("a", torch.ones(100), max_bytes=10), "one tensor always fits"
    large.add("a", torch.ones(100))
    assert not large.fits("b", torch.ones(1), max_bytes=10)
    large.finish()
