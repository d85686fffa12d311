"""The checkpoint that a run continues from, and warnings about its other checkpoints. No torch."""

from __future__ import annotations

from pathlib import Path

from verl.checkpoint.store import CheckpointStore
from verl.track.events import read_events
from verl.track.log import Note


def find_latest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint of a run (None: there is none), and a warning for each damaged checkpoint
    or record, and for a saved checkpoint that is missing."""
    notes: list[str] = []
    store = CheckpointStore(run_dir / "checkpoints", read_only=True)
    found = store.latest_valid(note=_warned(notes))
    saved = max((event.step for event in read_events(run_dir, {"saved"}, _warned(notes))), default=0)
    if saved and saved not in store.steps():
        left = f"{found.name} is the newest that is left" if found else "no checkpoint is left"
        notes.append(f"warning: step_{saved} was saved in {store.directory} and is not there any more; {left}")
    return found, notes


def _warned(notes: list[str]) -> Note:
    return lambda text: notes.append(f"warning: {text}")


def beyond(run_dir: str | Path, step: int, total_steps: int) -> list[str]:
    """Return a warning if a run has done more steps than are configured now; else an empty list."""
    if step <= total_steps:
        return []
    return [f"warning: run.total_steps={total_steps}, but {run_dir} has done {step}: no step is left, none is undone"]
