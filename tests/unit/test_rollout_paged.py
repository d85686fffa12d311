"""The CUDA decode path with plain operations in place of its attention kernel, no graphs: pages, buckets, admission."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import GEMMA3, QWEN3, QWEN3_MOE, VOCAB
from rollouts import draws_of, finish, native_core, source_of
from transformers import AutoModelForCausalLM

from verl.accel.plain import plain_sample
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.embedded.sampler import sample
from verl.rollout.native import paged
from verl.rollout.native.page_attention import gathered_paged
from verl.rollout.native.runner import NativeRunner
from verl.types import Sampling

CONFIGS: dict[str, Any] = {"qwen3": QWEN3, "gemma3": GEMMA3, "qwen3 moe": QWEN3_MOE}


def active(name: str, ids: Any, sampling: Sampling, parameters: str | None = None, media: Any = ()) -> ActiveRequest:
    """A request as an engine's core has it."""
    return ActiveRequest(GenerateRequest(name, ids, sampling, parameters=parameters, media=media))


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 8)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))


def module_of(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)


def engine(name: str, *, pages: bool, **options: Any) -> tuple[EngineCore, NativeRunner]:
    sizes = {"rows": 6, "max_context_tokens": 128, "max_prefill_tokens": 64, "prefix_cache_tokens": 256}
    plain = {"compiled": False, "layout": "plain", "paged": pages}
    core = native_core(CONFIGS[name], source_of(module_of(name)), **sizes, **plain, **options)
    return core, core.runner  # type: ignore[return-value]


def load(core: EngineCore, module: Any) -> None:
    core.load(source_of(module, core.version + 1))


def requests(temperature: float = 1.0) -> list[ActiveRequest]:
    """Groups of three; prompts of less than a page, exactly some, and some and a rest."""
    rng = np.random.default_rng(0)
    return [
        active(
            f"{i}.{j}", prompt, Sampling(max_tokens=int(rng.integers(3, 50)), temperature=temperature, seed=10 * i + j)
        )
        for i, prompt in enumerate([rng.integers(0, VOCAB, n) for n in (5, 16, 37, 1, 24)])
        for j in range(3)
    ]


def assert_same(ours: dict[str, Completion], theirs: dict[str, Completion]) -> None:
    assert ours.keys() == theirs.keys()
    for key, one in theirs.items():
        np.testing.assert_array_equal(ours[key].ids, one.ids)
        np.testing.assert_allclose(ours[key].logprobs, one.logprobs, atol=1e-4)


def run(name: str, temperature: float = 1.0, **options: Any) -> tuple[dict[str, Completion], EngineCore, NativeRunner]:
    core, runner = engine(name, **options)
    for request in requests(temperature):
        core.add(request)
    return finish(core), core, runner


def assert_nothing_is_held(runner: NativeRunner) -> None:
    assert runner._paged is not None
    cache = runner._paged.cache
    assert not cache._held.any() and not cache._users.any() and sorted(cache._free) == list(range(1, cache._pages))


@pytest.mark.parametrize("name", CONFIGS)
def test_pages_equal_slots(name: str) -> None:
    slots, _, _ = run(name, pages=False)
    paged_run, _, runner = run(name, pages=True)
    assert_same(paged_run, slots)
    assert_nothing_is_held(runner)


def test_siblings_hold_the_full_pages_of_their_prompt_together() -> None:
    core, runner = engine("qwen3", pages=True)
    prompt = np.arange(20)  # two pages and a half
    for i in range(4):
        core.add(active(str(i), prompt, Sampling(max_tokens=30, seed=i)))
    core.step()
    assert runner._paged is not None
    cache = runner._paged.cache
    assert (cache._own[:4, :2] == cache._own[0, :2]).all() and len({*cache._own[:4, 2].tolist()}) == 4
    assert cache._users[cache._own[0, :2]].tolist() == [4, 4]
    finish(core)
    assert_nothing_is_held(runner)


