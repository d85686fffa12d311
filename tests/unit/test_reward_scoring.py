"""The scorers: GSM8K, MATH, DAPO, Numina, Geometry3k, Search-R1; and what counts as a result."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import FULL_GRID
from hypothesis import given, settings
from hypothesis import strategies as st

import verl.reward
from verl.reward.base import parse_result
from verl.reward.compute import CODE, KNOWN, check_data_source, compute_score
from verl.reward.math import (
    dapo_score,
    geometry3k_score,
    gsm8k_answer,
    gsm8k_score,
    last_boxed,
    marked_math_score,
    math_equal,
    math_score,
    normalize_math,
    normalize_minerva,
    search_qa_score,
)
from verl.sandbox.code import CodeSandbox
from verl.types import Invalid, Score

DATA = Path(__file__).parents[1] / "data"


def test_gsm8k_own_answers_score_one() -> None:
    table: list[Any] = ["gsm8k_train.jsonl", "gsm8k_test.jsonl"]
    for file in table:
        rows = [json.loads(line) for line in (DATA / file).read_text().splitlines()]
        assert len(rows) >= 60
        for row in rows:
            truth = row["answer"].split("####")[1].strip().replace(",", "")
            assert verl.reward.compute_score("openai/gsm8k", row["answer"], truth) == 1.0, row
            assert compute_score("openai/gsm8k", row["answer"], truth + "1") == 0.0
            assert compute_score("openai/gsm8k", row["answer"], truth, method="flexible") == 1.0


def test_gsm8k_answer() -> None:
    table: list[Any] = [
        ("so 3 + 4.\n#### 7", "7", "7"),
        ("#### 5 no wait\n#### -1,234.50", "-1234.50", "-1234.50"),
        ("the answer is $1,000.", None, "1000"),
        ("#### $72", None, "72"),  # as in verl: the marker is followed by the number
        ("####72", None, "72"),
        ("it costs 3 dollars ...", None, "3"),
        ("no number at all .", None, None),
        ("#### 7" + " and so on" * 40, None, None),  # beyond the last 300 characters
    ]
    assert not [
        (text, strict, flexible)
        for text, strict, flexible in table
        if not (gsm8k_answer(text, "strict") == strict and gsm8k_answer(text, "flexible") == flexible)
    ]


def test_gsm8k_score_values() -> None:
    assert gsm8k_score("#### 8", "7", format_score=0.1) == 0.1
    assert gsm8k_score("8", "7", format_score=0.1) == 0.0
    assert gsm8k_score("#### 7", "7", score=2.0) == 2.0
    assert gsm8k_score("#### 1,000", "1,000") == 1.0
    for text in ("#### $18", "####18", "#### 18.00", "so 18."):  # strict is verl's, to the letter
        assert gsm8k_score(text, "18", "strict") == 0.0 and gsm8k_score(text, "18", "flexible") == 1.0, text
    assert gsm8k_score("#### 18.01", "18", "flexible") == gsm8k_score("1.8.0", "18", "flexible") == 0.0
    with pytest.raises(ValueError, match="must be 'strict' or 'flexible'"):
        gsm8k_answer("7", "loose")


def test_last_boxed() -> None:
    table: list[Any] = [
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"so $\boxed 7$ holds", "7"),
        (r"\fbox{x}", "x"),
        (r"\boxed{ {a} {b} }", " {a} {b} "),
        (r"\boxed{\frac{1}{2", None),  # cut off
        ("none", None),
        (r"ends with \boxed", None),
    ]
    assert not [(text, inner) for text, inner in table if last_boxed(text) != inner]


def test_math_normalisation_makes_equal() -> None:
    table: list[Any] = [
        (r"\dfrac12", r"\frac{1}{2}"),
        ("0.5", "1/2"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac{1}2", "1/2"),
        ("x = 5", "5"),
        (r"3 \text{ cm}", "3"),
        (r"12\text{ cm}^2", "12"),
        (r"\text{east}", "east"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"\$1,234", "1234"),
        (r"50\%", "50"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\sqrt3", r"\sqrt{3}"),
        (".25", "0.25"),
        ("-3/4", r"-\frac{3}{4}"),
        ("42.", "42"),
    ]
    assert not [(a, b) for a, b in table if not (normalize_math(a) == normalize_math(b) and math_equal(a, b))]


def test_math_normalisation_keeps_apart() -> None:
    table: list[Any] = [("1", "2"), ("x=1", "y^2"), (r"\frac{1}{2}", r"\frac{2}{1}"), ("12", r"1\,{,}2"), ("", "3")]
    assert not [(a, b) for a, b in table if not (normalize_math(a) != normalize_math(b) and not math_equal(a, b))]


def test_matrix_rows_are_not_glued_together() -> None:
    assert normalize_math(r"\begin{pmatrix}1\\ 2\end{pmatrix}") != normalize_math(r"\begin{pmatrix}12\end{pmatrix}")


def test_math_verify_decides_beyond_spelling() -> None:
    table: list[Any] = [
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("x+1", "1+x", True),
        (r"\{2, 1\}", r"\{1,2\}", True),
        ("72.0", "72", True),
        ("0.333", r"\frac{1}{3}", False),
        ("(1,3)", "(1,2)", False),
        (r"\frac{", "1", False),
        ("}{)(", "1", False),
    ]
    for answer, truth, equal in table:
        assert math_equal(answer, truth) is equal, (answer, truth)
        if last_boxed(rf"\boxed{{{answer}}}") == answer:
            assert math_score(rf"not \boxed{{0}} but \boxed{{{answer}}}.", truth) == float(equal), (answer, truth)


def test_what_math_verify_reads_over_is_told_apart_and_other_spellings_are_one() -> None:
    apart = [("1,2,2", "1,2"), ("5,5", "5"), ("[5]", "5"), ("5", "[5]"), ("6:8", "3:4"), ("a", "A"), ("10_{2}", "10")]
    apart += [("10_2", "10_{3}"), ("1 km", "1000 cm"), ("1 m", "1 kg"), ("x_1", "x"), ("i", "j"), ("1, 2, 3", "1, 2")]
    one = [
        ("1.2 m", "120 cm"),
        ("2.5 kg", "2500 g"),
        ("60 minutes", "1 hour"),
        (r"1 \text{ m}^2", r"10000 \text{ cm}^2"),
    ]
    one += [
        (r"e^{i\pi}", "-1"),
        (r"2e^{i\pi/2}", "2i"),
        (r"\sqrt{-1}", "i"),
        (r"\mathbb{R}", r"\mathbb R"),
        ("ℝ", r"\mathbb{R}"),
    ]
    one += [("no solution", r"\emptyset"), (r"\text{no real solutions}", r"\varnothing"), ("the empty set", r"\{\}")]
    one += [
        ("2, 1", "1, 2"),
        ("3, 4", "(3,4)"),
        ("(5)", "5"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        (r"\pm 2", "2,-2"),
    ]
    one += [
        ("10_2", "10_{2}"),
        ("1011", "1011_2"),
        (r"\{1,2,2\}", r"\{1,2\}"),
        ("(1,2),(3,4)", "(3,4),(1,2)"),
        ("3:4", "3:4"),
    ]
    assert not [pair for pair in apart if math_equal(*pair)]
    assert not [pair for pair in one if not math_equal(*pair)]


@pytest.mark.slow
def test_labelled_pairs_and_math_verify_alone() -> None:
    """327 pairs, labelled by hand: ours errs on 2, math-verify alone on 64, those 2 among them (in the full grid)."""
    lines = (DATA / "math_pairs.tsv").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [line.split("\t") for line in lines]
    ours = [line for line in pairs if math_equal(line[0], line[1]) != (line[2] == "right")]
    assert len(pairs) >= 300 and {line[2] for line in pairs} == {"right", "wrong"}
    assert len(ours) <= 0.01 * len(pairs), ours
    measured = [ours]
    if FULL_GRID:
        from math_verify import parse, verify

        alone = [line for line in pairs if verify(parse(f"${line[1]}$"), parse(f"${line[0]}$")) != (line[2] == "right")]
        assert len(alone) > 0.15 * len(pairs)  # else the layer is not worth its lines
        assert [line for line in ours if line not in alone] == []
        measured.append(alone)
    page = (DATA.parents[1] / "docs/data_and_rewards.md").read_text()
    for faults in measured:
        right, wrong = (
            sum(x[2] == word for x in pairs) - sum(x[2] == word for x in faults) for word in ("right", "wrong")
        )
        assert f"| {right} | {wrong} | {(right + wrong) / len(pairs):.1%} |" in page


def test_math_verify_outside_the_main_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math_equal, "x+1", "1+x").result(timeout=30)


def test_math_timeout_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify
    from math_verify.errors import TimeoutException

    def slow(*_: object, **__: object) -> None:
        raise TimeoutException("Operation timed out!")

    monkeypatch.setattr(math_verify, "parse", slow)
    with pytest.raises(TimeoutError, match="no verdict"):
        math_equal("a+b", "c")


def test_math_score_needs_a_box() -> None:
    assert math_score("the answer is 5", "5") == 0.0
    assert math_score(r"\boxed{5}", r"\boxed{5}") == 1.0
    assert marked_math_score("the answer is 5.", "5") == 1.0
    assert marked_math_score("Answer: $x+1$", "1+x") == 1.0
    assert marked_math_score(r"answer is 4, no: \boxed{5}", "5") == 1.0
    assert marked_math_score("I do not know", "5") == 0.0


def test_dapo() -> None:
    table: list[Any] = [
        ("Answer: 34", "34", 1.0, "34"),
        ("answer : $34$ dollars", "34", 1.0, "34"),
        ("Answer: 1\nAnswer: 1,234", "1234", 1.0, "1234"),
        ("Answer: 33", "34", -1.0, "33"),
        (r"thus \boxed{34}", "34", 1.0, "34"),
        (r"Answer: 5 \boxed{34}", "34", -1.0, "534"),  # an answer line wins over a box
        ("nothing", "34", -1.0, "[INVALID]"),
        ("Answer: 34" + "." * 400, "34", -1.0, "[INVALID]"),
        (r"Answer: $\frac12$", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
        ("Answer: x = 7", "7", 1.0, "7"),
        (r"Answer: $90^\circ$", "90", 1.0, "90"),
    ]
    assert not [
        (text, truth, score, pred)
        for text, truth, score, pred in table
        if dapo_score(text, truth) != {"score": score, "acc": score > 0, "pred": pred}
    ]


def test_search_qa() -> None:
    assert search_qa_score("<answer>x</answer> <answer>The  Eiffel-Tower.</answer>", ["no", "eiffeltower"]) == 1.0
    assert search_qa_score("<answer>London</answer>", "Paris") == 0.0
    assert search_qa_score("Paris", "Paris") == 0.0
    assert search_qa_score("<answer>Paris</answer>" * 11, "Paris") == 0.25
    truth = {"target": np.array(["Paris", "paris, france"], dtype=object)}  # as parquet gives it
    assert compute_score("searchR1_nq", "<answer>Paris France</answer>", truth) == 1.0


def test_geometry3k() -> None:
    assert geometry3k_score(r"<think>a</think> \boxed{5}", "5") == pytest.approx(1.0)
    assert geometry3k_score(r"\boxed{5}", "5") == pytest.approx(0.9)
    assert geometry3k_score(r"<think>a</think> \boxed{6}", "5") == pytest.approx(0.1)
    assert geometry3k_score(r"<think>\boxed{5}</think>", "5") == pytest.approx(0.9)
    assert geometry3k_score("5", "5") == 0.0


def test_dispatch() -> None:
    assert compute_score("HuggingFaceH4/MATH-500", r"\boxed{\frac{1}{2}}", "0.5") == 1.0
    assert compute_score("aime_2024", "Answer: 7", "7")["score"] == 1.0  # type: ignore[index]
    assert compute_score("math_dapo", "Answer: 7", 7, {"index": 1})["acc"] is True  # type: ignore[index]
    assert compute_score("numina_cn_k12", r"\boxed{7}", "7") == 1.0
    assert compute_score("hiyouga/geometry3k", r"\boxed{7}", "7") == pytest.approx(0.9)
    for source in (*sorted({*KNOWN} - {*CODE}), "aime25"):
        check_data_source(source)


def test_unknown_source_names_the_fix() -> None:
    with pytest.raises(ValueError, match=r"data_source='openai/gsm8'.*did you mean 'openai/gsm8k'.*reward\.path="):
        compute_score("openai/gsm8", "#### 1", "1")


def test_programs_need_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodeSandbox, "_why_not", lambda _: "none here")
    for source in CODE:
        with pytest.raises(ValueError, match=r"no sandbox for code works here .*none here.*Fix"):
            check_data_source(source)


class _Scalar:
    """A 0-d tensor, seen from outside."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def item(self) -> Any:
        return self._value


