"""Rollout of models that read images: every request has the log-probs of transformers' own forward pass."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from rollouts import context_of, finish, native_core, source_of
from vision import GRIDS, KINDS, model, own_logprobs, pictures, seen

from verl.batch import pack
from verl.media_tokens import Picture
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.multimodal import with_pictures
from verl.rollout import hf
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.features import EncodedImages, Features
from verl.rollout.embedded.front import EmbeddedEngine
from verl.rollout.embedded.images import ImageReader
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.rollout.native.runner import NativeRunner
from verl.types import Medium, Sample, Sampling, Segment

TEXTS = [np.random.default_rng(i).integers(0, 58, n) for i, n in enumerate((3, 40, 17))]


@cache
def made(kind: str) -> Any:
    """Return a model in which biases and norms have an effect."""
    module = model(kind).eval().requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, parameter in module.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def core_of(kind: str, **options: Any) -> EngineCore:
    return native_core(made(kind).config, source_of(made(kind)), max_context_tokens=128, **options)


def sampling(seed: int = 0, tokens: int = 12) -> Sampling:
    return Sampling(max_tokens=tokens, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_has_the_logprobs_of_transformers(kind: str, compiled: bool) -> None:
    core = core_of(kind, compiled=compiled)
    requests = [ActiveRequest(GenerateRequest(str(i), ids, sampling(i))) for i, ids in enumerate(TEXTS)]
    for name, answer in finish(core, requests).items():
        ids = np.concatenate([TEXTS[int(name)], answer.ids])
        logits = made(kind)(input_ids=torch.from_numpy(ids)[None]).logits[0]
        expected = logits.log_softmax(-1)[len(TEXTS[int(name)]) - 1 : -1].gather(
            1, torch.from_numpy(answer.ids)[:, None]
        )
        np.testing.assert_allclose(answer.logprobs, expected[:, 0].numpy(), rtol=0, atol=1e-5)
        scored = core.runner.score(ids, 1.0).logprobs[-len(answer.ids) :]
        np.testing.assert_allclose(scored, expected[:, 0].numpy(), rtol=0, atol=1e-5)


def native(kind: str, prefill: int = 8192, **rest: Any) -> EmbeddedEngine:
    options = Options(max_prefill_tokens=prefill)
    return build(options, context_of(made(kind).config, max_context_tokens=128, pictures=Content()), **rest)


def in_hf(kind: str) -> EmbeddedEngine:
    return hf.build(
        hf.Options(), context_of(made(kind).config, max_context_tokens=128, pictures=Content()), max_prefill_tokens=64
    )


def in_pages(kind: str) -> EmbeddedEngine:
    context = context_of(made(kind).config, max_context_tokens=128, pictures=Content())
    return EmbeddedEngine(NativeRunner(Options(), context, lanes=1, paged=True), context, prefix_cache=True, notes=())


ENGINES: dict[str, Callable[[str], EmbeddedEngine]] = {
    "compiled": native,
    "plain torch": partial(native, compiled=False),
    "passes that end inside an image": partial(native, prefill=5),
    "in pages": in_pages,
    "hf": in_hf,
}


class Content:
    """The images of `pictures`, as an engine reads them."""

    def of(self, names: Iterable[str]) -> dict[str, Picture]:
        content = pictures()
        if missing := {*names} - {*content}:
            raise ValueError(f"no image {missing}")
        return {name: content[name] for name in names}


def requests(prompts: list[Segment], samples: int = 3) -> list[GenerateRequest]:
    """Return several requests for each prompt."""
    every = [(i, j) for i in range(len(prompts)) for j in range(samples)]
    return [
        GenerateRequest(f"{i}/{j}", prompts[i].ids, sampling(samples * i + j), media=prompts[i].media) for i, j in every
    ]


async def answered(engine: EmbeddedEngine, given: list[GenerateRequest]) -> list[Completion]:
    return list(await asyncio.gather(*map(engine.generate, given)))


def rows_of(given: list[GenerateRequest], answers: list[Completion]) -> list[Sample]:
    """Return the samples of a trainer."""
    made = []
    for request, answer in zip(given, answers, strict=True):
        prompt = Segment(ids=request.prompt_ids, source="prompt", media=request.media)
        sampled = Segment(ids=answer.ids, source="sampled", logprobs=answer.logprobs, version=0)
        names = {"sample_id": request.id, "trajectory_id": request.id, "group_id": request.id}
        made.append(Sample(**names, purpose="train", segments=(prompt, sampled)))
    return made


def check(rows: list[Sample], module: Any) -> None:
    """Compare the log-probs of rows with those of transformers."""
    module = copy.deepcopy(module)
    for row in rows:
        own = own_logprobs(module, row, pictures()).detach().numpy()
        np.testing.assert_allclose(row.segments[1].logprobs, own, rtol=0, atol=1e-5, err_msg=row.sample_id)


PROMPTS = [seen([4, 5], "fox", "cat", "dog"), seen([1, 2, 3], "cat"), seen([6, 7, 8])]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_images_have_the_logprobs_of_transformers_and_of_the_trainer(kind: str, engine: str) -> None:
    """A group reads its images and its prompt once."""

    async def run() -> None:
        made_of = ENGINES[engine](kind)
        await made_of.load_weights(source_of(made(kind)))
        given = requests(PROMPTS)
        answers = await answered(made_of, given)
        rows, counts = rows_of(given, answers), made_of.stats()
        check(rows, made(kind))
        if engine != "hf":
            assert counts["prefill_tokens"] == sum(len(prompt.ids) for prompt in PROMPTS)
            assert counts["encoded_images"] == len(GRIDS)
        batch = with_pictures(pack(rows), pictures(), made(kind).config)
        trainer = TorchEngine(copy.deepcopy(made(kind)), EngineSettings(dtype="float32"))
        expected = trainer.infer(batch, ("logprobs",))["logprobs"].numpy()
        np.testing.assert_allclose(np.concatenate([row.segments[1].logprobs for row in rows]), expected, atol=1e-5)
        whole = np.concatenate([given[0].prompt_ids, answers[0].ids])
        scores = await made_of.score(whole, media=given[0].media)
        np.testing.assert_allclose(scores[-len(answers[0].ids) :], answers[0].logprobs, rtol=0, atol=1e-5)
        await made_of.close()

    asyncio.run(run())


@pytest.mark.parametrize("engine", ["compiled", "hf"])
def test_equal_ids_of_other_images_share_nothing_and_an_update_encodes_again(engine: str) -> None:
    """The ids of two images with six tokens each are equal. A continued prompt takes the KV of its beginning."""
    given = requests([seen([1, *range(2, 20)], name) for name in ("cat", "fox")])
    assert np.array_equal(given[0].prompt_ids, given[-1].prompt_ids)

    async def run() -> None:
        made_of, newer = ENGINES[engine]("qwen3_vl"), copy.deepcopy(made("qwen3_vl"))
        await made_of.load_weights(source_of(made("qwen3_vl")))
        first = await answered(made_of, given)
        check(rows_of(given, first), made("qwen3_vl"))
        assert not np.array_equal(first[0].logprobs[:1], first[3].logprobs[:1])
        longer = replace(given[0], prompt_ids=np.concatenate([given[0].prompt_ids, first[0].ids]))
        check(rows_of([longer], await answered(made_of, [longer])), made("qwen3_vl"))
        if engine == "compiled":
            assert made_of.stats()["reused_tokens"] == len(given[0].prompt_ids)
        for mode in ("wait", "keep"):  # over the live weights, and beside them
            for parameter in newer.model.visual.parameters():
                parameter.mul_(1.5)
            await made_of.load_weights(source_of(newer, 1), on_inflight=mode)
            check(rows_of(given, await answered(made_of, given)), newer)
        if engine == "compiled":
            assert made_of.stats()["encoded_images"] == 6
        await made_of.close()

    asyncio.run(run())


def test_images_that_do_not_fit_are_refused_and_the_engine_goes_on() -> None:
    one = seen([1, 2, 3], "cat")
    cases = [
        ((Medium("cat", 2, 4),), "r: image cat has 6 tokens by its size, and 4 placeholders"),
        ((Medium("cat", 8, 6),), "r: Medium.*within the 11 tokens"),
        ((Medium("owl", 2, 6),), "r: no image {'owl'}"),
    ]

    async def run() -> None:
        engine = native("qwen2_vl")
        await engine.load_weights(source_of(made("qwen2_vl")))
        able = await engine.capabilities()
        assert able.media and able.lora_rank
        for media, line in cases:
            with pytest.raises(ValueError, match=line):
                await engine.generate(GenerateRequest("r", one.ids, sampling(), media=media))
        given = requests([one], 1)
        check(rows_of(given, await answered(engine, given)), made("qwen2_vl"))
        blind = build(Options(), context_of(made("qwen2_vl").config, max_context_tokens=128))
        with pytest.raises(ValueError, match="0/0: 1 media, but this rollout engine takes no media"):
            await blind.generate(given[0])
        for each in (engine, blind):
            await each.close()

    asyncio.run(run())


def test_features_are_kept_within_a_budget() -> None:
    encoded = list[Picture]()

    def encode(image: Picture) -> Features:
        encoded.append(image)
        return Features(torch.zeros(image.grid[1] * image.grid[2] // 4, 32), ())

    kept = EncodedImages(encode, max_bytes=12 * 32 * 4)
    reader = ImageReader(context_of(made("qwen2_vl").config, pictures=Content()))

    def encoded_until(name: str) -> int:
        prompt = seen([1, 2], name)
        images = reader.of("r", prompt.ids, prompt.media)
        assert images is not None and len(kept.seen(images, len(prompt.ids)).where) == prompt.media[0].tokens
        assert kept.nbytes <= 12 * 32 * 4
        return len(encoded)

    assert [encoded_until(name) for name in ("cat", "fox", "cat", "dog", "cat", "fox")] == [1, 2, 2, 3, 3, 4]
