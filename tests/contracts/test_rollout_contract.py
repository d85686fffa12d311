"""The contract of a rollout engine. Passing it, for every engine, is what "supported" means."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from each import matrix
from on_device import DEVICE, close_to
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from verl.rollout import hf
from verl.rollout.base import BaseEngine, Capabilities, Completion, GenerateRequest, ReplicaLost, RolloutContext
from verl.rollout.client import ServedEngine
from verl.rollout.embedded.hf_runner import HfRunner
from verl.rollout.native import engine as native
from verl.rollout.native.options import Options
from verl.rollout.native.runner import NativeRunner
from verl.rollout.router import MAX_LEAD, Router
from verl.types import Sampling

VOCAB = 61
ADAPTING = ("native", "native-torch", "hf", "router")  # the kinds that take LoRA sets
DRAWS = 3000  # of one distribution
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=512,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
KINDS = ("native", "native-torch", "hf", "router")
PAIRS = (
    [("native", m) for m in ("qwen3", "qwen2", "llama", "gpt2")]
    + [("native-torch", "qwen3")]
    + [("hf", m) for m in ("qwen3", "gpt2")]
    + [("router", "qwen3")]
)


@functools.cache
def reference(model: str = "qwen3", seed: int = 0) -> Any:
    """transformers' own model; never changed."""
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(CONFIGS[model](), dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        if "bias" in name or "norm" in name or "ln_" in name:  # initialised to 0 and 1, which hides mistakes
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


@dataclass
class Source:
    """Weights of a reference model, as a checkpoint engine hands them over."""

    module: Any
    version: int = 0
    passes: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, object]]:
        yield from self.module.state_dict().items()


def build(kind: str, model: str = "qwen3", *, max_prefill_tokens: int = 8192, **given: Any) -> Any:
    defaults = {"max_context_tokens": 512, "dtype": torch.float32, "device": DEVICE}
    context = RolloutContext(hf_config=reference(model).config, **{**defaults, **given})
    if kind == "hf":
        return hf.build(hf.Options(), context, max_prefill_tokens=max_prefill_tokens)
    options = Options(max_prefill_tokens=max_prefill_tokens)
    if kind == "router":
        return Router([lambda died: native.build(options, context)] * 2)
    return native.build(options, context, compiled=kind == "native")


def replicas_of(engine: Any) -> Any:
    return [one.engine for one in engine.replicas] if isinstance(engine, Router) else (engine,)


def unfinished(one: Any) -> Any:
    """Return the requests of an engine that have not returned."""
    return one.calls.pending if isinstance(one, ServedEngine) else [*one._pending, *one._held]


def stats_of(engine: Any) -> dict[str, int]:
    every = [one.stats() for one in replicas_of(engine)]
    return {name: sum(stats[name] for stats in every) for name in every[0]}


async def load(engine: Any, source: Any, **options: Any) -> int:
    """As a checkpoint engine does: into every replica."""
    versions = await asyncio.gather(*(one.load_weights(source, **options) for one in replicas_of(engine)))
    assert len(set(versions)) == 1
    return versions[0]


def with_engine(
    engine: Any, body: Callable[[Any], Awaitable[Any]], *, weights: Any = None, limit_s: float = 60.0
) -> Any:
    """Run one test body on an engine with weights; whatever it leaves behind, nothing may hang."""

    lost: list[dict[str, Any]] = []

    async def run() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
        await load(engine, Source(reference()) if weights is None else weights)
        try:
            return await asyncio.wait_for(body(engine), limit_s)
        finally:
            await engine.close()

    result = asyncio.run(run())
    assert not lost, f"errors that nobody saw: {lost}"
    return result


def greedy(max_tokens: int, **options: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **options)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n) for n in lengths]


