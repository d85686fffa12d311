"""The ids between a sampled turn and the next prompt: what the template would have written, for every template that
only appends; no bridge for the others."""

from __future__ import annotations

from typing import Any

import numpy as np
from each import FULL_GRID, each
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import TEMPLATES, audit_of, tokenizer_of
from tools import HERMES, REWRITING, hermes_tokenizer

from verl.chat.bridge import Bridge, bridge_of, plain_text
from verl.chat.template import Renderer, audit_template

# Templates that show a message of any role, and Qwen3's.
BRIDGED = ("chatml", "qwen3", "llama3", "phi", "zephyr", "command_r", "quickstart")
BRIDGES = {name: bridge_of(tokenizer_of(name), audit_of(name), {}) for name in TEMPLATES}


def test_templates_that_rewrite_or_refuse_have_no_bridge():
    assert {name for name, bridge in BRIDGES.items() if bridge is not None} == set(BRIDGED)
    for template, appends in ((HERMES, True), (REWRITING, False)):
        tokenizer = hermes_tokenizer(template)
        assert (bridge_of(tokenizer, audit_template(tokenizer), {}) is not None) == appends


TEXT = st.text(
    st.sampled_from("ab 0.\n<|>é中") | st.characters(codec="utf-8", exclude_characters="\ue000"), max_size=20
)
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@settings(max_examples=400 if FULL_GRID else 150, deadline=None)
@given(
    name=st.sampled_from(BRIDGED),
    turns=st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=3),
    results=st.lists(TEXT, min_size=1, max_size=3),
)
def test_the_bridge_is_what_the_template_writes(name, turns, results):
    """After any history. What a template trims it trims in both."""
    tokenizer, bridge = tokenizer_of(name), BRIDGES[name]
    assert bridge is not None
    history: list[dict[str, Any]] = []
    for asked, said, calls in turns:
        history += [{"role": "user", "content": asked}]
        history += [{"role": "assistant", "content": said, **({"tool_calls": [CALL]} if calls else {})}]
    new = [{"role": "tool", "name": "f", "tool_call_id": "abcdef123", "content": text} for text in results]
    full = Renderer(tokenizer).ids([*history, *new], prompt=True).tolist()
    for sampled in ([5, bridge.end[-1]], [5, 6]):
        added = bridge.ids(np.array(sampled), new).tolist()
        closed = added if sampled[-1] == bridge.end[-1] else added[1:]
        assert sampled[-1] == bridge.end[-1] or added[0] == bridge.end[-1]
        assert full[len(full) - len(closed) :] == closed and full[len(full) - len(closed) - 1] == bridge.end[-1]


@each("name", BRIDGED)
def test_what_the_messages_say_is_told_from_what_the_template_writes(name):
    tokenizer, bridge = tokenizer_of(name), BRIDGES[name]
    assert isinstance(bridge, Bridge)
    said = ["kiwi: 5", "tool", "a<|im_end|>b"]
    for sampled in ([5, bridge.end[-1]], [5]):
        messages = [{"role": "tool", "name": "f", "tool_call_id": "abcdef123", "content": text} for text in said]
        ids, written = bridge.after(np.array(sampled), messages)
        assert ids.tolist() == bridge.ids(np.array(sampled), messages).tolist()
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(written)) + 1)
        found = [tokenizer.decode(ids[run]) for run in runs if written[run[0]]]
        assert [text.strip() for text in found] == said, "a token may hold the white space beside it"


@each("name", BRIDGED)
def test_no_text_of_a_message_is_a_control_token(name):
    tokenizer, bridge = tokenizer_of(name), BRIDGES[name]
    assert isinstance(bridge, Bridge)
    special = TEMPLATES[name][2]
    plain = bridge.ids(np.array(bridge.end), [{"role": "tool", "content": "x"}]).tolist()
    forged = bridge.ids(np.array(bridge.end), [{"role": "tool", "content": "x" + "".join(special) * 2}]).tolist()
    control = set(tokenizer.convert_tokens_to_ids(list(special)))
    assert [i for i in forged if i in control] == [i for i in plain if i in control]
    assert "".join(special) * 2 in tokenizer.decode(forged)


def test_a_marker_of_ours_in_a_text_is_no_marker():
    plain = plain_text(tokenizer_of("chatml"))
    assert (
        plain.marked("a\ue0000\ue001<|im_end|>")
        == f"a\ufffd0\ue001\ue000{list(plain.control).index('<|im_end|>')}\ue001"
    )
