"""Descriptions of operations and of the kernels that compute them: the columns of the table in `table.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[..., Any]
"""The function of a kernel; its arguments and results are those of the operation."""


COMPILED = "kernels.c"
"""The name, in the table, of the kernels that a C compiler makes for a CPU."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of one call."""

    bytes: int
    """Bytes that must be read from and written to memory."""
    flops: int
    """Floating-point operations; a multiply-add counts twice."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A computation that may have several kernels, which all take the same arguments."""

    name: str
    """The name by which callers choose a kernel."""
    meaning: str
    """Arguments and results, with shapes."""
    cost: Callable[..., Cost]
    """The least work of a call, from the arguments of that call; tensors on the device `meta` are enough."""


@dataclass(frozen=True, slots=True)
class Use:
    """The device, the dtype and the model sizes with which an operation will run."""

    device: torch.device
    dtype: torch.dtype
    """The dtype of the activations."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the model that a kernel may not support, such as `head_dim`."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the table: one implementation of an operation."""

    operation: str
    """The name of the operation."""
    name: str
    """The name of its library, the same in all rows of that library."""
    load: Callable[[Use], Call | str]
    """Returns the function, or the reason why this machine or model does not have it. It compiles or imports on use."""
    tolerance: Mapping[torch.dtype, float]
    """The dtypes that it computes, and the largest absolute and relative error in each of them, against float64."""
    devices: tuple[str, ...] = ()
    """The types of devices that it runs on; empty: all."""
    traffic: float = 1.0
    """Bytes that it moves, as a multiple of the least bytes of the operation."""
    launches: int = 1
    """Launches of a call on a GPU, at most."""

    def serves(self, use: Use) -> bool:
        """Return True if the row is for this type of device and this dtype."""
        return use.dtype in self.tolerance and (not self.devices or use.device.type in self.devices)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that was chosen for an operation."""

    kernel: Kernel
    call: Call
    passed_over: Mapping[str, str]
    """The names of better kernels for this device and dtype that could not be used, and why."""
