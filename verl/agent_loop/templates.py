"""Methods that verl's newest agent loops call on their base class to render prompts from messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.chat import render_prompt
from verl.chat.audited import audited_once
from verl.chat.messages import read_messages
from verl.errors import Refused

NO_MEDIA = "this model takes no images, videos or sounds; remove them from the rows"


class RendersMessages:
    """The methods of a loop that need only its tokenizer and the configuration."""

    config: Any
    tokenizer: Any

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

        remove_system_prompt: leave out the text that the template writes before the first message
        """
        if images or videos or audios:
            raise Refused(NO_MEDIA)
        given = messages.tolist() if hasattr(messages, "tolist") else list(messages)
        read, kwargs = read_messages(given, "apply_chat_template", "messages"), self.config.model.template_kwargs
        audit = audited_once(self.tokenizer, kwargs)
        ids: list[int] = render_prompt(self.tokenizer, read, kwargs, list(tools or ()) or None, audit=audit).tolist()
        return ids[len(self._system_prompt(kwargs)) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the media of messages, which is always {}. Raise ValueError for messages with media."""
        parts = (p for m in messages if isinstance(m["content"], list) for p in m["content"])
        if any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts):
            raise Refused(NO_MEDIA)
        return {}

    def _system_prompt(self, kwargs: Mapping[str, Any]) -> list[int]:
        """Return the ids that the template writes before the first message: the prompt of one message without the ids
        by which a prompt of two messages is longer."""
        wanted = {"role": "user", "content": "1"}
        one, two = (
            list(self.tokenizer.apply_chat_template([wanted] * n, tokenize=True, return_dict=False, **kwargs))
            for n in (1, 2)
        )
        return one[: max(0, 2 * len(one) - len(two))]
