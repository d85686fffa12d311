"""Preference rows -> token ids with loss masks: pairs (chosen, rejected) and unpaired answers with a label.

{prompt, chosen, rejected} · {chosen, rejected}: whole conversations, whose common beginning is the prompt
HH-style transcripts: "\\n\\nHuman: ... \\n\\nAssistant: ..." · {prompt, completion, label}: true is desirable
ShareGPT {conversations, chosen, rejected} · Alpaca {instruction, input?, chosen, rejected | output: [better, worse]} ·
{system?, question, chosen, rejected} · of ShareGPT and Alpaca also an answer with kto_tag
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from verl.chat.conversation import Rendered, render_conversation
from verl.chat.messages import Messages, Tools, read_messages, refuse_trained
from verl.chat.template import RowRefused, Tokenizer, shared
from verl.config.schema import DataConfig
from verl.data.files import RawRow
from verl.data.formats import named_row, shown_tools, with_system
from verl.data.media import refuse_media
from verl.data.render import Counts, Entry, RenderJob
from verl.data.source import ConversationTable, LoadReport, load_arrays, refuse_empty
from verl.data.values import kind_of, names_of

HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
GAP_KEYS: tuple[tuple[str, ...], ...] = (
    ("margin",),
    ("chosen_score", "rejected_score"),
    ("score_chosen", "score_rejected"),
    ("chosen_rating", "rejected_rating"),
)


class PreferenceRow(NamedTuple):
    """prompt and answers as messages. Unpaired: `rejected` is None and `desirable` says which kind `chosen` is."""

    prompt: Messages
    chosen: Messages
    rejected: Messages | None
    desirable: bool = True
    gap: float | None = None
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens of one row: `mask` marks the answer's own tokens. Unpaired rows have no `rejected`."""

    chosen: Rendered
    rejected: Rendered | None
    desirable: bool = True
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class PairTable:
    """`key` changes with the tokens: it names what is computed from them once (reference log-probs)."""

    pairs: Sequence[Pair]
    report: LoadReport
    key: str

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs[index]

    def summary(self) -> str:
        dropped = "".join(f", {n} dropped ({reason})" for reason, n in self.report.refused.items())
        longest = f"longest {self.report.longest_tokens} tokens"
        return f"{len(self.pairs)} of {self.report.rows_read} rows; {longest}{dropped}"


def load_pairs(
    files: Sequence[str],
    tokenizer: Tokenizer,
    cfg: DataConfig,
    *,
    paired: bool = True,
    needs_gap: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    max_rows: int | None = None,
    stops: tuple[int, ...] = (),
) -> PairTable:
    """Read, render and check every row. Rows longer than data.max_tokens_per_row are an error, or dropped with
    truncation left or right (a cut answer is not the one that was judged). stops: see `RenderJob`."""
    job = PairJob(tokenizer, cfg, template_kwargs or {}, stops, paired=paired, needs_gap=needs_gap)
    arrays, report, key = load_arrays(files, job, max_rows)
    refuse_empty(report)
    answers, pairs = ConversationTable(arrays, report, key), list[Pair]()
    for k in range(0, len(answers), 2 if paired else 1):
        gap = float(arrays["gap"][k])
        rejected = answers[k + 1] if paired else None
        pairs.append(Pair(answers[k], rejected, bool(arrays["desirable"][k]), None if math.isnan(gap) else gap))
    digest = hashlib.blake2b(digest_size=16)
    for name in ("ids_lengths", "ids", "mask"):
        digest.update(arrays[name].tobytes())
    return PairTable(pairs, report, digest.hexdigest())


@dataclass(kw_only=True)
class PairJob(RenderJob):
    """Preference rows -> ids and loss masks of the answers: two entries per pair, chosen first, or one."""

    paired: bool
    needs_gap: bool

    flat: ClassVar = {"ids": np.int32, "mask": np.bool_}
    scalar: ClassVar = {"desirable": np.bool_, "gap": np.float64}

    def entries(self, raw: RawRow, counts: Counts) -> list[Entry]:
        row = (pair_row if self.paired else unpaired_row)(raw, self.cfg)
        if self.needs_gap and row.gap is None:
            raise ValueError(
                f"{raw.where}: no true rewards: this loss needs chosen_score and rejected_score, or margin"
                f" (columns: {names_of(raw.row)})"
            )
        every = row.prompt + row.chosen + (row.rejected or ())
        refuse_media(raw.row, every, raw.where)
        self.count_text(every, raw.where, counts)
        conversations = [row.prompt + answer for answer in (row.chosen, row.rejected) if answer is not None]
        kwargs, start = self.template_kwargs, len(row.prompt)
        rendered = [
            render_conversation(
                self.tokenizer, messages, self.audit, kwargs, tools=row.tools, train_from=start, last_only=True
            )[-1]
            for messages in conversations
        ]
        longest = max(len(r.ids) for r in rendered)
        if longest > self.cfg.max_tokens_per_row:
            if self.cfg.truncation == "error":
                raise ValueError(
                    f"{raw.where}: {longest} tokens, data.max_tokens_per_row is {self.cfg.max_tokens_per_row}."
                    " Fix: a higher limit, or data.truncation=right to drop such rows"
                )
            raise RowRefused("too long")
        facts = {"desirable": row.desirable, "gap": math.nan if row.gap is None else row.gap}
        return [{"ids": r.ids, "mask": r.mask, **facts} for r in rendered]


