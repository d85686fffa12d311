"""The images of loops of the user's own: their places in prompts, their rows, and the states of turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine
from stage import Stage
from tool_images import tool_folder, tool_tokenizer
from vision import END, IMAGE, START, VIDEO, png

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, LoopMedia, ServerManager
from verl.agent_loop.registry import pictures_of
from verl.config.schema import Config
from verl.data.source import Draw
from verl.driver.checked import check_output
from verl.driver.saved_images import images_of_tools
from verl.driver.state import restore_group, save_group
from verl.driver.trajectories import TrajectorySpec, _arguments, _without_own
from verl.recorded import RecordedCall
from verl.rollout.base import Completion
from verl.transfer_queue.media import FolderMedia
from verl.types import Group, Medium, Sampling, Segment, Task, TaskImage, Trajectory

SEEN = [START, *[IMAGE] * 4, END]  # an image of 8 x 8 pixels
SAMPLING = Sampling(max_tokens=20)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tool_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl")
    return pictures_of(Config(), tool_tokenizer(), folder)


def manager_of(*calls: tuple[list[int], list[int], tuple[Medium, ...]], **given: Any) -> ServerManager:
    """Return a manager with calls (prompt, answer, media)."""
    manager = ServerManager(FakeEngine(), SAMPLING, ("s",), **given)
    for prompt, answer, media in calls:
        n = len(answer)
        sampled = Completion("r", np.array(answer), np.zeros(n, np.float32), ((0, 0, n),), "eos")
        manager.record.append(RecordedCall(np.array(prompt), sampled, answer, media))
    return manager


def test_a_prompt_has_no_tokens_of_media_that_nobody_gave(pictures: Any, tmp_path: Path) -> None:
    manager = ServerManager(FakeEngine(), SAMPLING, ("s",), media=(Medium("row", 2, 4),))
    manager.pictures, manager.returned = pictures, LoopMedia(FolderMedia(tmp_path), "attempt")

    def called(ids: list[int], **given: Any) -> Any:
        asyncio.run(manager.generate("r", prompt_ids=ids, sampling_params={}, **given))
        return manager.record[-1].media

    assert called([1, *SEEN, 2]) == (Medium("row", 2, 4),)
    for given in ({}, {"image_data": []}):
        with pytest.raises(ValueError, match="give image_data"):
            called([1, *SEEN, 2, *SEEN], **given)
    (placed,) = called([1, 2, *SEEN], image_data=[png(8, 8)])
    assert (placed.start, placed.tokens) == (3, 4)
    with pytest.raises(ValueError, match="placeholders that are none of its images.*without videos"):
        called([START, VIDEO, END, *SEEN], image_data=[png(8, 8)])


def test_turns_with_other_images_are_other_states() -> None:
    def states(first: str, second: str, before: str = "") -> list[int]:
        ids = [*SEEN, 7, *SEEN]
        calls = [(SEEN, [7], (Medium(first, 1, 4),)), (ids, [8], (Medium(before or first, 1, 4), Medium(second, 8, 4)))]
        manager = manager_of(*calls, credits_turns=True)
        return [int(manager.turn_side(k)["turn_state"][0]) for k in (0, 1)]

    assert states("a", "b") == states("a", "b") and states("a", "b")[1] == states("c", "b")[1]
    assert states("a", "b")[0] != states("c", "b")[0] and states("a", "b")[1] != states("a", "c")[1]
    assert states("a", "b", before="c")[1] != states("a", "b")[1], "another history is compared as a whole"


def test_branches_with_equal_ids_have_the_images_of_their_own_calls() -> None:
    """A loop that shows the newest screenshot alone: equal prompts, one output for each step."""
    for answers in ([[7, 8], [8, 7]], [[7, 8], [7, 8]]):
        manager = manager_of(*[(SEEN, a, (Medium(name, 1, 4),)) for name, a in zip("ab", answers)])
        found = check_output([AgentLoopOutput(SEEN, a, [1, 1]) for a in answers], manager, 20)
        rows = (found.segments, *found.branches)
        assert [row[0].media[0].reference for row in rows] == ["a", "b"]
        assert [[(s.source, s.ids.tolist()) for s in row[1:]] for row in rows] == [[("sampled", a)] for a in answers]


def test_images_of_tools_are_those_that_are_not_of_the_row() -> None:
    own = (Medium("a", 1, 4), Medium("b", 9, 4))
    seen = [
        Medium("b", 3, 4),
        Medium("c", 9, 4),
        Medium("b", 20, 4),
    ]  # the loop left out the first and moved the second
    assert _without_own(seen, own) == seen[1:] and _without_own(own, own) == []


class Verl(AgentLoopBase):
    """Verl's own lines."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        images = (await self.process_vision_info(messages))["images"]
        ids = await self.apply_chat_template(messages, images=images)
        given = {"prompt_ids": ids, "sampling_params": sampling_params, "image_data": images}
        out = await self.server_manager.generate("r", **given)
        return AgentLoopOutput(ids, out.token_ids, [1] * len(out.token_ids))


