"""The conditions under which the Triton kernels run: requirements on the device and on the sizes of the model."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

LEAST_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
MAX_HIDDEN = 16384  # a row of a norm is one block
LEAST_PAGE = 16


def missing(device: torch.device, sizes: Mapping[str, int], least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Return why the kernels do not run on `device` for a model of these sizes: `head_dim`, `hidden`, and tokens per
    `page`; None if they do. `least`: the compute capability that they need. On a CPU they run in Triton's interpreter,
    if the variable TRITON_INTERPRET is 1."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it is part of every CUDA build of torch on Linux"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the device is a CPU"
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < least:
            return f"the card has compute capability {found[0]}.{found[1]}, below {least[0]}.{least[1]}"
        if (reason := _cannot_build()) is not None:
            return reason
    dim, hidden, page = sizes.get("head_dim", 2), sizes.get("hidden", 1), sizes.get("page", LEAST_PAGE)
    if dim > MAX_HEAD_DIM or dim % 2:
        return f"head_dim={dim}: the kernels compute even sizes up to {MAX_HEAD_DIM}"
    if hidden > MAX_HIDDEN:
        return f"hidden_size={hidden}: the kernels compute up to {MAX_HIDDEN}"
    if page < LEAST_PAGE or page & (page - 1):
        return f"pages of {page} tokens: the kernels read powers of two from {LEAST_PAGE}"
    return None


def _cannot_build() -> str | None:
    """Return why Triton cannot compile the C code by which it launches kernels, or None."""
    given = os.environ.get("CC")
    if given is not None and shutil.which(given) is None:
        return f"CC={given} is not a program, and Triton compiles C with it: install gcc and unset CC, or correct it"
    if given is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler: install gcc or set CC"
    scheme = sysconfig.get_default_scheme()  # as Triton chooses it: Debian's own one names another folder
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.exists():
        return f"{header} is missing, which Triton compiles with: install Python's headers (python3-dev)"
    return None
