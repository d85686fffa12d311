"""Images that tools return: what counts as one, what a bad one becomes, and their places in prompts and rows."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from each import each
from fakes import FakeEngine
from PIL import Image
from tool_images import TOOL_TEMPLATE, tool_folder, tool_tokenizer
from vision import END, IMAGE, START, encoded, png

from verl.agent_loop.base import AgentLoopOutput, LoopMedia, ServerManager, sampling_params_of
from verl.agent_loop.load_tools import function_as_tool, load_tools
from verl.agent_loop.registry import _kit
from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.tool_agent import ToolAgentLoop
from verl.chat.parsing import ToolCall, Turn
from verl.config.schema import Config
from verl.data.source import Draw
from verl.driver.checked import check_output
from verl.driver.saved_images import HeldImages, SavedImages, images_of_tools
from verl.driver.state import SavedGroup, save_group
from verl.driver.task_media import ImageStoringEngine, ToolImages
from verl.recorded import RecordedCall
from verl.rollout.base import Completion, GenerateRequest
from verl.tools import ToolBroken, ToolResponse
from verl.tools.answers import NO_IMAGES, ReturnedImage, answer_of, content_of
from verl.tools.mcp import _answer
from verl.tools.pictures import without_images
from verl.transfer_queue.media import FolderMedia, MemoryMedia
from verl.types import Group, Medium, Sampling, Segment, Task, Trajectory

USER = {"role": "user", "content": "what?"}
CAT, DOG = png(12, 8, 1), png(8, 8, 2)  # six tokens, and four


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl")


class Says(FakeEngine):
    """An engine that answers with the given texts in turn."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        super().__init__()
        self._answers = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    async def generate(self, request: GenerateRequest) -> Completion:
        ids = self._answers.pop(0)[: request.sampling.max_tokens]
        return Completion(request.id, ids, np.zeros(len(ids), np.float32), ((0, 0, len(ids)),), "eos")


class Played:
    """A trajectory of a tool that returns values in turn, one in each of the first turns."""

    def __init__(self, folder: Path, root: Path, values: list[Any], refused: str = "", **given: Any) -> None:
        def look() -> Any:
            """Look."""
            return values.pop(0)

        template = given.pop("template", TOOL_TEMPLATE)
        self.tokenizer, self.store, calls = tool_tokenizer(template), MemoryMedia(), len(values)
        config = Config(agent=AgentConfig(format="hermes"))
        tools = given.pop("tools", {"look": function_as_tool(look)})
        self.kit, self.notes = _kit(config, self.tokenizer, tools, (), folder)
        images = ToolImages(FolderMedia(root / "files"), self.store, refused)
        engine = Says(self.tokenizer, *["look<|end|>"] * calls, "done<|end|>")
        storing = ImageStoringEngine(engine, images, "group", set())
        self.sampling = Sampling(max_tokens=given.pop("budget", 200))
        with images.of_attempt("attempt") as media:
            manager = ServerManager(storing, self.sampling, ("s",), returned=media, **given)
            self.manager = manager
            loop = ToolAgentLoop(None, manager, self.tokenizer, kit=self.kit)

            def parse(play: Any, out: Any) -> Turn | None:
                return Turn(calls=(ToolCall("look", {}),), text="look") if play.calls < calls else None

            loop._parse = parse  # type: ignore[method-assign]
            prompt = self.kit.renderer.ids([USER], prompt=True)
            row = {"tools": (), "raw_prompt": [USER], "request_id": "r", "prompt_ids": prompt}
            self.out = asyncio.run(loop.run(sampling_params_of(self.sampling), **row))
        self.found = check_output(self.out, manager, self.sampling.max_tokens)
        self.rows = (self.found.segments, *self.found.branches)

    def shown(self, row: int = -1) -> str:
        """Return the text of a row after its prompt, with the number of tokens of each image in its place."""
        text = ""
        for s in self.rows[row][1:]:
            inside = {at for m in s.media for at in range(m.start, m.end)}
            assert all(s.ids[at] == IMAGE for at in inside) and (not inside or s.source == "env")
            sizes = {m.start: f"[{m.tokens}]" for m in s.media}
            text += "".join(
                sizes.get(at, "") if at in inside else self.tokenizer.decode([i]) for at, i in enumerate(s.ids)
            )
        return text.replace("<|vision_start|>", "").replace("<|vision_end|>", "")


