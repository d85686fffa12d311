"""The tables for the console and for bench/RESULTS.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import rich.table

from bench.results import Table

BENCH = Path(__file__).resolve().parent
NOTES = """\
How to read it. A step is everything between the ends of two steps (rollout, reward, update, publish, logs). verl runs as
`verl train recipe=quickstart` does, with its verified weight syncs, samples and logs; its extra last step, which holds the
checkpoint, is dropped. TRL runs without gradient checkpointing and with its whole batch in one pass, which favours it here. Every
arm starts from the same checkpoint, takes the same prompts in the same order and samples at temperature 1 without truncation;
the arms run in turn, and the first step of each process is dropped. "verl vs" above 1 means that verl is better; its
bracket is the least and the most of any one round. CPU time counts the reward process and all threads; it moves far less
with the load than wall time. Peak memory adds a child process to its parent, shared pages counted twice.

The limit counts 2 FLOPs per parameter and token in rollout and 6 in the update, attention included, prompts once per
group, at the best matmul rate seen in this run. It leaves out norms, softmax, sampling and the optimizer: a floor, not a target."""


def as_rich(table: Table) -> rich.table.Table:
    out = rich.table.Table(title=table.title, title_justify="left")
    for index, name in enumerate(table.head):
        out.add_column(name, justify="left" if index == 0 else "right")
    for row in table.rows:
        out.add_row(*row)
    return out


SECTIONS = (
    "laptop",
    "ragged",
    "breakdown",
    "gpu",
    "lora",
    "vlm",
    "algorithms",
    "against",
    "workers",
    "ray_runs",
    "weights",
    "publish",
    "engines",
    "router",
    "planner",
    "mapping",
    "areal",
    "calibration",
    "ledger",
    "plan_memory",
    "distill",
    "distill_steps",
    "agents",
)


def write_section(name: str, *parts: str) -> None:
    """Write a bench's section, with these paragraphs, and RESULTS.md with it."""
    (BENCH / "sections" / f"{name}.md").write_text("\n\n".join(parts) + "\n")
    assemble(BENCH)


def assemble(folder: Path) -> None:
    """Write RESULTS.md from the sections that the benches wrote."""
    head = "# Bench results\n\nEach section is written by the command it names; edits are overwritten.\n"
    paths = [folder / "sections" / f"{name}.md" for name in SECTIONS]
    (folder / "RESULTS.md").write_text("\n".join([head, *(p.read_text() for p in paths if p.exists())]))


def document(about: Mapping[str, str], verdicts: Sequence[str], tables: Sequence[Table]) -> str:
    """Its section of bench/RESULTS.md."""
    head = ["## The quickstart: verl, TRL and a naive loop on one CPU", "", "Written by `make bench`."]
    facts = [f"- {name}: {value}" for name, value in about.items()]
    said = [f"**{line}**" for line in verdicts]
    return "\n\n".join(["\n".join(head), "\n".join(facts), *said, *(t.markdown() for t in tables), NOTES]) + "\n"
