"""Properties of stages: several of them, fewer passes than stages, gradients that are added, memory and refusals. The
gate and the tests of states include stages as layouts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import LORA, MODELS, SIZES, Case, differences, engine, gradients, on_rank, one_process, share, together
from forked import run, tensor_bytes
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from verl.model_engine import pipeline
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.pipeline import PipelinedEngine
from verl.model_engine.settings import EngineSettings

DEEP = SIZES | {"num_hidden_layers": 5}
FULL = bool(os.environ.get("FULL_GRID"))
TWO, THREE = Layout(world_size=2, pipeline=2), Layout(world_size=3, pipeline=3)


@pytest.fixture(autouse=True)
def models(monkeypatch):
    for tied in (True, False):
        made = lambda tied=tied: Qwen3ForCausalLM(Qwen3Config(**DEEP, tie_word_embeddings=tied))  # noqa: E731
        monkeypatch.setitem(MODELS, "tied" if tied else "untied", made)


ROLES = {"actor": "tied", "critic": "untied", "reference": "untied", "reward_model": "tied"}
EVERY = [(role, model) for role in ROLES for model in ("tied", "untied")] if FULL else [*ROLES.items()]


@pytest.mark.parametrize("role,deep", EVERY)
def test_three_stages_one_of_them_in_the_middle(deep, role):
    case = Case(THREE, role, model=deep)

    def proven(rank: int) -> Any:
        engine(deep, role, THREE).check_packing(share_prefix=True)
        return on_rank(case, rank)

    found = together(case, run(3, proven))
    assert not differences(found, one_process(case))


@pytest.mark.parametrize("deep", ["tied", "untied"] if FULL else ["tied"])
def test_passes_fewer_than_stages(deep):
    case = Case(THREE, model=deep)
    given = {"max_tokens_per_microbatch": 10_000}

    def on(rank: int) -> Any:
        e, (_, batch, _) = engine(deep, "actor", THREE, **given), share(case, rank)
        out = e.forward_backward(batch, case.batch()[2], 1)
        return {"rows": share(case, rank)[0], "columns": dict(out.columns)} | {
            "whole": gradients(e),
            "metrics": out.metrics,
        }

    assert not differences(together(case, run(3, on)), one_process(case, **given))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_stage_without_factors_passes_the_gradients_on(layer):
    """Factors of one layer, which the first or the last stage has: the other one trains nothing."""
    given = {"lora": LoraSpec(rank=5, targets=[rf"model\.layers\.{layer}\..*"]), "dtype": "float64"}
    case = Case(TWO, model="qwen3, tied" + LORA)

    def moved(rank: int | None) -> dict[str, torch.Tensor]:
        e = engine(case.model, "actor", None if rank is None else TWO, **given)
        for _ in range(2):
            e.forward_backward(*case.batch()[1:])
            e.optim_step()
        return {name: t.clone() for name, t in e.exported()}

    expected = moved(None)
    assert len(expected) == 14 and all(f"layers.{layer}." in name for name in expected)
    for found in run(2, moved):
        assert not differences(found, expected, rtol=1e-8)


def test_what_two_stages_hold_adds_up_over_calls_as_all_else():
    """Two calls before one step: the sum over the ends is of what the second has found."""
    case = Case(TWO)

    def twice(rank: int | None) -> dict[str, torch.Tensor]:
        _, batch, terms = case.batch()
        e = engine(case.model, "actor", None if rank is None else TWO)
        for _ in range(2):
            e.forward_backward(batch, terms)
        return gradients(e)

    expected = twice(None)
    for found in run(2, twice):
        assert not differences(found, expected)


def test_a_gradient_of_one_end_alone_is_seen(monkeypatch):
    monkeypatch.setattr(pipeline.StagePasses, "_sum_of_both", lambda passes, before: None)
    case = Case(TWO)
    with pytest.raises(RuntimeError, match="what both hold moves as one"):
        run(2, lambda rank: on_rank(case, rank))


@pytest.mark.skipif(not FULL, reason="test_memory shows it of more layouts: make test-all")
def test_a_stage_holds_its_layers_and_no_others():
    """Bytes of tensors that live after a pass, over all stages: one model."""
    big = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2000, "tie_word_embeddings": False}

    def held(rank: int) -> tuple[int, int]:
        before = tensor_bytes()
        model = Qwen3ForCausalLM(Qwen3Config(**DEEP | big))
        whole = sum(p.nbytes for p in model.parameters())
        e = PipelinedEngine(model, EngineSettings(dtype="float32"), layout=TWO)
        del model
        e.check_packing(share_prefix=True)
        return tensor_bytes() - before, whole

    found = run(2, held)
    whole = found[0][1]
    assert sum(mine for mine, _ in found) < 1.1 * whole, found
    assert all(0.3 * whole < mine < 0.7 * whole for mine, _ in found), found


def test_stages_that_cannot_be_are_refused():
    gpt2 = lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=40))  # noqa: E731
    small = lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": 1}))  # noqa: E731
    cases = {
        "parallel.pipeline=2: GPT2LMHeadModel cannot be cut into stages here: transformers has no plan for": (gpt2, {}),
        "parallel.pipeline=2: 1 layers cannot be 2 stages; use at most 1": (small, {}),
        "parallel.pipeline=2 wants model.engine_options.attention=auto": (small, {"attention_mode": "padded"}),
    }

    def refused(rank: int) -> list[str]:
        out = []
        for make, settings in cases.values():
            with pytest.raises(ValueError) as e:
                PipelinedEngine(make(), EngineSettings(dtype="float32", **settings), layout=TWO)
            out.append(str(e.value))
        return out

    for said in run(2, refused):
        assert all(message.startswith(start) for message, start in zip(said, cases, strict=True)), said
