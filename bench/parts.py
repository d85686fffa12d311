"""A bench that is made of parts: numbers beside limits, a record of each part, a section of bench/RESULTS.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bench.report import BENCH, write_section
from bench.results import Table
from bench.status import _clean_commit, _machine


@dataclass(frozen=True, slots=True)
class Row:
    """A number beside its limit, which it must not exceed; `at_least`: which it must reach. None: it has no limit."""

    what: str
    value: float
    limit: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the limit is kept."""
        return self.limit is None or (self.value >= self.limit if self.at_least else self.value <= self.limit)

    def cells(self) -> tuple[str, str, str]:
        sign = ">=" if self.at_least else "<="
        limit = "" if self.limit is None else f"{sign} {self.limit:g}{'' if self.met else ' MISSED'}"
        return self.what, f"{self.value:.4g}", limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsBench:
    """A bench: its script in this folder and its records are called `name`."""

    name: str
    heading: str
    """Of its section in bench/RESULTS.md."""
    sizes: Sequence[str]
    """Of the model; "tiny" is for tests."""
    size: str
    """The default."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The model of each part that has one of its own, whatever the size is."""

    @property
    def records(self) -> Path:
        return BENCH / "records" / self.name

    def section(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Return the part of bench/RESULTS.md: a table for each recorded part."""
        head = [f"## {self.heading}", f"Command: `python bench/{self.name}.py --record`."]
        for found in records:
            of = f"{found['part']}, {self.models.get(found['part'], found['size'] + ' parameters')}"
            title = f"{of}: {found['machine']}, {found['commit']} on {found['date']} (torch {found['torch']})"
            rows = tuple(Row(**row).cells() for row in found["rows"])
            head.append(Table(title, ("", "verl", "limit"), rows).markdown())
        return "\n\n".join(head)

    def run(self, argv: Sequence[str], about: str | None, parts: Mapping[str, Callable[[str], Iterator[Row]]]) -> int:
        """Run the requested parts; return 1 if a limit is missed. about: the help of the command line · parts: by name,
        each is given the size of the model"""
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default all")
        parser.add_argument("--size", choices=self.sizes, default=self.size)
        parser.add_argument("--threads", type=int, default=1)
        parser.add_argument("--record", action="store_true")
        given = parser.parse_args(argv)
        if unknown := [name for name in given.parts if name not in parts]:
            parser.error(f"{unknown[0]}: there are the parts {', '.join(parts)}")
        if given.record and given.size == "tiny":
            parser.error("--record is for real sizes")
        commit = _clean_commit() if given.record else ""  # before minutes of measuring
        torch.set_num_threads(given.threads)
        met = True
        for part in given.parts or parts:
            found = list[Row]()
            for row in parts[part](given.size):
                found.append(row)
                print(f"{row.cells()[0]:80} {row.cells()[1]:>8} {row.cells()[2]}", flush=True)
            if given.record:
                print(f"recorded in {record(part, given.size, found, self.records, commit)}", flush=True)
                every = [json.loads(path.read_text()) for path in sorted(self.records.glob("*.json"))]
                write_section(self.name, self.section(every))
            met = met and all(row.met for row in found)
        return 0 if met else 1


def record(part: str, size: str, rows: Sequence[Row], folder: Path, commit: str) -> Path:
    """Write the numbers of a part in place of its former ones. Return the path."""
    about = {"part": part, "size": size, "machine": _machine("cpu"), "date": date.today().isoformat()}
    about |= {"commit": commit, "torch": torch.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}.{size}.json"
    path.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return path
