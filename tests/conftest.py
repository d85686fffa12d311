"""Shared fixtures. All files of tests are in temporary folders; no test needs a network or a GPU."""

import gc
import importlib
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("VERL_TEST_DEVICE", "cpu") == "cpu":  # read when Triton is imported, also by torch
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))
# A runner that was started in the background ignores these; children would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
from each import FULL_GRID
from on_device import missing_device

REFERENCES = Path(sys.prefix) / "references"
"""The packages that ours are compared with; no run finds them."""
DATA = Path(__file__).parent / "data"
MANY_OBJECTS = 50_000


def pytest_configure(config):
    if reason := missing_device():
        pytest.exit(reason, returncode=2)


def pytest_collection_modifyitems(items):
    """Skip what is marked `full` unless FULL_GRID=1 (make test-all): the property has another test in the quick suites,
    which the mark names."""
    for item in items:
        if not FULL_GRID and (mark := item.get_closest_marker("full")):
            item.add_marker(pytest.mark.skip(reason=f"make test-all; quick: {mark.args[0]}"))


def pytest_collection_finish(session):
    """Modules and tests are here to stay: a full collection, and every run makes one, need not walk them (0.35 s)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def stays():
    """Exclude objects that were imported since, or thawed by a test, from garbage collection too: small runs of a
    worker that has run a thousand tests took four times their time."""
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def large_disk():
    """Make every plan of this process on a disk with 1 TiB free: its warnings must not depend on what the machine that
    runs the tests has left (26 GiB were too few once)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.planner.disk.free_disk_bytes", lambda place: 1 << 40)
        yield


@pytest.fixture
def reference(monkeypatch):
    """Import a module of the packages that `make reference-packages` installs, for one test."""
    monkeypatch.syspath_prepend(REFERENCES)

    def imported(name):
        if not (REFERENCES / name.partition(".")[0]).is_dir():
            pytest.skip(f"{name.partition('.')[0]} is not installed (make reference-packages)")
        return importlib.import_module(name)

    return imported


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A Hugging Face folder: 2-layer Qwen3 with the arithmetic task's character tokenizer."""
    from verl.models import tiny
    from verl.recipes import arithmetic

    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, seed=1)
    return tiny.save(model, tokenizer, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory):
    """A folder beside `tiny_model`: wider, with a head of its own, the same tokenizer."""
    from verl.models import tiny
    from verl.recipes import arithmetic

    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=48, layers=2, heads=2, kv_heads=1, ffn=64, seed=5, tied=False)
    return tiny.save(model, tokenizer, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def arithmetic_data(tmp_path_factory):
    """(training rows, held-out rows) of the quickstart's task."""
    from verl.recipes import arithmetic

    folder = tmp_path_factory.mktemp("arithmetic")
    return (
        arithmetic.write_rl(folder / "train.jsonl", 64, seed=1, held=False),
        arithmetic.write_rl(folder / "heldout.jsonl", 8, seed=2, held=True),
    )
