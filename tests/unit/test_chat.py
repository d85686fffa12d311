"""Chat templates: the audit of a dozen real shapes against golden flags, and loss masks that are exact to the token.

The Jinja strings are ours; they imitate the behaviour (not the text) of published templates.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.chat.audited import audited_once
from verl.chat.conversation import render_conversation
from verl.chat.encoding import encoded_text
from verl.chat.template import RowRefused, audit_template, render_prompt

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3: tools, tool calls; reasoning is kept only after the last user query, and the last turn always shows a block.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content if m.content is string else '' %}
        {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set sys = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set sys = '' %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (sys if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Mistral: the system message is written into the LAST user turn, so history moves.
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set sys = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}{% if loop.index0 >= (rest | length) - 2 %}"
    "{{ '[INST] ' + sys + m['content'] + '[/INST]' }}{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# Phi-3: a final eos when nothing is to be generated, which the next turn takes away again.
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# DeepSeek-R1: reasoning dropped from every turn, and opened again by the generation prompt.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{{ {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}.get(m['role'], '<|SYSTEM_TOKEN|>') }}"
    "{{ m['content'] + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
QUICKSTART = (
    "{% for m in messages %}{{ '<|user|>' if m['role']=='user' else '<|assistant|>' }}{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Planted: every turn but the last loses its reasoning. A mask by incremental lengths would be silently wrong.
STRIPPING = (
    "{% for m in messages %}{% set c = m['content'] %}{% if '</think>' in c and not loop.last %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Plain text, no special token anywhere: boundaries are only as good as the tokeniser's merges.
PLAIN_TEXT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

TEMPLATES = {
    # name: (template, eos token, added special tokens)
    "chatml": (CHATML, "<|im_end|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
    "qwen3": (QWEN3, "<|im_end|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
    "llama3": (LLAMA3, "<|eot_id|>", ("<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "llama2": (LLAMA2, "</s>", ("<bos>", "</s>")),
    "gemma": (GEMMA, "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "mistral": (MISTRAL, "</s>", ("<bos>", "</s>", "[INST]", "[/INST]")),
    "phi": (PHI, "<|endoftext|>", ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")),
    "r1": (R1, "<|end_of_sentence|>", ("<bos>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>")),
    "zephyr": (ZEPHYR, "</s>", ("</s>",)),
    "command_r": (
        COMMAND_R,
        "<|END_OF_TURN_TOKEN|>",
        ("<bos>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    "quickstart": (QUICKSTART, "<|end|>", ("<|user|>", "<|assistant|>", "<|end|>")),
    "stripping": (STRIPPING, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "plain_text": (PLAIN_TEXT, "<eos>", ("<eos>",)),
}
CORPUS = [
    "It is 42. : It is. Why is six times seven forty-two? The answer is 7, and then #### 18.",
    "assistant: user: system:",
]


@cache
def tokenizer_of(name: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template, eos, special = TEMPLATES[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, bos_token="<bos>" if "<bos>" in special else None
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def audit_of(name: str) -> Any:
    return audit_template(tokenizer_of(name), {})


def conversation(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[k % 2], "content": c} for k, c in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def trained(name: str, rows: list[Any]) -> list[str]:
    """The text of each masked run, special tokens included."""
    tokenizer, out = tokenizer_of(name), []
    for row in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(int), [0]])))
        out += [tokenizer.decode(row.ids[a:b]) for a, b in edges.reshape(-1, 2)]
    return out


# name: (append_only, end of turn, trailing, system, tools, tool calls)
GOLDEN = {
    "chatml": (True, "<|im_end|>", "\n", True, False, False),
    "qwen3": (False, "<|im_end|>", "\n", True, True, True),
    "llama3": (True, "<|eot_id|>", "", True, False, False),
    "llama2": (True, " </s>", "", True, False, False),
    "gemma": (True, "<end_of_turn>", "\n", False, False, False),
    "mistral": (False, "</s>", "", True, False, False),
    "phi": (True, "<|end|>", "\n<|endoftext|>", True, False, False),
    "r1": (False, "<|end_of_sentence|>", "", True, False, False),
    "zephyr": (True, "</s>", "\n", True, False, False),
    "command_r": (True, "<|END_OF_TURN_TOKEN|>", "", True, False, False),
    "quickstart": (True, "<|end|>", "", False, False, False),
    "stripping": (False, "<|im_end|>", "\n", True, False, False),
    "plain_text": (False, "", "", True, False, False),
}


def test_the_audits_match_the_golden_table() -> None:
    failed = {}
    for name, golden in GOLDEN.items():
        audit, decode = audit_of(name), tokenizer_of(name).decode
        ending, trailing = decode(audit.ends_turn_with), decode(audit.trailing_ids)
        supports = (audit.supports_system, audit.supports_tools, audit.supports_tool_calls)
        if (found := (audit.append_only, ending, trailing, *supports)) != golden:
            failed[name] = (found, golden)
    assert not failed and GOLDEN.keys() == TEMPLATES.keys()


# name: text of each trained span of user "Hi", assistant "A one", user "More", assistant "B two"
GOLDEN_SPANS = {
    "chatml": ["A one<|im_end|>", "B two<|im_end|>"],
    "qwen3": ["<think>\n\n</think>\n\nA one<|im_end|>", "<think>\n\n</think>\n\nB two<|im_end|>"],
    "llama3": ["A one<|eot_id|>", "B two<|eot_id|>"],
    "llama2": [" A one </s>", " B two </s>"],
    "gemma": ["A one<end_of_turn>", "B two<end_of_turn>"],
    "mistral": [" A one</s>", " B two</s>"],
    "phi": ["A one<|end|>", "B two<|end|>"],
    "zephyr": ["A one</s>", "B two</s>"],
    "command_r": ["A one<|END_OF_TURN_TOKEN|>", "B two<|END_OF_TURN_TOKEN|>"],
    "quickstart": ["A one<|end|>", "B two<|end|>"],
    "stripping": ["A one<|im_end|>", "B two<|im_end|>"],
}


def test_masks_of_two_turns() -> None:
    messages, failed = conversation("Hi", "A one", "More", "B two"), []
    for name, golden in GOLDEN_SPANS.items():
        tokenizer, audit = tokenizer_of(name), audit_of(name)
        rows = render_conversation(tokenizer, messages, audit, template_kwargs={})
        last = render_conversation(tokenizer, messages, audit, template_kwargs={}, last_only=True)
        later = render_conversation(tokenizer, messages, audit, template_kwargs={}, train_from=3)
        prompts = [render_prompt(tokenizer, messages[:upto], template_kwargs={}) for upto in (3, 1)]
        checks = {
            "one row if append-only, else one per turn": len(rows) == (1 if audit.append_only else 2),
            "both turns": trained(name, rows) == golden,
            "last_only": len(last) == 1 and trained(name, last) == golden[1:],
            "train_from": trained(name, later) == golden[1:],
            "a row begins with exactly what the engine would see": all(
                np.array_equal(row.ids[: len(p)], p) for row, p in zip(reversed(rows), prompts)
            ),
        }
        failed += [(name, what) for what, holds in checks.items() if not holds]
    assert not failed


THINK = "<think>\nweigh it\n</think>\n\nA one"


def test_qwen3_history_loses_its_reasoning_and_the_trained_turn_keeps_it() -> None:
    rows = render_conversation(
        tokenizer_of("qwen3"), conversation("Hi", THINK, "More", THINK), audit_of("qwen3"), template_kwargs={}
    )
    assert trained("qwen3", rows) == [THINK + "<|im_end|>"] * 2
    assert "weigh" not in tokenizer_of("qwen3").decode(rows[1].ids[~rows[1].mask])


def test_an_audit_that_is_measured_once_is_of_the_template_and_arguments_of_now() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))  # the other tests share that one
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, ()),
        ({}, (5,)),
        ({"enable_thinking": False}, ()),
        ({"today": datetime.date(2026, 1, 2)}, ()),
    ]
    for name in ("qwen3", "r1", "qwen3"):
        tokenizer.chat_template = tokenizer_of(name).chat_template
        for kwargs, stops in cases * 2:
            assert audited_once(tokenizer, kwargs, stops) == audit_template(tokenizer, kwargs, stops)


def test_qwen3_without_thinking_trains_the_answer_after_the_closed_block() -> None:
    tokenizer, off = tokenizer_of("qwen3"), {"enable_thinking": False}
    audit = audit_template(tokenizer, off)
    rows = render_conversation(tokenizer, conversation("Hi", "A one"), audit, template_kwargs=off)
    assert trained("qwen3", rows) == ["A one<|im_end|>"]
    with pytest.raises(RowRefused, match="opens it again"):
        render_conversation(tokenizer, conversation("Hi", THINK), audit, template_kwargs=off)


def test_r1_trains_what_the_model_would_have_written_after_the_opened_block() -> None:
    tokenizer, audit = tokenizer_of("r1"), audit_of("r1")
    for content in (THINK, "weigh it\n</think>\n\nA one", "<think> weigh it\n</think>\n\nA one"):
        rows = render_conversation(tokenizer, conversation("Hi", content), audit, template_kwargs={})
        assert trained("r1", rows) == ["weigh it\n</think>\n\nA one<|end_of_sentence|>"]
        assert tokenizer.decode(rows[0].ids).count("<think>") == 1
    with pytest.raises(RowRefused, match="never closes it"):
        render_conversation(tokenizer, conversation("Hi", "A one"), audit, template_kwargs={})


def test_a_reasoning_field_is_rendered_or_refused() -> None:
    messages: list[dict[str, Any]] = [
        *conversation("Hi"),
        {"role": "assistant", "content": "A", "reasoning_content": "why"},
    ]
    rows = render_conversation(tokenizer_of("qwen3"), messages, audit_of("qwen3"), template_kwargs={})
    assert trained("qwen3", rows) == ["<think>\nwhy\n</think>\n\nA<|im_end|>"]
    for name in ("chatml", "r1"):
        with pytest.raises(RowRefused, match=r"reasoning_content, which|not plain text"):
            render_conversation(tokenizer_of(name), messages, audit_of(name), template_kwargs={})


def test_only_a_whole_tag_counts_as_already_in_the_prompt() -> None:
    """A quote mark that looks like the end of the generation prompt belongs to the answer."""
    messages = conversation("Hi", "> weigh\n</think>\n\nA one")
    rows = render_conversation(tokenizer_of("r1"), messages, audit_of("r1"), template_kwargs={})
    assert trained("r1", rows) == ["> weigh\n</think>\n\nA one<|end_of_sentence|>"]


def test_a_history_that_cannot_be_one_row_is_a_row_for_each_turn_whatever_the_audit_says() -> None:
    messages = conversation("Hi", THINK, "More", THINK)
    for name in ("stripping", "qwen3"):
        lied_to = dataclasses.replace(audit_of(name), append_only=True)
        rows = render_conversation(tokenizer_of(name), messages, lied_to, template_kwargs={})
        assert trained(name, rows) == [THINK + "<|im_end|>"] * 2


def test_a_token_that_merges_over_the_boundary_is_refused() -> None:
    messages = conversation("Hi", "It is 42.")
    with pytest.raises(RowRefused, match="merge"):
        render_conversation(tokenizer_of("plain_text"), messages, audit_of("plain_text"), template_kwargs={})
    lied_to = dataclasses.replace(audit_of("plain_text"), append_only=True)
    with pytest.raises(RowRefused, match="merge with the first of the answer"):
        render_conversation(tokenizer_of("plain_text"), messages, lied_to, template_kwargs={})


def test_tool_calls_are_trained_and_tool_results_are_not() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "secret 7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    rows = render_conversation(tokenizer_of("qwen3"), messages, audit_of("qwen3"), template_kwargs={}, tools=[tool])
    texts = trained("qwen3", rows)
    assert '<tool_call>\n{"name": "add"' in texts[0] and texts[1].endswith("It is 7.<|im_end|>")
    assert not any("secret" in t for t in texts)
    for kwargs, text in (({"tools": [tool]}, "tools, which"), ({}, "tool calls or tool results")):
        with pytest.raises(RowRefused, match=text):
            render_conversation(
                tokenizer_of("chatml"),
                messages if not kwargs else conversation("Hi", "A"),
                audit_of("chatml"),
                template_kwargs={},
                **kwargs,
            )


def test_rows_that_cannot_be_rendered_are_refused_with_the_reason() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, conversation("a", "b")[1]]
    for messages, reason in (
        (conversation("Hi"), "no assistant turn"),
        ([{"role": "assistant", "content": "Hello"}], "no assistant turn after a prompt"),
        (conversation("Hi", "A", system="S"), "a system message"),
        (twice, "refuses"),
    ):
        with pytest.raises(RowRefused, match=reason):
            render_conversation(tokenizer_of("gemma"), messages, audit_of("gemma"), template_kwargs={})


APPENDING = [n for n, g in GOLDEN.items() if g[0]]
# Words, digits, quotes, newlines inside; no leading or trailing white space, which some templates trim.
TEXT = st.text(st.sampled_from("aIt 7.?\n'é日#<"), min_size=1, max_size=12).map(str.strip).filter(bool)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(APPENDING), turns=st.lists(TEXT, min_size=2, max_size=6), add_tail=st.booleans())
def test_masks_hold_exactly_the_assistants_words(name: str, turns: list[str], add_tail: bool) -> None:
    if len(turns) % 2:
        turns = turns[:-1]
    tail = ["and a question without an answer"] if add_tail else []
    audit = audit_of(name)
    rows = render_conversation(tokenizer_of(name), conversation(*turns, *tail), audit, template_kwargs={})
    end = tokenizer_of(name).decode(audit.ends_turn_with)
    assert [t.removesuffix(end).strip() for t in trained(name, rows)] == turns[1::2]
    assert all(t.endswith(end) for t in trained(name, rows))
    assert not rows[0].mask[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(["qwen3", "stripping", "mistral", "r1"]), turns=st.lists(TEXT, min_size=2, max_size=6))
def test_per_turn_rows_begin_with_the_inference_prompt(name: str, turns: list[str]) -> None:
    turns = [t if k % 2 == 0 else f"<think>\n{t}\n</think>\n\n{t}" for k, t in enumerate(turns)]
    messages = conversation(*turns[: len(turns) // 2 * 2])
    rows = render_conversation(tokenizer_of(name), messages, audit_of(name), template_kwargs={})
    assert len(rows) == len(messages) // 2
    for k, row in enumerate(rows):
        prompt = render_prompt(tokenizer_of(name), messages[: 2 * k + 1], template_kwargs={})
        assert np.array_equal(row.ids[: len(prompt)], prompt)
        first, last = np.flatnonzero(row.mask)[[0, -1]]
        assert first == len(prompt) and row.mask[first : last + 1].all()
        assert row.ids[last] == audit_of(name).ends_turn_with[-1]
        words = "".join(tokenizer_of(name).decode(row.ids[row.mask]).split())
        assert "".join(turns[2 * k + 1].removeprefix("<think>").split()) in words


def test_a_greeting_is_context() -> None:
    messages = [{"role": "assistant", "content": "Hello"}, *conversation("Hi", "A")]
    rows = render_conversation(tokenizer_of("chatml"), messages, audit_of("chatml"), template_kwargs={})
    assert trained("chatml", rows) == ["A<|im_end|>"]


def test_ids_of_a_text_are_those_of_the_tokenizers_call() -> None:
    tokenizer = tokenizer_of("chatml")
    texts = [
        "",
        "six times seven",
        f"a{tokenizer.eos_token}b {tokenizer.eos_token}",
        "é\u4e2d\U0001f600\n\t  x",
        "x" * 5000,
    ]

    def check(one: Any) -> list[int]:
        for text in texts:
            called = one(text, add_special_tokens=False)["input_ids"]
            assert encoded_text(one, text).tolist() == list(called), text[:20]
            assert encoded_text(one, text).dtype == np.int64
        return encoded_text(one, texts[2]).tolist()

    class Own(type(tokenizer)):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *given: Any, **more: Any) -> Any:
            return super()._encode_plus(f"{text}!", *given, **more)

    plain = check(tokenizer)
    split, cut, own = (copy.deepcopy(tokenizer) for _ in range(3))
    split.split_special_tokens = True
    assert check(split) != plain, "a special token in a text is text"
    cut.backend_tokenizer.enable_truncation(2)
    assert check(cut) == plain, "the call ends a truncation of the file"
    own.__class__ = Own
    assert check(own) != plain
