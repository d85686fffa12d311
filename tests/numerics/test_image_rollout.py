"""Answers to prompts with images: the hf engine samples from the distribution that the trainer computes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollouts import context_of, source_of
from transformers import AutoModelForImageTextToText
from vision import GRIDS, IMAGE, KINDS, image_folder, png, seen

from verl.batch import pack
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.pictures import Pictures
from verl.rollout import hf
from verl.rollout.base import Completion, GenerateRequest
from verl.transfer_queue.media import MemoryMedia
from verl.types import Medium, Sample, Sampling, Segment


class World:
    """A folder, its model, a store with the images of `GRIDS`, and an engine."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.store = image_folder(folder, kind), MemoryMedia()
        sizes = enumerate(GRIDS.items())
        self.names = {name: self.store.put(png(g[2] * 2, g[1] * 2, seed), "test") for seed, (name, g) in sizes}
        self.model = AutoModelForImageTextToText.from_pretrained(self.folder)
        self.pictures = Pictures(self.folder, self.store)

    def engine(self, **given: Any) -> Any:
        context = context_of(self.model.config, **{"max_context_tokens": 100, "pictures": self.pictures, **given})
        return hf.build(hf.Options(), context)

    def prompt(self, text: list[int], *names: str) -> Segment:
        prompt = seen(text, *names)
        return replace(prompt, media=tuple(m._replace(reference=self.names[m.reference]) for m in prompt.media))


def request(name: str, prompt: Segment, tokens: int, seed: int = 0) -> GenerateRequest:
    sampling = Sampling(max_tokens=tokens, temperature=0.9, seed=seed, ignore_eos=True)
    return GenerateRequest(name, prompt.ids, sampling, media=prompt.media)


async def answers(engine: Any, model: Any, requests: list[GenerateRequest]) -> list[Completion]:
    await engine.load_weights(source_of(model))
    return await asyncio.gather(*map(engine.generate, requests))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_has_the_logprobs_of_the_trainer(kind: str, tmp_path: Path) -> None:
    """Rows of unlike length, the same image twice, and rows that end before others."""
    world = World(tmp_path, kind)
    one, three, text = world.prompt([1, 2, 3], "cat"), world.prompt([4, 5], "fox", "cat", "dog"), world.prompt([6, 7])
    ends = world.prompt([8], "dog")
    prompts = [one, one, text, three, replace(ends, ids=ends.ids[:-1])]  # the last one ends with its image
    encoded = list[int]()
    engine = world.engine()

    async def main() -> list[Completion]:
        await engine.load_weights(source_of(world.model))
        tower = engine._runner._module.model.visual
        tower.register_forward_pre_hook(lambda _, args, given: encoded.append(len(given["grid_thw"])), with_kwargs=True)
        requests = [request(str(i), p, tokens=9 - 2 * (i % 3), seed=i) for i, p in enumerate(prompts)]
        found = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        return found

    found = asyncio.run(main())
    assert sum(encoded) <= 3 + len(encoded) - 1, "each image once, however many prompts of a batch have it"
    samples = [
        Sample(
            sample_id=str(i),
            trajectory_id=str(i),
            group_id="g",
            purpose="train",
            temperature=0.9,
            segments=(p, Segment(ids=c.ids, source="sampled", logprobs=c.logprobs, version=0)),
        )
        for i, (p, c) in enumerate(zip(prompts, found, strict=True))
    ]
    trainer = TorchEngine(world.model, EngineSettings(dtype="float32", pictures=world.pictures))
    batch = pack(samples)
    own = trainer.infer(batch, ("logprobs",))["logprobs"]
    assert (own - batch.columns["rollout_logprobs"]).abs().max() < 1e-5
    assert [len(c.ids) for c in found] == [9, 7, 5, 9, 7]


def test_requests_with_images_that_cannot_be_answered_are_refused_alone(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen2_5_vl")
    good, lost = world.prompt([1, 2], "cat"), "0" * 32
    broken = world.store.put(b"GIF89a", "test")
    cut = replace(good, media=(Medium(world.names["cat"], 3, 5),))
    wrong = [
        (replace(good, media=(good.media[0]._replace(reference=lost),)), "no content in this store"),
        (replace(good, media=(good.media[0]._replace(reference=broken),)), f"image {broken}: 6 bytes are no image"),
        (cut, "has 6 tokens by its size, and 5 placeholders"),
    ]
    engine = world.engine()

    async def main() -> None:
        (first,) = await answers(engine, world.model, [request("a", good, 3)])
        for i, (prompt, line) in enumerate(wrong):
            with pytest.raises(ValueError, match=line):
                await engine.generate(request(f"w{i}", prompt, 3))
        outside = GenerateRequest("o", good.ids[:4], Sampling(max_tokens=3), media=good.media)
        with pytest.raises(ValueError, match="media are in order, apart, and whole within the 4 tokens"):
            await engine.generate(outside)
        again = await engine.generate(request("b", good, 3))
        assert np.array_equal(again.ids, first.ids) and (await engine.capabilities()).media
        plain = world.engine(pictures=None)
        with pytest.raises(ValueError, match="this rollout engine takes no media"):
            await plain.generate(request("c", good, 3))
        typed = replace(good, media=())  # placeholder ids without an image are text
        assert (await engine.generate(request("d", typed, 3))).ids.shape == (3,) and IMAGE in typed.ids
        await engine.close()

    asyncio.run(main())
