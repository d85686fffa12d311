"""The checkpoint store: commit, verification, retention."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from each import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.checkpoint.store import CheckpointStore, DiskFull, SaveFailed, _digest, damage


def content(text: str = "x"):
    """A writer of two small files in a nested folder."""

    def write(path: Path) -> None:
        (path / "state").mkdir()
        (path / "state" / "tree.json").write_text(text)
        (path / "weights.bin").write_bytes(text.encode() * 1000)

    return write


def save(store: CheckpointStore, step: int, **meta) -> None:
    store.save(step, content(f"step {step}"), needed_bytes=10_000, meta=meta)


def latest(store: CheckpointStore) -> Path:
    found = store.latest_valid()
    assert found is not None
    return found


def test_a_saved_checkpoint_is_found_with_its_meta(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest_valid() is None
    store.save(3, content("three"), needed_bytes=10_000, meta={"version": 2, "metric": math.nan})
    found = latest(CheckpointStore(tmp_path / "checkpoints", read_only=True))
    assert found == tmp_path / "checkpoints" / "step_3"
    assert (found / "state" / "tree.json").read_text() == "three"
    manifest = json.loads((found / "manifest.json").read_text())
    assert manifest["meta"]["version"] == 2 and math.isnan(manifest["meta"]["metric"])
    assert manifest["files"]["weights.bin"]["sha256"] == hashlib.sha256(b"three" * 1000).hexdigest(), "as sha256sum"


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none", read_only=True)
    assert store.latest_valid() is None and store.steps() == [] and not (tmp_path / "none").exists()
    (tmp_path / "step_1.tmp-elsewhere-1").mkdir()
    CheckpointStore(tmp_path, read_only=True)
    assert (tmp_path / "step_1.tmp-elsewhere-1").exists()


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, content("old"), needed_bytes=0)
    store.save(1, content("new"), needed_bytes=0)
    assert (latest(store) / "state/tree.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_everything_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch) -> None:
    """A checkpoint survives a power cut: files, manifest and directories are synced, then renamed, then the parent is
    synced."""
    log: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def logged_fsync(fd: int) -> None:
        log.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def logged_rename(a, b) -> None:
        log.append(("rename", os.path.basename(b)))
        rename(a, b)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    save(CheckpointStore(tmp_path), 7)
    tmp = f"step_7.tmp-{socket.gethostname()}-{os.getpid()}"
    assert set(log[:2]) == {("sync", "tree.json"), ("sync", "weights.bin")}
    assert log[2:] == [
        ("sync", "manifest.json"),
        ("sync", "state"),
        ("sync", tmp),
        ("rename", "step_7"),
        ("sync", tmp_path.name),
    ]


# ---- verification


def tamper_grow(path: Path) -> None:
    with open(path / "weights.bin", "ab") as f:
        f.write(b"!")


def tamper_flip(path: Path) -> None:
    data = bytearray((path / "weights.bin").read_bytes())
    data[100] ^= 1
    (path / "weights.bin").write_bytes(data)


def tamper_manifest(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["meta"]["version"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))


def sealed(path: Path, **fields) -> None:
    """Write a manifest with these fields and the right digest."""
    fields = {**json.loads((path / "manifest.json").read_text()), **fields}
    fields["digest"] = _digest(fields)
    (path / "manifest.json").write_text(json.dumps(fields))


def with_weights(path: Path, written: bytes) -> None:
    (path / "w.safetensors").write_bytes(written)
    entry = {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    sealed(path, files={"w.safetensors": entry})


def header(entry: object) -> bytes:
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 8


def pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def loop(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("manifest.json")


ENTRY = {"bytes": 1, "sha256": ""}
TAMPERINGS = [
    (pipe, "manifest.json is no file"),
    (loop, "manifest.json cannot be read"),
    (lambda p: (p / "manifest.json").write_text("[" * 200_000), "manifest.json cannot be read"),
    (lambda p: os.truncate(p / "manifest.json", 1 << 40), "manifest.json has 1099511627776 bytes"),
    (lambda p: sealed(p, serial="x"), "manifest.json cannot be read"),
    (lambda p: sealed(p, files=[]), "manifest.json cannot be read"),
    (lambda p: sealed(p, format=None), "manifest.json has format None"),
    (lambda p: sealed(p, files={"../step_1/weights.bin": ENTRY}), "which is no file of the checkpoint"),
    (lambda p: with_weights(p, (2**62).to_bytes(8, "little") + b"{}"), "not a safetensors file"),
    (lambda p: with_weights(p, header({"dtype": "F64", "shape": [1], "data_offsets": [8, 0]})), "its header says"),
    (lambda p: with_weights(p, header({"dtype": "F64", "shape": [2**40], "data_offsets": [0, 8]})), "its header says"),
    (lambda p: with_weights(p, header([])), "its header says"),
    (tamper_grow, "weights.bin has 6001 bytes instead of 6000"),
    (tamper_flip, "weights.bin has another content than was written"),
    (tamper_manifest, "manifest.json was changed after it was written"),
    (lambda p: (p / "state/tree.json").unlink(), "state/tree.json is missing"),
    (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
    (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json was changed"),
]


@each("tamper, reason", TAMPERINGS)
def test_damage_is_found_and_the_one_before_is_used(tmp_path: Path, caplog, tamper, reason: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, version=1)
    save(store, 2, version=2)
    tamper(tmp_path / "step_2")
    assert reason in str(damage(tmp_path / "step_2"))
    assert latest(store) == tmp_path / "step_1"
    [said] = caplog.messages
    assert f"{tmp_path / 'step_2'} is damaged and left out: " in said and reason in said


def test_quick_looks_at_sizes_only(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    tamper_flip(tmp_path / "step_1")
    assert damage(tmp_path / "step_1", quick=True) is None
    tamper_grow(tmp_path / "step_1")
    assert str(damage(tmp_path / "step_1", quick=True)).startswith("weights.bin has 6001 bytes")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is usable: step_1: weights.bin has 6001 bytes"):
        store.latest_valid()


def test_latest_is_the_one_saved_last(tmp_path: Path) -> None:
    """A run that is rewound to step 2 of 6 continues at 4 after the next crash, not at 6."""
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (2, 4, 6, 3):
        save(store, step)
    assert latest(store).name == "step_3"
    assert store.steps() == [3, 4, 6]


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match="plain files only"):
        store.save(1, lambda p: (p / "link").symlink_to("/etc/hostname"), needed_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_meta_must_be_json_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        CheckpointStore(tmp_path).save(1, lambda p: pytest.fail("wrote"), needed_bytes=0, meta={"x": object()})


@pytest.mark.parametrize(("option", "value"), [("keep_last", 0), ("keep_every_steps", -1)])
def test_retention_options_are_checked(tmp_path: Path, option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        CheckpointStore(tmp_path, **{option: value})


# ---- retention


def expected_kept(saves: list[tuple[int, float | None]], keep_last: int, keep_every: int) -> set[int]:
    """The rules over the whole history, written down a second time: replay, and apply them after each save."""
    kept: list[tuple[int, float | None]] = []
    for save_ in saves:
        kept = [k for k in kept if k[0] != save_[0]] + [save_]
        values = [v for _, v in kept if v is not None and not math.isnan(v)]
        top = max(values, default=None)
        first_best = next((k for k in kept if k[1] is not None and k[1] == top), None)
        kept = [
            k
            for i, k in enumerate(kept)
            if i >= len(kept) - keep_last or (keep_every and k[0] % keep_every == 0) or k is first_best
        ]
    return {step for step, _ in kept}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.integers(0, 12), max_size=9),
    values=st.lists(st.one_of(st.none(), st.just(math.nan), st.integers(0, 3).map(float)), min_size=9, max_size=9),
    keep_last=st.integers(1, 3),
    keep_every=st.integers(0, 4),
)
def test_retention_keeps_exactly_what_it_promises(tmp_path: Path, steps, values, keep_last, keep_every) -> None:
    shutil.rmtree(tmp_path)
    store = CheckpointStore(tmp_path, keep_last=keep_last, keep_every_steps=keep_every, keep_best="metric")
    saves = list(zip(steps, values))
    for step, value in saves:
        store.save(step, lambda p, step=step: (p / "f").write_text(str(step)), needed_bytes=0, meta={"metric": value})
        assert latest(store).name == f"step_{step}", "the one just saved is always there"
    assert set(store.steps()) == expected_kept(saves, keep_last, keep_every)
    assert {p.name for p in tmp_path.iterdir()} == {f"step_{s}" for s in store.steps()}


def test_metrics_that_cannot_be_ranked_are_no_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best="acc")
    for step, acc in enumerate((0.5, True, "0.9", None, math.nan, 0.4)):
        save(store, step, acc=acc)
    assert store.steps() == [0, 5]


def test_a_damaged_checkpoint_neither_counts_nor_is_pruned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        save(store, step)
    (tmp_path / "step_2" / "manifest.json").write_text("gone")
    for step in (3, 4):
        save(store, step)
    assert store.steps() == [2, 3, 4]


def test_what_cannot_be_pruned_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    rename = os.rename

    def refuse(a, b) -> None:
        if ".trash-" in str(b):
            raise PermissionError(1, "Operation not permitted", str(a))
        rename(a, b)

    monkeypatch.setattr(os, "rename", refuse)
    store.save(2, content(), needed_bytes=0)
    assert "step_1 could not be removed" in caplog.text and store.steps() == [1, 2]
    assert latest(store).name == "step_2"


# ---- leftovers


def dead_pid() -> int:
    return int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    host, dead = socket.gethostname(), dead_pid()
    gone = [
        f"step_2.tmp-{host}-{dead}",
        f"step_0.trash-{host}-{dead}",
        f"step_1.old-{host}-{dead}",
        f"step_3.tmp-{host}-{os.getpid()}",
    ]
    alive = [f"step_4.tmp-{host}-{os.getppid()}", "step_5.tmp-other-host-17"]
    for name in (*gone, *alive, "my notes"):
        (tmp_path / name / "hf").mkdir(parents=True)
        (tmp_path / name / "hf" / "half").write_text("half")
    CheckpointStore(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step_1", "my notes", *alive}
    for path in (tmp_path / alive[1]).rglob("*"):
        os.utime(path, (0, 0))
    os.utime(tmp_path / alive[1], (0, 0))
    CheckpointStore(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step_1", "my notes", alive[0]}, "nobody wrote for an hour"


def test_a_replaced_checkpoint_comes_back_if_the_new_one_never_got_the_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "step_1").rename(tmp_path / f"step_1.old-{socket.gethostname()}-{dead_pid()}")
    assert latest(CheckpointStore(tmp_path)).name == "step_1"
    (tmp_path / "step_1").rename(tmp_path / f"step_1.trash-{socket.gethostname()}-{dead_pid()}")
    assert CheckpointStore(tmp_path).latest_valid() is None, "a pruned one does not"


# ---- failures that a run survives


def test_disk_space_is_looked_at_before_the_first_byte(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(DiskFull, match=r"needs about 909 TiB, .* are free \(free some"):
        store.save(1, lambda p: pytest.fail("wrote"), needed_bytes=10**15)
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_kind_for_the_caller() -> None:
    assert issubclass(DiskFull, SaveFailed) and issubclass(SaveFailed, OSError)
