"""One `key=value` of a command line in Hydra's grammar."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException


@dataclass(frozen=True, slots=True)
class Argument:
    """`text` is the value as written; `error` why Hydra could not read it."""

    key: str
    value: Any
    text: str
    error: str = ""


def parse_argument(argument: str) -> Argument:
    """`+key=` and `++key=` are read as `key=`, a group as `group@package=`; deletions and sweeps are refused."""
    name, equals, text = argument.partition("=")
    if name.startswith("~"):
        raise ValueError(f"{argument!r}: a typed key cannot be deleted; leave it out, or set {name[1:]}=null")
    if name.startswith("-"):
        raise ValueError(
            f"{argument!r}: of Hydra's own options --config-path and --config-name are taken; leave it out"
        )
    if not equals:
        raise ValueError(f"argument {argument!r} is not key=value")
    key = name.lstrip("+")
    try:
        override = _parser().parse_override(argument)
        value = override.value()
    except HydraException as exc:
        reason = str(exc).splitlines()[0]
        return Argument(key, None, text, f"{argument!r} cannot be read: {reason}; quote the value: {name}='\"{text}\"'")
    if override.is_sweep_override():
        return Argument(key, None, text, f"{argument!r} is a sweep over values; a list is written {key}=[{text}]")
    taken = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)
    if override.type not in taken:
        raise ValueError(f"{argument!r}: only key=value is taken")
    return Argument(key, value, text)


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()
