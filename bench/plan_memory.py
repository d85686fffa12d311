"""The planned memory of a rank beside the tensors that it holds, for models of 10M to 1.5B parameters.

    python bench/plan_memory.py [FIRST LAST]

Each case is a process of its own: a step of 16 answers on one, two or four ranks, of which the most bytes of tensors in
a phase are those of torch's host allocator. A case that bench/records/planner/memory.json has is not measured again;
its record names the last commit that had changed the package when it was measured. Older ones name none, and those
under LoRA are of code before its present update on CPUs (2431629c). Writes its part of bench/RESULTS.md
(bench/sections/plan_memory.md).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / part) for part in ("", "tests", "tests/distributed", "tests/numerics")
)

from bench.report import write_section
from bench.results import Table
from tests.distributed.measured_memory import Measured, measured_bytes, most_bytes, planned_bytes, write_model

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "records" / "planner" / "memory.json"
WITHIN = 0.1
PACKED, SHARED, AGAIN = "packed", "shared prefix", "checkpointing"
LARGE = {"prompt": 2, "answer": 14}
CASES = (
    *(Measured("10M", "full", "one", how) for how in (PACKED, SHARED, AGAIN)),
    *(Measured("10M", "full", "FSDP", how) for how in (PACKED, SHARED, AGAIN)),
    Measured("10M", "full", "FSDP x TP", PACKED),
    Measured("10M", "full", "HSDP", SHARED),
    Measured("10M", "full", "FSDP x PP", AGAIN),
    *(Measured("100M", "full", "one", how) for how in (PACKED, AGAIN)),
    *(Measured("100M", "full", layout, PACKED) for layout in ("TP", "FSDP x TP")),
    Measured("100M", "full", "FSDP", SHARED),
    Measured("100M", "full", "FSDP, four", AGAIN),
    *(Measured("100M", "LoRA", "one", how) for how in (PACKED, SHARED, AGAIN)),
    *(Measured("100M", "LoRA", "FSDP", how) for how in (PACKED, AGAIN)),
    Measured("100M", "LoRA", "FSDP x TP", SHARED),
    *(Measured("100M", "nf4", "one", how) for how in (PACKED, SHARED, AGAIN)),
    Measured("100M", "int8", "one", PACKED),
    Measured("1.5B", "nf4", "one", AGAIN, **LARGE),
    Measured("1.5B", "int8", "one", SHARED, **LARGE),
    Measured("1.5B", "LoRA", "one", PACKED, **LARGE),
    Measured("1.5B", "LoRA", "FSDP", AGAIN, **LARGE),
)
HEAD = ("model", "trained", "ranks", "rows", "planned, MB", "measured, MB", "error")


def row_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a case."""
    wanted, found = (most_bytes(record[key]) / 1e6 for key in ("planned", "measured"))
    case = record["case"]
    trains = case["trains"] if case["trains"] in ("full", "LoRA") else f"LoRA on {case['trains']}"
    return (
        case["model"],
        trains,
        case["layout"],
        case["how"],
        f"{wanted:,.0f}",
        f"{found:,.0f}",
        f"{error(record):+.1%}",
    )


def error(record: Mapping[str, Any]) -> float:
    """Return the relative error of the largest planned bytes over phases, against the largest measured ones."""
    return most_bytes(record["planned"]) / most_bytes(record["measured"]) - 1


def measure(known: list[dict[str, Any]], cases: Sequence[tuple[int, Measured]], folder: Path) -> None:
    """Measure the cases that the record does not have, each in a process of its own, and write the record."""
    for number, case in cases:
        if any(one["case"] == asdict(case) for one in known):
            continue
        command = [sys.executable, __file__, "one", str(number), str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        passes, found = json.loads(done.stdout.splitlines()[-1])
        known.append({"case": asdict(case), "commit": _commit_of("verl"), "passes": passes, "measured": found})
        print(asdict(case), found, flush=True)
        RECORD.write_text(json.dumps(known, indent=1) + "\n")


def _commit_of(folder: str) -> str:
    """Return the last commit that changed a folder of the repository. Raise ValueError if it has changes beside it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if changed := git("status", "--porcelain", "--", folder):
        raise ValueError(f"{changed.split()[-1]} is not committed: a record names the commit that was measured")
    return git("log", "-1", "--format=%h", "--", folder)


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["one"]:
        case = CASES[int(argv[1])]
        print(json.dumps(measured_bytes(case, write_model(Path(argv[2]) / case.model, case.model))))
        return 0
    first, last = map(int, argv[:2]) if len(argv) == 2 else (0, len(CASES))
    known = json.loads(RECORD.read_text()) if RECORD.is_file() else []
    records = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as made:
        measure(known, list(enumerate(CASES))[first:last], Path(made))
        for case in CASES:
            if (found := next((one for one in known if one["case"] == asdict(case)), None)) is not None:
                folder = write_model(Path(made) / case.model, case.model)
                records.append(found | {"planned": planned_bytes(case, folder, found["passes"])})
    errors, unnamed = [abs(error(one)) for one in records], sum("commit" not in one for one in records)
    about = (
        f"Command: `python bench/plan_memory.py`: {len(records)} steps of training, each in processes of its own. The "
        f"planned bytes of the fullest rank, in the phase with the most, are off by {statistics.median(errors):.1%} on "
        f"the median and {max(errors):.1%} at most; {sum(e <= WITHIN for e in errors)} are within {WITHIN:.0%}. The "
        f"items of the plan were corrected with these cases, and none was held out; {unnamed} records do not name the "
        "commit that was measured."
    )
    table = Table("Bytes of tensors of a rank, float32 on CPUs", HEAD, tuple(map(row_of, records)))
    print(table.markdown(), about, sep="\n\n")
    write_section("plan_memory", "## The planner's memory beside measured steps", about, table.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
