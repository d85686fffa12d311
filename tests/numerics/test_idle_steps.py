"""Prompts without rows: short ones are a step of their own, which is captured, with the answers of passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import Launches, interpreted_ops
from on_device import close_to
from test_cuda_decode import Declared, exact
from test_mixed_steps import all_free, assert_same, core, prompt_of, request, steps
from test_native_sets import add, three
from test_no_waits import NoReads
from test_rollout_numerics import CONFIGS, reference
from transformers import Qwen3Config

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from test_captured_steps import CPU, IDLE, META, ROWS, Graphs, Stepping

from verl.accel.cuda import prompts
from verl.accel.devices import device_facts
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import paged
from verl.rollout.native.architecture import shape_of
from verl.rollout.native.prefill import Prefiller, prompt_sizes
from verl.rollout.native.projections import weights_of_layer
from verl.types import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
SIZES = (4, 16, 32)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 16)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))


def watch(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The tokens of each step without rows from now on, with padding, and those of each pass."""
    sizes, passes = list[int](), list[int]()
    beside: Any = engine.runner._paged.prompts  # type: ignore[attr-defined]
    stage, compute = beside.stage, Prefiller._compute

    def staged(host: Any, positions: np.ndarray) -> int:
        size: int = stage(host, positions)
        if not len(positions):
            sizes.append(size)
        return size

    def computed(self: Prefiller, parts: Any) -> None:
        passes.append(sum(tokens for _, tokens in parts))
        compute(self, parts)

    monkeypatch.setattr(beside, "stage", staged)
    monkeypatch.setattr(Prefiller, "_compute", computed)
    return sizes, passes


def alone_and_beside(engine: EngineCore) -> dict[str, Completion]:
    """An idle engine gets a prompt, then several of which two are equal, then the continuation of a known one, then
    more than a step has room for, of which the last is short; another one arrives beside its rows."""
    done: dict[str, Completion] = {}
    known = prompt_of(2, 20)
    for batch in (
        [("first", prompt_of(0, 9))],
        [("b", known), ("cc", known), ("ddd", prompt_of(3, 3)), ("eeee", prompt_of(5, 1))],
        [("continued", np.concatenate([known, prompt_of(4, 30)]))],
        [("long", prompt_of(6, 47)), ("short", prompt_of(7, 2))],
    ):
        for name, prompt in batch:
            engine.add(request(name, prompt, 3))
        done |= steps(engine, 1)
        if batch[0][0] == "first":
            engine.add(request("beside", prompt_of(8, 5), 2))
        done |= steps(engine)
    return done


