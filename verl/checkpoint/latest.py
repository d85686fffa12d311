"""Which checkpoint of a run counts, and what a person should know of the others. Torch-free."""

from __future__ import annotations

from pathlib import Path

from verl.checkpoint.store import CheckpointStore
from verl.track.events import read_events
from verl.track.log import Note


def find_latest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a line for each thing that is not as it was saved."""
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
    """Return a warning where a run has done more steps than are configured now."""
    if step <= total_steps:
        return []
    return [f"warning: run.total_steps={total_steps}, but {run_dir} has done {step}: no step is left, none is undone"]
