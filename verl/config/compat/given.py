"""What one command line of verl's says, as the rules read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.compat.table import find_row

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
Result = dict[str, Any]


_SCHEDULES = {"veomni": "cosine", "automodel": "cosine", "torchtitan": "linear"}
"""Of verl's optimizer groups where no schedule is given; constant in the others."""

_MODEL_ENGINE = (
    *("optim", "optim@optim", "engine", "engine@engine", "engine.strategy", "model_engine", f"{ACTOR}strategy"),
    "actor@actor_rollout_ref.actor",
)
"""Where a command line of verl's names its model engine."""


@dataclass(frozen=True)
class Given:
    """What one command line says. `values`: verl's keys; `native`: ours; `recipe_prompts`: the recipe's batch size.
    Null stands for a key that is not given; a value that no rule could compute with is refused when it is read."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    use_defaults: bool
    native: Mapping[str, Any]
    recipe_prompts: int | None
    ignored: dict[str, str] = field(default_factory=dict)
    """Keys that turned out to have no effect, with the reason."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What is to be known of a mapped key beside its value."""

    def said(self, key: str, default: Any = None) -> Any:
        """As given."""
        row, value = find_row(key), self.values.get(key, default)
        return value if row is None else row.check(value)

    def reads(self, key: str, rule: str) -> bool:
        """The rule of that name is the one of this key."""
        row = find_row(key)
        return row is not None and row.joint == rule

    def get(self, key: str) -> Any:
        """As given, else verl's default where those were asked for, else None."""
        return self.said(key, self.defaults.get(key) if self.use_defaults else None)

    def need(self, key: str) -> Any:
        """As given, else verl's default in any case: what the key means beside the given ones."""
        return self.said(key, self.defaults.get(key))

    def first(self, *keys: str) -> Any:
        """The first of several spellings that is given (or has a default that was asked for)."""
        found = [k for k in keys if k in self.values] or [k for k in keys if self.get(k) is not None]
        return self.get(found[0]) if found else None

    def own(self, key: str, default: Any = None) -> Any:
        """The number that one of our keys is given, else `default`."""
        value = self.native.get(key)
        return value if isinstance(value, int | float) else default

    def ignore(self, reason: str, *keys: str) -> None:
        self.ignored.update({k: reason for k in keys if k in self.values})

    @property
    def schedule(self) -> str | None:
        """What verl's optimizer group says of the model engine that is named, where that is not constant."""
        said = next((str(self.values[key]) for key in _MODEL_ENGINE if self.values.get(key)), "")
        return _SCHEDULES.get(said.removesuffix("_actor"))
