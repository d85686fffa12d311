"""What every process of a run must have in common with its driver, on whichever node it is."""

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
from verl.rollout.base import Peers, ServerPlace
from verl.track.files import write_atomic

MARK = ".driver"
SOURCE = Path(__file__).parents[1]
BUILT = {"__pycache__", ".pyc", ".so"}  # from the sources, perhaps just now, and not the same on every node


@dataclass(frozen=True, slots=True)
class Home:
    """The driver's host, folder and versions, and its run directory with what its mark says."""

    host: str
    folder: str
    versions: tuple[tuple[str, str], ...]
    run_dir: Path | None = None
    mark: str = ""

    def enter(self) -> None:
        """In another process: go to the driver's folder, for relative paths. ValueError where this is another Python,
        torch or verl, or where the run directory is another."""
        here = socket.gethostname()
        for (name, ours), (_, theirs) in zip(versions(), self.versions, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"node {here} has {name} {ours}, and the driver on {self.host} has {theirs}: "
                    "install the same on every node, and start it again there"
                )
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        if self.run_dir is None:
            return
        mark = self.run_dir / MARK
        if not mark.is_file() or mark.read_text() != self.mark:
            raise ValueError(
                f"node {here} does not see the run directory {self.run_dir} of the driver on {self.host}: "
                "set run.root_dir to a folder that all nodes share"
            )


def home_of(run_dir: Path | None) -> Home:
    """Of this process, which marks the run directory."""
    mark = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}\n"
    if run_dir is not None:
        write_atomic(run_dir / MARK, mark.encode())
        run_dir = run_dir.absolute()
    return Home(socket.gethostname(), os.getcwd(), versions(), run_dir, mark)


def versions() -> tuple[tuple[str, str], ...]:
    """(what, which): two commits of verl, or a changed file, are two sources."""
    source = hashlib.sha256()
    for path in sorted(p for p in SOURCE.rglob("[!.]*") if BUILT.isdisjoint((p.suffix, *p.parts)) and p.is_file()):
        source.update(str(path.relative_to(SOURCE)).encode() + path.read_bytes())
    return (
        ("Python", platform.python_version()),
        ("torch", version("torch")),
        ("verl source", source.hexdigest()[:12]),
    )


def server_place(config: Config, replica: int, peers: Peers) -> ServerPlace:
    """Of a rollout engine that is one. Its log is in the run's directory, where there is one."""
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
