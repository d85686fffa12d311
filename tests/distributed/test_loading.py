"""Every rank reads its own part of a folder: what it holds then, and what it held meanwhile. FULL_GRID=1 takes every
model to every layout, else each layout takes its turn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from cases import EXPERTS, MODELS, SIZES, Case, gradients, model, share
from forked import run
from test_gate import LAYOUTS
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.model_engine import rank_engine
from verl.model_engine.adapter import load_model
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.sharded import part_of_rank
from verl.model_engine.torch_engine import TorchEngine
from verl.model_engine.torch_engine import build as build_torch

FULL = bool(os.environ.get("FULL_GRID"))
HEADS = {"actor": "lm", "critic": "value"}


def built(folder: Path, layout: Layout, role: str = "actor", **given: Any) -> TorchEngine:
    context = dict(folder=folder, head=HEADS[role], optim=OptimSpec(lr=1e-2), dtype="float32", layout=layout)
    return rank_engine.build(Options(), EngineContext(**context | {"max_tokens_per_microbatch": 60} | given))


def built_of_the_whole(*args: Any, **given: Any) -> TorchEngine:
    """By way of the whole model on every rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_engine, "open_skeleton", lambda *args, **settings: None)
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what is measured is this thread
        return built(*args, **given)


QUICK = ("FSDP, three", "FSDP x TP", "FSDP x EP", "PP")
CUT = ("FSDP x TP", "PP", "FSDP x EP")
if FULL:
    CUT += ("FSDP, three", "HSDP")


@pytest.mark.parametrize("layout", LAYOUTS if FULL else QUICK)
def test_a_rank_reads_what_it_would_have_kept_of_the_whole(layout, tmp_path):
    """The weights are bitwise equal, and both engines train equally."""
    at = LAYOUTS[layout]
    names, turn = [EXPERTS] if at.expert > 1 else [*MODELS], [*LAYOUTS].index(layout)
    for i, name in enumerate(names):
        if not FULL and i != turn % len(names):
            continue
        folder = tmp_path / str(i)
        model(name).to(torch.bfloat16).save_pretrained(folder)
        model.cache_clear()
        role = ("actor", "critic")[(i if FULL else turn) % 2]
        case = Case(at, role, model=name)

        def compared(rank: int) -> None:
            found, expected = built(folder, at, role), built_of_the_whole(folder, at, role)
            assert found.masters.keys() == expected.masters.keys() and found.tied == expected.tied
            assert all(torch.equal(t, found.masters[n]) for n, t in expected.masters.items())
            buffers = dict(found.model.named_buffers())
            assert all(torch.equal(b, buffers[n]) for n, b in expected.model.named_buffers())
            _, batch, count = share(case, rank)
            for e in (found, expected):
                e.forward_backward(batch, case.batch()[2], count)
            theirs = gradients(expected)
            assert all(torch.equal(g, theirs[n]) for n, g in gradients(found).items())
            found.optim_step(), expected.optim_step()
            for (n, w), (m, v) in zip(found.weights(), expected.weights(), strict=True):
                assert n == m and torch.equal(w, v), n

        run(at.world_size, compared)


@pytest.mark.parametrize("layout", CUT)
def test_an_adapter_is_in_what_a_rank_reads(layout, tmp_path):
    at = LAYOUTS[layout]
    name, more = (EXPERTS, ()) if at.expert > 1 else ("llama, biases", ("lm_head", "down_proj"))
    model(name).save_pretrained(tmp_path / "base")
    model.cache_clear()
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", "q_proj", "o_proj", *more)
    whole = load_model(EngineContext(folder=tmp_path / "base", adapter=adapter))
    expected, plain = (dict(m.named_parameters()) for m in (whole, load_causal_lm(tmp_path / "base")))
    changed = [n for n, p in expected.items() if not torch.equal(p, plain[n])]
    assert len(changed) == 2 * (2 if at.expert > 1 else 3) + bool(more)

    def compared(rank: int) -> None:
        for build in (built, built_of_the_whole):
            found = dict(build(tmp_path / "base", at, optim=None, adapter=adapter).weights())
            assert found.keys() == expected.keys()
            for n, p in expected.items():
                torch.testing.assert_close(found[n], p.detach(), rtol=1e-6, atol=1e-6)

    run(at.world_size, compared)


@pytest.mark.parametrize("layout", CUT)
def test_factors_beside_what_a_rank_reads_are_those_of_one_process(layout, tmp_path):
    """Drawn, or those of an adapter; the ranks share their rank unequally."""
    at = LAYOUTS[layout]
    name = EXPERTS if at.expert > 1 else "llama, biases"
    model(name).save_pretrained(tmp_path / "base")
    model.cache_clear()
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", "q_proj", "o_proj")
    targets = ["all-linear", *(["experts"] if at.expert > 1 else [])]
    for spec in (LoraSpec(rank=5, seed=3, targets=targets), LoraSpec(path=str(adapter))):
        context = EngineContext(
            folder=tmp_path / "base", optim=OptimSpec(lr=1e-2), dtype="float32", lora=spec, layout=Layout()
        )
        expected = dict(build_torch(Options(), context).exported())
        assert any(t.abs().max() > 0 for t in expected.values())

        def compared(rank: int, spec: LoraSpec = spec, expected: dict = expected) -> None:
            for build in (built, built_of_the_whole):
                found = dict(build(tmp_path / "base", at, lora=spec).exported())
                assert [*found] == [*expected] and all(torch.equal(found[n], t) for n, t in expected.items())

        run(at.world_size, compared)


def peak_bytes(fn: Any, files: Path) -> tuple[int, Any]:
    """Return (the peak of torch's host allocator while fn ran, above its use before; the result of fn). The maps of
    these files are left out, since the host has one copy of them for all processes."""
    mapped = {path.stat().st_size for path in files.glob("*.safetensors")}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        found = fn()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes() * (abs(event.nbytes()) not in mapped)
        most = max(most, held)
    return most, found


WIDE = SIZES | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=6, head_dim=32, vocab_size=4000)
BIG = {
    "wide": lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE, tie_word_embeddings=True)),
    "wide, experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**WIDE | {"vocab_size": 500}, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    ),
}


@pytest.mark.parametrize("layout", CUT)
def test_while_it_loads_a_rank_holds_its_part_and_one_tensor(layout, tmp_path):
    at = LAYOUTS[layout]
    whole = BIG["wide, experts" if at.expert > 1 else "wide"]()
    whole.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="3MB")
    largest, every = (f(4 * p.numel() for p in whole.parameters()) for f in (max, sum))
    tables = 1 << 16  # buffers, and what is no part of the model

    def peaks(rank: int) -> tuple[int, int, int]:
        own, e = peak_bytes(lambda: built(tmp_path, at), tmp_path)
        held = sum(4 * part_of_rank(p).numel() for p in e.local.trained().parameters())
        del e
        return held, own, peak_bytes(lambda: torch.zeros(every // 4), tmp_path)[0]

    for held, own, seen in run(at.world_size, peaks):
        assert held <= own <= held + largest + tables, (held, own, largest)
        assert own < every <= seen, (own, every, "a whole model would be seen, were it there")
