"""The run directory: claim it for one process, find the checkpoint to continue from, and check that it is of this
run."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from verl.checkpoint.latest import find_latest
from verl.checkpoint.store import CheckpointStore
from verl.config.cluster import TRAINS
from verl.config.load import Resolved, dump_config
from verl.config.model_files import find_model_folder, read_weight_headers
from verl.config.proven import SECTIONS, unproven
from verl.config.schema import Config
from verl.config.worker_python import other_torch
from verl.driver.identity import Identity, compare, identity_of
from verl.driver.state import DriverState, read_state
from verl.errors import Refused
from verl.model_engine.lora_spec import trained_by
from verl.track.events import next_attempt
from verl.track.files import remove_leftovers, write_atomic

_NAMED, _NUMBER = re.compile(r"^(model|transformer)\."), re.compile(r"\d+")
"""Patterns for an optional prefix of tensor names and for the number of a layer in them."""


class CheckpointWriter(Protocol):
    """Writes checkpoints, as `CheckpointStore` does."""

    def save(
        self, step: int, write: Callable[[Path], None], *, needed_bytes: int, meta: Mapping[str, Any] | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class RunDir:
    """A claimed run directory: no other process writes into it while `lock` is open."""

    path: Path
    """The folder."""
    store: CheckpointWriter
    """Writes the checkpoints."""
    lock: IO[str]
    """The lock file, held until the run ends."""
    attempt: int
    """The number of this start of the run."""
    identity: Identity
    """Compared with that of a checkpoint."""
    resumed: Path | None = None
    """The checkpoint to continue from."""
    state: DriverState | None = None
    """The driver's state in that checkpoint."""
    parent: str = ""
    """Path of the checkpoint that a fork began from; "" if the run is no fork."""
    changed: Mapping[str, list[str]] = field(default_factory=dict)
    """Key -> [old, new] since that checkpoint."""
    notes: tuple[str, ...] = ()
    """Lines about all this for the user."""
    hide: Callable[[str], str] = str
    """Removes secrets from a text that is recorded."""
    records: Path | None = None
    """The folder for the records of a driver that is not the first."""

    setup_lines: tuple[str, ...] = ()
    """Lines for the report about loops and graders, each with a part and how it runs."""

    def begun(self, total_steps: int) -> dict[str, Any]:
        """Return the data of this attempt's first event."""
        return {
            "checkpoint": str(self.resumed or ""),
            "parent": self.parent,
            "changed": dict(self.changed),
            "notes": list(self.notes),
            "told": list(self.setup_lines),
            "total_steps": total_steps,
        }


PARTS: Mapping[str, tuple[str, ...]] = {"train": SECTIONS, "eval": ("rollout",)}
"""The sections of the backends that a command uses. Commands without an entry train a model and sample nothing."""


def open_run_dir(resolved: Resolved, command: str, contents: Mapping[str, str] | None = None) -> RunDir:
    """Claim the run directory and find the checkpoint to resume from. A refused start leaves an earlier run as it was.
    contents: further content of keys, beside their files, for the identity."""
    config, identity = resolved.config, identity_of(resolved, command)
    for key, more in (contents or {}).items():
        identity.contents[key] = f"{identity.contents.get(key, '')}\n{more}"
    run_dir = Path(config.run.root_dir) / config.run.name
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = _lock(run_dir)
    try:
        checkpoint, notes = _resume_path(config, run_dir)
        state = read_state(checkpoint) if checkpoint is not None else None
        parent = ""
        changed: dict[str, list[str]] = {}
        if checkpoint is not None and config.run.resume != "auto":  # `auto` compares the identities
            _refuse_another_model(config, checkpoint)
        if checkpoint is None and command != "eval" and (run_dir / "metrics.jsonl").exists():
            notes += [f"{run_dir}: an earlier attempt left no checkpoint; this one starts at the beginning"]
        if checkpoint is not None and state is not None:
            parent, changed = _as_itself(config, run_dir, checkpoint, state, identity)
            if command in TRAINS:
                _refuse_other_untrained(config, checkpoint, changed)
            notes += _change_notes(run_dir, state, parent, changed)
    except BaseException:
        lock.close()
        raise
    remove_leftovers(run_dir)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    store = CheckpointStore(
        run_dir / "checkpoints",
        keep_last=config.run.keep_last_checkpoints,
        keep_every_steps=config.run.keep_every_steps,
        keep_best="metric" if config.run.keep_best else None,
    )
    attempt = next_attempt(run_dir)
    if attempt == 0:
        notes += unproven(config, PARTS.get(command, ("model",)))
    notes += other_torch(config)
    found = (checkpoint, state, parent, changed, tuple(notes), resolved.hide)
    return RunDir(run_dir, store, lock, attempt, identity, *found)


def write_config(run_dir: Path, attempt: int, resolved: Resolved) -> None:
    """Write the configuration of this attempt under its number and as `config.yaml`."""
    text = dump_config(resolved).encode()
    write_atomic(config_path(run_dir, attempt), text)
    write_atomic(run_dir / "config.yaml", text)


def config_path(run_dir: Path, attempt: int) -> Path:
    return run_dir / "configs" / f"attempt_{attempt:04d}.yaml"


