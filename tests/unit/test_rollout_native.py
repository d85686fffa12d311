"""Properties of the native engine beyond the contract: prompts computed once, bounded passes, fixed bits."""

from __future__ import annotations

import asyncio
import functools
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vision_families
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import context_of, draws_of, native_core, products_of
from rollouts import finish as run_out
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PhiConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from verl.accel.cpu import lanes as lanes_module
from verl.accel.cpu.lanes import Lanes
from verl.accel.uniforms import uniforms
from verl.rollout import hf
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.hf_runner import HfRunner
from verl.rollout.embedded.receive import receive
from verl.rollout.embedded.requests import ActiveRequest, find_stop
from verl.rollout.embedded.sampler import SamplingMetadata, sample, stream_of
from verl.rollout.native import engine as native
from verl.rollout.native import kv as kv_module
from verl.rollout.native import weights as weights_module
from verl.rollout.native.architecture import UnsupportedModel, shape_of
from verl.rollout.native.kv import Prefix, PrefixStore
from verl.rollout.native.model import read_blocks
from verl.rollout.native.ops import choose_ops
from verl.rollout.native.options import Options, memory
from verl.rollout.native.runner import NativeRunner
from verl.rollout.native.weights import Storage
from verl.types import Medium, Sampling

VOCAB = 61
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=512,
)
CONFIG = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)


def active(name: str, ids: Any, sampling: Sampling, parameters: str = "policy", media: Any = ()) -> ActiveRequest:
    """A request as an engine's core has it."""
    return ActiveRequest(GenerateRequest(name, ids, sampling, parameters=parameters, media=media))


@functools.cache
def source(version: int) -> Any:
    """Random weights, different for every version."""
    generator = torch.Generator().manual_seed(version)
    names = Storage(shape_of(CONFIG, 512), torch.float32, torch.float32, torch.device("cpu")).destinations
    tensors = {name: torch.randn(t.shape, generator=generator) * 0.2 for name, t in names.items() if "head" not in name}
    return SimpleNamespace(version=version, passes=False, seconds={}, tensors=tensors.items)


def core(rows: int = 16, **options: Any) -> EngineCore:
    return native_core(CONFIG, source(0), rows=rows, **options)


Jobs = dict[str, tuple[np.ndarray, Sampling]]


def finish(engine: EngineCore, jobs: Jobs | None = None) -> dict[str, Completion]:
    return run_out(engine, (active(name, prompt, sampling) for name, (prompt, sampling) in (jobs or {}).items()))


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, tokens)


def same(a: Completion, b: Completion, *, bitwise: bool = False) -> None:
    assert a.ids.tolist() == b.ids.tolist()
    if bitwise:
        assert (a.logprobs == b.logprobs).all()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


# ---- prompts are computed once -------------------------------------------------------------------------------------


def test_equal_prompts_are_computed_once_per_version() -> None:
    engine = core()
    group = {str(i): (prompt(20), Sampling(max_tokens=3, seed=i)) for i in range(40)}  # more than there are rows
    done = finish(engine, group)
    assert engine.stats()["prefill_tokens"] == 20
    assert sorted(c.cached_tokens for c in done.values()) == [0] + [20] * 39
    assert finish(engine, {"later": group["0"]})["later"].cached_tokens == 20
    assert engine.stats()["prefill_tokens"] == 20
    engine.load(source(1))
    assert finish(engine, {"new": group["0"]})["new"].cached_tokens == 0
    assert engine.stats()["prefill_tokens"] == 40


def test_without_a_store_a_group_still_shares_its_prompt() -> None:
    engine = core(rows=4, prefix_cache_tokens=0)
    finish(engine, {str(i): (prompt(20), Sampling(max_tokens=3, seed=i)) for i in range(4)})
    assert engine.stats()["prefill_tokens"] == 20 and engine.stats()["prefix_tokens"] == 0


