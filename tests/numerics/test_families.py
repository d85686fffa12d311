"""Every causal language model of transformers: packed rows have the outputs of each row alone, also rows longer than
its sliding window, or the start check refuses to pack the model and names the way out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from causal_models import WINDOW, build, families
from each import FULL_GRID, each

from verl.batch import pack
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn import attention
from verl.nn.packing import refused
from verl.types import Sample, Segment

LENGTHS = (30, 7, 19)
WINDOWED = ("gemma2", "mistral", "phimoe", "qwen2_moe")
UNPACKED = ("bloom", "doge", "stablelm")  # by other positions, by a mask of their own, by arguments they do not take


def rows() -> list[Sample]:
    """Rows with 2 tokens of prompt."""
    rng, out = np.random.default_rng(0), []
    for i, n in enumerate(LENGTHS):
        ids = rng.integers(3, 39, n)
        answer = Segment(ids=ids[2:], source="sampled", logprobs=np.zeros(n - 2, np.float32), version=0)
        segments = (Segment(ids=ids[:2], source="prompt"), answer)
        given = {"sample_id": str(i), "trajectory_id": str(i), "group_id": str(i)}
        out.append(Sample(**given, purpose="train", segments=segments))
    return out


def worst_difference(model) -> float:
    """Return the largest difference of the log-probs of packed rows from those of each row alone, by the model as
    transformers made it."""
    with torch.no_grad():
        whole = [torch.from_numpy(np.concatenate([x.ids for x in s.segments])) for s in rows()]
        each_alone = [model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1) for ids in whole]
        expected = torch.cat([z[1:-1].gather(-1, ids[2:, None])[:, 0] for z, ids in zip(each_alone, whole)])
    engine = TorchEngine(model, EngineSettings(dtype="float32"))
    engine.check_packing(share_prefix=True)
    return float((engine.infer(pack(rows()), ("logprobs",))["logprobs"] - expected).abs().max())


@each("name", WINDOWED)
def test_rows_longer_than_the_window(name):
    given = {"layer_types": ["sliding_attention", "full_attention"]} if name in ("gemma2", "qwen2_moe") else {}
    model = build(name, **given)
    wide = build(name, **given, sliding_window=300)
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        assert float((model(input_ids=ids).logits - wide(input_ids=ids).logits).abs().max()) > 1e-2, "no window at all"
    assert worst_difference(model) < 1e-4


@each("name", WINDOWED)
def test_a_window_that_is_not_applied_is_refused_at_start_though_no_row_of_the_probe_is_as_long(name, monkeypatch):
    model = build(name, sliding_window=300, layer_types=["sliding_attention"] * 2)
    monkeypatch.setattr(attention, "window_of", lambda mask, given=None: None)
    monkeypatch.setattr("verl.nn.fused.window_of", lambda mask, given=None: None)
    with pytest.raises(ValueError, match=r"packed log-probs differ .*attention=padded"):
        TorchEngine(model, EngineSettings(dtype="float32")).check_packing(share_prefix=False)
    assert model.config.sliding_window == 300


@each("name", UNPACKED)
def test_a_model_that_cannot_be_packed_is_refused_with_the_way_out(name):
    with pytest.raises(ValueError, match=r"model\.engine_options\.attention=padded"):
        TorchEngine(build(name), EngineSettings(dtype="float32")).check_packing(share_prefix=False)
    padded = TorchEngine(build(name), EngineSettings(dtype="float32", attention_mode="padded"))
    assert padded.check_packing(share_prefix=False) < 1e-4


def test_masks_that_packed_attention_does_not_know_are_refused():
    config = build("mistral").config
    with pytest.raises(ValueError, match=r"adds to the causal mask; use model\.engine_options\.attention=padded"):
        attention._mask(config=config, use_vmap=True)
    config.attention_chunk_size = 7
    with pytest.raises(ValueError, match=r"attends within chunks of 7 tokens; use model\.engine_options"):
        attention._mask(config=config, local_size=7)
    with pytest.raises(ValueError, match="makes an attention mask of its own"):
        attention.window_of(torch.zeros(1, 1, 9, 9))
    assert attention.window_of(attention._mask(config=config, local_size=5)) == 5
    assert attention.window_of(attention._mask(config=config)) is None and attention.window_of(None, 3) == 3


def test_a_model_that_cannot_be_called_is_refused_and_what_is_no_fault_of_its_is_not():
    for error, padded in product((TypeError("no such argument"), RuntimeError("shapes cannot be")), (True, False)):
        with pytest.raises(ValueError, match="no way to train" if padded else "attention=padded"):
            with refused("Model", padded=padded):
                raise error
    with pytest.raises(RuntimeError, match="out of memory"), refused("Model", padded=False):
        raise RuntimeError("out of memory")


@pytest.mark.skipif(not FULL_GRID, reason="builds every model of transformers; WINDOWED are a sample")
def test_every_family_is_packed_rightly_or_refused():
    right, windows, wrong = [], [], []
    for name in families():
        if (model := build(name)) is None:
            continue
        try:
            worst = worst_difference(model)
        except ValueError:
            continue
        (right if worst < 1e-4 else wrong).append(name)
        windows += [name] if getattr(model.config.get_text_config(), "sliding_window", None) == WINDOW else []
    assert not wrong and len(right) > 60 and len(windows) > 15, (wrong, right, windows)
