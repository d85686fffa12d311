"""Settings with their bounds, of which the parts of an algorithm are made, and the faults of their values. No torch.
The field of a spec is the key that a user sets, after the spec's prefix."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from verl.names import did_you_mean

MEANT = "; did you mean {}?"


@dataclass(frozen=True, slots=True)
class Knob:
    """The values that a setting may have."""

    key: str | None = None
    """The key, where it differs from the field."""
    option: bool = False
    """It is written under algorithm.options, since few algorithms have it."""
    choices: tuple[str, ...] = ()
    """The allowed values, if they are a few words."""
    least: float = -math.inf
    """The least allowed value."""
    above: float = -math.inf
    """Values must be larger than this."""
    most: float = math.inf
    """The largest allowed value."""
    below: float = math.inf
    """Values must be smaller than this."""
    advice: str = ""
    """The end of the error."""

    def fault(self, key: str, value: Any, kind: str) -> str | None:
        """Return one line about an invalid value; None for a valid one."""
        wanted, types = _KINDS[kind.split(" ")[0].split("[")[0]]
        prefix = f"{self.path(key)}={value}: "
        if value is None:
            return None if "None" in kind else prefix + f"must be {wanted}"
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return prefix + f"must be {wanted}"
        if self.choices and value not in self.choices:
            known = f"there are: {', '.join(self.choices)}{self.advice}"
            return prefix + f"unknown{did_you_mean(value, self.choices, form=MEANT)}; {known}"
        if isinstance(value, int | float):
            if not math.isfinite(value):
                return prefix + "must be finite"
            if not (self.least <= value <= self.most and self.above < value < self.below):
                return prefix + f"must be {self._range()}{self.advice}"
        return None

    def path(self, key: str) -> str:
        return f"algorithm.{'options.' if self.option else ''}{key}"

    def wanted(self, kind: str) -> str:
        """Return the allowed values as text for an error."""
        what = f"one of {', '.join(self.choices)}" if self.choices else _KINDS[kind.split(" ")[0].split("[")[0]][0]
        return " ".join(part for part in (what, self._range()) if part) + self.advice

    def _range(self) -> str:
        low = f">= {self.least:g}" if self.least > -math.inf else f"> {self.above:g}" if self.above > -math.inf else ""
        high = f"<= {self.most:g}" if self.most < math.inf else f"below {self.below:g}" if self.below < math.inf else ""
        return " and ".join(x for x in (low, high) if x)


_KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "float": ("a number", (int, float)),
    "int": ("a whole number", (int,)),
    "bool": ("true or false", (bool,)),
    "str": ("a word", (str,)),
    "Literal": ("a word", (str,)),
    "tuple": ("a list", (tuple,)),
    "Mapping": ("a mapping", (Mapping,)),
}


def _as_written(annotation: Any) -> str:  # they are strings where a spec's module postpones them
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def knob(default: Any, **limits: Any) -> Any:
    return field(default=default, metadata={"knob": Knob(**limits)})


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Settings of one part of an algorithm. `switches`: fields of which one must be set for it to do anything."""

    prefix: ClassVar[str] = ""
    switches: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @functools.cache
    def knobs(cls) -> dict[str, tuple[str, Knob, str]]:
        """Return key -> (field, its limits, its type as text), for every setting of this spec."""
        found = {f.name: (f.metadata["knob"], _as_written(f.type)) for f in fields(cls) if "knob" in f.metadata}
        return {k.key or cls.prefix + name: (name, k, kind) for name, (k, kind) in found.items()}

    def settings(self) -> dict[str, Any]:
        return {key: getattr(self, name) for key, (name, _, _) in self.knobs().items()}

    def updated(self, given: Mapping[str, Any]) -> Self:
        """Return this spec with those of the given settings that belong to it."""
        return replace(self, **{name: given[key] for key, (name, _, _) in self.knobs().items() if key in given})

    def is_on(self) -> bool:
        """Return whether this part has an effect with its settings."""
        return not self.switches or any(getattr(self, name) for name in self.switches)

    def faults(self) -> Iterator[str]:
        """Yield a line for each invalid setting, with the fix."""
        for key, (name, limits, kind) in self.knobs().items():
            if prefix := limits.fault(key, getattr(self, name), kind):
                yield prefix