def test_a_prompt_that_continues_a_stored_one_computes_only_its_tail() -> None:
    long = prompt(150)
    jobs: Jobs = {"turn 1": (long[:90], Sampling(max_tokens=5)), "turn 2": (long, Sampling(max_tokens=9, seed=1))}
    fresh = finish(core(), {"turn 2": jobs["turn 2"]})["turn 2"]
    engine = core()
    for name in jobs:
        done = finish(engine, {name: jobs[name]})[name]
    assert done.cached_tokens == 90 and engine.stats()["prefill_tokens"] == 150
    same(done, fresh)
    # a common head of two different prompts, in steps of REUSE_STEP
    other = np.concatenate([long[:140], prompt(8, seed=9)])
    assert finish(engine, {"o": (other, Sampling(max_tokens=9, seed=1))})["o"].cached_tokens == 128


def entry(ids: np.ndarray, adapter: str | None = None, media: tuple[Medium, ...] = (), noise: bool = False) -> Prefix:
    return Prefix((adapter, media, noise, ids.tobytes()), ids, torch.zeros(1, 2, 1, len(ids), 4), torch.zeros(4))


def longest(store: PrefixStore, of: Prefix) -> int | None:
    """Tokens that a prompt with the inputs of `of` and one more token would not compute."""
    ids = np.append(of.ids, 1)
    found = store.longest((*of.key[:3], ids.tobytes()), ids)
    return None if found is None else found[0].shape[3]


def test_the_store_is_bounded_and_drops_the_least_recently_used() -> None:
    store = PrefixStore(100)
    a, b, c, d = (entry(prompt(40, i)) for i in range(4))
    store.put(a)
    store.put(b)
    assert store.get(a.key) is a
    store.put(c)
    assert [store.get(e.key) for e in (a, b, c)] == [a, None, c] and store.tokens == 80
    assert longest(store, a) == 40 and longest(store, b) is None
    store.put(d)
    assert store.get(a.key) is a and store.get(c.key) is None  # continuing a was a use of it
    store.put(entry(prompt(101, 9)))
    assert store.tokens == 80
    for i in range(20, 60):
        store.put(entry(prompt(1 + i, i)))
        assert store.tokens <= 100
    store.clear()
    assert (store.tokens, store.nbytes, longest(store, d)) == (0, 0, None)


def test_equal_ids_with_other_media_or_another_adapter_share_nothing() -> None:
    """Neither the whole prompt nor a head of it: an image's tokens are placeholders, equal for every image. A token
    with the same id may also be text."""
    ids, a, b, later = prompt(70), Medium("a", 0, 2), Medium("b", 2, 2), Medium("a", 2, 2)
    inputs = [
        (None, ()),
        (None, (a,)),
        (None, (later,)),
        (None, (b,)),
        (None, (a, b)),
        (None, (a, later)),
        ("x", ()),
        ("x", (a,)),
    ]
    entries = [entry(ids, *given) for given in inputs]
    store = PrefixStore(10_000)
    for i, one in enumerate(entries):
        assert store.get(one.key) is None and longest(store, one) is None, one.key[:2]
        store.put(one)
        assert [store.get(e.key) for e in entries[: i + 1]] == entries[: i + 1]
        assert longest(store, one) == 70
    requests = [active("r", ids, Sampling(max_tokens=1), *given) for given in inputs]
    assert len({request.key() for request in requests}) == len(inputs)


def test_a_store_that_forgets_changes_no_result() -> None:
    jobs = {str(i): (prompt(5 + i % 7, seed=i % 9), Sampling(max_tokens=6, seed=i)) for i in range(60)}
    plain, tight = finish(core(), jobs), finish(core(rows=5, prefix_cache_tokens=16), jobs)
    for name in jobs:
        same(plain[name], tight[name])


# ---- scheduling ----------------------------------------------------------------------------------------------------


def test_prefill_passes_are_bounded_and_decode_goes_on_between_them() -> None:
    engine = core(max_prefill_tokens=10)
    jobs = {"short": (prompt(4), Sampling(max_tokens=30)), "long": (prompt(64, seed=1), Sampling(max_tokens=4))}
    whole = finish(core(), jobs)
    for name in jobs:
        engine.add(active(name, *jobs[name]))
    before, done = 0, {}
    while engine.busy:
        done |= {c.request_id: c for _, c in engine.step()}
        stats = engine.stats()
        assert stats["prefill_tokens"] - before <= 10
        if before < stats["prefill_tokens"] < 68:  # the long prompt is still being computed
            assert stats["resident"] == 1 and engine.running.count[0] >= stats["steps"]
        before = stats["prefill_tokens"]
    for name in jobs:
        same(done[name], whole[name])