def pair_row(raw: RawRow, cfg: DataConfig) -> PreferenceRow:
    (row, prompt_key), where = _named_pair(raw, cfg), raw.where
    for key, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if row.get(key) is None:
            raise ValueError(
                f"{where}: no {key!r} beside {other!r}: a pair needs a winner and a loser (columns: {names_of(row)}). "
                "Fix: fill it, or verl dpo preference.loss=kto for rows with prompt, completion and label"
            )
    tools = shown_tools(row, where, cfg)
    chosen, rejected = (_answer(row[key], where, key, tools) for key in ("chosen", "rejected"))
    if row.get(prompt_key) is not None:
        prompt = read_messages(row[prompt_key], where, prompt_key, tools=tools)
        # The answer alone, where it was given with its prompt.
        chosen, rejected = (a[len(prompt) :] if a[: len(prompt)] == prompt else a for a in (chosen, rejected))
        if prompt[-1]["role"] == "assistant" and any(a and a[0]["role"] == "assistant" for a in (chosen, rejected)):
            said = f"{prompt_key!r} ends with an assistant turn, and so does the answer begin: which of them was judged"
            raise ValueError(f"{where}: {said} cannot be told. Fix: end the prompt with the user's turn")
    else:
        common = shared(chosen, rejected)
        if not common:
            raise ValueError(
                f"{where}: no {prompt_key!r}, and 'chosen' and 'rejected' do not begin with the same messages."
                f" Fix: add a {prompt_key!r} column, or give both as whole conversations"
            )
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    for name, context in ((prompt_key, prompt), ("chosen", chosen[:-1]), ("rejected", rejected[:-1])):
        refuse_trained(context, where, name)
    if chosen == rejected or not chosen or not rejected:
        raise ValueError(f"{where}: 'chosen' and 'rejected' are the same: such a pair says nothing. Fix: drop the row")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if (role := messages[-1]["role"]) != "assistant":
            raise ValueError(f"{where}: {name!r} ends with a message of {role!r}; it must be the assistant's")
        if not str(messages[-1]["content"]).strip():
            raise ValueError(f"{where}: {name!r} is an empty answer")
    return PreferenceRow(with_system(prompt, cfg), chosen, rejected, gap=_gap(row, where), tools=tools)


def _named_pair(raw: RawRow, cfg: DataConfig) -> tuple[dict[str, Any], str]:
    """(the row, the column of its prompt), with what other formats call chosen, rejected and prompt under these names.
    ValueError where two columns could be meant."""
    row, where, system = raw.row, raw.where, raw.row.get("system")
    asked, judged = (any(row.get(k) is not None for k in keys) for keys in ((cfg.prompt_key,), ("chosen", "rejected")))
    if isinstance(answers := row.get("output"), list) and not judged:
        if len(answers) != 2:
            raise ValueError(f"{where}: 'output' has {len(answers)} answers; a pair is [better, worse]")
        row = {**row, "chosen": answers[0], "rejected": answers[1], "output": None}
    if asked:
        return row, cfg.prompt_key
    if isinstance(answers, list) and judged:
        raise ValueError(f"{where}: 'output' holds a pair, and so do 'chosen' and 'rejected'. Fix: drop one of them")
    if row.get("conversations") is not None and row.get("instruction") is not None:
        fix = "Fix: drop one, or name the prompt: data.prompt_key=COLUMN"
        raise ValueError(f"{where}: 'conversations' and 'instruction' both hold a prompt. {fix}")
    row = named_row(RawRow(where, row), cfg)
    if row.get("conversations") is not None:
        return row, "conversations"
    if row.get(cfg.prompt_key) is None and isinstance(row.get("question"), str):
        first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        row = {**row, cfg.prompt_key: [*first, {"role": "user", "content": row["question"]}]}
    return row, cfg.prompt_key


def unpaired_row(raw: RawRow, cfg: DataConfig) -> PreferenceRow:
    row, where, prompt_key = named_row(raw, cfg), raw.where, cfg.prompt_key
    if row.get(prompt_key) is None and isinstance(turns := row.get("conversations"), list) and len(turns) > 1:
        row = {**row, prompt_key: turns[:-1], "completion": turns[-1:]}
    label = row.get("label") if row.get("label") is not None else row.get("kto_tag")
    columns = f"(columns: {names_of(row)})"
    if not isinstance(label, bool):
        raise ValueError(f"{where}: 'label' must be true (desirable) or false, got {kind_of(label)} {columns}")
    for key in (prompt_key, "completion"):
        if row.get(key) is None:
            raise ValueError(f"{where}: no {key!r}: an unpaired row has prompt, completion and label {columns}")
    tools = shown_tools(row, where, cfg)
    prompt = read_messages(row[prompt_key], where, prompt_key, tools=tools)
    answer = read_messages(row["completion"], where, "completion", role="assistant", tools=tools)
    refuse_trained((*prompt, *answer[:-1]), where, prompt_key)
    return PreferenceRow(with_system(prompt, cfg), answer, None, desirable=label, tools=tools)


def _answer(value: Any, where: str, column: str, tools: Tools) -> Messages:
    """A conversation, an HH-style transcript, or a text: one message of the assistant."""
    if isinstance(value, str) and HH_TURN.match(value):
        parts = HH_TURN.split(value)[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        turns = [{"role": roles[who], "content": text.strip()} for who, text in zip(parts[::2], parts[1::2])]
        return read_messages(turns, where, column)
    return read_messages([value] if isinstance(value, Mapping) else value, where, column, role="assistant", tools=tools)


def _gap(row: Mapping[str, Any], where: str) -> float | None:
    """True reward of the chosen minus the rejected: `margin`, or two score columns."""
    names = next((names for names in GAP_KEYS if all(row.get(k) is not None for k in names)), ())
    for name in names:
        if isinstance(row[name], bool) or not isinstance(row[name], int | float):
            raise ValueError(f"{where}: {name!r} must be a number, got {kind_of(row[name])}")
    values = [float(row[name]) for name in names]
    return values[0] - sum(values[1:]) if values else None
