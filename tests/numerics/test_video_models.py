"""Models that read videos: log-probs and gradients of every way to compute a batch, and log-probs of rollouts, are
those of transformers, row by row."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from media_rollouts import Content, compare_rollouts
from rollouts import context_of
from torch import Tensor
from videos import GRIDS, clip_of, own_logprobs, pictures, qwen_inputs, rows, seen, video_model

from verl.algorithms.losses import nll
from verl.batch import pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.clips import CLIPS, clip_places
from verl.models.families import FAMILIES
from verl.models.multimodal import with_pictures
from verl.objective import Term
from verl.rollout.embedded.images import ImageReader
from verl.rollout.vllm_images import vllm_features

PATHS: dict[str, dict[str, Any]] = {
    "shared": {},
    "few tokens in a pass": {"max_tokens_per_microbatch": 40},
    "not shared": {"share_prefix": False},
    "padded": {"share_prefix": False, "attention_mode": "padded"},
}


@cache
def made(kind: str) -> Any:
    return video_model(kind).eval()


@cache
def expected(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each row, and the gradients of their weighted sum, by transformers."""
    reference, found = copy.deepcopy(made(kind)), list[Tensor]()
    for row, weights in zip(rows(kind), shares(kind)):
        logprobs = own_logprobs(kind, reference, row)
        (-(logprobs * weights).sum()).backward()
        found.append(logprobs.detach())
    return found, {n: p.grad for n, p in reference.named_parameters()}


def shares(kind: str) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.rand(row.loss_tokens, generator=rng) for row in rows(kind)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", CLIPS)
def test_every_path_has_the_logprobs_and_gradients_of_transformers(kind: str, path: str) -> None:
    own, own_gradients = expected(kind)
    settings = EngineSettings(dtype="float32", optim=OptimSpec(lr=0.1, weight_decay=0.0), **PATHS[path])
    engine = TorchEngine(copy.deepcopy(made(kind)), settings)
    batch = pack(rows(kind), share_prefix=PATHS[path].get("share_prefix", True))
    config = made(kind).config
    batch = with_pictures(batch, pictures(kind), config).with_columns({"w/loss": torch.cat(shares(kind))})
    found = engine.forward_backward(batch, (Term(name="loss", fn=nll),), extra_outputs=("logprobs",))
    torch.testing.assert_close(found.columns["logprobs"], torch.cat(own), rtol=0, atol=1e-5)
    rounding = 5e-6 if kind.startswith("qwen3_5") else 1e-6  # products of many decays
    for name, p in engine.model.named_parameters():
        assert own_gradients[name].abs().max() > 1e-4 and p.grad is not None, name
        scale = float(own_gradients[name].abs().max())
        assert float((p.grad - own_gradients[name]).abs().max()) < 1e-5 * scale + rounding, name


@pytest.mark.parametrize("kind", CLIPS)
def test_positions_are_those_of_transformers_unless_a_video_is_longer_than_wide(kind: str) -> None:
    """There the text continues after the video, as in Qwen's own code and in the decode steps of transformers; its
    forward pass returns to the time of the video."""
    module = copy.deepcopy(made(kind))
    for row in rows(kind):
        given = qwen_inputs(kind, module, row)
        inputs = {k: v for k, v in given.items() if "pixel" not in k and k != "position_ids"}
        own, deltas = module.base_model.get_rope_index(**inputs)
        batch = with_pictures(pack([row]), pictures(kind), made(kind).config)
        assert torch.equal(batch.positions, given["position_ids"][:, 0])
        if "long" not in row.media or CLIPS[kind].timed:
            assert torch.equal(batch.positions, own[:, 0])
        elif row.segments[0].media[-1].reference == "long":
            assert int(own[0, 0, -1]) < int(batch.positions[0, -1]), "of the last token of the text"
            grid, clip = GRIDS["long"], clip_of(kind, "long")
            assert clip is not None
            places, end = FAMILIES[kind].places(module.config, grid, clip)
            assert end == places.max() + 1 > 2


def test_the_places_of_frames() -> None:
    from verl.models.clips import Clip

    places, end = clip_places((3, 1, 2), Clip(2.5))
    assert places.tolist() == [[0, 0, 2, 2, 5, 5], [0] * 6, [0, 1] * 3] and end == 6
    places, end = clip_places((2, 1, 2), Clip(1.0, (3,)))
    assert places.tolist() == [[0, 0, 2, 3, 4, 5, 5], [0, 0, 2, 3, 4, 5, 5], [0, 1, 2, 3, 4, 5, 6]] and end == 7


@pytest.mark.parametrize("engine", ["native", "passes that end inside a video", "hf"])
@pytest.mark.parametrize("kind", CLIPS)
def test_rollouts_have_the_logprobs_of_transformers_and_of_the_trainer(kind: str, engine: str) -> None:
    """A group reads its video once, and no placeholder is sampled."""
    prompts = [seen(kind, [1, 2, 3], "cut"), seen(kind, [4, 5], "cat", "long"), seen(kind, [6, 7])]
    found = compare_rollouts(engine, made(kind), pictures(kind), prompts, partial(own_logprobs, kind))
    if engine != "hf":
        assert found.stats["encoded_images"] == len(GRIDS)
        assert found.stats["prefill_tokens"] == sum(len(prompt.ids) for prompt in prompts)


def test_a_video_is_not_sent_to_vllm_as_an_image() -> None:
    context = context_of(made("qwen2_5_vl").config, pictures=Content(pictures("qwen2_5_vl")))
    prompt = seen("qwen2_5_vl", [1, 2], "cut")
    with pytest.raises(ValueError, match="a video, and vLLM gets images alone"):
        vllm_features(ImageReader(context).of("r", prompt.ids, prompt.media), torch.float32)  # type: ignore[arg-type]
