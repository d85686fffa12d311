"""Prompts with images of all families: their ids are those of the processors of transformers."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_tokenizers import KINDS, TILES, built, folder_of, marked_folder, tokenizer_of
from PIL import Image
from tool_images import TOOL_TEMPLATE
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.processing_utils import ProcessorMixin
from vision import png
from vision_families import KINDS as MODELS

from verl.agent_loop.base import LoopMedia
from verl.agent_loop.load_tools import function_as_tool
from verl.agent_loop.registry import _kit
from verl.agent_loop.sections import AgentConfig
from verl.checkpoint.loadable import exact_config
from verl.config.load import load_config
from verl.config.schema import Config, DataConfig
from verl.data.source import load_conversations, load_tasks
from verl.driver.assemble import context_of
from verl.driver.banned import policy_banned
from verl.driver.models import role_spec
from verl.errors import Refused
from verl.models.expand import banned_tokens, expander
from verl.models.families import family_of
from verl.models.image_files import image_processor
from verl.models.pictures import processed
from verl.tools import ToolResponse
from verl.tools.answers import answer_of
from verl.tools.pictures import IMAGE_PART
from verl.transfer_queue.media import FolderMedia


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any, Path], Any]:
    """Return processors of transformers, without torchvision, processors of videos and num2words."""
    monkeypatch.setitem(
        sys.modules, "transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral
    )
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)

    def made(kind: str, tokenizer: Any, folder: Path) -> Any:
        k, (images, _) = KINDS[kind], image_processor(folder)
        videos = (None,) if kind in ("smolvlm", "internvl") else ()
        module = kind if kind in ("llava_next", "kimi_k25") else k.processor.removesuffix("Processor").lower()
        own = importlib.import_module(f"transformers.models.{module}.processing_{module}")
        if kind == "gemma4":
            return getattr(own, k.processor)(None, images, tokenizer, None)
        if kind == "kimi_k25":
            return NavitReference(images, tokenizer, getattr(own, k.processor))
        return getattr(own, k.processor)(images, tokenizer, *videos, **k.more)

    return made


class NavitReference:
    """The processor of Kimi K2.5, whose image processor needs torchvision: with the grids of verl's, which
    `test_navit.py` compares with it."""

    def __init__(self, images: Any, tokenizer: Any, kind: Any) -> None:
        self._images, self._tokenizer, self._own = images, tokenizer, object.__new__(kind)
        self._own.__dict__.update(image_token="<|media_pad|>", image_processor=SimpleNamespace(merge_size=2))

    def __call__(self, images: Any, text: list[str], add_special_tokens: bool) -> Any:
        pieces = text[0].split("<|media_pad|>")
        found = [self._images(images=[image], return_tensors="pt")["image_grid_thw"][0] for image in images or ()]
        marks = [self._own.replace_image_token({"image_grid_thw": found}, k) for k in range(len(found))]
        whole = "".join(piece + mark for piece, mark in zip(pieces, [*marks, ""], strict=True))
        return self._tokenizer([whole], add_special_tokens=add_special_tokens)


PICTURES = [png(*size, seed) for seed, size in enumerate([(8, 8), (24, 17), (12, 30)])]
CONVERSATIONS: list[list[list[Any]]] = [
    [["no image: ab"]],
    [[0]],
    [["ab", 1, "ab"]],
    [["ab\n", 1, "\nab"]],
    [["ab\n\n", 2, "\n\n\nab"]],
    [[" a", 0, " a"]],
    [[1, 2, 0]],
    [["\n", 0, "\n", 1, "a"], ["ab"], [2, "<row_1_col_1>", "?"]],
]
"""The content of each turn: texts and numbers of pictures."""


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_ids_that_the_processor_of_the_family_makes(kind: str, reference: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    config = folder_of(kind, tokenizer, tmp_path)
    processor, family = reference(kind, tokenizer_of(kind), tmp_path), family_of(config)
    assert family is not None
    rows, own = [], []
    for conversation in CONVERSATIONS:
        seen = [PICTURES[part] for turn in conversation for part in turn if isinstance(part, int)]
        messages = [
            {
                "role": ("user", "assistant")[n % 2],
                "content": [{"type": "image"} if isinstance(p, int) else {"type": "text", "text": p} for p in turn],
            }
            for n, turn in enumerate(conversation)
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.open(io.BytesIO(content)).convert("RGB") for content in seen] or None
        own.append(
            np.array([*processor(images=images, text=[text], add_special_tokens=False)["input_ids"][0]], np.int64)
        )
        spelled = [
            {**m, "content": "".join("<image>" if p["type"] == "image" else p["text"] for p in m["content"])}
            for m in messages
        ]
        rows.append({"prompt": spelled, "ground_truth": "4", "images": seen})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), max_prompt_tokens=4096)
    table = load_tasks([str(tmp_path / "rows.parquet")], tokenizer, cfg, model=tmp_path)
    (feature,) = family.feature_ids(config)
    for k, (row, expected) in enumerate(zip(rows, own, strict=True)):
        task = table[k]
        typed = "<row_1_col_1>" in str(row["prompt"]) and "<row_1_col_1>" in KINDS[kind].tokens
        if typed:  # a text of the user is text, and no mark
            at = int(np.flatnonzero(expected == tokenizer.convert_tokens_to_ids("<row_1_col_1>"))[-1])
            plain = tokenizer("<")["input_ids"] + tokenizer("row_1_col_1>")["input_ids"]
            expected = np.concatenate([expected[:at], plain, expected[at + 1 :]])
        assert task.prompt_ids.tolist() == expected.tolist(), tokenizer.decode(task.prompt_ids)
        places = []
        for image, content in zip(task.images, row["images"], strict=True):
            span = task.prompt_ids[image.start : image.start + image.tokens]
            assert span[0] == span[-1] == feature
            places += (image.start + np.flatnonzero(span == feature)).tolist()
            picture = Image.open(io.BytesIO(content)).convert("RGB")
            grid = processed(image_processor(tmp_path)[0], picture, "x", family, config).grid
            assert (span == feature).sum() == family.features(config, grid)
        assert places == np.flatnonzero(expected == feature).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_that_are_trained_have_these_ids_too(kind: str, reference: Any, tmp_path: Path) -> None:
    """Marks and line ends are context; the loss mask is that of the answers' text."""
    tokenizer = tokenizer_of(kind)
    config = folder_of(kind, tokenizer, tmp_path)
    turns: list[tuple[Any, ...]] = [
        ("user", "ab\n", 1, "\n\nab"),
        ("assistant", "is ab"),
        ("user", 0, "\n", 2),
        ("assistant", "ab"),
    ]
    if kind == "mllama":
        turns[0], turns[2] = ("user", "ab\n", 1, "\n\nab", 0, 2), ("user", "\n")
    parts = [
        {
            "role": role,
            "content": [{"type": "image"} if isinstance(p, int) else {"type": "text", "text": p} for p in content],
        }
        for role, *content in turns
    ]
    seen = [PICTURES[1], PICTURES[0], PICTURES[2]]
    text = tokenizer.apply_chat_template(parts, tokenize=False)
    images = [Image.open(io.BytesIO(content)).convert("RGB") for content in seen]
    processor = reference(kind, tokenizer_of(kind), tmp_path)
    own = [*processor(images=images, text=[text], add_special_tokens=False)["input_ids"][0]]
    spelled = [
        {"role": role, "content": "".join("<image>" if isinstance(p, int) else p for p in content)}
        for role, *content in turns
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": spelled, "images": seen}]), tmp_path / "rows.parquet")
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), max_tokens_per_row=4096)
    row = load_conversations([str(tmp_path / "rows.parquet")], tokenizer, cfg, model=tmp_path)[0]
    assert row.ids.tolist() == own[: len(row.ids)] and tokenizer.decode(own[len(row.ids) :]) in ("", "\n")
    assert tokenizer.decode(row.ids[row.mask]).replace(" ", "") == "isab<|end|>ab<|end|>"
    assert config.image_token_id not in row.ids[row.mask]


