"""The memory of a rank in the plan, compared with the tensors of the rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cases import BUDGET, MODELS, OUTPUTS, SIZES, Case, engine, model, share
from forked import run, tensor_bytes
from measured_memory import Measured, measured_bytes, most_bytes, planned_bytes, write_model
from test_loading import peak_bytes
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine import memory
from verl.model_engine.layout import Layout
from verl.model_engine.memory import chunk_bytes
from verl.planner.memory import fullest_moment, role_items

FULL = bool(os.environ.get("FULL_GRID"))
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 32, "vocab_size": 4000}
if FULL:  # 100 million parameters
    WIDE = {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 14, "head_dim": 80, "vocab_size": 16000}
LAYOUTS = {
    "FSDP": Layout(world_size=2),
    "HSDP": Layout(world_size=4, replicate=2),
    "TP": Layout(world_size=2, tensor=2),
    "FSDP x TP": Layout(world_size=4, tensor=2),
    "PP": Layout(world_size=3, pipeline=3),
    "FSDP x PP": Layout(world_size=4, pipeline=2),
    "EP": Layout(world_size=2, expert=2),
    "TP x EP": Layout(world_size=4, tensor=2, expert=2),
    "EP x PP": Layout(world_size=4, expert=2, pipeline=2),
}
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)


WIDE_MODELS = {
    "wide": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | WIDE, tie_word_embeddings=True)),
    "wide, experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | WIDE | EXPERTS, tie_word_embeddings=True)),
}
PRODUCTS = ("FSDP x TP", "FSDP x PP", "TP x EP")  # of roles beside the actor, unless FULL_GRID=1; of the actor these:
QUICK = (*PRODUCTS, "HSDP", "PP")
FROZEN = ("ref", "reward_model")
ENGINES = {"ref": "reference"}


def num_bytes(tensors: Any) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor) and t.ndim]
    return sum(t.numel() * t.element_size() for t in local)


@pytest.mark.parametrize("role", ["actor", "critic", *(FROZEN if FULL else FROZEN[:1])])
def test_a_rank_holds_what_the_plan_says(role, tmp_path, monkeypatch):
    for kind, make in WIDE_MODELS.items():
        monkeypatch.setitem(MODELS, kind, make)
        model(kind).save_pretrained(tmp_path / kind)
    wrong = {}
    for name in LAYOUTS if FULL else QUICK if role == "actor" else PRODUCTS:
        layout = LAYOUTS[name]
        kind = "wide, experts" if layout.expert > 1 else "wide"
        config = Config()
        config = changed(
            config,
            {
                "model.path": str(tmp_path / kind),
                "critic.path": str(tmp_path / kind),
                "reward.model": str(tmp_path / kind),
            },
        )

        def held(rank: int) -> dict[str, int]:
            case = Case(layout, ENGINES.get(role, role), model=kind)
            _, batch, count = share(case, rank)
            e = engine(kind, case.role, layout, score=None)
            if role in FROZEN:
                e.infer(batch, OUTPUTS[case.role])
                return {"weights": num_bytes(e.local.trained().parameters())}
            e.forward_backward(batch, case.batch()[2], count)
            trained = [p for p in e.local.trained().parameters() if p.grad is not None]
            gradients = num_bytes(p.grad for p in trained)
            e.optim_step()
            states = num_bytes(t for state in e.optimizer.state.values() for t in state.values())
            return {"weights": num_bytes(trained), "gradients": gradients, "optimizer states": states}

        for rank, measured in enumerate(run(layout.world_size, held)):
            planned = role_items(config, role, layout, tokens=1, stage=layout.place(rank).pipeline)
            for what, size in measured.items():
                if abs(planned[what] / size - 1) > 0.1:
                    wrong[name, rank, what] = (planned[what], size)
    assert not wrong


HELD = ("weights", "gradient buffer", "optimizer states")
OF_ROLE = {"actor": ("update", "infer", "publish"), "critic": ("update", "infer"), "ref": ("infer",)}
WANTED = {"critic": "values"}
WHOLE = [("actor", "float32"), ("actor", "bfloat16 copies")]
if FULL:
    WHOLE += [("critic", "float32"), ("ref", "float32"), ("actor", "bfloat16"), ("ref", "bfloat16 copies")]


def phases_of(role: str, e: Any, batch: Any, terms: Any, count: int) -> dict[str, Callable[[], object]]:
    """Return the work of a rank in each phase of the role."""

    def update() -> None:
        e.forward_backward(batch, terms, count)
        e.optim_step()

    every = {
        "update": update,
        "infer": lambda: e.infer(batch, (WANTED.get(role, "logprobs"),)),
        "publish": lambda: [name for name, _ in e.weights()],
    }
    return {phase: every[phase] for phase in OF_ROLE[role]}


@pytest.mark.parametrize("role,dtype", WHOLE)
def test_what_a_rank_holds_at_most_in_a_phase_is_what_the_plan_says(role, dtype, tmp_path, monkeypatch):
    """The peak of a pass, with gathered weights and activations. The fullest
    rank of a stage is within 10% of the plan (FULL_GRID=1; 25% of 7 million parameters, of which little things are
    more)."""
    config, wrong = Config(), {}
    dtype, _, copies = dtype.partition(" ")
    given: dict[str, Any] = {"dtype": dtype} | ({"emulate_bf16": False, "copies_weights": True} if copies else {})
    config = changed(config, {"model.dtype": dtype, "model.device": "cuda" if copies else "cpu"})
    for name in LAYOUTS if FULL else ("FSDP x TP",) if not copies else ("HSDP", "PP"):
        layout = LAYOUTS[name]
        kind = "wide, experts" if layout.expert > 1 else "wide"
        folder = tmp_path / kind
        if not folder.exists():
            monkeypatch.setitem(MODELS, kind, WIDE_MODELS[kind])
            model(kind).save_pretrained(folder)
        config = changed(config, {"model.path": str(folder), "critic.path": str(folder)})

        def held(rank: int) -> tuple[int, dict[str, int]]:
            case = Case(layout, ENGINES.get(role, role), model=kind)
            _, batch, count = share(case, rank)
            own = tensor_bytes()
            e = engine(kind, case.role, layout, score=None, **given)
            phases = phases_of(role, e, batch, case.batch()[2], count)
            next(iter(phases.values()))()  # which makes the optimizer's states
            found = {}
            for phase, fn in phases.items():
                before = tensor_bytes() - own
                found[phase] = before + peak_bytes(fn, tmp_path)[0]
            return len(e.passes.cuts(batch, count)), found

        measured = run(layout.world_size, held)
        for stage in range(layout.pipeline):
            ranks = [found for rank, (_, found) in enumerate(measured) if layout.place(rank).pipeline == stage]
            sizes = role_items(config, role, layout, tokens=BUDGET, stage=stage, passes=measured[0][0])
            items = {f"{role} {name}": size for name, size in sizes.items()}
            for phase in OF_ROLE[role]:
                whole = ["actor largest whole weight"]  # the proof of a version is a pass, as `infer` is
                names = whole if phase == "publish" else fullest_moment(items, role, phase)
                planned = sum(items.get(name, 0) for name in (*(f"{role} {part}" for part in HELD), *names))
                most = max(found[phase] for found in ranks)
                if abs(planned / most - 1) > (0.1 if FULL else 0.25):
                    wrong[name, stage, phase] = (planned, most)
    assert not wrong


@pytest.mark.parametrize(
    "case",
    [
        Measured("10M", "full", "one", "packed"),
        Measured("10M", "LoRA", "FSDP", "shared prefix"),
        *([Measured("10M", "nf4", "one", "packed"), Measured("10M", "full", "FSDP x TP", "packed")] if FULL else []),
    ],
    ids=lambda case: f"{case.trains}, {case.layout}",
)
def test_a_step_of_training_holds_what_the_plan_says(case, tmp_path):
    """A few of the cases of bench/plan_memory.py."""
    folder = write_model(tmp_path / "model", case.model)
    passes, found = measured_bytes(case, folder)
    wanted, held = most_bytes(planned_bytes(case, folder, passes)), most_bytes(found)
    assert abs(wanted / held - 1) < 0.1, (wanted, held)


def test_a_pass_without_gradients_keeps_no_copy_of_the_layers(tmp_path, monkeypatch):
    """In bfloat16 a weight is copied where it is used, one layer's at a time."""
    monkeypatch.setitem(MODELS, "wide", WIDE_MODELS["wide"])

    def most(rank: int) -> tuple[int, int]:
        _, batch, _ = share(Case(Layout(), model="wide"), rank)
        e = engine("wide", "actor", None, dtype="bfloat16", emulate_bf16=False)
        copies = 2 * sum(p.numel() for p in e.model.base_model.layers.parameters())
        return copies, peak_bytes(lambda: e.infer(batch, ("logprobs",)), tmp_path)[0]

    ((copies, found),) = run(1, most)
    assert found < copies, (found, copies)