@functools.cache
def _hf_greedy(model: str, seed: int, prompt: tuple[int, ...], tokens: int) -> list[int]:
    out = reference(model, seed).generate(
        torch.tensor(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def hf_greedy(prompt: np.ndarray, tokens: int, model: str = "qwen3", seed: int = 0) -> list[int]:
    return _hf_greedy(model, seed, tuple(prompt.tolist()), tokens)


def hf_logits(ids: np.ndarray, model: str = "qwen3", seed: int = 0) -> torch.Tensor:
    """[t, V] logits that predict ids[1:] and one more."""
    return reference(model, seed)(torch.from_numpy(np.asarray(ids))[None]).logits[0]


def hf_logprobs(prompt: np.ndarray, ids: np.ndarray, temperature: float, model: str = "qwen3") -> np.ndarray:
    logits = hf_logits(np.concatenate([prompt, ids]), model)[len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()


async def until_sampled(engine: Any, tokens: int) -> None:
    while stats_of(engine)["sampled_tokens"] < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.0005)


class Ended(Exception):
    """A request that a test wants to meet while it runs had ended before: a busy machine, and a server's own clock."""


LONG = 480  # tokens of such a request: of 200, a real server had sampled the last before it read the call to pause


def still(running: asyncio.Task[Completion]) -> None:
    """Raise Ended if a request that a test has just stopped or changed had come to its own end before."""
    if running.done() and running.result().stop_reason == "length":
        raise Ended


def meets(test: Callable[..., Any]) -> Callable[..., Any]:
    """Such a test is run again when the request had ended, at most five times: it never passes without meeting it."""

    @functools.wraps(test)
    def run(*args: Any, **given: Any) -> Any:
        for _ in range(4):
            with contextlib.suppress(Ended):
                return test(*args, **given)
        return test(*args, **given)

    return run


async def generate_all(engine: Any, jobs: dict[str, tuple[np.ndarray, Sampling]]) -> dict[str, Completion]:
    done = await asyncio.gather(
        *[engine.generate(GenerateRequest(name, ids, sampling)) for name, (ids, sampling) in jobs.items()]
    )
    assert [c.request_id for c in done] == list(jobs)
    return {c.request_id: c for c in done}


every_engine = matrix("kind", KINDS, quick=("native", "router"))  # the rows of PAIRS are quick for all


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.on_device
@pytest.mark.parametrize(("kind", "model"), PAIRS)
def test_greedy_equals_hf_generate(kind: str, model: str) -> None:
    ragged = prompts((3, 17, 1, 40, 8, 8, 25))

    async def body(engine: Any) -> None:
        jobs = {str(i): (p, greedy(24)) for i, p in enumerate(ragged)}
        for name, c in (await generate_all(engine, jobs)).items():
            prompt = ragged[int(name)]
            assert c.ids.tolist() == hf_greedy(prompt, 24, model)
            assert (c.stop_reason, c.spans) == ("length", ((0, 0, 24),))
            assert c.ids.dtype == np.int64 and c.logprobs.dtype == np.float32
            np.testing.assert_allclose(c.logprobs, hf_logprobs(prompt, c.ids, 1.0, model), atol=close_to(1e-5))

    with_engine(build(kind, model), body, weights=Source(reference(model)))


@pytest.mark.on_device
@pytest.mark.parametrize(("kind", "model"), PAIRS)
def test_logprobs_are_those_of_the_temperature(kind: str, model: str) -> None:
    ragged = prompts((5, 19, 11), seed=1)

    async def body(engine: Any) -> None:
        jobs = {
            f"{i} {t}": (p, Sampling(max_tokens=12, temperature=t, seed=i))
            for i, p in enumerate(ragged)
            for t in (0.3, 0.7, 1.0, 1.5)
        }
        for name, c in (await generate_all(engine, jobs)).items():
            i, t = name.split()
            expected = hf_logprobs(ragged[int(i)], c.ids, float(t), model)
            np.testing.assert_allclose(c.logprobs, expected, atol=close_to(1e-5))

    with_engine(build(kind, model), body, weights=Source(reference(model)))


@pytest.mark.on_device
@every_engine
def test_score_equals_hf(kind: str) -> None:
    ids = prompts((50,))[0]

    async def body(engine: Any) -> None:
        for t in (0.7, 1.0):
            scored = await engine.score(ids, temperature=t)
            assert scored.shape == (49,) and scored.dtype == np.float32
            np.testing.assert_allclose(scored, hf_logprobs(ids[:1], ids[1:], t), atol=close_to(1e-5))
        assert (await engine.score(ids[:1])).shape == (0,)

    with_engine(build(kind, max_prefill_tokens=16), body)


@pytest.mark.on_device
@every_engine
def test_samples_follow_the_distribution(kind: str) -> None:
    prompt = prompts((6,), seed=3)[0]
    probs = torch.softmax(hf_logits(prompt)[-1].double() / 1.3, -1).numpy()

    async def body(engine: Any) -> None:
        draws = DRAWS
        jobs = {str(i): (prompt, Sampling(max_tokens=1, temperature=1.3, seed=i)) for i in range(draws)}
        found = np.bincount([c.ids[0] for c in (await generate_all(engine, jobs)).values()], minlength=VOCAB)
        likely = probs * draws >= 5
        assert found[~likely].sum() < 3 * max(3, probs[~likely].sum() * draws)
        expected, observed = probs[likely] * draws, found[likely]
        chi2 = ((observed - expected) ** 2 / expected).sum()
        freedom = len(expected) - 1
        assert chi2 < freedom + 4 * (2 * freedom) ** 0.5, f"chi2 {chi2} at {freedom} degrees of freedom"

    with_engine(build(kind), body)


def processed(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """A slow, obvious reference: temperature, top-k, top-p of the rest, min-p -> log-probs with -inf for dropped."""
    logits = logits.astype(np.float64) / s.temperature
    probs = np.exp(logits - logits.max())
    order = np.argsort(-probs, kind="stable")
    kept = order[: s.top_k or None]
    if s.top_p < 1:
        share = probs[kept] / probs[kept].sum()
        kept = kept[: 1 + int((np.cumsum(share) < s.top_p).sum())]
    kept = kept[probs[kept] >= s.min_p * probs.max()]
    out = np.full(len(probs), -np.inf)
    out[kept] = np.log(probs[kept] / probs[kept].sum())
    return out


TRUNCATIONS: list[dict[str, Any]] = [
    dict(top_k=1),
    dict(top_k=3),
    dict(top_p=0.5),
    dict(top_p=0.9),
    dict(min_p=0.2),
    dict(top_k=9, top_p=0.8),
    dict(top_k=20, top_p=0.95, min_p=0.05),
    dict(),
]


@pytest.mark.on_device
@every_engine
def test_truncation_and_its_logprobs(kind: str) -> None:
    prompt = prompts((7,))[0]

    async def body(engine: Any) -> None:
        jobs = {
            f"{i} {seed}": (prompt, Sampling(max_tokens=8, temperature=t, seed=seed, **spec))
            for i, spec in enumerate(TRUNCATIONS)
            for seed in range(6)
            for t in (0.8 + 0.1 * seed,)
        }
        for name, c in (await generate_all(engine, jobs)).items():
            sampling = jobs[name][1]
            logits = hf_logits(np.concatenate([prompt, c.ids])).numpy()[len(prompt) - 1 : -1]
            expected = [processed(row, sampling)[token] for row, token in zip(logits, c.ids)]
            np.testing.assert_allclose(c.logprobs, expected, atol=close_to(1e-5), err_msg=str(sampling))

    with_engine(build(kind), body)


@pytest.mark.on_device
@every_engine
def test_a_seed_gives_its_tokens_whatever_the_batch(kind: str) -> None:
    rng = np.random.default_rng(5)
    jobs = {
        str(i): (rng.integers(0, VOCAB, rng.integers(1, 30)), Sampling(max_tokens=int(rng.integers(5, 25)), seed=i))
        for i in range(12)
    }

    def run(names: list[str], rows: int) -> dict[str, Completion]:
        engine = build(kind, max_concurrent_sequences=rows)
        return with_engine(engine, lambda e: generate_all(e, {n: jobs[n] for n in names}))

    base = run(list(jobs), 12)
    for names, rows in ((list(reversed(jobs)), 12), (list(jobs), 3), (["7"], 1), (["3", "7", "1"], 2)):
        for name, c in run(names, rows).items():
            assert c.ids.tolist() == base[name].ids.tolist()
            np.testing.assert_allclose(c.logprobs, base[name].logprobs, atol=close_to(1e-5))
    again = run(list(jobs), 12)
    assert all((again[n].logprobs == base[n].logprobs).all() for n in jobs), "the same calls give the same bits"


@every_engine
def test_samples_of_one_prompt_differ(kind: str) -> None:
    prompt = prompts((6,))[0]

    async def body(engine: Any) -> None:
        jobs = {str(i): (prompt, Sampling(max_tokens=10, seed=i)) for i in range(16)}
        assert len({tuple(c.ids) for c in (await generate_all(engine, jobs)).values()}) == 16

    with_engine(build(kind), body)


# ---- where a response ends -----------------------------------------------------------------------------------------

PIECES = ["", "a", "bc", "é", "<x>", "d", " e", "ff", "g\n", "h"]


def decode(ids: Any) -> str:
    return "".join(PIECES[i % len(PIECES)] for i in ids)


@pytest.mark.on_device
@every_engine
def test_eos_stop_ids_and_limits(kind: str) -> None:
    prompt = prompts((9,), seed=2)[0]
    full = hf_greedy(prompt, 30)
    eos = full[12]
    first = full.index(eos) + 1
    stop = full[5]
    prompt_with_eos = np.append(prompt, eos)  # an eos (or pad) id inside a prompt means nothing

    async def body(engine: Any) -> None:
        jobs = {
            "eos": (prompt, greedy(30)),
            "ignored": (prompt, greedy(30, ignore_eos=True)),
            "stop id": (prompt, greedy(30, ignore_eos=True, stop_token_ids=(stop, VOCAB + 5))),
            "both": (prompt, greedy(30, stop_token_ids=(eos,))),
            "ignored both": (prompt, greedy(30, ignore_eos=True, stop_token_ids=(eos,))),
            "one": (prompt, greedy(1, ignore_eos=True)),
            "on the limit": (prompt, greedy(first)),
            "inside": (prompt_with_eos, greedy(6, ignore_eos=True)),
        }
        done = {name: (c.ids.tolist(), c.stop_reason) for name, c in (await generate_all(engine, jobs)).items()}
        assert done == {
            "eos": (full[:first], "eos"),
            "ignored": (full, "length"),
            "stop id": (full[: full.index(stop) + 1], "stop"),
            "both": (full[:first], "eos"),
            "ignored both": (full[:first], "stop"),
            "one": (full[:1], "length"),
            "on the limit": (full[:first], "eos"),
            "inside": (hf_greedy(prompt_with_eos, 6), "length"),
        }

    with_engine(build(kind, eos_token_ids=[eos]), body)


@every_engine
def test_a_response_of_only_eos(kind: str) -> None:
    prompt = prompts((9,), seed=2)[0]

    async def body(engine: Any) -> None:
        c = await engine.generate(GenerateRequest("r", prompt, greedy(5)))
        assert (c.ids.tolist(), c.stop_reason, len(c.logprobs)) == (hf_greedy(prompt, 1), "eos", 1)

    with_engine(build(kind, eos_token_ids=hf_greedy(prompt, 1)), body)


@every_engine
def test_stop_strings_across_token_boundaries(kind: str) -> None:
    prompt = prompts((9,), seed=4)[0]
    full = hf_greedy(prompt, 40)
    text = decode(full)
    ends = np.cumsum([len(decode([i])) for i in full])
    # a string that starts inside one token and ends inside another
    stops = [text[a : a + n] for a in range(4, len(text) - 8, 5) for n in (1, 2, 4, 7)]

    async def body(engine: Any) -> None:
        jobs = {s + str(i): (prompt, greedy(40, stop=(s, "never"))) for i, s in enumerate(stops)}
        for (name, c), stop in zip((await generate_all(engine, jobs)).items(), stops):
            end = int(np.searchsorted(ends, text.index(stop) + len(stop))) + 1
            assert (c.ids.tolist(), c.stop_reason, c.stop) == (full[:end], "stop", stop), name
            assert len(c.logprobs) == end

    with_engine(build(kind, decode=decode), body)


@pytest.mark.on_device
@every_engine
def test_the_context_can_be_filled_to_its_last_token(kind: str) -> None:
    prompt = prompts((20,))[0]

    async def body(engine: Any) -> None:
        c = await engine.generate(GenerateRequest("full", prompt, greedy(100)))
        assert (c.stop_reason, c.ids.tolist()) == ("context_full", hf_greedy(prompt, 12))
        assert (await engine.generate(GenerateRequest("exact", prompt, greedy(12)))).stop_reason == "length"
        with pytest.raises(ValueError, match="leaves no room"):
            await engine.generate(GenerateRequest("long", prompts((32,))[0], greedy(1)))

    with_engine(build(kind, max_context_tokens=32), body)


# ---- control -------------------------------------------------------------------------------------------------------


@pytest.mark.on_device
@every_engine
@meets
def test_abort_returns_partial_tokens(kind: str) -> None:
    a, b, c = prompts((5, 6, 7))

    async def body(engine: Any) -> None:
        tasks = [
            asyncio.create_task(engine.generate(GenerateRequest(n, p, greedy(LONG)))) for n, p in zip("abc", (a, b, c))
        ]
        await until_sampled(engine, 8)
        still(tasks[0])
        assert await engine.abort(["a", "unknown"]) == 1
        first = await tasks[0]
        still(tasks[0])
        still(tasks[1])
        n = len(first.ids)
        assert first.stop_reason == "abort" and 0 < n < LONG and first.spans == ((0, 0, n),)
        assert not tasks[2].done() and await engine.abort() == 2  # c may still be waiting for a row
        assert first.ids.tolist() == hf_greedy(a, n) and len(first.logprobs) == n
        assert [t.stop_reason for t in await asyncio.gather(*tasks)] == ["abort"] * 3
        assert await engine.abort() == 0
        assert (await engine.generate(GenerateRequest("a", a, greedy(3)))).ids.tolist() == hf_greedy(a, 3)

    with_engine(build(kind, max_concurrent_sequences=2), body)


@every_engine
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@meets
def test_pause(kind: str, mode: str) -> None:
    a, b = prompts((5, 6))

    async def body(engine: Any) -> None:
        running = asyncio.create_task(
            engine.generate(GenerateRequest("a", a, greedy(LONG)))
        )  # long, also where the loop is kept waiting
        await until_sampled(engine, 3)
        await engine.pause(mode)
        if mode != "wait":
            still(running)
        sampled = stats_of(engine)["sampled_tokens"]
        late = asyncio.create_task(engine.generate(GenerateRequest("b", b, greedy(5))))
        await asyncio.sleep(0.02)
        assert stats_of(engine)["sampled_tokens"] == sampled and not late.done()
        assert running.done() == (mode != "keep")
        await engine.resume()
        assert (await late).ids.tolist() == hf_greedy(b, 5)
        c = await running
        assert c.ids.tolist() == hf_greedy(a, LONG)[: len(c.ids)]
        assert c.stop_reason == ("abort" if mode == "abort" else "length")

    with_engine(build(kind), body)


@pytest.mark.on_device
@every_engine
@meets
def test_update_in_flight_has_exact_spans(kind: str) -> None:
    """Tokens up to the switch are the old policy's; those after are the new one's, over the KV of the old."""
    prompt = prompts((9,))[0]
    old, new = reference(), reference(seed=1)

    async def body(engine: Any) -> Completion:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompt, greedy(LONG))))
        await until_sampled(engine, 5)
        assert await load(engine, Source(new, 1), on_inflight="keep") == engine.version == 1
        c = await task
        if len(c.spans) == 1:
            still(task)
        return c

    c = with_engine(build(kind), body, weights=Source(old, 0))
    (_, start, switch), (_, resumed, end) = c.spans
    assert [v for v, _, _ in c.spans] == [0, 1] and (start, end) == (0, LONG) and resumed == switch
    assert c.ids[:switch].tolist() == hf_greedy(prompt, LONG)[:switch]
    np.testing.assert_allclose(c.logprobs[:switch], hf_logprobs(prompt, c.ids, 1.0)[:switch], atol=close_to(1e-5))
    cache = DynamicCache()
    old(torch.from_numpy(np.concatenate([prompt, c.ids[: switch - 1]]))[None], past_key_values=cache)
    for i in range(switch, min(LONG, switch + 60)):
        logits = new(torch.tensor([[c.ids[i - 1]]]), past_key_values=cache).logits[0, -1]
        assert c.ids[i] == logits.argmax() and abs(c.logprobs[i] - torch.log_softmax(logits, -1).max()) < close_to(1e-5)


