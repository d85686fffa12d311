"""Write safetensors files one tensor at a time.

The library's `save_file` wants every tensor of the file on the CPU at once, holds the GIL for the whole write, hides a
full disk in an error of its own type and creates files that only their owner can read. The format is an 8-byte length, a
JSON header and the bytes; readers are the library's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_METADATA = {"format": "pt"}  # transformers refuses files without it


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor, row-major. A view where it can be, one tensor's copy where not."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


class Shard:
    """One file that grows tensor by tensor, so that only one is in memory. All tensors have the same item size. Room for
    the header is set aside at the front and filled in by `finish` (the format allows blanks after the JSON)."""

    def __init__(self, path: Path, header_bytes: int = 1 << 18) -> None:
        self.path = path
        self.names: list[str] = []
        self.data_bytes = 0
        self._header: dict[str, object] = {"__metadata__": _METADATA}
        self._header_room, self._header_used = header_bytes, 64
        self._file = open(path, "wb")  # noqa: SIM115 - closed by `finish` or `close`
        self._file.write(b" " * header_bytes)

    def fits(self, name: str, tensor: torch.Tensor, max_bytes: int) -> bool:
        """Whether one more may go in here; the first always may, however large."""
        size_bytes = self.data_bytes + tensor.numel() * tensor.element_size()
        return not self.names or (
            size_bytes <= max_bytes and self._header_used + _entry_bytes(name, tensor) <= self._header_room
        )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = host_bytes(tensor)
        self._file.write(data)
        self._header[name] = _entry(tensor, self.data_bytes, self.data_bytes + data.nbytes)
        self._header_used += _entry_bytes(name, tensor)
        self.data_bytes += data.nbytes
        self.names.append(name)

    def finish(self) -> None:
        framed = _framed(self._header, self._header_room)
        assert len(framed) == self._header_room, f"a header of {len(framed)} bytes in a room of {self._header_room}"
        self._file.seek(0)
        self._file.write(framed)
        self.close()

    def close(self) -> None:
        self._file.close()


def _entry(tensor: torch.Tensor, start: int, end: int) -> dict[str, object]:
    return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}


def _entry_bytes(name: str, tensor: torch.Tensor) -> int:
    """An upper bound of what the tensor adds to the header: escaped name, 20 digits for each number."""
    return len(json.dumps(name)) + 80 + 22 * (tensor.dim() + 2)


def _framed(header: Mapping[str, object], room: int) -> bytes:
    """Length and JSON, filled with blanks to `room` bytes in all, else to a multiple of 8."""
    text = json.dumps(header, separators=(",", ":")).encode()
    size = max(room - 8, len(text) + -len(text) % 8)
    return size.to_bytes(8, "little") + text.ljust(size)
