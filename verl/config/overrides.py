"""Read a command line as settings of our keys: `key=value` in Hydra's grammar, and values that this grammar cannot
read.

Arguments with keys of the public verl are left for `compat/`, which is imported only if there are some.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from verl.bounds import bounded_yaml
from verl.config.tree import Setting, leaf_of, sections
from verl.errors import Refused

_NO_SPACE = re.compile(r"[{,]\s*[\w.-]+:[^\s]")  # {a:1} is Hydra's mapping; YAML reads one name


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of the command line. `text` is the value as written, `error` the reason why Hydra could not read
    it."""

    key: str
    value: Any
    text: str
    error: str = ""


VerlDefaults = Literal["rl", "sft"]
"""The entry point of the public verl that was called: its defaults apply to keys that are not given."""


Action = Literal["mapped", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Note:
    """How one verl key of this command line was translated."""

    key: str
    value: str
    action: Action
    text: str
    targets: tuple[str, ...] = ()
    """Our keys that it sets."""

    def __str__(self) -> str:
        became = f"-> {self.text}" if self.action == "mapped" else f"{self.action}: {self.text}"
        return f"{self.key}={self.value} {became}"


@dataclass(frozen=True, slots=True)
class Translation:
    """A command line as settings of our keys."""

    settings: Sequence[Setting]
    defaults: Sequence[Setting] = ()
    """The defaults of the public verl, for its entry points; every recipe overrides them."""
    notes: Sequence[Note] = ()
    unknown: frozenset[str] = frozenset()
    """Our keys without a value, because the verl keys that set them were refused."""


@dataclass(frozen=True, slots=True)
class Line:
    """The arguments of a command line, by kind."""

    native: list[Setting] = field(default_factory=list)
    """Our keys, in order."""
    rest: list[str | Argument] = field(default_factory=list)
    """The arguments with other keys, and Hydra's options."""
    faults: list[str] = field(default_factory=list)
    """A line for each value that cannot be read."""


def read_line(args: Sequence[str]) -> Line:
    """Read the arguments with keys of ours. A mapping for a whole section (`run={seed: 1}`) is read as its keys."""
    line = Line()
    for word in args:
        name, equals, _ = word.partition("=")
        key = name.lstrip("+")
        if not equals or (leaf_of(key) is None and key not in sections()):  # `--config-name data`: a word of Hydra's
            line.rest.append(word)
            continue
        try:
            found = list(_keys_of_section(parse_argument(word)))
        except ValueError as exc:
            line.faults.append(str(exc))
            continue
        for one in found:
            if leaf_of(one.key) is None:
                line.rest.append(one)
            elif one.error:
                line.faults.append(one.error)
            else:
                line.native.append(native_setting(one))
    return line


def native_setting(argument: Argument) -> Setting:
    return Setting(argument.key, argument.value, "command line", argument.text.strip("'\""))


def _keys_of_section(argument: Argument) -> Iterator[Argument]:
    if leaf_of(argument.key) is not None or not isinstance(argument.value, Mapping):
        yield argument
        return
    yield from keys_below(argument)


def keys_below(argument: Argument) -> list[Argument]:
    """Return the items of a mapping as arguments."""
    items = argument.value.items()
    return [argument_of(f"{argument.key}.{name}", below) for name, below in items if name != "_target_"]


def argument_of(key: str, value: Any) -> Argument:
    """Return a key and a value, from a file or a mapping, as an argument."""
    return Argument(key, value, "null" if value is None else str(value))


def parse_argument(argument: str) -> Argument:
    """Read one argument. `+key=` and `++key=` are read as `key=`, a group as `group@package=`; deletions and sweeps are
    refused."""
    name, equals, text = argument.partition("=")
    if name.startswith("~"):
        raise Refused(f"{argument!r}: a typed key cannot be deleted; leave it out, or set {name[1:]}=null")
    if name.startswith("-"):
        raise Refused(f"{argument!r}: of Hydra's own options --config-path and --config-name are taken; leave it out")
    if not equals:
        raise Refused(f"argument {argument!r} is not key=value")
    key = name.lstrip("+")
    if text.startswith("@"):
        return Argument(key, *_from_file(key, text))
    try:
        override = _parser().parse_override(argument)
        value = override.value()
    except HydraException as exc:
        value = _as_written(key, text)
        if value is not None:
            return Argument(key, value, text)
        reason = str(exc).splitlines()[0]
        return Argument(key, None, text, f"{argument!r} cannot be read: {reason}; quote the value: {name}='\"{text}\"'")
    if override.is_sweep_override() and ", " in text and _is_text(key):
        return Argument(key, text, text)  # prose; `a,b` is what Hydra's users sweep over
    if override.is_sweep_override():
        return Argument(key, None, text, f"{argument!r} is a sweep over values; a list is written {key}=[{text}]")
    taken = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)
    if override.type not in taken:
        raise Refused(f"{argument!r}: only key=value is taken")
    return Argument(key, value, text)


def _is_text(key: str) -> bool:
    found = leaf_of(key)
    return found is not None and not found[1] and found[0].type_name.startswith("str")


def _as_written(key: str, text: str) -> Any:
    """Return a value that Hydra's grammar cannot read (with letters beyond ASCII, `=`, or braces inside): a list or a
    mapping in YAML's flow style, else the text itself. Return None if it cannot be read so, or has an open quote or an
    interpolation."""
    if text[:1] in ("'", '"') or "${" in text:
        return None
    if text[:1] not in ("[", "{") or _is_text(key):
        return text
    try:
        return None if _NO_SPACE.search(text) else yaml.safe_load(bounded_yaml(text))
    except (yaml.YAMLError, ValueError):
        return None


def _from_file(key: str, text: str) -> tuple[Any, str]:
    """Return (value, text) of `key=@FILE`: the file's text if the key is a text, else its YAML."""
    file, fix = Path(text[1:]).expanduser(), f"a text that begins with @ is quoted: {key}='\"{text}\"'"
    try:
        content = file.read_text(encoding="utf-8").removesuffix("\n")
        return (content if _is_text(key) else yaml.safe_load(bounded_yaml(content))), content
    except OSError as exc:
        raise Refused(f"{key}={text}: {file} cannot be read ({exc.strerror}); {fix}") from None
    except (ValueError, yaml.YAMLError) as exc:
        raise Refused(f"{key}={text}: {file}: {' '.join(str(exc).split())}; {fix}") from None


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()
