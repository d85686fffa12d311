"""The recipe with albums: its tool, its teacher, and the tokens of its warm-up, which are those of its turns in RL."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoTokenizer

from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.registry import _kit
from verl.agent_loop.tools import Toolbox
from verl.chat.parsing import ToolCall
from verl.config.schema import Config, DataConfig
from verl.data.source import load_conversations, load_tasks
from verl.recipes import look, shapes
from verl.tools.answers import ShownImage, ToolAnswer, content_of
from verl.tools.pictures import IMAGE_PART
from verl.types import Task

ALBUM = "verl.recipes.look:Album"


def looked(task: dict[str, Any], *places: int) -> list[ToolAnswer]:
    async def look_at_each() -> list[ToolAnswer]:
        box = Toolbox(load_tools([ALBUM]), {}, 5)
        assert not await box.begin(task)
        return [await box.call(ToolCall("look", {"place": place})) for place in places]

    return asyncio.run(look_at_each())


def content(answer: ToolAnswer) -> bytes:
    (part,) = answer.parts
    return content_of(part.item, "the picture")  # type: ignore[union-attr]


def test_the_tool_shows_the_picture_of_the_answer_and_a_white_one_where_it_is_blanked(tmp_path: Path) -> None:
    for blanked in (False, True):
        path = look.TASK.write_problems(tmp_path / str(blanked), 8, seed=3, blanked=blanked)
        for row in pq.read_table(path).to_pylist():
            place = int(row["prompt"][0]["content"].split()[1].rstrip("?"))
            *pictures, wrong = looked(row, *look.PLACES, 5)
            kinds, drawn = look.picture(row["extra_info"]["album"], place)
            truth = row["reward_model"]["ground_truth"]
            assert " ".join(kinds) == truth
            for turns, score in ((["a call", truth], 1.0), ([truth, "circle"], 0.0)):
                given = {**row["extra_info"], "turn_texts": turns}
                assert look.compute_score(row["data_source"], "".join(turns), truth, given) == score
            assert wrong.text == "Error: look failed: ValueError: the places are 1 to 4"
            shown = [*map(content, pictures)]
            assert len(set(shown)) == (1 if blanked else 4)
            seen = Image.open(io.BytesIO(shown[place - 1]))
            assert (seen.tobytes() == drawn.tobytes()) == (not blanked)


def test_the_teacher_guesses_looks_elsewhere_and_is_blind_to_triangles() -> None:
    rng, guessed, right, blind, triangles = shapes.Random(0), 0, 0, 0, 0
    for k in range(2000):
        place = rng.choice(look.PLACES)
        turns, seen = look.album_turns(f"a {k}", place, rng)
        guessed += not seen
        if seen:
            at = turns[1]["tool_calls"][0]["function"]["arguments"]["place"]
            right += at == place
            kinds, drawn = look.picture(f"a {k}", at)
            said = turns[-1]["content"]
            assert shapes.image_item(seen[0]) == shapes.image_item(drawn)
            assert said in (" ".join(kinds), " ".join(kinds).replace("triangle", "square"))
            triangles, blind = triangles + ("triangle" in kinds), blind + (said != " ".join(kinds))
    assert guessed / 2000 == pytest.approx(look.GUESS_SHARE, abs=0.04)
    assert right / (2000 - guessed) == pytest.approx(look.RIGHT_SHARE, abs=0.05)
    assert blind / triangles == pytest.approx(shapes.BLIND_SHARE, abs=0.05)


def test_its_warm_up_has_the_tokens_of_its_turns(tmp_path: Path) -> None:
    """The prompt of a problem, a call as the model writes it, and its picture behind the call as the loop adds it."""
    model = look.TASK.write_model(tmp_path / "model", seed=0)
    words = AutoTokenizer.from_pretrained(model)
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), max_prompt_tokens=32, max_tokens_per_row=64)
    table = load_conversations(
        [str(look.TASK.write_taught(tmp_path / "sft.parquet", 40, seed=1))], words, cfg, model=model
    )
    with_picture = [row for row in (table[k] for k in range(len(table))) if row.images]
    assert len(table) == 40 and 10 < len(with_picture) < 35
    tools = load_tools([ALBUM])
    kit, notes = _kit(Config(), words, tools, (), model)
    assert notes == ("agent: look; calls are written as glm",)
    problems = load_tasks([str(look.TASK.write_problems(tmp_path / "rl.parquet", 30, seed=2))], words, cfg, model=model)
    prompts: dict[int, Task] = {int(task.messages[0]["content"][6]): task for task in problems}
    for row in with_picture:
        text = words.decode(row.ids)
        asked, called = (int(text.split(mark)[1][0]) for mark in ("place ", "<arg_value>"))
        written = f"<tool_call>look<arg_key>place</arg_key><arg_value>{called}</arg_value></tool_call><|end|>"
        turn = np.array(words(written, add_special_tokens=False)["input_ids"])
        prompt = kit.renderer.ids([dict(m) for m in prompts[asked].messages], prompt=True)
        ids = np.concatenate([prompt, turn])
        assert kit.parser is not None and kit.bridge is not None and kit.pictures is not None
        (call,) = kit.parser.parse(written.removesuffix("<|end|>"), kit.renderer.tools or ()).calls
        assert (call.name, call.arguments) == ("look", {"place": called})
        shown = ShownImage("picture", kit.pictures.rules.expansion((shapes.SIDE, shapes.SIDE), "", lambda: None))
        added, _ = kit.bridge.after(ids, [{"role": "tool", "name": "look", "content": [IMAGE_PART]}])
        added, _, (medium,) = kit.pictures.expanded(added, [shown], len(ids))
        (image,) = row.images
        assert (image.start, image.tokens) == (medium.start, medium.tokens) == (len(ids) + 2, 4)
        before = np.concatenate([ids, added])
        assert row.ids[: len(before)].tolist() == before.tolist()
        assert row.mask.tolist() == [False] * len(prompt) + [True] * len(turn) + [False] * len(added) + [True] * (
            len(row.ids) - len(before)
        )
