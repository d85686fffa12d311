"""The images of tools in groups in flight at a checkpoint: their content is in the run's store of recorded media, as
that of the checkpoint. Images of rows are files, which are read again."""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl.driver.state import SavedGroup
from verl.driver.task_media import owner_of_group
from verl.track.files import write_atomic
from verl.transfer_queue.base import MediaStore, copy_media
from verl.types import learned_tokens

_STEP = re.compile(r"step_(\d+)")


def images_of_tools(group: SavedGroup) -> set[str]:
    """Return the references of the images of a group's trajectories that may be trained, without those of its row."""
    found = set[str]()
    for rows in ((t.segments, *t.branches) for t in group.trajectories if t.outcome == "ok"):
        for k, row in enumerate(rows):
            if learned_tokens(row):
                first = 1 if k == 0 and group.row_images is None else 0
                found |= {m.reference for s in row[first:] for m in s.media}
    return found.difference(group.row_images or ())


class HeldImages:
    """Holds the images of the last two states of a run in the queue's store: either may be written as a checkpoint
    after its groups have been trained."""

    def __init__(self, store: MediaStore | None) -> None:
        self._store, self._owners, self._count = store, deque[str](), 0

    def hold(self, groups: Iterable[SavedGroup]) -> None:
        references = set().union(*map(images_of_tools, groups))
        if self._store is None or not (references or self._owners):
            return
        self._count += 1
        self._owners.append(f"state {self._count}")
        self._store.hold(references, self._owners[-1])
        if len(self._owners) > 2:
            self._store.drop([self._owners.popleft()])


class SavedImages:
    """The images of a run's checkpoints. queue: the store of the queue · kept: that of the run, in a folder"""

    def __init__(self, queue: MediaStore | None, kept: MediaStore, checkpoints: Path) -> None:
        self._queue, self._kept, self._checkpoints = queue, kept, checkpoints
        self._steps = self._present()  # checkpoints that may have images
        self._list = checkpoints / "images.json"
        """The steps whose images may be kept, also of a checkpoint that a killed run did not write."""
        with contextlib.suppress(FileNotFoundError):
            kept.drop(map(_owner, {*json.loads(self._list.read_text())} - self._steps))

    def save(self, step: int, groups: Sequence[SavedGroup]) -> None:
        """Keep the images of a checkpoint that will be written, and drop those of checkpoints that were pruned."""
        pruned, self._steps = self._steps - self._present(), self._steps & self._present() | {step}
        if self._queue is None:
            return
        self._kept.drop([*map(_owner, pruned), _owner(step)])
        if references := set().union(*map(images_of_tools, groups)):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomic(self._list, json.dumps(sorted(self._steps)).encode())
            copy_media(self._queue, self._kept, references, _owner(step))

    def restore(self, groups: Sequence[SavedGroup], kept: MediaStore) -> None:
        """Give the queue's store the images of restored groups, which own them until their rows are stored. kept: the
        store of the run that the checkpoint is of."""
        for group in groups:
            if (references := images_of_tools(group)) and self._queue is not None:
                copy_media(kept, self._queue, references, owner_of_group(group.group_id))

    def _present(self) -> set[int]:
        with contextlib.suppress(FileNotFoundError):
            return {int(found[1]) for p in self._checkpoints.iterdir() if (found := _STEP.fullmatch(p.name))}
        return set()


def _owner(step: int) -> str:
    return f"checkpoint {step}"