def test_rows_and_capacity_grow_with_the_work() -> None:
    engine = core(rows=16)
    finish(engine, {"a": (prompt(4), Sampling(max_tokens=4))})
    small = engine.stats()["kv_bytes"]
    jobs = {str(i): (prompt(3 + 9 * i, seed=i), Sampling(max_tokens=40 + i, seed=i)) for i in range(16)}
    grown = finish(engine, jobs)
    assert small * 16 < engine.stats()["kv_bytes"]
    alone = finish(core(rows=1), jobs)
    for name in jobs:
        same(grown[name], alone[name])


def test_closing_holes_keeps_every_sequence() -> None:
    jobs = {str(i): (prompt(4 + i, seed=i), Sampling(max_tokens=1 + (i * 7) % 23, seed=i)) for i in range(30)}
    mixed, alone = finish(core(rows=9), jobs), finish(core(rows=1), jobs)
    for name in jobs:
        same(mixed[name], alone[name])


def test_aborting_a_prompt_that_is_being_computed() -> None:
    engine = core(max_prefill_tokens=8)
    requests = [active("a", prompt(40), Sampling(max_tokens=4)), active("b", prompt(6, 1), Sampling(max_tokens=4))]
    for request in requests:
        engine.add(request)
    assert engine.step() == []
    assert [c.stop_reason for _, c in engine.abort({requests[0]})] == ["abort"]
    assert finish(engine)["b"].stop_reason == "length"
    assert engine.stats()["resident"] == engine.stats()["waiting"] == 0


def test_an_update_restarts_a_prompt_that_is_being_computed() -> None:
    engine = core(max_prefill_tokens=8)
    job = {"a": (prompt(40), Sampling(max_tokens=6))}
    engine.add(active("a", *job["a"]))
    engine.step()
    engine.load(source(1))
    done = finish(engine)["a"]
    other = core()
    other.load(source(1))
    same(done, finish(other, job)["a"])
    assert done.spans == ((1, 0, 6),)


# ---- bits ----------------------------------------------------------------------------------------------------------


def batches() -> tuple[Jobs, list[Jobs]]:
    rng = np.random.default_rng(7)
    jobs = {
        str(i): (prompt(int(rng.integers(1, 60)), seed=i % 25), Sampling(max_tokens=int(rng.integers(1, 50)), seed=i))
        for i in range(30)
    }
    names = list(jobs)
    return jobs, [{n: jobs[n] for n in part} for part in (names, names[::-1], names[3:9], names[8:9])]


def test_deterministic_bits_do_not_depend_on_how_neighbours_are_drawn() -> None:
    plain = {"0": (prompt(9), Sampling(max_tokens=60, seed=1))}
    cut = {
        str(i): (prompt(7, i), Sampling(max_tokens=60, seed=i, **one))
        for i, one in enumerate(({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}), 1)
    }
    alone = finish(core(deterministic=True), plain)["0"]
    same(finish(core(deterministic=True), {**plain, **cut})["0"], alone, bitwise=True)


@pytest.mark.parametrize("lanes", [1, 2])
def test_deterministic_bits_do_not_depend_on_the_batch(lanes: int) -> None:
    jobs, parts = batches()
    alone = {
        n: finish(core(rows=1, deterministic=True, max_context_tokens=128), {n: jobs[n]})[n] for n in list(jobs)[3:9]
    }
    for part in parts:
        engine = core(rows=35, lanes=lanes, deterministic=True, max_context_tokens=128, max_prefill_tokens=70)
        done = finish(engine, part)
        again = finish(engine, part)  # now with the prompts stored
        for name in part:
            same(done[name], again[name], bitwise=True)
            if name in alone:
                same(done[name], alone[name], bitwise=True)