class Held(Source):
    """Read to its end when it may go on. whole: all tensors come."""

    def __init__(self, version: int, *, whole: bool = True) -> None:
        super().__init__(reference(seed=1), version)
        self.whole, self.reading, self.go = whole, threading.Event(), threading.Event()

    def tensors(self) -> Iterator[tuple[str, object]]:
        self.reading.set()
        assert self.go.wait(60), "nobody let it go on"
        yield from list(super().tensors())[: None if self.whole else -2]


@pytest.mark.parametrize("kind", ["native", "native-torch", "hf"])
def test_tokens_are_drawn_while_new_weights_are_read(kind: str) -> None:
    """By the old weights, which stay where the reading fails, or its caller gives up."""
    prompt = prompts((9,))[0]
    sources = broken, left, taken, late = Held(1, whole=False), Held(2), Held(3), Held(4)

    async def reads(engine: Any, source: Held) -> asyncio.Task[int]:
        task = asyncio.create_task(engine.load_weights(source, on_inflight="keep"))
        assert await asyncio.to_thread(source.reading.wait, 60)
        return task

    async def body(engine: Any) -> None:
        for source in (broken, left, taken):
            task = await reads(engine, source)
            c = await engine.generate(GenerateRequest("r", prompt, greedy(9)))
            assert c.ids.tolist() == hf_greedy(prompt, 9) and c.spans == ((0, 0, 9),) and not task.done()
            if source is left:
                task.cancel()
            source.go.set()
            await asyncio.wait({task})
            if source is broken:
                with pytest.raises(ValueError, match="weights do not fit the model: missing"):
                    task.result()
        assert task.result() == 3
        c = await engine.generate(GenerateRequest("r", prompt, greedy(9)))
        assert c.ids.tolist() == hf_greedy(prompt, 9, seed=1) and c.spans == ((3, 0, 9),)
        task = await reads(engine, late)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await task

    try:
        with_engine(build(kind), body)
    finally:
        for source in sources:
            source.go.set()


