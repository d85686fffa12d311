"""Convert results of a reward function to plain numbers. Standard library only, since it runs in the workers too."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from verl.sandbox.messages import BadResult

MAX_COMPONENTS = 1000
MAX_PRED_CHARS = 1000
MAX_FEEDBACK_CHARS = 4000
Scored = tuple[float, dict[str, float], str | None, tuple[float, ...] | None, str]


def score_and_components(value: Any) -> Scored:
    """Return (score, components, pred, turn_rewards, feedback) of a reward function's result.

    The result is a number, a bool, an object with `.item()`, or a mapping with such a "score". Of a mapping, further
    finite numbers become components; "pred" (a text or a number) is the answer that is counted in majority votes,
    "turn_rewards" a list, and "feedback" a text about the attempt; other entries are left out. Raise BadResult, with
    the reason, for a result without a score. Exceptions of the object's own methods are not caught here.
    """
    components: dict[str, float] = {}
    score, pred, turns, feedback = value, None, None, ""
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(repr(k) for k in list(value)[:8])
            raise BadResult(f'the reward function returned a dict without "score" (keys: {keys or "none"})')
        score, prefix = value["score"], value.get("pred")
        vote = prefix if isinstance(prefix, str) else _number(prefix)
        pred = None if vote is None else str(vote)[:MAX_PRED_CHARS]
        turns = _turn_rewards(value.get("turn_rewards"))
        feedback = text[:MAX_FEEDBACK_CHARS] if isinstance(text := value.get("feedback"), str) else ""
        for name, item in value.items():
            number = _number(item)
            if (
                isinstance(name, str)
                and name not in ("score", "turn_rewards")
                and number is not None
                and math.isfinite(number)
            ):
                components[name] = number
            if len(components) > MAX_COMPONENTS:
                kept = f"at most {MAX_COMPONENTS} components are kept"
                raise BadResult(f"the reward function returned {len(value)} values; {kept}")
    number = _number(score)
    if number is None:
        kind = f"the text {score[:60]!r}" if isinstance(score, str) else f"a {type(score).__name__}"
        prefix = "None" if score is None else kind
        raise BadResult(f"the reward function returned {prefix}; a number or a dict with a number as score is needed")
    if not math.isfinite(number):
        raise BadResult(f"the reward function returned {number}; a score must be finite")
    return number, components, pred, turns, feedback


def _turn_rewards(value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, list | tuple):
        raise BadResult(
            f"the reward function returned turn_rewards as a {type(value).__name__}; give a list of numbers"
        )
    found = tuple(number for item in listed if (number := _number(item)) is not None and math.isfinite(number))
    if len(found) < len(listed):
        raise BadResult(f"the reward function returned turn_rewards={str(listed)[:80]}; each must be a finite number")
    return found


def _number(value: Any) -> float | None:
    try:
        if not isinstance(value, numbers.Real) and not isinstance(value, type) and hasattr(value, "item"):
            value = value.item()
        return float(value) if isinstance(value, numbers.Real) else None
    except (TypeError, ValueError, RuntimeError):  # numpy and torch on more than one element
        return None
    except OverflowError:  # an int beyond 1e308
        return math.inf
