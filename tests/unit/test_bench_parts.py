"""What the benches that are made of parts share: numbers beside limits, exit codes, records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.parts import PartsBench, Row, record

BENCH = PartsBench(name="lora", heading="Training on one machine", sizes=["tiny", "10M"], size="10M")


def test_a_limit_that_is_missed_is_named() -> None:
    assert Row("a", 1.2, 1.15).cells() == ("a", "1.2", "<= 1.15 MISSED") and Row("a", 1.1, 1.15).met
    assert Row("a", 2.0, 3.0, at_least=True).cells() == ("a", "2", ">= 3 MISSED")
    assert Row("a", 3.0, 3.0, at_least=True).met and Row("a", 99.0).met


def test_a_missed_limit_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"good": lambda size: iter([Row(size, 1.0, 2.0)]), "bad": lambda size: iter([Row(size, 3.0, 2.0)])}
    assert BENCH.run(["good", "--size", "tiny"], None, parts) == 0 and BENCH.run(["--size", "tiny"], None, parts) == 1
    assert "MISSED" in capsys.readouterr().out


def test_records_become_the_section(tmp_path: Path) -> None:
    record("optimizers", "10M", [Row("old", 1.0)], tmp_path, "abc")
    path = record("optimizers", "10M", [Row("muon", 1.25, 1.5), Row("plain", 2.0)], tmp_path, "def")
    record("other", "100M", [Row("speed", 2.0, 3.0, at_least=True)], tmp_path, "abc")
    text = BENCH.section([json.loads(one.read_text()) for one in sorted(tmp_path.glob("*.json"))])
    assert path.name == "optimizers.10M.json" and "old" not in text
    assert "| muon | 1.25 | <= 1.5 |" in text and "| plain | 2 |  |" in text and "| speed | 2 | >= 3 MISSED |" in text
    assert "other, 100M parameters" in text and "def on " in text
