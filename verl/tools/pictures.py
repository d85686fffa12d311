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
from verl.chat.template import ANSWER, CALL, USER, Renderer, RenderError
from verl.data.images import ImageRules, image_rules
from verl.errors import Refused
from verl.models.image_files import decoded_image
from verl.tools.answers import NO_IMAGES, ReturnedImage, ShownImage, ToolAnswer, content_of, failed, of_parts
from verl.tools.function_tool import ToolBroken
from verl.types import Medium, TaskImage

IMAGE_PART = {"type": "image"}
_NO_TEMPLATE = (
    "the chat template does not render an image in a tool's result; give one that does with model.chat_template=FILE"
)
_CROSSED = "in a model with cross-attention, tokens before the first image would read it too; take another family"
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
        content, image = await asyncio.to_thread(_decoded, part.item, where)
        expansion = self.rules.expansion((image.height, image.width), where, lambda: image)
        return ShownImage(await asyncio.to_thread(media.store.put, content, media.owner), expansion)

    def of_task(self, media: Sequence[Medium], images: Sequence[TaskImage]) -> list[ShownImage]:
        """Return the images of a task's prompt. Raise ValueError for a video."""
        found = []
        for medium, image in zip(media, images, strict=True):
            if image.head:
                raise ValueError(
                    "a video in a prompt that is rendered again: this chat template rewrites earlier turns"
                )
            found.append(ShownImage(medium.reference, self.rules.expansion_of(image.path)))
        return found

    def text(self, shown: Renderer, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the rendering of the messages of a trajectory with a placeholder for each image, and none else. The
        texts of tools have marks already."""
        marked = [{**m, "content": self._marked(m["content"])} if m["role"] != "tool" else m for m in messages]
        return self.prompts.around.written(shown.text(marked, prompt=True))

    def _marked(self, content: Any) -> Any:
        only = self.prompts.plain.control.keys()
        if isinstance(content, str):
            return self.plain.marked(content, only)
        return [{**part, "text": self.plain.marked(part["text"], only)} if "text" in part else part for part in content]

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
    rules = None if model is None else image_rules(model, Path(), tokenizer, videos=False)
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


def _decoded(item: Any, where: str) -> tuple[bytes, Any]:
    content = content_of(item, where)
    return content, decoded_image(content, where)