def test_parse_result_valid() -> None:
    table: list[Any] = [
        (1, Score(1.0)),
        (True, Score(1.0)),
        (-0.25, Score(-0.25)),
        (np.float32(0.5), Score(0.5)),
        (np.array(2), Score(2.0)),
        (np.bool_(True), Score(1.0)),
        (_Scalar(0.75), Score(0.75)),
        (Fraction(1, 4), Score(0.25)),
        ({"score": 1, "acc": True, "n": np.int64(3), "list": [1]}, Score(1.0, {"acc": 1.0, "n": 3.0})),
        ({"score": 1, "pred": "x" * 2000, "other": "y"}, Score(1.0, {}, "x" * 1000)),
        ({"score": 1, "pred": None}, Score(1.0)),
        ({"score": 0, "feedback": "y" * 5000}, Score(0.0, feedback="y" * 4000)),
        ({"score": 0, "feedback": 3}, Score(0.0, {"feedback": 3.0})),
        ({"score": 1, "pred": 42}, Score(1.0, {"pred": 42.0}, "42.0")),
        ({"score": 1, "turn_rewards": [1, np.float32(-0.5)]}, Score(1.0, {}, None, (1.0, -0.5))),
        ({"score": 1, "turn_rewards": np.array([2.0])}, Score(1.0, {}, None, (2.0,))),
        ({"score": 1, "turn_rewards": []}, Score(1.0, {}, None, ())),
        ({"score": 1, "turn_rewards": None}, Score(1.0)),
        ({"score": np.float64(0.5), "bad": float("nan"), 7: 1.0}, Score(0.5, {})),
    ]
    assert not [(value, score) for value, score in table if parse_result(value) != score]