@every_engine
@pytest.mark.parametrize("mode", ["wait", "abort"])
@meets
def test_update_that_waits_or_aborts(kind: str, mode: str) -> None:
    prompt = prompts((9,))[0]

    async def body(engine: Any) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompt, greedy(LONG))))
        await until_sampled(engine, 5)
        update = asyncio.create_task(load(engine, Source(reference(seed=1), 4), on_inflight=mode))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(GenerateRequest("late", prompt, greedy(9))))
        assert await update == 4
        c = await task
        assert {v for v, _, _ in c.spans} == {0} and c.ids.tolist() == hf_greedy(prompt, LONG)[: len(c.ids)]
        assert (await late).spans == ((4, 0, 9),) and (await late).ids.tolist() == hf_greedy(prompt, 9, seed=1)
        if mode == "abort":
            still(task)
        assert c.stop_reason == ("length" if mode == "wait" else "abort")

    with_engine(build(kind), body)


@pytest.mark.on_device
@every_engine
def test_no_stale_prefix_after_an_update(kind: str) -> None:
    prompt = prompts((30,))[0]
    job = {str(i): (prompt, Sampling(max_tokens=8, seed=i)) for i in range(4)}

    async def body(engine: Any) -> dict[str, Completion]:
        await generate_all(engine, job)
        await load(engine, Source(reference(seed=1), 1))
        return await generate_all(engine, job)

    updated = with_engine(build(kind), body)
    fresh = with_engine(build(kind), lambda e: generate_all(e, job), weights=Source(reference(seed=1)))
    for name, c in updated.items():
        assert (c.ids == fresh[name].ids).all() and (c.logprobs == fresh[name].logprobs).all()
        assert c.spans == ((1, 0, 8),)
    assert updated["0"].cached_tokens == 0


