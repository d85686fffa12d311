"""The quickstart's task: two- and three-digit sums and differences with a column-by-column chain of thought.

prompt    254+337=
response  4+7+0=1,1;5+3+1=9,0;2+3+0=5,0;#591
reward    1 if and only if the number after # is right

An imperfect teacher that mostly drops every carry shows the form; RL finds the carries. Rows are split by a hash of the
problem, so that nothing held out is ever trained on, in either stage.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-=,;# "
DATA_SOURCE = "verl/arithmetic"
HELD_OUT_SHARE = 16  # one problem in so many
Problem = tuple[int, int, str]


def held_out(problem: Problem) -> bool:
    digest = hashlib.blake2b(prompt(problem).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def prompt(problem: Problem) -> str:
    a, b, op = problem
    return f"{a}{op}{b}="


def answer(problem: Problem) -> int:
    a, b, op = problem
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def trace(problem: Problem, *, forget_carries: bool) -> str:
    """Return the worked answer; with `forget_carries` the imperfect teacher's, with the result of its columns."""
    a, b, op = problem
    width = max(len(str(a)), len(str(b)))
    carry, digits, out = 0, "", []
    for x, y in zip(str(a)[::-1].ljust(width, "0"), str(b)[::-1].ljust(width, "0")):
        value = int(x) + int(y) + carry if op == "+" else int(x) - int(y) - carry
        new = int(value > 9 if op == "+" else value < 0)
        shown = 0 if forget_carries else new
        out.append(f"{x}{op}{y}{op}{carry}={value % 10},{shown};")
        digits = str(value % 10) + digits
        carry = shown
    return "".join(out) + "#" + str(int(digits) if forget_carries else answer(problem))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 if the text ends in # and the right number."""
    found = re.search(r"#(\d+)\s*$", solution_str)
    return float(found is not None and found.group(1) == str(ground_truth))


def problems(seed: int, *, held: bool, three_digits: bool = False) -> Iterator[Problem]:
    """Distinct problems of one side of the split, for ever as long as there are new ones."""
    rng = random.Random(seed)
    seen: set[Problem] = set()
    while True:
        n = rng.randint(2, 3)
        m = rng.randint(2, n) if rng.random() < 0.3 else n
        a, b = rng.randint(10 ** (n - 1), 10**n - 1), rng.randint(10 ** (m - 1), 10**m - 1)
        op = rng.choice("+-")
        problem = (max(a, b), min(a, b), op) if op == "-" else (a, b, op)
        if problem not in seen and held_out(problem) == held and (not three_digits or problem[0] > 99 < problem[1]):
            seen.add(problem)
            yield problem


def rl_row(problem: Problem, index: int, held: bool) -> dict[str, Any]:
    """In verl's format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": prompt(problem)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer(problem))},
        "extra_info": {"split": "test" if held else "train", "index": index},
    }


def write_rl(path: Path, count: int, *, seed: int, held: bool, three_digits: bool = False) -> Path:
    source = islice(problems(seed, held=held, three_digits=three_digits), count)
    return write_jsonl(path, [rl_row(p, i, held) for i, p in enumerate(source)])


def write_sft(path: Path, count: int, *, seed: int, forget_share: float) -> Path:
    """Conversations of the imperfect teacher, training side of the split only."""
    rng = random.Random(seed + 1)
    rows = []
    for p in islice(problems(seed, held=False), count):
        reply = trace(p, forget_carries=rng.random() < forget_share)
        rows.append({"messages": [{"role": "user", "content": prompt(p)}, {"role": "assistant", "content": reply}]})
    return write_jsonl(path, rows)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
