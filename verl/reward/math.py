r"""Scoring of mathematical answers: GSM8K, MATH (`\boxed{}`), DAPO (`Answer:`) and search-QA exact match. Pure
functions of texts. Only `math_equal` does more than string work: it uses math-verify (sympy), imported on use."""

from __future__ import annotations

import re
import string
import threading
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

CLIP_CHARS = 300  # verl looks for the answer in the last 300 characters only
MAX_ANSWER_CHARS = 1000  # longer than any true answer, and sympy would exceed its time limit
VERIFY_TIMEOUT_S = 5
INVALID_ANSWER = "[INVALID]"

_GSM8K_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def gsm8k_answer(solution_str: str, method: str = "strict") -> str | None:
    """Return the final number of a GSM8K solution; None if there is none. method: strict: the number after the last
    `#### `; flexible: the last number of the text."""
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
    """Return `score` if the final number equals the truth, `format_score` if it is another number, 0 if there is
    none."""
    answer = gsm8k_answer(solution_str, method)
    if answer is None:
        return 0.0
    truth = _plain_number(str(ground_truth)).strip()
    return score if answer == truth or (method == "flexible" and _equal_number(answer, truth)) else format_score


def _equal_number(answer: str, truth: str) -> bool:
    try:
        return Decimal(answer) == Decimal(truth)
    except InvalidOperation:  # for example 1.2.3
        return False


