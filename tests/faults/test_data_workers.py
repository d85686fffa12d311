"""Data workers that die, hang or refuse: an error with its cause, before a deadline, and nothing left behind."""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.data.parallel import ReaderDied, run_chunks
from verl.processes import tree


@dataclass
class Bad:
    """A job that misbehaves at one row."""

    how: str
    at: int = 5

    def __call__(self, rows: Sequence[int], progress: Callable[[int], None]) -> list[int]:
        for done, row in enumerate(rows):
            if self.how == "slow":
                time.sleep(0.6)
            elif row == self.at:
                self.misbehave()
            progress(done + 1)
        return list(rows)

    def misbehave(self) -> None:
        if self.how == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        elif self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "hang":
            time.sleep(600)
        elif self.how == "bug":
            raise KeyError("our bug")
        elif self.how == "refuse":
            raise ValueError("a.jsonl:6: no prompt")


class DiesWhenLoaded:
    def __reduce__(self) -> Any:
        return (os._exit, (4,))


class HangsWhenLoaded:
    def __reduce__(self) -> Any:
        return (time.sleep, (600,))


def hang(mark: str) -> None:
    with open(f"{mark}-{os.getpid()}", "w"):
        time.sleep(600)


@dataclass
class HangsForEver:
    """Loading it leaves a file, so that one can wait for it."""

    mark: str

    def __reduce__(self) -> Any:
        return (hang, (self.mark,))


def run(job: Any, timeout_s: float = 60.0, workers: int = 1) -> list[int]:
    chunks = ([2 * k, 2 * k + 1] for k in range(6))
    return [r for c in run_chunks(job, chunks, num_workers=workers, timeout_s=timeout_s) for r in c]


def leftovers() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("verl-rows-*"))


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_a_dead_worker_is_an_error_with_its_cause() -> None:
    for how, message in (
        ("exit", r"exited with status 3 \(in rows [56] to 6\). Its last output:\nlast words"),
        ("kill", r"killed by SIGKILL \(the kernel kills so when memory is short.*\(in rows [56] to 6\)"),
        ("bug", r"(?s)exited with status 1 .*KeyError: 'our bug'"),
    ):
        with pytest.raises(ReaderDied, match=message):
            run(Bad(how))
        assert leftovers() == [], how


@dataclass
class DiesBeforeItsAnswer:
    """Its worker asks, and is killed by the one who answers."""

    ask: Callable[[int], Any] | None = None

    def prepare(self) -> None:
        pass

    def answer(self, pid: int) -> bytes:
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        return bytes(1 << 20)

    def connect(self, ask: Callable[[int], Any]) -> None:
        self.ask = ask

    def __call__(self, rows: Sequence[int], progress: Callable[[int], None]) -> list[int]:
        assert self.ask is not None
        self.ask(os.getpid())
        return list(rows)


def test_a_worker_that_dies_before_its_answer_is_an_error_with_its_cause() -> None:
    with pytest.raises(ReaderDied, match="killed by SIGKILL"):
        run(DiesBeforeItsAnswer())


def test_a_silent_worker_meets_its_deadline() -> None:
    for how in ("hang", "stop"):
        start = time.monotonic()
        with pytest.raises(ReaderDied, match=r"made no progress for 4 s \((in rows [56] to 6|while)"):
            run(Bad(how), timeout_s=4)
        assert time.monotonic() - start < 60 and leftovers() == [], how


def test_a_slow_chunk_that_makes_progress_is_not_late() -> None:
    rows = list(range(9))  # 5.4 s
    assert list(run_chunks(Bad("slow"), [rows], num_workers=1, timeout_s=4)) == [rows]


def test_a_refused_row_comes_in_its_turn_and_as_it_was_said() -> None:
    results = run_chunks(Bad("refuse"), ([2 * k, 2 * k + 1] for k in range(6)), num_workers=2, timeout_s=60)
    assert [next(results), next(results)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"^a\.jsonl:6: no prompt$"):
        next(results)
    assert leftovers() == []


def test_a_job_that_cannot_be_loaded_or_sent() -> None:
    with pytest.raises(ReaderDied, match=r"exited with status 4 \(while loading the tokenizer\)"):
        run(DiesWhenLoaded())
    with pytest.raises(ValueError, match=r"cannot be sent to worker processes .*data\.num_workers=0"):
        run(lambda rows, progress: rows)


