"""Preference rows in the shapes that people bring: a prompt is used once, and pairs that say nothing are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.chat.template import RowRefused
from verl.config.schema import DataConfig
from verl.data.files import RawRow
from verl.data.pairs import PreferenceRow, pair_row, unpaired_rows
from verl.data.preference import load_pairs
from verl.models import tiny

ASKED = "What is 2+2, please?"
SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": ASKED}
GOOD, BAD = ({"role": "assistant", "content": text} for text in "45")
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def pair(row: dict[str, Any]) -> PreferenceRow:
    return pair_row(RawRow("f.jsonl:7", row), DataConfig())


def unpaired(row: dict[str, Any]) -> list[PreferenceRow]:
    return unpaired_rows(RawRow("f.jsonl:7", row), DataConfig())


def share(*messages: dict[str, str]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages]


def test_a_prompt_that_the_answers_repeat_is_used_once() -> None:
    plain = {"prompt": f"{ASKED}\n"}
    spelled = [
        plain | {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        plain | {"chosen": [USER, GOOD], "rejected": "5"},
        plain | {"chosen": share(USER, GOOD), "rejected": share(USER, BAD)},
        plain | {"chosen": f"{ASKED}\n4", "rejected": f" {ASKED} 5"},
        plain | {"chosen": [{**USER, "content": f"  {ASKED}"}, GOOD], "rejected": [BAD]},
        plain | {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
        {"prompt": [USER], "chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
        {"conversations": share(USER), "chosen": share(USER, GOOD), "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [{**USER, "content": f"{ASKED}\n"}, BAD]},
        {"prompt": f"\n\nHuman: {ASKED}\n\nAssistant:", "chosen": "4", "rejected": "5"},
        {
            "prompt": f"\n\nHuman: {ASKED}\n\nAssistant:",
            "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: 4",
            "rejected": "5",
        },
    ]
    for row in spelled:
        got = pair(row)
        found = [[(m["role"], m["content"].strip()) for m in turns] for turns in got[:3] if turns is not None]
        assert found == [[("user", ASKED)], [("assistant", "4")], [("assistant", "5")]], row
    for prompt in ([SYSTEM, USER], [*TURNS, USER], [SYSTEM, *TURNS, USER]):
        for k in range(len(prompt)):  # whole, without the system's turn, or its last turns alone
            if prompt[k]["role"] != "assistant":
                got = pair({"prompt": prompt, "chosen": [*prompt[k:], GOOD], "rejected": [*prompt[k:], BAD]})
                assert (got.prompt, got.chosen, got.rejected) == (tuple(prompt), (GOOD,), (BAD,)), (prompt, k)
    got = pair({"prompt": ASKED, "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]})
    assert (got.prompt, got.chosen, got.rejected) == ((SYSTEM, USER), (GOOD,), (BAD,)), "the answers' own system turn"


def test_short_prompts_may_begin_an_answer() -> None:
    got = pair({"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi!"})
    assert got.chosen[0]["content"] == "Hi there"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": ASKED, "chosen": [{"role": "user", "content": "Else?"}, GOOD], "rejected": [BAD]},
            "'chosen' begins with",
        ),
        ({"prompt": ASKED, "chosen": "4", "rejected": [SYSTEM, BAD]}, "'rejected' begins with a turn of 'system'"),
        ({"prompt": ASKED, "chosen": [SYSTEM, USER, GOOD], "rejected": [BAD]}, "one answer has a system turn"),
        ({"prompt": ASKED, "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, "one answer has a system turn"),
        (
            {"prompt": ASKED, "chosen": [SYSTEM, USER, GOOD], "rejected": [{**SYSTEM, "content": "T"}, USER, BAD]},
            "different system turns",
        ),
        (
            {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, {**USER, "content": "Else?"}, BAD]},
            "begins with a turn of",
        ),
    ],
)
def test_answers_behind_another_prompt_are_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^f\.jsonl:7: .*{says}.*Fix"):
        pair(row)


EMPTY = ("", " \n", [], [{"role": "assistant", "content": ""}], [USER, {"role": "assistant", "content": " "}], [USER])


def test_pairs_that_say_nothing_are_counted() -> None:
    for nothing in EMPTY:
        for row in ({"chosen": nothing, "rejected": "5"}, {"chosen": "4", "rejected": nothing}):
            with pytest.raises(RowRefused, match="empty"):
                pair({"prompt": ASKED, **row})
        with pytest.raises(RowRefused, match="empty"):
            unpaired({"prompt": ASKED, "completion": nothing, "label": True})
    for same in (("4", "4"), ("4", "4\n"), ([GOOD], "4"), ([USER, GOOD], [GOOD])):
        with pytest.raises(RowRefused, match="the same"):
            pair({"prompt": ASKED, "chosen": same[0], "rejected": same[1]})
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert pair({"prompt": ASKED, "chosen": [call], "rejected": "5"}).chosen[0]["tool_calls"]


def test_labels_of_unpaired_answers() -> None:
    row = {"prompt": ASKED, "completion": "4"}
    for label, good in (
        (1, True),
        (0, False),
        ("true", True),
        ("False", False),
        ("1", True),
        (0.0, False),
        (True, True),
    ):
        assert [found.desirable for found in unpaired({**row, "label": label})] == [good], label
    for label in (2, "maybe", None, [True], -1):
        with pytest.raises(ValueError, match="'label' must be true"):
            unpaired({**row, "label": label})
    for other in (
        {"prompt": ASKED, "response": "4"},
        {"messages": [USER, GOOD]},
        {"prompt": [USER], "completion": [USER, GOOD]},
        {"prompt": [USER], "completion": GOOD},
    ):
        (got,) = unpaired({**other, "label": 1})
        assert (got.prompt, got.chosen) == ((USER,), (GOOD,)), other
    both = unpaired({"prompt": ASKED, "chosen": "4", "rejected": "5"})
    assert [(found.chosen, found.desirable) for found in both] == [((GOOD,), True), ((BAD,), False)]


def test_scored_completions() -> None:
    scored = [{"response": text, "overall_score": score} for text, score in (("5", 1.0), ("4", 9.0), ("6", 4.0))]
    got = pair({"instruction": ASKED, "completions": scored})
    assert (got.prompt, got.chosen, got.rejected, got.gap) == ((USER,), (GOOD,), (BAD,), 8.0)
    with pytest.raises(RowRefused, match="one score"):
        pair({"instruction": ASKED, "completions": scored[:1]})
    with pytest.raises(ValueError, match="'completions' must be objects with response and a score"):
        pair({"instruction": ASKED, "completions": [{"response": "4"}]})
    row = {"prompt": ASKED, "chosen_response": "4", "rejected_response": "5", "chosen-rating": 5, "rejected-rating": 2}
    assert (pair(row).chosen, pair(row).gap) == ((GOOD,), 3.0)


# ---- as tables -------------------------------------------------------------------------------------------------------


def loaded(folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **options: Any) -> Any:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return load_pairs([str(file)], tokenizer, DataConfig(cache_dir=str(folder / "cache"), num_workers=0), **options)


def test_what_is_learned_and_what_is_left_out(tmp_path: Path) -> None:
    tokenizer: Any = tiny.character_tokenizer("0123456789+=? abcdefghijklmnopqrstuvwxyz<|>\n")
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}, {"prompt": "2+2=", "chosen": "", "rejected": "5"}]
    rows += [{"prompt": "2+2=", "chosen": "4", "rejected": "4"}, {"prompt": "2+2=", "chosen": "4", "rejected": " "}]
    table = loaded(tmp_path, rows, tokenizer)
    assert len(table) == 1 and table.report.rows_read == 4
    assert table.report.refused == {
        "an empty chosen answer": 1,
        "chosen and rejected are the same": 1,
        "an empty rejected answer": 1,
    }
    assert all(reason in table.summary() for reason in table.report.refused)
    (one,) = table.pairs
    assert tokenizer.decode(one.chosen.ids[one.chosen.mask]).startswith("4")
    with pytest.raises(ValueError, match=r"no rows left of 3.*1 x an empty chosen answer.*First: .*rows\.jsonl:1"):
        loaded(tmp_path, rows[1:], tokenizer)
    both = loaded(tmp_path, rows[:1], tokenizer, paired=False)
    assert [pair.desirable for pair in both.pairs] == [True, False]
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: 'image' holds 1 item"):
        loaded(tmp_path, [{**rows[0], "image": "a.png"}], tokenizer)


def test_texts_without_a_prompt_need_no_template(tmp_path: Path) -> None:
    tokenizer: Any = tiny.character_tokenizer("0123456789+=? ")
    tokenizer.chat_template = None
    rows = [{"chosen": "2+2=4", "rejected": "2+2=55"}]
    (one,) = loaded(tmp_path, rows, tokenizer).pairs
    end = tokenizer.eos_token_id
    assert tokenizer.decode(one.chosen.ids[:-1]) == "2+2=4" and one.chosen.ids[-1] == one.rejected.ids[-1] == end
    assert tokenizer.decode(one.chosen.ids[one.chosen.mask][:-1]) == "4"
    assert tokenizer.decode(one.rejected.ids[one.rejected.mask][:-1]) == "55"
    with pytest.raises(ValueError, match="do not begin with the same text"):
        loaded(tmp_path, [{"chosen": "4", "rejected": "5"}], tokenizer)
    with pytest.raises(ValueError, match="has no chat template"):
        loaded(tmp_path, [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}], tokenizer)


def test_the_tools_of_a_row_are_in_its_ids(tmp_path: Path) -> None:
    tokenizer: Any = tiny.character_tokenizer('0123456789+=? abcdefghijklmnopqrstuvwxyz<|>{}[]":,_\n')
    tokenizer.chat_template = "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" + tokenizer.chat_template
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    tools = [{"type": "function", "function": {"name": "adder", "parameters": {}}}]
    plain, shown = (loaded(tmp_path, [r], tokenizer).pairs[0] for r in (row, {**row, "tools": tools}))
    assert tokenizer.decode(shown.chosen.ids) == "adder" + tokenizer.decode(plain.chosen.ids)
