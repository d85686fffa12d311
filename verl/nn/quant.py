"""Weights in 4 bits (NF4) and in 8 bits (LLM.int8), in the formats of bitsandbytes 0.50.2: the same codes and scales
for the same weight, the same values of the same codes, and the same names in a checkpoint.

NF4 divides a weight, row after row, into blocks of 64 values. A value is one of 16 levels times the largest magnitude
of its block (absmax). With double quantisation these magnitudes, less their mean, are codes of 8 bits themselves, in
blocks of 256. LLM.int8 has one scale per row: the largest magnitude of the row, rounded to float16, becomes 127."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.errors import Refused

Kind = Literal["nf4", "int8"]

BLOCK = 64
"""Values with one scale, in NF4."""
NESTED_BLOCK = 256
"""Scales with one scale, in double quantisation."""
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the 16 codes: quantiles of a normal distribution."""
ZERO = 7
"""The code of 0."""
GRID = 65536
"""Points of [-1, 1] to which a scale is rounded before its nearest code is looked up, as bitsandbytes does on a CPU."""
OF_127 = 7.874015718698502e-3
"""The reciprocal of 127 that bitsandbytes multiplies with."""
AT_ONCE = 1 << 20
"""Values of a weight that are quantised together: the temporary tensors of one step are small."""
STATE = "weight.quant_state.bitsandbytes__nf4"
FLOAT_PARTS = (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", ".SCB")
"""The ends of the names of those tensors of a quantised weight that may be floating-point."""


@dataclass(frozen=True, slots=True)
class Nested:
    """The second level of double quantisation: a scale is `values[code]` times its block's `absmax`, plus `offset`."""

    absmax: Tensor
    """float32 [ceil(scales / 256)]."""
    values: Tensor
    """float32 [256]: the values of the codes."""
    offset: float
    """The mean of the scales."""


@dataclass(frozen=True, slots=True)
class Nf4:
    """A weight in NF4."""

    codes: Tensor
    """uint8 [ceil(values / 2)]: two values per byte, the first in its upper half."""
    absmax: Tensor
    """The scales of the blocks [ceil(values / 64)]: uint8 codes with double quantisation, else float32."""
    nested: Nested | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the weight that was quantised."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        nested = 0 if self.nested is None else self.nested.absmax.nbytes + self.nested.values.nbytes
        return self.codes.nbytes + self.absmax.nbytes + nested

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by the names that bitsandbytes adds to the name of the module."""
        state: dict[str, object] = {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": [*self.shape],
        }
        found = {
            "weight": self.codes.unsqueeze(1),
            "weight.absmax": self.absmax,
            "weight.quant_map": _levels(self.codes.device).clone(),  # safetensors refuses shared memory
        }
        if self.nested is not None:
            found["weight.nested_absmax"] = self.nested.absmax
            found["weight.nested_quant_map"] = self.nested.values.clone()
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": self.nested.offset}
        found[STATE] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return found

    def dequantised(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight in `dtype` (None: that of the weight that was quantised), rounded from float32."""
        whole = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.codes.device)
        for number, some in enumerate(whole.view(-1).split(AT_ONCE)):  # what is made on the way stays small
            first = number * AT_ONCE
            some.copy_(self._values(first, first + len(some), whole.dtype))
        return whole

    def tiles(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the weight [N, K] in `dtype`, a few of its rows at a time."""
        rows, depth = self.shape
        step = max(1, AT_ONCE // depth // BLOCK) * BLOCK  # whole blocks, whatever the depth is
        for first in range(0, rows, step):
            last = min(rows, first + step)
            yield self._values(first * depth, last * depth, dtype).view(last - first, depth)

    def _values(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the values start .. stop of the flat weight; start is that of a block."""
        codes, scales = self.codes[start // 2 : -(-stop // 2)], self._scales(start // BLOCK, -(-stop // BLOCK))
        values = _pairs(codes.device).index_select(0, codes.int()).flatten()
        blocks = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        return blocks.mul_(scales.unsqueeze(1)).flatten()[: stop - start].to(dtype)

    def _scales(self, start: int, stop: int) -> Tensor:
        """Return the scales of the blocks start .. stop, float32."""
        if self.nested is None:
            return self.absmax[start:stop]
        first = start // NESTED_BLOCK
        of_block = self.nested.absmax[first : -(-stop // NESTED_BLOCK)].repeat_interleave(NESTED_BLOCK)
        some = of_block[start - first * NESTED_BLOCK : stop - first * NESTED_BLOCK]
        return self.nested.values[self.absmax[start:stop].int()] * some + self.nested.offset


@dataclass(frozen=True, slots=True)
class Int8:
    """A weight of 8 bits with one scale per row."""

    codes: Tensor
    """int8 [N, K]."""
    absmax: Tensor
    """The largest magnitude of each row, float32 [N]."""
    dtype: torch.dtype
    """The dtype of the weight that was quantised."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.absmax.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by the names that bitsandbytes adds to the name of the module."""
        by_row = torch.tensor(0, dtype=torch.uint8)
        return {"weight": self.codes, "SCB": self.absmax, "weight_format": by_row}

    def dequantised(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight in `dtype` (None: that of the weight that was quantised), rounded from float32."""
        return (self.codes * self.absmax.view(-1, 1)).mul_(OF_127).to(dtype or self.dtype)

    def tiles(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the weight [N, K] in `dtype`, a few of its rows at a time."""
        step = max(1, AT_ONCE // self.codes.shape[1])
        for codes, absmax in zip(self.codes.split(step), self.absmax.split(step), strict=True):
            yield (codes * absmax.view(-1, 1) * OF_127).to(dtype)


QuantisedTensor = Nf4 | Int8


def quantise_weight(weight: Tensor, kind: Kind, *, double: bool = True, name: str = "a weight") -> QuantisedTensor:
    """Quantise a weight of float32, bfloat16 or float16. double: also quantise the scales of NF4. Raise ValueError for
    NaN or infinity, and for a shape or a dtype that the format does not have."""
    weight = weight.detach()
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight.numel() == 0:
        raise Refused(f"{name} is {weight.dtype} {[*weight.shape]}: only floating-point weights are quantised")
    if kind == "nf4":
        return _quantise_nf4(weight.contiguous(), double, name)
    if weight.dim() != 2:
        raise Refused(f"{name} is {[*weight.shape]}: int8 has a scale per row of a matrix; quantise it as nf4")
    return _quantise_int8(weight, name)


def read_quantised(module: str, read: Callable[[str], Tensor], names: Mapping[str, object]) -> QuantisedTensor:
    """Return the weight of a module from a checkpoint of bitsandbytes. read: returns the tensor of a name; names: the
    names of the checkpoint. Raise ValueError for formats of it that are not these two."""
    whole = f"{module}.weight"
    if f"{module}.SCB" in names:
        if f"{module}.weight_format" in names and int(read(f"{module}.weight_format")) != 0:
            raise Refused(f"{whole} is int8 in a layout of old GPUs; load the folder in transformers and save it again")
        return Int8(read(whole), read(f"{module}.SCB").float(), torch.float16)
    if f"{module}.{STATE}" not in names:
        kinds = [name.rpartition("__")[2] for name in names if name.startswith(f"{whole}.quant_state.")]
        what = f"quantised as {kinds[0]}" if kinds else "not quantised by bitsandbytes"
        raise Refused(f"{whole} is {what}: quantise the model as nf4, or as int8 (bitsandbytes)")
    state = json.loads(bytes(read(f"{module}.{STATE}").tolist()))
    levels = read(f"{whole}.quant_map")
    if state["blocksize"] != BLOCK or not torch.equal(levels, _levels(levels.device)):
        raise Refused(f"{whole} has blocks of {state['blocksize']}, or levels of its own: quantise it in blocks of 64")
    nested = None
    if "nested_offset" in state:
        if state["nested_blocksize"] != NESTED_BLOCK:
            raise Refused(f"{whole} has scales in blocks of {state['nested_blocksize']}: quantise it again")
        absmax, values = read(f"{whole}.nested_absmax"), read(f"{whole}.nested_quant_map")
        nested = Nested(absmax, values, state["nested_offset"])
    codes = read(whole).contiguous().view(torch.uint8).flatten()  # FSDP stores the bytes in another dtype
    shape, scales = tuple(state["shape"]), read(f"{whole}.absmax")
    if len(codes) != -(-prod(shape) // 2) or len(scales) != -(-prod(shape) // BLOCK):
        raise Refused(f"{whole}: {len(codes)} bytes and {len(scales)} scales are not a weight of shape {[*shape]}")
    return Nf4(codes, scales, nested, shape, getattr(torch, state["dtype"]))


@cache
def code_values(*, signed: bool) -> Tensor:
    """Return the values of the 256 codes of a dynamic 8-bit type, ascending, float32."""
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1
        boundaries = torch.linspace(0.1, 1, count, dtype=torch.float32)
        means = (10.0 ** (exponent - 6) * ((boundaries[:-1] + boundaries[1:]) / 2)).tolist()
        values += [*means, *(-mean for mean in means)] if signed else means
    return torch.tensor(sorted(values), dtype=torch.float32)


def _quantise_nf4(weight: Tensor, double: bool, name: str) -> Nf4:
    flat, n = weight.view(-1), weight.numel()
    codes = torch.empty(-(-n // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(-(-n // BLOCK), dtype=torch.float32, device=weight.device)
    for start in range(0, n, AT_ONCE):
        some = flat[start : start + AT_ONCE].float()
        full = len(some) // BLOCK * BLOCK
        blocks = some[:full].view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        parts = [(blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(1)).flatten()]
        if full < len(some):  # the last block of a weight: divided, and not multiplied by the reciprocal
            last = some[full:].abs().max().clamp(min=1e-38)
            largest, parts = torch.cat((largest, last[None])), [*parts, some[full:] / last]
        levels = _levels(weight.device)
        nearest = torch.bucketize(torch.cat(parts).clamp(-1, 1), (levels[:-1] + levels[1:]) / 2, out_int32=True)
        pairs = pad(nearest.to(torch.uint8), (0, len(some) % 2), value=ZERO).view(-1, 2)
        codes[start // 2 : start // 2 + len(pairs)] = pairs[:, 0] << 4 | pairs[:, 1]
        scales[start // BLOCK : start // BLOCK + len(largest)] = largest
    _refuse_not_finite(scales, name)
    shape = tuple(weight.shape)
    if not double:
        return Nf4(codes, scales, None, shape, weight.dtype)
    offset = scales.mean()
    of_scales, nested = _quantise_scales(scales - offset)
    return Nf4(
        codes, of_scales, Nested(nested, code_values(signed=True).to(scales), offset.item()), shape, weight.dtype
    )


def _quantise_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8 [n]) and the largest magnitudes of blocks of 256 (float32) of scales [n]."""
    n = len(scales)
    blocks = pad(scales, (0, -n % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = blocks.abs().amax(1)
    normed = blocks * torch.where(largest == 0, 0.0, 1.0 / largest).unsqueeze(1)
    at = (((normed.clamp(-1, 1) + 1) * 0.5) * (GRID - 1) + 0.5).int()
    codes = _nearest().to(scales.device)[at]
    codes[largest == 0] = 0
    return codes.flatten()[:n], largest


@cache
def _nearest() -> Tensor:
    """Return the nearest code of each point of the grid, uint8 [GRID]."""
    values = code_values(signed=True)
    points = -1 + (2.0 * torch.arange(GRID, dtype=torch.float32)) / (GRID - 1)
    return torch.bucketize(points, 0.5 * (values[:-1] + values[1:])).to(torch.uint8)


def _quantise_int8(weight: Tensor, name: str) -> Int8:
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    absmax = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    rows = max(1, AT_ONCE // weight.shape[1])
    for some, into, largest in zip(weight.split(rows), codes.split(rows), absmax.split(rows), strict=True):
        half = some.half()
        largest.copy_(half.abs().amax(1))
        into.copy_(torch.nan_to_num(half * (127.0 / largest.unsqueeze(1))).round())  # NaN: a row of zeros
    _refuse_not_finite(absmax, name)
    return Int8(codes, absmax, weight.dtype)


def _refuse_not_finite(scales: Tensor, name: str) -> None:
    if not bool(scales.isfinite().all()):
        raise Refused(f"{name} has values that are not finite, or too large for the format: it cannot be quantised")


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte of codes, [256, 2] float32."""
    levels = _levels(device)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1)
