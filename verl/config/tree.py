"""The typed tree of schema.py as data: its leaf keys with type, default and documentation, and how values enter it."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from verl.config import schema
from verl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key: `section.name`, its type hint, default, and the docstring under its field."""

    key: str
    hint: Any
    default: Any
    doc: str

    @property
    def is_mapping(self) -> bool:
        """Free keys below it: `reward.kwargs.x=1`."""
        return typing.get_origin(self.hint) is dict

    @property
    def type_name(self) -> str:
        return type_name(self.hint)


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Every key of the tree, in the order of schema.py."""
    found = {}
    docs = _field_docs()
    for section, cls in sections().items():
        hints = typing.get_type_hints(cls)
        defaults = cls()
        for field in dataclasses.fields(cls):
            key = f"{section}.{field.name}"
            doc = docs.get((cls.__name__, field.name), "")
            found[key] = Leaf(key, hints[field.name], vars(defaults)[field.name], doc)
    return MappingProxyType(found)


@functools.cache
def sections() -> Mapping[str, type]:
    return MappingProxyType(typing.get_type_hints(Config))


def _field_docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal under the field."""
    docs = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:]):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                assert isinstance(field.target, ast.Name)
                docs[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return docs


def leaf_of(key: str) -> tuple[Leaf, tuple[str, ...]] | None:
    """The leaf that `key` sets and the path below it (() unless the leaf is a mapping); None: no such key."""
    found = leaves().get(key)
    if found is not None:
        return found, ()
    parts = key.split(".")
    above = leaves().get(".".join(parts[:2]))
    if above is not None and above.is_mapping and all(parts[2:]):
        return above, tuple(parts[2:])
    return None


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names most like `name`: as a whole, or by their last component (`temprature` -> `rollout.temperature`)."""
    wanted = name.lower()
    whole, last = difflib.SequenceMatcher(b=wanted), difflib.SequenceMatcher(b=wanted.rsplit(".", 1)[-1])
    scored = []
    for candidate in names:
        whole.set_seq1(candidate.lower())
        last.set_seq1(candidate.lower().rsplit(".", 1)[-1])
        score = max(m.ratio() * w if m.quick_ratio() > 0.6 else 0.0 for m, w in ((whole, 1.0), (last, 0.95)))
        if score > 0.6:
            scored.append((-score, len(candidate), candidate))
    return [candidate for _, _, candidate in sorted(scored)[:count]]


def type_name(hint: Any) -> str:
    """`int | None` -> "int or null", `list[str]` -> "list of str"."""
    if hint is type(None):
        return "null"
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(arm) for arm in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "mapping"
    return str(hint.__name__)


def convert(value: Any, hint: Any, text: str | None = None) -> Any:
    """`value` as `hint`, or TypeError. `text`: as the user wrote it, for a string that reads as a number (name=007).

    Nothing is rounded or guessed: 1.5 is no int, 1 no bool, "3" no number; 2.0 is the int 2, a string alone a list of one.
    """
    if isinstance(hint, types.UnionType):
        arms = typing.get_args(hint)
        return None if value is None and type(None) in arms else convert(value, arms[0], text)
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        if item is str and isinstance(value, str):
            return [value]
        if isinstance(value, list | tuple):
            return [convert(v, item) for v in value]
    elif typing.get_origin(hint) is dict:
        if isinstance(value, Mapping):
            return copy.deepcopy(dict(value))
    elif hint is bool or isinstance(value, bool):
        if hint is bool and isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int | float) and value == value // 1:
            return int(value)
    elif hint is float:
        if isinstance(value, int | float) and value == value:
            return float(value)
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float):
            return str(value) if text is None else text
    else:
        raise AssertionError(f"schema.py uses {hint!r}, which tree.convert does not know")
    raise TypeError(f"expected {type_name(hint)}")


def build(values: Mapping[str, Any]) -> Config:
    """The tree from one value per leaf, each of its leaf's type. Leaves that are not named keep their default."""
    made = {}
    for section, cls in sections().items():
        prefix = f"{section}."
        made[section] = cls(**{k[len(prefix) :]: copy.deepcopy(v) for k, v in values.items() if k.startswith(prefix)})
    return Config(**made)


def values_of(config: Config) -> dict[str, Any]:
    """One value per leaf, in the order of the tree."""
    return {key: vars(vars(config)[key.split(".")[0]])[key.split(".")[1]] for key in leaves()}