def test_verls_lines_play_a_row_with_images(pictures: Any, tmp_path: Path) -> None:
    files = [tmp_path / f"{k}.png" for k in range(2)]
    for k, file in enumerate(files):
        file.write_bytes(png(8 + 4 * k, 8, k))
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    asked = ({"role": "user", "content": parts}, {"role": "assistant", "content": "b"})
    images = tuple(TaskImage(str(file), 0, 0, 0, 0) for file in files)
    task = Task(task_id="t", index=0, messages=asked, prompt_ids=np.zeros(1, np.int64), images=images)
    manager = ServerManager(FakeEngine(), SAMPLING, ("s",))
    manager.pictures, manager.returned = pictures, LoopMedia(FolderMedia(tmp_path / "held"), "attempt")
    asyncio.run(Verl(Config(), manager, tool_tokenizer()).run({}, **_arguments(task, "r")))
    assert [m.tokens for m in manager.record[0].media] == [4, 6] and parts[0] == {"type": "image"}


def test_a_row_of_a_restored_group_keeps_its_images_until_they_are_read(tmp_path: Path) -> None:
    task = Task(task_id="t", index=0, messages=(), prompt_ids=np.array(SEEN), media=(Medium("row", 1, 4),))
    sampled = Segment(ids=np.array([1]), source="sampled", logprobs=np.zeros(1, np.float32), version=0)
    made = Trajectory(
        **{name: "t" for name in ("trajectory_id", "group_id", "task_id")},
        **{"index": 0, "purpose": "train", "attempt": 0, "sampling": SAMPLING, "stop_reason": "eos"},
        segments=(Segment(ids=task.prompt_ids, source="prompt", media=task.media), sampled),
    )
    group = Group(group_id="t", task=task, epoch=0, draw=0, admitted_version=0, trajectories=(made,))
    saved = save_group(group, Draw(index=0, epoch=0, draw=0), False)
    again = restore_group(saved, replace(task, media=()))
    assert images_of_tools(save_group(again, saved.draw, False)) == set()

    async def resumed() -> None:
        """A changed file: what was played before the resume is dropped, and nothing of it is stored."""
        stage, images = Stage(tmp_path), (TaskImage(str(tmp_path / "lost.png"), 1, 1, 1, 4),)
        lost, ended = replace(again, task=replace(again.task, images=images)), list[Trajectory]()

        async def play(seen: Group) -> None:
            assert seen.task.lost and not stage.groups._done["t"]
            assert stage.trajectories.stored(seen, SAMPLING) is None
            ended.append(await stage.trajectories.run(seen.task, spec, SAMPLING))

        spec = TrajectorySpec(group_id="t", index=0, purpose="train")
        stage.trajectories.stored_share = 1.0
        stage.groups._play = play  # type: ignore[method-assign]
        stage.groups._done["t"] = list(lost.trajectories)
        await stage.groups._run(lost)
        assert [t.outcome for t in ended] == ["invalid"]

    asyncio.run(resumed())