@every_engine
def test_where_weights_do_not_fit_nothing_is_drawn_before_all_have_come(kind: str) -> None:
    """Neither by the old ones nor by what came of the new ones."""
    prompt = prompts((9,))[0]

    @dataclass
    class Broken(Source):
        version: int = 9

        def tensors(self) -> Iterator[tuple[str, object]]:
            for name, tensor in reference(seed=1).state_dict().items():
                if "layers.0.mlp.up_proj" in name:
                    yield name, tensor[:3]
                elif "layers.1.self_attn.k_proj" not in name:
                    yield name, tensor
            yield "model.layers.7.extra", torch.zeros(1)

    async def body(engine: Any) -> None:
        with pytest.raises(ValueError, match=r"k_proj.*unexpected.*layers\.7\.extra.*wrong shape.*up_proj"):
            await load(engine, Broken(reference()))
        with pytest.raises(ReplicaLost):
            await engine.generate(GenerateRequest("r", prompt, greedy(9)))
        if kind == "router":  # both are given up
            return
        await load(engine, Source(reference(seed=1), 9))
        c = await engine.generate(GenerateRequest("r", prompt, greedy(9)))
        assert c.ids.tolist() == hf_greedy(prompt, 9, seed=1) and c.spans == ((9, 0, 9),)

    with_engine(build(kind), body)


@pytest.mark.parametrize("kind", ["native", "native-torch", "hf"])
def test_who_asks_while_weights_come_waits_for_all_of_them(kind: str) -> None:
    """And hears of it where they do not come."""
    prompt, taken, broken = prompts((9,))[0], Held(1), Held(2, whole=False)

    async def body(engine: Any) -> None:
        for source in (taken, broken):
            update = asyncio.create_task(engine.load_weights(source, on_inflight="wait"))
            assert await asyncio.to_thread(source.reading.wait, 60)
            asked = asyncio.create_task(engine.generate(GenerateRequest(f"r{source.version}", prompt, greedy(9))))
            await asyncio.sleep(0.01)
            assert not asked.done()
            source.go.set()
            if source is taken:
                assert await update == 1 and (await asked).ids.tolist() == hf_greedy(prompt, 9, seed=1)
                continue
            with pytest.raises(ReplicaLost, match="not all of its new weights.*missing"):
                await asked
            with pytest.raises(ValueError, match="weights do not fit the model: missing"):
                await update

    try:
        with_engine(build(kind), body)
    finally:
        broken.go.set()
        taken.go.set()


@pytest.mark.parametrize(("kind", "model"), PAIRS)
def test_an_update_while_nothing_runs_takes_no_memory_of_its_own(kind: str, model: str) -> None:
    """It is written over the weights that were live, and gives the bits of an engine that had no others."""
    jobs = {str(i): (ids, Sampling(max_tokens=8, seed=i)) for i, ids in enumerate(prompts((9, 30)))}

    def addresses(engine: Any) -> list[int]:
        found = {id(t): t for one in replicas_of(engine) for t in held(one._runner)}
        return sorted(t.data_ptr() for t in found.values())

    def held(runner: Any) -> list[torch.Tensor]:
        if isinstance(runner, HfRunner):
            return list(runner._module.state_dict().values())
        if not isinstance(runner, NativeRunner) or not (weights := runner.model.live).destinations:
            return []  # its layout is made anew, as oneDNN's is: the old one is freed before
        return [weights.embed, *(to.into for to in weights.destinations.values())]

    async def body(engine: Any) -> dict[str, Completion]:
        await generate_all(engine, jobs)
        before = addresses(engine)
        await load(engine, Source(reference(model, seed=1), 1), on_inflight="wait")
        assert addresses(engine) == before
        return await generate_all(engine, jobs)

    updated = with_engine(build(kind, model), body, weights=Source(reference(model)))
    fresh = with_engine(build(kind, model), lambda e: generate_all(e, jobs), weights=Source(reference(model, seed=1)))
    for name, c in updated.items():
        assert (c.ids == fresh[name].ids).all() and (c.logprobs == fresh[name].logprobs).all()


@pytest.mark.on_device
@every_engine
def test_weights_are_a_snapshot(kind: str) -> None:
    """The trainer continues to change its parameters; the version in use must not change with them."""
    live = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())
    live.load_state_dict(reference().state_dict())
    prompt = prompts((9,))[0]

    async def body(engine: Any) -> None:
        with torch.no_grad():
            for parameter in live.parameters():
                parameter.mul_(0.5)
        assert (await engine.generate(GenerateRequest("r", prompt, greedy(9)))).ids.tolist() == hf_greedy(prompt, 9)

    with_engine(build(kind), body, weights=Source(live))


