"""Triton's interpreter: bf16 products as a GPU computes them, and what kernels read, write and launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from on_device import DEVICE, ON_CPU
from torch.utils._python_dispatch import TorchDispatchMode

from verl.accel.cuda.rows import KERNELS
from verl.accel.operations import Use
from verl.rollout.native.ops import DecodeOps


def fix_bf16_products(patch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.9 keeps bf16 as its bits in uint16, and multiplies these integers in tl.dot."""
    if not ON_CPU:
        return
    from triton import language as tl
    from triton.runtime import interpreter

    def as_float32(of: Any) -> Any:
        if of.dtype.scalar != tl.bfloat16:
            return of
        return interpreter.TensorHandle((of.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, as_float32(a), as_float32(b), *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def round_to_bf16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 to bf16, where a GPU rounds to the nearest."""
    from triton import language as tl
    from triton.runtime import interpreter

    converted = interpreter.InterpreterBuilder.cast_impl

    def create_fp_trunc(self: Any, of: Any, kind: Any) -> Any:
        if (of.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return converted(self, of, kind)
        rounded = torch.from_numpy(np.array(of.data, np.float32)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)

    patch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", create_fp_trunc)


class Launches(TorchDispatchMode):
    """Records what would be launched on a GPU within the block: operations of torch, and kernels by their names."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import GridExecutor

        super().__init__()
        self.names: list[str] = []
        self._within = 0
        plain = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(executor.fn.__name__)
            self._within += 1  # the interpreter copies arguments
            try:
                return plain(executor, *args, **kwargs)
            finally:
                self._within -= 1

        patch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        memory = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        made = [r for r in (result if isinstance(result, list | tuple) else [result]) if isinstance(r, torch.Tensor)]
        view = not function._schema.is_mutable and all(r.untyped_storage().data_ptr() in memory for r in made)
        if not (self._within or view or "empty" in name):
            self.names.append(name)
        return result


class Traffic:
    """Counts the bytes of the distinct addresses that each launch reads and writes, which pass the caches once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

        self.bytes = 0
        self._seen: dict[tuple[str, int], list[np.ndarray]] = {}
        launch = GridExecutor.__call__
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def note(kind: str, pointers: Any, mask: Any) -> None:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            self._seen.setdefault((kind, size), []).append(pointers.data[mask.data])

        def counted_load(builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            note("read", pointers, mask)
            return load(builder, pointers, mask, *rest, **named)

        def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            note("written", pointers, mask)
            return store(builder, pointers, value, mask, *rest, **named)

        def counted_launch(executor: Any, *args: Any, **named: Any) -> Any:
            self._seen.clear()
            result = launch(executor, *args, **named)
            for (_, size), addresses in self._seen.items():
                self.bytes += size * len(np.unique(np.concatenate([a.ravel() for a in addresses])))
            return result

        patch.setattr(GridExecutor, "__call__", counted_launch)
        patch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", counted_store)


def interpreted_ops() -> DecodeOps:
    """The rows of Triton for a decode step, which the interpreter runs on a CPU."""
    calls = {row.operation: row.load(Use(DEVICE, torch.float32)) for row in KERNELS}
    return DecodeOps(**{field.name: calls[field.name] for field in fields(DecodeOps)})  # type: ignore[arg-type]


def recorded_launches(patch: pytest.MonkeyPatch, module: Any, names: Sequence[str]) -> list[str]:
    """Replace these kernels of a module by doubles that compute nothing. Return a list to which each adds its name when
    it is launched."""
    launched = list[str]()

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **sizes: launched.append(self.name)

    for name in names:
        patch.setattr(module, name, Kernel(name))
    return launched