@pytest.mark.parametrize("pages", [True, False])
def test_no_more_are_resident_than_the_kv_holds(pages: bool) -> None:
    expected, _, _ = run("qwen3", pages=pages)
    core, runner = engine("qwen3", pages=pages, max_kv_tokens=128)
    for request in requests():
        core.add(request)
    done: dict[str, Completion] = {}
    most = 0
    while core.busy:
        done |= {c.request_id: c for _, c in core.step()}
        needs = [len(r.given.prompt_ids) + r.given.sampling.max_tokens for r in core.running.requests]
        assert sum(needs) <= 128
        most = max(most, len(needs))
    assert 1 < most < 6
    assert_same(done, expected)


def test_by_default_every_row_can_become_full() -> None:
    core, _ = engine("qwen3", pages=True)
    for i in range(6):
        core.add(active(str(i), np.arange(3) + i, Sampling(max_tokens=125, seed=i)))
    core.step()
    assert core.running.n == 6
    with pytest.raises(
        ValueError,
        match="max_kv_tokens=100 holds no sequence of max_context_tokens=128 in whole pages: give at least 128",
    ):
        engine("qwen3", pages=True, max_kv_tokens=100)


@pytest.mark.parametrize("kept", [False, True])
def test_sleeping_gives_the_pages_back_and_changes_no_result(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of more bytes than are kept through sleep are freed; all are empty after it."""
    expected, _, _ = run("qwen3", pages=True)
    core, runner = engine("qwen3", pages=True)
    for request in requests():
        core.add(request)
    done: dict[str, Completion] = {}
    for _ in range(6):
        done |= {c.request_id: c for _, c in core.step()}
    size = runner.stats()["kv_bytes"]
    assert size > 0
    monkeypatch.setattr(paged, "KEPT_KV_BYTES", size if kept else size - 1)
    core.sleep(1)
    assert runner.stats()["kv_bytes"] == (size if kept else 0)
    assert not runner._paged.cache._held.any()
    assert_same(done | finish(core), expected)


@pytest.mark.parametrize("torn", [0, 2])
def test_new_weights_take_the_place_of_the_old_ones(torn: int) -> None:
    """Also where others came in part before: graphs were captured with that memory, and there may be room for no
    other."""
    core, runner = engine("qwen3", pages=True)
    assert runner.model.weights is not None
    where, other = runner.model.weights.embed.data_ptr(), module_of("qwen3", seed=1)

    def half() -> Any:
        yield from list(other.state_dict().items())[:3]
        raise RuntimeError("broke off")

    for _ in range(torn):
        with pytest.raises(RuntimeError, match="broke off"):
            core.load(SimpleNamespace(version=1, tensors=half))
        assert not runner.ready
    load(core, other)
    assert runner.model.weights.embed.data_ptr() == where
    fresh, _ = engine("qwen3", pages=False)
    load(fresh, other)
    for one in (core, fresh):
        for request in requests():
            one.add(request)
    assert_same(finish(core), finish(fresh))


@pytest.mark.parametrize("window", [0, 5])
def test_attention_over_pages_is_attention(window: int) -> None:
    torch.manual_seed(0)
    q, pool = torch.randn(3, 4, 8), torch.randn(2, 7, 8, 2, 8)
    table, seen = (
        torch.tensor([[3, 1], [6, 5], [2, 2]], dtype=torch.int32),
        torch.tensor([11, 16, 3], dtype=torch.int32),
    )
    pool[:, 2, 3:] = 1e4  # beyond what is seen
    ours = gathered_paged(q, *pool, (table, seen), 0.3, window)
    for row in range(3):
        lo = max(0, int(seen[row]) - window) if window else 0
        k, v = (p[table[row].long()].flatten(0, 1)[lo : seen[row]].transpose(0, 1)[None] for p in pool)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[row][None, :, None], k, v, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(ours[row], expected[0, :, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("vocab", [31, 1000])
def test_drawing_without_the_host_is_drawing(vocab: int) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(40, vocab)).astype(np.float32))
    temperature = rng.choice(np.array([0.0, 0.7, 1.0], np.float32), 40)
    drawn = draws_of(rng.random(40), temperature)
    ids, logprobs = plain_sample(logits, torch.from_numpy(temperature), torch.from_numpy(drawn.uniform))
    expected_ids, expected = sample(logits, drawn)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(logprobs.float(), expected, atol=1e-6, rtol=0)
