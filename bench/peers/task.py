"""The quickstart's task as an arm sees it: the rows of its train.jsonl, in order, and the score of an answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: str | Path, count: int) -> list[Row]:
    with open(path) as lines:
        return [json.loads(line) for _, line in zip(range(count), lines)]


def truth(row: Row) -> str:
    return str(row["reward_model"]["ground_truth"])


def score(completion: str, ground_truth: str) -> float:
    """Return 1.0 if the text ends in # and the right number, as verl.recipes.arithmetic.compute_score does."""
    found = re.search(r"#(\d+)\s*$", completion)
    return float(found is not None and found.group(1) == ground_truth)
