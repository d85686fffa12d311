"""Preference rows -> token ids with loss masks: pairs (chosen, rejected) and unpaired answers with a label.

Formats: prompt + chosen + rejected · chosen + rejected as whole conversations (the common beginning is the prompt) · HH-style
transcripts ("\\n\\nHuman: ... \\n\\nAssistant: ...") · prompt + completion + label (true: desirable). Texts are single messages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.chat.conversation import Rendered, render_conversation
from verl.chat.template import RowRefused, TemplateAudit, audit_template
from verl.config.schema import DataConfig
from verl.data.files import RawRow, expand_files, read_rows
from verl.data.formats import _columns, _kind, _messages, _with_system

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
GAP_KEYS = (
    ("chosen_score", "rejected_score"),
    ("score_chosen", "score_rejected"),
    ("chosen_rating", "rejected_rating"),
)


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """prompt and answers as messages. Unpaired: `rejected` is None and `desirable` says which kind `chosen` is."""

    prompt: tuple[dict[str, Any], ...]
    chosen: tuple[dict[str, Any], ...]
    rejected: tuple[dict[str, Any], ...] | None
    desirable: bool = True
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens of one row: `mask` marks the answer's own tokens. Unpaired rows have no `rejected`."""

    chosen: Rendered
    rejected: Rendered | None
    desirable: bool = True
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class PairTable:
    pairs: Sequence[Pair]
    rows_read: int
    dropped: Mapping[str, int]
    key: str
    """Changes with the tokens: names what is computed from them once (reference log-probs)."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs[index]

    def summary(self) -> str:
        longest = max(len(r.ids) for p in self.pairs for r in (p.chosen, p.rejected) if r is not None)
        dropped = "".join(f", {n} dropped ({reason})" for reason, n in self.dropped.items())
        return f"{len(self.pairs)} of {self.rows_read} rows; longest {longest} tokens{dropped}"


def to_preference_row(row: Mapping[str, Any], *, where: str, paired: bool, cfg: DataConfig) -> PreferenceRow:
    """One row as messages. ValueError with the file, the line, the reason and the fix."""
    if not paired:
        return _unpaired(row, where, cfg)
    for key, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if row.get(key) is None:
            raise ValueError(
                f"{where}: no {key!r} beside {other!r}: a pair needs a winner and a loser (columns: {_columns(row)}). "
                "Fix: fill it, or verl dpo preference.loss=kto for rows with prompt, completion and label"
            )
    chosen, rejected = _answer(row["chosen"], where, "chosen"), _answer(row["rejected"], where, "rejected")
    if row.get(cfg.prompt_key) is not None:
        prompt = _messages(row[cfg.prompt_key], where, cfg.prompt_key)
        chosen, rejected = (_without(prompt, a) for a in (chosen, rejected))
    else:
        common = 0
        while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
            common += 1
        if not common:
            raise ValueError(
                f"{where}: no {cfg.prompt_key!r}, and 'chosen' and 'rejected' do not begin with the same messages. Fix: add a"
                f" {cfg.prompt_key!r} column, or give both as whole conversations"
            )
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    if chosen == rejected or not chosen or not rejected:
        raise ValueError(f"{where}: 'chosen' and 'rejected' are the same: such a pair says nothing. Fix: drop the row")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1]["role"] != "assistant":
            raise ValueError(
                f"{where}: {name!r} ends with a message of {messages[-1]['role']!r}; it must be the assistant's"
            )
        if not str(messages[-1]["content"]).strip():
            raise ValueError(f"{where}: {name!r} is an empty answer")
    return PreferenceRow(_with_system(prompt, cfg.system_prompt), chosen, rejected, gap=_gap(row, where))


def _unpaired(row: Mapping[str, Any], where: str, cfg: DataConfig) -> PreferenceRow:
    label = row.get("label")
    if not isinstance(label, bool):
        raise ValueError(
            f"{where}: 'label' must be true (desirable) or false, got {_kind(label)} (columns: {_columns(row)})"
        )
    for key in (cfg.prompt_key, "completion"):
        if row.get(key) is None:
            raise ValueError(
                f"{where}: no {key!r}: an unpaired row has prompt, completion and label (columns: {_columns(row)})"
            )
    prompt = _messages(row[cfg.prompt_key], where, cfg.prompt_key)
    answer = _messages(row["completion"], where, "completion", role="assistant")
    return PreferenceRow(_with_system(prompt, cfg.system_prompt), answer, None, desirable=label)


def _answer(value: Any, where: str, column: str) -> tuple[dict[str, Any], ...]:
    """A conversation, an HH-style transcript, or a text: one message of the assistant."""
    if isinstance(value, str) and HH_TURN.match(value):
        parts = HH_TURN.split(value)[1:]
        turns = [
            {"role": "user" if who == "Human" else "assistant", "content": text.strip()}
            for who, text in zip(parts[::2], parts[1::2])
        ]
        return _messages(turns, where, column)
    return _messages(value, where, column, role="assistant")


def _without(prompt: tuple[dict[str, Any], ...], answer: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The answer alone, where it was given with its prompt."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer


def _gap(row: Mapping[str, Any], where: str) -> float | None:
    """True reward of the chosen minus the rejected: `margin`, or two score columns."""
    names: tuple[str, ...] = ("margin",)
    if row.get("margin") is None:
        names = next((pair for pair in GAP_KEYS if all(row.get(k) is not None for k in pair)), ())
    for name in names:
        if isinstance(row[name], bool) or not isinstance(row[name], int | float):
            raise ValueError(f"{where}: {name!r} must be a number, got {_kind(row[name])}")
    if not names:
        return None
    return float(row["margin"]) if names == ("margin",) else float(row[names[0]]) - float(row[names[1]])


def load_pairs(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    paired: bool = True,
    needs_gap: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    max_rows: int | None = None,
) -> PairTable:
    """Read, render and check every row. Rows longer than data.max_tokens_per_row are an error, or dropped with truncation
    left or right (a cut answer is not the one that was judged)."""
    kwargs = dict(template_kwargs or {})
    audit = audit_template(tokenizer, kwargs)
    pairs: list[Pair] = []
    dropped: dict[str, int] = {}
    read = 0
    for raw in (raw for file in expand_files(files) for raw in read_rows(file)):
        if max_rows is not None and read >= max_rows:
            break
        read += 1
        row = to_preference_row(raw.row, where=raw.where, paired=paired, cfg=cfg)
        if needs_gap and row.gap is None:
            raise ValueError(
                f"{raw.where}: no true rewards: this loss needs chosen_score and rejected_score, or margin (columns: {_columns(raw.row)})"
            )
        try:
            pair = _tokens(tokenizer, row, audit, kwargs)
        except RowRefused as e:
            dropped[e.reason] = dropped.get(e.reason, 0) + 1
            continue
        if _fits(pair, cfg, raw):
            pairs.append(pair)
        else:
            dropped["too long"] = dropped.get("too long", 0) + 1
    if not pairs:
        raise ValueError(
            f"no rows left of {read} in {', '.join(files)}: "
            + (", ".join(f"{n} x {r}" for r, n in dropped.items()) or "the files are empty")
        )
    return PairTable(pairs, read, dropped, _key(pairs))


def _tokens(
    tokenizer: PreTrainedTokenizerBase, row: PreferenceRow, audit: TemplateAudit, kwargs: Mapping[str, Any]
) -> Pair:
    def render(answer: tuple[dict[str, Any], ...]) -> Rendered:
        return render_conversation(
            tokenizer,
            [*row.prompt, *answer],
            audit,
            template_kwargs=kwargs,
            train_on="last_assistant",
            train_from=len(row.prompt),
        )[-1]

    return Pair(render(row.chosen), render(row.rejected) if row.rejected is not None else None, row.desirable, row.gap)


def _fits(pair: Pair, cfg: DataConfig, raw: RawRow) -> bool:
    longest = max(len(r.ids) for r in (pair.chosen, pair.rejected) if r is not None)
    if longest <= cfg.max_tokens_per_row:
        return True
    if cfg.truncation == "error":
        raise ValueError(
            f"{raw.where}: {longest} tokens, data.max_tokens_per_row is {cfg.max_tokens_per_row}. Fix: a higher limit, or data.truncation=right to drop such rows"
        )
    return False


def _key(pairs: Sequence[Pair]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for p in pairs:
        for r in (p.chosen, p.rejected):
            if r is not None:
                digest.update(len(r.ids).to_bytes(8, "little") + r.ids.tobytes() + r.mask.tobytes())
    return digest.hexdigest()
