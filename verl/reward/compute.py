"""The default reward function: a rule for each `data_source` of verl's datasets."""

from __future__ import annotations

from typing import Any

from verl.data.truths import NOTHING, truth_text, truth_texts
from verl.errors import Refused
from verl.names import did_you_mean
from verl.reward.code import check_tier, code_score
from verl.reward.math import dapo_score, geometry3k_score, gsm8k_score, marked_math_score, math_score, search_qa_score

GSM8K = ("openai/gsm8k",)
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")  # and every source that starts with "aime"
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
NUMINA = tuple(f"numina_{name}" for name in _NUMINA)
_SEARCH_QA = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SEARCH_QA = tuple(f"searchR1_{name}" for name in _SEARCH_QA)
GEOMETRY = ("hiyouga/geometry3k",)
CODE = ("codecontests", "apps", "codeforces", "taco")
KNOWN = (*GSM8K, *MATH, *DAPO, *NUMINA, *SEARCH_QA, *GEOMETRY, *CODE)


def check_data_source(data_source: str) -> None:
    """Raise ValueError if `compute_score` has no rule for this source, or cannot run it here. It is fast enough to call
    at the start."""
    if data_source in CODE:
        check_tier("auto")
    if data_source in KNOWN or data_source.startswith("aime"):
        return
    hint = did_you_mean(data_source, KNOWN, form="; did you mean {!r}?") or "."
    prefix = f"data_source={data_source!r}: no reward function is known for it{hint} Known: {', '.join(KNOWN)}, aime*."
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None)"
    raise Refused(f"{prefix} Fix: reward.path=your_reward.py with `{signature}`")


def readable_truth(data_source: str, kind: str) -> bool:
    """Return True if the rule of a source can read a ground truth of this kind (`kind_of_truth`)."""
    return kind == "text" or (kind != NOTHING and data_source in (*CODE, *SEARCH_QA))


def right_answer(data_source: str, ground_truth: Any) -> str | None:
    """Return an answer with the ground truth, in the form that the rule of the source reads; None for a program."""
    if data_source in CODE:
        return None
    if data_source in SEARCH_QA:
        return f"<answer>{next(iter(truth_texts(ground_truth)), '')}</answer>"
    truth = truth_text(ground_truth)
    if data_source in GSM8K:
        return f"#### {truth}"
    boxed = data_source in (*MATH, *NUMINA, *GEOMETRY)
    return rf"\boxed{{{truth}}}" if boxed else f"Answer: {truth}"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: str = "strict",
    tier: str = "auto",
) -> float | dict[str, object]:
    r"""Score one solution by the rule of its dataset, as verl's default does. GSM8K: 1/0 on the number after `####`
    (`method="flexible"`: on the last number). MATH: 1/0 on the last `\boxed{}`. DAPO and AIME: a dict with score ±1,
    acc, pred. Numina: 1/0. Geometry3k: 0.9 answer + 0.1 format. Search-R1: exact match. Code: the
    share of tests passed, in the sandbox of `tier`. Raises ValueError for a source without a rule; TimeoutError if
    math-verify gives no verdict."""
    if data_source in CODE:
        return {**code_score(solution_str, ground_truth, tier=tier)}
    check_data_source(data_source)
    if data_source in SEARCH_QA:
        return search_qa_score(solution_str, truth_texts(ground_truth))
    truth = truth_text(ground_truth) or str(ground_truth)
    if data_source in GSM8K:
        return gsm8k_score(solution_str, truth, method)
    if data_source in MATH:
        return math_score(solution_str, truth)
    if data_source in NUMINA:
        return marked_math_score(solution_str, truth)
    if data_source in GEOMETRY:
        return geometry3k_score(solution_str, truth)
    return dapo_score(solution_str, truth)