ANSWERED = "look<|end|><|user|><result>{}<|end|><|assistant|>done<|end|>"
URL = f"data:image/png;base64,{base64.b64encode(CAT).decode()}"


@each(
    "value, text",
    [
        (ToolResponse(image=[CAT, DOG], text="both"), "[6][4]both"),
        (ToolResponse(image=[Image.open(io.BytesIO(DOG))]), "[4]"),
        (ToolResponse(image=[np.zeros((8, 12, 3), np.uint8)]), "[6]"),
        (Image.new("CMYK", (8, 8)), "[4]"),
        (
            [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": URL}},
                {"type": "text", "text": "b"},
            ],
            "a[6]b",
        ),
        (([{"type": "image", "image": Image.new("L", (8, 8))}], 0.5), "[4]"),
        (ToolResponse(image=[{"bytes": CAT}], text="<|image_pad|>"), "[6]<|image_pad|>"),
        (ToolResponse(image=np.zeros((8, 12, 3), np.uint8)), "[6]"),  # type: ignore[arg-type]
        ([Image.new("L", (8, 8)), np.zeros((8, 12, 3), np.uint8)], "[4][6]"),
        ({"type": "image", "image": Image.new("L", (8, 8))}, "[4]"),
    ],
)
def test_a_tool_may_return_images(value: Any, text: str, folder: Path, tmp_path: Path) -> None:
    played = Played(folder, tmp_path, [value])
    assert played.shown() == ANSWERED.format(text)
    (call, then), media = played.manager.record, [m for s in played.found.segments for m in s.media]
    assert call.media == () and [m.reference for m in then.media] == [m.reference for m in media]
    assert all(played.store.get(m.reference) for m in then.media), "the request had its images"
    whole = np.concatenate([s.ids for s in played.found.segments])
    assert all((whole[m.start : m.end] == IMAGE).all() and whole[m.start - 1] == START for m in then.media)
    assert played.manager.counts["env_tokens"] == sum(len(s.ids) for s in played.found.segments if s.source == "env")
    assert not (tmp_path / "files" / "content").exists() or not [*(tmp_path / "files" / "content").iterdir()]


_SIZE = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
BOMB = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + _SIZE + struct.pack(">I", zlib.crc32(_SIZE)) + CAT[33:]
FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]


@each(
    "value, reason",
    [
        (b"no image", "8 bytes are no image that can be read"),
        (CAT[:-30], "a damaged PNG image"),
        (BOMB, "decompression bomb"),
        (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "an image of 2 frames"),
        ("/no/such.png", "no file /no/such.png"),
        ("https://x/y.png", "are not downloaded"),
        (Image.new("F", (8, 8)), "pixels of the kind 'F'"),
        (np.zeros((0, 8), np.uint8), "0 pixels"),
        (3, "image 2: "),
    ],
)
def test_an_image_that_cannot_be_read_is_a_failure_of_the_call(
    value: Any, reason: str, folder: Path, tmp_path: Path
) -> None:
    played = Played(folder, tmp_path, [])
    answer = answer_of(ToolResponse(image=[CAT, value], text="see"))
    found = asyncio.run(played.kit.pictures.shown(answer, "look", LoopMedia(FolderMedia(tmp_path / "files"), "a")))
    assert (found.error, found.parts) == ("image", ())
    assert found.text.startswith("Error: look failed: image 2: ") and reason in found.text, found.text


_PART = {"type": "image_url", "image_url": {"url": URL}}


@each(
    "value",
    [
        {"image": Image.new("L", (8, 8))},
        {"screens": [{"at": 3, "pixels": np.zeros((8, 8, 3), np.uint8)}]},
        [_PART, {"type": "input_audio", "input_audio": {"data": "..."}}],
        [{"type": "image", "path": "a.png"}, {"type": "video", "video": "b.mp4"}],
        {"content": [_PART]},
        {"content": [{"type": "image", "source": {"type": "base64", "data": "..."}}]},
        {"image": CAT},
        [Image.new("L", (8, 8)), "a caption"],
        CAT,
    ],
)
def test_an_image_inside_or_beside_other_data_is_a_failure(value: Any) -> None:
    """As text it would be the name of a class, or base64."""
    with pytest.raises(ValueError, match=r"inside or beside other data; return ToolResponse\(image="):
        answer_of(value)


