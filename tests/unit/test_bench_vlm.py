"""bench/vlm.py at a toy size: numbers beside limits."""

from __future__ import annotations

import pytest

from bench import vlm, vlm_runs


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


def test_the_time_of_media_is_that_in_which_nothing_else_computes() -> None:
    media, others = [(0.0, 3.0), (2.0, 4.0), (8.0, 9.0)], [(1.0, 2.5), (8.0, 8.5)]
    assert vlm_runs.length_of(media, 0.5, 10.0) == 4.5 and vlm_runs.length_of(media, 0.5, 10.0, others) == 2.5


def test_the_start_on_rows_with_images_is_measured() -> None:
    cpu, wall, grown, again = vlm_runs.started("tiny")
    assert "100 rows" in cpu.what and (cpu.limit, again.limit) == (5.0, 5.0)
    assert wall.value > 0 and again.value > 0 and grown.limit == 256.0