@pytest.mark.parametrize("copies", [False, True])
def test_the_head_in_float32_takes_what_the_plan_says(copies, tmp_path, monkeypatch):
    """A model of which the head is the largest part. Autocast has a rounded head in place of one in bfloat16; beside a
    copy that computes, the head is cast for each pass."""
    sizes = SIZES | WIDE | {"vocab_size": 16000, "num_hidden_layers": 2}
    head = lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))  # noqa: E731
    monkeypatch.setitem(MODELS, "head", head)
    model("head").save_pretrained(tmp_path / "head")
    device = "cuda" if copies else "cpu"
    # here torch's operations compute the log-probs
    by_torch = lambda work, vocab: chunk_bytes(replace(work, compares_logits=True), vocab)  # noqa: E731
    monkeypatch.setattr(memory, "chunk_bytes", by_torch)
    given = {"model.path": str(tmp_path / "head"), "model.dtype": "bfloat16", "model.device": device}

    def measured(rank: int) -> list[tuple[int, int]]:
        found = []
        for kind in ("auto", "float32"):
            how: Any = {"dtype": "bfloat16", "emulate_bf16": False, "copies_weights": copies, "head_dtype": kind}
            _, batch, _ = share(Case(Layout(), model="head"), rank)
            own, e = tensor_bytes(), engine("head", "actor", None, score=None, **how)
            infer = lambda e=e, batch=batch: e.infer(batch, ("logprobs",))  # noqa: E731
            infer()  # which makes the copy that computes
            most = tensor_bytes() - own + peak_bytes(infer, tmp_path)[0]
            items = role_items(changed(Config(), given | {"model.head_dtype": kind}), "actor", Layout(), tokens=BUDGET)
            named = {f"actor {name}": size for name, size in items.items()}
            held = named["actor weights"] + sum(named.get(n, 0) for n in fullest_moment(named, "actor", "infer"))
            found.append((held, most))
            del e, infer
        return found

    ((planned, most), (planned_float32, most_float32)) = run(1, measured)[0]
    assert 0.9 < planned_float32 / most_float32 < 1.2
    assert 0.7 < (planned_float32 - planned) / (most_float32 - most) < 1.1
