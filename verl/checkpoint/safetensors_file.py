"""Write safetensors files one tensor at a time.

The library's `save_file` needs every tensor of the file on the CPU at once, holds the GIL for the whole write, hides a
full disk in an error of its own type and creates files that only their owner can read. The format is an 8-byte length,
a JSON header and the bytes; readers are the library's.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Collection
from pathlib import Path

import torch

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float16, torch.float32, torch.float64)
DTYPES = {
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    **{dtype: f"{'I' if dtype.is_signed else 'U'}{8 * dtype.itemsize}" for dtype in _INTEGERS},
    **{dtype: f"F{8 * dtype.itemsize}" for dtype in _FLOATS},
}
MAX_SHARD_BYTES = 5_000_000_000
_HEADER_BYTES = 1 << 18


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor in row-major order: a view if possible, else a copy of this tensor.

    A numpy array over the tensor would fix the size of its storage for ever, and an offloaded part of a model
    (model_engine/offload.py) could no longer be moved away."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if not plain.nbytes:
        return memoryview(b"")
    view = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    view.tensor = plain  # type: ignore[attr-defined]  # it lives as long as its bytes are used
    return memoryview(view).cast("B")


def _entry_bytes(name: str, dims: int) -> int:
    """Return an upper bound of what a tensor adds to the header: escaped name, 20 digits for each number."""
    return len(json.dumps(name)) + 80 + 22 * (dims + 2)


class Shard:
    """A safetensors file that is written tensor by tensor, so that only one is in memory. All its tensors have one item
    size. `finish` writes the header into the space reserved at the front (the format allows blanks after the JSON)."""

    def __init__(self, path: Path, every: Collection[str] = ()) -> None:
        """Open a new file. every: the names of all its tensors, of at most two dimensions, if they must be in one file
        whatever its size."""
        self.path, self._splits = path, not every
        room = 64 + sum(_entry_bytes(name, 2) for name in every)
        self._header_bytes = -(-room // 4096) * 4096 if every else _HEADER_BYTES
        self.names: list[str] = []
        self.data_bytes = 0
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
        self._header_left = self._header_bytes - 64
        self._file = open(path, "wb")  # noqa: SIM115 - closed by `finish` or `close`
        self._file.write(b" " * self._header_bytes)

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Append a tensor. Return False if the file is full; the first tensor always fits."""
        entry_bytes = _entry_bytes(name, tensor.dim())
        end = self.data_bytes + tensor.nbytes
        if self.names and self._splits and (end > MAX_SHARD_BYTES or entry_bytes > self._header_left):
            return False
        self._file.write(host_bytes(tensor))
        offsets = [self.data_bytes, end]
        self._header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self._header_left -= entry_bytes
        self.data_bytes = end
        self.names.append(name)
        return True

    def finish(self) -> None:
        text, room = json.dumps(self._header, separators=(",", ":")).encode(), self._header_bytes - 8
        assert len(text) <= room, f"a header of {len(text)} bytes in a room of {room}"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + text.ljust(room))
        self.close()

    def close(self) -> None:
        self._file.close()
