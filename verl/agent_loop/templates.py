"""Methods that verl's newest agent loops call on their base class: they render prompts from messages."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.chat import render_prompt
from verl.chat.messages import read_messages
from verl.chat.template import TemplateAudit, audit_template
from verl.errors import Refused

NO_MEDIA = "this model takes no images, videos or sounds; remove them from the rows"


@functools.lru_cache(maxsize=4)
def _audited(tokenizer: Any, template: str, kwargs: str) -> TemplateAudit:
    """Measure a template once for all loops of a process. template: of the tokenizer · kwargs: as JSON."""
    return audit_template(tokenizer, json.loads(kwargs))


class RendersMessages:
    """The methods of a loop that need its tokenizer and the configuration alone."""

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
        """Return the ids of a prompt of these messages, by the rules by which rows are rendered: a message that the
        template would drop is refused. remove_system_prompt: without what the template writes before any first message,
        for messages that follow others."""
        if images or videos or audios:
            raise Refused(NO_MEDIA)
        given = messages.tolist() if hasattr(messages, "tolist") else list(messages)
        read, kwargs = read_messages(given, "apply_chat_template", "messages"), self.config.model.template_kwargs
        audit = _audited(self.tokenizer, str(self.tokenizer.chat_template), json.dumps(kwargs, sort_keys=True))
        ids: list[int] = render_prompt(self.tokenizer, read, kwargs, list(tools or ()) or None, audit=audit).tolist()
        return ids[len(self._system_prompt(kwargs)) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the media of messages: none, or a ValueError."""
        parts = (p for m in messages if isinstance(m["content"], list) for p in m["content"])
        if any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts):
            raise Refused(NO_MEDIA)
        return {}

    def _system_prompt(self, kwargs: Mapping[str, Any]) -> list[int]:
        """Return what the template writes before the first message: two messages of a user are longer than one by what
        it writes for a message."""
        asked = {"role": "user", "content": "1"}
        one, two = (
            list(self.tokenizer.apply_chat_template([asked] * n, tokenize=True, return_dict=False, **kwargs))
            for n in (1, 2)
        )
        return one[: max(0, 2 * len(one) - len(two))]
