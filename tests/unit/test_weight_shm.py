"""Weights in the shared memory of one host: what is kept mapped, and what a reader may be given."""

from __future__ import annotations

import hashlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from far_hosts import played

from verl.weight_sync import disk, shm
from verl.weight_sync.base import SyncError
from verl.weight_sync.record import entry_of


@pytest.fixture
def outlet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[shm.ShmOutlet]:
    monkeypatch.setattr(shm, "SHM", tmp_path)
    yield shm.ShmOutlet("verl-weights-1-test")


def weights(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {f"{i}.weight": torch.full((size,), value + i) for i in range(3)} | {"none": torch.empty(0, 2)}


def stage(outlet: shm.ShmOutlet, version: int, tensors: dict[str, torch.Tensor]) -> Path:
    return Path(outlet.stage(version, {n: entry_of(t) for n, t in tensors.items()}, tensors.items()))


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in shm.open_weights(str(path)).tensors()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_files_take_turns_and_are_mapped_once(outlet: shm.ShmOutlet, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    mapped = shm._mapped
    monkeypatch.setattr(shm, "_mapped", lambda path, size: made.append(path.name) or mapped(path, size))
    for version in range(6):
        now = weights(10.0 * version)
        path = stage(outlet, version, now)
        stream = shm.open_weights(str(path))
        assert stream.version == version and same(read(path), now)
    assert made == ["verl-weights-1-test-0", "verl-weights-1-test-1"]


def test_other_users_cannot_read_the_weights(outlet: shm.ShmOutlet, tmp_path: Path) -> None:
    """In shared memory, in buckets, and in folders among temporary files, whatever the umask."""
    before = os.umask(0)
    try:
        blank = tmp_path / "bucket"
        shm.blank(blank, 4096)
        paths = [stage(outlet, 0, weights(1.0)), blank, disk.version_folder(Path(tempfile.gettempdir()))]
        assert [path.stat().st_mode & 0o077 for path in paths] == [0, 0, 0]
        paths[-1].rmdir()
    finally:
        os.umask(before)


def test_a_file_that_is_gone_or_of_another_size_is_made_anew(outlet: shm.ShmOutlet) -> None:
    first = stage(outlet, 0, weights(1.0))
    held = shm.open_weights(str(first)).tensors()
    kept = [next(held)[1].clone()]
    inode = first.stat().st_ino
    stage(outlet, 2, weights(2.0, size=4000))
    assert first.stat().st_ino != inode, "a reader of the smaller one would read beyond its end"
    kept += [tensor.clone() for _, tensor in held]  # of the file that it has mapped
    assert [float(t[0]) for t in kept if t.numel()] == [1.0, 2.0, 3.0]
    first.unlink()
    assert same(read(stage(outlet, 4, weights(3.0, size=4000))), weights(3.0, size=4000))


def test_a_reader_that_is_overtaken_is_told(outlet: shm.ShmOutlet) -> None:
    """It reads tensors in place: its copies are of one version, or the end of the stream raises an error."""
    reading = shm.open_weights(str(stage(outlet, 0, weights(1.0)))).tensors()
    next(reading)
    stage(outlet, 1, weights(2.0))
    assert float(next(reading)[1][0]) == 2.0, "the next version lies elsewhere"
    stage(outlet, 2, weights(5.0))
    with pytest.raises(SyncError, match="version 0 was written over by 2 while it was read"):
        list(reading)


def test_an_outlet_travels_without_what_it_has_mapped(outlet: shm.ShmOutlet) -> None:
    path = stage(outlet, 0, weights(1.0))
    other = pickle.loads(pickle.dumps(outlet))
    assert stage(other, 2, weights(4.0)) == path and same(read(path), weights(4.0))
    assert same(read(stage(outlet, 4, weights(6.0))), weights(6.0))


def test_a_full_memory_leaves_no_file_that_would_crash_the_next(
    outlet: shm.ShmOutlet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as there:
        there.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"MB of weights do not fit into .* \(\d+ MB free\)"):
            stage(outlet, 0, weights(1.0))
    assert list(tmp_path.iterdir()) == []
    assert same(read(stage(outlet, 0, weights(1.0))), weights(1.0))


def segments(folder: Path) -> list[str]:
    return sorted(path.name[-1] for path in folder.glob("verl-weights-1-test-?"))


def test_a_version_that_all_have_makes_room_for_the_next(outlet: shm.ShmOutlet, tmp_path: Path) -> None:
    misses = shm._kept.cache_info().misses
    for version in range(5):
        path = stage(outlet, version, weights(10.0 * version))
        assert segments(tmp_path) == ["0"] and same(read(path), weights(10.0 * version))
        shm.open_weights(str(path)).release(version)
        assert same(read(path), weights(10.0 * version)), "who comes late finds it until the next one is staged"
    assert shm._kept.cache_info().misses == misses + 1, "both ends keep it mapped"


def test_a_version_that_a_replica_still_reads_is_not_written_over(outlet: shm.ShmOutlet, tmp_path: Path) -> None:
    first = stage(outlet, 0, weights(1.0))
    shm.open_weights(str(first)).release(3)  # of another version, so it has no effect on this one
    reading = shm.open_weights(str(first)).tensors()
    next(reading)
    second = stage(outlet, 1, weights(2.0))
    assert second != first and [float(t[0]) for _, t in reading if t.numel()] == [2.0, 3.0]
    assert segments(tmp_path) == ["0", "1"]
    shm.open_weights(str(second)).release(1)
    assert stage(outlet, 2, weights(3.0)) == second and segments(tmp_path) == ["1"], "one is enough again"
    assert same(read(second), weights(3.0))
    shm.open_weights(str(second)).release(2)
    assert stage(outlet, 2, weights(4.0)) == second
    assert stage(outlet, 3, weights(5.0)) != second, "it was staged once more, and nobody has said that it has it"
    assert same(read(second), weights(4.0))


def test_a_version_that_was_broken_off_is_none_and_is_staged_again(outlet: shm.ShmOutlet, tmp_path: Path) -> None:
    now = weights(5.0)
    shm.open_weights(str(stage(outlet, 0, weights(1.0)))).release(0)

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(now.items())[:2]
        raise ConnectionError("a rank died")

    with pytest.raises(ConnectionError):
        outlet.stage(1, {n: entry_of(t) for n, t in now.items()}, breaks())
    assert [shm.ShmStream(path).version for path in tmp_path.glob("verl-weights-1-test-?")] == [shm.WRITING]
    assert same(read(stage(outlet, 1, now)), now)


def test_the_end_gives_memory_back_that_others_have_mapped() -> None:
    name = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    try:
        path = stage(shm.ShmOutlet(name), 0, weights(1.0, size=1_000_000))
        stream, reading = shm.open_weights(str(path)), shm.open_weights(str(path)).tensors()
        next(reading)
        with path.open("rb") as file:
            assert os.fstat(file.fileno()).st_blocks * 512 >= 12_000_000
            shm.end(name)
            assert os.fstat(file.fileno()).st_blocks * 512 <= mmap.PAGESIZE
        assert not path.exists() and stream.version == shm.WRITING
        with pytest.raises(SyncError, match="version 0 was written over by -1"):
            list(reading)
    finally:
        shm.remove(name)


READER = """
import hashlib, sys, torch
from verl.weight_sync import base, shm

for line in sys.stdin:
    address, stops = line.split()
    digest = hashlib.sha256()
    try:
        for number, (name, tensor) in enumerate(shm.open_weights(address).tensors()):
            if number == int(stops):
                print("here", flush=True)
                sys.stdin.readline()
            digest.update(tensor.numpy().tobytes())
        print("whole", digest.hexdigest(), flush=True)
    except base.SyncError as e:
        print("error", e, flush=True)
"""
WRITER = """
import os, sys, torch
from pathlib import Path
from verl.weight_sync import disk, shm
from verl.weight_sync.record import entry_of

outlet = shm.ShmOutlet(f"{shm.PREFIX}-{os.getpid()}-dies")
now = {f"{i}.weight": torch.full((1000,), float(i)) for i in range(3)}

def passing(stops):
    for number, item in enumerate(now.items()):
        if number == stops:
            print("here", flush=True)
            sys.stdin.readline()
        yield item

for version, stops in enumerate(map(int, sys.stdin)):
    address = outlet.stage(version, {n: entry_of(t) for n, t in now.items()}, passing(stops))
    shm.open_weights(address).release(version)
    print(address, flush=True)
"""
NOWHERE = 9


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()


@pytest.mark.parametrize(("number", "ends"), [*((number, signal.SIGKILL) for number in range(3)), (1, signal.SIGSTOP)])
def test_a_reader_that_dies_or_stops_at_any_tensor_holds_nobody(
    outlet: shm.ShmOutlet, tmp_path: Path, number: int, ends: int
) -> None:
    """It is given up; the next version takes the place of the one that it was at, and it never has a part of each."""
    with played(READER) as broken:
        address = stage(outlet, 0, weights(1.0))
        broken.tell(f"{address} {number}")
        assert broken.heard() == "here"
        broken.end(ends)
        assert same(read(address), weights(1.0))
        shm.open_weights(str(address)).release(0)
        assert stage(outlet, 1, weights(7.0)) == address and segments(tmp_path) == ["0"]
        assert same(read(address), weights(7.0))
        if ends == signal.SIGSTOP:
            broken.end(signal.SIGCONT)
            assert broken.ask("go on") == "error version 0 was written over by 1 while it was read"
            assert broken.ask(f"{address} {NOWHERE}") == f"whole {digest(weights(7.0))}", "and gets the present one"


def test_what_other_users_and_containers_left_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SHM", tmp_path)
    dead = 2**30  # no process has it
    assert not f"{shm.PREFIX}-1-x-0".startswith("verl-weights-"), "an older verl beside this one would remove it"
    other, ours, gone, elsewhere = (
        tmp_path / name
        for name in (
            f"{shm.PREFIX}-{dead}-other-0",
            f"{shm.PREFIX}-{os.getpid()}-lives-0",
            f"{shm.PREFIX}-{dead}-ours-0",
            f"verl-weights.7-{dead}-elsewhere-0",
        )
    )
    for path in (other, ours, gone, elsewhere):
        path.touch()
    unlink, user = Path.unlink, os.geteuid()

    def sticky(path: Path, missing_ok: bool = False) -> None:
        if path == other:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as there:
        there.setattr(os, "geteuid", lambda: user + 1)
        shm.remove_stale_segments()
        assert gone.exists() and other.exists()
    monkeypatch.setattr(Path, "unlink", sticky)
    shm.remove_stale_segments()
    assert sorted(tmp_path.iterdir()) == sorted([other, ours, elsewhere])


def test_a_trainer_that_dies_in_the_middle_leaves_no_version_and_no_memory() -> None:
    with played(WRITER) as writer:
        address = Path(writer.ask(NOWHERE))
        reading = shm.open_weights(str(address)).tensors()
        next(reading)
        assert writer.ask(1) == "here"
        writer.end()
        with pytest.raises(SyncError, match="version 0 was written over by -1"):
            list(reading)
        assert shm.open_weights(str(address)).version == shm.WRITING, "nobody takes it for a version"
        shm.remove_stale_segments()
        assert not list(shm.SHM.glob(f"{shm.PREFIX}-{writer.process.pid}-*"))


def test_the_memory_of_the_dead_is_free_though_a_server_has_it_mapped(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shm, "SHM", tmp_path)
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    out = shm.ShmOutlet(f"{shm.PREFIX}-{process.stdout.strip()}-x")
    now = {"t": torch.randn(1 << 20)}
    reading = shm.ShmStream(Path(out.stage(0, {n: entry_of(t) for n, t in now.items()}, now.items())))
    with reading._path.open("rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 > 4e6
        shm.remove_stale_segments()
        assert not reading._path.exists() and os.fstat(file.fileno()).st_blocks * 512 < 1e5
    assert reading.version == shm.WRITING, "and it is no version"
