"""A run and the card that it finds: what certainly fails is refused before anything is loaded, the rest is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import small_args

from verl.cli import main
from verl.config.load import load_config
from verl.driver import launch
from verl.errors import Refused
from verl.planner.card import CardFacts, card_lines, check_card, state_bytes, supposed_card
from verl.planner.plan import make_plan

OLD = CardFacts("Tesla T4", 16 << 30, 16 << 30, (7, 5))


@pytest.fixture
def config(tmp_path, tiny_model, arithmetic_data):
    return lambda *more: load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *more)).config


def test_bfloat16_is_refused_of_a_card_without_it(config):
    for key in ("model.dtype", "rollout.dtype"):
        asked = config(f"{key}=bfloat16")
        with pytest.raises(Refused, match=rf"{key}=bfloat16: Tesla T4 has compute capability 7\.5.*set {key}=float32"):
            check_card(asked, make_plan(asked).memory, OLD)
        check_card(asked, make_plan(asked).memory, replace(OLD, capability=(8, 0)))
        check_card(asked, make_plan(asked).memory, replace(OLD, capability=None))
    check_card(config(), make_plan(config()).memory, OLD)


@pytest.mark.parametrize("capability,fix", [((7, 5), "float32"), ((8, 0), "bfloat16"), ((8, 6), "bfloat16")])
def test_weights_in_8_bits_are_refused_of_a_card_without_them(config, capability, fix):
    asked = config("rollout.dtype=fp8")
    said = rf"rollout\.dtype=fp8: Tesla T4 has compute capability {capability[0]}\.{capability[1]}, and fp8 needs 8\.9"
    with pytest.raises(Refused, match=rf"{said}; set rollout\.dtype={fix}, or leave it out"):
        check_card(asked, make_plan(asked).memory, replace(OLD, capability=capability))
    check_card(asked, make_plan(asked).memory, replace(OLD, capability=(8, 9)))


def test_the_state_of_the_policy_has_to_fit(config):
    memory, card = make_plan(config()).memory, supposed_card(24)
    items, state = memory.items, state_bytes(memory)
    own = ("master weights", "rollout weights", "gradients", "optimizer states", "compute copy of weights")
    assert state == sum(items.get(name, 0) for name in own) >= 4 * items["master weights"]
    check_card(config(), memory, replace(card, total_bytes=state, free_bytes=state))
    with pytest.raises(Refused, match=r"weights, gradients and optimizer states want .* 24 GiB has .* in all; take a"):
        check_card(config(), memory, replace(card, total_bytes=state - 1, free_bytes=state - 1))
    with pytest.raises(Refused, match=r"other processes hold .* of a card of 24 GiB, so that .* \(nvidia-smi lists"):
        check_card(config(), memory, replace(card, free_bytes=state - 1))


def test_states_that_are_away_during_an_update_do_not_count(config):
    away = config("algorithm.name=ppo", "algorithm.kl_loss_coef=0.01", "model.engine_options.offload_frozen=true")
    here = config("algorithm.name=ppo", "algorithm.kl_loss_coef=0.01")
    assert make_plan(away).memory.peaks["update"] < make_plan(here).memory.peaks["update"]
    assert state_bytes(make_plan(away).memory) <= state_bytes(make_plan(here).memory)


def test_others_on_the_card_and_a_peak_above_it_are_said(config):
    memory = make_plan(config()).memory
    size = 10 * memory.peak_bytes
    free = CardFacts("H100", size, size - size // 50)
    assert not [*card_lines(memory, free)]
    assert "other processes hold" in next(card_lines(memory, replace(free, free_bytes=size // 2)))
    small = replace(free, total_bytes=memory.peak_bytes, free_bytes=memory.peak_bytes - 1)
    assert "lower step.max_tokens_per_microbatch" in " ".join(card_lines(memory, small))


def test_a_run_compares_its_plan_with_the_card_before_it_loads(tmp_path, tiny_model, arithmetic_data, monkeypatch):
    def never(*given, **named):
        raise AssertionError("it was assembled")

    monkeypatch.setattr(launch, "card_of", lambda config: CardFacts("tiny", 1000, 1000, (9, 0)))
    monkeypatch.setattr(launch, "assemble", never)
    with pytest.raises(Refused, match="tiny has 1000 B in all"):
        launch.run_rl(load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1])), quiet=True)


def test_a_plan_for_a_card_that_is_not_here(tmp_path: Path, tiny_model, arithmetic_data, capsys):
    args = small_args(tmp_path, tiny_model, arithmetic_data[:1])
    assert main(["plan", *args, "card_gib=24"]) == 0
    assert "card      a card of 24 GiB: the peak (" in capsys.readouterr().out
    assert main(["plan", *args, "card_gib=0.00001"]) == 2
    assert "in all; take a smaller model" in capsys.readouterr().err
    assert main(["plan", *args, "card_gib=big"]) == 2
    assert "card_gib=big: the GiB of memory of a card, above 0" in capsys.readouterr().err
