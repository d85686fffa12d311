"""Training of models that read images, measured beside its limits.

    python bench/vlm.py [part ...] [--size 5M] [--threads 1] [--record]

Each part is a function that returns its rows; each number is printed beside its limit. group: eight answers to a prompt
with one image of 1,000 tokens, in the update and in the prefill of a rollout, against the same answers with an image
and a prompt of their own each; in CPU time, the two in turn. step: a GRPO step of the recipe `shapes` with random
weights and pictures of 256 tokens, beside TRL's. start: the rows of a file with 20,000 images. memory: 300 steps with
images of 1 MB. overlap: the time in which all waits for media.
--record writes bench/records/vlm/ and this bench's part of bench/RESULTS.md from all records.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.lora_beside_trl import ratio, seconds
from bench.parts import PartsBench, Row
from bench.vlm_beside_trl import measured_pictures
from bench.vlm_runs import memory, overlap, started
from verl.algorithms.losses import nll
from verl.batch import Batch, pack
from verl.media_tokens import Picture
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.multimodal import with_pictures
from verl.objective import Term
from verl.recipes.shapes import tokenizer
from verl.recipes.vision_model import qwen3_vl
from verl.rollout.base import GenerateRequest, RolloutContext
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.images import ImageReader
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native.options import Options as RolloutOptions
from verl.rollout.native.runner import NativeRunner
from verl.types import Medium, Sample, Sampling, Segment

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "records" / "vlm"
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "tower_hidden": 32, "tower_layers": 1},
    "5M": {"hidden": 256, "layers": 4, "tower_hidden": 128, "tower_layers": 4, "vocab_size": 4096},
}
ANSWERS, REPEATS = 8, 2
GROUP_LIMITS = {"update": 4.0, "prefill": 6.0}
"""Times faster, at least."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A group of answers to one prompt with an image."""

    grid: tuple[int, int, int]
    """Four patches are one token."""
    answer_tokens: int


WORKLOADS = {"tiny": Workload((1, 4, 8), 4), "5M": Workload((1, 50, 80), 64)}


# -- a group with an image ---------------------------------------------------------------------------------------------


def group(size: str) -> Iterator[Row]:
    """Yield how many times faster a group is whose answers share the image and the prompt. Without sharing each answer
    has an image of its own, with the same content. The least CPU time of several turns counts."""
    work, model = WORKLOADS[size], made(size)
    tokens = math.prod(work.grid) // 4
    for what, calls in (("update", updates(model, work)), ("prefill", prefills(model, work))):
        least = dict.fromkeys(calls, math.inf)
        for turn in range(REPEATS + 1):
            for name, call in calls.items():
                took_s = cpu_seconds(call)
                least[name] = min(least[name], took_s if turn else math.inf)  # the first makes what is kept
        name = f"{what} of {ANSWERS} answers to an image of {tokens} tokens"
        times = least["apart"] / least["shared"]
        yield Row(f"{name}: times faster than without sharing", times, GROUP_LIMITS[what], at_least=True)
        yield Row(f"{name}: CPU s", least["shared"])


def made(size: str) -> Any:
    torch.manual_seed(0)
    return qwen3_vl(tokenizer(), max_positions=2048, **SIZES[size])


def prompt_of(reference: str, work: Workload) -> Segment:
    """Return a prompt of 16 tokens of text, and the image in the middle of them."""
    tokens, text = math.prod(work.grid) // 4, np.arange(8, 16)
    ids = np.concatenate([text, np.full(tokens, 6), text])
    return Segment(ids=ids, source="prompt", media=(Medium(reference, 8, tokens),))


def content_of(model: Any, work: Workload) -> dict[str, Picture]:
    """Return the image under one name for all answers ("all"), and under the name of each answer."""
    tower = model.config.vision_config
    values = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    picture = Picture(patches=torch.randn(math.prod(work.grid), values), grid=work.grid)
    return dict.fromkeys(("all", *map(str, range(ANSWERS))), picture)


