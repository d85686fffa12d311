"""bench/vlm.py at a toy size: numbers beside limits, and records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import vlm
from bench.lora import Row, record


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


def test_a_missed_limit_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"good": lambda size: iter([Row(size, 1.0, 2.0)]), "bad": lambda size: iter([Row(size, 3.0, 2.0)])}
    monkeypatch.setattr(vlm, "PARTS", parts)
    assert vlm.main(["good", "--size", "tiny"]) == 0 and vlm.main(["--size", "tiny"]) == 1


def test_records_become_the_section(tmp_path: Path) -> None:
    path = record("group", "5M", [Row("faster", 5.0, 4.0, at_least=True)], tmp_path, "abc")
    text = vlm.section([json.loads(path.read_text())])
    assert "| faster | 5 | >= 4 |" in text and "abc on " in text
