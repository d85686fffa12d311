r"""Scoring of mathematical answers: GSM8K, MATH (`\boxed{}`), DAPO (`Answer:`) and search-QA exact match. Pure
functions of texts. Only `math_equal` goes beyond string work: it asks math-verify (sympy), imported on use."""

from __future__ import annotations

import re
import string
import threading
from collections.abc import Iterable

CLIP_CHARS = 300  # verl looks for the answer in the last 300 characters only
MAX_ANSWER_CHARS = 1000  # longer than any true answer; sympy would only burn its time limit on it
VERIFY_TIMEOUT_S = 5
INVALID_ANSWER = "[INVALID]"

_GSM8K_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def gsm8k_answer(solution_str: str, method: str = "strict") -> str | None:
    """The final number of a GSM8K solution. strict: after the last `#### `; flexible: the last number of the text."""
    tail = solution_str[-CLIP_CHARS:]
    if method == "strict":
        found = _GSM8K_STRICT.findall(tail)
        return _plain_number(found[-1]) if found else None
    if method != "flexible":
        raise ValueError(f"method={method!r}: must be 'strict' or 'flexible'")
    numbers = [n for n in (_plain_number(m).rstrip(".") for m in _NUMBER.findall(tail)) if any(c.isdigit() for c in n)]
    return numbers[-1] if numbers else None


def gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if the final number equals the truth, `format_score` if there is another number, 0 if there is none."""
    answer = gsm8k_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == _plain_number(str(ground_truth)).strip() else format_score


def _plain_number(text: str) -> str:
    return text.replace(",", "").replace("$", "")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}` (or `\boxed x`), None if there is none."""
    at = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if at < 0:
        return None
    rest = text[text.index("box", at) + 3 :].removeprefix("ed").lstrip(" ")
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest, maxsplit=1)[0].strip() or None
    depth = 0
    for i, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:i]
    return None  # cut off inside the box


_MATH_REMOVED = re.compile(
    r"\\[!,;:]|\\ |\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\?\$|\\?%"
)
_MATH_UNIT = re.compile(r"\\(?:text|mbox|mathrm)\{\s[^{}]*\}(?:\^\{?[23]\}?)?\s*$")
_MATH_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")


def normalize_math(text: str) -> str:
    """A canonical spelling for comparison as strings: spacing, units, degree signs, fractions, roots, thousands."""
    out = text.replace("\n", "")
    if r"\begin" not in out:  # there, a double backslash ends a row; elsewhere it is a backslash escaped twice
        out = out.replace("\\\\", "\\")
    out = re.sub(r"\\[dt]frac", r"\\frac", out)
    out = _MATH_UNIT.sub("", _MATH_REMOVED.sub("", out))
    out = _MATH_WRAPPER.sub(r"\1", out)
    out = re.sub(r"^\s*[A-Za-z]{1,2}\s*=(?!=)", "", out) if out.count("=") == 1 else out
    out = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", out)
    out = re.sub(r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}", out)
    out = re.sub(r"\\frac\s*([0-9A-Za-z])", r"\\frac{\1}", out)
    out = re.sub(r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}", out)
    out = re.sub(r"\s+", "", out).rstrip(".")
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", out):
        out = out.replace(",", "")
    if out == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", out)


def math_equal(answer: str, truth: str) -> bool:
    """Equal as normalised strings, or as mathematics by math-verify. Raises TimeoutError if math-verify takes over 5 s:
    no verdict is not a wrong answer. Its timeouts are signals, so outside a main thread there is none, and the caller's
    limit (the pool's) is the only one."""
    if normalize_math(answer) == normalize_math(truth):
        return True
    if not answer.strip() or not truth.strip() or len(answer) > MAX_ANSWER_CHARS:
        return False
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    limit_s = VERIFY_TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0
    try:
        gold = parse(f"${truth}$", parsing_timeout=limit_s, raise_on_error=True)
        given = parse(f"${answer}$", parsing_timeout=limit_s, raise_on_error=True)
        return bool(verify(gold, given, timeout_seconds=limit_s, raise_on_error=True))
    except TimeoutException:
        raise TimeoutError(f"math-verify gave no verdict on {answer[:80]!r} within {VERIFY_TIMEOUT_S} s") from None
    except MemoryError:
        raise
    except Exception:
        # The text comes from the model, and sympy raises anything at all on what is not mathematics: not equal.
        return False


