"""BM25 from files against the formula on every passage."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from each import each

from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.tools import Toolbox, contents_of
from verl.chat.parsing import ToolCall
from verl.tools.bm25 import K1, B, PassageIndex, build, main, words


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"contents": text}) + "\n" for text in texts))
    return path


def scored(texts: list[str], query: str) -> list[float]:
    """Every passage, by the formula."""
    said = [Counter(words(text)) for text in texts]
    mean = sum(c.total() for c in said) / len(said)
    total = [0.0] * len(texts)
    for word in set(words(query)):
        df = sum(word in c for c in said)
        idf = math.log1p((len(texts) - df + 0.5) / (df + 0.5))
        for k, c in enumerate(said):
            total[k] += idf * c[word] / (c[word] + K1 * (1 - B + B * c.total() / mean)) if df else 0.0
    return total


@each("seed", range(6))
def test_the_best_are_those_of_scoring_every_passage(tmp_path, seed):
    """Words as often as in texts, queries of rare and of frequent ones, and of none that is there."""
    rng = random.Random(seed)
    vocabulary = [f"w{k}" for k in range(60)]
    chances = [1 / (k + 1) for k in range(60)]
    texts = [" ".join(rng.choices(vocabulary, chances, k=rng.randint(1, 30))) for _ in range(rng.choice([1, 7, 300]))]
    assert build(write(tmp_path / "c.jsonl", texts), tmp_path / "index") == len(texts)
    index = PassageIndex(tmp_path / "index")
    queries = [" ".join(rng.choices([*vocabulary, "absent"], k=rng.randint(1, 8))) for _ in range(60)]
    for query in [*queries, "w0", "w0 w1 w2", "absent", "", "?!"]:
        for topk in (1, 3, 500):
            found, every = index.search(query, topk), scored(texts, query)
            wanted = sorted((k for k, score in enumerate(every) if score > 0), key=lambda k: -every[k])[:topk]
            assert [s for _, s in found] == pytest.approx([every[k] for k in wanted], rel=1e-5), query
            assert [every[k] for k, _ in found] == pytest.approx([every[k] for k in wanted], rel=1e-5), query
            assert len({k for k, _ in found}) == len(found)


def test_passages_are_read_as_they_stand_and_other_lines_are_refused(tmp_path):
    texts = ["Zürich\nliegt am See", "東京 は 都", "kea\n" + "parrot " * 40]
    build(write(tmp_path / "c.jsonl", texts), tmp_path / "index")
    index = PassageIndex(tmp_path / "index")
    assert [index.passage(k) for k in range(3)] == texts
    assert [index.search(q, 1)[0][0] for q in ("ZÜRICH see", "東京", "a parrot")] == [0, 1, 2]
    (tmp_path / "t.jsonl").write_text('{"title": "A", "text": "b"}\n')
    build(tmp_path / "t.jsonl", tmp_path / "titled")
    assert PassageIndex(tmp_path / "titled").passage(0) == "A\nb"
    for line in ("{}", "[1]", "no json", '{"title": "A"}'):
        (tmp_path / "bad.jsonl").write_text(f'{{"contents": "a"}}\n{line}\n')
        with pytest.raises(ValueError, match=r"bad.jsonl:2: no passage"):
            build(tmp_path / "bad.jsonl", tmp_path / "bad")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no passage with a word"):
        build(tmp_path / "empty.jsonl", tmp_path / "empty")


def test_an_index_that_is_not_there_or_of_another_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no index: .* Fix: python -m verl.tools.bm25"):
        PassageIndex(tmp_path / "none")
    corpus = write(tmp_path / "c.jsonl", ["one", "two"])
    build(corpus, tmp_path / "index")
    write(corpus, ["one", "two", "three"])
    with pytest.raises(ValueError, match="has changed since"):
        PassageIndex(tmp_path / "index")


def test_the_search_tool_reads_an_index(tmp_path, capsys):
    corpus = write(tmp_path / "c.jsonl", ["Kea\nA parrot of the mountains.", "Quokka\nSmall, and friendly."])
    assert main([str(corpus), str(tmp_path / "index")]) == 0 and "2 passages" in capsys.readouterr().out
    assert main([]) == 2
    row = (
        f"- class_name: verl.tools.search_tool.SearchTool\n  config: {{type: native, index: {tmp_path}/index, topk: 1}}"
    )
    (tmp_path / "t.yaml").write_text(f"tools:\n{row}\n")
    tools = load_tools([str(tmp_path / "t.yaml")])

    async def ask(*queries: str) -> str:
        return (await Toolbox(tools, {}, 5).call(ToolCall("search", {"query_list": list(queries)}))).text

    found = asyncio.run(ask("which parrot?", "friendly", "zebra"))
    assert found == (
        "Doc 1 (Title: Kea)\nA parrot of the mountains.\n---\n"
        "Doc 1 (Title: Quokka)\nSmall, and friendly.\n---\n(nothing found)"
    )
    was = contents_of(tools)
    assert list(was) == ["agent.tools (search)"] and len(was["agent.tools (search)"]) == 64
    main([str(write(corpus, ["Kea\nA parrot of the mountainS.", "Quokka\nSmall, and friendly."])), f"{tmp_path}/index"])
    assert contents_of(load_tools([str(tmp_path / "t.yaml")])) != was, "of the same length, but of other words"
    (tmp_path / "t.yaml").write_text(f"tools:\n{row[:-1]}, retrieval_service_url: 'http://x'}}\n")
    with pytest.raises(ValueError, match="give one of them"):
        load_tools([str(tmp_path / "t.yaml")])