def _plain_number(text: str) -> str:
    return text.replace(",", "").replace("$", "")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}` (or `\boxed x`); None if there is none, or it is
    not closed."""
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
    """Return a canonical spelling of an answer for comparison as strings: spaces, units, degree signs, fractions,
    roots, separators of thousands."""
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


_SYMBOLS = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "∅": r"\emptyset "}
_SYMBOLS |= {"≤": r"\le ", "≥": r"\ge ", "°": r"^\circ ", r"\varnothing": r"\emptyset ", r"\left": "", r"\right": ""}
_SYMBOLS |= {"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"}
_SYMBOL = re.compile("|".join(rf"{re.escape(sign)}(?![a-zA-Z])" if "\\" in sign else sign for sign in _SYMBOLS))
_EMPTY = re.compile(r"(?i)(\\text\{)?\s*(the\s+)?(empty set|null set|no (real )?(solutions?|roots?))\s*\}?\.?")
_OR = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])|\\text\{\s*(?:or|and)\s*\}|(?<=\s)(?:or|and)(?=\s)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[eE][+-]?\d{1,2})(?![\w.])")
_MIXED = re.compile(r"(?<![\d.])(\d+)(?:\s+(\d+)/(\d+)|(?:\s|\\[,; ])*\\[dt]?frac\s*(?:\{(\d+)\}\{(\d+)\}|(\d)(\d)))")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent)\s*\.?$")
_KNOWN_UNIT = r"(?:[cmk]?m|[mk]?g|[mk]?l|s|h|hr|ft|in)(?![a-zA-Z])"
_UNIT = re.compile(
    r"\s*\\(?:text|mbox|mathrm)\{\s*(?P<text>[A-Za-z][A-Za-z/ .]*)\}(?P<text_power>\^\{?[23]\}?)?\.?$"
    rf"|(?<=[\d}})$])\s+(?P<plain>{_KNOWN_UNIT}|[a-z]{{3,}}(?:[/ ][a-z]+)*)(?P<plain_power>\^\{{?[23]\}}?)?\.?$"
    r"|\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?P<degrees>)$"
)
_UNIT_NAMES = {"centimet": "cm", "millimet": "mm", "kilomet": "km", "met": "m"}
_SIZES = {
    **{"mm": ("m", r"10^{-3}"), "cm": ("m", r"10^{-2}"), "m": ("m", "1"), "km": ("m", r"10^3")},
    **{
        "cm2": ("m2", r"10^{-4}"),
        "m2": ("m2", "1"),
        "km2": ("m2", r"10^6"),
        "cm3": ("m3", r"10^{-6}"),
        "m3": ("m3", "1"),
    },
    **{"mg": ("g", r"10^{-3}"), "g": ("g", "1"), "kg": ("g", r"10^3"), "ml": ("l", r"10^{-3}"), "l": ("l", "1")},
    **dict.fromkeys(("s", "sec", "second"), ("s", "1")),
    **dict.fromkeys(("min", "minute"), ("s", "60")),
    **dict.fromkeys(("h", "hr", "hour"), ("s", "3600")),
}
"""Unit -> (its base unit, the factor to it)."""
_BASE = re.compile(r"_\s*\{?\s*(\d+)\s*\}?\s*$")
_NAME = re.compile(r"^\s*([A-Za-z]{1,2})\s*=(?!=)")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)")


def _canonical(text: str) -> str:
    """Return the text with expressions rewritten that math-verify misreads: signs beyond ASCII, "or", repeating
    decimals, 3e5, 1 1/2."""
    out = _EMPTY.sub(r"\\emptyset", text) if _EMPTY.fullmatch(text.strip()) else text
    out = _OR.sub(" , ", _SYMBOL.sub(lambda found: _SYMBOLS[found[0]], out))
    out = re.sub(r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}", out)
    out = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", out.strip().strip("$").strip())
    out = re.sub(r"^\\\{\s*\\\}$", r"\\emptyset", out).replace(r"\emptyset ", r"\emptyset")
    out = re.sub(r"\\text\{\s*(-?[\d.,/]+)\s+([A-Za-z][A-Za-z/ ]*)\}", r"\1\\text{ \2}", out)
    out = _REPEATING.sub(_repeating, out)
    out = _SCIENTIFIC.sub(lambda found: format(Decimal(found[1]), "f"), out)
    return _MIXED.sub(_mixed, out)


def _repeating(found: re.Match[str]) -> str:
    whole, once, period = found.groups()
    bottom = (10 ** len(period) - 1) * 10 ** len(once)
    top = int(whole + once + period) - int(whole + once or "0")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _mixed(found: re.Match[str]) -> str:
    whole, top, bottom = (int(part) for part in found.groups() if part is not None)
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}" if top < bottom else found[0]


def _unit(text: str) -> tuple[str, str]:
    """Return (value, unit) of a quantity; the unit is "" if there is none."""
    if text.startswith(("\\$", "$")):
        return text.lstrip("\\$"), "dollar"
    found = _UNIT.search(text)
    if found is None or found.start() == 0:
        return text, ""
    name = (found["text"] or found["plain"] or "degree").strip(" .").lower()
    power = "".join(c for c in found["text_power"] or found["plain_power"] or "" if c.isdigit())
    for word, times in (("square ", "2"), ("cubic ", "3")):
        if name.startswith(word):
            name, power = name.removeprefix(word), times
    name = re.sub(r"^(\w*met)(?:er|re)s?$", lambda long: _UNIT_NAMES.get(long[1], long[0]), name)
    return text[: found.start()], (name.removesuffix("s") if len(name) > 3 else name) + power


def _word(text: str) -> bool:
    r"""Return True if the text is a name or a word, not a product of variables: in `\text`, in capitals, or of at least
    four letters."""
    bare = _MATH_WRAPPER.sub(r"\1", text).strip("(). ")
    return bare.isalpha() and (bare != text or len(bare) > 3 or (bare.isupper() and len(bare) > 1))


def _listed(text: str) -> int:
    """Return the number of values in a list or a tuple; 0 for any other text (a set, a relation, an interval, a sign
    for several values). Separators of thousands do not count."""
    if re.search(r"\\(pm|mp|le|ge|in|cup|infty|begin|ldots|dots)(?![a-z])|[<>=]|^\\?\{", text):
        return 0
    bare = re.sub(r"(?<=\d)(?:,(?:\\!)?|\{,\}|\\,)(?=\d{3}(?!\d))", "", text).strip(" ,")
    inside = re.fullmatch(r"[(\[]([^()\[\]]*)[)\]]", bare)
    depth, count = 0, 1
    for char in inside[1] if inside else bare:
        depth += (char in "([{") - (char in ")]}")
        count += char == "," and depth == 0
    return count


def _differ_as_written(given: str, true: str) -> bool:
    """Return True if two texts differ in a property that math-verify ignores: how often a value is listed, square
    brackets around one value, the terms of a ratio, the case of a letter, the base of a number."""
    if given == true:
        return False
    counts = _listed(given), _listed(true)
    if 0 not in counts and counts[0] != counts[1]:
        return True
    single = [re.fullmatch(r"\[[^,\[\]]*\]", text) is not None for text in (given, true)]
    if single[0] != single[1] and not any(text.startswith(("(", r"\{")) for text in (given, true)):
        return True
    ratios = [re.fullmatch(r"(\d+)\s*:\s*(\d+)", text) for text in (given, true)]
    if ratios[0] and ratios[1]:
        return ratios[0].groups() != ratios[1].groups()
    if len(given) == len(true) == 1 and given.isalpha() and true.isalpha():
        return True
    bases = [_BASE.search(text) if text[:1].isdigit() else None for text in (given, true)]
    return bases[0] is not None and (bases[1] is None or bases[0][1] != bases[1][1])


def _brackets(text: str) -> str:
    """Return "{" for a set, "(" for a list in round or square brackets, "" for neither."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "{"
    return "(" if text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in text else ""


def _rounds_to(answer: str, truth: str) -> bool:
    """Return True if both are plain decimals, the truth has at least six digits, and the answer rounds to it."""
    plain = re.compile(r"-?\d*\.\d+")
    if not plain.fullmatch(answer) or not plain.fullmatch(truth) or len(truth.replace(".", "").lstrip("-0")) < 6:
        return False
    return round(Decimal(answer), len(truth.partition(".")[2])) == Decimal(truth)


def math_equal(answer: str, truth: str) -> bool:
    r"""Return True if two answers are equal as normalised strings, or as mathematics by math-verify.

    The comparison is exact: a decimal is the fraction that it spells, and 1.41421356 is not \sqrt{2}. `50\%` equals 50
    and 0.5. Units count if both have one. A set is not a tuple, and a word not a product of its letters; in `5=6` both
    sides must be right. Raise TimeoutError if math-verify takes over 5 s, since that does not show that the answer is
    wrong. This limit uses signals, so it exists only in the main thread; elsewhere only the limit of the caller (the
    pool) applies.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return normalize_math(answer) == normalize_math(truth)
    given, true = _canonical(answer), _canonical(truth)
    spelled = [_MATH_WRAPPER.sub(r"\1", text).strip("(). ") for text in (given, true)]
    if (_word(given) or _word(true)) and all(text.isalpha() for text in spelled):
        return spelled[0].casefold() == spelled[1].casefold()
    (given_value, given_unit), (true_value, true_unit) = _unit(given), _unit(true)
    if given_unit and true_unit and given_unit != true_unit:
        sizes = _SIZES.get(given_unit), _SIZES.get(true_unit)
        if sizes[0] is None or sizes[1] is None or sizes[0][0] != sizes[1][0]:
            return False
        return _same(*(rf"({v}) \cdot {size[1]}" for v, size in zip((given_value, true_value), sizes) if size))
    if _differ_as_written(given, true):
        return False
    names = _NAME.match(given), _NAME.match(true)
    if names[0] and names[1] and names[0][1] != names[1][1]:
        return False
    if {_brackets(given), _brackets(true)} == {"{", "("}:
        return False
    parts = _EQUALS.split(given_value)
    if len(parts) > 1 and not _EQUALS.search(true) and not re.search(r"[,;<>&]", given):
        numbers = [part for part in parts if not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", part))]
        return len(parts) <= 5 and all(math_equal(part, true) for part in dict.fromkeys([*numbers, parts[-1]]))
    per_cent = bool(_PERCENT.search(given_value)), bool(_PERCENT.search(true_value))
    given_value, true_value = _PERCENT.sub("", given_value), _PERCENT.sub("", true_value)
    if _same(given_value, true_value):
        return True
    if per_cent[0] != per_cent[1]:
        given_value, true_value = (
            rf"\frac{{{value}}}{{100}}" if of_hundred else value
            for value, of_hundred in zip((given_value, true_value), per_cent)
        )
        return _same(given_value, true_value)
    return False


def _same(answer: str, truth: str) -> bool:
    """Return True if two texts are equal as normalised strings, or by math-verify with each decimal as an exact
    fraction."""
    if not answer.strip() or not truth.strip():
        return not answer.strip() and not truth.strip()
    if normalize_math(answer) == normalize_math(truth) or _rounds_to(answer, truth):
        return True
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    limit_s = VERIFY_TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0
    exact = [_DECIMAL.sub(_fraction, text) for text in (truth, answer)]
    try:
        gold, given = (parse(f"${text}$", parsing_timeout=limit_s, raise_on_error=True) for text in exact)
        options = {"allow_set_relation_comp": True, "raise_on_error": True}
        if verify(gold, given, timeout_seconds=limit_s, **options):
            return True
        constants = _with_constants(gold), _with_constants(given)
        return constants != (gold, given) and bool(verify(*constants, timeout_seconds=limit_s, **options))
    except TimeoutException:
        raise TimeoutError(f"math-verify gave no verdict on {answer[:80]!r} within {VERIFY_TIMEOUT_S} s") from None
    except MemoryError:
        raise
    except Exception:
        # The text is from the model, and sympy raises any exception for text that is not mathematics. It is not equal.
        return False


def _with_constants(parsed: list[Any]) -> list[Any]:
    """Return the result of math-verify's parser with the symbols e and i replaced by the constants."""
    from sympy import E, Expr, I

    numbers = {"e": E, "i": I}
    return [
        part.subs({s: numbers[str(s)] for s in part.free_symbols if str(s) in numbers})
        if isinstance(part, Expr)
        else part
        for part in parsed
    ]


def _fraction(found: re.Match[str]) -> str:
    whole, decimals = found.groups()
    return rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"


def math_score(solution_str: str, ground_truth: str) -> float:
    r"""Return 1.0 if the last `\boxed{}` of the solution equals the truth, else 0.0, also without a box."""
    answer = last_boxed(solution_str)
    return float(answer is not None and math_equal(answer, _unboxed(ground_truth)))


def marked_math_score(solution_str: str, ground_truth: str) -> float:
    r"""Return the score as `math_score` does, but for a solution without a box compare the text after its last "answer
    is" or "Answer:"."""
    answer = last_boxed(solution_str)
    if answer is None:
        found = re.findall(r"(?i)answers?\s*(?:is|are|:)\s*:?\s*([^\n]+)", solution_str)
        answer = found[-1].strip().rstrip(".").strip("$") if found else None
    return float(answer is not None and math_equal(answer, _unboxed(ground_truth)))


def geometry3k_score(solution_str: str, ground_truth: str, format_score: float = 0.1) -> float:
    r"""Return (1 - format_score) x (boxed answer equals the truth) + format_score x
    (`<think>...</think>...\boxed{...}`)."""
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
    """Return the canonical spelling that DAPO's rule compares."""
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
    r"""Return DAPO's {"score": 1.0 | -1.0, "acc": bool, "pred": str}, by the last `Answer:` line, else the last
    `\boxed{}`."""
    tail = solution_str[-CLIP_CHARS:]
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", tail)
    answer = found[-1] if found else last_boxed(tail)
    pred = INVALID_ANSWER if answer is None else normalize_minerva(answer)
    correct = pred == normalize_minerva(ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def search_qa_score(solution_str: str, ground_truth: str | Iterable[str], score: float = 1.0) -> float:
    """Return Search-R1's score: `score` if the last <answer> equals one of the truths after normalisation, else 0. A
    text with more than ten answer tags gets a quarter of it, since it tries many answers."""
    # The text before each closing tag, without a regular expression: that would be quadratic in unclosed tags.
    closed = [part.partition("<answer>") for part in solution_str.split("</answer>")[:-1]]
    found = [inner for _, tag, inner in closed if tag]
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if not found or normalize_qa(found[-1]) not in {normalize_qa(str(t)) for t in truths}:
        return 0.0
    fishing = solution_str.count("<answer>") > 10 or solution_str.count("</answer>") > 10
    return score / 4 if fishing else score


def normalize_qa(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces (SQuAD)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
