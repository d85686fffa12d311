"""Files and rows: every published shape becomes messages; every wrong row is one error with its place and the
reason."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config.schema import DataConfig
from verl.data.files import RawRow, expand_files, fingerprint, read_rows
from verl.data.formats import Players, conversation_row, task_row
from verl.data.pairs import pair_row, unpaired_rows
from verl.data.truths import GSM8K_INSTRUCTION

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_train.jsonl"


def rows_of(*files: str | Path) -> list[dict[str, Any]]:
    return [raw.row for f in expand_files([str(f) for f in files]) for raw in read_rows(f)]


def wheres_of(file: Path) -> list[str]:
    return [raw.where for f in expand_files([str(file)]) for raw in read_rows(f)]


def parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


# ---- files -----------------------------------------------------------------------------------------------------------


def test_jsonl_in_every_packing_reads_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": "p\u2028q", "n": k, "big": 10**30, "nested": {"a": [1, None, 2.5]}} for k in range(5)]
    text = "\n".join(json.dumps(r, ensure_ascii=False) for r in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n\n") + b"\n\n")
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(text))
    with pa.CompressedOutputStream(str(tmp_path / "e.jsonl.zst"), "zstd") as out:
        out.write(text)
    for name in ("a.jsonl", "b.jsonl", "c.json", "d.jsonl.gz", "e.jsonl.zst"):
        assert rows_of(tmp_path / name) == rows, name
    assert wheres_of(tmp_path / "b.jsonl")[1] == f"{tmp_path}/b.jsonl:3"
    assert wheres_of(tmp_path / "c.json")[1] == f"{tmp_path}/c.json: item 2"


def test_csv_and_tsv(tmp_path: Path) -> None:
    rows = [{"prompt": 'say "hi",\nthen ü', "answer": "7"}, {"prompt": "no answer"}]
    text = 'prompt,answer\r\n"say ""hi"",\nthen ü",7\r\n\r\nno answer,\r\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.tsv").write_text('prompt\tanswer\n"say ""hi"",\nthen ü"\t7\nno answer\t\n', encoding="utf-8")
    for name in ("a.csv", "b.csv.gz", "c.tsv"):
        assert rows_of(tmp_path / name) == rows, name
    assert wheres_of(tmp_path / "a.csv") == [f"{tmp_path}/a.csv:3", f"{tmp_path}/a.csv:5"]
    assert rows_of(tmp_path / "a.csv", tmp_path / "c.tsv") == rows * 2 and len(expand_files([str(tmp_path)])) == 3
    wrong = []
    for text, says in (("a,b\n1,2,3\n", ":2: 3 fields"), ('a\n"x', ":2: not readable"), ("a\n\xff", "not readable")):
        (tmp_path / "w.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError) as error:
            rows_of(tmp_path / "w.csv")
        wrong += [] if says in str(error.value) and "w.csv" in str(error.value) else [(text, str(error.value))]
    assert not wrong


def test_globs_folders_urls_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b-1.jsonl", "b-0.jsonl", "c[1].jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name}))
    (tmp_path / "README.md").write_text("no data")
    assert [r["prompt"] for r in rows_of(tmp_path)] == ["b-0.jsonl", "b-1.jsonl", "c[1].jsonl"]
    assert [r["prompt"] for r in rows_of(tmp_path / "*")] == ["b-0.jsonl", "b-1.jsonl", "c[1].jsonl"]
    assert [r["prompt"] for r in rows_of(tmp_path / "b-1.jsonl", tmp_path / "b-*.jsonl")] == [
        "b-1.jsonl",
        "b-0.jsonl",
        "b-1.jsonl",
    ]
    assert len(rows_of(tmp_path / "c[1].jsonl")) == 1, "a name that looks like a pattern is a name first"
    assert len(rows_of(f"file://{tmp_path}/b-0.jsonl")) == 1
    monkeypatch.chdir(tmp_path)
    assert len(rows_of("b-0.jsonl")) == 1


def test_memory_urls() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/verl-test/x.jsonl", b'{"prompt": "hi"}\n')
    assert rows_of("memory://verl-test/x.jsonl") == rows_of("memory://verl-test/*.jsonl") == [{"prompt": "hi"}]
    (file,) = expand_files(["memory://verl-test/x.jsonl"])
    before = fingerprint(file)
    fs.pipe("/verl-test/x.jsonl", b'{"prompt": "ho"}\n')
    assert fingerprint(file) != before
    fs.rm("/verl-test", recursive=True)


def test_parquet_comes_out_as_plain_python(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"index": 3, "tags": ["a", None], "score": 0.5, "ok": True},
            "blob": b"\x00\xff",
            "price": decimal.Decimal("72.50"),
            "day": datetime.date(2026, 1, 2),
            "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
            "took": datetime.timedelta(seconds=90),
        }
    ]
    (row,) = rows_of(parquet(tmp_path / "a.parquet", rows))
    assert row == {**rows[0], "price": "72.50", "day": "2026-01-02", "when": "2026-01-02T03:04:05", "took": 90.0}
    assert {type(v) for v in row["extra_info"].values()} == {int, list, float, bool}
    kinds = pa.schema(
        [
            ("m", pa.map_(pa.int32(), pa.string())),
            ("h", pa.float16()),
            ("d", pa.dictionary(pa.int8(), pa.string())),
            ("f", pa.list_(pa.float32(), 2)),
            ("i", pa.int8()),
        ]
    )
    (row,) = rows_of(
        parquet(tmp_path / "b.parquet", [{"m": [(1, "x")], "h": 1.5, "d": "y", "f": [1.0, 2.0], "i": 4}], kinds)
    )
    assert row == {"m": {"1": "x"}, "h": 1.5, "d": "y", "f": [1.0, 2.0], "i": 4}
    assert type(row["h"]) is float and type(row["i"]) is int
    assert wheres_of(tmp_path / "b.parquet") == [f"{tmp_path}/b.parquet: row 1"]


def test_many_row_groups_stream_in_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [str(k) for k in range(3000)]}), tmp_path / "a.parquet", row_group_size=700)
    assert [r["prompt"] for r in rows_of(tmp_path / "a.parquet")] == [str(k) for k in range(3000)]


# ---- RL rows ---------------------------------------------------------------------------------------------------------

USER = ({"role": "user", "content": "2+2?"},)


def task(row: dict[str, Any], **options: Any) -> Any:
    return task_row(RawRow("f.jsonl:7", row), DataConfig(**options))


def refused(read: Any, table: Sequence[tuple[dict[str, Any], str]]) -> list[tuple[dict[str, Any], str]]:
    """The rows of the table that `read` does not refuse with the file, the line and the message."""
    failed = []
    for row, message in table:
        try:
            failed.append((row, f"accepted: {read(row)}"))
        except ValueError as exc:
            if not re.search(r"^f\.jsonl:7.*" + message, str(exc)):
                failed.append((row, str(exc)))
    return failed


def test_verl_rows() -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2?", "name": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
        "agent_name": "single_turn_agent",
        "answer": "not this one",
    }
    got = task(row)
    assert got.messages == USER and got.data_source == "openai/gsm8k" and got.ground_truth == "4"
    assert got.extra_info == {"index": 0} and got.tools == ()
    empty = {"tools_kwargs": {"search": None}, "interaction_kwargs": {}}  # as Arrow fills what other rows have
    assert task({**row, **empty, "extra_info": {**empty, "need_tools_kwargs": False}}).messages == USER
    assert task({"prompt": "2+2?"}).messages == USER
    assert task({"q": "2+2?", "answer": "4"}, prompt_key="q").ground_truth == "4"


def test_trl_rows() -> None:
    for column in ("ground_truth", "answer", "solution"):
        got = task({"prompt": list(USER), "completion": "irrelevant", column: "4"})
        assert got.messages == USER and got.ground_truth == "4" and got.data_source == "", column


def test_gsm8k_as_published() -> None:
    rows = rows_of(GSM8K)
    got = [task(r) for r in rows]
    assert len(got) == 300 and got[0].ground_truth == "72" and got[0].data_source == "openai/gsm8k"
    assert got[0].messages == ({"role": "user", "content": f"{rows[0]['question']} {GSM8K_INSTRUCTION}"},)
    assert got[0].extra_info == {"question": rows[0]["question"], "answer": rows[0]["answer"]}
    assert all(float(g.ground_truth) == float(r["answer"].split("####")[1].replace(",", "")) for g, r in zip(got, rows))
    assert task({"question": "q", "answer": "x\n#### -1,234.5"}).ground_truth == "-1234.5"


def test_system_prompt_goes_where_there_is_none() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert task({"prompt": "2+2?"}, system_prompt="Be brief.").messages == (system, *USER)
    assert task({"prompt": [system, *USER]}, system_prompt="Other").messages == (system, *USER)


def test_tools_column() -> None:
    schema = {"type": "function", "function": {"name": "add"}}
    assert task({"prompt": "x", "tools": [schema]}, tools_key="tools").tools == (schema,)
    assert task({"prompt": "x", "tools": json.dumps([schema])}, tools_key="tools").tools == (schema,)
    for nothing in ("", None, [], "[]", "null"):
        assert task({"prompt": "x", "tools": nothing}, tools_key="tools").tools == ()
        assert task({"prompt": "x", "tools": nothing}).tools == ()


def test_a_rows_tools_are_played_by_those_of_the_run_or_refused() -> None:
    add, sub = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub"))
    run = Players("single_turn", ("single_turn", "tool_agent", "own.py:Loop"), (add, sub))
    for tools in ([add], ["add"], json.dumps([add]), [{"name": "add"}], [json.dumps(add)]):
        got = task_row(RawRow("f.jsonl:7", {"prompt": "x", "tools": tools}), DataConfig(), run)
        assert (got.agent, got.tools) == ("tool_agent", (add,)), tools
    own = task_row(RawRow("f.jsonl:7", {"prompt": "x", "tools": [add], "agent_name": "own.py:Loop"}), DataConfig(), run)
    assert (own.agent, own.tools) == ("own.py:Loop", ())
    other = {"type": "function", "function": {"name": "w", "parameters": {}}}
    fix = r"tools w \(column 'tools'\) are not there: agent.tools has none.*agent\.tools=.*data\.tools_key=tools"
    assert not refused(
        task, [({"prompt": "x", "tools": tools}, fix) for tools in ([other], ["w"], json.dumps([other]))]
    )
    of_run = lambda row: task_row(RawRow("f.jsonl:7", row), DataConfig(), run)  # noqa: E731
    rows = [
        ({"prompt": "x", "tools": [add, other]}, "tools w .*agent.tools has add, sub"),
        ({"prompt": "x"}, "accepted"),
    ]
    rows += [({"prompt": "x", "tools": [add], "agent_name": "single_turn"}, "'single_turn' plays no tool")]
    assert refused(of_run, rows) == [({"prompt": "x"}, mock.ANY)]


def test_the_tools_of_a_preference_row_are_shown() -> None:
    schema = {"type": "function", "function": {"name": "add"}}
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "completion": "4", "label": True}
    for tools in ([schema], json.dumps([schema])):
        assert pair({**row, "tools": tools}).tools == unpaired({**row, "tools": tools}).tools == (schema,)
    assert pair(row).tools == ()


WRONG_TASK_ROWS = [
    ({"problem": "x"}, r"no prompt: column 'prompt' is missing or null \(columns: problem\).*data\.prompt_key"),
    ({"prompt": None, "a": 1}, "missing or null"),
    ({"prompt": 5}, "'prompt' must be text or a list of {role, content} messages, got a int"),
    ({"prompt": []}, "an empty list"),
    ({"prompt": " "}, "'prompt' is empty text"),
    ({"prompt": ["hi"]}, "'prompt' message 1 must be an object with role and content, got text"),
    ({"prompt": [*USER, {"content": "x"}]}, "message 2 has no 'role'"),
    ({"prompt": [{"role": "user", "content": None}]}, r"message 1 \(user\) has no text: 'content' is null"),
    ({"prompt": [{"role": "user", "content": 3}]}, "'content' is a int"),
    ({"prompt": "a\ud83d"}, "half of a surrogate pair at character 2"),
    ({"prompt": "x", "data_source": 3}, "'data_source' must be a string"),
    ({"prompt": "x", "reward_model": "rule"}, "'reward_model' must be an object, got text"),
    ({"prompt": "x", "extra_info": []}, "'extra_info' must be an object, got a list"),
    ({"question": "q", "answer": "42"}, r"no '#### NUMBER'.*data\.prompt_key=question"),
    ({"question": "q", "answer": 42}, "'answer' must be a string"),
    ({"prompt": [*USER, {"role": "assistant", "content": "It is"}]}, "ends with an assistant turn, 'It is'.*Fix"),
    ({"prompt": "x", "chosen": "a", "rejected": "b"}, "a preference row.*`verl dpo`"),
    ({"prompt": "x", "agent_name": "tool_agent"}, "agent_name='tool_agent', and this run has single_turn"),
    ({"prompt": "x", "tools_kwargs": {"search": {"k": 1}}}, "'tools_kwargs' names search"),
    ({"prompt": "x", "extra_info": {"tools_kwargs": {"calc": {"a": 1}}}}, "'tools_kwargs' names calc"),
    ({"prompt": "x", "extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}, "'interaction_kwargs' names name"),
]


def test_wrong_task_rows() -> None:
    assert not refused(task, WRONG_TASK_ROWS)


def test_wrong_tools() -> None:
    for tools, message in (
        ("[{", "is text but not JSON"),
        (["{"], "is text but not JSON"),
        (["add"], "must be a list of tool schemas"),
    ):
        with pytest.raises(ValueError, match=message):
            task({"prompt": "x", "tools": tools}, tools_key="tools")


# ---- SFT rows --------------------------------------------------------------------------------------------------------

PAIR = (*USER, {"role": "assistant", "content": "4"})


def conversation(row: dict[str, Any], **options: Any) -> Any:
    return conversation_row(RawRow("f.jsonl:7", row), DataConfig(**options))


def test_sft_rows() -> None:
    assert conversation({"messages": list(PAIR)}).messages == PAIR
    assert conversation({"chat": list(PAIR)}, messages_key="chat").messages == PAIR
    for row in (
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": "2+2?", "response": "4"},
        {"prompt": list(USER), "completion": [PAIR[1]]},
    ):
        got = conversation(row)
        assert got.messages == PAIR and got.train_from == 1
    asked = {"role": "user", "content": "more"}
    got = conversation({"prompt": [*PAIR, asked], "completion": "5"}, system_prompt="S")
    assert got.train_from == 4 and got.messages[4] == {"role": "assistant", "content": "5"}
    got = conversation({"question": "q", "answer": "x\n#### 4"})
    assert got.messages[0]["content"] == f"q {GSM8K_INSTRUCTION}" and got.messages[1]["content"] == "x\n#### 4"
    assert conversation({"question": "q", "answer": "4"}).messages[0]["content"] == "q"


def test_sft_tools_thinking_and_null_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    got = conversation({"messages": [*USER, call], "tools": '[{"type": "function"}]', "enable_thinking": False})
    assert (
        got.messages[1]["content"] == ""
        and got.tools == ({"type": "function"},)
        and got.template_kwargs == {"enable_thinking": False}
    )


WRONG_SFT_ROWS = [
    ({"text": "x"}, r"no conversation: needs 'messages', or 'prompt' with one of .*columns: text"),
    ({"prompt": "x"}, "no conversation"),
    ({"messages": [{"role": "assistant", "content": None}]}, "has no text"),
    ({"messages": list(PAIR), "enable_thinking": "yes"}, "'enable_thinking' must be true or false, got text"),
]


SHAREGPT = {
    "system": "S",
    "conversations": [
        {"from": "human", "value": "Q"},
        {"from": "gpt", "value": "A"},
        {"from": "human", "value": "R"},
        {"from": "gpt", "value": "7"},
    ],
}
ALPACA = {"instruction": "R", "input": "", "output": "7", "system": "S", "history": [["Q", "A"]]}
TALK = [("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "7")]


def test_sharegpt_and_alpaca() -> None:
    said = lambda messages: [(m["role"], m["content"]) for m in messages]  # noqa: E731
    for row, train_from in ((SHAREGPT, 0), (ALPACA, 4)):
        made = conversation_row(RawRow("f:1", row), DataConfig())
        assert said(made.messages) == TALK and made.train_from == train_from
        task = task_row(RawRow("f:1", row), DataConfig())
        assert said(task.messages) == TALK[:-1] and task.ground_truth == "7"
    plain = task_row(RawRow("f:1", {"instruction": "Add.", "input": "3+4", "output": "7"}), DataConfig())
    assert said(plain.messages) == [("user", "Add.\n\n3+4")] and plain.ground_truth == "7"
    wrong = [
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt"}]}, "no text"),
        ({"conversations": [{"from": "human", "value": "Q"}, {"value": "A"}]}, "no 'role'"),
        ({"instruction": "Q", "output": "A", "history": ["Q"]}, "pairs"),
        ({"instruction": "Q", "output": None}, "no conversation"),
    ]
    for row, says in wrong:
        with pytest.raises(ValueError, match=says):
            conversation_row(RawRow("f:1", row), DataConfig())


def test_wrong_sft_rows() -> None:
    assert not refused(conversation, WRONG_SFT_ROWS)


# ---- preference rows -------------------------------------------------------------------------------------------------

GOOD, BAD = [{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]


def pair(row: dict[str, Any], **options: Any) -> Any:
    return pair_row(RawRow("f.jsonl:7", row), DataConfig(**options))


def unpaired(row: dict[str, Any]) -> Any:
    return unpaired_rows(RawRow("f.jsonl:7", row), DataConfig())[0]


def test_preference_rows_in_every_shape_are_the_same() -> None:
    hh = "\n\nHuman: 2+2?\n\nAssistant: "
    for row in (
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": list(USER), "chosen": GOOD, "rejected": BAD},
        {"prompt": list(USER), "chosen": [*USER, *GOOD], "rejected": [*USER, *BAD]},
        {"chosen": [*USER, *GOOD], "rejected": [*USER, *BAD]},
        {"chosen": hh + "4", "rejected": hh + "5"},
    ):
        got = pair(row)
        assert (got.prompt, got.chosen, got.rejected, got.gap) == (USER, tuple(GOOD), tuple(BAD), None), row
    assert pair({"prompt": "x", "chosen": "4", "rejected": "5"}, system_prompt="S").prompt[0]["role"] == "system"
    for more, gap in (
        ({"margin": 2}, 2.0),
        ({"chosen_score": 3, "rejected_score": 1.5}, 1.5),
        ({"margin": None}, None),
    ):
        assert pair({"prompt": "x", "chosen": "4", "rejected": "5", **more}).gap == gap
    got = unpaired({"prompt": "2+2?", "completion": "4", "label": False})
    assert (got.prompt, got.chosen, got.rejected, got.desirable) == (USER, tuple(GOOD), None, False)


def test_preference_rows_of_sharegpt_and_alpaca() -> None:
    turn = lambda who, text: {"from": who, "value": text}  # noqa: E731
    said = lambda messages: [(m["role"], m["content"]) for m in messages]  # noqa: E731
    *asked, _ = SHAREGPT["conversations"]
    share = {"system": "S", "conversations": asked}
    alpaca = {"instruction": "R", "input": "", "system": "S", "history": [["Q", "A"]]}
    gpt = {"chosen": turn("gpt", "7"), "rejected": turn("gpt", "8")}
    lists = {"chosen": [turn("gpt", "7")], "rejected": [turn("gpt", "8")]}
    whole = {"chosen": [*asked, turn("gpt", "7")], "rejected": [*asked, turn("gpt", "8")]}
    texts = {"chosen": "7", "rejected": "8"}
    every = [({**shape, **answers}, TALK[:-1]) for shape in (share, alpaca) for answers in (gpt, lists, texts)]
    every += [({**alpaca, "output": ["7", "8"]}, TALK[:-1]), ({"conversations": asked, **whole}, TALK[1:-1])]
    every += [({**share, "output": None, "instruction": None, **gpt}, TALK[:-1])]  # Arrow's nulls
    every += [({"prompt": "R", "output": ["7", "8"]}, [("user", "R")])]
    every += [({"system": "S", "question": "R", **texts}, [("system", "S"), ("user", "R")])]
    every += [({"prompt": "R", "conversations": SHAREGPT["conversations"], **gpt}, [("user", "R")])]
    every += [({"instruction": "Add.", "input": "3+4", **texts}, [("user", "Add.\n\n3+4")])]
    for row, prompt in every:
        got = pair(row)
        found = (said(got.prompt), said(got.chosen), said(got.rejected))
        assert found == (prompt, [("assistant", "7")], [("assistant", "8")]), (row, found)
    for row in ({**SHAREGPT, "kto_tag": True}, {**ALPACA, "kto_tag": True, "label": None}, {**ALPACA, "label": True}):
        got = unpaired(row)
        assert (said(got.prompt), said(got.chosen), got.desirable) == (TALK[:-1], TALK[-1:], True), row


def test_preference_rows_that_cannot_be_told_apart_are_refused() -> None:
    texts, asked = {"chosen": "7", "rejected": "8"}, SHAREGPT["conversations"][:1]
    said = {"role": "assistant", "content": "A"}
    assert not refused(
        pair,
        [
            ({"conversations": asked, "instruction": "R", **texts}, "'conversations' and 'instruction' both hold a"),
            ({"instruction": "R", "output": ["7", "8"], **texts}, "'output' holds a pair, and so do 'chosen' and"),
            ({"instruction": "R", "output": ["7", "8", "9"]}, r"'output' has 3 answers.*\[better, worse\]"),
            ({"instruction": "R", "output": "7"}, "no 'chosen' beside 'rejected'"),
            ({**SHAREGPT, **texts}, "the prompt ends with an assistant turn, and so does the answer begin"),
            (
                {"prompt": [*USER, said], **texts},
                "the prompt ends with an assistant turn, and so does the answer begin",
            ),
            ({"conversations": asked, **texts, "rejected": {"from": "human", "value": "8"}}, "a message of 'user'"),
        ],
    )
    preference = "a preference row.*`verl dpo` or `verl rm`"
    assert not refused(task, [({"instruction": "R", "output": ["7", "8"]}, preference)])
    earlier = SHAREGPT["conversations"][:3]  # its first answer would be learned and the one that was judged not
    rows = [({"instruction": "R", "output": ["7", "8"]}, preference), ({"conversations": earlier, **texts}, preference)]
    assert not refused(conversation, rows)
    assert conversation({**SHAREGPT, **texts}).messages[-1]["content"] == "7", "a whole conversation beside a pair"


def test_wrong_preference_rows() -> None:
    whole = {"prompt": "x", "chosen": "4", "rejected": "5"}
    assert not refused(
        pair,
        [
            (
                {"prompt": "x", "chosen": "4"},
                r"no 'rejected' beside 'chosen'.*columns: chosen, prompt.*preference\.loss=kto",
            ),
            ({**whole, "prompt": None}, "no 'prompt', and 'chosen' and 'rejected' do not begin with the same messages"),
            ({**whole, "rejected": list(USER)}, "'rejected' ends with a message of 'user'"),
            ({**whole, "margin": "2"}, "'margin' must be a number, got text"),
        ],
    )
    assert not refused(
        unpaired,
        [
            ({"prompt": "x", "completion": "4"}, "'label' must be true .desirable. or false, got null"),
            ({"completion": "4", "label": True}, "no 'prompt': an unpaired row has prompt, completion and label"),
        ],
    )


def test_an_alpaca_rows_own_columns_stay() -> None:
    """`instruction` may stand beside other names of the answer, or of the question."""
    assert task({"instruction": "2+2?", "solution": "4"}).ground_truth == "4"
    assert task({"instruction": "2+2?", "output": "5"}).ground_truth == "5"
    asked = task({"instruction": "Think.", "question": "2+2?", "answer": "so #### 4"})
    assert "2+2?" in asked.messages[-1]["content"] and asked.ground_truth == "4"
    with pytest.raises(ValueError, match="'tools_kwargs' must be an object, got"):
        task({"prompt": "2+2?", "tools_kwargs": "{}"})
