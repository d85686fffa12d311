"""`verl doctor RUN` distinguishes a running, a finished and a dead run."""

import fcntl
import json
import re
import shutil

import torch

from verl import doctor
from verl.accel.cuda import rows
from verl.cli import main
from verl.sandbox import cgroups
from verl.sandbox.code import describe
from verl.track.events import FINISHED, EventLog
from verl.track.metrics import MetricsLog


def attempt(folder, number, kinds, steps):
    metrics, events = MetricsLog(folder, number), EventLog(folder, number)
    for kind, step in kinds:
        events.append(kind, step, {})
    for step in steps:
        metrics.log(step, {"a": 1.0})
    metrics.close()
    events.close()


def told(folder, capsys):
    assert main(["doctor", str(folder)]) == 0
    return capsys.readouterr().out


def test_alive_dead_finished_and_dead_again(tmp_path, capsys):
    lock = tmp_path / ".lock"
    lock.write_text("1")  # a process of this number lives, but it is not the one that ran
    wait = {"who": "driver", "what": "a reward", "waiting_s": 3, "timeout_s": 60.0}
    (tmp_path / "waits.json").write_text(json.dumps({"at_unix_s": 0, "pending": [wait]}))
    attempt(tmp_path, 0, [("resumed", 1)], [1, 2])
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        page = told(tmp_path, capsys)
        assert "process 1 is alive, after step 2" in page and "driver waits 3 s" in page
    page = told(tmp_path, capsys)
    assert "run: dead (process 1 is gone) after step 2" in page and "driver waits" not in page
    attempt(tmp_path, 1, [("resumed", 3), (FINISHED, 3)], [3])
    assert "run: finished, 3 steps" in told(tmp_path, capsys)
    attempt(tmp_path, 2, [("resumed", 4)], [4])  # more steps were requested, and it died
    assert "run: dead (process 1 is gone) after step 4" in told(tmp_path, capsys)


def test_what_is_no_run_is_refused_in_words(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'} is not a folder\n"


def test_the_tiers_of_the_code_sandbox_in_their_order(monkeypatch):
    """The first is taken if it works, else the next one, with the reason."""
    without = "launcher (bubblewrap: bwrap is not installed)"
    bounded = f"; its memory is bounded by {cgroups.here()[1]}"
    assert describe() == f"code sandbox: {'bubblewrap' if shutil.which('bwrap') else without}{bounded}"
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: None)
    assert describe() == f"code sandbox: {without}{bounded}"


def test_a_run_that_died_before_its_first_step(tmp_path, capsys):
    (tmp_path / ".lock").write_text("99999999")
    assert "dead (process 99999999 is gone) before its first step" in told(tmp_path, capsys)


def test_the_kernel_of_each_operation_and_the_reason_for_it(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_S", 0.01)
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert "kernels on cpu in float32:\n  rms_norm: kernels.c\n" in page and "  truncate: torch\n" in page
    monkeypatch.setattr("verl.accel.cpu.rows.load_kernels", lambda dtype: "no C compiler on this machine")
    assert main(["doctor"]) == 0
    assert "  rms_norm: torch (not kernels.c: no C compiler on this machine)\n" in capsys.readouterr().out


def bandwidth(page):
    (found,) = re.findall(r"^memory of (\S+): (\S+) GB/s by copies during 0\.\d s, bytes read and written$", page, re.M)
    return found


def test_the_bandwidth_of_the_memory_is_measured_where_no_run_needs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_S", 0.01)
    monkeypatch.setattr(doctor, "PROBE_BYTES", 1 << 20)
    assert main(["doctor"]) == 0
    device, rate = bandwidth(capsys.readouterr().out)
    assert device == "cpu" and 0.05 < float(rate) < 5000
    assert "memory of" not in told(tmp_path, capsys)


class Card:
    """torch.cuda on a machine with one card, of whose 80 GiB another process holds some."""

    held_bytes = 20 << 30

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def get_device_name(self, number):
        return "Card 1"

    def get_device_capability(self, device=None):
        return (9, 0)

    def mem_get_info(self, number):
        return (80 << 30) - self.held_bytes, 80 << 30


def test_a_card_its_kernels_and_what_others_hold_of_it(capsys, monkeypatch):
    card = Card()
    for name in ("is_available", "device_count", "get_device_name", "get_device_capability", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    monkeypatch.setattr(doctor, "_probe", lambda device: f"memory of {device}: probed")
    monkeypatch.setattr(rows, "missing", lambda *_: None)
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    described = "devices: cuda:0 Card 1, capability 9.0, 80.0 GiB"
    assert f"{described}, of which other processes hold 20.0 GiB (nvidia-smi lists them)\n" in page
    assert "memory of cuda:0: probed" in page and "memory of cpu" not in page
    on_card = page.partition("kernels on cuda in bfloat16:\n")[2]
    assert "  page_attention: Triton\n" in on_card and "  linear: Triton" in on_card
    launches = "at most 10 launches for each layer of a dense model and 12 for the rest; 14 and 13 where the depth"
    assert f"  a decode step: {launches}" in on_card
    card.held_bytes = 1 << 30
    monkeypatch.setattr(rows, "missing", lambda *_: "the card has compute capability 7.5, below 8.0")
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert f"{described}\n" in page and "launches" not in page
    assert "page_attention: none, its caller computes it by other operations (Triton: the card has compute cap" in page


def test_memory_that_is_too_full_to_be_measured_is_no_crash(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    assert doctor._probe(torch.device("cpu")) == "memory of cpu: no 512 MiB are free to measure its bandwidth"
