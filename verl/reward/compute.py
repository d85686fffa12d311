"""The default reward: a scorer by `data_source`, with the names that verl's datasets carry."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from verl.reward.math import dapo_score, geometry3k_score, gsm8k_score, marked_math_score, math_score, search_qa_score

GSM8K = ("openai/gsm8k",)
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")  # and every source that starts with "aime"
NUMINA = (
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
)
SEARCH_QA = (
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
)
GEOMETRY = ("hiyouga/geometry3k",)
CODE = ("codecontests", "apps", "codeforces", "taco")
KNOWN = (*GSM8K, *MATH, *DAPO, *NUMINA, *SEARCH_QA, *GEOMETRY)


def check_data_source(data_source: str) -> None:
    """Raise the ValueError that `compute_score` would raise for this source. Cheap: call it for a dataset at start."""
    if data_source in CODE:
        raise ValueError(
            f"data_source={data_source!r}: scoring code needs a code sandbox, which this version does not have. "
            "Fix: reward.path=your_grader.py with your own compute_score (it runs in a killable, limited process)"
        )
    if data_source in KNOWN or data_source.startswith("aime"):
        return
    near = get_close_matches(data_source, KNOWN, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"data_source={data_source!r}: no reward function is known for it{hint} "
        f"Known: {', '.join(KNOWN)}, aime*. "
        "Fix: reward.path=your_reward.py with "
        "`def compute_score(data_source, solution_str, ground_truth, extra_info=None)`"
    )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "strict",
) -> float | dict[str, object]:
    r"""Score one solution by the rule of its dataset, as verl's default does.

    GSM8K: 1/0 on the number after `####` (`method="flexible"`: on the last number). MATH: 1/0 on the last `\boxed{}`.
    DAPO and AIME: a dict with score ±1, acc, pred. Numina: 1/0. Geometry3k: 0.9 answer + 0.1 format. Search-R1: exact
    match. Raises ValueError for a source without a rule; TimeoutError if math-verify gives no verdict.
    """
    check_data_source(data_source)
    if data_source in SEARCH_QA:
        return search_qa_score(
            solution_str, ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
        )
    truth = str(ground_truth)
    if data_source in GSM8K:
        return gsm8k_score(solution_str, truth, method)
    if data_source in MATH:
        return math_score(solution_str, truth)
    if data_source in NUMINA:
        return marked_math_score(solution_str, truth)
    if data_source in GEOMETRY:
        return geometry3k_score(solution_str, truth)
    return dapo_score(solution_str, truth)
