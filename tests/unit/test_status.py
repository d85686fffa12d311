"""docs/status.md claims only what the records prove; a run prints once which parts have no record."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench import status
from verl.config.backends import CLUSTER, TABLES
from verl.config.load import load_config
from verl.config.proven import proven, unproven
from verl.config.schema import Config
from verl.driver.run_dir import open_run_dir
from verl.track.events import EventLog


def record(name: str = "rollout.native", device: str = "cpu") -> status.Record:
    return status.Record(
        name=name, device=device, machine="m", date="2026-01-01", commit="abc", command="c", result="3 passed in 1s"
    )


def test_every_backend_has_a_row_and_no_row_is_left_over():
    rows = {f"{section}.{engine}" for section, table in TABLES.items() for engine in table}
    assert rows | {f"cluster.{name}" for name in CLUSTER} == set(status.PARTS)


def test_the_page_and_the_table_are_those_of_the_records():
    records = status.read_records()
    assert status.PAGE.read_text() == status.page(records)
    assert status.PROVEN.read_text() == status.proven(records)
    for (name, device), found in records.items():
        assert found.command == status.PARTS[name].proof[device] and "passed" in found.result


def test_a_record_changes_its_own_cell_alone():
    empty, one = status.page({}), status.page({("sync.tcp", "cuda"): record("sync.tcp", "cuda")})
    changed = [new for old, new in zip(empty.splitlines(), one.splitlines(), strict=True) if old != new]
    assert len(changed) == 1 and changed[0].endswith("| never run | 3 passed, 2026-01-01, abc, m |")
    assert json.loads(status.proven({("sync.tcp", "cuda"): record("sync.tcp", "cuda")}))["sync.tcp"] == ["cuda"]


def test_a_record_under_another_name_is_refused(tmp_path):
    (tmp_path / "sync.tcp.cpu.json").write_text(json.dumps(dataclasses.asdict(record("sync.shm"))))
    with pytest.raises(ValueError, match=r"it is the record of sync\.shm on cpu"):
        status.read_records(tmp_path)


@pytest.mark.parametrize(("code", "kept"), [("print('2 passed in 1s')", True), ("print('0 passed')", False)])
def test_a_record_is_written_by_a_proof_that_passed(tmp_path, monkeypatch, code, kept):
    part = dataclasses.replace(status.PARTS["sync.tcp"], proof={"cpu": f'python -c "{code}"'})
    monkeypatch.setattr(status, "PARTS", {**status.PARTS, "sync.tcp": part})
    monkeypatch.setattr(status, "_clean_commit", lambda: "abc")
    assert (status.run("sync.tcp", "cpu", tmp_path) is not None) == kept
    assert [path.name for path in tmp_path.iterdir()] == (["sync.tcp.cpu.json"] if kept else [])


def test_a_failed_proof_leaves_no_record(tmp_path, monkeypatch):
    part = dataclasses.replace(status.PARTS["sync.tcp"], proof={"cpu": "python -c \"print('2 passed'); exit(1)\""})
    monkeypatch.setattr(status, "PARTS", {**status.PARTS, "sync.tcp": part})
    monkeypatch.setattr(status, "_clean_commit", lambda: "abc")
    assert status.run("sync.tcp", "cpu", tmp_path) is None and not list(tmp_path.iterdir())


def test_what_has_no_record_on_the_device_is_one_line(tmp_path):
    def line(*args: str, sections: tuple[str, ...] = ("model", "rollout", "queue", "sync")) -> list[str]:
        return unproven(load_config([f"model.path={tmp_path}", *args]).config, sections)

    known = proven()
    assert known["rollout.native"] == ["cpu"] and known["rollout.sglang"] == []
    assert line("model.device=cpu") == []
    on_gpu = line("model.device=cuda")
    assert len(on_gpu) == 1 and "model.engine=torch" in on_gpu[0] and "queue.engine" not in on_gpu[0]
    assert "rollout.engine=sglang" in line("model.device=cpu", "rollout.engine=sglang")[0]
    assert line("model.device=cpu", "rollout.engine=sglang", sections=("model",)) == []


def test_the_first_attempt_of_a_run_notes_it_and_no_other(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    given = [f"model.path={tmp_path}/model", f"run.root_dir={tmp_path}", "run.name=x", "model.device=cuda"]
    for attempt in (0, 1):
        claimed = open_run_dir(load_config(given), "train")
        claimed.lock.close()
        assert claimed.attempt == attempt
        assert sum("no record of a run" in note for note in claimed.notes) == (attempt == 0)
        log = EventLog(tmp_path / "x", attempt)
        log.append("resumed", 1, {})
        log.close()


def test_the_table_is_part_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "config/proven.json" in text and "py.typed" in text and isinstance(Config().cluster.backend, str)


def test_the_readme_is_short():
    lines = (Path(__file__).parents[2] / "README.md").read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120