def test_parse_result_invalid() -> None:
    table: list[Any] = [
        (None, "None"),
        ("1.0", "the text '1.0'"),
        ((1.0, {}), "tuple"),
        ([1.0], "list"),
        (float("nan"), "finite"),
        (float("-inf"), "finite"),
        (10**400, "finite"),
        (np.zeros(3), "ndarray"),
        (1j, "complex"),
        (_Scalar("x"), "_Scalar"),
        (_Scalar, "type"),
        ({"score": 1.0, "turn_rewards": 0.5}, "turn_rewards as a float"),
        ({"score": 1.0, "turn_rewards": [0.5, float("nan")]}, "each must be a finite number"),
        ({"score": 1.0, "turn_rewards": [0.5, "x"]}, "each must be a finite number"),
        ({"score": 1.0, "turn_rewards": np.array(0.5)}, "turn_rewards as a ndarray"),
        ({"acc": 1.0}, "acc"),
        ({}, "none"),
        ({"score": None}, "None"),
        ({"score": 1.0, **{f"k{i}": i for i in range(1001)}}, "at most 1000 components"),
    ]
    results = [(parse_result(value), says) for value, says in table]
    assert not [
        (result, says)
        for result, says in results
        if not (isinstance(result, Invalid) and result.reason == "bad_result" and says in result.detail)
    ]


_SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5)


@settings(max_examples=50, deadline=None)
@given(
    _SCALARS
    | st.tuples(_SCALARS)
    | st.dictionaries(st.sampled_from(["score", "acc", "turn_rewards"]), _SCALARS | st.lists(_SCALARS))
)
def test_parse_result_is_total(value: Any) -> None:
    assert isinstance(parse_result(value), Score | Invalid)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.sampled_from("\\{}()[]$^_=,.#0123 abfrcsqtxoden:AsweT\n")))
def test_scorers_are_total_on_text(text: str) -> None:
    assert dapo_score(text, "7")["score"] in (1.0, -1.0)
    assert gsm8k_score(text, "7") in (0.0, 1.0)
    assert isinstance(normalize_math(text), str) and isinstance(normalize_minerva(text), str)
    assert (boxed := last_boxed(text)) is None or boxed in text


def test_import_is_light() -> None:
    code = "import verl.reward.result, sys; assert not {'torch', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
