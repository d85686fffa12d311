"""Number types with bounds and choices of words, for the fields of the configuration."""

from __future__ import annotations

import sys
from dataclasses import MISSING, field
from typing import Annotated, Any

import yaml
from msgspec import Meta

from verl.errors import Refused

MOST_VALUES = 1_000_000  # the largest number of values in a YAML file
FAST_LEVELS = 2_000  # of nested YAML that libyaml can read: it recurses in C
_FINITE = sys.float_info.max
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=_FINITE)]
NonNegative = Annotated[float, Meta(ge=0, le=_FINITE)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Betas = Annotated[list[Annotated[float, Meta(ge=0, lt=1)]], Meta(min_length=2, max_length=2)]


def adjustable(default: Any = MISSING, *, factory: Any = MISSING) -> Any:
    """Return a field for a key (or section of keys) that may change when a run is continued. All other keys define the
    run."""
    return field(default=default, default_factory=factory, metadata={"adjustable": True})


def one_of(choices: str) -> Meta:
    """Return a pattern that matches one of the words, which are separated by bars."""
    return Meta(pattern=f"^({choices})$", extra={"words": tuple(choices.split("|"))})


def size_text(size: int) -> str:
    """Return the size with three significant digits: 942 MiB, 1.84 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            value = size / scale
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{size} B"


def bounded_yaml(text: str) -> str:
    """Return the text of a YAML file unchanged. Raise ValueError if it cannot be read as YAML, or if its aliases make
    more than MOST_VALUES values of it: a loop over them would not end."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = 0 if root is None else _values(root, {})
    except RecursionError:
        raise Refused("it is nested too deeply, or holds itself") from None
    except yaml.YAMLError as e:
        raise Refused(f"not YAML: {' '.join(str(e).split())}") from None
    if values > MOST_VALUES:
        raise Refused(f"its aliases make {values:.3g} values of it, at most {MOST_VALUES:,}")
    return text


def fast_yaml(text: str) -> Any:
    """Return the content of YAML text, as yaml.safe_load does, ten times faster where libyaml is there.

    Python reads what libyaml refuses (an escape of half a surrogate pair), and what may be deeply nested: it raises
    RecursionError where libyaml ends the process. Each level of nesting needs one of the counted marks.
    """
    if yaml.__with_libyaml__ and sum(text.count(mark) for mark in "[{-:?") < FAST_LEVELS:
        try:
            return yaml.load(text, Loader=yaml.CSafeLoader)
        except yaml.YAMLError:
            pass
    return yaml.safe_load(text)


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a node; an alias counts as the values that it repeats."""
    if id(node) not in known:
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        within = 0 if isinstance(node, yaml.ScalarNode) else sum(_values(part, known) for part in parts)
        known[id(node)] = 1 + within
    return known[id(node)]


def counted(number: int | float, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    several = {"trajectory": "trajectories", "micro-batch": "micro-batches"}.get(noun, f"{noun}s")
    return f"{number:,g} {noun}" if number == 1 else f"{number:,.10g} {several}"
