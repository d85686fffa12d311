"""The driver's state in a checkpoint: small and typed. Models and optimizers are saved by their workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from verl.data.source import Draw
from verl.driver.identity import Identity
from verl.driver.roles import Controllers
from verl.errors import Refused
from verl.track.packed import packed_value, unpacked_value
from verl.types import Group, Invalid, Outcome, Purpose, Sampling, Score, Segment, StopReason, Task, Trajectory

FORMAT = 3
FILE = "driver.msgpack"


class SavedRng(msgspec.Struct):
    """The generators of this process: Python's, numpy's, torch's. verl itself never draws from them; user code may."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy_key: bytes
    numpy_pos: int
    numpy_gauss: tuple[int, float]
    torch: bytes


class SavedTrajectory(msgspec.Struct):
    """A `Trajectory` of its group, field by field; its reward is `score` or `invalid`."""

    trajectory_id: str
    index: int
    purpose: Purpose
    attempt: int
    sampling: Sampling
    segments: tuple[Segment, ...]
    stop_reason: StopReason
    outcome: Outcome
    score: Score | None
    invalid: tuple[str, str] | None
    turns: int
    wall_s: float
    error: str
    branches: tuple[tuple[Segment, ...], ...] = ()
    agent: dict[str, float] = {}
    timeline: tuple[dict[str, Any], ...] = ()


_AS_THEY_ARE = frozenset(SavedTrajectory.__struct_fields__) - {"score", "invalid", "agent", "timeline"}


class SavedGroup(msgspec.Struct):
    """A group that is not trained yet, with its ended trajectories."""

    group_id: str
    task_id: str
    draw: Draw
    admitted_version: int
    complete: bool
    trajectories: tuple[SavedTrajectory, ...]
    row_images: tuple[str, ...] | None = None
    """The references of the images of its row; None in checkpoints of versions whose first prompts had no others."""


class DriverState(msgspec.Struct):
    """The state of a run after `step` steps, without that of its workers: everything that may influence a later
    step."""

    step: int
    rng: SavedRng
    cursor: dict[str, Any]
    history: list[dict[str, float]]
    version: int = 0
    controllers: Controllers | None = None
    scheduler: dict[str, Any] | None = None
    groups: tuple[SavedGroup, ...] = ()
    identity: Identity = msgspec.field(default_factory=Identity)
    parent: str = ""
    """The checkpoint of another run that this run began from."""
    format: int = FORMAT


def write_state(path: Path, state: DriverState) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / FILE).write_bytes(msgspec.msgpack.encode(state, enc_hook=packed_value))


def read_state(checkpoint: Path) -> DriverState:
    """Read the state in a checkpoint folder. Raise ValueError if this version of verl cannot continue from it."""
    path = checkpoint / "state" / FILE
    if not path.is_file():
        raise Refused(
            f"{checkpoint} was written by an earlier version of verl, whose state this one cannot read; start a new "
            "run from "
            f"its weights: model.path={checkpoint / 'hf'} and another run.name"
        )
    try:
        state = msgspec.msgpack.decode(path.read_bytes(), type=DriverState, dec_hook=unpacked_value)
    except msgspec.MsgspecError as e:
        raise Refused(f"{path} is damaged or of another version of verl ({e}): use another checkpoint") from e
    if state.format != FORMAT:
        fix = f"start a new run from its weights: model.path={checkpoint / 'hf'} and another run.name"
        raise Refused(f"{path} has format {state.format}, this version reads {FORMAT}; {fix}")
    return state


def save_group(group: Group, draw: Draw, complete: bool) -> SavedGroup:
    return SavedGroup(
        group_id=group.group_id,
        task_id=group.task.task_id,
        draw=draw,
        admitted_version=group.admitted_version,
        complete=complete,
        trajectories=tuple(_save_trajectory(t) for t in group.trajectories),
        row_images=tuple(m.reference for m in group.task.media) or group.row_images,
    )


def hidden(group: SavedGroup, hide: Callable[[str], str]) -> SavedGroup:
    """Return the group with secrets removed from the texts that user code returned. A teacher that reads the feedback
    of an attempt from before a resume reads this text."""

    def one(t: SavedTrajectory) -> SavedTrajectory:
        invalid = None if t.invalid is None else (t.invalid[0], hide(t.invalid[1]))
        score = t.score
        if score is not None:
            pred = None if score.pred is None else hide(score.pred)
            score = replace(score, feedback=hide(score.feedback), pred=pred)
        return msgspec.structs.replace(t, error=hide(t.error), invalid=invalid, score=score)

    return msgspec.structs.replace(group, trajectories=tuple(one(t) for t in group.trajectories))


def restore_group(saved: SavedGroup, task: Task) -> Group:
    if task.task_id != saved.task_id:
        raise Refused(
            f"row {saved.draw.index} of the training data is {task.task_id}, but it was {saved.task_id} when the "
            "checkpoint was "
            "written: the data changed; restore it, or start a new run"
        )
    return Group(
        group_id=saved.group_id,
        task=task,
        epoch=saved.draw.epoch,
        draw=saved.draw.draw,
        admitted_version=saved.admitted_version,
        trajectories=tuple(_restore_trajectory(t, saved) for t in saved.trajectories),
        row_images=saved.row_images,
    )


def _save_trajectory(t: Trajectory) -> SavedTrajectory:
    return SavedTrajectory(
        **{name: getattr(t, name) for name in _AS_THEY_ARE},
        score=t.reward if isinstance(t.reward, Score) else None,
        invalid=(t.reward.reason, t.reward.detail) if isinstance(t.reward, Invalid) else None,
        agent=dict(t.agent),
        timeline=tuple(map(dict, t.timeline)),
    )


def _restore_trajectory(saved: SavedTrajectory, group: SavedGroup) -> Trajectory:
    return Trajectory(
        **{name: getattr(saved, name) for name in _AS_THEY_ARE},
        group_id=group.group_id,
        task_id=group.task_id,
        reward=saved.score if saved.invalid is None else Invalid(*saved.invalid),
        agent=saved.agent,
        timeline=saved.timeline,
    )


def rng_state() -> SavedRng:
    import torch

    version, internal, gauss = random.getstate()
    found: Mapping[str, Any] = np.random.get_state(legacy=False)
    return SavedRng(
        python=(version, internal, gauss),
        numpy_key=found["state"]["key"].tobytes(),
        numpy_pos=found["state"]["pos"],
        numpy_gauss=(found["has_gauss"], found["gauss"]),
        torch=torch.get_rng_state().numpy().tobytes(),
    )


def restore_rng(saved: SavedRng) -> None:
    import torch

    random.setstate(saved.python)
    key = np.frombuffer(saved.numpy_key, np.uint32)
    np.random.set_state(("MT19937", key, saved.numpy_pos, *saved.numpy_gauss))
    torch.set_rng_state(torch.from_numpy(np.frombuffer(saved.torch, np.uint8).copy()))
