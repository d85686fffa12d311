"""The memory of Megatron's ranks in the plan, compared with the tensors that they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import BUDGET, MODELS, SIZES, Case, share
from forked import run, tensor_bytes
from megatron_engines import LAYOUTS, OF_LAYOUT, built, folder, options_of
from test_loading import WIDE as LOADED
from test_loading import peak_bytes
from test_memory import FULL, HELD, OF_ROLE, WIDE, WIDE_MODELS, phases_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine import megatron_model
from verl.model_engine.megatron import row_lengths
from verl.planner.memory import fullest_moment, role_items

CASES = [("TP", "none"), ("PP", "none"), ("TP x DP", "selective"), ("PP x DP", "full"), ("EP", "none")]
CASES += [("PP x VP", "none"), ("PP x VP", "full"), ("TP x ETP", "none"), ("EP over TP", "none")]
EVEN = SIZES | WIDE | {"num_hidden_layers": 16 if FULL else 8}
MADE = WIDE_MODELS | {"wide, even": lambda: Qwen3ForCausalLM(Qwen3Config(**EVEN, tie_word_embeddings=True))}
DEEP = LOADED | {"num_hidden_layers": 16}
MADE["deep"] = lambda: Qwen3ForCausalLM(Qwen3Config(**DEEP, tie_word_embeddings=True))
"""The models, one of which each of two stages has two equal chunks, and one with far more tensors than are read at
a time."""


@pytest.mark.parametrize("name, checkpointing", CASES)
def test_what_a_rank_holds_at_most_in_a_phase_is_what_the_plan_says(name, checkpointing, tmp_path, monkeypatch):
    """The fullest rank of a stage is within 10% of the plan (FULL_GRID=1: 100 million parameters; 25% of 7 million, of
    which little things are more)."""
    layout = LAYOUTS[name]
    options = OF_LAYOUT.get(name, {})
    kind = "wide, experts" if layout.expert * options.get("expert_tensor", 1) > 1 else "wide"
    kind = "wide, even" if "virtual_stages" in options else kind
    monkeypatch.setitem(MODELS, kind, MADE[kind])
    where = str(folder(kind))
    longest = int(row_lengths(Case(layout, model=kind).batch()[1]).max())
    given = {"model.path": where, "model.engine": "megatron", "model.device": "cpu", "model.dtype": "float32"}
    given |= {"model.gradient_checkpointing": checkpointing, "data.max_prompt_tokens": longest - 1}
    config = changed(Config(), given | {"rollout.max_response_tokens": 1, "model.engine_options": options})

    def held(rank: int) -> tuple[int, dict[str, int]]:
        case = Case(layout, model=kind)
        _, batch, count = share(case, rank)
        own, more = tensor_bytes(), {"gradient_checkpointing": checkpointing}
        e = built(kind, "actor", layout, options=options_of(name, distributed=True), **more)
        phases: dict[str, Callable[[], object]] = phases_of("actor", e, batch, case.batch()[2], count)
        next(iter(phases.values()))()  # which makes the optimizer's states
        found = {}
        for phase, fn in phases.items():
            before = tensor_bytes() - own
            found[phase] = before + peak_bytes(fn, tmp_path)[0]
        return len(e.passes.cuts(batch, count)), found

    wrong, measured = {}, run(layout.world_size, held)
    for stage in range(layout.pipeline):
        ranks = [found for rank, (_, found) in enumerate(measured) if layout.place(rank).pipeline == stage]
        sizes = role_items(config, "actor", layout, tokens=BUDGET, stage=stage, passes=measured[0][0])
        items = {f"actor {item}": size for item, size in sizes.items()}
        for phase in OF_ROLE["actor"]:
            names = ["actor largest whole weight"] if phase == "publish" else fullest_moment(items, "actor", phase)
            planned = sum(items.get(item, 0) for item in (*(f"actor {part}" for part in HELD), *names))
            most = max(found[phase] for found in ranks)
            print(name, checkpointing, stage, phase, planned, most, round(planned / most, 3))
            if abs(planned / most - 1) > (0.1 if FULL else 0.25):
                wrong[stage, phase] = (planned, most)
    assert not wrong


@pytest.mark.parametrize("name", ["TP", "PP", "TP x DP"])
def test_while_it_loads_a_rank_holds_its_part_and_the_parts_that_are_read_at_a_time(name, tmp_path, monkeypatch):
    layout, kind = LAYOUTS[name], "deep"
    monkeypatch.setitem(MODELS, kind, MADE[kind])
    where = folder(kind)
    every = sum(4 * p.numel() for p in MADE[kind]().parameters())
    tables = 1 << 16  # buffers, and what is no part of the model

    def peaks(rank: int) -> tuple[int, int, int, int]:
        own, e = peak_bytes(lambda: built(kind, "reference", layout), where)
        held = sum(4 * p.numel() for p in e.local.parameters.values())
        parts, count = [4 * torch.Size(p.part).numel() for p in e.local.pieces.values()], megatron_model.BATCH_NAMES
        batch = max(sum(parts[start : start + count]) for start in range(0, len(parts), count))
        del e
        return held, batch, own, peak_bytes(lambda: torch.zeros(every // 4), tmp_path)[0]

    for held, batch, own, seen in run(layout.world_size, peaks):
        assert held <= own <= held + batch + tables, (held, batch, own)
        assert own < every <= seen, (own, every, "a whole model would be seen, were it there")
