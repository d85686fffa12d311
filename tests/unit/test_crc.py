"""Checksums on a device: the numbers of zlib, without a wait for each tensor."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from far import FAR, FarDevice, FarTensor
from on_device import DEVICE, ON_CPU
from torch import Tensor

from verl.checkpoint.safetensors_file import host_bytes
from verl.model_engine.base import whole_part
from verl.rollout.embedded.receive import Destination, receive
from verl.weight_sync import crc
from verl.weight_sync.base import CheckedReader, SyncError
from verl.weight_sync.local import LocalOutlet
from verl.weight_sync.sender import WeightSender


def by_zlib(tensor: Tensor) -> int:
    return zlib.crc32(bytes(host_bytes(tensor)))


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let small tensors be folded in several steps."""
    monkeypatch.setattr(crc, "LANES", 8)
    monkeypatch.setattr(crc, "WIDEST", 64)
    crc._tables.cache_clear()
    yield
    crc._tables.cache_clear()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_the_crc32_of_a_device_is_that_of_zlib(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    sizes = [0, 1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 127, 128, 200, 1000, *generator.integers(1, 3000, 20).tolist()]
    found: dict[str, Tensor] = {}
    for size in sizes:
        drawn = generator.integers(0, 2 if dtype == torch.bool else 256, size * dtype.itemsize, np.uint8)
        found[str(size)] = torch.from_numpy(drawn).view(dtype) if size else torch.empty(0, dtype=dtype)
    found |= {f"{name} from 1": tensor[1:] for name, tensor in found.items()}  # where no word begins
    square = found["1000"][:900].view(30, 30)
    found |= {"rows": square, "columns": square.t(), "every second": square[::2, ::3], "one": found["9"][4]}
    sums = crc.read_checksums({name: crc.start_on_device(tensor) for name, tensor in found.items()})
    assert sums == {name: by_zlib(tensor) for name, tensor in found.items()}
    assert all(crc.checksum(tensor) == sums[name] for name, tensor in found.items())


def test_the_widths_of_a_real_device_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert crc.LANES == 2**12 and crc.WIDEST == 2**20
    crc._tables.cache_clear()
    large = torch.arange(crc.WIDEST + 12345, dtype=torch.int32)
    assert crc.read_checksums({"": crc.start_on_device(large)})[""] == by_zlib(large)


@pytest.mark.on_device
def test_a_local_version_on_the_device_of_the_tests_has_the_checksums_of_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    crc._tables.cache_clear()
    sizes = (0, 1, 7, 4096, 70_001) if ON_CPU else (0, 1, 7, 4096, 70_001, 5 * crc.WIDEST + 3)
    found = {str(size): torch.randn(size).bfloat16() for size in sizes} | {"rows": torch.randn(33, 65).t()}
    far = {name: tensor.to(DEVICE) for name, tensor in found.items()}
    assert crc.read_checksums({n: crc.start_checksum(t) for n, t in far.items()}) == {
        name: by_zlib(tensor) for name, tensor in found.items()
    }
    crc._tables.cache_clear()


class FarEngine:
    """The tensors of a trainer on the double of a device."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.masters, self.tied = tensors, dict[str, str]()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.masters.items())

    def weight_parts(self):
        return (whole_part(name, tensor) for name, tensor in self.masters.items())


def published(number: int, change: Callable[[dict[str, Tensor]], object] | None = None) -> list[str]:
    """Publish so many tensors of the double in place, and return the reads of it."""
    generator = torch.Generator().manual_seed(0)
    known = {f"w{i}": torch.randn(1 + i % 3, 65, generator=generator).bfloat16() for i in range(number)}
    engine = FarEngine({name: FarTensor(tensor.clone()) for name, tensor in known.items()})
    mine = {name: FarTensor(torch.zeros_like(tensor)) for name, tensor in known.items()}
    outlet = LocalOutlet()
    with FarDevice() as device:
        sent = WeightSender(outlet).send(engine, 1, (), copy=False)
        assert sent is not None
        assert {n: e.checksum for n, e in sent.source.manifest.items()} == {n: by_zlib(t) for n, t in known.items()}
        if change is not None:
            change({name: tensor.held for name, tensor in engine.masters.items()})
        reader = CheckedReader(sent.source)
        receive(reader.tensors(), {n: Destination(t.shape, t, t.shape, t.dtype) for n, t in mine.items()})
    assert all(torch.equal(mine[name].held, known[name]) for name in known)
    return device.reads


def test_a_publish_in_place_reads_a_device_a_fixed_number_of_times() -> None:
    few, many = published(2), published(9)
    assert few == many and set(many) == {"_to_copy"}
    assert len(many) == 4, "values, extremes and checksums of the trainer; checksums of the replica"


@pytest.mark.parametrize("name", ["w0", "w8"])
def test_a_bit_that_changes_after_the_manifest_is_found(name: str) -> None:
    with pytest.raises(SyncError, match=f"version 1: {name} changed between its manifest and its delivery"):
        published(9, lambda tensors: tensors[name].view(torch.int16).view(-1)[64:].bitwise_xor_(1))


def test_a_byte_in_host_memory_that_changes_after_the_manifest_is_found() -> None:
    """Tensors that stay as they are have their checksums computed together, before and after."""
    known = {f"w{i}": torch.randn(3 + i, 65) for i in range(4)} | {"columns": torch.randn(5, 7).t()}
    source = FarEngine(known)
    outlet = LocalOutlet()
    sent = WeightSender(outlet).send(source, 1, (), copy=False)
    assert sent is not None
    assert {n: e.checksum for n, e in sent.source.manifest.items()} == {n: by_zlib(t) for n, t in known.items()}
    reader = CheckedReader(sent.source)
    assert reader.stays and dict(reader.tensors()).keys() == known.keys()
    known["w2"].view(torch.int32)[-1, -1] ^= 1
    with pytest.raises(SyncError, match="version 1: w2 changed between its manifest and its delivery"):
        list(CheckedReader(sent.source).tensors())


def test_the_double_counts_reads() -> None:
    with FarDevice() as device:
        far = torch.ones(3, device=FAR) * 2
        assert isinstance(far, FarTensor) and far.device == FAR and far.held.tolist() == [2, 2, 2]
        assert float(far.sum()) == 6 and far.cpu().tolist() == [2, 2, 2]
        torch.zeros(3).copy_(far)
    assert device.reads == ["_local_scalar_dense", "_to_copy", "copy_"]