@each(
    "value, text",
    [
        ({"type": ["image"], "image": None}, '{"type": ["image"], "image": null}'),
        ({"type": "image", "width": 3}, '{"type": "image", "width": 3}'),
        ({"found": [{"type": "image", "url": "x.png"}]}, '{"found": [{"type": "image", "url": "x.png"}]}'),
        ({"at": np.array([0.5, 1.5])}, '{"at": "[0.5 1.5]"}'),
        ([1, [2]], "[1, [2]]"),
        (np.array([0.5, 1.5]), '"[0.5 1.5]"'),
        (ToolResponse(image=[], text="none"), "none"),
        (ToolResponse(image=None, text="none"), "none"),
    ],
)
def test_data_without_an_image_is_text(value: Any, text: str) -> None:
    assert answer_of(value).text == text and not answer_of(value).parts


def test_a_file_is_read_when_the_tool_returns(folder: Path, tmp_path: Path) -> None:
    """A tool may write each screenshot into one file, and draw on one canvas."""
    file, canvas = tmp_path / "screen.png", Image.new("RGB", (8, 8))
    file.write_bytes(CAT)
    played = Played(folder, tmp_path, [ToolResponse(image=[str(file)])])
    file.write_bytes(DOG)
    (medium,) = (m for s in played.found.segments for m in s.media)
    assert played.store.get(medium.reference) == CAT
    (part,) = answer_of(canvas).parts
    canvas.putpixel((0, 0), (255, 0, 0))
    assert part.item.getpixel((0, 0)) == (0, 0, 0)


def test_a_run_that_cannot_have_images_of_tools_ends_the_attempt(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolBroken, match="look returned an image: queue.engine=ray stores none"):
        Played(folder, tmp_path, [ToolResponse(image=[CAT])], refused="queue.engine=ray stores none")
    texts = TOOL_TEMPLATE.replace("IMAGE", "")
    with pytest.raises(ToolBroken, match="does not render an image in a tool's result"):
        Played(folder, tmp_path, [ToolResponse(image=[CAT])], template=texts)
    assert "cannot return an image" in Played(folder, tmp_path, ["text"], template=texts).notes[-1]


def test_the_budget_cuts_a_row_before_an_image(folder: Path, tmp_path: Path) -> None:
    head = "look<|end|><|user|><result>"  # fourteen tokens; the mark before an image is one
    for budget, tokens, text in ((18, 15, head), (23, 23, f"{head}[6]<|end|>")):
        played = Played(folder, tmp_path, [ToolResponse(image=[CAT])], budget=budget)
        assert (played.found.stop_reason, played.shown()) == ("context_full", text)
        assert sum(len(s.ids) for s in played.found.segments[1:]) == tokens


def test_a_template_that_rewrites_turns_begins_branches_with_all_images(folder: Path, tmp_path: Path) -> None:
    rewriting = TOOL_TEMPLATE.replace(
        "{% if m['content'] is string %}",
        "{% if m['role'] == 'assistant' and not loop.last %}.{% endif %}{% if m['content'] is string %}",
    )
    played = Played(folder, tmp_path, [ToolResponse(image=[CAT]), ToolResponse(image=[DOG])], template=rewriting)
    assert played.kit.bridge is None and len(played.rows) == 3
    assert [[m.tokens for m in row[0].media] for row in played.rows] == [[], [6], [6, 4]]
    for row in played.rows:
        assert all((row[0].ids[m.start : m.end] == IMAGE).all() for m in row[0].media)
        assert (row[0].ids == IMAGE).sum() == sum(m.tokens for m in row[0].media)
    assert [call.media for call in played.manager.record] == [row[0].media for row in played.rows]


