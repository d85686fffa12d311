"""The VeOmni engine against the engine of one process, in the environment of `make test-veomni`."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from adapters import write_adapter
from cases import BUDGET, EXPERTS, HEADS, SIZES, TAUGHT, TOP_K, Case, differences, on_rank, one_process, together
from forked import run
from test_roles import same_turn, saved_model
from test_split import TEACHER
from test_state import steps, weights
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.errors import Refused
from verl.model_engine import torch_engine, veomni
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_parts import open_skeleton
from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.settings import EngineSettings

IN_ONE_PROCESS = cases.engine
BIASED = "qwen2"
LAYOUTS = {
    "DP": Layout(world_size=2, replicate=2),
    "FSDP": Layout(world_size=2),
    "FSDP, three": Layout(world_size=3),
    "HSDP": Layout(world_size=4, replicate=2),
    "SP": Layout(world_size=2, sequence=2),
    "FSDP x SP": Layout(world_size=4, sequence=2),
    "HSDP x SP": Layout(world_size=4, sequence=2, replicate=2),
}
GRID = [
    ("DP", "actor", BIASED, True, False),
    ("FSDP", "actor", "qwen3, tied", True, False),
    ("FSDP", "critic", "llama, biases", False, False),
    ("FSDP", "actor", EXPERTS, True, True),
    ("FSDP, three", "reward_model", "qwen3, tied", True, False),
    ("HSDP", "critic", EXPERTS, True, False),
    ("HSDP", "actor", "llama, biases", False, True),
    ("SP", "actor", "qwen3, tied", True, False),
    ("SP", "critic", BIASED, True, False),
    ("FSDP x SP", "reference", "llama, biases", True, False),
    ("FSDP x SP", "actor", EXPERTS, True, False),
    ("HSDP x SP", "actor", "qwen3, tied", True, True),
    ("FSDP", "gkd", "qwen3, tied", True, False),
    ("FSDP x SP", "gkd_topk", BIASED, False, True),
    ("SP", "teacher", "llama, biases", True, False),
]
TURNS = {"two passes": "FSDP x SP", "ratios of whole sequences": "HSDP"}


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get VeOmni's engine; one process computes with that of torch."""
    monkeypatch.setitem(cases.MODELS, BIASED, lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)))
    monkeypatch.setattr(cases, "engine", engine)


def engine(name: str, role: str, layout: Layout | None, lender: Any = None, **given: Any) -> Any:
    if layout is None:
        return IN_ONE_PROCESS(name, role, None, **given)
    with tempfile.TemporaryDirectory() as folder:
        cases.model(name).save_pretrained(folder)
        found = open_skeleton(Path(folder), make=veomni.foundation_model)
        assert found is not None
        assert type(found.model).__module__.startswith("veomni."), "the model code is that of VeOmni"
        settings: dict[str, Any] = dict(
            head=HEADS.get(role, "lm"),
            optim=OptimSpec(lr=1e-2) if role in ("actor", "critic", *TAUGHT) else None,
            dtype="float32",
            max_tokens_per_microbatch=BUDGET,
            top_k=TOP_K,
            teacher=TEACHER if role in TAUGHT else None,
        )
        if role in ("critic", "reward_model"):
            settings["score"] = torch.randn(1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
        return veomni.VeomniEngine(found.model, EngineSettings(**settings | given), layout=layout, fill=found.fill)


@pytest.mark.parametrize("layout, role, name, shared, idle", GRID)
def test_every_layout_gives_what_one_process_gives(layout: str, role: str, name: str, shared: bool, idle: bool) -> None:
    at = LAYOUTS[layout]
    case = Case(at, role, shared, idle and at.data > 1, name)
    expected = one_process(case)
    assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank)))
    wrong = differences(found, expected)
    assert not wrong, wrong