def test_deterministic_chunks_of_a_long_prompt_are_its_own() -> None:
    jobs = {"long": (prompt(100), Sampling(max_tokens=5)), "other": (prompt(23, 1), Sampling(max_tokens=5))}
    options = dict(deterministic=True, max_prefill_tokens=32, max_context_tokens=128)
    alone = {name: finish(core(**options), {name: jobs[name]})[name] for name in jobs}
    for order in (["long", "other"], ["other", "long"]):
        for name, c in finish(core(**options), {n: jobs[n] for n in order}).items():
            same(c, alone[name], bitwise=True)


def test_the_same_calls_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "LANE_WORK", 1.0)
    jobs, _ = batches()
    first, second = finish(core(rows=17, lanes=2), jobs), finish(core(rows=17, lanes=2), jobs)
    for name in jobs:
        same(first[name], second[name], bitwise=True)


def test_lanes_and_hops_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "LANE_WORK", 1.0)  # as if the model were large enough
    jobs, _ = batches()
    engine = core(rows=45, lanes=3)
    for name, (ids, sampling) in jobs.items():
        engine.add(active(name, ids, sampling))
    done = {c.request_id: c for _, c in engine.run(lambda *_: pytest.fail("too early"), 10**6, lambda: False)}
    plain = finish(core(rows=45), jobs)
    for name in jobs:
        same(done[name], plain[name])


def test_lanes_compute_on_one_thread_and_leave_the_others_alone() -> None:
    before = torch.get_num_threads()
    lanes = Lanes(3)
    jobs = [lambda i=i: (i, torch.get_num_threads()) for i in range(7)]
    done = lanes.map(jobs)
    assert [i for i, _ in done] == list(range(7))
    assert {n for i, n in done if i % 3} == {1}
    assert lanes.wide(torch.get_num_threads) == torch.get_num_threads() == before
    lanes.close()


# ---- the sampler ---------------------------------------------------------------------------------------------------


def draws(n: int, uniform: Any, **columns: float) -> SamplingMetadata:
    drawn: SamplingMetadata = draws_of(np.full(n, uniform, np.float64), **columns)
    return drawn


@each("vocab", [3, 512, 513, 1000, 4096])
def test_inverse_cdf_is_the_first_id_above_the_uniform(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(200, vocab)) * 3).float()
    uniform = rng.random(200)
    ids, logprobs = sample(logits, draws(200, uniform))
    cdf = torch.softmax(logits.double(), -1).cumsum(-1).numpy()
    for row in range(200):
        got = int(ids[row])  # exact up to the rounding of float32 probabilities
        assert cdf[row, got] >= uniform[row] - 1e-6 and (got == 0 or cdf[row, got - 1] <= uniform[row] + 1e-6)
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits, -1)[range(200), ids], atol=2e-6)


