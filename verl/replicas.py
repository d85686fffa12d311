"""`verl replicas`: the driver of a running run adds a server, or removes one (driver/fleet.py)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
import uuid
from pathlib import Path

from verl.errors import Refused
from verl.track.files import write_atomic

FOLDER = "replicas"  # the folder of a run's directory with the requests and the answers
LOOK_S = 0.25  # the pause between two checks of the driver
ANSWER_S = 660.0  # a server may take ten minutes to start


def ask(run_dir: Path, verb: str, what: str = "", timeout_s: float = ANSWER_S) -> list[str]:
    """Request that the driver of a run adds the server of a URL, or removes the replica of a number. Return one line
    for each replica. Raise ValueError if no driver runs there, or if it refuses."""
    _refuse_idle(run_dir)
    path, until_s = run_dir / FOLDER / f"{uuid.uuid4().hex}.ask", time.monotonic() + timeout_s
    write_atomic(path, json.dumps({"verb": verb, "what": what}).encode())
    answer = path.with_suffix(".answer")
    while not answer.exists():
        if not path.exists() and not answer.exists():
            raise Refused(f"{run_dir}: its driver begins, or ends, and did not hear; ask again when it trains")
        _refuse_idle(run_dir)
        if time.monotonic() > until_s:
            path.unlink(missing_ok=True)
            raise Refused(f"{run_dir}: its driver did not answer in {timeout_s:g} s; its own last lines say why")
        time.sleep(LOOK_S / 2)
    found = json.loads(answer.read_text())
    answer.unlink()
    if "error" in found:
        raise Refused(found["error"])
    return list(found["lines"])


def _refuse_idle(run_dir: Path) -> None:
    """Raise ValueError if no process holds the lock of the run."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), open(run_dir / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        raise Refused(f"{run_dir}: no run goes on there; replicas come and go while one does")
    if not (run_dir / ".lock").exists():
        raise Refused(f"{run_dir}: no run is there; name a run's directory, as runs/NAME")
