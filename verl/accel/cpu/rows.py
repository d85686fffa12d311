"""The rows of the table of operations for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from verl.accel.cpu import nf4, training
from verl.accel.cpu.kernels import Kernels, load_kernels
from verl.accel.cpu.linear import Packed, PanelProducts
from verl.accel.linear import SingleProducts
from verl.accel.operations import COMPILED, Call, Kernel, Use
from verl.nn.precision import native_bf16

ONEDNN = "oneDNN"
"""The name of this library in the table."""


def _sample(logits: Tensor, temperature: Tensor, uniform: Tensor, *, kernels: Kernels) -> Tensor:
    ids, logprobs = kernels.sample(logits, temperature.numpy(), uniform.numpy())
    return torch.stack((torch.from_numpy(ids).double(), torch.from_numpy(logprobs).double()))


def _products(kernels: Kernels) -> Call:
    return partial(PanelProducts, kernels)


def _packed(use: Use) -> Call | str:
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this torch has no oneDNN linear"
    if use.dtype == torch.bfloat16 and not native_bf16(use.device):
        return "this CPU only emulates bfloat16"
    if use.dtype == torch.float32 and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return "slower than torch's product on a CPU without AVX-512"
    return partial(SingleProducts, Packed, keeps=False)


def _multiplied(use: Use) -> Call | str:
    kernels = load_kernels(use.dtype)
    if isinstance(kernels, str):
        return kernels
    return _products(kernels) if kernels.multiplies else "this CPU has no tiles (AMX) that multiply bfloat16"


def _row(operation: str, made: Callable[[Kernels], Call], tolerance: dict[torch.dtype, float]) -> Kernel:
    def load(use: Use) -> Call | str:
        kernels = load_kernels(use.dtype)
        return kernels if isinstance(kernels, str) else made(kernels)

    return Kernel(operation, COMPILED, load, tolerance, ("cpu",))


def _both(float32: float) -> dict[torch.dtype, float]:
    return {torch.float32: float32, torch.bfloat16: 2e-2}


KERNELS = (
    _row("rms_norm", lambda kernels: kernels.rms_norm, _both(2e-6)),
    _row("gated", lambda kernels: kernels.gated, _both(2e-5)),
    _row("sample", lambda kernels: partial(_sample, kernels=kernels), {torch.float32: 3e-5, torch.bfloat16: 3e-5}),
    _row("slot_attention", lambda kernels: kernels.attend, {torch.float32: 8e-6, torch.bfloat16: 8e-2}),
    _row("delta_step", lambda kernels: kernels.delta_step, {torch.float32: 5e-6}),
    Kernel("linear", COMPILED, _multiplied, {torch.float32: 2e-4, torch.bfloat16: 4e-2}, ("cpu",)),
    _row("quantised_linear", lambda kernels: partial(nf4.quantised_linear, kernels=kernels), {torch.float32: 1e-5}),
    _row("quantised_back", lambda kernels: partial(nf4.quantised_back, kernels=kernels), {torch.float32: 2e-5}),
    Kernel("linear", ONEDNN, _packed, {torch.float32: 2e-4, torch.bfloat16: 4e-2}, ("cpu",)),
    _row(
        "trained_attention",
        lambda kernels: partial(training.compiled_attention, kernels=kernels),
        {torch.float32: 2e-6},
    ),
    _row("trained_rms_norm", lambda kernels: partial(training.compiled_rms_norm, kernels=kernels), _both(2e-6)),
    _row("trained_swiglu", lambda kernels: partial(training.compiled_swiglu, kernels=kernels), _both(2e-6)),
    _row(
        "trained_rotation", lambda kernels: partial(training.compiled_rotation, kernels=kernels), {torch.float32: 2e-6}
    ),
    _row(
        "low_rank_gradients",
        lambda kernels: partial(training.compiled_low_rank_gradients, kernels=kernels),
        {torch.float32: 2e-4},
    ),
)
