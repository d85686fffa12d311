"""The images that tools return, as a model is shown them: read like those of rows, and placed in prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from verl.agent_loop.base import LoopMedia
from verl.chat.bridge import Bridge, PlainText
from verl.chat.images import ImagePrompts, MarkedRenderer, image_prompts
from verl.chat.template import ANSWER, CALL, USER, Renderer, RenderError, TemplateAudit
from verl.data.images import ImageRules, image_rules
from verl.data.media_items import IMAGE
from verl.errors import Refused
from verl.models.expand import Expansion
from verl.models.image_files import decoded_image
from verl.tools.answers import NO_IMAGES, ReturnedImage, ShownImage, ToolAnswer, content_of, failed, of_parts
from verl.tools.function_tool import ToolBroken
from verl.types import Medium, TaskImage

IMAGE_PART = {"type": "image"}
_NO_TEMPLATE = (
    "the chat template does not render an image in a tool's result; give one that does with model.chat_template=FILE"
)
_CROSSED = "in a model with cross-attention, tokens before the first image would read it too; take another family"
_WITH_IMAGES = "make them with self.apply_chat_template(messages, images=[...])"
_PACKAGE = "agent.format=renderers:NAME renders text alone; leave it out"


@dataclass(frozen=True)
class TurnPictures:
    """Shows the images that tools return to one model.

    rules, prompts: read and render images as in rows · plain: marks the special tokens of texts
    refused: why no tool can return an image here, though the model reads them; "" if one can
    """

    rules: ImageRules = field(repr=False)
    prompts: ImagePrompts = field(repr=False)
    plain: PlainText = field(repr=False)
    refused: str = ""

    @property
    def placeholder(self) -> int:
        return self.prompts.placeholders["image"]

    @property
    def features(self) -> tuple[int, ...]:
        """The ids that features of images, videos and sounds replace."""
        family, config = self.rules.model
        return family.replaced_ids(config)

    async def shown(self, answer: ToolAnswer, tool: str, media: LoopMedia | None) -> ToolAnswer:
        """Return the answer with its images stored. One that cannot be read makes the answer a failure, with the
        reason for the model. Raise ToolBroken if the run cannot have images of tools."""
        if refused := self.refused or (media.refused if media is not None else "it has no store of images"):
            raise ToolBroken(f"{tool} returned an image: {refused}")
        assert media is not None
        parts = list(answer.parts)
        for k, part in enumerate(answer.parts):
            if isinstance(part, ReturnedImage):
                number = sum(isinstance(p, ReturnedImage) for p in answer.parts[: k + 1])
                try:
                    parts[k] = await self._stored(part, f"image {number}", media)
                except Refused as e:
                    return replace(failed("image", f"{tool} failed: {e}"), queue_s=answer.queue_s, note=answer.note)
        return replace(answer, **of_parts(parts))

    async def _stored(self, part: ReturnedImage, where: str, media: LoopMedia) -> ShownImage:
        content, expansion = await self._read(part.item, where)
        return ShownImage(await asyncio.to_thread(media.store.put, content, media.owner), expansion)

    async def prompt(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any], renderer: Renderer, audit: TemplateAudit
    ) -> list[int]:
        """Return the ids of a prompt with these messages, in which a part `{"type": "image"}` is the next one of the
        images. Raise Refused for one that cannot be read, or another number of them."""
        parts = [p for m in messages if not isinstance(m["content"], str) for p in m["content"] if "text" not in p]
        if len(parts) != len(images) or any(part.get("type") not in IMAGE.parts for part in parts):
            raise Refused(f"the messages have places for {len(parts)} images, and {len(images)} are given")
        shown = [{**m, "content": _places(m["content"])} for m in messages]
        read = [await self._read(item, f"image {k}") for k, item in enumerate(images, start=1)]
        ids = self.prompts.ids(renderer, shown, audit)
        stored = [ShownImage("", expansion) for _, expansion in read]
        return [int(i) for i in self.expanded(ids, stored)[0]]

    async def placed(self, ids: np.ndarray, images: Sequence[Any], media: LoopMedia | None) -> tuple[Medium, ...]:
        """Return the places of these images in the ids of a prompt, with their content stored. Raise ValueError if the
        ids do not have the tokens of each of them in this order, or have further placeholders."""
        crossed = _CROSSED if self.rules.model[0].crossed else ""
        if refused := crossed or (media.refused if media is not None else "it has no store of images"):
            raise ToolBroken(f"image_data: {refused}")
        assert media is not None
        found, text, at = list[Medium](), ~np.isin(ids, [self.placeholder, *self.features]), 0
        for k, item in enumerate(images, start=1):
            content, expansion = await self._read(item, f"image_data: image {k}")
            if (first := _first(ids, expansion.ids, at)) is None:
                raise ValueError(f"image_data: the tokens of image {k} are not in prompt_ids; {_WITH_IMAGES}")
            reference = await asyncio.to_thread(media.store.put, content, media.owner)
            found.append(Medium(reference, first + expansion.start, expansion.tokens))
            at = first + len(expansion.ids)
            text[first:at] = True
        if not text.all():
            raise ValueError(
                f"image_data: prompt_ids have placeholders that are none of its images; {_WITH_IMAGES}, and in rows "
                "without videos and sounds"
            )
        return tuple(found)

    def check_places(self, ids: np.ndarray, media: Sequence[Medium]) -> None:
        """Raise ValueError if the ids of a prompt have tokens of media at other places than these."""
        text = ~np.isin(ids, self.features)
        for medium in media:
            text[medium.start : medium.end] = True
        if not text.all():
            raise ValueError("prompt_ids have tokens of images at other places than the row; give image_data")

    async def _read(self, item: Any, where: str) -> tuple[bytes, Expansion]:
        content, image = await asyncio.to_thread(_decoded, item, where)
        return content, self.rules.expansion((image.height, image.width), where, lambda: image)

    def of_task(self, media: Sequence[Medium], images: Sequence[TaskImage]) -> list[ShownImage]:
        """Return the images of a task's prompt. Raise ValueError for a video or a sound."""
        found = []
        for medium, image in zip(media, images, strict=True):
            if image.head:
                raise ValueError(
                    "a video or a sound in a prompt that is rendered again: this chat template rewrites earlier turns"
                )
            found.append(ShownImage(medium.reference, self.rules.expansion_of(image.path)))
        return found

    def text(self, shown: Renderer, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the rendering of marked messages of a trajectory with a placeholder for each image, and none else."""
        return self.prompts.around.written(shown.text(messages, prompt=True))

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages of a row or of the model with marks in the place of the special tokens of images that their
        texts spell out."""
        return [{**m, "content": self._marked(m["content"])} for m in messages]

    def _marked(self, content: Any) -> Any:
        only = self.prompts.plain.control.keys()
        if isinstance(content, str):
            return self.plain.marked(content, only)
        return [
            {**part, "text": self.plain.marked(part["text"], only)} if "text" in part else {"type": part["type"]}
            for part in content
        ]

    def expanded(
        self, ids: np.ndarray, images: Sequence[ShownImage], at: int = 0
    ) -> tuple[np.ndarray, np.ndarray, list[Medium]]:
        """Return ids [t] with the tokens of each image in the place of its placeholder, the number of tokens that
        replaces each of the given ids, and the media. at: the place of the first id in the row. Raise ToolBroken if
        the chat template did not write one placeholder for each image."""
        places = np.flatnonzero(ids == self.placeholder)
        if len(places) != len(images):
            raise ToolBroken(f"the chat template wrote {len(places)} placeholders for {len(images)} images of a tool")
        lengths, parts, media = np.ones(len(ids), np.int64), list[np.ndarray](), list[Medium]()
        start, grown = 0, at
        for place, image in zip(places.tolist(), images):
            own = image.expansion
            parts += [ids[start:place], own.ids]
            grown += place - start
            media.append(Medium(image.reference, grown + own.start, own.tokens))
            grown, start, lengths[place] = grown + len(own.ids), place + 1, len(own.ids)
        return np.concatenate([*parts, ids[start:]]), lengths, media


def without_images(answer: ToolAnswer, tool: str) -> ToolAnswer:
    """Return an answer for a model that reads text alone: a failure, unless each image has a text in its place."""
    if any(isinstance(part, ReturnedImage) and not part.without for part in answer.parts):
        return replace(failed("exception", f"{tool} failed: {NO_IMAGES}"), queue_s=answer.queue_s)
    text = "\n".join(part.without if isinstance(part, ReturnedImage) else str(part) for part in answer.parts)
    return replace(answer, text=text, parts=())


def turn_pictures(
    model: Path | None, tokenizer: Any, plain: PlainText, renderer: Renderer, bridge: Bridge | None, package: bool
) -> tuple[TurnPictures | None, Bridge | None]:
    """Return what shows images of tools to the model in a folder, None if it reads text alone, and the bridge that
    renders them."""
    rules = None if model is None else image_rules(model, Path(), tokenizer)
    if rules is None:
        return None, bridge
    prompts = image_prompts(tokenizer, *rules.model, rules.placeholders)
    shown = MarkedRenderer(
        renderer.tokenizer,
        renderer.template_kwargs,
        renderer.tools,
        spelling=renderer.spelling,
        plain=plain,
        around=prompts.around,
    )
    if bridge is not None:
        bridge = replace(bridge, renderer=replace(shown, tools=bridge.renderer.tools), image_token=prompts.around.token)
    refused = _PACKAGE if package else "" if _renders(shown, prompts) else _NO_TEMPLATE
    if rules.model[0].crossed:
        refused = _CROSSED
    return TurnPictures(rules, prompts, plain, refused), bridge


def _renders(shown: MarkedRenderer, prompts: ImagePrompts) -> bool:
    """Return True if the template writes one placeholder for an image in a tool's result, and the text beside it."""
    result: Mapping[str, Any] = {**ANSWER, "content": [IMAGE_PART, {"type": "text", "text": "wombat 42"}]}
    try:
        text = shown.text([USER, CALL, result], prompt=True)
    except RenderError:
        return False
    return text.count(prompts.around.token) == 1 and text.count("wombat 42") == 1


def _places(content: str | Sequence[Mapping[str, Any]]) -> Any:
    """Return the content of a message with its images as parts that templates read."""
    return content if isinstance(content, str) else [part if "text" in part else IMAGE_PART for part in content]


def _first(ids: np.ndarray, part: np.ndarray, at: int) -> int | None:
    """Return the first place of a part in ids from `at` on; None if it is not there."""
    starts = np.flatnonzero(ids[at : max(at, len(ids) - len(part) + 1)] == part[0]) + at
    return next((int(k) for k in starts if np.array_equal(ids[k : k + len(part)], part)), None)


def _decoded(item: Any, where: str) -> tuple[bytes, Any]:
    content = content_of(item, where)
    return content, decoded_image(content, where)