def updates(model: Any, work: Workload) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of the group, with its answers together and apart."""
    engine = TorchEngine(
        model, EngineSettings(dtype="float32", optim=OptimSpec(lr=1e-6), max_tokens_per_microbatch=16384)
    )
    content, drawn = content_of(model, work), np.random.default_rng(0)
    answers = drawn.integers(8, 18, (ANSWERS, work.answer_tokens))

    def batch(name: Callable[[int], str], share: bool) -> Batch:
        samples = [_sample(i, prompt_of(name(i), work), ids) for i, ids in enumerate(answers)]
        packed = with_pictures(pack(samples, share_prefix=share), content, model.config)
        weight = torch.full((answers.size,), 1.0 / answers.size, dtype=torch.float64)
        return packed.with_columns({"w/nll": weight})

    batches = {"shared": batch(lambda i: "all", True), "apart": batch(str, False)}
    return {name: partial(_passes, engine, one) for name, one in batches.items()}


def _sample(index: int, prompt: Segment, ids: np.ndarray) -> Sample:
    sampled = Segment(ids=ids, source="sampled", logprobs=np.zeros(len(ids), np.float32), version=0)
    name = str(index)
    return Sample(sample_id=name, trajectory_id=name, group_id="g", purpose="train", segments=(prompt, sampled))


def _passes(engine: TorchEngine, batch: Batch) -> None:
    engine.forward_backward(batch, [Term(name="nll", fn=nll)])
    engine.model.zero_grad()


class Content:
    """The images of a group, as an engine reads them."""

    def __init__(self, content: Mapping[str, Picture]) -> None:
        self._content = content

    def of(self, references: Iterable[str]) -> dict[str, Picture]:
        return {name: self._content[name] for name in references}


def prefills(model: Any, work: Workload) -> dict[str, Callable[[], Any]]:
    """Return the prefill of the group with a token for each answer, with its answers together and apart, each time
    under new weights: nothing is kept from the turn before."""
    content: Any = Content(content_of(model, work))
    context = RolloutContext(
        hf_config=model.config,
        max_context_tokens=2048,
        dtype=torch.float32,
        max_concurrent_sequences=ANSWERS,
        pictures=content,
    )
    reader = ImageReader(context)
    source: Any = SimpleNamespace(version=0, passes=False, seconds={}, tensors=lambda: model.state_dict().items())
    core = EngineCore(NativeRunner(RolloutOptions(), context, lanes=1), (), None)

    def run(names: Sequence[str]) -> None:
        core.load(source)
        for i, name in enumerate(names):
            prompt = prompt_of(name, work)
            request = GenerateRequest(
                str(i), prompt.ids, Sampling(max_tokens=1, seed=i, ignore_eos=True), media=prompt.media
            )
            core.add(ActiveRequest(request, images=reader.of(request.id, prompt.ids, prompt.media)))
        while core.busy:
            core.step()

    return {"shared": partial(run, ["all"] * ANSWERS), "apart": partial(run, list(map(str, range(ANSWERS))))}


def step(size: str) -> Iterator[Row]:
    """Yield how many times longer a GRPO step of the recipe `shapes`, with larger pictures, takes in TRL, and the CPU
    seconds of both; the model is the recipe's, whatever the size is."""
    found = measured_pictures()
    yield Row("GRPO step: CPU time of TRL's against verl's", ratio(found, "cpu_s"), 4.0, at_least=True)
    yield Row("GRPO step: duration of TRL's against verl's", ratio(found, "wall_s"))
    for name in found:
        yield Row(f"GRPO step: {name}'s, CPU s", seconds(found, name, "cpu_s"))


def cpu_seconds(call: Callable[[], Any]) -> float:
    before_s = time.process_time()
    call()
    return time.process_time() - before_s


PARTS: Mapping[str, Callable[[str], Iterator[Row]]] = {
    "group": group,
    "step": step,
    "start": started,
    "memory": memory,
    "overlap": overlap,
}
"""The parts by name. Each is given the size of the model."""

BENCH = PartsBench(name="vlm", heading="Models that read images", sizes=[*SIZES], size="5M")

if __name__ == "__main__":
    sys.exit(BENCH.run(sys.argv[1:], __doc__, PARTS))
