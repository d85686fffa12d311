"""Linear layers as the rollout stores them: `plain`, oneDNN's `packed`, or `panels` for the compiled kernels.

In float32 on a CPU the panels are the fastest at every number of rows. oneDNN's layout is for bf16 on the hardware, and
for float32 without a C compiler on AVX-512. The machine decides, never a timing, so that a run repeats bitwise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl.accel.cpu.kernels import Kernels
from verl.nn.precision import native_bf16

Layout = Literal["plain", "packed", "panels"]


def best_layout(dtype: torch.dtype, device: torch.device, kernels: Kernels | None) -> Layout:
    if device.type != "cpu":
        return "plain"
    if kernels is not None and dtype == torch.float32:
        return "panels"
    avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    fast = native_bf16(device) if dtype == torch.bfloat16 else dtype == torch.float32 and avx512
    return "packed" if fast and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") else "plain"


class Plain:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias, self.transposed, self.nbytes = bias, weight.t(), 0  # a view

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.transposed) if self.bias is None else torch.addmm(self.bias, x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return (residual if self.bias is None else residual.add_(self.bias)).addmm_(x, self.transposed)


class Packed:
    """Private operations of torch: tests compare them with the plain ones."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # one packed layout serves every number of rows
        self.bias, self.weight, self.nbytes = bias, torch.ops.mkldnn._reorder_linear_weight(weight, None), weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class Panels:
    """Bitwise the same for a row whatever the other rows are."""

    def __init__(self, width: int, panels: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        self.width, self.panels, self.bias, self.kernels, self.nbytes = width, panels, bias, kernels, panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.panels, self.bias, x.new_empty(len(x), self.width), add=False)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.panels, self.bias, residual, add=True)


Linear = Plain | Packed | Panels
"""y = x W^T + b for x [T, K], W [N, K]; `nbytes`: beyond the tensors it was made from. `add_to(residual, x)`: added to
residual [T, N], which must have no other reader, in place where the kernel allows."""


def make_linear(weight: Tensor, bias: Tensor | None, layout: Layout, kernels: Kernels | None) -> Linear:
    if layout == "panels":
        assert kernels is not None, "panels are what the compiled kernels read"
        panels = kernels.new_panels(*weight.shape)
        kernels.pack(weight, panels)
        return Panels(len(weight), panels, bias, kernels)
    return Packed(weight, bias) if layout == "packed" else Plain(weight, bias)
