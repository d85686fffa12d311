"""Read preference rows in their published forms: the prompt and the answers as messages.

{prompt, chosen, rejected} · {chosen, rejected}: whole conversations with the prompt as common beginning
HH-style transcripts: "\\n\\nHuman: ... \\n\\nAssistant: ..." · {prompt, completion, label}: true is desirable
ShareGPT {conversations, chosen, rejected} · Alpaca {instruction, input?, chosen, rejected | output: [better, worse]} ·
{question, chosen, rejected} · an answer with kto_tag in ShareGPT or Alpaca form
{prompt | instruction, completions: [{response, overall_score}, ...]}: the best against the worst

If an answer repeats the prompt, the prompt is used once. Pairs without a difference raise RowRefused and are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl.chat.messages import Messages, Tools, read_messages, refuse_trained
from verl.chat.template import RowRefused
from verl.config.schema import DataConfig
from verl.data.columns import refuse_history, refuse_marks, refuse_unasked
from verl.data.files import RawRow
from verl.data.formats import COMPLETION_KEYS, named_row, shown_tools, with_system
from verl.data.values import kind_of, names_of
from verl.errors import Refused

HH_TURN = re.compile(r"(?:\n\n|^)(Human|Assistant): ?")
HH_TEXT = re.compile(r"\n\n(Human|Assistant):|Human:.*\n\nAssistant:", re.DOTALL)
ANSWERS = (
    *(("chosen", "rejected"), ("chosen_messages", "rejected_messages"), ("chosen_response", "rejected_response")),
    *(("response_chosen", "response_rejected"), ("chosen_answer", "rejected_answer")),
)
"""Names of the columns with the better and the worse answer. The first filled pair of columns is read."""
GAP_KEYS: tuple[tuple[str, ...], ...] = (
    ("margin",),
    *(("chosen_score", "rejected_score"), ("score_chosen", "score_rejected")),
    *(("chosen_rating", "rejected_rating"), ("chosen-rating", "rejected-rating")),
    *(("chosen_avg_rating", "rejected_avg_rating"),),
)
SCORE_KEYS = ("overall_score", "score", "rating", "fine-grained_score")
LABELS = {
    **dict.fromkeys(("true", "1", "1.0", "desirable", "good", "yes"), True),
    **dict.fromkeys(("false", "0", "0.0", "undesirable", "bad", "no"), False),
}
"""Label of an unpaired answer, in lower case -> True if the answer is desirable."""
LEAST_REPEATED_CHARS = 16
"""The least length of a prompt that counts as repeated in a text answer: an answer may begin with a shorter one by
chance."""
ASKING = ("user", "system", "developer")
SAME = "chosen and rejected are the same"


class PreferenceRow(NamedTuple):
    """The prompt and the answers of a row as messages. In an unpaired row `rejected` is None, and `desirable` is the
    label of `chosen`."""

    prompt: Messages
    chosen: Messages
    rejected: Messages | None
    desirable: bool = True
    gap: float | None = None
    tools: tuple[dict[str, Any], ...] = ()


def pair_row(raw: RawRow, cfg: DataConfig) -> PreferenceRow:
    """Return the prompt and the two answers of a row."""
    (row, prompt_key), where = _named_pair(raw, cfg), raw.where
    for key, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if row.get(key) is None:
            raise Refused(
                f"{where}: no {key!r} beside {other!r}: a pair needs a winner and a loser (columns: {names_of(row)}). "
                "Fix: fill it, or verl dpo preference.loss=kto for rows with prompt, completion and label"
            )
    refuse_marks(row, where)
    tools = shown_tools(row, where, cfg)
    texts = _without_prompt(row.get(prompt_key), row["chosen"], row["rejected"])
    chosen, rejected = (_answer(text, where, key, tools) for key, text in zip(("chosen", "rejected"), texts))
    if row.get(prompt_key) is not None:
        prompt = _prompt(row[prompt_key], where, prompt_key, tools)
        (first, chosen), (second, rejected) = _behind(prompt, chosen), _behind(prompt, rejected)
        prompt = _one_prompt(prompt, [first, second], where, prompt_key)
    else:
        shorter = min(len(chosen), len(rejected))
        common = next((k for k in range(shorter) if not _same(chosen[k], rejected[k])), shorter)
        if not common:
            raise Refused(
                f"{where}: no {prompt_key!r}, and 'chosen' and 'rejected' do not begin with the same messages."
                f" Fix: add a {prompt_key!r} column, or give both as whole conversations"
            )
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    for name, context in ((prompt_key, prompt), ("chosen", chosen[:-1]), ("rejected", rejected[:-1])):
        refuse_trained(context, where, name)
    if len(chosen) == len(rejected) and all(map(_same, chosen, rejected)):
        raise RowRefused(SAME)
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        _check_answer(prompt, messages, where, name)
    return PreferenceRow(with_system(prompt, cfg, row), chosen, rejected, gap=gap_of(row, where), tools=tools)


def pair_of_texts(raw: RawRow, cfg: DataConfig) -> tuple[str, str] | None:
    """Return the two texts of a row without a prompt and a conversation; None for any other row."""
    if raw.row.get(cfg.prompt_key) is not None:
        return None
    row, prompt_key = _named_pair(raw, cfg)
    texts = row.get("chosen"), row.get("rejected")
    if row.get(prompt_key) is not None or not all(isinstance(text, str) for text in texts):
        return None
    if any(HH_TEXT.match(text) or text.lstrip()[:1] == "[" for text in texts if text is not None):
        return None
    refuse_unasked(row, raw.where)
    chosen, rejected = (str(text) for text in texts)
    _refuse_blank(chosen, "chosen")
    _refuse_blank(rejected, "rejected")
    if chosen == rejected:
        raise RowRefused(SAME)
    return chosen, rejected


def unpaired_rows(raw: RawRow, cfg: DataConfig) -> list[PreferenceRow]:
    """Return the answer of a row with its label, or the two answers of a pair, labelled desirable and undesirable."""
    row, where, prompt_key = named_row(raw, cfg), raw.where, cfg.prompt_key
    labels = [row[key] for key in ("label", "kto_tag") if row.get(key) is not None]
    if len(labels) > 1 and labels[0] != labels[1]:
        raise Refused(f"{where}: 'label' is {labels[0]!r} and 'kto_tag' is {labels[1]!r}. Fix: drop one of them")
    label = labels[0] if labels else None
    if label is None and all(row.get(key) is not None for key in ("chosen", "rejected")):
        pair = pair_row(raw, cfg)
        assert pair.rejected is not None
        return [
            PreferenceRow(pair.prompt, answer, None, desirable=good, tools=pair.tools)
            for answer, good in ((pair.chosen, True), (pair.rejected, False))
        ]
    for key in (cfg.messages_key, "conversations"):
        if row.get(prompt_key) is None and isinstance(turns := row.get(key), list) and len(turns) > 1:
            row = {**row, prompt_key: turns[:-1], "completion": turns[-1:]}
    columns = f"(columns: {names_of(row)})"
    desirable = LABELS.get(str(label).strip().lower())
    if desirable is None:
        got = repr(label) if isinstance(label, str | int | float) else kind_of(label)
        raise Refused(f"{where}: 'label' must be true (desirable) or false, got {got} {columns}")
    given = [key for key in COMPLETION_KEYS if raw.row.get(key) is not None]
    if len(given) > 1 and row[given[0]] != row[given[1]]:
        raise Refused(f"{where}: {' and '.join(map(repr, given))} are different answers. Fix: drop one of them")
    key = next((key for key in COMPLETION_KEYS if row.get(key) is not None), "completion")
    for needed in (prompt_key, key):
        if row.get(needed) is None:
            raise Refused(f"{where}: no {needed!r}: an unpaired row has prompt, completion and label {columns}")
    refuse_marks(row, where)
    tools = shown_tools(row, where, cfg)
    prompt = _prompt(row[prompt_key], where, prompt_key, tools)
    context, answer = _behind(prompt, _answer(row[key], where, key, tools))
    prompt = _one_prompt(prompt, [context], where, prompt_key)
    refuse_trained((*prompt, *answer[:-1]), where, prompt_key)
    _check_answer(prompt, answer, where, key)
    return [PreferenceRow(with_system(prompt, cfg, row), answer, None, desirable=desirable, tools=tools)]


# ---- the columns -----------------------------------------------------------------------------------------------------


def _named_pair(raw: RawRow, cfg: DataConfig) -> tuple[dict[str, Any], str]:
    """Return the row with its answers and prompt under the names chosen, rejected and the prompt's column, and the name
    of that column. Raise ValueError if two columns could be the prompt or the pair."""
    row, where = raw.row, raw.where
    named = next((keys for keys in ANSWERS if any(row.get(key) is not None for key in keys)), None)
    if named is not None:
        row = {**row, "chosen": row.get(named[0]), "rejected": row.get(named[1])}
    elif isinstance(row.get("completions"), list):
        row = {**row, **_best_and_worst(row["completions"], where)}
    wanted, judged = (any(row.get(k) is not None for k in keys) for keys in ((cfg.prompt_key,), ("chosen", "rejected")))
    if isinstance(answers := row.get("output"), list) and not judged:
        if len(answers) != 2:
            raise Refused(f"{where}: 'output' has {len(answers)} answers; a pair is [better, worse]")
        row = {**row, "chosen": answers[0], "rejected": answers[1], "output": None}
    if wanted:
        refuse_history(row, where)
        return row, cfg.prompt_key
    if isinstance(answers, list) and judged:
        raise Refused(f"{where}: 'output' holds a pair, and so do 'chosen' and 'rejected'. Fix: drop one of them")
    if row.get("conversations") is not None and row.get("instruction") is not None:
        fix = "Fix: drop one, or name the prompt: data.prompt_key=COLUMN"
        raise Refused(f"{where}: 'conversations' and 'instruction' both hold a prompt. {fix}")
    row = named_row(RawRow(where, row), cfg)
    if row.get("conversations") is not None:
        return row, "conversations"
    if row.get(cfg.prompt_key) is None and isinstance(row.get("question"), str):
        row = {**row, cfg.prompt_key: [{"role": "user", "content": row["question"]}]}
    return row, cfg.prompt_key


def _best_and_worst(completions: Sequence[Any], where: str) -> dict[str, Any]:
    """Return the best and the worst of scored completions as a pair with their scores. Raise RowRefused for equal
    scores."""
    scored: list[tuple[float, Any]] = []
    for one in completions:
        score = next((one[k] for k in SCORE_KEYS if one.get(k) is not None), None) if isinstance(one, Mapping) else None
        if isinstance(score, bool) or not isinstance(score, int | float) or one.get("response") is None:
            keys = ", ".join(SCORE_KEYS)
            raise Refused(f"{where}: 'completions' must be objects with response and a score ({keys}). Fix: chosen")
        scored.append((float(score), one["response"]))
    if not scored:
        raise Refused(f"{where}: 'completions' is empty. Fix: drop the row")
    (high, best), (low, worst) = max(scored, key=lambda s: s[0]), min(scored, key=lambda s: s[0])
    if high == low:
        raise RowRefused("completions of one score")
    return {"chosen": best, "rejected": worst, "chosen_score": high, "rejected_score": low}


def gap_of(row: Mapping[str, Any], where: str) -> float | None:
    """Return the reward of the chosen answer minus that of the rejected one, by the column `margin` or two columns of
    scores; None if the row has neither."""
    names = next((names for names in GAP_KEYS if all(row.get(k) is not None for k in names)), ())
    for name in names:
        if isinstance(row[name], bool) or not isinstance(row[name], int | float):
            raise Refused(f"{where}: {name!r} must be a number, got {kind_of(row[name])}")
    values = [float(row[name]) for name in names]
    return values[0] - sum(values[1:]) if values else None


# ---- prompts and answers ---------------------------------------------------------------------------------------------


def _turns(text: str) -> list[dict[str, str]]:
    """Return the turns of an HH-style transcript as messages. A last turn of the assistant without text is left out."""
    parts = HH_TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [{"role": roles[name], "content": prefix.strip()} for name, prefix in zip(parts[::2], parts[1::2])]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _prompt(value: Any, where: str, column: str, tools: Tools) -> Messages:
    if isinstance(value, str) and HH_TEXT.match(value):
        value = _turns(value)
    return read_messages(value, where, column, tools=tools)


def _answer(value: Any, where: str, column: str, tools: Tools) -> Messages:
    """Return an answer as messages: a conversation, an HH-style transcript, or a text as one message of the
    assistant."""
    if isinstance(value, str | list) and not value:
        raise RowRefused(f"an empty {column} answer")
    if isinstance(value, str):
        _refuse_blank(value, column)
        if HH_TEXT.match(value):
            return read_messages(_turns(value), where, column)
    return read_messages([value] if isinstance(value, Mapping) else value, where, column, role="assistant", tools=tools)


def _refuse_blank(text: str, column: str) -> None:
    if not text.strip():
        raise RowRefused(f"an empty {column} answer")


def _without_prompt(prompt: Any, *answers: Any) -> Sequence[Any]:
    """Return the answers without the text of their prompt if all of them begin with it; else unchanged."""
    wanted = prompt.strip() if isinstance(prompt, str) else ""
    if len(wanted) < LEAST_REPEATED_CHARS or HH_TEXT.match(str(prompt)):
        return answers
    repeated = all(isinstance(text, str) and text.lstrip().startswith(wanted) for text in answers)
    return [text.lstrip()[len(wanted) :].lstrip() for text in answers] if repeated else answers


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return True if two messages are equal apart from white space around their text."""
    texts = [m["content"].strip() if isinstance(m["content"], str) else m["content"] for m in (a, b)]
    return a["role"] == b["role"] and texts[0] == texts[1] and a.get("tool_calls") == b.get("tool_calls")