def test_a_row_has_the_images_that_its_calls_had(folder: Path) -> None:
    """Tokens that were sampled after other images are not the row's."""
    ids, cat = [1, START, *[IMAGE] * 6, END], Medium("cat", 2, 6)
    answer = Completion("r", np.array([7, 8]), np.zeros(2, np.float32), ((0, 0, 2),), "eos")
    for seen, given, whole in (((cat,), (cat,), True), ((), (cat,), False), ((cat,), (), False)):
        manager = ServerManager(None, Sampling(max_tokens=20), ("s",))  # type: ignore[arg-type]
        manager.record = [RecordedCall(np.array(ids), answer, [7, 8], seen)]
        output = AgentLoopOutput(ids[:1], [*ids[1:], 7, 8], [0] * 8 + [1, 1], media=given)
        if whole:
            prompt, env, sampled = check_output(output, manager, 20).segments
            assert (prompt.media, env.media) == ((), (Medium("cat", 1, 6),)) and sampled.ids.tolist() == [7, 8]
        else:
            with pytest.raises(ValueError, match="2 tokens with mask 1"):
                check_output(output, manager, 20)
    manager.record = [RecordedCall(np.array(ids), answer, [7, 8], (cat,))]
    for prompt, mask, media, error in (
        (1, 1, (cat, Medium("dog", 7, 1)), "2 tokens with mask 1"),
        (4, 1, (cat,), "whole within the 4 tokens"),
        (1, 0, (Medium("cat", 2, 9), Medium("dog", 3, 1)), "in order, apart"),
    ):
        output = AgentLoopOutput(ids[:prompt], [*ids[prompt:], 7, 8], [0] * (9 - prompt) + [mask] * 2, media=media)
        with pytest.raises(ValueError, match=error):
            check_output(output, manager, 20)


def test_an_image_of_an_mcp_server_is_one_and_a_model_of_text_gets_a_note() -> None:
    blocks = [
        SimpleNamespace(type="text", text="a cat"),
        SimpleNamespace(type="image", data=base64.b64encode(CAT).decode(), mime_type="image/png"),
        SimpleNamespace(type="audio", data="", mime_type="audio/wav"),
    ]
    answer = _answer(SimpleNamespace(content=blocks, structured_content=None, is_error=False), "")
    text, image, sound = answer.parts
    assert (text, sound) == ("a cat", "[audio left out: the model takes text]")
    assert isinstance(image, ReturnedImage) and content_of(image.item, "x") == CAT
    without = without_images(answer, "look")
    assert without.text.splitlines() == ["a cat", "[image left out: the model takes text]", sound] and not without.parts
    failed = without_images(answer_of(ToolResponse(image=[CAT], text="see")), "look")
    assert failed.error == "exception" and failed.text == f"Error: look failed: {NO_IMAGES}"
    wrong = _answer(SimpleNamespace(content=blocks[:2], structured_content=None, is_error=True), "")
    assert wrong.error == "exception" and wrong.parts[:2] == ("Error:", "a cat")


