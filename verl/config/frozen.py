"""Immutable lists and mappings for a resolved configuration. They compare, print and pickle like the built-in ones.
Without them, a part of a run that writes into one would change the settings of other parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never


def _unchangeable(self: object, *args: object, **kwargs: object) -> Never:
    raise TypeError("a configuration does not change: make another one with verl.config.tree.changed")


class FrozenDict(dict[str, Any]):
    """A mapping that cannot be changed."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _unchangeable

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return FrozenDict, (dict(self),)


class FrozenList(list[Any]):
    """A list that cannot be changed."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = clear = extend = insert = pop = _unchangeable
    remove = reverse = sort = _unchangeable

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return FrozenList, (list(self),)


def frozen(value: Any) -> Any:
    """Return an immutable copy of a list or a mapping, with immutable items; any other value unchanged."""
    if isinstance(value, dict):
        return FrozenDict({name: frozen(below) for name, below in value.items()})
    if isinstance(value, list | tuple):
        return FrozenList([frozen(one) for one in value])
    return value


def thawed(value: Any) -> Any:
    """Return a copy of a list or a mapping with built-in types at all levels, for users' code and for libraries that
    take no subclasses (OmegaConf); any other value unchanged."""
    if isinstance(value, dict):
        return {name: thawed(below) for name, below in value.items()}
    if isinstance(value, list):
        return [thawed(one) for one in value]
    return value
