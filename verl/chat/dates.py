"""Detect templates that print today's date: their prompts change from day to day, also when a run is resumed."""

from __future__ import annotations

import copy
from dataclasses import replace

from verl.chat.template import USER, Renderer, RenderError

NAMES = ("date_string", "current_date", "today", "date", "date_today", "today_date")  # that templates give a date


def date_line(r: Renderer) -> str:
    """Return a warning about a template that prints today's date, with the setting that fixes the date; "" for any
    other template."""
    if "strftime_now" not in str(r.tokenizer.chat_template) or not _changes(r):
        return ""
    prefix = "chat template: it prints today's date, so that prompts are others tomorrow. Fix: "
    pins = (name for name in NAMES if not _changes(replace(r, template_kwargs={**r.template_kwargs, name: "kea"})))
    if name := next(pins, ""):
        return f"{prefix}model.template_kwargs={{{name}: '26 Jul 2024'}} pins it"
    return f"{prefix}model.chat_template=FILE with a fixed date pins it"


def _changes(r: Renderer) -> bool:
    """Return whether the prompts of two days differ. The day is a macro before the template, in the place of its own
    call."""
    texts = []
    for day in ("kea", "weka"):
        tokenizer = copy.copy(r.tokenizer)
        tokenizer.chat_template = (
            f"{{%- macro strftime_now(form) -%}}{day}{{%- endmacro -%}}{r.tokenizer.chat_template}"
        )
        try:
            texts.append(replace(r, tokenizer=tokenizer).text([USER], prompt=True))
        except RenderError:
            return False
    return texts[0] != texts[1]