@each("vocab, uniform", product([5, 700, 2048], [0.0, 2.0**-53, 0.5, 1 - 2.0**-53]))
def test_an_impossible_id_is_never_drawn(vocab: int, uniform: float) -> None:
    logits = torch.full((4, vocab), -torch.inf)
    for row, id_ in enumerate((0, vocab // 2, vocab - 1)):
        logits[row, id_] = 3.0
    logits[3, [1, vocab - 2]] = torch.tensor([0.0, -80.0])
    ids, logprobs = sample(logits, draws(4, uniform))
    assert ids[:3].tolist() == [0, vocab // 2, vocab - 1] and int(ids[3]) in (1, vocab - 2)
    assert torch.isfinite(logprobs).all()
    kept, _ = sample(torch.zeros(3, vocab), draws(3, uniform, top_k=2))
    assert kept.max() < 2


def test_rows_are_drawn_each_in_its_own_way() -> None:
    logits = torch.randn(6, 40)
    temperature, top_k, top_p = [0.0, 1.0, 0.5, 1.0, 2.0, 0.0], [0, 2, 0, 0, 0, 3], [1, 1, 0.3, 1, 1, 0.1]
    draw = draws_of(np.full(6, 0.9), temperature, top_k, top_p, [0, 0, 0, 0.5, 0, 0])
    ids, logprobs = sample(logits, draw)
    for row in range(6):
        alone_id, alone_logprob = sample(logits[row : row + 1], draw.of(slice(row, row + 1)))
        assert ids[row] == alone_id and logprobs[row] == alone_logprob
    assert ids[0] == logits[0].argmax() and ids[5] == logits[5].argmax()
    torch.testing.assert_close(
        logprobs[5], torch.log_softmax(logits[5], -1).max()
    )  # greedy: temperature 1, nothing truncated


def test_uniforms_are_uniform_and_independent() -> None:
    grid = np.stack([uniforms(np.full(500, stream_of(seed)), np.arange(500)) for seed in range(200)])
    assert grid.min() >= 0 and grid.max() < 1 and len(np.unique(grid)) == grid.size
    counts = np.histogram(grid, 50)[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 4 * 98**0.5
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):  # neighbouring positions, neighbouring seeds
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / a.size**0.5
    assert stream_of(-1) == stream_of(2**64 - 1)


# ---- stop strings --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=4), min_size=2, max_size=6),
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    stops=st.lists(st.text("abé ", min_size=1, max_size=6), min_size=1, max_size=3),
    text=st.text("abé ", max_size=8),
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(
    pieces: list[bytes], ids: list[int], stops: list[str], text: str
) -> None:
    table = [*pieces, *(text.encode()[i : i + 3] for i in range(0, len(text.encode()), 3))]

    def decode(tokens: Any) -> str:
        return b"".join(table[i % len(table)] for i in tokens).decode(errors="replace")

    for end in range(1, len(ids) + 1):
        found = find_stop(np.asarray(ids[:end]), stops, decode)
        expected = [s for s in stops if s in decode(ids[:end])]
        assert bool(found) == bool(expected) and (not expected or found in expected)
        if found:
            return


# ---- what it refuses -----------------------------------------------------------------------------------------------


UNSUPPORTED: list[tuple[Any, str]] = [
    (PhiConfig(**SIZES), "model_type='phi'"),
    (GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=256), "model_type='gpt2'"),
    (Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "use_bidirectional_attention"),
    (LlamaConfig(**SIZES, hidden_act="gelu"), "gelu"),
    (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "rope_parameters",
    ),
]


def test_the_reason_for_a_gemma4_is_its_own() -> None:
    """In the small ones, tokens of an image do not attend to each other: it is the decoder."""
    config = vision_families.model("gemma4").config
    for attends, why in (("vision", "tokens of an image attend"), (None, "the native rollout engine computes")):
        config.text_config.use_bidirectional_attention = attends
        with pytest.raises(UnsupportedModel, match=f"model_type='gemma4': {why}"):
            shape_of(config, 128)


def test_a_model_that_native_does_not_compute_goes_to_hf_and_it_is_said() -> None:
    for config, message in UNSUPPORTED:
        with pytest.raises(UnsupportedModel, match=message):
            core_of(config)
        engine = native.build(Options(), context_of(config, max_context_tokens=128))
        assert isinstance(engine._runner, HfRunner), message
        (note,) = asyncio.run(engine.capabilities()).notes
        assert note.startswith("rollout: the hf engine is used, since ") and message in note


def core_of(config: Any) -> Any:
    return NativeRunner(Options(), context_of(config, max_context_tokens=128))


def test_refused_options() -> None:
    for make, message in (
        (lambda: native.build(Options(), context_of(CONFIG, dtype=torch.float16)), "float16"),
        (lambda: native.build(Options(max_kv_tokens=9), context_of(CONFIG)), "max_kv_tokens=9 holds no sequence"),
        (lambda: native.build(Options(), context_of(CONFIG, max_context_tokens=513)), "max_position_embeddings=512"),
        (lambda: Options(max_prefill_tokens=0), "max_prefill_tokens=0: must be at least 1"),
        (lambda: Options(prefix_cache_tokens=-1), "prefix_cache_tokens=-1"),
        (lambda: context_of(CONFIG, 0), "max_concurrent_sequences=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_memory_is_that_of_full_caches() -> None:
    sizes = {"max_concurrent_sequences": 8, "max_context_tokens": 100, "kv_bytes_per_token": 16}
    options = Options(prefix_cache_tokens=50)
    assert memory(options, **sizes) == {"KV cache": 8 * 100 * 16, "prefix cache": 50 * 16}
    assert memory(Options(max_kv_tokens=300), **sizes)["KV cache"] == 300 * 16
    assert hf.memory(hf.Options(), **sizes) == {"KV cache": 8 * 100 * 16}


def test_a_plan_reads_options_and_memory_without_torch() -> None:
    code = "import sys, verl.rollout.native.options, verl.rollout.hf; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_tied_names_must_agree_and_one_is_enough() -> None:
    tensors = dict(source(0).tensors())

    def with_head(head: torch.Tensor) -> Iterator[tuple[str, object]]:
        yield "lm_head.weight", head
        yield from tensors.items()

    engine = core()
    engine.load(SimpleNamespace(version=1, tensors=lambda: with_head(tensors["model.embed_tokens.weight"])))
    with pytest.raises(ValueError, match="tied"):
        engine.load(SimpleNamespace(version=2, tensors=lambda: with_head(tensors["model.embed_tokens.weight"] + 1)))
    assert engine.version == 1


def test_a_burst_is_admitted_as_a_whole_and_in_its_order() -> None:
    engine = native.build(Options(), context_of(CONFIG, 64), lanes=1)
    seen: list[list[str]] = []

    async def caller(i: int) -> Completion:
        for _ in range(i % 3):  # an agent loop does some work before it calls
            await asyncio.sleep(0)
        return await engine.generate(GenerateRequest(str(i), prompt(5, i), Sampling(max_tokens=4, seed=i)))

    async def run() -> None:
        await engine.load_weights(source(0))
        admit = engine._runner.admit

        def watched(waiting: Any, resident: int) -> Any:
            seen.append([request.given.id for request in waiting])
            return admit(waiting, resident)

        engine._runner.admit = watched  # type: ignore[method-assign]
        await asyncio.gather(*map(caller, range(60)))
        await engine.close()

    asyncio.run(run())
    assert seen == [[str(i) for offset in range(3) for i in range(offset, 60, 3)]]


def test_one_long_sequence_does_not_make_all_read_its_length() -> None:
    lengths = np.full(64, 20)
    assert read_blocks(lengths) == [(0, 64, 24)]
    lengths[37] = 900
    assert read_blocks(lengths) == [(0, 16, 24), (16, 32, 24), (32, 48, 904), (48, 64, 24)]
    jobs = {str(i): (prompt(4 + i, i), Sampling(max_tokens=12, seed=i)) for i in range(39)}
    jobs["20"] = (prompt(220, 20), Sampling(max_tokens=12, seed=20))
    mixed, alone = finish(core(rows=39), jobs), finish(core(rows=1), jobs)
    for name in jobs:
        same(mixed[name], alone[name])


@pytest.mark.parametrize("kept", [True, False])
def test_a_little_kv_outlives_sleep_and_changes_no_result(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    if not kept:
        monkeypatch.setattr(kv_module, "KEPT_KV_BYTES", 0)
    jobs, _ = batches()
    slept, fresh = core(), core()
    finish(slept, jobs)
    held = slept.stats()["kv_bytes"]
    prefixes = slept.stats()["prefix_bytes"]
    assert slept.sleep(1) == prefixes + (0 if kept else held)
    assert slept.stats()["kv_bytes"] == (held if kept else 0) and slept.stats()["prefix_bytes"] == 0
    slept.load(source(1))
    fresh.load(source(1))
    again, first = finish(slept, jobs), finish(fresh, jobs)
    for name in jobs:
        same(again[name], first[name], bitwise=True)


@pytest.mark.parametrize("layout", ["panels", "plain"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_laid_out_anew_is_not_kept_as_it_came(layout: str, tied: bool) -> None:
    """An update has one copy of the new weights, and a matrix: not the two layouts whole."""
    ops = choose_ops(torch.device("cpu"), torch.float32, products=products_of(layout))
    config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=tied)
    storage = Storage(shape_of(config, 512), torch.float32, torch.float32, torch.device("cpu"))
    for tensor in storage.tensors.values():
        tensor.normal_()
    came = {key: (weakref.ref(tensor), tensor.nbytes) for key, tensor in storage.tensors.items()}
    alive: list[int] = []
    del tensor

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(ops.products, name)

        def make(self, *args: Any) -> Any:
            alive.append(sum(size for one, size in came.values() if one() is not None))
            return ops.products.make(*args)

    made = weights_module.weights_of(storage, replace(ops, products=Watched()))
    whole = sum(size for _, size in came.values())
    assert alive[0] == whole and made.params == whole // 4
    left = {key for key, (one, _) in came.items() if one() is not None}
    matrices = {key for key in came if key.rpartition(".")[0].rpartition(".")[2] in ("qkv", "out", "up", "down")}
    matrices |= set() if tied else {"head.weight"}
    assert len(matrices) == 8 + (not tied)
    assert left == (came.keys() if layout == "plain" else came.keys() - matrices)
    steps = [before - after for before, after in pairwise(alive)]
    assert all(steps) if layout == "panels" else not any(steps)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_is_laid_out_at_once_with_the_bits_of_two_steps(tied: bool, dtype: torch.dtype) -> None:
    """Fused rows that end within a panel, halves of heads that come to be neighbours, biases, padding, rounding."""
    ops = choose_ops(torch.device("cpu"), torch.float32, products=products_of("panels"))
    sizes = SIZES | {"intermediate_size": 37, "num_attention_heads": 3, "num_key_value_heads": 1}
    for config in (
        Qwen3Config(**sizes, head_dim=24, tie_word_embeddings=tied, attention_bias=True),
        Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=tied),
    ):
        shape, device = shape_of(config, 512), torch.device("cpu")
        ways = [Storage(shape, dtype, torch.float32, device, of) for of in (None, ops.products)]
        tensors = {n: torch.randn(to.shape) for n, to in ways[0].destinations.items() if not (tied and "head" in n)}
        for storage in ways:
            receive(tensors.items(), storage.destinations)
        assert not [key for key in ways[1].tensors if key.endswith(".weight") and "norm" not in key]
        twice, at_once = (weights_module.weights_of(storage, ops) for storage in ways)
        assert (twice.params, twice.nbytes) == (at_once.params, at_once.nbytes)
        pairs: list[Any] = [(twice.head, at_once.head)]
        for one, other in zip(twice.layers, at_once.layers, strict=True):
            pairs += [(one.qkv, other.qkv), (one.out, other.out)]
            pairs += [(one.mlp.up, other.mlp.up), (one.mlp.down, other.mlp.down)]  # type: ignore[union-attr]
        for of, got in pairs:
            assert torch.equal(of.memory, got.memory) and of.width == got.width
            assert (of.bias is None) == (got.bias is None) and (of.bias is None or torch.equal(of.bias, got.bias))


def test_a_tensor_that_is_laid_out_as_it_comes_is_taken_once() -> None:
    engine, given = core(), dict(source(1).tensors())
    name = "model.layers.0.self_attn.q_proj.weight"
    before = finish(engine, batches()[0])
    with pytest.raises(ValueError, match=f"{name} .* came twice"):
        engine.prepare(SimpleNamespace(version=1, tensors=lambda: [*given.items(), (name, given[name] + 1)]))  # type: ignore[arg-type]
    again = finish(engine, batches()[0])
    assert engine.version == 0 and all((again[n].ids == before[n].ids).all() for n in before)


@pytest.mark.parametrize("compiled", [True, False])
def test_experts_are_written_over_where_they_lie(compiled: bool) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    first, second = (AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    products = products_of("panels" if compiled else "plain")

    def scored(*modules: Any) -> tuple[np.ndarray, int]:
        runner = NativeRunner(Options(), context_of(config), compiled=compiled, products=products)
        for version, module in enumerate(modules):
            runner.load(SimpleNamespace(version=version, tensors=lambda m=module: m.state_dict().items()))  # type: ignore[arg-type]
            if not version:
                kept = runner.model.live
        return runner.score(np.arange(1, 40), 1.0).logprobs, runner.model.live is kept

    updated, same = scored(first, second)
    fresh, _ = scored(second)
    assert same and (updated == fresh).all() and not (updated == scored(first)[0]).all()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this system has no large pages")
def test_panels_lie_in_large_pages() -> None:
    panels = products_of("panels").empty(4096, 1024).memory  # 16 MB
    middle, inside = panels.data_ptr() + panels.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("no mapping holds the panels")
