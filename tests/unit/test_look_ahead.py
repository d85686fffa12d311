"""A step that is launched before the tokens of the last one are read: every result is bitwise that of reading first."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import native_core
from transformers import Qwen3Config

from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import paged
from verl.rollout.native.architecture import shape_of
from verl.rollout.native.page_attention import gathered_paged
from verl.rollout.native.weights import Storage
from verl.types import Sampling

VOCAB, EOS, STOP = 23, 1, 2
CONFIG = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


@functools.cache
def source(version: int) -> Any:
    generator = torch.Generator().manual_seed(version)
    names = Storage(shape_of(CONFIG, 256), torch.float32, torch.float32, torch.device("cpu")).destinations
    tensors = {name: torch.randn(t.shape, generator=generator) * 0.2 for name, t in names.items() if "head" not in name}
    return SimpleNamespace(version=version, passes=False, seconds={}, tensors=tensors.items)


def core(look_ahead: bool, pages: bool, rows: int = 4, **options: Any) -> EngineCore:
    """Return an engine with rows that do not depend on each other. Two letters end an answer as a text."""
    layout = {"paged": pages, "compiled": not pages, "layout": "panels"}
    made = native_core(CONFIG, source(0), rows=rows, max_context_tokens=64, look_ahead=look_ahead, **layout, **options)
    text = lambda ids: "".join(chr(97 + i) for i in ids)  # noqa: E731
    return EngineCore(made.runner, (EOS,), text)


def requests(seed: int, count: int = 11) -> list[ActiveRequest]:
    """Answers that end by EOS, stop ids, stop strings, their limit, and the context; some with one token at most."""
    rng, made = np.random.default_rng(seed), []
    for i in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.choice((3, 17, 40, 61))))
        stop = {"stop_token_ids": (STOP,)} if i % 3 == 0 else {"stop": ("e", "fg")} if i % 3 == 1 else {}
        drawn = {"temperature": (1.0, 0.7, 0.0)[int(rng.integers(3))], "top_k": (0, 0, 5)[int(rng.integers(3))]}
        sampling = Sampling(max_tokens=int(rng.integers(1, 40)), seed=i, ignore_eos=i % 4 == 3, **stop, **drawn)
        made.append(ActiveRequest(GenerateRequest(str(i), prompt, sampling)))
    return made


def run(engine: EngineCore, *, until: int | None = None) -> dict[str, Completion]:
    """Run until this number of steps, or until the end."""
    steps = [0]

    def interrupted() -> bool:
        steps[0] += 1
        return steps[0] == until

    return {c.request_id: c for _, c in engine.run(lambda done, news: None, 1e9, interrupted)}


def assert_same(ours: dict[str, Completion], theirs: dict[str, Completion]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        other = ours[name]
        assert other.ids.tolist() == one.ids.tolist(), name
        assert (other.logprobs == one.logprobs).all() and other.spans == one.spans, name
        assert (other.stop_reason, other.stop, other.cached_tokens) == (one.stop_reason, one.stop, one.cached_tokens)


def row_by_row(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: Any, scale: float, window: int
) -> torch.Tensor:
    """Attention over pages with bits that do not depend on the other rows."""
    table, seen = pages
    rows = []
    for i, tokens in enumerate(seen.tolist()):
        own = table[i : i + 1, : -(-tokens // paged.PAGE)], seen[i : i + 1]
        rows.append(gathered_paged(q[i : i + 1], keys, values, own, scale, window))
    return torch.cat(rows)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 8)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2))
    monkeypatch.setattr(paged, "paged_kernel", lambda device, dtype: row_by_row)


@pytest.mark.parametrize("pages", [True, False])
def test_every_answer_is_that_of_reading_first(pages: bool) -> None:
    """More requests than rows, so that rows end, move and are admitted while a step is launched."""
    surplus, reasons = 0, set()
    for seed in range(6):
        first, ahead = (core(look_ahead, pages) for look_ahead in (False, True))
        for engine in (first, ahead):
            for request in requests(seed):
                engine.add(request)
        expected = run(first)
        assert_same(run(ahead), expected)
        counts, others = ahead.stats(), first.stats()
        assert counts["sampled_tokens"] == others["sampled_tokens"] and not others["surplus_tokens"]
        unforeseen = sum(c.stop_reason in ("eos", "stop") and len(c.ids) > 1 for c in expected.values())
        assert counts["surplus_tokens"] <= unforeseen  # one at most, and none for a limit
        surplus += counts["surplus_tokens"]
        reasons |= {c.stop_reason for c in expected.values()}
        if pages:
            cache = ahead.runner._paged.cache  # type: ignore[attr-defined]
            assert not cache._held.any() and sorted(cache._free) == list(range(1, cache._pages))
    assert surplus > 10 and reasons == {"eos", "stop", "length", "context_full"}


def test_a_step_is_launched_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, order = core(True, pages=True), []
    decode = engine.runner.decode

    def decoded(rows: Any) -> Any:
        read, number = decode(rows), sum(kind == "launch" for kind, _ in order)
        order.append(("launch", number))
        return lambda: (order.append(("read", number)), read())[1]

    monkeypatch.setattr(engine.runner, "decode", decoded)
    engine.add(ActiveRequest(GenerateRequest("0", np.arange(3, 8), Sampling(max_tokens=4, ignore_eos=True))))
    run(engine)
    # the first token is sampled with the prompt; nothing is launched beyond the limit
    assert order == [("launch", 0), ("launch", 1), ("read", 0), ("launch", 2), ("read", 1), ("read", 2)]


def test_sleep_keeps_a_small_pool_of_pages_and_the_graphs_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that continue with other weights are those of a pool that was freed."""
    results = []
    for kept in (True, False):
        engine, done = core(True, pages=True), {}
        for request in requests(0, 8):
            engine.add(request)
        done |= run(engine, until=3)
        decode, forgotten = engine.runner._paged, list[bool]()  # type: ignore[attr-defined]
        pool, size = decode.cache.pool, decode.cache.nbytes
        with monkeypatch.context() as patch:
            patch.setattr(paged, "KEPT_KV_BYTES", size if kept else size - 1)
            patch.setattr(decode, "forget", lambda forgotten=forgotten: forgotten.append(True))
            engine.sleep(1)
        assert (decode.cache.pool is pool) == kept == (not forgotten)
        assert not decode.cache.pool.any() if kept else decode.cache.pool is None
        assert not decode.cache._held.any() and len(decode.cache._free) == decode.cache._pages - 1
        engine.load(source(1))
        results.append(done | run(engine))
    assert_same(*results)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    pages=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(["abort", "load", "sleep", "add", "abort all"])), max_size=6
    ),
)
def test_aborts_updates_and_sleep_between_steps(seed: int, pages: bool, events: list[tuple[int, str]]) -> None:
    """Both engines get the same events after the same numbers of steps, when the launched step has been read. There is
    a row for each request: a row that ends is free one step later where the next step is launched first."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "PAGE", 8)
        patch.setattr(paged, "paged_kernel", lambda device, dtype: row_by_row)
        for look_ahead in (False, True):
            engine, done = core(look_ahead, pages, rows=16), {}
            waiting = requests(seed, 16)
            for request in waiting[:8]:
                engine.add(request)
            late = iter(waiting[8:])
            for number, (steps, event) in enumerate(events):
                if engine.busy:
                    done |= run(engine, until=steps)
                present = sorted(engine.requests(), key=lambda request: request.order)
                if event == "add":
                    engine.add(next(late))
                elif event == "load":
                    engine.load(source(number + 1))
                elif event == "sleep":
                    engine.sleep(1)
                else:
                    chosen = None if event == "abort all" else set(present[::2])
                    done |= {c.request_id: c for _, c in engine.abort(chosen)}
            results.append(done | (run(engine) if engine.busy else {}))
    assert_same(results[1], results[0])
