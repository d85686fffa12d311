"""Weights that other hosts get over NIXL, which read the trainer's memory, and by broadcasts."""

from __future__ import annotations

import contextlib
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from far_hosts import all_of, host, trainer

MISSING = pytest.mark.skipif(find_spec("nixl") is None, reason="the package nixl is not installed (make nixl-package)")
QUICK = "collective;MEMBER_S=4 PIECE_BYTES=100000"  # 30 pieces of a version
FULL = bool(os.environ.get("FULL_GRID"))
each = pytest.mark.parametrize("transport", [pytest.param("nixl;", marks=MISSING), QUICK])


@each
def test_every_version_comes_as_it_was_staged_once_to_each_host(transport, tmp_path):
    with trainer(transport) as sender, host(transport, tmp_path / "b") as b, host(transport, tmp_path / "c") as c:
        for version in range(5):
            address, digest = sender.ask(version).split()
            for _ in range(2):  # the second time it is there already
                for said in all_of([b, c], address):
                    assert said.startswith(f"{version} {digest} {version + 1} |")
        with host(transport, tmp_path / "c") as late:
            assert late.ask(address) == f"{version} {digest} 0 | 4 3", "another process of the host finds it"
    assert not list(Path("/dev/shm").glob(f"*{address.rpartition('/')[2]}*"))


@each
def test_the_trainers_host_keeps_one_version_once_all_hosts_have_it(transport, tmp_path):
    with trainer(transport) as sender, host(transport, tmp_path / "b") as b, host(transport, tmp_path / "c") as c:
        for version in range(6):
            address, digest = sender.ask(version).split()
            assert {said.split()[1] for said in all_of([b, c], address)} == {digest}
            if version != 3:  # somebody may still be at it
                beside = {4: ["0", "1"], 5: ["1"]}
                assert sorted(sender.ask("release").split()) == beside.get(version, ["0"])
        with host(transport, tmp_path / "d") as late:
            assert late.ask(address).split()[:2] == ["5", digest]


@pytest.mark.parametrize(("transport", "at"), [pytest.param("nixl;", "after", marks=MISSING), (QUICK, "before")])
def test_a_version_that_is_written_over_while_it_is_read_is_refused(transport, at, tmp_path):
    with trainer(transport) as sender, host(transport, tmp_path / "b", at) as b:
        address, _ = sender.ask(0).split()
        assert b.ask(address) == "here"
        for version in (1, 2):
            _, digest = sender.ask(version).split()
        said = b.ask("go on")
        assert said == "error version 0 was written over by 2 while it was read | -1", "what was read is no version"
        assert b.ask(address) == "here" and b.ask("go on") == f"2 {digest} 2 | 2"


@pytest.mark.parametrize(
    ("transport", "at"),
    [
        *(pytest.param("nixl;", at, marks=MISSING) for at in ("after", *["before"] * FULL)),
        *((QUICK, at) for at in ("amid", *["before"] * FULL)),
    ],
)
def test_a_trainer_that_dies_ends_the_reading(transport, at, tmp_path):
    with trainer(transport) as sender, host(transport, tmp_path / "b", at) as b:
        address, _ = sender.ask(0).split()
        assert b.ask(address) == "here"
        sender.end()
        said = b.ask("go on")
        assert said.startswith("error ") and said.endswith("| -1"), said
        assert b.ask(address).startswith("error the trainer's weights cannot be fetched from ")


# -- broadcasts --------------------------------------------------------------------------------------------------------


def test_a_group_is_kept_over_versions_and_made_anew_for_others(tmp_path):
    with trainer(QUICK) as sender, contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(host(QUICK, tmp_path / name)) for name in "bcd"]
        for version in range(3, 8):
            address, digest = sender.ask(version).split()
            assert {said.split()[1] for said in all_of(hosts, address)} == {digest}
        sizes = sender.ask("groups").split()
        assert sizes[-1] == "4" and sizes.count("4") == 1, "of all, and kept"
        other = stack.enter_context(host(QUICK, tmp_path / "d"))  # a process of a host that has one in the group
        for version in range(8, 11):
            address, digest = sender.ask(version).split()
            assert {said.split()[1] for said in all_of([other, *hosts], address)} == {digest}
        assert sender.ask("groups").split() == sizes
        hosts[2].end()
        address, digest = sender.ask(11).split()
        assert {said.split()[1] for said in all_of([*hosts[:2], other], address)} == {digest}
        assert sender.ask("groups").split() == [*sizes, "4"], "the other one takes its place"


def test_a_host_that_is_late_gets_a_broadcast_of_its_own_and_none_waits_long(tmp_path):
    with trainer(QUICK) as sender, host(QUICK, tmp_path / "b") as b, host(QUICK, tmp_path / "c") as c:
        for version in range(2):
            address, digest = sender.ask(version).split()
            all_of([b, c], address)
        address, digest = sender.ask(2).split()
        b.tell(address)
        assert b.heard(10).split()[:2] == ["2", digest], "it waited for the other one, and went on"
        assert c.ask(address).split()[:2] == ["2", digest]
        address, digest = sender.ask(3).split()
        assert {said.split()[1] for said in all_of([b, c], address)} == {digest}
        assert sender.ask("groups").split()[-3:] == ["2", "2", "3"]


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("number", range(3) if FULL else [1])
def test_a_host_that_dies_or_stops_in_the_middle_does_not_hold_the_others(tmp_path, ends, number):
    with trainer(QUICK) as sender, contextlib.ExitStack() as stack:
        at = ["amid" if i == number else "nowhere" for i in range(3)]
        hosts = [stack.enter_context(host(QUICK, tmp_path / "bcd"[i], at[i])) for i in range(3)]
        broken = hosts[number]
        others = [one for one in hosts if one is not broken]
        address, digest = sender.ask(0).split()
        for one in hosts:
            one.tell(address)
        assert broken.heard() == "here"
        broken.end(ends)
        assert [one.heard().split()[:2] for one in others] == [["0", digest]] * 2
        address, digest = sender.ask(1).split()
        assert [said.split()[:2] for said in all_of(others, address)] == [["1", digest]] * 2
        if ends == signal.SIGSTOP:
            broken.end(signal.SIGCONT)
            broken.tell("go on")  # its broadcast has broken off: it asks again
            assert broken.heard() == "here" and broken.ask("go on").split()[:2] == ["1", digest]
            return
        back = stack.enter_context(host(QUICK, tmp_path / "bcd"[number]))
        address, digest = sender.ask(2).split()
        assert [said.split()[:2] for said in all_of([*others, back], address)] == [["2", digest]] * 3


def test_a_host_without_room_says_so_before_others_wait_for_it(tmp_path):
    with trainer(QUICK) as sender, host(QUICK, tmp_path / "b", "full") as b, host(QUICK, tmp_path / "c") as c:
        address, digest = sender.ask(0).split()
        full, other = all_of([b, c], address)
        assert full.startswith(f"error [Errno 28] 3 MB of weights do not fit into {tmp_path / 'b'}")
        assert other.split()[:2] == ["0", digest] and sender.ask("groups") == "2"


def test_a_broadcast_that_breaks_off_is_made_again_in_a_group_of_its_own(tmp_path):
    with (
        trainer(f"{QUICK} SETTLE_S=3") as sender,
        host(QUICK, tmp_path / "b", "breaks") as b,
        host(QUICK, tmp_path / "c") as c,
    ):
        for version, groups in enumerate(("3 3", "3 3")):
            address, digest = sender.ask(version).split()
            assert {said.split()[1] for said in all_of([b, c], address)} == {digest}
            assert sender.ask("groups") == groups
