"""The state of a role on disk: a snapshot that a thread writes while training continues, and Hugging Face folders."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from verl.checkpoint.hf import HfExport
from verl.model_engine.base import Persists, Ranks
from verl.workers.role_publishing import is_first

if TYPE_CHECKING:  # it imports torch.distributed, which a process without an engine does not need
    from verl.model_engine.snapshot import Snapshot


class RoleSaving:
    """Writes the state of a role to disk, one snapshot at a time. role: the role's name in messages · hf_export: None
    for a role that is not exported."""

    def __init__(self, role: str, engine: Persists, hf_export: HfExport | None, ranks: Ranks) -> None:
        self._role, self._engine, self._hf_export, self._ranks = role, engine, hf_export, ranks
        self.kept: Snapshot | None = None  # a copy that is not yet being written
        self.writing: Future[None] | None = None

    def snapshot(self) -> None:
        """Copy the present state to host memory, for `write`."""
        self.kept = self._engine.snapshot()

    def write(self, path: Path, hf_path: Path | None) -> None:
        """Start to write the snapshot in a thread: the state to `path`, the weights to `hf_path`."""
        assert self.kept is not None, "nothing was kept to be written"
        snapshot, self.kept = self.kept, None
        before, self.writing = self.writing, Future()
        args = (before, self.writing, snapshot, path, hf_path)
        threading.Thread(target=self._write, args=args, daemon=True).start()

    def written(self) -> bool:
        """Return True once the snapshot is on disk. Raise the error of a failed write."""
        assert self.writing is not None
        if self.writing.done():
            self.writing.result()
        return self.writing.done()

    def _write(
        self, before: Future[None] | None, done: Future[None], snapshot: Snapshot, path: Path, hf_path: Path | None
    ) -> None:
        try:
            # a save that failed on another rank may end here a moment later, at its own deadline
            if before is not None:
                wait([before])
            snapshot.save(path)
            if hf_path is not None:
                self.export(hf_path, snapshot.weights())
            done.set_result(None)
        except BaseException as e:
            done.set_exception(e)

    def export(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write a complete Hugging Face folder of these weights, or that of an adapter, which all ranks gather."""
        assert self._hf_export is not None, f"{self._role} is not exported"
        try:
            if is_first(self._ranks):
                self._hf_export.write(path, weights, self._engine.exported_set)
        finally:
            for _ in weights:  # all ranks gather the weights, even if the first one cannot write
                pass
