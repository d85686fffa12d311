"""One command line in verl's keys, in the form that the rules read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.compat.table import find_row

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
Result = dict[str, Any]


_SCHEDULES = {"veomni": "cosine", "automodel": "cosine", "torchtitan": "linear"}
"""The default schedules of verl's optimizer groups; the groups that are not here have a constant rate."""

_MODEL_ENGINE = (
    *("optim", "optim@optim", "engine", "engine@engine", "engine.strategy", "model_engine", f"{ACTOR}strategy"),
    "actor@actor_rollout_ref.actor",
)
"""The keys with which a command line of verl's names its model engine."""


@dataclass(frozen=True)
class Given:
    """The keys of one command line. `values`: verl's keys; `native`: ours; `recipe_prompts`: the recipe's batch size.

    Null means that a key is not given. A value with which no rule can compute is refused when it is read."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    use_defaults: bool
    native: Mapping[str, Any]
    recipe_prompts: int | None
    ignored: dict[str, str] = field(default_factory=dict)
    """Keys without an effect on this command line, with the reason."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Remarks to print beside the value of a mapped key."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value as given, else None."""
        row, value = find_row(key), self.values.get(key, default)
        return value if row is None else row.check(value)

    def reads(self, key: str, rule: str) -> bool:
        """Return whether the rule of that name reads this key."""
        row = find_row(key)
        return row is not None and row.joint == rule

    def get(self, key: str) -> Any:
        """Return the value as given, else verl's default if the entry point takes those, else None."""
        return self.value(key, self.defaults.get(key) if self.use_defaults else None)

    def need(self, key: str) -> Any:
        """Return the value as given, else verl's default in any case: the meaning of the key beside the given ones."""
        return self.value(key, self.defaults.get(key))

    def first(self, *keys: str) -> Any:
        """Return the value of the first of several spellings that is given, or that has a default to be used."""
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
        said = next((str(self.values[key]) for key in _MODEL_ENGINE if self.values.get(key)), "")
        return _SCHEDULES.get(said.removesuffix("_actor"))