def _behind(prompt: Messages, answer: Messages) -> tuple[Messages | None, Messages]:
    """Return (the prompt, the rest of the answer) if the answer begins with the whole prompt, its last turns, or a
    system turn of its own and the prompt; (None, the answer) if it repeats no turn."""
    longest = 0 if answer[0]["role"] == "assistant" else min(len(prompt), len(answer))
    for k in range(longest, 0, -1):
        if all(map(_same, prompt[-k:], answer)):
            return prompt, answer[k:]
    own_system = answer[0]["role"] in ASKING[1:] and prompt[0]["role"] not in ASKING[1:]
    if own_system and len(answer) > len(prompt) and all(map(_same, prompt, answer[1:])):
        return (answer[0], *prompt), answer[1 + len(prompt) :]
    return None, answer


def _one_prompt(prompt: Messages, repeated: Sequence[Messages | None], where: str, column: str) -> Messages:
    """Return the prompt, with the system turn that the answers repeat before it, if any. Raise ValueError if the
    answers repeat different prompts."""
    found = [context for context in repeated if context is not None]
    if not found:
        return prompt
    alone = len(found) < len(repeated)  # an answer follows the prompt as the column has it
    if (alone and found[0] != prompt) or any(len(context) != len(found[0]) for context in found):
        raise Refused(f"{where}: one answer has a system turn and the other has not. Fix: put it into {column!r}")
    if not all(all(map(_same, context, found[0])) for context in found):
        raise Refused(f"{where}: 'chosen' and 'rejected' begin with different system turns. Fix: drop the row")
    return found[0]


def _check_answer(prompt: Messages, answer: Messages, where: str, name: str) -> None:
    """Raise ValueError if the messages cannot be an answer to the prompt; RowRefused if they are empty."""
    if not answer:
        raise RowRefused(f"an empty {name} answer")
    last = answer[-1]
    if last["role"] != "assistant":
        raise Refused(f"{where}: {name!r} ends with a message of {last['role']!r}; it must be the assistant's")
    if prompt[-1]["role"] == "assistant" and answer[0]["role"] == "assistant":
        prefix = "the prompt ends with an assistant turn, and so does the answer begin: which of them was judged"
        raise Refused(f"{where}: {name!r}: {prefix} cannot be told. Fix: end the prompt with the user's turn")
    if prompt[-1]["role"] in ASKING and answer[0]["role"] in ASKING:
        raise Refused(
            f"{where}: {name!r} begins with a turn of {answer[0]['role']!r} that the prompt does not have, and"
            f" the prompt ends with one of {prompt[-1]['role']!r}. Fix: the answer alone, or behind the same prompt"
        )
    if not str(last["content"]).strip() and not last.get("tool_calls"):
        raise RowRefused(f"an empty {name} answer")
