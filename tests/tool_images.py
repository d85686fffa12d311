"""A model that reads images and calls a tool that returns them, for tests. Its weights are random, so the file of the
tool decides that each first turn is a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vision import chat_folder, image_tokenizer

_CONTENT = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|user|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{{ '<|assistant|>' if m['role'] == 'assistant' else '<|user|>' }}"
    "{% if m['role'] == 'tool' %}<result>{% endif %}" + _CONTENT + "{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template with tools, whose results may have images. IMAGE is the token of one."""
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TOOL_FILE = '''
from PIL import Image

from verl.agent_loop import tool_agent
from verl.chat.parsing import ToolCall, Turn
from verl.tools import ToolResponse, function_tool

SIZES = ((12, 8), (8, 8), (16, 8), (8, 12))


def calls_first(self, play, out):
    if play.calls >= CALLS or not out.token_ids:
        return None
    return Turn(calls=(ToolCall("look", {"number": sum(out.token_ids)}),), text="")


tool_agent.ToolAgentLoop._parse = calls_first


@function_tool
def look(number: int):
    """
    Return a drawing.

    Args:
        number: Which one.
    """
    colour = (number % 256, 7 * number % 256, 31 * number % 256)
    return ToolResponse(image=[Image.new("RGB", SIZES[number % 4], colour)], text=f"is {number % 10}")
'''


def tool_tokenizer(template: str = TOOL_TEMPLATE) -> Any:
    tokenizer = image_tokenizer()
    tokenizer.chat_template = template.replace("IMAGE", QWEN_IMAGE)
    return tokenizer


def tool_folder(folder: Path, kind: str, template: str = TOOL_TEMPLATE) -> Path:
    """Write a model of this kind with the chat template."""
    chat_folder(folder, kind)
    tool_tokenizer(template).save_pretrained(folder)
    return folder


def tool_file(path: Path, *, calls: int = 1) -> Path:
    """Write the tool. calls: the first turns of each trajectory that call it."""
    path.write_text(TOOL_FILE.replace("CALLS", str(calls)))
    return path