def math_score(solution_str: str, ground_truth: str) -> float:
    r"""1.0 if the last `\boxed{}` of the solution equals the truth, else 0.0 (no box: 0.0)."""
    answer = last_boxed(solution_str)
    return float(answer is not None and math_equal(answer, _unboxed(ground_truth)))


def marked_math_score(solution_str: str, ground_truth: str) -> float:
    r"""As `math_score`, but without a box the text after the last "answer is" or "Answer:" counts."""
    answer = last_boxed(solution_str)
    if answer is None:
        found = re.findall(r"(?i)answers?\s*(?:is|are|:)\s*:?\s*([^\n]+)", solution_str)
        answer = found[-1].strip().rstrip(".").strip("$") if found else None
    return float(answer is not None and math_equal(answer, _unboxed(ground_truth)))


def geometry3k_score(solution_str: str, ground_truth: str, format_score: float = 0.1) -> float:
    r"""(1 - format_score) x (boxed answer equals the truth) + format_score x (`<think>...</think>...\boxed{...}`)."""
    end_of_thought = solution_str.find("</think>")
    box = solution_str.find(r"\boxed{", end_of_thought)
    formatted = solution_str.startswith("<think>") and end_of_thought > 0 and box > 0 and "}" in solution_str[box:]
    return (1.0 - format_score) * math_score(solution_str, ground_truth) + format_score * formatted


def _unboxed(truth: str) -> str:
    inner = last_boxed(truth) if "box" in truth else None
    return truth if inner is None else inner


# The normalisation of answers that Minerva (arXiv 2206.14858, appendix D) and, after it, DAPO use.
_MINERVA_SPELLING = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"))
_MINERVA_WORDS = ((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"))
# Removed one after the other, in this order; between spaces.
_MINERVA_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples \\text{s} \\text{.} \\text{\ns} \\text{}^2 "
    '\\text{}^3 \\text{\n} \\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)


def normalize_minerva(answer: str) -> str:
    """The canonical spelling that DAPO's scorer compares."""
    out = answer.split("=")[-1]
    for before, after in (*_MINERVA_SPELLING, *_MINERVA_WORDS):
        out = out.replace(before, after)
    for removed in _MINERVA_REMOVED.split(" "):
        out = out.replace(removed, "")
    out = re.sub(r".*?(\$.*?\$).*", r"\1", out)
    for command in ("text", "textbf", "overline"):
        out = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", out)
    out = re.sub(r"\\boxed\{(.*)\}", r"\1", out)
    out = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", out)
    out = re.sub(r"sqrt([^{])", r"sqrt{\1}", out).replace("$", "")
    digits = out.replace(",", "")
    return (digits if digits.isdigit() else out).strip()


def dapo_score(solution_str: str, ground_truth: str) -> dict[str, object]:
    r"""DAPO: {"score": 1.0 | -1.0, "acc": bool, "pred": str} from the last `Answer:` line, else the last `\boxed{}`."""
    tail = solution_str[-CLIP_CHARS:]
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", tail)
    answer = found[-1] if found else last_boxed(tail)
    pred = INVALID_ANSWER if answer is None else normalize_minerva(answer)
    correct = pred == normalize_minerva(ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def search_qa_score(solution_str: str, ground_truth: str | Iterable[str], score: float = 1.0) -> float:
    """Search-R1: `score` if the last <answer> matches one of the truths exactly, after normalisation; else 0. A text
    with more than ten answer tags gets a quarter: it was fishing."""
    # What precedes each closing tag; no regular expression, which would be quadratic in unclosed tags.
    closed = [part.partition("<answer>") for part in solution_str.split("</answer>")[:-1]]
    found = [inner for _, tag, inner in closed if tag]
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if not found or normalize_qa(found[-1]) not in {normalize_qa(str(t)) for t in truths}:
        return 0.0
    fishing = solution_str.count("<answer>") > 10 or solution_str.count("</answer>") > 10
    return score / 4 if fishing else score


def normalize_qa(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
