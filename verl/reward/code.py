"""The reward for programs: the code of an answer runs on test inputs in the code sandbox. The expected outputs are
compared outside of the sandbox."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.sandbox.code import CodeSandbox, Limits, Ran

FENCED = re.compile(
    r"```([^\n`]*)\n(.*?)```", re.DOTALL
)  # every language: else a closing fence is taken for an opening one
PYTHON = frozenset({"python", "py", "python3"})


def code_score(
    solution_str: str,
    ground_truth: Any,
    *,
    tier: str = "auto",
    timeout_s: float = 5.0,
    within_s: float = 15.0,
    memory_limit_mb: int = 512,
    max_tests: int = 20,
) -> dict[str, float]:
    """Return the share of the first `max_tests` tests that an answer's program passes (verl's `continuous`), with
    counts.

    The program is the last fenced block marked as Python, or else the last block without a language. Raise ValueError
    for tests that cannot be read, and if no sandbox works on this machine; SandboxGone, which makes the sample invalid,
    if the sandbox fails.
    ground_truth: {inputs, outputs, fn_name?}, or that as JSON. Without fn_name they are standard input and output, with
        fn_name the arguments and the returned value of that function
    timeout_s: the time limit of a test
    within_s: tests that have not begun by then count as failed
    """
    inputs, outputs, function = tests_of(ground_truth)
    program, n = program_of(solution_str), min(len(inputs), max_tests)
    if program is None:
        return {"score": 0.0, "tests": float(n), "passed": 0.0, "has_code": 0.0}
    room = _room_for(outputs[:n])
    sandbox = _sandbox(tier, Limits(wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_limit_mb, output_bytes=room))
    cases: list[dict[str, Any]]
    if function:
        cases = [{"call": function, "arguments": _arguments(given)} for given in inputs[:n]]
    else:
        cases = [{"stdin": "\n".join(given) if isinstance(given, list) else str(given)} for given in inputs[:n]]
    ran = sandbox.run_all(program, cases, within_s)
    same = same_result if function else same_text
    passed = sum(one.status == "ok" and same(one, expected) for one, expected in zip(ran, outputs))
    return {"score": passed / n, "tests": float(n), "passed": float(passed), "has_code": 1.0}


def program_of(answer: str) -> str | None:
    blocks = [(head.strip().lower().split(" ")[0], text) for head, text in FENCED.findall(answer)]
    marked = [text for language, text in blocks if language in PYTHON]
    return next(reversed(marked or [text for language, text in blocks if not language]), None)


def _room_for(outputs: Sequence[Any]) -> int:
    """Return the limit in bytes for a program's output: more than twice the longest expected output. It is a power of
    two, since each different limit has a sandbox of its own."""
    longest = max(len(json.dumps(expected, default=str)) for expected in outputs)
    return 1 << max(16, (2 * longest + (1 << 15)).bit_length())


@functools.cache
def _sandbox(tier: str, limits: Limits) -> CodeSandbox:
    """Return the sandbox of this process with these limits. It exists until the process ends."""
    return CodeSandbox(tier, limits)


def check_tier(tier: str) -> str:
    """Return a description of the sandbox for programs. Raise ValueError if no sandbox works on this machine."""
    with CodeSandbox(tier) as sandbox:
        return sandbox.described()


def tests_of(ground_truth: Any) -> tuple[Sequence[Any], Sequence[Any], str]:
    """Return (inputs, expected outputs, the name of the function or "") of a ground truth. Raise ValueError if it has
    another form."""
    try:
        found = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        inputs, outputs = found["inputs"], found["outputs"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"the tests of a program are {{inputs, outputs, fn_name?}}, as JSON; got {e!r}") from None
    if len(inputs) != len(outputs) or not len(inputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs: give as many, and at least one")
    return inputs, outputs, str(found.get("fn_name") or "") if isinstance(found, Mapping) else ""


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a call. They are given as a list, or as a text with one JSON value per line (APPS)."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)


def same_text(ran: Ran, expected: Any) -> bool:
    """Return True if the printed text equals the expected one line by line without trailing spaces, or word by word
    with numbers compared by value."""
    wanted = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (ran.stdout, wanted)]
    if lines[0] == lines[1]:
        return True
    prefix, words = ran.stdout.split(), wanted.split()
    return len(prefix) == len(words) and all(a == b or _same_number(a, b) for a, b in zip(prefix, words))


def _same_number(prefix: str, wanted: str) -> bool:
    """Return True if two words are equal numbers up to rounding. The expected one must have a point or an exponent:
    whole numbers are compared as text."""
    if not re.fullmatch(r"[+-]?\d*\.?\d*(?:[eE][+-]?\d+)?", wanted) or wanted.lstrip("+-").isdigit():
        return False
    try:
        return math.isclose(float(prefix), float(wanted), rel_tol=1e-9, abs_tol=1e-9)
    except ValueError:
        return False


def same_result(ran: Ran, expected: Any) -> bool:
    """Return True if a function's value equals the expected value. Both are compared as JSON data, regardless of the
    Python class.

    The expected value may also be written as JSON, or be in a list of one (APPS).
    """
    wanted = [expected]
    if isinstance(expected, str):
        with contextlib.suppress(ValueError, RecursionError):
            wanted.append(json.loads(expected))
    wanted += [one[0] for one in wanted if isinstance(one, list) and len(one) == 1]
    try:
        found = json.loads(ran.value or "")
        return any(_equal(found, one) for one in wanted)
    except (ValueError, RecursionError):
        return False


def _equal(found: Any, wanted: Any) -> bool:
    """Return True if two values are equal as in JSON: true is not 1, but 1.0 is 1."""
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in found)
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)
