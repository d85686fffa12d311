"""Decode steps that compute prompt tokens beside their rows: the answers of passes of their own; no row waits."""

from __future__ import annotations

from typing import Any

import decode_references as references
import numpy as np
import pytest
import torch
from interpreted import Launches, interpreted_ops
from on_device import ON_CPU, close_to
from rollouts import source_of
from test_cuda_decode import exact
from test_rollout_numerics import CONFIGS, engine, reference

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel import plain
from verl.accel.devices import device_facts
from verl.accel.uniforms import plain_uniforms
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import paged
from verl.rollout.native.ops import DecodeOps
from verl.types import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
SIZES = (4, 16)  # prompt tokens of a step


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 16)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))


PLAIN = DecodeOps(
    page_attention=references.page_attention,
    page_prompt_attention=references.page_prompt_attention,
    rotate_and_store=references.rotate_and_store,
    add_norm=references.add_norm,
    gated=plain.plain_gated,
    truncate=plain.plain_truncate,
    uniforms=plain_uniforms,
    sample=plain.plain_sample,
    expert_products=references.expert_products,
    expert_sum=references.expert_sum,
)
"""The operations of a fused step in torch, which are much faster than Triton's interpreter."""


def core(
    name: str,
    mixed_tokens: tuple[int, ...] = SIZES,
    idle_tokens: tuple[int, ...] = (),
    *,
    rows: int = 5,
    ops: DecodeOps = PLAIN,
    **options: Any,
) -> EngineCore:
    """An engine over pages and the operations of a fused step. On a CPU its products do not depend on the number of
    rows; a GPU does not have that layout."""
    kernels = {"paged": True, "decode_ops": ops, "prompts": (mixed_tokens, idle_tokens)}
    layout = "panels" if ON_CPU and "moe" not in name else "plain"
    given = {"compiled": False, "layout": layout, "max_context_tokens": 256}
    given |= {"max_prefill_tokens": 512, "prefix_cache_tokens": 4096}
    return engine(CONFIGS[name], reference(CONFIGS[name]), rows=rows, **{**given, **kernels, **options})


def request(name: str, prompt: np.ndarray, tokens: int, **given: Any) -> ActiveRequest:
    return ActiveRequest(
        GenerateRequest(name, prompt, Sampling(max_tokens=tokens, seed=len(name), ignore_eos=True, **given))
    )


def prompt_of(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 67, tokens)


def steps(engine: EngineCore, count: int | None = None) -> dict[str, Completion]:
    """Run some steps, or until all requests have ended."""
    done: dict[str, Completion] = {}
    while engine.busy and count != 0:
        done |= {c.request_id: c for _, c in engine.step()}
        count = None if count is None else count - 1
    return done


def schedule(engine: EngineCore) -> dict[str, Completion]:
    """Prompts that arrive while rows decode: shorter and longer than a step has room for, several in one step, equal
    ones, the continuation of a known one, and one that starts in a pass without rows and ends beside some."""
    known = prompt_of(2, 20)
    engine.add(request("first", prompt_of(0, 9), 12))
    done = steps(engine, 2)
    for name, prompt in (("long", prompt_of(1, 35)), ("b", known), ("cc", known), ("ddd", prompt_of(3, 3))):
        engine.add(request(name, prompt, 3))
    done |= steps(engine, 5)
    engine.add(request("continued", np.concatenate([known, prompt_of(4, 3)]), 2))
    return done | steps(engine)


def assert_same(ours: dict[str, Completion], theirs: dict[str, Completion]) -> None:
    """The same tokens."""
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert ours[name].ids.tolist() == one.ids.tolist(), name
        np.testing.assert_allclose(ours[name].logprobs, one.logprobs, atol=2e-6, rtol=2e-6)


def all_free(engine: EngineCore) -> bool:
    cache = engine.runner._paged.cache  # type: ignore[attr-defined]
    return not cache._held.any() and sorted(cache._free) == list(range(1, cache._pages))


@pytest.mark.parametrize(
    "name,look_ahead",
    [("qwen3", False), ("qwen3", True), ("gemma2", True), ("mistral narrow window", True), ("qwen3 moe", True)],
)
def test_answers_are_those_of_passes_of_their_own(name: str, look_ahead: bool) -> None:
    mixed, apart = core(name, look_ahead=look_ahead), core(name, ())
    used = watch(mixed)
    found, expected = schedule(mixed), schedule(apart)
    assert_same(found, expected)
    assert found["continued"].cached_tokens == expected["continued"].cached_tokens == 20
    assert found["cc"].cached_tokens == 20 and [n for n in used if n] == [16, 16, 16, 16, 4]
    assert mixed.stats()["prefill_tokens"] == apart.stats()["prefill_tokens"] and all_free(mixed)


def watch(engine: EngineCore) -> list[int]:
    """The prompt tokens, with padding, of each step from now on, which may be the replay of a graph."""
    sizes, prompts = list[int](), engine.runner._paged.prompts  # type: ignore[attr-defined]
    plain = prompts.stage
    prompts.stage = lambda *given: (sizes.append(plain(*given)), sizes[-1])[1]
    return sizes