@pytest.mark.parametrize(
    "name,look_ahead",
    [("qwen3", False), ("qwen3", True), ("gemma2", True), ("mistral narrow window", True), ("qwen3 moe", True)],
)
def test_answers_are_those_of_passes(name: str, look_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = core(name, idle_tokens=())
    expected = alone_and_beside(apart)
    steps_alone = core(name, look_ahead=look_ahead, idle_tokens=SIZES)
    sizes, passes = watch(steps_alone, monkeypatch)
    found = alone_and_beside(steps_alone)
    assert_same(found, expected)
    assert sizes == [16, 32, 32] and passes == [49], "all but the last prompts fit"
    assert [found[n].cached_tokens for n in ("first", "cc", "continued")] == [0, 20, 20]
    assert {n: c.cached_tokens for n, c in found.items()} == {n: c.cached_tokens for n, c in expected.items()}
    for counter in ("prefill_tokens", "reused_tokens", "prefix_tokens"):
        assert steps_alone.stats()[counter] == apart.stats()[counter], counter
    assert all_free(steps_alone)


@pytest.mark.on_device
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_log_probs_by_the_kernels_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts in one step, over the end of a page; then twice both again, one longer than before: on a card the
    last step is a graph."""
    module, engine = reference(CONFIGS[name]), core(name, ops=interpreted_ops(), idle_tokens=SIZES)
    sizes, passes = watch(engine, monkeypatch)
    for extra in (0, 7, 14):
        given = {"a": np.concatenate([prompt_of(1, 19), prompt_of(2, extra)]), "b": prompt_of(0, 5)}
        for name, prompt in given.items():
            engine.add(request(name, prompt, 3))
        for name, one in steps(engine).items():
            truth = exact(module, given[name], one.ids, 1.0)
            np.testing.assert_allclose(one.logprobs, truth, atol=close_to(1e-6), rtol=5e-7)
    assert sizes == [32, 16, 16] and not passes


def ended_by(settings: dict[str, Any], engine: EngineCore) -> dict[str, Completion]:
    for i, tokens in enumerate((5, 11)):
        sampling = Sampling(seed=i, **settings)
        engine.add(ActiveRequest(GenerateRequest(str(i), prompt_of(i, tokens), sampling)))
    return steps(engine)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_requests_that_end_with_their_first_token(look_ahead: bool) -> None:
    """By their limit, or by a stop: the engine is idle again, and its next prompt is a step of its own too."""
    engine, apart = (core("qwen3", look_ahead=look_ahead, idle_tokens=sizes) for sizes in (SIZES, ()))
    one_token = {"max_tokens": 1, "temperature": 0.8, "top_k": 9}
    first = ended_by(one_token, apart)
    assert_same(ended_by(one_token, engine), first)
    stops = tuple(int(c.ids[0]) for c in first.values())
    for settings in (
        {"max_tokens": 6, "temperature": 0.8, "top_k": 9, "stop_token_ids": stops},
        {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True},
    ):
        found = ended_by(settings, engine)
        assert_same(found, ended_by(settings, apart))
        assert all((c.stop_reason == "stop") == ("stop_token_ids" in settings) for c in found.values())
    assert all_free(engine)


def test_sets_and_banned_ids_are_those_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of two LoRA sets, and of none, in one step; ids that would be drawn are banned."""
    module, found = reference(CONFIGS["qwen3"]), []
    monkeypatch.setattr("verl.rollout.native.runner.banned_of", lambda context, device: torch.tensor([3, 60]))
    for sizes in ((), SIZES):
        engine = core("qwen3", idle_tokens=sizes)
        add(engine, three(module))
        used, passes = watch(engine, monkeypatch)
        for round in range(2):
            for i, parameters in enumerate(("all", "policy", "some", "all")):
                given = Sampling(max_tokens=3, seed=i, ignore_eos=True)
                asked = GenerateRequest(f"{parameters} {i} {round}", prompt_of(i, 4 + i), given, parameters=parameters)
                engine.add(ActiveRequest(asked))
            found.append(steps(engine))
        assert (used, passes) == (([32], []) if sizes else ([], [22])), "the second round knows the prompts"
    for i in range(2):
        assert_same(found[i], found[2 + i])
        assert not any(np.isin(c.ids, (3, 60)).any() for c in found[i].values())


@pytest.mark.parametrize("event", ["abort", "load", "sleep", "sleep and wake"])
def test_what_happens_in_the_middle_of_a_prompt(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and steps of 16 tokens: a prompt that is given up frees its pages, and after new weights or sleep it is
    computed from its beginning."""
    found = []
    for sizes in ((), SIZES):
        engine = core("qwen3", idle_tokens=sizes, max_prefill_tokens=16)
        used, _ = watch(engine, monkeypatch)
        engine.add(request("long", prompt_of(1, 50), 2))
        done = steps(engine, 2)
        assert used == [16] * (2 if sizes else 0)
        if event == "abort":
            done |= {c.request_id: c for _, c in engine.abort(None)}
            engine.add(request("next", prompt_of(2, 20), 2))
        elif event == "load":
            from rollouts import source_of

            engine.load(source_of(reference(CONFIGS["qwen3"]), 1))
        else:
            engine.sleep(1)
        if event == "sleep and wake":
            engine.add(request("next", prompt_of(2, 20), 2))
        found.append(done | steps(engine))
        assert all_free(engine)
    assert_same(*found)


def test_more_prompts_than_a_step_has_slots_for_are_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MIXED_PROMPTS", 2)
    found = []
    for sizes in ((), SIZES):
        engine = core("qwen3", rows=8, idle_tokens=sizes)
        used, passes = watch(engine, monkeypatch)
        for i in range(3):
            engine.add(request("x" * (i + 1), prompt_of(i + 1, 3 + 2 * i), 2))
        found.append(steps(engine))
        assert not used and passes == [15]
    assert_same(*found)


def with_parts(stepping: Stepping, counts: dict[int, int], *, adapted: bool) -> list[Any]:
    """Run a step without rows: of prompts with these numbers of tokens, of which 5 are known, these numbers of
    tokens."""
    jobs = [stepping.job(ids, adapted=adapted) for ids in counts]
    assert stepping.step.prompts.take([*zip(jobs, counts.values(), strict=True)], 0)
    stepping.step.compute_prompts()
    stepping.step.prompts.plan(())
    return jobs


@pytest.mark.slow
def test_a_graph_for_each_size_from_its_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is the step, bitwise, and writes into the pages of its prompts alone: padding writes nothing."""
    graphs, ops = Graphs(monkeypatch), interpreted_ops()
    captured, direct = Stepping("qwen3", CPU, ops, graphs), Stepping("qwen3", CPU, ops)
    shapes = [(part, adapted) for part in ({9: 4}, {20: 5}, {21: 3, 7: 2}) for adapted in (False, True)]
    kinds = 2 * len(IDLE)  # 4 tokens are one size, 5 the other
    before = captured.step.cache.pool.clone()
    for round in range(2):
        for part, adapted in shapes:
            part = {ids + 20 * round: tokens for ids, tokens in part.items()}
            ours, theirs = (with_parts(one, part, adapted=adapted) for one in (captured, direct))
            for job, expected, tokens in zip(ours, theirs, part.values(), strict=True):
                assert job.done == 5 + tokens and torch.equal(job.kv, expected.kv)
                assert (job.entry is None) == (expected.entry is None) == (len(job.ids) > job.done)
                assert job.entry is None or torch.equal(job.entry.hidden, expected.entry.hidden)
    assert len(graphs.captured) == kinds and {s.rows for s in captured.step._graphs} == {0}
    assert graphs.replays == 2 * len(shapes) - kinds, "the first step of each shape is a direct call"
    rows = captured.step.cache._own[:ROWS]
    used = sorted({0, *rows.ravel().tolist()})
    assert torch.equal(captured.step.cache.pool[:, :, used], before[:, :, used]), "rows, and page 0"
    captured.step.forget()
    with_parts(captured, {9: 4}, adapted=False)
    assert len(graphs.captured) == kinds, "after sleep a single step is not captured"
    captured.launch(1, 4, adapted=False)
    with_parts(captured, {9: 4}, adapted=False)
    assert len(graphs.captured) == kinds + 2 and graphs.pools[-1] is graphs.captured[-2].own, "in the same memory"


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3 moe"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_step_of_prompts_waits_for_nothing(name: str, adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device `meta`, of which no number can be read."""
    sent = list[torch.Tensor]()
    monkeypatch.setattr(paged.Transfers, "receive", lambda host, both: sent.append(both))
    stepping = Stepping(name, META, Declared(torch.full((4,), 20)).ops())
    with NoReads() as mode:
        jobs = with_parts(stepping, {12: 4, 9: 4}, adapted=adapted)
    assert [job.done for job in jobs] == [9, 9] and [job.entry is None for job in jobs] == [True, False]
    assert [tuple(both.shape) for both in sent] == [(2, 0)] and mode.calls["index_copy_"] >= 2


def launched(run: Callable[[], object]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, Launches(patch) as launches, torch.inference_mode():
        run()
    return launches.names


def test_what_a_pass_launches_and_what_no_graph_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of docs/gpu.md: launches of a layer in a pass and in a step of prompts, and those beside the step."""
    counts = dict[str, list[int]]()
    for layers in (2, 4):
        config = {**CONFIGS["qwen3"].to_dict(), "num_hidden_layers": layers, "layer_types": None}
        monkeypatch.setitem(CONFIGS, "deep", Qwen3Config(**config))
        runner: Any = core("deep", ops=interpreted_ops(), idle_tokens=SIZES, layout="plain").runner
        runner.model.prompt_attention = prompts.attend_prompts
        step, all_prompts = runner._paged, runner._prompts
        runner.model.rotary.reserve(256)

        def want(count: int, all_prompts: Any = all_prompts) -> Any:
            named = [(f"{i}", prompt_of(i, 5)) for i in range(count)]
            keys = [("policy", (), False, prompt.tobytes()) for _, prompt in named]
            all_prompts.want([request(name, prompt, 1) for name, prompt in named], keys)
            return all_prompts.next_parts()

        want(2)
        counts.setdefault("pass", []).append(len(launched(all_prompts.advance)))
        for count in (1, 2):
            all_prompts.clear()
            assert step.prompts.take(want(count), 0)
            step.cache.allocate()
            shape = paged.StepShape(0, step.cache.table.shape[1], 16, False)
            with torch.inference_mode():
                outputs = step._sample(shape)
            inside = launched(partial(step._sample, shape))
            with pytest.MonkeyPatch.context() as patch:  # a replay
                patch.setattr(step, "_sample", lambda shape, outputs=outputs: outputs)
                counts.setdefault(f"beside {count}", []).append(len(launched(step.compute_prompts)))
        counts.setdefault("step", []).append(len(inside))
    assert counts == {"pass": [48, 82], "step": [28, 46], "beside 1": [13, 13], "beside 2": [23, 23]}


def test_sizes_are_those_that_launches_take_longer_for() -> None:
    """The arithmetic of docs/gpu.md, by hand. On a CPU, and in deterministic runs, there are no such steps."""
    kinds = {
        "Qwen3-0.6B": ((1024, 16, 8, 3072), (64, 128, 256, 512)),
        "Qwen3-1.7B": ((2048, 16, 8, 6144), (64, 128)),
        "Qwen3-4B": ((2560, 32, 8, 9728), (64,)),
        "Qwen3-8B": ((4096, 32, 8, 12288), ()),
    }
    for name, ((hidden, heads, kv, ffn), sizes) in kinds.items():
        named = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 128}
        shape = shape_of(Qwen3Config(**named, intermediate_size=ffn, num_hidden_layers=3), 256)
        weights = hidden * 128 * (2 * heads + 2 * kv) + 3 * hidden * ffn
        assert weights_of_layer(shape) == weights
        assert prompt_sizes(device_facts("cuda"), shape) == ((256, 1024), sizes), name
        assert prompt_sizes(device_facts("cpu"), shape) == ((), ())
    moe = shape_of(CONFIGS["qwen3 moe"], 256)
    attention = moe.head_dim * 2 * (moe.heads + moe.kv_heads)
    fed = [n + moe.chosen_experts * 3 * moe.expert_ffn if n else 3 * moe.ffn for n in moe.experts]
    assert weights_of_layer(moe) == moe.hidden * sum(attention + each for each in fed) // moe.layers
    runner: Any = core("qwen3", deterministic=True, idle_tokens=SIZES).runner
    assert runner._paged is not None and not runner._paged.prompts.take([(None, 1)], 0)
