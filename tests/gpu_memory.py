"""A GPU's memory in a file, for verl/weight_sync/device.py: what is written to it is there once its owner has settled,
and what is read of it once the reader has."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.weight_sync import device


class FakeGpu:
    """read: what readers have settled, in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []  # the owner's, and what others see
        self._opened: dict[bytes, torch.Tensor] = {}
        self.read: list[torch.Tensor] = []

    def allocated(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def handle_of(self, memory: torch.Tensor) -> bytes:
        path = self._folder / f"memory-{len(self._written)}"
        path.write_bytes(bytes(memory.numel()))
        self._written.append((memory, self._mapped(path)))
        return str(path).encode()

    def open_handle(self, handle: bytes) -> torch.Tensor:
        if handle not in self._opened:
            self._opened[handle] = self._mapped(Path(handle.decode()))
        return self._opened[handle]

    def synchronize(self, memory: torch.Tensor) -> None:
        owned = [seen for of, seen in self._written if of is memory]
        for seen in owned:
            seen.copy_(memory)
        self.read += [] if owned else [memory]

    @staticmethod
    def _mapped(path: Path) -> torch.Tensor:
        with path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def fake_gpu(patch: pytest.MonkeyPatch) -> FakeGpu:
    made: Any = FakeGpu(Path(tempfile.mkdtemp(prefix="verl-test-")))
    for name in ("allocated", "handle_of", "open_handle", "synchronize"):
        patch.setattr(device, name, getattr(made, name))
    return made
