"""The requirements that every process of a run shares with its driver, on every node."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import tempfile
import uuid
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from verl.config.schema import Config
from verl.config.served import urls_of
from verl.errors import Refused
from verl.rollout.base import Peers, ServerPlace
from verl.track.files import write_atomic

MARK = ".driver"
SOURCE = Path(__file__).parents[1]
BUILT = {"__pycache__", ".pyc", ".so"}  # made from the sources, maybe just now, and different on every node


@dataclass(frozen=True, slots=True)
class DriverHost:
    """The driver's environment, which every other process must match."""

    host: str
    """The host name of the driver."""
    folder: str
    """The driver's working folder."""
    versions: tuple[tuple[str, str], ...]
    """(name, version) of Python, torch and verl."""
    run_dir: Path | None = None
    """The run directory; None: the run has none."""
    mark: str = ""
    """The content of the mark file in the run directory."""

    def enter(self) -> None:
        """Change to the driver's folder in another process, for relative paths. Raise ValueError if Python, torch or
        verl differs, or if this node sees another run directory."""
        here = socket.gethostname()
        for (name, ours), (_, theirs) in zip(versions(), self.versions, strict=True):
            if ours != theirs:
                raise Refused(
                    f"node {here} has {name} {ours}, and the driver on {self.host} has {theirs}: "
                    "install the same on every node, and start it again there"
                )
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        if self.run_dir is None:
            return
        mark = self.run_dir / MARK
        if not mark.is_file() or mark.read_text() != self.mark:
            raise Refused(
                f"node {here} does not see the run directory {self.run_dir} of the driver on {self.host}: "
                "set run.root_dir to a folder that all nodes share"
            )


def driver_host(run_dir: Path | None) -> DriverHost:
    """Describe this process, and write the mark into the run directory."""
    mark = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}\n"
    if run_dir is not None:
        write_atomic(run_dir / MARK, mark.encode())
        run_dir = run_dir.absolute()
    return DriverHost(socket.gethostname(), os.getcwd(), versions(), run_dir, mark)


def versions() -> tuple[tuple[str, str], ...]:
    """Return (name, version) of Python, torch and verl. Two commits of verl, or a changed file, are two versions."""
    source = hashlib.sha256()
    for path in sorted(p for p in SOURCE.rglob("[!.]*") if BUILT.isdisjoint((p.suffix, *p.parts)) and p.is_file()):
        source.update(str(path.relative_to(SOURCE)).encode() + path.read_bytes())
    return (
        ("Python", platform.python_version()),
        ("torch", version("torch")),
        ("verl source", source.hexdigest()[:12]),
    )


def server_place(config: Config, replica: int, peers: Peers) -> ServerPlace:
    """Return the address and the log file of a rollout server. The log is in the run directory if there is one."""
    home, urls = Path(config.run.root_dir) / config.run.name, urls_of(config)
    peers.urls.update(urls)
    folder = home if home.is_dir() else Path(tempfile.gettempdir()) / f"verl-{os.getpid()}"
    return ServerPlace(
        model=str(Path(config.model.path).resolve()),
        log=folder / "logs" / f"rollout_{replica}.log",
        python=config.rollout.python,
        url=urls[replica] if urls else None,
        peers=peers,
    )