def test_images_of_groups_in_flight_are_kept_with_their_checkpoint(tmp_path: Path) -> None:
    """Those of a state are held until the second one after it, and those of a checkpoint until it is pruned."""
    queue, kept, again, checkpoints = MemoryMedia(), MemoryMedia(), MemoryMedia(), tmp_path / "checkpoints"
    names = [queue.put(content, "group g1") for content in (CAT, DOG)]

    def in_flight(name: str, *shown: Medium) -> SavedGroup:
        image = Segment(ids=np.full(8, IMAGE), source="env", media=(Medium(name, 1, 6),))
        sampled = Segment(ids=np.array([1]), source="sampled", logprobs=np.zeros(1, np.float32), version=0)
        of_row = Medium("a file of the row", 0, 4)
        prompt = Segment(ids=np.full(8, IMAGE), source="prompt", media=(of_row, *shown))
        made = Trajectory(
            **{name: "g1" for name in ("trajectory_id", "group_id", "task_id")},
            **{"index": 0, "purpose": "train", "attempt": 0, "sampling": Sampling(max_tokens=9), "stop_reason": "eos"},
            segments=(prompt, image, sampled),
        )
        task = Task(task_id="g1", index=0, messages=(), prompt_ids=np.zeros(1, np.int64), media=(of_row,))
        group = Group(group_id="g1", task=task, epoch=0, draw=0, admitted_version=0, trajectories=(made,))
        return save_group(group, Draw(index=0, epoch=0, draw=0), True)

    first, second, held = in_flight(names[0]), in_flight(names[1]), HeldImages(queue)
    of_reset = in_flight(names[0], Medium(names[1], 4, 4))
    assert images_of_tools(of_reset) == {*names}, "also those that an environment shows in the first prompt"
    assert images_of_tools(msgspec.structs.replace(of_reset, row_images=None)) == {names[0]}, "of an older checkpoint"
    held.hold([first])
    queue.drop(["group g1"])
    assert queue.get(names[0]) == CAT
    saved = SavedImages(queue, kept, checkpoints)
    saved.save(1, [first])
    (checkpoints / "step_1").mkdir(parents=True)
    SavedImages(again, kept, checkpoints).restore([first], kept)
    assert again.get(names[0]) == CAT and len(again) == 1
    again.drop(["group g1"])
    assert len(again) == 0, "its group owns it"
    names[1] = queue.put(DOG, "group g2")
    held.hold([second])
    held.hold([])
    assert len(queue) == 1, "that of the last but one state"
    (checkpoints / "step_1").rename(checkpoints / "step_2")
    SavedImages(queue, kept, checkpoints).save(3, [second])
    saved.save(2, [second])
    assert len(kept) == 1 and kept.get(names[1]) == DOG, "the first checkpoint was pruned"
    (checkpoints / "step_3").mkdir()
    started = SavedImages(queue, kept, checkpoints)
    queue.put(CAT, "group g3")
    started.save(4, [first])
    assert len(kept) == 2
    SavedImages(queue, kept, checkpoints)
    assert len(kept) == 1, "the run was killed before the last checkpoint was written"
    (checkpoints / "step_2").rmdir()
    (checkpoints / "step_3").rmdir()
    SavedImages(queue, kept, checkpoints)
    assert len(kept) == 0


SCENE = '''
import io
from PIL import Image

class Scene:
    def reset(self, **columns):
        image = {"type": "image", "image": Image.open(io.BytesIO(CAT))}
        return [{"type": "text", "text": "<|image_pad|>see "}, image, {"type": "text", "text": "?"}]

    def look(self) -> str:
        """Look."""
        return "seen"
'''


@pytest.mark.parametrize("rewrites", [False, True])
def test_an_environment_shows_an_image_in_the_first_prompt(rewrites: bool, folder: Path, tmp_path: Path) -> None:
    """Behind the last text of the user; it is of the prompt of every call and of every branch."""
    (tmp_path / "env.py").write_text(SCENE.replace("CAT", repr(CAT)))
    rewriting = TOOL_TEMPLATE.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if loop.last and messages|length > 2 %}!{% endif %}"
    )
    tools = dict(load_tools([f"{tmp_path / 'env.py'}:Scene"]))
    given = {"tools": tools, "template": rewriting if rewrites else TOOL_TEMPLATE}
    played = Played(folder, tmp_path, [None], **given)
    first, second = played.manager.record
    assert len(played.rows) == (2 if rewrites else 1)
    assert first.media == second.media and [m.tokens for m in first.media] == [6]
    for call in (first, second):
        (seen,) = call.media
        assert (call.prompt_ids[seen.start : seen.end] == IMAGE).all() and (call.prompt_ids == IMAGE).sum() == 6
        text = played.tokenizer.decode(call.prompt_ids)
        assert "what?<|image_pad|>see <|vision_start|>" in text and "<|vision_end|>?<|end|>" in text
    assert played.store.get(first.media[0].reference) and all(row[0].media == first.media for row in played.rows)
    assert played.manager.taken == len(first.prompt_ids) - len(played.kit.renderer.ids([USER], prompt=True))


def test_an_environment_cannot_show_what_is_no_image(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(SCENE.replace("Image.open(io.BytesIO(CAT))", "b'no image'"))
    with pytest.raises(ValueError, match="Scene.reset: Error: Scene.reset failed: image 1: 8 bytes are no image"):
        Played(folder, tmp_path, [None], tools=dict(load_tools([f"{tmp_path / 'env.py'}:Scene"])))
