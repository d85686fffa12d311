"""One run directory for many drivers (torchrun): the first driver owns it, and all write shards into its
checkpoints."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint.store import is_late
from verl.config.load import Resolved
from verl.driver.checkpointer import SLOW_BYTES_PER_S
from verl.driver.driver_host import driver_host
from verl.driver.identity import compare, identity_of
from verl.driver.run_dir import CheckpointWriter, RunDir, open_run_dir
from verl.driver.state import read_state
from verl.errors import Refused
from verl.leftovers import own_folder
from verl.workers.answers import failed_answer
from verl.workers.group import Drivers, WorkerDied


def open_together(
    resolved: Resolved, command: str, drivers: Drivers, contents: Mapping[str, str] | None = None
) -> RunDir:
    """Open the run directory with `open_run_dir` in the first driver; the others use its result, and keep their records
    in a temporary folder. Raise ValueError if a driver runs another command or configuration, or sees another
    folder."""
    claimed: RunDir | None = None
    error: Exception | None = None
    if drivers.number == 0:
        try:
            claimed = open_run_dir(resolved, command, contents)
        except (ValueError, OSError) as e:
            error = e
    found = None
    if claimed is not None:
        home = driver_host(claimed.path)
        found = (home, claimed.path, claimed.attempt, claimed.identity, claimed.resumed, claimed.parent)
    first, failed = drivers.gather((found, error)).result()[0]
    if failed is not None:
        raise failed
    if claimed is not None:
        return replace(claimed, store=SharedStore(claimed.store, drivers))
    assert first is not None
    home, path, attempt, identity, resumed, parent = first
    home.enter()
    if others := compare(identity, identity_of(resolved, command))[0]:
        raise Refused(f"rank {drivers.number} runs something else than rank 0:\n" + "\n".join(others))
    records, _ = own_folder(Path(tempfile.gettempdir()), "verl-records-")
    atexit.register(shutil.rmtree, records, ignore_errors=True)
    return RunDir(
        path,
        SharedStore(None, drivers),
        open(records / ".lock", "a+"),
        attempt,
        identity,
        resumed,
        read_state(resumed) if resumed is not None else None,
        parent,
        hide=resolved.hide,
        records=records,
    )


class SharedStore:
    """A checkpoint store that the first driver owns. All drivers write into one checkpoint, and all get its outcome.
    They exchange messages apart from the calls of training, which may continue meanwhile: for the folder, after each
    has written its part, and after the checkpoint has its name."""

    def __init__(self, store: CheckpointWriter | None, drivers: Drivers) -> None:
        self._store, self._drivers = store, drivers

    def save(
        self, step: int, write: Callable[[Path], None], *, needed_bytes: int, meta: Mapping[str, Any] | None = None
    ) -> None:
        """Save a checkpoint, as `CheckpointStore.save` does. An error that stops one rank from writing its part is
        raised by all ranks. The death or delay of another rank is raised at once, since that rank takes part in no
        exchange."""
        meet = partial(self._drivers.meet, timeout_s=needed_bytes / SLOW_BYTES_PER_S)
        error: BaseException | None = None
        of_all: BaseException | None = None
        begun = False

        def written(path: Path) -> None:
            nonlocal of_all
            mine = None
            try:
                write(path)
            except Exception as e:
                if _of_another(e):
                    raise
                mine = failed_answer(e).error
            if (of_all := next((e for e in meet(mine) if e is not None), None)) is not None:
                raise of_all

        def fill(path: Path) -> None:
            nonlocal begun
            begun = True
            meet(path)
            written(path)

        try:
            if self._store is not None:
                self._store.save(step, fill, needed_bytes=needed_bytes, meta=meta)
            elif (path := meet(None)[0]) is not None:
                written(path)
        except Exception as e:
            if _of_another(e) or (e is of_all and not isinstance(e, OSError)):  # the first driver raises it too
                raise
            error = failed_answer(e).error
        if self._store is not None and not begun:
            meet(None)
        if (found := meet(error)[0]) is not None:
            raise found


def _of_another(e: Exception) -> bool:
    return isinstance(e, WorkerDied) or (isinstance(e, OSError) and is_late(e))
