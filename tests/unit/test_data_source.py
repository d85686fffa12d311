"""Tables: rendering, filters, truncation, ids, the cache, worker processes, SFT rows."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.chat.template import render_prompt
from verl.config.schema import DataConfig
from verl.data import source
from verl.data.files import RawRow
from verl.data.formats import FEEDBACK, ONE_ANSWER, Players
from verl.data.parallel import run_chunks
from verl.data.preference import load_pairs
from verl.data.render import ConversationJob, kept_positions
from verl.data.source import load_conversations, load_tasks
from verl.data.values import content_hash

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_train.jsonl"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    def make(**changes: Any) -> DataConfig:
        return DataConfig(**{"cache_dir": str(tmp_path / "cache"), "num_workers": 0, **changes})

    return make


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def prompts(path: Path, *contents: str) -> str:
    return write(path, [{"prompt": c, "ground_truth": str(k)} for k, c in enumerate(contents)])


def test_gsm8k_becomes_tasks(tokenizer: Any, config: Any) -> None:
    table = load_tasks([str(GSM8K)], tokenizer, config())
    assert len(table) == table.report.rows_kept == 300 and not table.report.from_cache
    task = table[7]
    assert task.index == 7 and task.prompt_ids.dtype == np.int64 and task.tools == task.images == ()
    assert np.array_equal(task.prompt_ids, render_prompt(tokenizer, task.messages, template_kwargs={}))
    line = json.loads(GSM8K.read_text().splitlines()[7])
    assert task.row == line and task.data_source == "openai/gsm8k" and line["answer"].endswith(task.ground_truth)
    assert len({t.task_id for t in table}) == 300
    assert task.task_id == "dd3bd88d347a-7", "must never change, or a resumed run would not know its tasks"
    assert table.report.summary().startswith("300 of 300 rows; ")
    with pytest.raises(IndexError):
        table[300]


def test_ids_are_stable_under_filters_and_duplicates_differ(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    file = prompts(tmp_path / "a.jsonl", "x" * 50, "short", "short")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], lines[1], lines[1]]))
    every, few = (load_tasks([file], tokenizer, config(max_prompt_tokens=n)) for n in (100, 20))
    assert [t.task_id for t in few] == [t.task_id for t in every][1:]
    first, second = (t.task_id.split("-") for t in few)
    assert first[0] == second[0] and (first[1], second[1]) == ("1", "2")
    assert [t.index for t in few] == [0, 1], "index is the row of the table, as the cursor draws it"


def test_filter_truncate_or_refuse(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    file = prompts(tmp_path / "a.jsonl", "ab", "abcdefgh")  # 5 and 11 tokens
    table = load_tasks([file], tokenizer, config(max_prompt_tokens=8))
    assert (len(table), table.report.rows_filtered) == (1, 1)
    assert "1 of 2 rows, 1 filtered as too long" in table.report.summary()
    whole = load_tasks([file], tokenizer, config())[1].prompt_ids
    for how, kept in (("left", whole[-8:]), ("right", whole[:8]), ("middle", np.r_[whole[:4], whole[-4:]])):
        table = load_tasks(
            [file], tokenizer, config(max_prompt_tokens=8, filter_overlong_prompts=False, truncation=how)
        )
        assert np.array_equal(table[1].prompt_ids, kept) and table.report.rows_truncated == 1
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the prompt has 11 tokens, data\.max_prompt_tokens is 8"):
        load_tasks([file], tokenizer, config(max_prompt_tokens=8, filter_overlong_prompts=False))
    assert kept_positions(9, 3, "middle").tolist() == [0, 7, 8]


def test_no_row_left_says_why(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    file = prompts(tmp_path / "a.jsonl", "ab", "abcdefgh")
    for _ in range(2):  # built, then from the cache
        with pytest.raises(ValueError, match=r"no rows left of 2 in .*a\.jsonl: 2 prompts .*=4 \(the shortest has 5"):
            load_tasks([file], tokenizer, config(max_prompt_tokens=4))
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"no rows in .*b\.jsonl"):
        load_tasks([str(tmp_path / "b.jsonl")], tokenizer, config())


def test_options_of_a_load(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    file = prompts(tmp_path / "a.jsonl", "ab", "cd", "ef")
    assert [t.ground_truth for t in load_tasks([file, file], tokenizer, config(), max_rows=4)] == ["0", "1", "2", "0"]
    task = load_tasks([file], tokenizer, config(system_prompt="S"))[0]
    assert tokenizer.decode(task.prompt_ids) == "<|system|>S<|end|><|user|>ab<|end|><|assistant|>"
    other = write(tmp_path / "b.jsonl", [{"q": "zz", "prompt": "no"}])
    assert load_tasks([other], tokenizer, config(prompt_key="q"))[0].messages[0]["content"] == "zz"
    tools = write(tmp_path / "c.jsonl", [{"prompt": "ab", "tools": [{"type": "function", "function": {"name": "f"}}]}])
    with pytest.raises(ValueError, match=r"c\.jsonl:1: the prompt has tools, which this chat template does not show"):
        load_tasks([tools], tokenizer, config(tools_key="tools"))


def test_template_errors_name_the_row(
    tokenizer: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = "{% if messages[0].content == 'hi' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    monkeypatch.setattr(tokenizer, "chat_template", refuses)
    file = write(tmp_path / "a.jsonl", [{"prompt": "ok"}, {"prompt": "hi"}])
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the chat template refuses messages with roles \[user\]"):
        load_tasks([file], tokenizer, config())


def test_media_are_refused_because_prompts_are_text(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    part = {"role": "user", "content": [{"type": "image"}]}
    for row, message in (
        (
            {"prompt": "<image>", "images": ["a.png"]},
            r"'images' holds 1 item\(s\), and prompts are rendered as text only",
        ),
        ({"prompt": [part]}, r"a message of 'user' has a content part of type 'image', and .* as text only"),
        (
            {"prompt": "x", "completion": "y", "videos": [{}, {}]},
            r"'videos' holds 2 item\(s\).* Fix: a text-only data set",
        ),
    ):
        file = write(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y"}, row])
        for load in (load_tasks, load_conversations):
            with pytest.raises(ValueError, match=r"a\.jsonl:2: (no conversation|" + message + ")"):
                load([file], tokenizer, config())


def test_rows_survive_storage_exactly(tokenizer: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"b": b"\x00\xff", "n": 10**40, "x": float("inf"), "s": "é\ud83d", "l": [None, True, {"k": b""}], "": {}}
    row |= {"prompt": [{"role": "user", "content": "hi", "name": None}], "answer": ["4", 4]}
    monkeypatch.setattr(source, "read_rows", lambda file: iter([RawRow("f:1", row)]))
    built, cached = (load_tasks([str(GSM8K)], tokenizer, config()) for _ in range(2))
    assert cached.report.from_cache and cached.key == built.key
    for task in (built[0], cached[0]):
        assert task.row == row and list(task.row) == list(row) and task.ground_truth == ["4", 4]
        assert task.messages == ({"role": "user", "content": "hi"},) and task.extra_info == {}
    assert content_hash(row, 6) == content_hash(dict(reversed(row.items())), 6) != content_hash({**row, "n": 1}, 6)


def test_tools_of_a_row_come_with_its_task(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + TEMPLATE
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [{"prompt": "x", "tools": [tool]}, {"prompt": "x", "tools": json.dumps([tool])}]
    file = write(tmp_path / "a.jsonl", [*rows, {"prompt": "x"}])
    built, cached = (load_tasks([file], other, config(tools_key="tools")) for _ in range(2))
    assert cached.report.from_cache and cached.key == built.key
    for table in (built, cached):
        assert [task.tools for task in table] == [(tool,), (tool,), ()]
        assert len(table[0].prompt_ids) > len(table[2].prompt_ids)
    assert [task.media for task in built] == [task.media for task in cached]


def test_the_first_row_that_asks_for_a_judge_is_known_also_from_the_cache(
    tokenizer: Any, config: Any, tmp_path: Path
) -> None:
    styles = ["rule", "model", "rule", "model"]
    rows = [{"prompt": "x" * (1 + n), "reward_model": {"style": style}} for n, style in enumerate(styles)]
    judged = write(tmp_path / "judged.jsonl", rows)
    ruled = write(tmp_path / "ruled.jsonl", rows[:1])
    for again in (False, True):
        table = load_tasks([ruled, judged], tokenizer, config())
        assert table.report.judged == f"{judged}:2" and table.report.from_cache == again
        assert load_tasks([ruled], tokenizer, config()).report.judged == ""


# ---- cache -----------------------------------------------------------------------------------------------------------


def test_truths_are_counted_by_their_source_and_those_that_are_not_read_are_named(
    tokenizer: Any, config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "hi", "data_source": "a", "answer": "4"},
        {"prompt": "hi", "data_source": "a", "label": ["4", "5"]},
    ]
    rows += [{"prompt": "hi", "data_source": "b"}, {"prompt": "hi", "data_source": "a", "answer": "4", "label": "7"}]
    file = write(tmp_path / "a.jsonl", rows)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        report = load_tasks([file], tokenizer, config()).report
        assert report.truths == {
            "a": {"text": [2, f"{file}:1"], "a list of 2": [1, f"{file}:2"]},
            "b": {"nothing": [1, f"{file}:3"]},
        }
        assert [r.message for r in caplog.records if "'label'" in r.message] == [
            f"data: column 'label' is not read: the ground truth is another (first {file}:4)"
        ]
    assert not load_tasks([str(GSM8K)], tokenizer, config()).report.unread
    played = Players("own", ("own", "tool_agent"), rewarded=True)
    own = load_tasks([file], tokenizer, config(), players=played)
    agent = write(tmp_path / "b.jsonl", [{**row, "agent_name": "tool_agent"} for row in rows])
    assert own.report.truths == load_tasks([agent], tokenizer, config(), players=played).report.truths == {}


def test_a_second_load_is_the_first_from_the_cache(
    tokenizer: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prompts(tmp_path / "a.jsonl", "ab", "cd", "x" * 90)
    built = load_tasks([file], tokenizer, config(max_prompt_tokens=20))
    renamed = prompts(tmp_path / "renamed.jsonl", "ab", "cd", "x" * 90)
    with monkeypatch.context() as m:
        m.setattr(source, "read_rows", lambda f: pytest.fail("rows were read again"))
        cached = load_tasks([renamed], tokenizer, config(max_prompt_tokens=20))
    assert cached.report.from_cache and cached.report.rows_filtered == 1 and cached.key == built.key
    for a, b in zip(built, cached, strict=True):
        assert a.task_id == b.task_id and a.row == b.row and np.array_equal(a.prompt_ids, b.prompt_ids)
        b.prompt_ids[0] = 0  # a copy: the cache file is mapped read-only
    assert list((tmp_path / "cache").glob("*.tmp")) == []


def test_whatever_changes_the_result_changes_the_key(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    file = prompts(tmp_path / "a.jsonl", "ab", "cd")
    keys = [load_tasks([file], tokenizer, config()).key]
    for changes in ({"max_prompt_tokens": 20}, {"system_prompt": "S"}, {"filter_overlong_prompts": False}):
        keys.append(load_tasks([file], tokenizer, config(**changes)).key)
    keys.append(load_tasks([file], tokenizer, config(), max_rows=1).key)
    keys.append(load_tasks([file], tokenizer, config(), template_kwargs={"x": 1}).key)
    for change in ("template", "vocabulary"):
        other = copy.deepcopy(tokenizer)
        if change == "template":
            other.chat_template = TEMPLATE.replace("'<|end|>'", "'<|end|>' + '.'")
        else:
            other.add_tokens(["ab"])
        keys.append(load_tasks([file], other, config()).key)
    prompts(tmp_path / "a.jsonl", "ab", "ce")
    keys.append(load_tasks([file], tokenizer, config()).key)
    assert len(set(keys)) == len(keys)
    prompts(tmp_path / "a.jsonl", "ab", "cd")
    assert load_tasks([file], tokenizer, config()).key == keys[0]


# ---- worker processes ------------------------------------------------------------------------------------------------


def test_workers_and_this_process_make_the_same_table(
    tokenizer: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source, "IN_PROCESS_ROWS", 50)
    monkeypatch.setattr(source, "CHUNK_ROWS", 40)
    with caplog.at_level(logging.INFO, logger="verl.data.source"):
        many = load_tasks([str(GSM8K)], tokenizer, config(num_workers=2, max_prompt_tokens=400))
    here = load_tasks([str(GSM8K)], tokenizer, config(cache_dir=str(tmp_path / "b"), max_prompt_tokens=400))
    assert 0 < many.report.rows_filtered == here.report.rows_filtered and not here.report.from_cache
    assert [(t.task_id, t.row, t.prompt_ids.tolist()) for t in many] == [
        (t.task_id, t.row, t.prompt_ids.tolist()) for t in here
    ]
    assert "filtered as too long" in caplog.text


class Slow:
    """Takes longer for early chunks, so that results arrive out of order."""

    def __call__(self, rows: Any, progress: Callable[[int], None]) -> list[int]:
        import time

        time.sleep(0.05 if rows[0] < 4 else 0)
        return [2 * r for r in rows]


def test_the_sft_job_travels_too(tokenizer: Any) -> None:
    import pickle

    job = ConversationJob(tokenizer, DataConfig(max_tokens_per_row=99), {})
    rows = [RawRow("f:1", {"prompt": "a", "completion": "b"})]
    (_, here), (_, there) = (j(rows, lambda done: None) for j in (job, pickle.loads(pickle.dumps(job))))
    assert here["mask"].sum() == 2 and all(np.array_equal(here[k], there[k]) for k in here)


@pytest.mark.slow
def test_results_come_in_order_and_a_consumer_may_stop_early() -> None:
    chunks = ([2 * k, 2 * k + 1] for k in range(20))
    assert [r for c in run_chunks(Slow(), chunks, num_workers=2, timeout_s=60) for r in c] == [2 * k for k in range(40)]
    results = run_chunks(Slow(), ([k] for k in range(1000)), num_workers=2, timeout_s=60)
    assert next(results) == [0]
    results.close()


# ---- SFT -------------------------------------------------------------------------------------------------------------


def test_conversations_with_masks(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    turns = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d"))
    ]
    file = write(
        tmp_path / "a.jsonl", [{"messages": turns}, {"messages": turns[:1]}, {"prompt": turns[:3], "completion": "e"}]
    )
    table = load_conversations([file], tokenizer, config())
    assert len(table) == 2
    texts = [tokenizer.decode(table[k].ids[table[k].mask]) for k in range(2)]
    assert texts == ["bb<|end|>d<|end|>", "e<|end|>"]
    assert [int(table[k].mask.sum()) for k in range(2)] == [5, 2]
    assert table.report.total_tokens == sum(len(table[k].ids) for k in range(2)) and table.report.rows_kept == 2
    assert table.report.refused == {"no assistant turn after a prompt": 1}
    assert table.report.example.startswith(f"{file}:2: no assistant turn")
    cached = load_conversations([file], tokenizer, config())
    assert (
        cached.report.from_cache and np.array_equal(cached[0].mask, table[0].mask) and cached[0].mask.dtype == np.bool_
    )


def test_long_conversations(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", [{"prompt": "abcd", "completion": "efgh"}, {"prompt": "a" * 20, "completion": "b"}]
    )
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the row has 12 tokens, data\.max_tokens_per_row is 9"):
        load_conversations([file], tokenizer, config(max_tokens_per_row=9))
    right = load_conversations([file], tokenizer, config(max_tokens_per_row=9, truncation="right"))
    assert tokenizer.decode(right[0].ids[right[0].mask]) == "ef" and len(right) == 1
    assert right.report.refused == {"no assistant token is left after truncation": 1}
    left = load_conversations([file], tokenizer, config(max_tokens_per_row=4, truncation="left"))
    assert tokenizer.decode(left[0].ids) == "fgh<|end|>" and left[0].mask.tolist() == [False, True, True, True]
    with pytest.raises(
        ValueError, match=r"no rows left of 2 in .*: 2 x no assistant token is left.*First: .*a\.jsonl:1"
    ):
        load_conversations([file], tokenizer, config(max_tokens_per_row=3, truncation="right"))
    with pytest.raises(ValueError, match=r"data\.truncation=middle"):
        load_conversations([file], tokenizer, config(truncation="middle"))


def test_enable_thinking_of_a_row_reaches_the_template(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = TEMPLATE.replace("{% for", "{{ 'T' if enable_thinking else 'N' }}{% for", 1)
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write(tmp_path / "a.jsonl", [{"messages": pair, "enable_thinking": t} for t in (True, False, None)])
    table = load_conversations([file], other, config(), template_kwargs={"enable_thinking": True})
    assert [tokenizer.decode(table[k].ids)[0] for k in range(3)] == ["T", "N", "T"]


def test_what_a_row_sets_for_the_template_is_used_or_refused(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ mood }}" + TEMPLATE
    pair = {"prompt": "x", "completion": "y", "chosen": "y", "rejected": "z"}
    files = [
        write(tmp_path / f"{k}.jsonl", [{**pair, **more}])
        for k, more in enumerate(({}, {"chat_template_kwargs": {"mood": "M"}}))
    ]
    for load in (
        lambda file: load_conversations([file], other, config())[0],
        lambda file: load_pairs([file], other, config())[0].chosen,
    ):
        plain, set_by_row = (other.decode(load(file).ids) for file in files)
        assert set_by_row == "M" + plain
    rows = [
        {"prompt": "x", "chat_template_kwargs": {"mood": "M", "other": None}},
        {"prompt": "x", "enable_thinking": False},
    ]
    for row, fix in zip(rows, ("model.template_kwargs.mood=M", "model.template_kwargs.enable_thinking=False")):
        with pytest.raises(ValueError, match=rf"a\.jsonl:1: the row sets .*{fix}"):
            load_tasks([write(tmp_path / "a.jsonl", [row])], other, config())
    load_tasks([write(tmp_path / "a.jsonl", rows[:1])], other, config(), template_kwargs={"mood": "M"})
    both = {
        "messages": [{"role": "user", "content": "x"}],
        "enable_thinking": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with pytest.raises(ValueError, match="contradict each other"):
        load_conversations([write(tmp_path / "a.jsonl", [both])], other, config())


def test_gsm8k_supervised(tokenizer: Any, config: Any) -> None:
    table = load_conversations([str(GSM8K)], tokenizer, config(max_tokens_per_row=4096))
    assert len(table) == 300
    tasks = load_tasks([str(GSM8K)], tokenizer, config(max_prompt_tokens=4096))
    row = table[5]
    assert np.array_equal(row.ids[~row.mask], tasks[5].prompt_ids), "SFT and RL see the same prompt"
    assert tokenizer.decode(row.ids[row.mask]) == tasks[5].row["answer"] + "<|end|>"


def test_what_a_teacher_reads_is_rendered_by_the_template(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "T"}, {"role": "user", "content": "all"}]
    rows = [
        {"prompt": "ab", "hint": "x1", "teacher": "math"},
        {"prompt": "cd", "extra_info": {"hint": "y"}, "data_source": "code"},
        {"prompt": "ef", "hint": turns, "data_source": "code", "teacher": "math"},
    ]
    file, players = write(tmp_path / "a.jsonl", rows), ONE_ANSWER._replace(teachers=("math", "code"), hint_key="hint")
    for _ in range(2):  # built, then from the cache
        table = load_tasks([file], tokenizer, config(), players=players)
        assert [t.teacher for t in table] == ["math", "code", "math"]
        contexts = [tokenizer.decode(t.context_ids) for t in table]
        assert contexts == [
            "<|user|>ab\n\nx1<|end|><|assistant|>",
            "<|user|>cd\n\ny<|end|><|assistant|>",
            "<|system|>T<|end|><|user|>all<|end|><|assistant|>",
        ]
        assert tokenizer.decode(table[0].prompt_ids) == "<|user|>ab<|end|><|assistant|>"
    of_attempts = load_tasks([file], tokenizer, config(), players=ONE_ANSWER._replace(hint_key=FEEDBACK))
    assert all(t.context_ids is None for t in of_attempts), "there is none yet"
    plain = load_tasks([file], tokenizer, config())
    assert all(t.context_ids is None and t.teacher == "" for t in plain), "nobody asked"


STORED = ONE_ANSWER._replace(answer_key="said", answer_tokens=6)


def test_a_stored_answer_stands_behind_its_prompt(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "zz"}]
    rows = [
        {"prompt": "ab", "said": "x1"},
        {"prompt": "cdefghij", "extra_info": {"said": "y"}},
        {"prompt": "ef", "said": turns},
        {"prompt": "g", "said": "too long for it"},
    ]
    file, cut = write(tmp_path / "a.jsonl", rows), {"max_prompt_tokens": 8, "truncation": "left"}
    table = load_tasks([file], tokenizer, config(), players=STORED)
    assert table.report.refused == {"a stored answer that is too long": 1} and len(table) == 3
    assert [tokenizer.decode(t.answer_ids) for t in table] == ["x1<|end|>", "y<|end|>", "zz<|end|>"]
    kept = load_tasks(
        [write(tmp_path / "b.jsonl", rows[:3])], tokenizer, config(filter_overlong_prompts=False, **cut), players=STORED
    )
    assert len(kept[1].prompt_ids) == 8 and tokenizer.decode(kept[1].answer_ids) == "y<|end|>"
    assert all(t.answer_ids is None for t in load_tasks([file], tokenizer, config())), "nobody asked"
    with pytest.raises(ValueError, match="1 x a stored answer that is too long"):
        load_tasks([write(tmp_path / "c.jsonl", rows[3:])], tokenizer, config(), players=STORED)


def test_a_row_without_a_stored_answer_is_refused(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    two = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    for said, wrong in (
        ({}, r"a\.jsonl:1: no 'said', the stored answer. Fix: fill the column, or drop the row"),
        ({"said": ""}, "no 'said'"),
        ({"said": two}, "'said' must be text or one message of the assistant"),
        ({"said": two[1:]}, "'said' must be text or one message of the assistant"),
        ({"said": "x" * 9}, r"the stored answer in 'said' has 10 tokens, rollout.max_response_tokens is 6. Fix: raise"),
    ):
        file = write(tmp_path / "a.jsonl", [{"prompt": "a", **said}])
        with pytest.raises(ValueError, match=wrong):
            load_tasks([file], tokenizer, config(filter_overlong_prompts=False), players=STORED)


def test_a_row_without_its_teacher_or_hint_is_refused(tokenizer: Any, config: Any, tmp_path: Path) -> None:
    taught = ONE_ANSWER._replace(teachers=("math",))
    hinted, said = ONE_ANSWER._replace(hint_key="hint"), ONE_ANSWER._replace(hint_key=FEEDBACK)
    for row, players, wrong in (
        ({"prompt": "a"}, taught, r"a\.jsonl:1: the row's teacher is None, and teacher.paths has math"),
        ({"prompt": "a", "teacher": "art"}, taught, r"the row's teacher is 'art'.*name one in the column 'teacher'"),
        ({"prompt": "a"}, hinted, r"a\.jsonl:1: no 'hint', which the teacher is to read"),
        ({"prompt": "a", "hint": ""}, hinted, "no 'hint'"),
        ({"prompt": "a", "hint": [{"content": "x"}]}, hinted, "'hint' message 1 has no 'role'"),
        ({"prompt": [{"role": "system", "content": "a"}]}, said, "does not end with a user's text"),
    ):
        file = write(tmp_path / "a.jsonl", [row])
        with pytest.raises(ValueError, match=wrong):
            load_tasks([file], tokenizer, config(), players=players)
    file = write(tmp_path / "b.jsonl", [{"prompt": "a", "hint": "h" * 40}, {"prompt": "b", "hint": "h"}])
    assert load_tasks([file], tokenizer, config(max_prompt_tokens=20), players=hinted).report.rows_filtered == 1
    with pytest.raises(ValueError, match=r"b\.jsonl:1: the prompt with 'hint' has 46 tokens"):
        kept = {"filter_overlong_prompts": False, "truncation": "right"}
        load_tasks([file], tokenizer, config(max_prompt_tokens=20, **kept), players=hinted)