@pytest.mark.on_device
@every_engine
def test_sleep_and_wake(kind: str) -> None:
    prompt = prompts((9,))[0]

    async def body(engine: Any) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompt, greedy(60))))
        await until_sampled(engine, 5)
        assert await engine.sleep(1) > 0
        sampled = stats_of(engine)["sampled_tokens"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(GenerateRequest("w", prompt, greedy(5))), 0.02)
        assert stats_of(engine)["sampled_tokens"] == sampled
        expected = hf_logprobs(prompt[:1], prompt[1:], 1.0)
        np.testing.assert_allclose(await engine.score(prompt), expected, atol=close_to(1e-5))
        await engine.wake()
        c = await task  # its KV was dropped and recomputed on the way
        assert c.ids.tolist() == hf_greedy(prompt, 60) and c.stop_reason == "length"
        np.testing.assert_allclose(c.logprobs, hf_logprobs(prompt, c.ids, 1.0), atol=close_to(1e-5))

        assert await engine.sleep(2) >= sum(p.nbytes for p in reference().parameters())
        with pytest.raises(ValueError, match="no weights"):
            await engine.generate(GenerateRequest("n", prompt, greedy(5)))
        await engine.wake(("weights",))
        with pytest.raises(ValueError, match="no weights"):
            await engine.score(prompt)
        await load(engine, Source(reference(seed=1), 1))
        late = asyncio.create_task(engine.generate(GenerateRequest("l", prompt, greedy(5))))
        await asyncio.sleep(0.01)
        assert not late.done()
        await engine.wake(("kv",))
        assert (await late).ids.tolist() == hf_greedy(prompt, 5, seed=1)

    with_engine(build(kind), body)


@every_engine
@meets
def test_what_cannot_finish_is_not_waited_for(kind: str) -> None:
    async def body(engine: Any) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompts((5,))[0], greedy(LONG))))
        await until_sampled(engine, 3)
        await engine.pause("keep")
        still(task)
        with pytest.raises(ValueError, match="stand still"):
            await load(engine, Source(reference(seed=1), 1), on_inflight="wait")
        assert engine.version == 0 and await engine.abort() == 1
        assert (await task).stop_reason == "abort"
        assert await load(engine, Source(reference(seed=1), 1), on_inflight="wait") == 1

    with_engine(build(kind), body)


@every_engine
def test_cancelled_callers_free_their_rows(kind: str) -> None:
    a, b = prompts((5, 6))

    async def body(engine: Any) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.gather(*[engine.generate(GenerateRequest(str(i), a, greedy(LONG))) for i in range(4)])
        assert (await engine.generate(GenerateRequest("0", b, greedy(6)))).ids.tolist() == hf_greedy(
            b, 6
        )  # the id is free again
        # another replica may need a step more
        while stats_of(engine)["resident"] or stats_of(engine)["waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)

    with_engine(build(kind, max_concurrent_sequences=2), body)


@every_engine
@meets
def test_an_answer_does_not_wait_for_the_longer_ones(kind: str) -> None:
    """The engine is not called meanwhile: it delivers ended answers by itself, and continues."""
    a, b = prompts((5, 6))
    expected = hf_greedy(b, 6)

    async def body(engine: Any) -> None:
        long = asyncio.create_task(engine.generate(GenerateRequest("long", a, greedy(LONG))))
        short = asyncio.create_task(engine.generate(GenerateRequest("short", b, greedy(6))))
        found = await short
        ahead, resident = not long.done(), stats_of(engine)["resident"]
        assert found.ids.tolist() == expected and len((await long).ids) == LONG
        # with two replicas it runs on the other one, which may not have begun
        if not (ahead and (kind == "router" or resident == 1)):
            still(long)
        assert ahead and (kind == "router" or resident == 1)

    with_engine(build(kind), body)


@every_engine
def test_a_closed_engine_stops_at_the_next_step(kind: str) -> None:
    async def run() -> int:
        engine = build(kind)
        await load(engine, Source(reference()))
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompts((5,))[0], greedy(LONG))))
        await until_sampled(engine, 3)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await task
        for one in replicas_of(engine):
            await asyncio.get_running_loop().run_in_executor(None, functools.partial(one._thread.shutdown, wait=True))
        return stats_of(engine)["sampled_tokens"]

    assert asyncio.run(asyncio.wait_for(run(), 30)) < LONG


@every_engine
@meets
def test_a_cancelled_wait_is_given_up(kind: str) -> None:
    prompt = prompts((5,))[0]

    async def body(engine: Any) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompt, greedy(LONG))))
        await until_sampled(engine, 3)
        for wait in (lambda: engine.pause("wait"), lambda: load(engine, Source(reference(seed=1), 1))):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wait(), 0.005)
                still(task)
                raise AssertionError("it did not wait for the request that runs")
        assert (await task).spans == ((0, 0, LONG),) and engine.version == 0
        assert (
            await engine.generate(GenerateRequest("s", prompt, greedy(2)))
        ).stop_reason == "length"  # neither paused nor updated

    with_engine(build(kind), body)


@every_engine
def test_a_failure_reaches_every_caller(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*args: object) -> None:
        raise MemoryError("the cause")

    async def body(engine: Any) -> None:
        tasks = [
            asyncio.create_task(engine.generate(GenerateRequest(str(i), prompts((5,))[0], greedy(LONG))))
            for i in range(3)
        ]
        await until_sampled(engine, 9)
        for one in replicas_of(engine):
            monkeypatch.setattr(one._runner, "decode", boom)
        for task in tasks:
            with pytest.raises(RuntimeError, match="the cause") as caught:
                await task
            cause = caught.value.__cause__.__cause__ if isinstance(engine, Router) else caught.value.__cause__
            assert isinstance(cause, MemoryError)
        for call in (
            engine.generate(GenerateRequest("n", prompts((5,))[0], greedy(4))),
            engine.score(prompts((5,))[0]),
        ):
            with pytest.raises(ReplicaLost, match="the cause"):
                await call

    with_engine(build(kind), body)


