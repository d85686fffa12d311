"""The ground truth of an RL row: the column with the truth, and the text with which a rule compares answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl.data.values import kind_of, object_in, refuse_surrogates
from verl.errors import Refused

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
TRUTH_COLUMNS = (
    *(
        "reward_model.ground_truth",
        "ground_truth",
        "answer",
        "solution",
        "final_answer",
        "expected_answer",
        "correct_answer",
        "reference_answer",
    ),
    *("gold", "gold_answer", "golden_answers", "target", "targets", "label", "labels", "reference", "ground_truths"),
    *("gt", "truth", "answers"),
)
"""Columns in which a truth is looked for: the first filled one of the row, then of its extra_info."""
_TRUTH_COLUMNS = frozenset(TRUTH_COLUMNS)
NOTHING = "nothing"


def ground_truth_of(row: Mapping[str, Any], where: str, prompt_key: str) -> tuple[Any, str]:
    """Return (the truth, where in the row it was found); (None, "") for a row without one."""
    model = object_in(row.get("reward_model"), where, "reward_model")
    if model.get("ground_truth") is not None:
        return model["ground_truth"], "reward_model.ground_truth"
    extra = object_in(row.get("extra_info"), where, "extra_info")
    for cells, place in ((row, ""), (extra, "extra_info.")):
        for key in TRUTH_COLUMNS:
            if cells.get(key) is not None and (place or key != prompt_key):
                return cells[key], f"{place}{key}"
    return None, ""


def unread_truths(row: Mapping[str, Any], truth: Any) -> Iterator[str]:
    """Yield the columns of the row with a name of TRUTH_COLUMNS and another value than the truth."""
    for key in _TRUTH_COLUMNS.intersection(row):
        if row[key] not in (None, "", [], truth):
            texts = truth_texts(row[key])
            if not texts or texts != truth_texts(truth):  # ["4"] is {"target": "4"}
                yield key


def truth_text(value: Any) -> str | None:
    """Return the text of a truth that has exactly one: a text, a number (4.0 is "4"), a list of one of these, or a list
    of one text as JSON. None for any other value."""
    if isinstance(value, str) and (listed := _json_texts(value)) is not None:
        value = listed
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else str(value)


def truth_texts(value: Any) -> list[str]:
    """Return the texts of all right answers: the items of a list, of a list as JSON or of {target: ...}, or the text of
    a single value."""
    if isinstance(value, str) and value.lstrip().startswith('{"target"'):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return [value]
    if isinstance(value, Mapping):
        value = value.get("target")
    value = value.tolist() if hasattr(value, "tolist") else value
    listed = _json_texts(value) if isinstance(value, str) else value
    texts = [truth_text(item) for item in (listed if isinstance(listed, list | tuple) else [value])]
    return [text for text in texts if text is not None]


def _json_texts(text: str) -> list[str] | None:
    """Return the list of texts that is written as JSON in `text`; None for any other text."""
    bare = text.strip()
    if not (bare.startswith('["') and bare.endswith('"]')):
        return None
    try:
        found = json.loads(bare)
    except json.JSONDecodeError:
        return None
    return found if all(isinstance(item, str) for item in found) else None


def kind_of_truth(value: Any) -> str:
    """Return a description of a truth: NOTHING if it is empty, "text" if `truth_text` can read it, else its type and
    size."""
    if truth_text(value) is not None:
        return "text"
    if value is None or value in ("", [], {}) or (isinstance(value, str) and not value.strip()):
        return NOTHING
    if isinstance(value, str):
        return f"a list of {len(_json_texts(value) or ())} as JSON"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"an object ({', '.join(map(str, value))})" if isinstance(value, Mapping) else kind_of(value)


def gsm8k_texts(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    for key in ("question", "answer"):
        if not isinstance(row[key], str):
            raise Refused(f"{where}: {key!r} must be a string, got {kind_of(row[key])}")
        refuse_surrogates(row[key], f"{where}: {key!r}")
    return row["question"], row["answer"]


def gsm8k_number(answer: str, where: str) -> str:
    found = GSM8K_ANSWER.search(answer)
    if not found:
        raise Refused(
            f"{where}: 'answer' has no '#### NUMBER' as GSM8K's rows have (it ends with {answer[-40:]!r})."
            " Fix: for other question/answer data, data.prompt_key=question (the answer column is then the ground"
            " truth)"
        )
    return found.group(1).replace(",", "")
