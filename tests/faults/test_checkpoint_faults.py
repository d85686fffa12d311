"""Killed at every operation, killed at random moments, out of space: what was committed stays, and always loads."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.checkpoint.store import CheckpointStore, DiskFull, SaveFailed, damage

KEEP = {"keep_last": 2, "keep_every_steps": 4, "keep_best": "metric"}


def expected(step: int) -> dict[str, bytes]:
    r = random.Random(step)
    return {f"state/part{i}": r.randbytes(r.choice((0, 10, 70_000))) for i in range(3)} | {
        "hf/config.json": b"%d" % step
    }


def write(step: int):
    def fill(path: Path) -> None:
        for name, data in expected(step).items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(data)

    return fill


def save(store: CheckpointStore, step: int) -> None:
    store.save(step, write(step), needed_bytes=300_000, meta={"step": step, "metric": -step})


def check_all(directory: Path) -> list[int]:
    """Every committed checkpoint is complete and equal to what was saved under its step."""
    store = CheckpointStore(directory, **KEEP)
    found = store.latest_valid()
    assert found is None or json.loads((found / "manifest.json").read_text())["meta"]["step"] == int(found.name[5:])
    assert not any(damage(directory / f"step_{step}") for step in store.steps())
    for step in store.steps():
        have = {
            p.relative_to(directory / f"step_{step}").as_posix(): p.read_bytes()
            for p in (directory / f"step_{step}").rglob("*")
            if p.is_file() and p.name != "manifest.json"
        }
        assert have == expected(step), f"step {step} is not what was saved"
    assert {p.name for p in directory.iterdir()} == {f"step_{s}" for s in store.steps()}, "leftovers are cleaned"
    assert found is None or found.name == f"step_{store.steps()[-1]}"
    return store.steps()


def fork(action: Callable[[], None]) -> int:
    """Run `action` in a child process; its id. Whatever happens in there, it does not come back into pytest."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    """Exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(n: int, directory: Path) -> None:
    """SIGKILL this process at its n-th operation below `directory`: open, mkdir, rename, remove, list, ..."""
    count = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if args and event.startswith(("open", "os.", "shutil.")) and str(directory) in str(args[0]):
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.slow
def test_killed_at_every_operation_of_a_save(tmp_path: Path) -> None:
    """The fifth save replaces nothing, prunes one (3, not the best 1 and not the kept 4); the sixth replaces a step."""
    for resaved in (False, True):
        directory = tmp_path / f"resaved_{resaved}"
        store = CheckpointStore(directory, **KEEP)
        for step in (1, 2, 3, 4):
            save(store, step)
        assert store.steps() == [1, 3, 4]
        step = 4 if resaved else 5
        for n in range(1, 400):

            def action(
                n: int = n, step: int = step, store: CheckpointStore = store, directory: Path = directory
            ) -> None:
                die_at(n, directory)
                store._owner = store._owner.rpartition("-")[0] + f"-{os.getpid()}"
                save(store, step)

            code = wait(fork(action))
            steps = check_all(directory)
            assert {1, 4} <= set(steps) and steps[-1] in (4, 5), f"killed at operation {n}: {steps}"
            if code == 0:
                break
            assert code == -signal.SIGKILL
        assert code == 0 and n > 30, f"{n} operations"
        assert check_all(directory) == ([1, 3, 4] if resaved else [1, 4, 5])


@pytest.mark.full("killed at every operation of a save")
def test_killed_at_50_random_moments(tmp_path: Path) -> None:
    """A process that does nothing but save, killed and started again; what it reported as saved is never lost."""
    rng, before = random.Random(0), 0
    for _ in range(50):
        read_end, write_end = os.pipe()

        def save_for_ever(out: int = write_end) -> None:
            store = CheckpointStore(tmp_path, **KEEP)
            for step in itertools.count(max(store.steps(), default=0) + 1):
                os.write(out, b"begin\n")
                save(store, step)
                os.write(out, b"%d\n" % step)

        pid = fork(save_for_ever)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            first = [pipe.readline() for _ in range(2 * rng.randrange(2) + 1)]  # one save is done, or none yet
            time.sleep(rng.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
            reported = [int(line) for line in "".join([*first, pipe.read()]).split() if line != "begin"]
        assert wait(pid) == -signal.SIGKILL
        newest = max(check_all(tmp_path), default=0)
        assert newest >= max([before, *reported]), "what was reported as saved is there, and nothing goes backwards"
        before = newest
    assert before > 10


# ---- no space


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, **KEEP)
    save(store, 1)
    return store


def refused(store: CheckpointStore, fill, kind: type[OSError] = DiskFull) -> OSError:
    """Saving fails, what was there is untouched, and the next save works."""
    before = {p: p.read_bytes() for p in store.directory.rglob("*") if p.is_file()}
    with pytest.raises(kind) as caught:
        store.save(2, fill, needed_bytes=0)
    assert {p: p.read_bytes() for p in store.directory.rglob("*") if p.is_file()} == before
    assert check_all(store.directory) == [1]
    save(store, 3)
    assert check_all(store.directory) == [1, 3]
    return caught.value


def test_a_full_device_in_the_middle_of_a_write(store: CheckpointStore) -> None:
    def fill(path: Path) -> None:
        write(2)(path)
        with open("/dev/full", "wb") as f:  # the kernel's own ENOSPC
            f.write(b"x" * 100_000)

    assert str(refused(store, fill)).startswith("[Errno 28] checkpoint not written: No space left on device: ")


@pytest.mark.parametrize("nth", range(1, 12))
def test_no_space_at_each_sync(store: CheckpointStore, monkeypatch, nth: int) -> None:
    """Delayed allocation reports a full disk at fsync: of a file, the manifest, a directory."""
    fsync, calls = os.fsync, 0

    def full(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    if nth <= 8:  # 4 files, manifest, 3 directories; the ninth is after the rename
        refused(store, write(2))
    elif nth == 9:
        with pytest.raises(DiskFull):
            save(store, 2)
        assert check_all(store.directory) == [1, 2], "it was there already"


def test_a_failing_rename_brings_the_old_one_back(store: CheckpointStore, monkeypatch) -> None:
    rename = os.rename

    def fail(a, b) -> None:
        if ".tmp-" in str(a):
            raise OSError(errno.EIO, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(SaveFailed, match="checkpoint not written: Input/output error"):
        save(store, 1)
    assert check_all(store.directory) == [1]


def test_a_file_size_limit_while_tensors_are_written(tmp_path: Path) -> None:
    """The real tensor writer, in a process with files of at most 1 MB."""
    torch = pytest.importorskip("torch")
    from verl.checkpoint.shards import load_tensors, save_tensors

    store = CheckpointStore(tmp_path)
    small, large = {"x": torch.arange(10)}, {"x": torch.zeros(1 << 20)}
    store.save(1, lambda p: save_tensors(p / "state", small), needed_bytes=0)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            store.save(2, lambda p: save_tensors(p / "state", large), needed_bytes=0)
        except DiskFull:
            os._exit(7)

    assert wait(fork(limited)) == 7
    found = CheckpointStore(tmp_path).latest_valid()
    assert found is not None and found.name == "step_1"
    back = {"x": torch.zeros(10, dtype=torch.int64)}
    load_tensors(found / "state", back)
    assert back["x"].equal(small["x"])


def test_any_other_error_of_the_writer_passes_through_and_leaves_nothing(store: CheckpointStore) -> None:
    def fill(path: Path) -> None:
        write(2)(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, fill, needed_bytes=0)
    assert check_all(store.directory) == [1]
