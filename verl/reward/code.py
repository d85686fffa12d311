"""The reward of programs: the answer's code against tests, in the code sandbox. Expected outputs never go in there."""

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
    """Return the share of the first `max_tests` tests that an answer's program passes, as verl's `continuous`: the last
    fenced block of Python, or where none is marked so the last one without a language. ground_truth: {inputs, outputs,
    fn_name?}, or that as JSON: texts for a program that reads and prints; with fn_name, arguments and the value
    returned. A case has `timeout_s`; a case that did not begin `within_s` has failed.

    Raises ValueError for tests that cannot be read, and where no sandbox works; SandboxGone, so that the sample is
    invalid, where it fails.
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
    """Bytes that a program may print: twice what is expected and some, as a power of two, since each has a sandbox."""
    longest = max(len(json.dumps(expected, default=str)) for expected in outputs)
    return 1 << max(16, (2 * longest + (1 << 15)).bit_length())


@functools.cache
def _sandbox(tier: str, limits: Limits) -> CodeSandbox:
    """One per grader process: it ends with it."""
    return CodeSandbox(tier, limits)


def check_tier(tier: str) -> str:
    """Return the kind of sandbox that programs run in, in words; ValueError where none works and they cannot be
    scored."""
    with CodeSandbox(tier) as sandbox:
        return sandbox.described()


def tests_of(ground_truth: Any) -> tuple[Sequence[Any], Sequence[Any], str]:
    """(inputs, expected outputs, the function's name or "")."""
    try:
        found = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        inputs, outputs = found["inputs"], found["outputs"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"the tests of a program are {{inputs, outputs, fn_name?}}, as JSON; got {e!r}") from None
    if len(inputs) != len(outputs) or not len(inputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs: give as many, and at least one")
    return inputs, outputs, str(found.get("fn_name") or "") if isinstance(found, Mapping) else ""


def _arguments(given: Any) -> list[Any]:
    """A list of arguments; or a text with one JSON value per line, as APPS has them."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)


def same_text(ran: Ran, expected: Any) -> bool:
    """Line by line without trailing space, or word by word with numbers as numbers."""
    wanted = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (ran.stdout, wanted)]
    if lines[0] == lines[1]:
        return True
    prefix, words = ran.stdout.split(), wanted.split()
    return len(prefix) == len(words) and all(a == b or _same_number(a, b) for a, b in zip(prefix, words))


def _same_number(prefix: str, wanted: str) -> bool:
    """For a wanted number with a point or an exponent; whole numbers are compared as they are written."""
    if not re.fullmatch(r"[+-]?\d*\.?\d*(?:[eE][+-]?\d+)?", wanted) or wanted.lstrip("+-").isdigit():
        return False
    try:
        return math.isclose(float(prefix), float(wanted), rel_tol=1e-9, abs_tol=1e-9)
    except ValueError:
        return False


def same_result(ran: Ran, expected: Any) -> bool:
    """Return whether a function's value equals the expected one, as JSON: plain data, whatever class it had in the
    sandbox. Expected are data or their JSON; a value in a list of one is the value, as APPS has it."""
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
    """Return whether two values are equal as in JSON: true is not 1, and 1.0 is 1."""
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in found)
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)
