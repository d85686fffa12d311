"""Weights in 8 bits: E4M3 values with one float32 scale per block of 128 x 128, as the block-wise FP8 checkpoints of
vLLM, SGLang and TensorRT-LLM have them. A weight is its value times the scale of its block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from verl.wire import FP8_BLOCK

SCALES = "_scale_inv"
"""Added to the name of a weight, it names the scales. They are called inverse because a weight is divided by them when
it is quantised."""
VALUES = torch.float8_e4m3fn
PROJECTIONS = ("_proj", "_proj_with_mqa")  # the ends of their names; the second is of latent attention
LARGEST = torch.finfo(VALUES).max  # 448
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it float32 loses bits of the scale
PRODUCTS = {"linear", "_grouped_mm"}  # by which transformers multiplies (inputs, weight, ...)


def in_blocks(name: str, shape: Sequence[int]) -> bool:
    """Return True if the tensor of this name is quantised: the projections of attention, of feed-forward blocks and of
    experts are. Embeddings, head, norms, biases and routers of experts are not."""
    return len(shape) >= 2 and name.removesuffix(".weight").endswith(PROJECTIONS)


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales [..., ceil(N / 128), ceil(K / 128)] of a weight [..., N, K]."""
    *lead, rows, columns = shape
    return *lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values [..., N, K] and the scales [..., ceil(N / 128), ceil(K / 128)] of a weight [..., N, K]. The
    largest magnitude of a block becomes 448. A block with NaN or infinity has such a scale."""
    scales = weight.new_empty(scales_shape(weight.shape), dtype=torch.float32)
    values = weight.new_empty(weight.shape, dtype=VALUES)
    every = zip(*(t.reshape(-1, *t.shape[-2:]) for t in (weight.detach(), values, scales)), strict=True)
    for one, into, scale in every:  # one expert after the other: a float32 copy of all of them would be large
        rows, columns = one.shape
        whole = pad(one.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
        blocks = whole.view(len(scale), FP8_BLOCK, -1, FP8_BLOCK)
        largest = blocks.abs().amax((1, 3))
        scale.copy_(_scales(largest))
        into.copy_((blocks / scale[:, None, :, None]).view(whole.shape)[:rows, :columns])
    return values, scales


def _scales(largest: Tensor) -> Tensor:
    """Return the scales of runs of values with these largest magnitudes."""
    # by a tensor: by a number a GPU multiplies with the reciprocal, and the last bit differs
    return torch.where(largest == 0, 1.0, largest / torch.full_like(largest, LARGEST)).clamp(min=SMALLEST_SCALE)


def by_row(scales: Tensor, rows: int) -> Tensor:
    """Return the scales [..., N, ceil(K / 128)] of each of the N rows of a weight."""
    return scales.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [..., N, K] float32 of values and scales."""
    rows, columns = values.shape[-2:]
    return values.float() * by_row(scales, rows).repeat_interleave(FP8_BLOCK, -1)[..., :columns]


def dequantised(tensors: Iterable[tuple[str, object]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a version with every quantised weight in float32, without scales. Raise ValueError for a
    weight that has no scales, for scales without a weight, and for a weight that should be quantised and is not."""
    halves = dict[str, Tensor]()  # values or scales, whichever came first
    for name, tensor in tensors:
        assert isinstance(tensor, Tensor)
        weight = name.removesuffix(SCALES)
        if not in_blocks(weight, tensor.shape):
            yield name, tensor
        elif weight not in halves:
            if name == weight and tensor.dtype != VALUES:
                raise ValueError(f"{name} is {tensor.dtype}: weights in blocks of FP8 were expected")
            halves[weight] = tensor.clone()  # the next tensor may take its memory
        else:
            values, scales = (halves.pop(weight), tensor) if name != weight else (tensor, halves.pop(weight))
            if values.dtype != VALUES or scales.shape != scales_shape(values.shape):
                raise ValueError(f"{weight}: scales {[*scales.shape]} do not fit values {[*values.shape]}")
            yield weight, dequantise(values, scales)
    if halves:
        raise ValueError(f"of {len(halves)} weights only the values or only the scales came, e.g. {min(halves)}")


def as_computed(name: str, weight: Tensor, dtype: torch.dtype, *, fp8: bool) -> Tensor:
    """Return a weight as an engine multiplies with it: rounded to `dtype`, with `fp8` after its blocks were
    quantised."""
    return (dequantise(*quantise(weight)) if fp8 and in_blocks(name, weight.shape) else weight).to(dtype)


def rounded_inputs(inputs: Tensor) -> Tensor:
    """Return inputs [..., K] of a projection as servers multiply them, in their dtype: E4M3 values times the scale of
    128 columns of a token."""
    columns = inputs.shape[-1]
    blocks = pad(inputs.float(), (0, -columns % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = _scales(largest)
    made = (blocks / scales).to(VALUES).float() * scales
    return made.flatten(-2)[..., :columns].to(inputs.dtype)


class RoundedInputs(TorchFunctionMode):
    """While it is entered, products with the weights that were added to it have `rounded_inputs`. A view of a weight
    counts as the weight: the experts of a layer are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._weights = WeakIdKeyDictionary()

    def add(self, weight: Tensor) -> None:
        self._weights[weight] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in PRODUCTS:
            inputs, weight, *rest = args
            if weight in self._weights or (weight._base is not None and weight._base in self._weights):
                args = (rounded_inputs(inputs), weight, *rest)
        return func(*args, **(kwargs or {}))