@dataclass
class LooksForTorch:
    """A job, with whether torch was imported in the process after it."""

    job: Any

    def __post_init__(self) -> None:
        self.prepare, self.answer, self.connect = self.job.prepare, self.job.answer, self.job.connect

    def __call__(self, rows: Sequence[Any], progress: Callable[[int], None]) -> Any:
        return self.job(rows, progress), "torch" in sys.modules


def test_workers_read_images_as_their_parent_does_and_import_no_torch(tmp_path: Path) -> None:
    """The parent answers which tokens an image of a size has, and why the processor refuses one."""
    from PIL import Image

    from verl.config.schema import DataConfig
    from verl.data.files import RawRow
    from verl.data.render import PromptJob
    from verl.data.source import rules_of_model
    from verl.recipes import shapes

    model, tokenizer = shapes.write_model(tmp_path / "base", seed=0), shapes.tokenizer()
    for k, size in enumerate(((56, 56), (90, 30), (28, 140), (56, 56), (5000, 8))):
        Image.new("RGB", size, "red").save(tmp_path / f"{k}.png")
    given = [{"prompt": "<image>shape?", "images": [f"{k}.png"], "ground_truth": "a"} for k in range(5)]
    rows = [RawRow(f"{tmp_path}/a.jsonl:{k}", row) for k, row in enumerate(given, start=1)]
    cfg = DataConfig(max_prompt_tokens=512, cache_dir=str(tmp_path))
    rules = rules_of_model(model, cfg, tokenizer)
    job = PromptJob(tokenizer, cfg, {}, images=rules)
    chunks = [rows[:2], rows[2:4]]
    found = [*run_chunks(LooksForTorch(job), chunks, num_workers=2, timeout_s=60)]
    assert [torch for _, torch in found] == [False, False]
    for chunk, (theirs, _) in zip(chunks, found):
        counts, arrays = job(chunk, lambda done: None)
        assert counts == theirs[0] and arrays.keys() == theirs[1].keys()
        assert all(np.array_equal(arrays[name], theirs[1][name]) for name in arrays if not name.startswith("rows"))
        ours, other = (marshal.loads(columns["rows"].data) for columns in (arrays, theirs[1]))
        assert ours == other, "the first row; marshal has other bytes for equal values"
    refused = []
    for read in (
        lambda: job(rows[4:], lambda done: None),
        lambda: [*run_chunks(job, [rows[4:]], num_workers=1, timeout_s=60)],
    ):
        with pytest.raises(ValueError) as error:
            read()
        refused.append(str(error.value))
    assert refused[0] == refused[1] and "a.jsonl:5: image 1" in refused[0] and "5000 x 8 pixels: " in refused[0]


@pytest.mark.parametrize("hangs", [False, True])
def test_no_worker_outlives_a_killed_parent(tmp_path: Path, hangs: bool) -> None:
    """Also one that is stuck, and does not see that its pipe was closed."""
    mark = tmp_path / "loaded"
    job = f"HangsForEver({str(mark)!r})" if hangs else "Bad('none')"
    code = (
        "import sys, time; from verl.data.parallel import run_chunks\n"
        "from test_data_workers import Bad, HangsForEver\n"
        f"it = run_chunks({job}, ([k] for k in range(9)), num_workers=2, timeout_s=60)\n"
        f"print('started' if {hangs} else next(it), flush=True)\n"
        f"next(it) if {hangs} else None; time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    env["TMPDIR"] = str(tmp_path / "tmp")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None and parent.stdout.readline() == (b"started\n" if hangs else b"[0]\n")
    deadline = time.monotonic() + 60
    while hangs and time.monotonic() < deadline and len(list(tmp_path.glob("loaded-*"))) < 2:
        time.sleep(0.05)
    while time.monotonic() < deadline and len(tree.descendants(parent.pid)) < 4:
        time.sleep(0.05)
    family = tree.descendants(parent.pid)
    assert len(tree.children_of(parent.pid)) == 2 and len(family) == 4, "a guard and a worker, twice"
    assert not hangs or {int(one.name.rpartition("-")[2]) for one in tmp_path.glob("loaded-*")} <= set(family)
    parent.kill()
    parent.wait(timeout=30)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (any(map(tree.started, family)) or leftovers()):
        time.sleep(0.05)
    assert not any(map(tree.started, family))
    assert leftovers() == []
