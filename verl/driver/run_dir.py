"""The run directory: claimed by one process at a time, and what to continue from."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from verl.checkpoint.store import CheckpointStore
from verl.config.load import Resolved, dump_config
from verl.config.schema import Config


@dataclass(frozen=True, slots=True)
class RunDir:
    """A claimed run directory: nobody else writes here while `lock` is open. resumed: checkpoint to continue from."""

    path: Path
    store: CheckpointStore
    resumed: Path | None
    lock: IO[str]


def open_run_dir(resolved: Resolved) -> RunDir:
    """Claim the run directory and find what to resume from. Refuses a directory that another process uses."""
    config = resolved.config
    run_dir = Path(config.run.root_dir) / config.run.name
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = _claim(run_dir)
    store = CheckpointStore(
        run_dir / "checkpoints",
        keep_last=config.run.keep_last_checkpoints,
        keep_every_steps=config.run.keep_every_steps,
        keep_best="metric" if config.run.keep_best else None,
    )
    resumed = _resume_path(config, store, run_dir)
    (run_dir / "config.yaml").write_text(dump_config(resolved))
    return RunDir(run_dir, store, resumed, lock)


def _resume_path(config: Config, store: CheckpointStore, run_dir: Path) -> Path | None:
    if config.run.resume == "auto":
        return store.latest_valid()
    if config.run.resume == "never":
        if store.latest_valid() is not None or (run_dir / "metrics.jsonl").exists():
            raise ValueError(
                f"run.resume=never, but {run_dir} holds an earlier run; choose another run.name or remove it"
            )
        return None
    path = Path(config.run.resume)
    if not (path / "manifest.json").is_file():
        raise ValueError(
            f"run.resume={config.run.resume}: not a checkpoint (no manifest.json); give a checkpoints/step_N folder"
        )
    return path


def _claim(run_dir: Path) -> IO[str]:
    """One process per run directory: a lock that dies with its holder."""
    handle = open(run_dir / ".lock", "a+")  # noqa: SIM115 - held for the life of the run
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise ValueError(f"{run_dir} is in use by process {holder}; stop it, or choose another run.name") from e
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle
