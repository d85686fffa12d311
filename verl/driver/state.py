"""TrainState: everything that may influence a step, in one place (DESIGN section 6, resume in three grades).

policy      weights, optimizer, optimizer step        cursor      epoch, permutation, position, given back
critic      the same, where there is one              groups      in flight, with their ended trajectories
scheduler   versions, slots, deadlines, budget        rng         Python, numpy, torch
controllers KL coefficient, whether the critic is warm
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.checkpoint.store import CheckpointStore
from verl.checkpoint.tensors import load_state, save_state
from verl.data.source import Draw
from verl.types import Group, Invalid, Sampling, Score, Segment, Trajectory

if TYPE_CHECKING:
    from verl.driver.run import Run

FORMAT = 1


async def capture(run: Run, number: int) -> dict[str, Any]:
    """The state after `number` steps."""
    import torch

    return {
        "format": FORMAT,
        "step": number,
        "version": run.version,
        "policy": await run.call(run.actor, "state"),
        **({"critic": await run.call(run.critic, "state")} if run.critic is not None else {}),
        "cursor": run.player.cursor.state(),
        "scheduler": run.player.scheduler.state(),
        "controllers": {"kl_coef": run.kl_coef, "critic_warm": run.critic_warm},
        "groups": [_pack_group(g, draw, complete) for g, draw, complete in run.player.in_flight()],
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        },
        "history": run.history[-200:],
    }


def write(
    store: CheckpointStore,
    number: int,
    state: Mapping[str, Any],
    export: Callable[[Path], None],
    needed_bytes: int,
    best: float | None,
) -> None:
    """One transaction: state and a ready Hugging Face folder."""

    def fill(path: Path) -> None:
        save_state(path / "state", dict(state))
        export(path / "hf")

    store.save(number, fill, needed_bytes=needed_bytes, meta={"metric": best, "version": state["version"]})


def read(path: Path) -> dict[str, Any]:
    state = load_state(path / "state")
    if state["format"] != FORMAT:
        raise ValueError(f"{path} was written in format {state['format']}; this version reads format {FORMAT}")
    return state


async def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Weights, optimizer, cursor, scheduler, controllers and RNGs as they were."""
    import torch

    await run.call(run.actor, "load_state", state["policy"])
    run.player.cursor.load_state(state["cursor"])  # type: ignore[attr-defined]
    if run.critic is not None:
        if "critic" not in state:
            raise ValueError(
                "the checkpoint has no critic: it was written by an algorithm without one; start a new run from its hf folder"
            )
        await run.call(run.critic, "load_state", state["critic"])
    run.kl_coef = float(state["controllers"]["kl_coef"])
    run.critic_warm = bool(state["controllers"].get("critic_warm", False))
    run.history = list(state["history"])
    random.setstate(_as_tuple(state["rng"]["python"]))
    np.random.set_state(state["rng"]["numpy"])
    torch.set_rng_state(state["rng"]["torch"])


def resume_groups(run: Run, state: Mapping[str, Any]) -> None:
    """Groups in flight: complete ones are there as they were, the others go on under the restored version."""
    saved = {g["group_id"]: g for g in state["groups"]}
    found = run.player.scheduler.load_state(state["scheduler"], run.player._clock())
    for group_id in (*found.complete, *found.running):
        group, draw = _unpack_group(saved[group_id], run)
        run.player.resume(group, draw, complete=group_id in found.complete)
    for group_id in found.dropped:
        if group_id in saved:
            run.player.cursor.give_back(Draw(**saved[group_id]["draw"]))


def _pack_group(group: Group, draw: Any, complete: bool) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task_id": group.task.task_id,
        "draw": {"epoch": draw.epoch, "draw": draw.draw, "index": draw.index},
        "admitted_version": group.admitted_version,
        "complete": complete,
        "trajectories": [_pack_trajectory(t) for t in group.trajectories],
    }


def _unpack_group(saved: Mapping[str, Any], run: Run) -> tuple[Group, Draw]:
    draw = Draw(**saved["draw"])
    task = run.player._tasks[draw.index]
    if task.task_id != saved["task_id"]:
        raise ValueError(
            f"row {draw.index} of the training data is {task.task_id}, but it was {saved['task_id']} when the checkpoint was "
            "written: the data changed; restore it, or start a new run"
        )
    group = Group(
        group_id=saved["group_id"],
        task=task,
        epoch=draw.epoch,
        draw=draw.draw,
        admitted_version=saved["admitted_version"],
        trajectories=tuple(_unpack_trajectory(t) for t in saved["trajectories"]),
    )
    return group, draw


def _pack_trajectory(t: Trajectory) -> dict[str, Any]:
    reward = t.reward
    return {
        "trajectory_id": t.trajectory_id,
        "group_id": t.group_id,
        "task_id": t.task_id,
        "index": t.index,
        "purpose": t.purpose,
        "attempt": t.attempt,
        "stop_reason": t.stop_reason,
        "outcome": t.outcome,
        "turns": t.turns,
        "wall_s": t.wall_s,
        "error": t.error,
        "sampling": asdict(t.sampling),
        "score": [reward.value, dict(reward.components)] if isinstance(reward, Score) else None,
        "invalid": [reward.reason, reward.detail] if isinstance(reward, Invalid) else None,
        "segments": [
            {"ids": s.ids, "source": s.source, "logprobs": s.logprobs, "version": s.version} for s in t.segments
        ],
    }


def _unpack_trajectory(saved: Mapping[str, Any]) -> Trajectory:
    sampling: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved["sampling"].items()}
    reward: Score | Invalid | None = None
    if saved["score"] is not None:
        reward = Score(saved["score"][0], saved["score"][1])
    elif saved["invalid"] is not None:
        reward = Invalid(*saved["invalid"])
    plain = {k: v for k, v in saved.items() if k not in ("sampling", "score", "invalid", "segments")}
    return Trajectory(
        **plain, sampling=Sampling(**sampling), reward=reward, segments=tuple(Segment(**s) for s in saved["segments"])
    )


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value
