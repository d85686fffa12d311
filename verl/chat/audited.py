"""The audit of a chat template, measured once for a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from verl.chat.template import TemplateAudit, Tokenizer, audit_template


def audited_once(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any], stops: Sequence[int] = ()) -> TemplateAudit:
    """Return `audit_template` of the same arguments. Six parts of a run need it when they start."""
    text = json.dumps(template_kwargs, sort_keys=True, default=repr)
    if json.loads(text) != template_kwargs:  # with a value that JSON cannot express, such as a date
        return audit_template(tokenizer, template_kwargs, stops)
    return _measured(tokenizer, str(tokenizer.chat_template), text, tuple(stops))


@lru_cache(maxsize=4)
def _measured(tokenizer: Tokenizer, template: str, kwargs: str, stops: tuple[int, ...]) -> TemplateAudit:
    """Measure the template with this source (a tokenizer may get another one). kwargs: its arguments as JSON."""
    return audit_template(tokenizer, json.loads(kwargs), stops)
