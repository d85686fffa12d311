"""Reward functions that a Python program has defined: they are imported again by the processes that call them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.errors import Refused


def importable(fn: Callable[..., Any]) -> tuple[str, str]:
    """Return (file, name) of a reward function, by which its worker processes import it."""
    source = inspect.getsourcefile(fn)
    if source is None or "<locals>" in fn.__qualname__ or fn.__name__ == "<lambda>":
        raise Refused(
            f"reward={fn.__qualname__}: rewards run in killable worker processes, which must be able to import them; "
            "define the function at the top level of a file"
        )
    if fn.__module__ == "__main__" and not any(map(_is_guard, ast.parse(Path(source).read_text()).body)):
        raise Refused(
            f"reward={fn.__qualname__}: its workers import {source}, which would start this run again in each of them; "
            'put what starts it below `if __name__ == "__main__":`, or the function in a file of its own'
        )
    return source, fn.__qualname__


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and {"__name__", "'__main__'"} <= set(ast.unparse(node.test).split())