@every_engine
def test_a_failure_while_draining_reaches_the_waiter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*args: object) -> None:
        raise MemoryError("the cause")

    async def body(engine: Any) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompts((5,))[0], greedy(LONG))))
        await until_sampled(engine, 3)
        update = asyncio.create_task(load(engine, Source(reference(), 1)))
        await asyncio.sleep(0)
        for one in replicas_of(engine):
            monkeypatch.setattr(one._runner, "decode", boom)
        for waiter in (task, update):
            with pytest.raises(RuntimeError, match="the cause"):
                await waiter

    with_engine(build(kind), body)


@pytest.mark.on_device
@every_engine
def test_non_finite_weights_stop_the_engine(kind: str) -> None:
    broken = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))

    async def body(engine: Any) -> None:
        with pytest.raises(RuntimeError, match="non-finite logits"):
            await engine.generate(GenerateRequest("r", prompts((5,))[0], Sampling(max_tokens=3)))

    with_engine(build(kind), body, weights=Source(broken, 3))


@every_engine
def test_user_faults(kind: str) -> None:
    prompt = prompts((5,))[0]

    async def body(engine: Any) -> None:
        await engine.pause("keep")  # so that it still runs when the last of them gets a request
        running = asyncio.create_task(engine.generate(GenerateRequest("r", prompt, greedy(300))))
        await asyncio.sleep(0)
        for call, message in (
            (engine.generate(GenerateRequest("r", prompt, greedy(2))), "already running"),
            (engine.generate(GenerateRequest("e", prompt[:0], greedy(2))), "0 tokens"),
            (engine.generate(GenerateRequest("v", np.array([1, VOCAB]), greedy(2))), "vocabulary"),
            (engine.generate(GenerateRequest("n", np.array([-1]), greedy(2))), "vocabulary"),
            (engine.generate(GenerateRequest("d", prompt[None], greedy(2))), "shape"),
            (engine.generate(GenerateRequest("s", prompt, greedy(2, stop=("x",)))), "decode="),
            (engine.score(np.arange(600) % VOCAB), "max_context_tokens"),
            (engine.score(prompt, temperature=-1.0), "temperature"),
            (engine.sleep(3), "level"),
            (engine.wake(("cache",)), "cache"),
            (engine.pause("soon"), "soon"),
            (engine.generate(GenerateRequest("m", prompt, greedy(2), media=("ab12",))), "takes no media; remove them"),
            (
                engine.generate(GenerateRequest("l", prompt, greedy(2), parameters="math")),
                "adapter='math'.*loads no adapters|no LoRA set 'math' is live|no replica has a LoRA set 'math'",
            ),
            (engine.score(prompt, media=("ab12",)), "takes no media"),
            (
                engine.score(prompt, parameters="math"),
                "loads no adapters|no LoRA set 'math' is live|no replica has a LoRA set 'math'",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                await call
        assert await engine.abort() == 1
        assert (await running).stop_reason == "abort"

    with_engine(build(kind), body)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        build(kind, max_context_tokens=513)
    with pytest.raises(ValueError, match="max_concurrent_sequences=0"):
        build(kind, max_concurrent_sequences=0)


@every_engine
def test_nothing_before_the_first_weights_nor_after_close(kind: str) -> None:
    async def run() -> None:
        engine = build(kind)
        with pytest.raises(ValueError, match="no weights"):
            await engine.generate(GenerateRequest("r", prompts((5,))[0], greedy(2)))
        await load(engine, Source(reference()))
        able = await engine.capabilities()
        assert (able.logprobs, able.max_context_tokens, able.sleep_levels) == ("processed", 512, (1, 2))
        assert able.in_flight_update and not able.media and bool(able.lora_rank) == (kind in ADAPTING)
        assert able.prefix_cache == (kind != "hf")
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompts((5,))[0], greedy(LONG))))
        await until_sampled(engine, 3)
        await engine.close()
        for call in (task, engine.generate(GenerateRequest("n", prompts((5,))[0], greedy(2))), engine.resume()):
            with pytest.raises(RuntimeError, match="closed"):
                await call

    asyncio.run(asyncio.wait_for(run(), 30))


@every_engine
def test_one_engine_over_several_event_loops(kind: str) -> None:
    """A script calls asyncio.run more than once; a loop that ends mid-way leaves nothing behind."""
    engine, prompt = build(kind), prompts((5,))[0]

    async def left_behind() -> None:
        await load(engine, Source(reference()))
        for i in range(3):
            asyncio.get_running_loop().create_task(engine.generate(GenerateRequest(f"gone {i}", prompt, greedy(LONG))))
        await until_sampled(engine, 3)

    async def after() -> list[Completion]:
        try:
            return await asyncio.gather(
                *(engine.generate(GenerateRequest(f"gone {i}", prompt, greedy(7))) for i in range(2))
            )
        finally:
            await engine.close()

    asyncio.run(left_behind())
    assert all(c.ids.tolist() == hf_greedy(prompt, 7) for c in asyncio.run(after()))
    assert (stats_of(engine)["resident"], stats_of(engine)["waiting"]) == (0, 0)


# ---- random schedules ----------------------------------------------------------------------------------------------


