"""The requirements that every process of a run shares with its driver, on every node."""

from __future__ import annotations

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
from verl.processes.environment import source_digest, torch_fault
from verl.rollout.base import Peers, ServerPlace
from verl.track.files import write_atomic

MARK = ".driver"
SOURCE = Path(__file__).parents[1]


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

    def enter(self, *, another_python: bool = False) -> None:
        """Change to the driver's folder in another process, for relative paths. Raise ValueError if Python, torch or
        verl differs, or if this node sees another run directory. another_python: Python may differ, and torch among
        those that verl runs with"""
        here = socket.gethostname()
        here_are = dict(versions())
        if another_python and (fault := torch_fault(here_are["torch"])) is not None:
            raise Refused(f"model.python on node {here}: {fault}")
        for name, theirs in self.versions[-1:] if another_python else self.versions:
            if (ours := here_are[name]) != theirs:
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
    return (("Python", platform.python_version()), ("torch", version("torch")), ("verl source", source_digest(SOURCE)))


def logs_folder(config: Config) -> Path:
    """Return the folder with the output of processes that a run starts: in the run directory if there is one."""
    home = Path(config.run.root_dir) / config.run.name
    return (home if home.is_dir() else Path(tempfile.gettempdir()) / f"verl-{os.getpid()}") / "logs"


def server_place(config: Config, replica: int, peers: Peers) -> ServerPlace:
    """Return the address and the log file of a rollout server. The log is in the run directory if there is one."""
    urls = urls_of(config)
    peers.urls.update(urls)
    return ServerPlace(
        model=str(Path(config.model.path).resolve()),
        log=logs_folder(config) / f"rollout_{replica}.log",
        python=config.rollout.python,
        url=urls[replica] if urls else None,
        peers=peers,
    )