@pytest.mark.on_device
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_log_probs_by_the_kernels_are_those_of_transformers(name: str) -> None:
    """Two steps of 16 tokens beside a row, over the end of a page."""
    module, engine = reference(CONFIGS[name]), core(name, ops=interpreted_ops())
    given = {"row": prompt_of(0, 9), "long": prompt_of(1, 30)}
    engine.add(request("row", given["row"], 5))
    done = steps(engine, 1)
    engine.add(request("long", given["long"], 2))
    used = watch(engine)
    for name, one in (done | steps(engine)).items():
        truth = exact(module, given[name], one.ids, 1.0)
        np.testing.assert_allclose(one.logprobs, truth, atol=close_to(1e-6), rtol=5e-7)
    assert used[:3] == [16, 16, 0]


@pytest.mark.parametrize("look_ahead", [False, True])
def test_rows_get_a_token_in_every_step_while_a_long_prompt_is_computed(look_ahead: bool) -> None:
    """A prompt of ten times what a step has room for takes ten steps, and no row waits for one of them."""
    engine = core("qwen3", (4, 8), look_ahead=look_ahead)
    for name in "ab":
        engine.add(request(name, prompt_of(len(name), 6), 20))
    steps(engine, 3)
    used, counts = watch(engine), list[list[int]]()
    engine.add(request("long", prompt_of(7, 80), 9))
    while engine.running.n == 2:
        engine.step()
        counts.append(engine.running.count[:2].tolist())
    assert np.diff(np.array(counts), axis=0).tolist() == [[1, 1]] * (len(counts) - 1)
    assert used[:10] == [8] * 10 and len(counts) == 11  # it is admitted by the step after them
    steps(engine)
    assert all_free(engine)


def test_without_room_in_steps_a_pass_is_bounded() -> None:
    """On a CPU: rows get a token between passes of `max_prefill_tokens`."""
    assert device_facts("cpu").mixed_tokens == () and device_facts("cuda").mixed_tokens
    engine = core("qwen3", (), max_prefill_tokens=8)
    engine.add(request("a", prompt_of(1, 6), 20))
    steps(engine, 3)
    engine.add(request("long", prompt_of(7, 80), 9))
    before, count = engine.running.count[0], 0
    while engine.running.n == 1:
        engine.step()
        count += 1
        assert engine.running.count[0] == before + count
    assert count == 10


@pytest.mark.parametrize("event", ["abort", "load", "sleep", "rows end"])
def test_what_happens_in_the_middle_of_a_prompt(event: str) -> None:
    """A prompt that is given up frees its pages; after new weights or sleep it is computed from its beginning; without
    rows it continues in a pass."""
    found = []
    for sizes in (SIZES, ()):
        engine = core("qwen3", sizes, max_prefill_tokens=16)
        engine.add(request("row", prompt_of(0, 9), 4 if event == "rows end" else 8))
        done = steps(engine, 2)
        engine.add(request("long", prompt_of(1, 50), 2))
        done |= steps(engine, 2)
        if event == "abort":
            done |= {c.request_id: c for _, c in engine.abort({r for r in engine.requests() if r.given.id == "long"})}
            engine.add(request("next", prompt_of(2, 20), 2))
        elif event == "load":
            engine.load(source_of(reference(CONFIGS["qwen3"]), 1))
        elif event == "sleep":
            engine.sleep(1)
        found.append(done | steps(engine))
        assert all_free(engine)
    assert_same(*found)


def test_more_prompts_than_a_step_has_slots_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MIXED_PROMPTS", 2)
    found = []
    for sizes in (SIZES, ()):
        engine = core("qwen3", sizes, rows=8)
        engine.add(request("row", prompt_of(0, 9), 6))
        done = steps(engine, 2)
        for i in range(5):
            engine.add(request("x" * (i + 1), prompt_of(i + 1, 3 + 2 * i), 2))
        found.append(done | steps(engine))
    assert_same(*found)


def test_a_deterministic_run_computes_each_prompt_alone() -> None:
    engine = core("qwen3", deterministic=True)
    paged_decode = engine.runner._paged  # type: ignore[attr-defined]
    assert paged_decode is None or paged_decode.prompts.most == 0


@pytest.mark.slow
def test_a_step_with_prompts_is_two_more_launches_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of the prompts, and the copy that joins both results."""
    engine = core("qwen3", ops=interpreted_ops())
    engine.add(request("row", prompt_of(0, 9), 12))
    steps(engine, 2)
    names = []
    for prompt in (0, 10):
        if prompt:
            engine.add(request("beside", prompt_of(1, prompt), 3))
        decode = engine.runner._paged  # type: ignore[attr-defined]
        plain, launched = decode._sample, list[str]()

        def counted(*given: Any, plain: Any = plain, launched: list[str] = launched) -> Any:
            with pytest.MonkeyPatch.context() as patch, Launches(patch) as launches, torch.inference_mode():
                result = plain(*given)
            launched += launches.names
            return result

        monkeypatch.setattr(decode, "_sample", counted)
        steps(engine, 1)
        monkeypatch.setattr(decode, "_sample", plain)
        names.append(launched)
    layers = CONFIGS["qwen3"].num_hidden_layers
    assert names[1].count("_attend_prompts") == layers and "_attend_prompts" not in names[0]
    per_step = 3 + 1 + 1 + 2  # tokens, positions and table joined, rows of the table, final states: their index
    assert 2 * layers < len(names[1]) - len(names[0]) <= 2 * layers + per_step, (names[1], names[0])
