"""The crc32 of tensors, computed where they are: the number that zlib gives for the bytes in host memory.

A crc32 is linear over bits: that of a sequence of words is the xor of each word, advanced by the zeros that follow it.
On a device 2^k words are advanced at once, with one table for each k, and the words are folded onto fewer and fewer of
them. The host reads a device once for all tensors of a version, when the last folds are done."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import xor

import torch
from torch import Tensor

from verl.accel.cpu.kernels import load_kernels
from verl.checkpoint.safetensors_file import host_bytes

ONES = 2**32 - 1  # crc32 begins with this state, and its complement is the result
LANES = 2**12  # words of a tensor that wait for the last folds, which are done for all tensors together
WIDEST = 2**20  # words that are advanced at once; what that needs, 40 MB, fits the cache of a large GPU


@dataclass(frozen=True, slots=True)
class PendingChecksum:
    """A crc32 that a device computes."""

    lanes: Tensor
    """[LANES] int32, on the device: the words of the tensor, folded."""
    num_bytes: int


def checksum(tensor: Tensor) -> int:
    """Return the crc32 of the tensor's bytes. This waits for its device."""
    return read_checksums({"": start_checksum(tensor)})[""]


def start_checksum(tensor: Tensor) -> int | PendingChecksum:
    """Return the crc32 of a tensor in host memory, or start it on the tensor's device without a wait. The tensor may be
    overwritten by later work of that device."""
    return host_checksum(host_bytes(tensor)) if tensor.device.type == "cpu" else start_on_device(tensor)


def host_checksum(view: memoryview) -> int:
    """Return the crc32 of bytes in host memory, by the compiled kernel where there is one: zlib takes ten times as
    long."""
    kernels = load_kernels(torch.float32)
    return zlib.crc32(view) if isinstance(kernels, str) else kernels.crc32(view)


def host_checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the crc32 of tensors in host memory, of contiguous ones in one call."""
    kernels = load_kernels(torch.float32)
    if isinstance(kernels, str) or not kernels.folds_crc:
        return {name: host_checksum(host_bytes(tensor)) for name, tensor in tensors.items()}
    plain = [tensor.contiguous() for tensor in tensors.values()]
    return dict(zip(tensors, kernels.crcs(plain), strict=True))


def start_on_device(tensor: Tensor) -> PendingChecksum:
    """Start the crc32 of a tensor with operations of torch on its device."""
    words, width = _words(tensor), WIDEST
    while width >= LANES:
        if len(words) > width or width == LANES:
            words = _folded(words, width)
        width //= 2
    return PendingChecksum(words, tensor.nbytes)


def read_checksums(found: Mapping[str, int | PendingChecksum]) -> dict[str, int]:
    """Return the checksums, with one read for each device."""
    out = {name: one for name, one in found.items() if isinstance(one, int)}
    pending = {name: one for name, one in found.items() if isinstance(one, PendingChecksum)}
    for device in {one.lanes.device for one in pending.values()}:
        here = {name: one for name, one in pending.items() if one.lanes.device == device}
        words = torch.stack([one.lanes for one in here.values()])
        while (half := words.shape[1] // 2) > 0:
            words = _advanced(words[:, :half], half) ^ words[:, half:]
        for (name, one), state in zip(here.items(), words[:, 0].cpu().tolist(), strict=True):
            out[name] = _applied(_zeros(2), state & ONES) ^ _after_zeros(one.num_bytes) ^ ONES
    return {name: out[name] for name in found}


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as int32, with zeros in front up to a whole word: they do not change the folds."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if len(plain) < 2:  # its stride may be anything
        plain = plain.clone(memory_format=torch.contiguous_format)
    flat = plain.view(torch.uint8)
    if (short := -len(flat) % 4) or flat.storage_offset() % 4:
        flat = torch.cat([flat.new_zeros(short), flat])
    return flat.view(torch.int32) if len(flat) else flat.new_zeros(1, dtype=torch.int32)


def _folded(words: Tensor, width: int) -> Tensor:
    """Fold words [n] onto [width] words, in front of which there may be zeros."""
    rest = len(words) % width
    sums = torch.cat([words.new_zeros(width - rest), words[:rest]])
    for row in words[rest:].view(-1, width):
        sums = _advanced(sums, width) ^ row
    return sums


def _advanced(words: Tensor, by: int) -> Tensor:
    """Return each state of words [..., n] after `by` words of zeros. by: a power of 2."""
    tables, first = _tables(words.device)
    index = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)) + first
    found = tables[by.bit_length() - 1].index_select(0, index.view(-1)).view(index.shape)
    pairs = found[..., :2] ^ found[..., 2:]
    return pairs[..., 0] ^ pairs[..., 1]


@lru_cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables [k, 4 x 256] int32, in which each byte of a state has its share of the state after 2^k words of
    zeros, and where the table of each of the four bytes begins [4] int32."""
    rows = [_shares(_zeros(k + 2)) for k in range(WIDEST.bit_length())]
    signed = torch.tensor(rows).to(torch.int32)  # wraps, as the bits do
    return signed.to(device), torch.arange(0, 1024, 256, dtype=torch.int32).to(device)


def _shares(matrix: tuple[int, ...]) -> list[int]:
    """Return a matrix of bits as a table: for each of the four bytes, the result for each of its 256 values."""
    return [_applied(matrix, value << shift) for shift in range(0, 32, 8) for value in range(256)]


@lru_cache
def _zeros(k: int) -> tuple[int, ...]:
    """Return the matrix of bits that advances a state by 2^k bytes of zeros: the result for each bit of the state."""
    if k == 0:
        return tuple(zlib.crc32(b"\0", ONES ^ (1 << bit)) ^ ONES for bit in range(32))
    half = _zeros(k - 1)
    return tuple(_applied(half, column) for column in half)


def _applied(matrix: tuple[int, ...], state: int) -> int:
    return reduce(xor, (column for bit, column in enumerate(matrix) if state >> bit & 1), 0)


def _after_zeros(num_bytes: int) -> int:
    """Return the first state of crc32, advanced by so many bytes of zeros."""
    steps: Iterable[int] = (k for k in range(num_bytes.bit_length()) if num_bytes >> k & 1)
    return reduce(lambda state, k: _applied(_zeros(k), state), steps, ONES)
