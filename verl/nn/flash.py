"""The optional package flash-attn: its functions, if the installed release has them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def flash_attn(function: str) -> Callable[..., Any] | None:
    """Return a function of the module `flash_attn`, or None if it does not exist. The function is looked up, not only
    the module: flash-attn-4 installs a module `flash_attn` without the functions of flash-attn 2."""
    try:
        module = importlib.import_module("flash_attn")
    except ImportError:
        return None
    found: Callable[..., Any] | None = getattr(module, function, None)
    return found
