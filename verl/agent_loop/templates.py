"""Methods that verl's newest agent loops call on their base class to render prompts from messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.chat import render_prompt
from verl.chat.audited import audited_once
from verl.chat.messages import read_messages
from verl.chat.template import Renderer
from verl.data.media_items import IMAGE, part_content
from verl.errors import Refused

NO_MEDIA = "this model takes no images, videos or sounds; remove them from the rows"
NO_VIDEO = "a loop adds no videos or sounds to its rows; give frames as images"


class RendersMessages:
    """The methods of a loop that need only its tokenizer and the configuration."""

    config: Any
    tokenizer: Any
    server_manager: Any

    async def apply_chat_template(
        self,
        messages: Any,
        tools: Sequence[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Return the ids of a prompt with these messages. As for rows, messages that the template would drop raise
        ValueError.

        images: those of the parts of messages that are images, in order
        remove_system_prompt: leave out the text that the template writes before the first message
        """
        pictures = self.server_manager.pictures
        if videos or audios or (images and pictures is None):
            raise Refused(NO_MEDIA if pictures is None else NO_VIDEO)
        given = messages.tolist() if hasattr(messages, "tolist") else list(messages)
        read, kwargs = read_messages(given, "apply_chat_template", "messages"), self.config.model.template_kwargs
        audit = audited_once(self.tokenizer, kwargs)
        shown = list(tools or ()) or None
        if pictures is not None:
            ids = await pictures.prompt(
                read, images or (), Renderer(self.tokenizer, kwargs, shown, audit.spelling), audit
            )
        else:
            ids = render_prompt(self.tokenizer, read, kwargs, shown, audit=audit).tolist()
        return ids[len(self._system_prompt(kwargs)) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the images in parts of messages as {"images": [...]}; {} if there are none. Raise ValueError for other
        media, and for a model that reads text alone."""
        parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"] if isinstance(p, Mapping)]
        media = [part for part in parts if part.get("type") not in ("text", None)]
        if media and self.server_manager.pictures is None:
            raise Refused(NO_MEDIA)
        if any(part.get("type") not in IMAGE.parts for part in media):
            raise Refused(NO_VIDEO)
        images = [part["image"] if "image" in part else part_content(part, IMAGE, "a message") for part in media]
        return {"images": images} if images else {}

    def _system_prompt(self, kwargs: Mapping[str, Any]) -> list[int]:
        """Return the ids that the template writes before the first message: the prompt of one message without the ids
        by which a prompt of two messages is longer."""
        wanted = {"role": "user", "content": "1"}
        one, two = (
            list(self.tokenizer.apply_chat_template([wanted] * n, tokenize=True, return_dict=False, **kwargs))
            for n in (1, 2)
        )
        return one[: max(0, 2 * len(one) - len(two))]
