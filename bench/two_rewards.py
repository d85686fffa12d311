"""The quickstart's reward in two components, for GDPO: the number is right, and the answer has the form of the worked
sum."""

from __future__ import annotations

import re
from typing import Any

from verl.recipes import arithmetic


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    right = float(arithmetic.compute_score(data_source, solution_str, ground_truth, extra_info))
    return {
        "score": right,
        "right": right,
        "form": float(re.fullmatch(r"[\d+\-=,;]+#-?\d+", solution_str.strip()) is not None),
    }
