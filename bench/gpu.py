"""verl on one accelerator against what the device can do, measured in the same run: at most five minutes.

    python bench/gpu.py [--shapes 0.6B,4B] [--only decode,update] [--trl PYTHON] [--record] [--limit-s 300]
    python bench/gpu.py --device cpu --tiny        the same code at toy sizes, wherever torch runs

Random weights of Qwen3's shapes, bf16. Each number is printed when it is there, with its share of the limit. A part
that would begin after --limit-s is named with the command that runs it alone. --record writes bench/records/gpu/ and
this bench's part of bench/RESULTS.md from all records. It needs no network, and nothing beside verl; where TRL is
installed, for this interpreter or the one of --trl, its step is measured too.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_parts import SHAPES, TINY, Bench, Row, Sizes, line_of, table_rows
from bench.gpu_trl import trl_here, trl_step
from bench.report import assemble
from bench.results import Table
from bench.status import _clean_commit

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "records" / "gpu"
PARTS = ("limits", "decode", "idle", "prefill", "publish", "update", "step")
"""In this order; the limits of the device are measured in every run."""
NEVER = "No record: none of these parts has run on a GPU yet."


def measure(
    shape: str, parts: Sequence[str], device: str, sizes: Sizes, until_s: float, trl: str | None = None
) -> tuple[list[Row], list[str]]:
    """Run parts for a shape and print their numbers. Return these, and the parts that would have begun too late. trl:
    an interpreter with TRL"""
    bench, found, late = Bench(shape, device, sizes), list[Row](), list[str]()
    for part in parts:
        if time.monotonic() > until_s:
            late.append(part)
            continue
        with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
            for row in steps_of(bench, Path(folder), trl, until_s) if part == "step" else getattr(bench, part)():
                found.append(row)
                print(line_of(row, shape), flush=True)
    del bench
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return found, late


def steps_of(bench: Bench, folder: Path, trl: str | None, until_s: float) -> Iterator[Row]:
    """Yield verl's step, and TRL's if an interpreter has it; it is stopped at until_s of the monotonic clock."""
    yield from bench.step(folder)
    if trl is not None:
        yield from trl_step(bench, trl, folder, until_s - time.monotonic())


def versions() -> dict[str, str]:
    """Return the versions that a number depends on."""
    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    return found | {"cuda": str(torch.version.cuda)}


def record(shape: str, rows: Sequence[Row], folder: Path, device: str, commit: str) -> Path:
    """Write what was measured, part by part: a part that ran again replaces its former numbers. Return the path."""
    machine = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    path = folder / f"{machine.replace(' ', '_')}.{shape}.json"
    parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    about = {"date": date.today().isoformat(), "commit": commit, **versions()}
    for part in dict.fromkeys(row.part for row in rows):
        parts[part] = about | {"rows": [asdict(row) for row in rows if row.part == part]}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "shape": shape, "parts": parts}, indent=1) + "\n")
    return path


def section(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of bench/RESULTS.md: a table for each card and shape, with the commits that were measured."""
    head = ["## One GPU", "Command: `python bench/gpu.py --record`. bf16, random weights of Qwen3's shapes."]
    if not records:
        return "\n\n".join([*head, NEVER]) + "\n"
    for found in records:
        parts = found["parts"]
        rows = [(found["shape"], Row(**row)) for name in PARTS if name in parts for row in parts[name]["rows"]]
        runs = sorted({f"{p['commit']} on {p['date']} (torch {p['torch']})" for p in parts.values()})
        title = f"{found['machine']}, Qwen3-{found['shape']}: {', '.join(runs)}"
        head.append(Table(title, ("", "verl", "limit", "of the limit"), tuple(table_rows(rows))).markdown())
    return "\n\n".join(head) + "\n"


def write_section(folder: Path, bench: Path) -> None:
    """Write the section from all records in a folder."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    (bench / "sections" / "gpu.md").write_text(section(records))
    assemble(bench)


def main(argv: Sequence[str]) -> int:
    """Run the requested parts; return 1 if a part was left for another run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}; default 0.6B,4B")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the bench itself")
    parser.add_argument("--trl", default=trl_here(), help="an interpreter with TRL; default: this one, if it has it")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--limit-s", type=float, default=300.0)
    asked = parser.parse_args(argv)
    shapes = (asked.shapes or ("tiny" if asked.tiny else "0.6B,4B")).split(",")
    parts = asked.only.split(",")
    if unknown := [name for name in (*shapes, *parts) if name not in (*SHAPES, *PARTS)]:
        parser.error(f"{unknown[0]}: there are the shapes {', '.join(SHAPES)} and the parts {', '.join(PARTS)}")
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch sees no GPU: nothing was measured (--device cpu --tiny tries the bench itself)")
        return 0
    if asked.record and (asked.tiny or not asked.device.startswith("cuda")):
        parser.error("--record is for numbers of a GPU at full sizes")
    commit = _clean_commit() if asked.record else ""  # before minutes of measuring
    until_s, late = time.monotonic() + asked.limit_s, []
    for shape in shapes:
        wanted = [part for part in PARTS if part in ("limits", *parts)]
        rows, left = measure(shape, wanted, asked.device, TINY if asked.tiny else Sizes(), until_s, asked.trl)
        late += [f"--shapes {shape} --only {','.join(left)}"] if left else []
        if asked.record:
            print(f"recorded in {record(shape, rows, RECORDS, asked.device, commit)}", flush=True)
            write_section(RECORDS, ROOT / "bench")
    for options in late:
        print(f"not begun within {asked.limit_s:.0f} s: python bench/gpu.py {options}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
