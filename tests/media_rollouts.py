"""Rollouts of models that read videos or sounds, compared with transformers and with the trainer."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rollouts import context_of, source_of
from torch import Tensor

from verl.batch import pack
from verl.media_tokens import Picture
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.families import banned_ids
from verl.models.multimodal import with_pictures
from verl.rollout import hf
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.types import Sample, Sampling, Segment


@dataclass(frozen=True)
class Content:
    """Media by their names, as an engine reads them."""

    pictures: Mapping[str, Picture]

    def of(self, names: Iterable[str]) -> dict[str, Picture]:
        return {name: self.pictures[name] for name in names}


class Rollout(NamedTuple):
    """What an engine reports after it has sampled."""

    notes: Sequence[str]
    stats: Mapping[str, int]


def compare_rollouts(
    engine: str,
    module: Any,
    pictures: Mapping[str, Picture],
    prompts: Sequence[Segment],
    own_logprobs: Callable[[Any, Sample, tuple[int, ...]], Tensor],
) -> Rollout:
    """Sample two answers to each prompt, and compare their log-probs with those of the trainer and of transformers; no
    placeholder is sampled. engine: `native`, `hf`, or anything else for native passes of five tokens · own_logprobs:
    (model, row, banned ids) -> those of transformers"""
    config, banned = module.config, banned_ids(module.config)
    given = [
        GenerateRequest(
            f"{i}/{j}",
            prompt.ids,
            Sampling(max_tokens=8, seed=2 * i + j, ignore_eos=True, banned=banned),
            media=prompt.media,
        )
        for i, prompt in enumerate(prompts)
        for j in range(2)
    ]
    answers, found = asyncio.run(_sampled(engine, module, pictures, given))
    samples, alone = list[Sample](), copy.deepcopy(module)
    for request, answer in zip(given, answers, strict=True):
        segments = (
            Segment(ids=request.prompt_ids, source="prompt", media=request.media),
            Segment(ids=answer.ids, source="sampled", logprobs=answer.logprobs, version=0),
        )
        names = {"sample_id": request.id, "trajectory_id": request.id, "group_id": request.id}
        samples.append(Sample(**names, purpose="train", segments=segments, banned=True))
        assert not {*banned} & {*answer.ids.tolist()}
    trainer = TorchEngine(copy.deepcopy(module), EngineSettings(dtype="float32", banned=banned))
    batch = with_pictures(pack(samples), pictures, config)
    logprobs = np.concatenate([sample.segments[1].logprobs for sample in samples])  # type: ignore[misc]
    np.testing.assert_allclose(logprobs, trainer.infer(batch, ("logprobs",))["logprobs"].numpy(), atol=1e-5)
    for sample in samples:
        own = own_logprobs(alone, sample, banned).detach().numpy()
        np.testing.assert_allclose(sample.segments[1].logprobs, own, rtol=0, atol=1e-5)
    return found


async def _sampled(
    engine: str, module: Any, pictures: Mapping[str, Picture], given: Sequence[GenerateRequest]
) -> tuple[list[Completion], Rollout]:
    context = context_of(module.config, max_context_tokens=128, pictures=Content(pictures))
    if engine == "hf":
        rollout = hf.build(hf.Options(), context, max_prefill_tokens=64)
    else:
        rollout = build(Options(max_prefill_tokens=8192 if engine == "native" else 5), context)
    notes = (await rollout.capabilities()).notes
    await rollout.load_weights(source_of(module))
    answers = await asyncio.gather(*map(rollout.generate, given))
    stats = rollout.stats()
    await rollout.close()
    return answers, Rollout(notes, stats)
