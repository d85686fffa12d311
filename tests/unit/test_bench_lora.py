"""bench/lora.py at a toy size: numbers beside limits, and records."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench import lora, lora_memory
from verl.config.devices import base_format
from verl.config.load import load_config
from verl.config.lora_layers import reads_codes
from verl.config.validate import validate
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.model_engine.quantised_parts import load_quantised
from verl.nn.quant_linear import quantised_layers


def test_the_states_of_each_optimizer_are_measured_and_within_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "REPEATS", 1)
    found = {row.what: row for row in lora.optimizers("tiny")}
    states = {name: found[f"{name}: bytes of states per value of a matrix"] for name in OPTIMIZERS}
    assert {name for name, row in states.items() if row.limit} == set(lora.STATE_LIMITS)
    assert all(row.met for row in states.values()), states
    assert states["adamw"].value == 8 and states["muon"].value == 4 and states["adamw_8bit"].value > 2
    for name in set(OPTIMIZERS) - {"adamw"}:
        assert found[f"{name}: an update against AdamW's"].value > 0
    assert found["muon: an update against AdamW's"].limit == 1.5


def test_products_with_nf4_are_measured_beside_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "REPEATS", 1)
    found = [*lora.nf4("tiny")]
    assert len(found) == 4 and all(row.at_least and row.value > 0 for row in found)
    assert found[0].limit in (2.0, 3.0) and found[-1].limit == 1.0 and "16 rows" in found[-1].what


def test_lora_sets_in_the_rollout_are_measured_beside_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "REPEATS", 1)
    one, eight, live = lora.sets("tiny")
    assert (one.limit, eight.limit, live.limit) == (1.15, 1.3, None) and min(one.value, eight.value, live.value) > 0


def test_updates_with_lora_are_measured_beside_those_of_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "REPEATS", 1)
    found = [*lora.update("tiny")]
    assert [row.limit for row in found] == [0.75, 0.75] and all(0 < row.value < math.inf for row in found)


def test_steps_beside_trl_are_compared_by_their_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [{"cpu_s": s, "wall_s": s * s, "equal_rewards_share": s / 10} for s in (1.0, 2.0, 9.0)]
    others = [{"cpu_s": s, "wall_s": 3 * s} for s in (5.0, 6.0, 7.0)]
    monkeypatch.setattr(lora, "measured_steps", lambda: iter([("float32", 8, {"verl": own, "TRL": others})]))
    *rows, equal = lora.step("tiny")
    assert [row.value for row in rows] == [4.5, 3.0, 2.0, 6.0] and rows[0].limit == 3.0 and rows[0].met
    assert equal.value == pytest.approx(0.4) and "no backward pass" in equal.what


def test_steps_to_the_accuracy_of_all_weights_are_a_multiple_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [("all", {0: 0.2, 5: 0.7, 10: 0.6}), ("a", {0: 0.2, 5: 0.5, 10: 0.65, 15: 0.6}), ("b", {0: 0.2, 15: 0.5})]
    monkeypatch.setattr(lora, "learned", lambda: iter(runs))
    before, goal, one, _, other, last = lora.learn("tiny")
    assert (before.value, goal.value, one.value, one.limit, last.value) == (0.2, 0.6, 1.0, 1.3, 0.5)
    assert other.value == math.inf and other.limit == 1.6 and not other.met


def test_runs_on_a_quantised_base_are_measured_beside_their_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The base is one that verl trains on as it is, and both runs are valid; they are not run here."""
    asked = list[list[str]]()
    monkeypatch.setattr(lora, "ROOT", tmp_path)
    monkeypatch.setattr(lora_memory, "peak_gib", lambda arguments: asked.append(arguments) or 4.5)
    (grpo,), (ppo,) = (lora.memory(algorithm, "tiny") for algorithm in ("grpo", "ppo"))
    assert (grpo.limit, ppo.limit) == (4.0, 4.6) and not grpo.met and ppo.met
    for command, *arguments in asked:
        config = load_config(arguments).config
        assert command == "train" and base_format(config) == "nf4" and reads_codes(config)
        validate(config)
    model = load_quantised(Path(config.model.path), "nf4")
    assert len(quantised_layers(model)) == 14 and float(model.model.norm.weight.detach().mean()) == 1.0