def is_mine(run_dir: Path) -> bool:
    """Return whether this process was the last to claim the run directory."""
    lock = run_dir / ".lock"
    return lock.is_file() and lock.read_text() == str(os.getpid())


def _resume_path(config: Config, run_dir: Path) -> tuple[Path | None, list[str]]:
    wanted = config.run.resume
    if wanted == "never":
        if CheckpointStore(run_dir / "checkpoints", read_only=True).steps() or (run_dir / "metrics.jsonl").exists():
            raise Refused(f"run.resume=never, but {run_dir} holds an earlier run; choose another run.name or remove it")
        return None, []
    if wanted == "auto":
        return find_latest(run_dir)
    path = Path(wanted)
    if not (path / "manifest.json").is_file():
        raise Refused(f"run.resume={wanted}: not a checkpoint (no manifest.json); give a checkpoints/step_N folder")
    own, notes = find_latest(run_dir)
    if own is None or own.resolve() == path.resolve():
        return path, notes
    if read_state(own).parent == str(path.resolve()):  # the fork was interrupted: it continues
        return own, notes
    if path.resolve().parent != (run_dir / "checkpoints").resolve():
        raise Refused(f"run.resume={wanted}: {run_dir} holds a run of its own; a fork needs another run.name")
    return path, notes


def _refuse_another_model(config: Config, checkpoint: Path) -> None:
    """Raise ValueError if tensors of both models differ in shape, or if one model has layers that the other does not
    have, by the headers of their files. Some model families have other names in files than in modules; they are
    compared where names agree."""
    if not any((checkpoint / "hf").glob("*.safetensors")):
        return
    folders = (checkpoint / "hf", find_model_folder(config.model.path))
    saved, ours = ({_NAMED.sub("", n): h.shape for n, h in read_weight_headers(folder).items()} for folder in folders)
    known = {_NUMBER.sub("#", name) for name in saved} & {_NUMBER.sub("#", name) for name in ours}
    differ = [
        f"{name} is {list(saved.get(name, ())) or 'not'} there and {list(ours.get(name, ())) or 'not'} here"
        for name in sorted({*saved, *ours})
        if saved.get(name) != ours.get(name) and _NUMBER.sub("#", name) in known
    ]
    if differ:
        raise Refused(
            f"run.resume={checkpoint} is of another model than model.path={config.model.path}: {len(differ)} tensors "
            f"differ, e.g. {'; '.join(differ[:3])}; set model.path={folders[0]}, or leave run.resume out"
        )


def _as_itself(
    config: Config, run_dir: Path, checkpoint: Path, state: DriverState, now: Identity
) -> tuple[str, dict[str, list[str]]]:
    """Return the parent and the changed keys. Raise ValueError if `auto` would continue another run."""
    others, changed = compare(state.identity, now)
    wanted = Path(config.run.resume)
    if config.run.resume != "auto" and checkpoint.resolve() == wanted.resolve():
        for line in others:
            key, _, values = line.partition(": ")
            changed[key] = values.split(" -> ", 1)
        return str(checkpoint.resolve()), changed
    if others:
        ways = f"run.name=NEW for a run of its own, or run.name=NEW run.resume={checkpoint} for a fork of this one"
        lines = "\n".join(f"  {line}" for line in others)
        raise Refused(
            f"{run_dir} holds another run, which was left as it is. What differs (old -> new):\n{lines}\n"
            f"Fix: the old values to go on, {ways}"
        )
    return state.parent, changed


def _refuse_other_untrained(config: Config, checkpoint: Path, changed: Mapping[str, list[str]]) -> None:
    """Raise Refused for a fork whose weights that are not trained are not those of its checkpoint, which lacks them:
    it has other frozen parts, or another model below them or below its factors. changed: {key: [old, new]}."""
    spec, own = trained_by(config.model.lora), checkpoint / "hf"
    if spec is None and "model.freeze" in changed:
        was, now = (f"model.freeze=[{', '.join(json.loads(value))}]" for value in changed["model.freeze"])
        raise Refused(
            f"run.resume={checkpoint} was saved with {was}, and this run has {now}: set {was}, or begin another run "
            f"with model.path={own} and without run.resume"
        )
    if not (spec or config.model.freeze) or "model.path" not in changed:
        return
    if (folder := find_model_folder(config.model.path)).resolve() != own.resolve():
        lacks, start = ("the base of its factors", "model.lora.path") if spec else ("frozen parts", "model.path")
        was = json.loads(changed["model.path"][0])
        raise Refused(
            f"model.path={folder}: run.resume={checkpoint} was trained with another model and lacks {lacks}: set "
            f"model.path={was}, or begin another run with {start}={own} and without run.resume"
        )


def _change_notes(run_dir: Path, state: DriverState, parent: str, changed: Mapping[str, list[str]]) -> list[str]:
    notes = []
    if parent and parent != state.parent:
        notes.append(f"{run_dir} is a fork of {parent}")
    if changed:
        what = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
        notes.append(f"changed since step {state.step}: {what}")
    return notes


def _lock(run_dir: Path) -> IO[str]:
    """Lock a run directory for one process; the lock ends with the process."""
    handle = open(run_dir / ".lock", "a+")  # noqa: SIM115 - held for the life of the run
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise Refused(f"{run_dir} is in use by process {holder}; stop it, or choose another run.name") from e
    return handle
