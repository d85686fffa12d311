"""A model engine on a CPU that computes as on a GPU: by the facts of one, and by Triton's kernels in its interpreter.
Flash kernels are replaced by the same operation in plain torch."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import Any

import pytest
import torch
from interpreted import fix_bf16_products, round_to_bf16

from verl.accel import devices, trained
from verl.accel.cuda.rows import KERNELS, TRITON
from verl.accel.operations import Call, Use
from verl.nn import attention, fused, head_kernels, linear_logprob, linear_teacher

HEAD = ("logit_sums", "logit_gradients")
TRAINED = ("trained_rms_norm", "trained_swiglu", "trained_rotation")


def take_for_card(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Let models be trained as on a GPU. Return the calls of each operation that is computed by a kernel of one."""
    calls = Counter[str]()

    def counted(operation: str, call: Call) -> Call:
        def run(*args: Any, **named: Any) -> Any:
            calls[operation] += 1
            return call(*args, **named)

        return run

    def kernel(operation: str) -> Call:
        (row,) = (row for row in KERNELS if (row.operation, row.name) == (operation, TRITON))
        found = row.load(Use(torch.device("cpu"), torch.float32))
        assert not isinstance(found, str), found
        return counted(operation, found)

    def of_every_dtype(operation: str) -> dict[torch.dtype, Call]:
        return dict.fromkeys((torch.float32, torch.bfloat16), kernel(operation))

    def trained_ops(device: Any, hidden: int, *, recomputes: bool, joint: bool) -> fused.TrainedOps:
        assert not joint
        norms, gates, rotations = (of_every_dtype(name) for name in TRAINED)
        return fused.TrainedOps(norms, gates, rotations, recomputes, {})

    def segments(device: Any, dtype: torch.dtype, head_dim: int) -> Call | None:
        return None if dtype == torch.float32 else counted("trained_attention", trained.trained_attention)

    fix_bf16_products(patch)
    round_to_bf16(patch)
    patch.setattr(devices, "DEVICES", MappingProxyType({**devices.DEVICES, "cpu": devices.DEVICES["cuda"]}))
    patch.setattr(fused, "trained_ops", trained_ops)
    patch.setattr(attention, "segment_kernel", segments)
    head = head_kernels.LogitKernels(kernel("logit_sums"), kernel("logit_gradients"))
    for module in (linear_logprob, linear_teacher):
        patch.setattr(module, "logit_kernels", lambda *use: head)
    return calls
