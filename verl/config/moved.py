"""Keys of earlier versions that have another name now, and values that are written in another way.

The table is read by the error for an unknown key, by `read_config` (the file of an older run) and by the comparison of
a resumed run with its checkpoint (driver/identity.py). A moved key is a row here and nothing else: the run that was
begun with it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from verl.config.schema import COMPUTE_SCORE
from verl.config.tree import leaf_of

SUPERVISED = ("sft", "rm", "dpo")


@dataclass(frozen=True, slots=True)
class Move:
    """One moved key."""

    written: str
    """The argument that replaces the old one; {value} is the value of the old key."""
    convert: Callable[[Any, Any], Any] = lambda old, present: old
    """Returns the value of the new key, of the old key's value and the value that the new key has beside it."""
    commands: tuple[str, ...] = ()
    """The commands that read the old key; () if all did. In a run of another command its value is dropped."""

    @property
    def key(self) -> str:
        return self.written.partition("=")[0]


def _eval_rows(old: int, present: int | None) -> int | None:
    """The old key limited the rows that had been read. Its default was 256, and 0 was an evaluation of no rows."""
    given = [rows for rows in (None if old in (0, 256) else old, present) if rows is not None]
    return min(given, default=None)


def _grader(name: str, path: str | None) -> str | None:
    """The function had a key of its own."""
    return path if path is None or name == COMPUTE_SCORE else f"{path}:{name}"


def _to_main(name: str, default: object) -> Move:
    """Move a key of the pool `main`; its default is left out."""
    given = f"cluster.pools.main.{name}={{value}}"
    return Move(given, lambda old, present: present if old == default else old)


MOVED: Mapping[str, Move] = MappingProxyType(
    {
        "supervised.rows_per_step": Move("step.prompts_per_step={value}", commands=SUPERVISED),
        "reward.name": Move("reward.path=FILE.py:{value}", _grader),
        "serve.grace_s": Move("run.grace_s={value}", commands=("serve",)),
        "cluster.cpus_per_rank": _to_main("cpus_per_rank", 1),
        "cluster.gpus_per_rank": _to_main("gpus_per_rank", None),
        "cluster.resource": _to_main("resource", ""),
        "cluster.env": _to_main("env", {}),
        "supervised.eval_rows": Move("data.max_eval_rows={value}", _eval_rows, SUPERVISED),
    }
)

SWITCHES: Mapping[str, tuple[str, str]] = MappingProxyType({"model.gradient_checkpointing": ("none", "full")})
"""Keys that are words now and were true or false, as in the public verl: the words for false and true."""


def present_value(key: str, value: Any) -> Any:
    """Return a value of a present key as it is written now."""
    return SWITCHES[key][value] if key in SWITCHES and isinstance(value, bool) else value


def moved_line(key: str, value: str = "VALUE") -> str | None:
    """Return the message for a moved key, with the key that replaces it; None if `key` was not moved."""
    move = MOVED.get(key)
    return None if move is None else f"it has moved: write {move.written.format(value=value)}"


def moved_values(values: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return the values, by key, of an older run of `command` as values of the present keys."""
    found = {key: present_value(key, value) for key, value in values.items() if key not in MOVED}
    for old, move in MOVED.items():
        if old in values and (not move.commands or command in move.commands):
            leaf = leaf_of(move.key)
            assert leaf is not None, f"{move.key} is no key"
            key, below = leaf[0].key, leaf[1]
            found[key] = _with(found.get(key), below, partial(move.convert, values[old]))
    return found


def _with(value: Any, below: tuple[str, ...], convert: Callable[[Any], Any]) -> Any:
    """Return `value` with the item at the path `below` converted; an item that becomes None or empty is left out."""
    if not below:
        return convert(value)
    items = dict(value or {})
    made = _with(items.pop(below[0], None), below[1:], convert)
    return items if made is None or made == {} else {**items, below[0]: made}
