"""The interpreters of the arms: each peer in an environment of its own, made on first use and kept."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_TIMEOUT_S = 1200.0


class Unavailable(RuntimeError):
    """An arm cannot run here; the message is the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path
    requirements: tuple[str, ...]
    constraints: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> str:
        """Changes with what is to be installed, and for which Python."""
        said = (sys.version, *self.requirements, self.constraints.read_text())
        return hashlib.sha256("\n".join(said).encode()).hexdigest()


def ensure(environment: Environment, log: Path) -> Path:
    """The environment's interpreter, installed if it is missing or out of date."""
    stamp = environment.folder / ".stamp"
    if environment.python.exists() and stamp.exists() and stamp.read_text() == environment.stamp:
        return environment.python
    shutil.rmtree(environment.folder, ignore_errors=True)
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    run_logged([sys.executable, "-m", "venv", str(environment.folder)], log, timeout_s=INSTALL_TIMEOUT_S)
    run_logged(
        [*pip, "-c", str(environment.constraints), *environment.requirements], log, timeout_s=INSTALL_TIMEOUT_S
    )
    stamp.write_text(environment.stamp)
    return environment.python


def run_logged(command: list[str], log: Path, *, timeout_s: float, env: dict[str, str] | None = None) -> None:
    """Run with the output in `log`. Unavailable, with the last line that says why, if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    what = " ".join(Path(word).name for word in command[:4])
    with open(log, "ab") as output:
        start = output.tell()
        try:
            code = subprocess.run(command, stdout=output, stderr=output, env=env, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what} did not end within {timeout_s:.0f} s (log: {log})") from None
        except OSError as e:
            raise Unavailable(f"{what} could not start: {e}") from None
    if code != 0:
        written = log.read_bytes()[start:].decode(errors="replace")
        raise Unavailable(f"{what} failed with exit code {code}: {why(written)} (log: {log})")


def why(output: str) -> str:
    """The line of a failed program's output that names the cause: the last that looks like an error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|Error|[\w.]*(Error|Exception|Interrupt))\b", line)]
    return (errors or lines or ["no output"])[-1][:300]
