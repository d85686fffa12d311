"""Read tool calls that are written as a list of Python calls (Llama 3.2 to 4, LFM2)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from types import MappingProxyType
from typing import Any

from verl.chat.template import one_line

JSON_NAMES = MappingProxyType({"true": True, "false": False, "null": None})


def python_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of `[f(a=1, b="x"), g()]` as {name, arguments}. Raise ValueError for any other Python.

    Arguments are literals of Python or JSON (`true`, `false`, `null`). Nothing is executed.
    """
    try:
        with warnings.catch_warnings():  # of "\\d"
            warnings.simplefilter("ignore")
            found = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError) as e:
        raise ValueError(f"no list of calls: {one_line(e)}") from e
    if not isinstance(found, ast.List) or not text.rstrip().endswith("]"):  # a comment is no part of what Python reads
        raise ValueError("no list of calls")
    if any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline)):
        raise ValueError("a comment between calls")
    calls = []
    for call in found.elts:
        if not isinstance(call, ast.Call) or call.args or not all(k.arg for k in call.keywords):
            raise ValueError("a call is written name(argument=value)")
        if len({k.arg for k in call.keywords}) < len(call.keywords):
            raise ValueError("an argument is given twice")
        if not re.fullmatch(r"[\w.]+", name := ast.unparse(call.func)):
            raise ValueError(f"{name[:80]} is no name of a function")
        arguments = {str(k.arg): ast.literal_eval(_JsonNames().visit(k.value)) for k in call.keywords}
        if odd := next((key for key, value in arguments.items() if not _is_json(value)), ""):
            raise ValueError(f"{odd} is no text, number, boolean, list or dict of such")
        calls.append({"name": name, "arguments": arguments})
    return calls


class _JsonNames(ast.NodeTransformer):
    """Replaces the names of JSON's constants by the constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    return value is None or isinstance(value, str | bool | int | float)
