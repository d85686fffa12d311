"""CI runs every test once: no mark leaves one out of all parts, and none is in two."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def recipe_of(target: str) -> str:
    """The commands of a target that has some."""
    found = re.search(rf"^{target}:[^\n=]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, target
    return found[1]


def takes(target: str, marks: set[str]) -> bool:
    """Say whether the pytest of a target runs a test that has these marks."""
    found = re.search(r' -m (?:"([^"]+)"|(\w+))(?= |$)', recipe_of(target).partition("-m pytest")[2])
    return not found or Expression.compile(found[1] or found[2]).evaluate(lambda name, **_: name in marks)


@pytest.mark.parametrize(
    "targets, marks",
    [
        (("test-processes", "test-slow"), [set(), {"slow"}, {"on_device"}, {"slow", "on_device"}]),
        (("test-ranks", "test-clusters", "test-runs"), [set(), {"cluster"}, {"runs"}, {"slow"}]),
    ],
)
def test_each_test_is_in_one_part(targets, marks):
    for target, given in product(targets, marks):
        others = [other for other in targets if other != target]
        assert takes(target, given) != any(takes(other, given) for other in others), (target, given)


def test_ci_runs_every_part():
    assert re.findall(r"^make (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE) == [
        *("test", "test-distributed", "test-vllm")
    ]
    assert "test-processes" in recipe_of("test")
    parts = {"test-ranks", "test-clusters", "test-runs", "test-slow"}
    assert parts <= set(recipe_of("test-distributed").split())
    assert parts <= set(re.findall(r"^(test-\w+)(?=:)", MAKEFILE, re.MULTILINE))