@every_engine
@matrix("seed", range(4))
def test_random_schedules_lose_and_double_nothing(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = prompts((3, 5, 8, 20, 33), seed=seed)
    outcomes: dict[str, str] = {}
    stop = False

    async def caller(engine: Any, name: str) -> None:
        await asyncio.sleep(rng.random() * 0.06)
        sampling = Sampling(
            max_tokens=int(rng.integers(1, 25)),
            seed=int(rng.integers(99)),
            stop=("bc",) * int(rng.integers(2)),
            temperature=float(rng.choice([0.0, 1.0])),
            top_k=int(rng.choice([0, 5])),
        )
        prompt = pool[rng.integers(len(pool))]
        try:
            async with asyncio.timeout(0.02 if rng.random() < 0.15 else 30):
                c = await engine.generate(GenerateRequest(name, prompt, sampling))
        except TimeoutError:
            outcomes[name] = "cancelled"
            return
        assert name not in outcomes and c.request_id == name
        outcomes[name] = c.stop_reason
        covered = [i for _, a, b in c.spans for i in range(a, b)]
        assert covered == list(range(len(c.ids))) and len(c.logprobs) == len(c.ids) <= sampling.max_tokens
        assert (c.logprobs <= 0).all() and [v for v, _, _ in c.spans] == sorted(v for v, _, _ in c.spans)
        assert (c.stop_reason == "length") <= (len(c.ids) == sampling.max_tokens)

    async def meddler(engine: Any) -> None:
        version = 0
        while not stop:
            await asyncio.sleep(rng.random() * 0.02)
            match rng.integers(6):
                case 0:
                    await engine.abort([str(i) for i in rng.integers(0, 30, 4)])
                case 1:
                    await engine.pause("keep" if rng.random() < 0.5 else "wait")
                    await asyncio.sleep(0.002)
                    await engine.resume()
                case 2:
                    version += 1
                    mode = ("keep", "wait", "abort")[rng.integers(3)]
                    assert await load(engine, Source(reference(), version), on_inflight=mode) == version
                case 3:
                    await engine.sleep(1)
                    await engine.wake()
                case 4:
                    await engine.score(pool[0])

    async def body(engine: Any) -> None:
        nonlocal stop
        meddling = asyncio.create_task(meddler(engine))
        await asyncio.gather(*[caller(engine, str(i)) for i in range(30)])
        stop = True
        await meddling
        assert len(outcomes) == 30
        await engine.resume()
        assert (await engine.generate(GenerateRequest("last", pool[0], greedy(4)))).ids.tolist() == hf_greedy(
            pool[0], 4
        )
        stats = stats_of(engine)
        assert (stats["resident"], stats["waiting"]) == (0, 0)
        assert not any(unfinished(one) for one in replicas_of(engine))

    with_engine(build(kind, max_concurrent_sequences=6, max_prefill_tokens=40, decode=decode), body)


# ---- the router ----------------------------------------------------------------------------------------------------


class Replica(BaseEngine):
    """Answers when the test calls it; its requests are in `running`."""

    def __init__(self, **able: Any) -> None:
        self.able = Capabilities(**{"logprobs": "processed", "max_context_tokens": 100, "sleep_levels": (1, 2), **able})
        self.running: dict[str, asyncio.Future[Completion]] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        self.running[request.id] = asyncio.get_running_loop().create_future()
        return await self.running[request.id]

    async def abort(self, request_ids: Any = None) -> int:
        names = list(self.running) if request_ids is None else request_ids
        for name in names:
            self.running.pop(name).set_result(Completion(name, np.zeros(0, np.int64), np.zeros(0), (), "abort"))
        return len(names)

    async def capabilities(self) -> Capabilities:
        return self.able


def over(*engines: Any, restarts: int = 0, note: Any = print) -> Router:
    """A router before these, of which each new start is the same one."""
    return Router([lambda died, engine=engine: engine for engine in engines], restarts=restarts, note=note)


def test_the_router_spreads_by_load_and_keeps_a_prefix_key_together_within_a_bound() -> None:
    async def run() -> None:
        a, b, c = replicas = [Replica() for _ in range(3)]
        router = over(*replicas)

        async def send(*names: str, key: str | None = None) -> list[int]:
            for name in names:
                tasks.append(
                    asyncio.create_task(router.generate(GenerateRequest(name, np.arange(3), greedy(2), prefix_key=key)))
                )
                await asyncio.sleep(0)
            return [len(replica.running) for replica in replicas]

        tasks: list[asyncio.Task[Completion]] = []
        assert await send("1", "2", "3", "4") == [2, 1, 1]  # no key: the least loaded, the first of equals
        assert await send(*(f"g{i}" for i in range(MAX_LEAD + 1)), key="g") == [2, 2 + MAX_LEAD, 1]
        assert await send("over", key="g") == [2, 2 + MAX_LEAD, 2], "its replica is too far ahead: another one"
        assert await send("there", key="g") == [2, 2 + MAX_LEAD, 3], "which is now the key's"
        with pytest.raises(ValueError, match="already running"):
            await router.generate(GenerateRequest("over", np.arange(3), greedy(2)))
        assert await router.abort(["g3", "1", "unknown"]) == 2 and "g3" not in b.running and "1" not in a.running
        assert await send("5", "6") == [3, 1 + MAX_LEAD, 3], "what has ended is no load"
        assert await router.abort() == len(tasks) - 2
        assert {(await task).stop_reason for task in tasks} == {"abort"}
        assert router._running == {} and router._load == [0, 0, 0] and c.running == {}

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_router_can_do_what_all_replicas_can() -> None:
    async def run() -> None:
        full = Replica(lora_rank=8, media=True, prefix_cache=True, in_flight_update=True, notes=("a", "b"))
        part = Replica(lora_rank=8, sleep_levels=(1,), max_context_tokens=50, notes=("b", "c"))
        differ = (
            "rollout: replicas differ, what all of them can do is used: prefix_cache (True, False); media "
            "(True, False); in_flight_update (True, False); max_context_tokens (100, 50); sleep_levels ((1, 2), (1,))"
        )
        assert await over(full, part).capabilities() == Capabilities(
            logprobs="processed", max_context_tokens=50, lora_rank=8, sleep_levels=(1,), notes=(differ, "a", "b", "c")
        )
        assert (await over(full, full).capabilities()).notes == ("a", "b")
        with pytest.raises(ValueError, match="replicas return processed and raw log-probs"):
            await over(full, Replica(logprobs="raw")).capabilities()
        with pytest.raises(ValueError, match="publish to each of its replicas"):
            await over(full).load_weights(Source(reference()))

    asyncio.run(run())