def test_an_image_behind_a_trained_answer_is_refused_with_cross_attention(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("mllama")
    folder_of("mllama", tokenizer, tmp_path)
    turns = [("user", "<image>a"), ("assistant", "b"), ("user", "<image>a"), ("assistant", "b")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns], "images": [PICTURES[0], PICTURES[2]]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), max_tokens_per_row=4096)
    with pytest.raises(Refused, match="row 1: an image behind a token that is trained"):
        load_conversations([str(tmp_path / "rows.parquet")], tokenizer, cfg, model=tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("idefics3", "pixtral")])  # as two more
def test_images_of_tools_have_the_ids_of_the_whole_conversation(kind: str, reference: Any, tmp_path: Path) -> None:
    """The template writes no space where a tokenizer would join it with the text before."""
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = TOOL_TEMPLATE.replace("IMAGE", KINDS[kind].written or KINDS[kind].image)
    folder_of(kind, tokenizer, tmp_path)

    def look() -> str:
        """Look."""
        return ""

    kit, _ = _kit(Config(agent=AgentConfig(format="hermes")), tokenizer, {"look": function_as_tool(look)}, (), tmp_path)
    assert kit.bridge is not None and kit.pictures is not None
    if kind == "mllama":
        assert "tokens before the first image would read it" in kit.pictures.refused
        return
    assert not kit.pictures.refused
    call = {"function": {"name": "look", "arguments": {}}}
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "is", "tool_calls": [call]}]
    result = {"role": "tool", "content": [{"type": "text", "text": "ab\n"}, IMAGE_PART, IMAGE_PART]}
    images = [Image.open(io.BytesIO(content)).convert("RGB") for content in PICTURES[1:]]
    text = kit.renderer.text([*talk, result], prompt=True)
    processor = reference(kind, tokenizer_of(kind), tmp_path)
    whole = [*processor(images=images, text=[text], add_special_tokens=False)["input_ids"][0]]
    head = kit.renderer.ids(talk, prompt=False)
    media = LoopMedia(FolderMedia(tmp_path / "files"), "a")
    answer = asyncio.run(kit.pictures.shown(answer_of(ToolResponse(image=PICTURES[1:])), "look", media))
    ids, written = kit.bridge.after(head, [result])
    ids, lengths, found = kit.pictures.expanded(ids, answer.parts, len(head))
    assert [*head, *ids] == whole and len(np.repeat(written, lengths)) == len(ids)
    feature, places = tokenizer.convert_tokens_to_ids(KINDS[kind].image), [range(m.start, m.end) for m in found]
    assert {at for at, i in enumerate(whole) if i == feature} <= {at for place in places for at in place}
    assert all(whole[place[0]] == whole[place[-1]] == feature for place in places)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_alone_gives_the_grid_of_an_image(kind: str, tmp_path: Path) -> None:
    config = folder_of(kind, tokenizer_of(kind), tmp_path)
    processor, (family, _) = image_processor(tmp_path)
    for size in ((1, 1), (7, 9), (8, 8), (9, 40), (17, 24), (31, 16), (50, 49), (90, 6)):
        if kind in ("pixtral", "mistral3") and size == (90, 6):
            with pytest.raises(ValueError, match="scaled down to 12 pixels, it has a side without any"):
                family.grid_of(processor, config, *size[::-1])
            continue
        picture = processed(processor, Image.new("RGB", size), "x", family, config)
        assert family.grid_of(processor, config, *size[::-1]) == picture.grid, size


