"""The ground truth of a row: where it is found, what a rule reads in it, and rows that no answer could satisfy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.config.schema import Config, DataConfig
from verl.config.tree import changed
from verl.data.files import RawRow
from verl.data.formats import task_row
from verl.data.render import RowCounts
from verl.data.truths import kind_of_truth, truth_text, truth_texts, unread_truths
from verl.driver.assemble_rewards import check_graders, reward_of
from verl.reward.compute import DAPO, GEOMETRY, GSM8K, MATH, NUMINA, SEARCH_QA, compute_score, right_answer
from verl.types import Task

DATA = Path(__file__).parents[1] / "data"
ONE_OF_EACH = (GSM8K[0], MATH[0], DAPO[0], NUMINA[0], GEOMETRY[0], SEARCH_QA[0], "aime_2024")


def truth_of(row: dict[str, Any]) -> Any:
    return task_row(RawRow("f.jsonl:7", {"prompt": "2+2?", **row}), DataConfig()).ground_truth


def score(source: str, answer: str, truth: Any) -> float:
    found: Any = compute_score(source, answer, truth)
    return float(found["score"] if isinstance(found, dict) else found)


def test_a_truth_is_found_under_its_usual_names() -> None:
    names = "label target targets gold final_answer reference expected_answer ground_truths solution golden_answers"
    names += " reward_model.ground_truth"  # the name in a table with flattened objects
    for name in names.split():
        assert truth_of({name: "4"}) == truth_of({"extra_info": {name: "4"}}) == "4", name
    assert truth_of({"reward_model": {"ground_truth": "4"}, "answer": "5", "extra_info": {"answer": "6"}}) == "4"
    assert truth_of({"answer": "4", "label": "5", "extra_info": {"ground_truth": "6"}}) == "4"
    assert truth_of({"label": 0}) == 0 and truth_of({}) is None


def test_a_truth_column_that_is_not_read_is_named() -> None:
    assert list(unread_truths({"answer": "4", "label": "5", "target": "", "gold": "4", "id": 3}, "4")) == ["label"]
    assert list(unread_truths({"golden_answers": ["a", "b"]}, {"target": ["a", "b"]})) == []
    assert set(unread_truths({"label": True, "answers": {"x": 1}}, {"inputs": []})) == {"label", "answers"}


def test_what_says_one_text_is_read_as_it() -> None:
    said = {"4": "4", '["4"]': "4", 4: "4", 4.5: "4.5", "4.0": "4.0", "[4]": "[4]", '["a", "b"]': None}
    assert all(truth_text(value) == text for value, text in said.items())
    assert truth_text(["4"]) == truth_text([4.0]) == "4"
    nothing = (None, "", " ", [], {}, "[]x"[:0])
    assert {kind_of_truth(value) for value in nothing} == {"nothing"}
    for value in (["4", "5"], {"value": "4"}, True, float("nan"), '["4", "5"]'):
        assert truth_text(value) is None and kind_of_truth(value) not in ("nothing", "text"), value
    for value in (["a", "b"], '["a", "b"]', {"target": ["a", "b"]}, '{"target": ["a", "b"]}'):
        assert truth_texts(value) == ["a", "b"], value
    assert truth_texts("a") == truth_texts({"target": "a"}) == ["a"] and truth_texts({"value": "a"}) == []


@pytest.mark.parametrize("source", ONE_OF_EACH)
def test_a_rule_gives_its_own_truth_more_than_nothing(source: str) -> None:
    for truth in ("72", ["72"], '["72"]', 72, 72.0):
        assert score(source, str(right_answer(source, truth)), truth) > score(source, "", truth), truth
        assert score(source, str(right_answer(source, "73")), truth) <= score(source, "", truth) + 0.1


def test_the_labelled_answers_are_not_refused() -> None:
    truths = {line.split("\t")[1] for line in (DATA / "math_pairs.tsv").read_text().splitlines()[1:]}
    for truth in truths:
        for source in (MATH[0], DAPO[0], NUMINA[0]):
            assert score(source, str(right_answer(source, truth)), truth) > score(source, "", truth), (source, truth)


def report(source: str, truth: Any) -> RowCounts:
    return RowCounts(truths={source: {kind_of_truth(truth): [3, "f.jsonl:7"]}})


def task_of(source: str, truth: Any) -> Task:
    ids = np.array([1, 2])
    return Task(task_id="t", index=7, messages=(), prompt_ids=ids, data_source=source, ground_truth=truth)


@pytest.mark.parametrize("source", ONE_OF_EACH)
def test_rows_without_a_truth_that_the_rule_reads_are_refused(source: str) -> None:
    config, first = Config(), [task_of(source, "4")]
    check_graders(config, first, [report(source, "4")])
    for truth in (None, "", "  ", []):
        with pytest.raises(ValueError, match=r"^f\.jsonl:7: no ground truth \(3 such rows\).*Fix"):
            check_graders(config, first, [report(source, "4"), report(source, truth)])
    if source not in SEARCH_QA:
        for truth, said in ((["4", "5"], "a list of 2"), ({"value": "4"}, r"an object \(value\)"), (True, "a boolean")):
            with pytest.raises(ValueError, match=f"^f.jsonl:7: a ground truth that is {said}, not a text"):
                check_graders(config, first, [report(source, truth)])
    with pytest.raises(ValueError, match=r"^f\.jsonl:7: data_source='mine': no reward function"):
        check_graders(config, first, [report(source, "4"), report("mine", "4")])
    for own in ({"reward.path": "mine.py"}, {"algorithm.name": "gkd"}):
        check_graders(changed(Config(), own), first, [report(source, None)])


def test_a_source_whose_truths_no_answer_could_earn_is_refused() -> None:
    async def start(*truths: Any) -> None:
        tasks = [task_of(GSM8K[0], truth) for truth in truths]
        reward, _ = await reward_of(config, {}, None, [tasks[0], *tasks])
        await reward.close()

    config = changed(Config(), {"reward.num_workers": 1})
    asyncio.run(start("seventy-two", "72"))
    with pytest.raises(
        ValueError, match=r"row 7: its own ground truth '72 apples' gets the lowest score.*'#### 72 apples'"
    ):
        asyncio.run(start("72 apples", "seventy-two"))


def test_a_reward_function_gets_lists_and_mappings_that_it_may_change(tmp_path: Path) -> None:
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, limits):\n"
    source += "    limits['seen'].append(solution_str)\n    assert type(limits) is dict\n    return 0.0\n"
    (tmp_path / "mine.py").write_text(source)
    given = {"reward.path": str(tmp_path / "mine.py"), "reward.kwargs": {"limits": {"seen": []}}}
    config = changed(Config(), {**given, "reward.num_workers": 1})

    async def start() -> None:
        reward, _ = await reward_of(config, {}, None, [task_of("mine", "4")])
        await reward.close()

    asyncio.run(start())
