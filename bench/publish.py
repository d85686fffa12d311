"""A publish of the quickstart's model to one vLLM: how long it takes, and its parts.

    python bench/publish.py --python .venv-vllm/bin/python [--rounds N]

vLLM runs as a child, as in a run with rollout.engine=vllm, and no request with it; the trainer's end is this process.
Writes its part of bench/RESULTS.md (bench/sections/publish.md).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.report import write_section
from bench.results import Spread, Table
from bench.weights import DROPPED, PARTS, publishes
from verl.models import tiny
from verl.recipes import arithmetic
from verl.rollout import vllm
from verl.rollout.base import RolloutContext, ServerPlace

ROOT = Path(__file__).resolve().parents[1]


async def published(python: str, rounds: int, folder: Path) -> tuple[float, list[tuple[str, ...]]]:
    """MB of the model · rows."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    module = tiny.qwen3(tokenizer)
    place = ServerPlace(model=str(tiny.save(module, tokenizer, folder / "m")), log=folder / "log", python=python)
    context = RolloutContext(hf_config=module.config, max_context_tokens=256, dtype=torch.float32, place=place)
    now = {name: tensor.detach() for name, tensor in module.named_parameters()}  # a tied head is not among them
    kept = await publishes(now, vllm.build(vllm.Options(threads=1), context), rounds)
    rows: list[tuple[str, ...]] = [("whole (at most 0.3)", Spread.of([one.whole_s for one in kept]).text(3))]
    rows += [(part, Spread.of([one.seconds[part] for one in kept]).text(3)) for part in PARTS]
    return sum(tensor.nbytes for tensor in now.values()) / 1e6, rows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm" / "bin" / "python"), help="that has vLLM")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        size_mb, rows = asyncio.run(published(given.python, given.rounds, Path(folder)))
    table = Table("seconds", ("", "median [quartiles]"), tuple(rows))
    about = (
        f"Command: `python bench/publish.py --rounds {given.rounds}`, after {DROPPED} rounds that are dropped; "
        f"{os.cpu_count()} cores, 1-minute load {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end. "
        f"{size_mb:.1f} MB of float32 through shared memory into one vLLM 0.32 on the CPU, without a canary."
    )
    print(table.markdown())
    write_section("publish", "## A publish of the quickstart to vLLM", about, table.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
