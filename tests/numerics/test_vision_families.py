"""Further families that read images: training and rollout have the log-probs and gradients of transformers."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from rollouts import context_of, source_of
from torch import Tensor
from vision import drawn, png
from vision_families import CLOSE, KINDS, PINPOINTS, Content, model, own_logprobs, pictures, rows, seen

from verl.algorithms.losses import nll
from verl.batch import pack
from verl.checkpoint.loadable import check_loadable
from verl.errors import Refused
from verl.model_engine.lora import LoraLayers, is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.crossed import read_images
from verl.models.encode import encode_pictures
from verl.models.families import auto_class, family_name, family_of
from verl.models.image_files import image_processor
from verl.models.multimodal import with_pictures
from verl.models.pictures import Pictures
from verl.objective import Term
from verl.rollout import hf
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.front import EmbeddedEngine
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Sample, Sampling, Segment

PATHS: dict[str, dict[str, Any]] = {
    "shared": {},
    "not shared": {"share_prefix": False},
    "padded": {"attention_mode": "padded"},
}


@cache
def shares(kind: str) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(1)
    return tuple(torch.rand(row.loss_tokens, generator=rng) for row in rows(kind))


@cache
def expected(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each row, and the gradients, by transformers."""
    reference, found = model(kind), []
    for row, weights in zip(rows(kind), shares(kind)):
        logprobs = own_logprobs(kind, reference, row)
        (-(logprobs * weights).sum()).backward()
        found.append(logprobs.detach())
    return found, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_has_the_logprobs_and_gradients_of_transformers(kind: str, path: str) -> None:
    settings = EngineSettings(dtype="float32", optim=OptimSpec(lr=0.1, weight_decay=0.0), **PATHS[path])
    engine = TorchEngine(model(kind), settings)
    own, own_gradients = expected(kind)
    batch = pack(rows(kind), share_prefix=PATHS[path].get("share_prefix", True))
    batch = with_pictures(batch, pictures(kind), engine.model.config).with_columns({"w/loss": torch.cat(shares(kind))})
    out = engine.forward_backward(batch, (Term(name="loss", fn=nll),), extra_outputs=("logprobs",))
    torch.testing.assert_close(out.columns["logprobs"], torch.cat(own), rtol=0, atol=2e-5)
    found = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
    assert {*found} == {*own_gradients}
    family = family_of(engine.model.config)
    assert family is not None and {*map(family.part_of, found)} == {"vision", "projector", "language"}
    for name, gradient in own_gradients.items():
        scale = max(float(gradient.abs().max()), 0.05)  # that of the bias of keys is rounding
        torch.testing.assert_close(
            found[name] / scale, gradient / scale, rtol=0, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("kind", KINDS)
def test_rollout_has_the_logprobs_of_transformers(kind: str, engine: str) -> None:
    """A native engine of a family that it does not compute says so, and is the hf engine."""
    module = model(kind).eval().requires_grad_(False)
    context = context_of(module.config, max_context_tokens=128, pictures=Content(kind))
    made = hf.build(hf.Options(), context) if engine == "hf" else build(Options(max_prefill_tokens=11), context)
    notes = asyncio.run(made.capabilities()).notes
    assert bool(notes) == (engine == "native" and not KINDS[kind].native)
    prompts = {row.group_id: row.segments[0] for row in rows(kind)}
    given = [
        GenerateRequest(f"{name}{i}", s.ids, Sampling(max_tokens=9, seed=i, ignore_eos=True), media=s.media)
        for name, s in prompts.items()
        for i in range(2)
    ]
    asyncio.run(answered(kind, module, made, given))


def row_of(request: GenerateRequest, ids: np.ndarray, logprobs: np.ndarray) -> Sample:
    prompt = Segment(ids=request.prompt_ids, source="prompt", media=request.media)
    sampled = Segment(ids=ids, source="sampled", logprobs=logprobs, version=0)
    return Sample(sample_id="s", trajectory_id="s", group_id="g", purpose="train", segments=(prompt, sampled))


async def answered(kind: str, module: Any, engine: EmbeddedEngine, given: list[GenerateRequest]) -> None:
    await engine.load_weights(source_of(module))
    for request, answer in zip(given, await asyncio.gather(*map(engine.generate, given)), strict=True):
        row = row_of(request, answer.ids, answer.logprobs)
        own = own_logprobs(kind, module, row).numpy()
        close = CLOSE.get(kind, 1e-5)
        np.testing.assert_allclose(answer.logprobs, own, rtol=0, atol=close, err_msg=request.id)
        whole = np.concatenate([request.prompt_ids, answer.ids])
        scores = await engine.score(whole, media=request.media)
        np.testing.assert_allclose(scores[-len(answer.ids) :], own, rtol=0, atol=close)
    await engine.close()


def test_tokens_read_the_images_that_the_processor_of_mllama_shows_them() -> None:
    """Images side by side are read together."""
    from transformers.models.mllama import processing_mllama as own

    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = int(rng.integers(2, 12))
        places = np.flatnonzero(rng.random(tokens) < 0.5).tolist() or [1]
        ids = [1 if i in places else 0 for i in range(tokens)]
        ranges = own.get_cross_attention_token_mask(ids, 1)
        dense = own.convert_sparse_cross_attention_mask_to_dense([ranges], [[1] * len(places)], 1, tokens)
        assert np.array_equal(read_images(places, tokens), dense[0, :, :, 0]), places


@pytest.mark.parametrize("which", ["train", "infer"])
def test_an_image_behind_a_trained_token_is_refused_with_cross_attention(which: str) -> None:
    """In transformers the tokens before the first image would read it."""
    engine = TorchEngine(model("mllama"), EngineSettings(dtype="float32", optim=OptimSpec(lr=0.1)))
    first, late = seen("mllama", [1, 2], "cat"), seen("mllama", [3], "dog", source="env")
    batch = pack([replace(rows("mllama")[0], segments=(first, drawn(12), late, drawn(13)))])
    batch = with_pictures(batch, pictures("mllama"), engine.model.config)
    with pytest.raises(Refused, match="an image behind a token that is trained: .*all images in front of what is"):
        if which == "infer":
            engine.infer(batch, ("logprobs",))
        else:
            engine.forward_backward(batch.with_columns({"w/loss": torch.ones(2)}), (Term(name="loss", fn=nll),))


PROCESSORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "pixtral": ("PixtralImageProcessorPil", {"size": {"longest_edge": 12}}, {"patch_size": 2}),
    "mistral3": ("PixtralImageProcessorPil", {"size": {"longest_edge": 12}}, {"patch_size": 4}),
    "gemma3": ("Gemma3ImageProcessorPil", {"size": {"height": 8, "width": 8}}, {"do_pan_and_scan": False}),
    "llava": ("CLIPImageProcessorPil", {"size": {"height": 8, "width": 8}, "crop_size": {"height": 8, "width": 8}}, {}),
    "smolvlm": (
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}},
        {"return_row_col_info": True},
    ),
    "llava_next": (
        "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}, "image_grid_pinpoints": PINPOINTS},
        {},
    ),
    "mllama": ("MllamaImageProcessorPil", {"size": {"height": 8, "width": 8}}, {}),
    "internvl": ("GotOcr2ImageProcessorPil", {"size": {"height": 8, "width": 8}}, {"crop_to_patches": True}),
}
"""The image processor of a family, its settings, and what its processor of text and images adds to them."""


