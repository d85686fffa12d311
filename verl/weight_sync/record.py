"""The facts of one version that its sender records: manifest, checksums, extremes and some values of each tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verl.accel.cpu.kernels import Kernels, load_kernels
from verl.model_engine.base import WeightPart
from verl.nn.fp8 import VALUES
from verl.weight_sync.base import Entry, dtype_name
from verl.weight_sync.crc import PendingChecksum, read_checksums, start_checksum
from verl.weight_sync.wire_format import wire_shapes
from verl.wire import WireFormat

SCANNED = (torch.float32, torch.bfloat16)  # the dtypes of tensors that a compiled kernel reads
SAMPLED_VALUES = 256  # per tensor, evenly spread: enough to separate "did not move" from "was not delivered"


@dataclass(slots=True)
class VersionRecord:
    """The record of the tensors of one version, as they are sent. No tensor is kept.

    Checksums, extremes and values stay on the tensors' device until `finish`, so that the host does not wait for each
    tensor. Tensors in host memory that stay as they are until `finish` are read there, all in one call (`note`)."""

    manifest: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    """Up to `SAMPLED_VALUES` values of each tensor, float64."""
    extremes: dict[str, Tensor] = field(default_factory=dict)
    """[2] the least and the largest value of each floating-point tensor that has any, but for values in 8 bits; NaN if
    one is NaN."""
    checksums: dict[str, int | PendingChecksum] = field(default_factory=dict)
    """The checksums that the manifest gets in `finish`."""
    places: dict[int, str] = field(default_factory=dict)
    """The names of the tensors that were recorded in the engine's own memory, by its address."""
    num_bytes: int = 0
    gathered_s: float = 0.0
    """The time that the engine took to deliver the tensors."""
    _staying: dict[str, tuple[Tensor, bool]] = field(default_factory=dict)
    """The tensors that `finish` reads, and whether they get a checksum."""

    def note(self, name: str, tensor: Tensor, *, check: bool, stays: bool = False) -> None:
        """Record a tensor, in the format in which it is sent. check: also record a checksum of its bytes · stays: it is
        not changed before `finish`."""
        self.manifest[name] = entry_of(tensor)
        if stays and (kernels := scanner_of(tensor)) is not None and kernels.folds_crc:
            self._staying[name] = tensor, check
            self.num_bytes += tensor.nbytes
            return
        if check:
            self.checksums[name] = start_checksum(tensor)
        self._note_values(name, tensor, SAMPLED_VALUES)

    def note_slice(self, name: str, tensor: Tensor, count: int) -> None:
        """Record the slice of a tensor that this rank delivers, by up to `count` of its values. Its manifest is made of
        the slices of all ranks."""
        self._note_values(name, tensor, count)

    def _note_values(self, name: str, tensor: Tensor, count: int) -> None:
        self.num_bytes += tensor.nbytes
        if (kernels := scanner_of(tensor)) is not None:
            ends, (self.values[name],), _ = kernels.scan([tensor], count)
            assert ends is not None
            self.extremes[name] = ends[0]
            return
        self.values[name] = some_values(tensor, count)
        if tensor.is_floating_point() and tensor.numel() and tensor.dtype != VALUES:  # NaN is in its scales
            self.extremes[name] = torch.stack(tensor.aminmax()).double()

    def finish(self) -> None:
        """Move the recorded numbers to the host, and the checksums into the manifest."""
        if self._staying:
            self._read_staying()
        self.values, self.extremes = on_host(self.values), on_host(self.extremes)
        for name, found in read_checksums(self.checksums).items():
            self.manifest[name] = replace(self.manifest[name], checksum=found)
        self.checksums.clear()

    def _read_staying(self) -> None:
        tensors, checked = zip(*self._staying.values(), strict=True)
        kernels = scanner_of(tensors[0])
        assert kernels is not None
        ends, values, sums = kernels.scan(tensors, SAMPLED_VALUES, checked=checked)
        assert ends is not None
        self.extremes |= zip(self._staying, ends, strict=True)
        self.values |= zip(self._staying, values, strict=True)
        self.checksums |= {name: crc for name, crc, check in zip(self._staying, sums, checked, strict=True) if check}
        self._staying.clear()

    def checksum_of(self, name: str) -> int | None:
        """Return the checksum of a tensor that was just recorded, None if it has none. This waits for its device."""
        self.checksums |= read_checksums({name: self.checksums[name]}) if name in self.checksums else {}
        found = self.checksums.get(name)
        assert not isinstance(found, PendingChecksum)
        return found

    def add(self, other: VersionRecord) -> None:
        """Add the record of another rank, which is of other tensors."""
        self.manifest |= other.manifest
        self.values |= other.values
        self.extremes |= other.extremes
        self.num_bytes += other.num_bytes

    def add_slices(self, other: VersionRecord) -> None:
        """Add the record of another rank, which is of other slices of the same tensors."""
        for name, values in other.values.items():
            self.values[name] = torch.cat([self.values[name], values]) if name in self.values else values
        for name, ends in other.extremes.items():
            least, largest = ends
            if name in self.extremes:
                before = self.extremes[name]
                least, largest = torch.minimum(before[0], least), torch.maximum(before[1], largest)  # NaN stays
            self.extremes[name] = torch.stack([least, largest])
        self.num_bytes += other.num_bytes

    @property
    def floats(self) -> set[torch.dtype]:
        """The dtypes of the floating-point tensors."""
        found = {vars(torch)[entry.dtype] for entry in self.manifest.values()}
        return {dtype for dtype in found if dtype.is_floating_point}

    @property
    def not_finite(self) -> list[str]:
        """The names of tensors with NaN or infinity."""
        names = [name for name in self.manifest if name in self.extremes]
        sound = self._ends(names).isfinite().all(1).tolist()
        return [name for name, one in zip(names, sound, strict=True) if not one]

    @property
    def largest(self) -> float:
        """The largest magnitude over the tensors without NaN or infinity; 0 if there are none."""
        found = self._ends(list(self.extremes)).abs().amax(1)  # NaN stays
        return float(torch.where(found.isfinite(), found, 0.0).max()) if len(found) else 0.0

    def _ends(self, names: list[str]) -> Tensor:
        """Return the least and the largest value of these tensors [n, 2]."""
        return torch.stack([self.extremes[name] for name in names]) if names else torch.zeros(0, 2)

    def sampled(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return some values of tensors, as `values` has them, for those that were recorded where they are from
        there."""
        found = {name: self.values.get(self.places.get(tensor.data_ptr(), "")) for name, tensor in tensors.items()}
        rest = {name: tensors[name] for name, values in found.items() if values is None}
        return {name: values for name, values in found.items() if values is not None} | sampled_values(rest)


def entry_of(tensor: Tensor) -> Entry:
    """Return the manifest's entry of a tensor, without a checksum."""
    return Entry(tuple(tensor.shape), dtype_name(tensor))


def entries_of_part(part: WeightPart, form: WireFormat) -> dict[str, Entry]:
    """Return the entries of a whole tensor in the format in which it is sent, without checksums, by name."""
    found = wire_shapes(form, part.name, part.shape, part.dtype)
    return {name: Entry(shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in found.items()}


def scanner_of(tensor: Tensor) -> Kernels | None:
    """Return the compiled kernels if they read such a tensor, which is in host memory; None: torch reads it."""
    if tensor.device.type != "cpu" or tensor.dtype not in SCANNED or not tensor.numel() or not tensor.is_contiguous():
        return None
    found = load_kernels(torch.float32)
    return None if isinstance(found, str) else found


def host_values(tensor: Tensor) -> Tensor:
    """Return what `some_values` returns, by a compiled kernel if there is one."""
    kernels = scanner_of(tensor)
    return some_values(tensor) if kernels is None else kernels.scan([tensor], SAMPLED_VALUES, ends=False)[1][0]


def sampled_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return up to `SAMPLED_VALUES` values of each tensor, float64, on the host."""
    return on_host({name: host_values(tensor) for name, tensor in tensors.items()})


def some_values(tensor: Tensor, count: int = SAMPLED_VALUES) -> Tensor:
    """Return a copy of up to `count` values, float64, on the tensor's device."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // count)][:count].to(torch.float64, copy=True)


def weights_identity(values: Mapping[str, Tensor]) -> str:
    """Return the identity of weights, a hash of some values of each of their tensors (`some_values`) with its name. One
    optimizer step changes it."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(values):
        digest.update(name.encode() + b"\0" + values[name].numpy().tobytes())
    return digest.hexdigest()


def on_host(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the vectors on the host, with one transfer per device."""
    out: dict[str, Tensor] = {}
    for device in {tensor.device for tensor in found.values()}:
        here = {name: tensor for name, tensor in found.items() if tensor.device == device}
        if device.type == "cpu":
            out |= here
            continue
        whole = torch.cat(list(here.values())).cpu()
        out |= dict(zip(here, whole.split([len(tensor) for tensor in here.values()]), strict=True))
    return {name: out[name] for name in found}
