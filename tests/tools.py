"""A small chat model's tokenizer with tools, and tools, for the tests of agents."""

from __future__ import annotations

from typing import Any

from verl.tools import function_tool

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}{{- (tool | tojson) }}{%- endfor %}
    {{- '</tools>\n<tool_call>\n{"name": N, "arguments": A}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
REWRITING = HERMES.replace(
    "m.content }}\n        {%- for", "(m.content if loop.last else m.content | upper) }}\n        {%- for"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def hermes_tokenizer(template: str = HERMES, *, vocab_size: int = 330) -> Any:
    """Byte-level, with ChatML's control tokens and Qwen's way to write calls."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(
        ['{"name": "multiply", "arguments": {"a": 12, "b": 34}}', "user assistant 408"] * 4, trainer
    )
    core.add_tokens([AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>", "<tool_response>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


@function_tool
def multiply(a: int, b: int) -> str:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a * b)