@pytest.mark.parametrize("kind", PROCESSORS)
def test_images_are_processed_as_the_processor_of_the_family_does(kind: str, tmp_path: Path) -> None:
    name, settings, more = PROCESSORS[kind]
    made, store, file = getattr(transformers, name)(**settings), MemoryQueue().media, png(24, 17)
    module = model(kind)
    family = family_of(module.config)
    module.config.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    reference = store.put(file, "test")
    picture = Pictures(tmp_path, store).of([reference])[reference]
    expected = made(images=[Image.open(io.BytesIO(file))], return_tensors="pt", **more)
    content = expected["pixel_values"].flatten(0, -len(picture.patches.shape))
    assert family is not None and (len(content) == len(picture.patches) or family.crossed)
    assert torch.equal(picture.patches, content[: len(picture.patches)]), "tiles after these are empty"
    (features,), _ = encode_pictures(module.base_model, family, module.config, [picture], torch.device("cpu"))
    tokens = {"pixtral": 24, "mistral3": 6, "gemma3": 4, "internvl": 52, "llava": 4, "smolvlm": 20, "mllama": 20}
    tokens["llava_next"] = 14
    own = 1 if family.crossed else tokens[kind]
    assert features.shape == (tokens[kind], 32) and family.features(module.config, picture.grid) == own
    assert family.grid_of(image_processor(tmp_path)[0], module.config, 17, 24) == picture.grid


def test_a_model_of_these_tests_has_nothing_that_another_test_added() -> None:
    """Factors are made without values: in a model that tests share they are NaN at times."""
    LoraLayers(model("pixtral"), LoraSpec(rank=2))
    assert not any(is_factor(name) for name, _ in model("pixtral").named_parameters())


@pytest.mark.parametrize(
    "described, line",
    [
        ({"model_type": "idefics2", "vision_config": {"depth": 1}}, "'idefics2' reads more than text .vision_config."),
        (
            {"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}},
            "'llava with siglip_vision_model' reads more",
        ),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {"a": 1}}, "those with one are qwen2_vl, .*mistral3"),
        ({"model_type": "kimi_vl", "vision_config": {"a": 1}}, "no row for it: its code is that of its folder .trust"),
    ],
)
def test_models_that_read_more_than_text_are_refused_without_a_row(described: dict[str, Any], line: str) -> None:
    with pytest.raises(Refused, match=line):
        family_name(described)


def test_a_folder_of_another_family_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """transformers builds all of these as causal language models, without a word about images."""
    for config in (transformers.LlavaOnevisionConfig(), transformers.FuyuConfig(), transformers.Llama4Config()):
        config.save_pretrained(tmp_path)
        with pytest.raises(Refused, match="reads more than text"):
            check_loadable(tmp_path)
    assert auto_class(transformers.Gemma3TextConfig()) is transformers.AutoModelForCausalLM
