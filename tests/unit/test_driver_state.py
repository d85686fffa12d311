"""The driver's saved state is typed and exact, without pickle; a state that it cannot read is reported in one line."""

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from verl.data.cursor import Draw
from verl.driver.roles import Controllers
from verl.driver.state import (
    FILE,
    FORMAT,
    DriverState,
    SavedGroup,
    SavedTrajectory,
    hidden,
    read_state,
    restore_group,
    restore_rng,
    rng_state,
    save_group,
    write_state,
)
from verl.types import ROUTES, Group, Invalid, Medium, Sampling, Score, Segment, Task, Trajectory

TASK = Task(task_id="t7", index=7, messages=(), prompt_ids=np.array([1, 2]))


def trajectory(index: int, reward, **more) -> Trajectory:
    drawn = {"logprobs": np.array([-0.5, -0.1], np.float32), "source": "sampled"}
    routed = np.arange(12, dtype=np.int8).reshape(2, 3, 2) - 1  # `NO_ROUTE` too
    return Trajectory(
        trajectory_id=f"g/train{index}.0",
        group_id="g",
        task_id="t7",
        index=index,
        purpose="train",
        attempt=0,
        sampling=Sampling(max_tokens=9, temperature=0.7, stop=("x",), stop_token_ids=(3,)),
        segments=(
            Segment(
                ids=np.array([1, 2]), source="prompt", media=(Medium("sha256:cat", 0, 2),), side={ROUTES: routed + 2}
            ),
            Segment(ids=np.array([5, 6]), version=3, side={ROUTES: routed}, **drawn),
            Segment(ids=np.array([8, 9]), version=4, side={ROUTES: routed + 1}, **drawn),
        ),
        stop_reason="eos",
        reward=reward,
        **more,
    )


def state(groups=()) -> DriverState:
    return DriverState(
        step=4,
        version=2,
        rng=rng_state(),
        cursor={"next_draw": 9, "returned": [3]},
        history=[{"loss": float("nan"), "lr": 0.1}],
        controllers=Controllers(0.25, True),
        scheduler={"base": [0, 0]},
        groups=tuple(groups),
    )


def test_a_group_in_flight_comes_back_with_all_that_it_holds(tmp_path: Path) -> None:
    """Side channels (routes also of prompts), media and the version of every span: what a checkpoint loses, a resumed
    step trains without."""
    whole = trajectory(0, Score(0.5, {"acc": 1.0}))
    places = {
        "turn": np.array([1, 1]),
        "turn_state": np.array([7, 7]),
        "turn_reward": np.array([0.0, 0.25], np.float32),
    }
    other_branch = (
        whole.segments[0],
        replace(whole.segments[1], side=places),
        Segment(ids=np.array([4]), source="env"),
    )
    made = (
        replace(whole, branches=(other_branch,), agent={"tool_calls": 2.0}, timeline=({"kind": "turn", "s": 0.5},)),
        trajectory(1, Invalid("timeout", "late"), outcome="invalid", error="timeout: late"),
        trajectory(2, None, outcome="failed"),
    )
    group = Group(group_id="g", task=TASK, epoch=1, draw=9, admitted_version=3, trajectories=made)
    write_state(tmp_path / "c" / "state", state([save_group(group, Draw(1, 9, 7), True)]))
    saved = read_state(tmp_path / "c")
    back = restore_group(saved.groups[0], TASK)
    assert saved.groups[0].complete and saved.groups[0].draw == Draw(1, 9, 7)
    assert (back.group_id, back.epoch, back.draw, back.admitted_version) == ("g", 1, 9, 3)
    for a, b in zip(made, back.trajectories, strict=True):
        assert (a.trajectory_id, a.reward, a.outcome, a.error, a.sampling) == (
            b.trajectory_id,
            b.reward,
            b.outcome,
            b.error,
            b.sampling,
        )
        assert (a.agent, a.timeline, len(a.branches)) == (b.agent, b.timeline, len(b.branches))
        for s, t in zip(chain(a.segments, *a.branches), chain(b.segments, *b.branches), strict=True):
            assert (s.source, s.version, s.media) == (t.source, t.version, t.media) and np.array_equal(s.ids, t.ids)
            assert s.side.keys() == t.side.keys()
            assert all(np.array_equal(s.side[n], t.side[n]) and s.side[n].dtype == t.side[n].dtype for n in s.side)
    other = msgspec.structs.replace(saved.groups[0], task_id="another")
    with pytest.raises(ValueError, match="row 7 of the training data is t7, but it was another"):
        restore_group(other, TASK)


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.standard_normal(3), torch.rand(2)
    write_state(tmp_path / "state", state())
    expected = (random.random(), random.gauss(0, 1), np.random.standard_normal(2).tolist(), torch.rand(3).tolist())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    restore_rng(read_state(tmp_path).rng)
    assert expected == (
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(2).tolist(),
        torch.rand(3).tolist(),
    )


def test_everything_else_comes_back(tmp_path: Path) -> None:
    write_state(tmp_path / "state", state())
    back = read_state(tmp_path)
    assert (back.step, back.version, back.cursor, back.scheduler) == (
        4,
        2,
        {"next_draw": 9, "returned": [3]},
        {"base": [0, 0]},
    )
    assert back.controllers == Controllers(0.25, True) and back.history[0]["lr"] == 0.1
    assert b"numpy" not in (tmp_path / "state" / FILE).read_bytes().replace(b"numpy_", b""), "nothing is pickled"


def test_a_state_of_the_earlier_layout_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"written by an earlier version of verl.*model\.path=.*hf"):
        read_state(tmp_path)
    write_state(tmp_path / "state", state())
    whole = (tmp_path / "state" / FILE).read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "state" / FILE).write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="is damaged or of another version"):
            read_state(tmp_path)
    newer = state()
    newer.format = FORMAT + 1
    write_state(tmp_path / "state", newer)
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
        read_state(tmp_path)


def test_what_a_grader_said_is_saved_as_it_may_be_recorded():
    group = SavedGroup("g", "t", Draw(0, 0, 0), 0, False, (replace_error("401 for sesame"),))
    shown = hidden(group, lambda text: text.replace("sesame", "${oc.env:KEY}"))
    assert "sesame" not in str(shown) and "oc.env:KEY" in shown.trajectories[0].error
    assert shown.trajectories[0].invalid == ("exception", "401 for ${oc.env:KEY}")
    score = Score(0.5, pred="sesame", feedback="not sesame")
    graded = msgspec.structs.replace(replace_error(""), invalid=None, score=score)
    (shown,) = hidden(
        msgspec.structs.replace(group, trajectories=(graded,)), lambda text: text.replace("sesame", "KEY")
    ).trajectories
    assert shown.score == Score(0.5, pred="KEY", feedback="not KEY")


def replace_error(text):
    trajectory = SavedTrajectory(
        "i", 0, "train", 0, Sampling(max_tokens=1), (), "eos", "invalid", None, None, 1, 0.0, ""
    )
    return msgspec.structs.replace(trajectory, error=text, invalid=("exception", text))