@pytest.mark.parametrize("case", TURNS)
def test_a_turn_of_the_driver_is_that_of_one_rank(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four optimizer steps over rows of unlike lengths: gradients, and the metrics of all of them."""
    given = {"dtype": "float32", "rtol": 1e-5, "engine_name": "veomni"}
    same_turn(case, {case: LAYOUTS[TURNS[case]]}, saved_model(tmp_path), monkeypatch, **given)


@pytest.mark.parametrize("name", ["qwen3, tied", EXPERTS])
def test_a_run_goes_on_with_another_engine(name: str, tmp_path: Path) -> None:
    """Three updates on VeOmni's ranks are those of one process; the checkpoint of each continues on the other, too."""
    exact: dict[str, Any] = {"dtype": "float64"}  # Adam takes steps of the noise in a gradient of 0
    if name == EXPERTS:  # torch multiplies groups of rows in no float64: so large an eps that the noise is no step
        exact = {"dtype": "float32", "optim": OptimSpec(lr=1e-2, eps=1e-2)}
    case = Case(LAYOUTS["FSDP"], model=name)
    alone = IN_ONE_PROCESS(name, "actor", None, **exact)
    start, three = weights(alone), weights(steps(case, None, 3, alone))
    alone.save(tmp_path / "one")
    four = weights(steps(case, None, 1, alone))
    assert max(float((three[n] - w).abs().max()) for n, w in start.items()) > 1e-3, "nothing was learned"

    def on(rank: int) -> dict[str, torch.Tensor]:
        e = steps(case, rank, 3, engine(name, "actor", case.layout, **exact))
        e.save(tmp_path / "ranks")
        return weights(e)

    def on_from_one(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
        e = engine(name, "actor", case.layout, **exact)
        e.load(tmp_path / "one")
        return e.optimizer_step, weights(steps(case, rank, 1, e))

    for theirs in run(2, on):
        assert not differences(theirs, three)
    for done, theirs in run(2, on_from_one):
        assert done == 3
        assert not differences(theirs, four)
    again = IN_ONE_PROCESS(name, "actor", None, **exact)
    again.load(tmp_path / "ranks")
    assert not differences(weights(steps(case, None, 1, again)), four)


def test_the_start_is_the_folder_and_the_parts_are_the_whole() -> None:
    case = Case(LAYOUTS["HSDP"], model=EXPERTS)
    saved = {name: p.detach() for name, p in cases.model(EXPERTS).named_parameters()}

    def on(rank: int) -> tuple[dict[str, torch.Tensor], list[tuple[str, Any, torch.Tensor]]]:
        e = engine(EXPERTS, "actor", case.layout)
        parts = [(p.name, p.index, p.mine().clone()) for p in e.weight_parts() if p.mine is not None]
        return weights(e), parts

    found = run(4, on)
    made = {name: torch.full_like(t, torch.nan) for name, t in saved.items()}
    for whole, parts in found:
        assert whole.keys() == saved.keys()
        assert all(torch.equal(whole[name], t) for name, t in saved.items())
        for name, index, mine in parts:
            assert made[name][index].isnan().all(), f"{name} is delivered twice"
            made[name][index] = mine
    assert all(torch.equal(made[name], t) for name, t in saved.items())


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    cases.model("qwen3, tied").save_pretrained(tmp_path)
    context = EngineContext(folder=tmp_path)
    with pytest.raises(Refused, match="several ranks"):
        veomni.build(Options(), context)
    config = cases.model("qwen3, tied").config.__class__(**SIZES)
    config.model_type = "gemma2"
    with pytest.raises(Refused, match="gemma2 was not compared"):
        veomni.foundation_model(config)


def test_the_adapter_of_a_frozen_model_is_in_its_weights(tmp_path: Path) -> None:
    cases.model("llama, biases").save_pretrained(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base")
    context = EngineContext(folder=tmp_path / "base", adapter=adapter, dtype="float32", layout=LAYOUTS["FSDP"])
    expected = dict(torch_engine.build(Options(), replace(context, layout=Layout())).weights())
    plain = dict(cases.model("llama, biases").named_parameters())
    assert sum(not torch.equal(plain[name], t) for name, t in expected.items()) == 6, "the factors are not 0"
    for theirs in run(2, lambda rank: weights(veomni.build(Options(), context))):
        assert theirs.keys() == expected.keys()
        torch.testing.assert_close(theirs, expected)
