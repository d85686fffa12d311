"""bench/vlm.py at a toy size: numbers beside limits."""

from __future__ import annotations

import pytest

from bench import vlm


def test_a_group_with_an_image_is_measured_beside_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that shares is computed in fewer CPU seconds, which are those of its tokens and images."""
    monkeypatch.setattr(vlm, "REPEATS", 1)
    update, update_s, prefill, prefill_s = vlm.group("tiny")
    assert (update.limit, prefill.limit) == (4.0, 6.0) and update.at_least and prefill.at_least
    assert min(update.value, prefill.value) > 0 and min(update_s.value, prefill_s.value) > 0
    assert "8 answers to an image of 8 tokens" in update.what


def test_answers_apart_have_an_image_and_a_prompt_each() -> None:
    model, work = vlm.made("tiny"), vlm.WORKLOADS["tiny"]
    tokens = {name: call.args[1].num_tokens for name, call in vlm.updates(model, work).items()}
    images = {name: len(call.args[1].media.pictures) for name, call in vlm.updates(model, work).items()}
    assert tokens == {"shared": 24 + 8 * 4, "apart": 8 * (24 + 4)} and images == {"shared": 1, "apart": 8}


def test_a_step_is_compared_by_its_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    own, others = ([{"cpu_s": s, "wall_s": 2 * s} for s in every] for every in ((1.0, 2.0, 9.0), (7.0, 8.0, 9.0)))
    monkeypatch.setattr(vlm, "measured_pictures", lambda: {"verl": own, "TRL": others})
    cpu, wall, *each = vlm.step("tiny")
    assert (cpu.value, cpu.limit, wall.value) == (4.0, 4.0, 4.0) and cpu.met and [row.value for row in each] == [2, 8]
