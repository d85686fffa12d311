"""One linear layer as the engine stores it: the plain layout, or oneDNN's packed one where that is faster.

Packed fp32 was measured 2 to 2.6 times faster than MKL on AMD CPUs with AVX-512, where MKL stays on AVX2; on an AVX2
CPU both reach the same rate and the plain call has less overhead. The choice is a property of the machine, never a
timing, so that a run repeats bitwise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def native_bf16(device: torch.device) -> bool:
    """True if bf16 matmuls run on the hardware. An emulating CPU takes about ten times as long as in fp32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packing_pays(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return native_bf16(device)
    return dtype == torch.float32 and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class Linear:
    """y = x W^T + b for x [T, K], W [N, K]."""

    __slots__ = ("bias", "packed", "transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self.bias = bias
        self.packed = packed
        # one packed layout serves every number of rows
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if packed else weight
        self.transposed = weight.t()  # a view

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self.bias is not None:
            return torch.addmm(self.bias, x, self.transposed)
        return torch.mm(x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in place where the kernel allows. residual [T, N] must have no other reader."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        if self.bias is not None:
            residual = residual.add_(self.bias)
        return residual.addmm_(x, self.transposed)
