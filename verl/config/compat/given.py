"""The keys of one command line in verl's spelling, in the form that the rules read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.compat.table import find_row

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
Result = dict[str, Any]


_SCHEDULES = {"veomni": "cosine", "automodel": "cosine", "torchtitan": "linear"}
"""The default schedules of verl's optimizer groups. Groups that are not listed have a constant rate."""

_MODEL_ENGINE = (
    *("optim", "optim@optim", "engine", "engine@engine", "engine.strategy", "model_engine", f"{ACTOR}strategy"),
    *("actor@actor_rollout_ref.actor", "model_engine@_here_"),
)
"""The keys with which verl's command lines select the model engine."""


@dataclass(frozen=True)
class Given:
    """The keys of one command line.

    values: verl's keys
    native: our keys
    recipe_prompts: the batch size of the recipe

    A key with the value null counts as not given. A value that its rule cannot use is refused when it is read.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    use_defaults: bool
    native: Mapping[str, Any]
    recipe_prompts: int | None
    ignored: dict[str, str] = field(default_factory=dict)
    """Keys without an effect on this command line -> the reason."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Remarks to print beside the value of a mapped key."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return the given value, else `default`."""
        row, value = find_row(key), self.values.get(key, default)
        return value if row is None else row.check(value)

    def reads(self, key: str, rule: str) -> bool:
        """Return whether the rule of that name reads this key."""
        row = find_row(key)
        return row is not None and row.joint == rule

    def get(self, key: str) -> Any:
        """Return the given value; else verl's default if the entry point uses verl's defaults; else None."""
        return self.value(key, self.defaults.get(key) if self.use_defaults else None)

    def need(self, key: str) -> Any:
        """Return the given value, else verl's default for every entry point. It is for keys that determine the meaning
        of given ones."""
        return self.value(key, self.defaults.get(key))

    def first(self, *keys: str) -> Any:
        """Return the value of the first of several spellings that is given, or else that `get` returns a default
        for."""
        found = [k for k in keys if k in self.values] or [k for k in keys if self.get(k) is not None]
        return self.get(found[0]) if found else None

    def own(self, key: str, default: Any = None) -> Any:
        """Return the number that is given for one of our own keys, else `default`."""
        value = self.native.get(key)
        return value if isinstance(value, int | float) else default

    def ignore(self, reason: str, *keys: str) -> None:
        self.ignored.update({k: reason for k in keys if k in self.values})

    @property
    def schedule(self) -> str | None:
        """Return the schedule of verl's optimizer group for the named model engine, if it is not constant."""
        found = next((str(self.values[key]) for key in _MODEL_ENGINE if self.values.get(key)), "")
        return _SCHEDULES.get(found.removesuffix("_actor"))
