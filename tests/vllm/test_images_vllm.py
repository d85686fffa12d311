"""A model that reads images in a real vLLM: its images are ours, and so are the log-probs of its answers."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from real_server import PYTHON, staged
from small_runs import metrics_of, small_run
from vision import END, IMAGE, START, VOCAB, chat_folder, drawn, image_folder, image_tokenizer, model, own_logprobs, png

from verl.models.families import banned_ids
from verl.models.pictures import Pictures
from verl.models.tiny import character_tokenizer
from verl.rollout import vllm
from verl.rollout.base import GenerateRequest, RolloutContext, ServerPlace
from verl.rollout.client import ServedEngine
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia
from verl.types import Medium, Sample, Sampling, Segment

SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]},
)
"""Sizes that vLLM's kernels for CPUs compute."""
TOWER = dict(hidden_size=64, out_hidden_size=64, intermediate_size=64)
IMAGES = {"wide": (16, 8), "high": (8, 24), "first": (12, 12), "second": (12, 12)}
"""Width and height in pixels: 16 of them are a token."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    folder = image_folder(tmp_path_factory.mktemp("vl"), "qwen2_5_vl", tower=TOWER, **SIZES)
    character_tokenizer("0123456789").save_pretrained(folder)
    return Pictures(folder, MemoryMedia())


@pytest.fixture(scope="module")
def names(pictures: Pictures) -> dict[str, str]:
    """The reference of each image."""
    store = pictures._store
    return {name: store.put(png(*size, seed), "test") for seed, (name, size) in enumerate(IMAGES.items())}


@pytest.fixture(scope="module")
def reference() -> Any:
    return model("qwen2_5_vl", tower=TOWER, **SIZES)


@pytest.fixture(scope="module")
def context(reference: Any, pictures: Pictures) -> RolloutContext:
    place = ServerPlace(model=str(pictures._folder), log=pictures._folder / "vllm.log", python=PYTHON)
    given: dict[str, Any] = dict(max_context_tokens=256, dtype=torch.float32, place=place, pictures=pictures)
    return RolloutContext(hf_config=copy.deepcopy(reference.config), **given)


def prompt_of(pictures: Pictures, text: list[int], *references: str) -> Segment:
    """Return a prompt of text with these images after its first token."""
    ids, media = text[:1], list[Medium]()
    for reference, picture in ((reference, pictures.of([reference])[reference]) for reference in references):
        tokens = int(np.prod(picture.grid)) // 4
        media.append(Medium(reference, len(ids) + 1, tokens))
        ids = [*ids, START, *[IMAGE] * tokens, END]
    return Segment(ids=np.array([*ids, *text[1:]]), source="prompt", media=tuple(media))


def test_answers_to_images_have_the_logprobs_of_the_trainer(
    context: RolloutContext, reference: Any, pictures: Pictures, names: dict[str, str]
) -> None:
    """One server for all: prompts of 0, 1 and 3 images, prefixes with equal ids, and two versions of the weights."""
    number = iter(range(100))

    async def answered(engine: ServedEngine, prompt: Segment, tokens: int = 8, banned: tuple[int, ...] = ()) -> Any:
        sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True, banned=banned)
        request = GenerateRequest(f"r{next(number)}", prompt.ids, sampling, media=prompt.media)
        found = await engine.generate(request)
        row = (prompt, drawn(*found.ids.tolist()))
        sample = Sample(sample_id="s", trajectory_id="s", group_id="g", purpose="train", segments=row)
        with torch.no_grad():
            own = own_logprobs(reference, sample, pictures.of({*names.values()}), banned)
        np.testing.assert_allclose(found.logprobs, own.numpy(), rtol=0, atol=1e-4)
        return found

    async def run() -> None:
        engine = vllm.build(vllm.Options(threads=1, kv_cache_gib=1), context)
        try:
            assert (await engine.capabilities()).media
            await engine.load_weights(staged(SimpleNamespace(module=reference, version=1)))
            text = np.random.default_rng(0).integers(0, VOCAB - 8, 40).tolist()
            several = prompt_of(pictures, text, names["high"], names["wide"], names["first"])
            for prompt in (prompt_of(pictures, text), prompt_of(pictures, [IMAGE, 4, IMAGE]), several):
                await answered(engine, prompt)
            both = [prompt_of(pictures, text, names[name]) for name in ("first", "second")]
            assert np.array_equal(both[0].ids, both[1].ids)
            first, second, again = [await answered(engine, prompt) for prompt in (*both, both[0])]
            assert second.cached_tokens == 0 < again.cached_tokens, "a prefix is shared by the images' hashes"
            assert not np.array_equal(first.logprobs, second.logprobs)

            banned = banned_ids(context.hf_config)
            free, held = [await answered(engine, both[0], 120, ids) for ids in ((), banned)]
            assert IMAGE in banned and {*banned} & {*free.ids.tolist()} and not {*banned} & {*held.ids.tolist()}

            with torch.no_grad():  # of the tower alone: what it returned for this image is of older weights now
                reference.model.visual.merger.mlp[2].weight.mul_(-1.5)
            await engine.load_weights(staged(SimpleNamespace(module=reference, version=2)))
            assert (await answered(engine, both[0])).cached_tokens == 0

            short = GenerateRequest("short", both[0].ids, Sampling(max_tokens=1), media=(Medium(names["first"], 2, 5),))
            with pytest.raises(ValueError, match="short: image .* has 9 tokens by its size, and 5 placeholders"):
                await engine.generate(short)
            with pytest.raises(ValueError, match="score: 1 media, and a server scores text alone"):
                await engine.score(both[0].ids, media=both[0].media)
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_run_on_rows_with_images_trains_what_the_server_samples(tmp_path: Path) -> None:
    """Two steps of `verl train`: log-probs of sampled tokens are the trainer's, also with the weights of an update."""
    ends = dict(pad_token_id=image_tokenizer().pad_token_id, eos_token_id=image_tokenizer().eos_token_id)
    folder = chat_folder(tmp_path / "model", "qwen2_5_vl", model("qwen2_5_vl", tower=TOWER, **SIZES, **ends))
    images = [[png(*size, seed)] for seed, size in enumerate(IMAGES.values())]
    prompts = [[{"role": "user", "content": f"<image>{k}?"}] for k in range(len(images))]
    rows = pa.table({"prompt": prompts, "images": images, "ground_truth": ["1"] * len(images)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    (tmp_path / "reward.py").write_text(
        "def compute_score(*, solution_str, **_):\n    return float(len(solution_str))\n"
    )
    served = ("rollout.engine=vllm", f"rollout.python={PYTHON}", "rollout.dtype=float32", "run.wait_timeout_s=600")
    more = (f"reward.path={tmp_path / 'reward.py'}", "data.max_prompt_tokens=96", "run.total_steps=2", "optim.lr=0.01")
    small_run(tmp_path, folder, [tmp_path / "rows.parquet"], *served, *more)
    steps = metrics_of(tmp_path / "r")
    assert all(steps[step]["mismatch/max_abs_dlogp"] < 1e-4 for step in (1, 2))
    assert all(steps[step]["actor/grad_norm"] > 0 for step in (1, 2))
    for step in (1, 2):
        kept = read_samples(tmp_path / "r", step)
        assert len({row.group_id for row in kept}) == 4 and all(IMAGE in row.prompt_ids for row in kept)
