"""A model that reads sounds: log-probs and gradients of every way to compute a batch, and log-probs of rollouts, are
those of transformers, row by row."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from media_rollouts import compare_rollouts
from sounds import FEATURES, FRAMES, KINDS, own_inputs, own_logprobs, pictures, rows, seen, thinker
from torch import Tensor

from verl.algorithms.losses import nll
from verl.batch import pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.encode import encode_pictures
from verl.models.families import FAMILIES
from verl.models.multimodal import with_pictures
from verl.objective import Term

UNREAD: dict[str, set[str]] = {KINDS[0]: {"model.audio_tower.audio_bos_eos_token.weight"}, KINDS[1]: set()}
"""Weights of the audio tower that no forward pass reads."""
PATHS: dict[str, dict[str, Any]] = {
    "shared": {},
    "few tokens in a pass": {"max_tokens_per_microbatch": 40},
    "not shared": {"share_prefix": False},
    "padded": {"share_prefix": False, "attention_mode": "padded"},
}


@cache
def made(kind: str) -> Any:
    return thinker(kind).eval()


def shares(kind: str) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.rand(row.loss_tokens, generator=rng) for row in rows(kind)]


@cache
def expected(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each row, and the gradients of their weighted sum, by transformers."""
    reference, found = copy.deepcopy(made(kind)), list[Tensor]()
    for row, weights in zip(rows(kind), shares(kind)):
        logprobs = own_logprobs(kind, reference, row)
        (-(logprobs * weights).sum()).backward()
        found.append(logprobs.detach())
    return found, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_has_the_logprobs_and_gradients_of_transformers(kind: str, path: str) -> None:
    own, own_gradients = expected(kind)
    settings = EngineSettings(dtype="float32", optim=OptimSpec(lr=0.1, weight_decay=0.0), **PATHS[path])
    engine = TorchEngine(copy.deepcopy(made(kind)), settings)
    batch = pack(rows(kind), share_prefix=PATHS[path].get("share_prefix", True))
    batch = with_pictures(batch, pictures(kind), made(kind).config)
    batch = batch.with_columns({"w/loss": torch.cat(shares(kind))})
    found = engine.forward_backward(batch, (Term(name="loss", fn=nll),), extra_outputs=("logprobs",))
    torch.testing.assert_close(found.columns["logprobs"], torch.cat(own), rtol=0, atol=1e-5)
    assert {name for name, p in engine.model.named_parameters() if p.grad is None} == UNREAD[kind]
    assert {*own_gradients} == {*dict(engine.model.named_parameters())} - UNREAD[kind]
    assert {*map(FAMILIES[kind].part_of, own_gradients)} == {"vision", "projector", "audio", "language"}
    for name, p in engine.model.named_parameters():
        if name not in UNREAD[kind]:
            scale = max(float(own_gradients[name].abs().max()), 0.05)  # that of the bias of keys is rounding
            assert p.grad is not None and float((p.grad - own_gradients[name]).abs().max()) < 3e-5 * scale, name


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_transformers(kind: str) -> None:
    module = copy.deepcopy(made(kind))
    for row in rows(kind):
        given = own_inputs(kind, module, row)
        mask = given.get("feature_attention_mask")
        own, _ = module.get_rope_index(
            given["input_ids"],
            given.get("image_grid_thw"),
            attention_mask=given["attention_mask"],
            audio_seqlens=None if mask is None else mask.sum(1),
        )
        batch = with_pictures(pack([row]), pictures(kind), made(kind).config)
        assert torch.equal(batch.positions, own[:, 0].long())


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_in_the_order_of_the_media_and_do_not_depend_on_each_other(kind: str) -> None:
    base, device = made(kind).base_model, torch.device("cpu")
    names = ["song", "cat", "word", "bell"]
    with torch.no_grad():
        given = base, FAMILIES[kind], made(kind).config
        together, deeper = encode_pictures(*given, [pictures(kind)[n] for n in names], device)
        for name, features in zip(names, together, strict=True):
            ((alone,), own_deeper) = encode_pictures(*given, [pictures(kind)[name]], device)
            assert len(deeper) == (kind == KINDS[1]) == len(own_deeper)
            for states, own in zip(deeper, own_deeper):
                first = sum(len(one) for one in together[: names.index(name)])
                torch.testing.assert_close(states[first : first + len(own)], own, rtol=0, atol=1e-5)
                assert bool(own.any()) == (name == "cat")
            torch.testing.assert_close(features, alone, rtol=0, atol=1e-5)
            assert len(features) == FEATURES[kind].get(name, 6)
    for name, frames in FRAMES[kind].items():
        assert FEATURES[kind][name] == FAMILIES[kind].features(made(kind).config, (frames, 1, 1), sound=True)


@pytest.mark.parametrize("frozen", [("audio",), ("vision", "projector"), ("language",)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_part_is_left_as_it_was_and_the_others_have_the_same_gradients(
    kind: str, frozen: tuple[Any, ...]
) -> None:
    _, own = expected(kind)
    settings = EngineSettings(dtype="float32", optim=OptimSpec(lr=0.1, weight_decay=0.1), freeze=frozen)
    engine = TorchEngine(copy.deepcopy(made(kind)), settings)
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    batch = with_pictures(pack(rows(kind)), pictures(kind), made(kind).config).with_columns(
        {"w/loss": torch.cat(shares(kind))}
    )
    engine.forward_backward(batch, (Term(name="loss", fn=nll),))
    for name, p in engine.model.named_parameters():
        still = FAMILIES[kind].part_of(name) in frozen or name in UNREAD[kind]
        assert (p.grad is None) == still, name
        if p.grad is not None:
            scale = max(float(own[name].abs().max()), 0.05)
            assert float((p.grad - own[name]).abs().max()) < 3e-5 * scale, name
    engine.optim_step()
    changed = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if FAMILIES[kind].part_of(name) not in frozen} - UNREAD[kind]


@pytest.mark.parametrize("engine", ["native", "passes that end inside a sound", "hf"])
@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_have_the_logprobs_of_transformers_and_of_the_trainer(kind: str, engine: str) -> None:
    """A group reads its sound once, and no placeholder is sampled."""
    prompts = [seen(kind, [1, 2, 3], "bell"), seen(kind, [4, 5], "song", "cat", "bell"), seen(kind, [6, 7])]
    found = compare_rollouts(engine, made(kind), pictures(kind), prompts, partial(own_logprobs, kind))
    assert not found.notes, "it is native itself"
    if engine != "hf":
        assert found.stats["encoded_images"] == 3
        assert found.stats["prefill_tokens"] == sum(len(prompt.ids) for prompt in prompts)
