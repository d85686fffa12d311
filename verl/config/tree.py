"""The tree of schema.py as data: its keys with type and default, and the conversion of values to these types
(msgspec)."""

from __future__ import annotations

import copy
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import yaml

from verl.algorithms.presets import setting_types
from verl.config.frozen import frozen
from verl.config.schema import Config
from verl.errors import Refused
from verl.names import did_you_mean

_PLAIN = re.compile(r"[\w./-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key, `section.name`: its type with bounds, and its default."""

    key: str
    hint: Any
    default: Any
    adjustable: bool = False
    """True if a run may be continued with another value of the key."""

    @property
    def is_mapping(self) -> bool:
        """True if any keys are allowed below it: `reward.kwargs.x=1`."""
        return typing.get_origin(self.hint) is dict

    @property
    def type_name(self) -> str:
        return type_name(self.hint)

    @property
    def words(self) -> tuple[str, ...]:
        """The allowed words of the key; empty if it is not a choice of words."""
        return next((tuple(meta.extra["words"]) for meta in _metas(self.hint) if meta.extra), ())


@dataclass(frozen=True, slots=True)
class Setting:
    """The value that one layer assigns to a key. `text`: the value as it was written on the command line."""

    key: str
    value: Any
    origin: str
    text: str | None = None


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Return every key of the tree, in the order of schema.py."""
    found: dict[str, Leaf] = {}
    adjustable = {field.name: bool(field.metadata.get("adjustable")) for field in fields(Config)}
    for section, cls in sections().items():
        hints, defaults = typing.get_type_hints(cls, include_extras=True), vars(cls())
        marked = {field.name for field in fields(cls) if adjustable[section] or field.metadata.get("adjustable")}
        for name, hint in hints.items():
            key = f"{section}.{name}"
            found[key] = Leaf(key, hint, defaults[name], name in marked)
        if section == "algorithm":
            found |= {key: Leaf(key, hint, None) for key, hint in _algorithm_settings().items()}
    return MappingProxyType(found)


@functools.cache
def _algorithm_settings() -> Mapping[str, Any]:
    """Return the type of each setting `algorithm.NAME` that a spec declares. Its value is in
    AlgorithmConfig.options."""
    words = {key: kind.split(" ")[0].split("[")[0] for key, kind in setting_types().items()}
    hints = {"float": float | None, "int": int | None, "bool": bool | None}
    return MappingProxyType({f"algorithm.{key}": hints.get(word, str | None) for key, word in words.items()})


@functools.cache
def sections() -> Mapping[str, type]:
    return MappingProxyType(typing.get_type_hints(Config))


def leaf_of(key: str) -> tuple[Leaf, tuple[str, ...]] | None:
    """Return the leaf to which `key` belongs and the path below it, () unless the leaf is a mapping; None if there is
    no such key."""
    found = leaves().get(key)
    if found is not None:
        return found, ()
    parts = key.split(".")
    above = leaves().get(".".join(parts[:2]))
    if above is not None and above.is_mapping and all(parts[2:]):
        return above, tuple(parts[2:])
    return None


# -- values ------------------------------------------------------------------------------------------------------------


def convert(value: Any, hint: Any, text: str | None = None) -> Any:
    """Return `value` as the type `hint`, or raise ValueError with the reason.

    text: the value as written, for a name that YAML would read as a number. Nothing is rounded or guessed: 1.5 is not
        an int, 1 not a bool, "3" not a number; but 2.0 is the int 2, and a string by itself a list of one
    """
    plain = _plain_type(hint)
    kind = typing.get_origin(plain) or plain
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    elif kind is str and is_number:
        value = str(value) if text is None else text
    elif kind is str and isinstance(value, dict) and text is not None:
        value = text  # `{name: x}` of a prompt
    elif kind is list and isinstance(value, str):
        value = _listed(value)
    elif kind is dict and isinstance(value, Mapping):
        value = copy.deepcopy(dict(value))
    try:
        if value != value:
            raise msgspec.ValidationError("Expected a number, got nan")
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as exc:
        if ", got" in str(exc):
            raise Refused(f"expected {type_name(hint)}") from None
        raise Refused(_out_of_bounds(value, hint)) from None


def _listed(text: str) -> list[Any]:
    """Return the list that is written in `text` ("[0.9,0.95]", perhaps in quotes), else a list of `text`."""
    if text.startswith("[") and text.endswith("]"):
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError:
            return [text]
        return found if isinstance(found, list) else [text]
    return [text]


def _out_of_bounds(value: Any, hint: Any) -> str:
    metas, plain = list(_metas(hint)), _plain_type(hint)
    literal = typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
    words = next((m.extra["words"] for m in metas if m.extra), literal)
    unknown = [v for v in (value if isinstance(value, list) else [value]) if v not in words]
    if words:
        return f"{unknown[0]} is unknown; {did_you_mean(unknown[0], words)}There are: {', '.join(words)}"
    prefix = []
    for meta in metas:
        prefix += [f"{meta.min_length} values, each"] if meta.min_length is not None else []
        bounds = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
        limits = [f"{sign} {bound:g}" for sign, bound in bounds if bound not in (None, sys.float_info.max)]
        limits += ["finite"] if meta.le == sys.float_info.max else []
        prefix += [" and ".join(limits)] if limits else []
    off = " (0 is off)" if value == -1 and any(m.ge == 0 for m in metas) else ""
    return f"must be {' '.join(prefix)}{off}"


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    if typing.get_origin(hint) is Annotated:
        yield from hint.__metadata__
        yield from _metas(hint.__origin__)
    else:
        for arm in typing.get_args(hint):
            yield from _metas(arm)


def _plain_type(hint: Any) -> Any:
    """Return a type without null and without its bounds."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = typing.get_args(hint)[0]
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def type_name(hint: Any) -> str:
    """Return a type as words for the user: `int | None` -> "int or null", `list[str]` -> "list of str"."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return f"{type_name(_plain_type(hint))} or null"
    plain = _plain_type(hint)
    if typing.get_origin(plain) is list:
        return f"list of {type_name(typing.get_args(plain)[0])}"
    named = {dict: "mapping", Literal: "str"}
    return named.get(typing.get_origin(plain)) or str(plain.__name__)


def text_of(value: Any) -> str:
    """Return a value as one line of YAML in flow style. A string is not quoted if YAML reads it back unchanged."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text_of(k)}: {text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if type(value) is int:
        return str(value)
    marks = ("...", "---")  # between documents, where they are alone on a line
    plain = not isinstance(value, str) or (
        _PLAIN.fullmatch(value) and value not in marks and yaml.safe_load(value) == value
    )
    text = yaml.safe_dump(value, default_style=None if plain else '"', width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def tree_of(values: Mapping[str, Any]) -> Config:
    """Return the tree with these values, one per leaf and of the leaf's type. Other leaves have their defaults. Lists
    and mappings in it are immutable."""
    settings = {key.partition(".")[2]: values[key] for key in _algorithm_settings() if key in values}
    every = {key: leaf.default for key, leaf in leaves().items()} | dict(values)  # all are frozen by `changed`
    given = {key: value for key, value in every.items() if key not in _algorithm_settings()}
    own = {name: value for name, value in settings.items() if value is not None}
    return changed(Config(), given | {"algorithm.options": {**given.get("algorithm.options", {}), **own}})


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with other values of these keys, `section.name`. The settings of an algorithm
    are in `algorithm.options`."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = frozen(value)
    return replace(config, **{section: replace(vars(config)[section], **own) for section, own in sections.items()})


def values_of(config: Config) -> dict[str, Any]:
    """Return one value per leaf, in the order of the tree."""
    found, settings = {}, _algorithm_settings()
    for key in leaves():
        section, name = key.split(".")
        own = vars(vars(config)[section])
        found[key] = own["options"].get(name) if key in settings else own[name]
    few = config.algorithm.options.items()
    return found | {"algorithm.options": {name: value for name, value in few if f"algorithm.{name}" not in settings}}
