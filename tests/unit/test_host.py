"""Memory for a copy: the free memory here and under every limit of a container, in addition to later peaks."""

import mmap
import os

import psutil
import torch
from torch import nn

from verl.model_engine.snapshot import Snapshot
from verl.workers.host import RankMemory, free_bytes, rank_memory, too_small, total_bytes

GB = 10**9


def group(folder, limit, used, cached, names=("memory.max", "memory.current", "inactive_file")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


def test_the_tightest_group_around_a_process_is_what_is_free(tmp_path):
    own, first = tmp_path / "own", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    own.write_text("0::/jobs/7\n")
    group(tmp_path / "v2" / "jobs" / "7", "max", 5_000, 0)
    group(tmp_path / "v2" / "jobs", 9_000, 6_000, 1_500)
    assert free_bytes(tmp_path / "v2", own) == 4_500
    group(tmp_path / "v2", 3_000, 1_000, 0)
    assert free_bytes(tmp_path / "v2", own) == 2_000 and total_bytes(tmp_path / "v2", own) == 3_000
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/of/another/namespace\n0::/\n")
    group(tmp_path / "v1" / "memory", 8_000, 7_000, 500, first)
    assert free_bytes(tmp_path / "v1", own) == 1_500
    for nothing in (tmp_path / "nothing", own):
        assert free_bytes(tmp_path / "nothing", nothing) > 0.5 * psutil.virtual_memory().available
        assert total_bytes(tmp_path / "nothing", nothing) == psutil.virtual_memory().total


def test_there_is_room_for_twice_the_copies_beside_the_peaks_of_every_host():
    one, two = RankMemory("a", 1, 2 * GB, 3 * GB, 7 * GB), RankMemory("b", 1, 5 * GB, 0, 10 * GB)
    assert not too_small([one, two]) and not too_small([])
    again = RankMemory("a", 1, 0, 3 * GB, 7 * GB)  # another role, or a virtual rank, of the same process
    assert not too_small([one, again])
    said = too_small([two, one, RankMemory("a", 2, 0, 1, 7 * GB)])
    assert said == "2 GB of a, which has 7 GB free and 3 GB are wanted by its processes at their peak"
    assert too_small([one, RankMemory("b", 1, 5 * GB, 0, 10 * GB - 1)]) == "5 GB of b, which has 10 GB free"
    assert too_small([RankMemory("a", 1, GB, 0, 4 * GB), RankMemory("a", 2, GB, 0, 3 * GB)]), (
        "free is what the last one sees"
    )


def test_a_peak_that_is_over_is_wanted_again():
    before = rank_memory(7)
    held = mmap.mmap(-1, 64 << 20)  # not of the C library, which may have as much free memory from an earlier test
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    during = rank_memory(7)
    held.close()
    after = rank_memory(7)
    assert (before.process, before.copy_bytes) == (os.getpid(), 7)
    assert after.peak_bytes >= during.peak_bytes + (60 << 20)


def test_a_snapshot_holds_every_tensor_once():
    layer = nn.Linear(3, 5)
    state = {"model.weight": layer.weight, "moment": torch.zeros(4)}
    found = Snapshot(state, [("weight", layer.weight), ("bias", layer.bias), ("else", None)], lambda n, t: t, {})
    copied = found.copied(torch.clone)
    assert found.num_bytes == copied.num_bytes == 4 * (15 + 4 + 5)
    assert copied.without_tensors().num_bytes == 0
