"""The package flash-attn, which nothing needs: its functions, where an installed release has them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def flash_attn(function: str) -> Callable[..., Any] | None:
    """Return a function of the module `flash_attn`, or None where there is none of this name. The function is looked
    for and not the module alone: flash-attn-4 installs a module `flash_attn` without those of flash-attn 2."""
    try:
        module = importlib.import_module("flash_attn")
    except ImportError:
        return None
    found: Callable[..., Any] | None = getattr(module, function, None)
    return found