@pytest.mark.parametrize("kind", KINDS)
def test_the_marks_of_images_are_never_sampled(kind: str) -> None:
    """Tokens that a tokenizer spells as text are not banned; one without a mark of the family is refused."""
    tokenizer = tokenizer_of(kind)
    config = built(kind, tokenizer).config
    banned = tokenizer.convert_ids_to_tokens(banned_tokens(config, tokenizer))
    family = family_of(config)
    assert family is not None
    outside = {KINDS[kind].image} if family.crossed else set()  # of the vocabulary: it has no logit
    assert {*banned} == {KINDS[kind].image, *KINDS[kind].tokens} - outside and len(banned) == KINDS[kind].marks
    if kind in ("idefics3", "smolvlm"):
        spelled = tokenizer_of(kind, without=TILES[0])
        config.image_token_id = spelled.convert_tokens_to_ids("<image>")
        assert len(banned_tokens(config, spelled)) == KINDS[kind].marks - 1
        tokens = expander(family, config, spelled).of((3, 1, 2))
        assert "<row_1_col_1>" in spelled.decode(tokens.ids) and (tokens.ids == config.image_token_id).sum() == 12
    for mark in family.marks:
        with pytest.raises(Refused, match="the tokenizer has no special token .*, which a .* model reads"):
            expander(family, config, tokenizer_of(kind, without=mark))


def test_crops_beside_an_image_are_refused(tmp_path: Path) -> None:
    config = folder_of("gemma3", tokenizer_of("gemma3"), tmp_path, do_pan_and_scan=True)
    processor, (family, _) = image_processor(tmp_path)
    with pytest.raises(ValueError, match="do_pan_and_scan of its processor adds crops"):
        family.grid_of(processor, config, 8, 8)


def test_settings_among_those_of_all_processors_are_read(tmp_path: Path) -> None:
    folder_of("gemma4", tokenizer_of("gemma4"), tmp_path)
    own = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(Refused, match="no preprocessor_config.json, nor processor_config.json with an image_processor"):
        image_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": own}))
    processor, _ = image_processor(tmp_path)
    assert (processor.max_soft_tokens, processor.patch_size, processor.pooling_kernel_size) == (70, 2, 2)


def test_every_family_of_the_table_is_here() -> None:
    assert {*KINDS} == {kind for kind in MODELS if not kind.startswith("qwen")}


def test_models_leave_out_the_ids_that_the_tokenizer_of_the_run_marks(tmp_path: Path) -> None:
    """The folder's own tokenizer has one mark more."""
    folder, given = marked_folder("smolvlm", tmp_path), tokenizer_of("smolvlm", without=TILES[0])
    config = load_config([f"model.path={folder}"]).config
    context = context_of(config, tokenizer=given)
    wanted = policy_banned(config, given)
    assert role_spec(context, "ref").context.banned == wanted
    assert {*policy_banned(config)} > {*wanted} == {*banned_tokens(exact_config(folder), given)}
