"""SFT rows that are not rendered by a chat template: plain texts, and rows that were tokenised before.

{text}                                                          every token but the first is trained, and the end
{input_ids, labels? | loss_mask? ..., attention_mask?}          tokens that labels and masks do not exclude are trained
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verl.chat.conversation import Rendered
from verl.chat.encoding import rendered_ids
from verl.chat.template import RowRefused, Tokenizer
from verl.config.schema import DataConfig
from verl.data.columns import CONTEXT_COLUMNS
from verl.data.formats import COMPLETION_KEYS
from verl.data.values import kind_of
from verl.errors import Refused

TEXT, IDS, DOCUMENTS = "text", "input_ids", "documents"
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")
"""Columns that are 1 for trained tokens. If a row has several, a token is trained if all of them are 1."""
NOT_TRAINED = -100
"""The value of `labels` for a token that is not trained. Labels are not shifted: each is at its own token, as in
Hugging Face."""
NEVER_READ = {"token_type_ids", "attention_mask", "position_ids"}


def plain_column(row: Mapping[str, Any], cfg: DataConfig) -> str | None:
    """Return the column of a row without a conversation that has its text or ids; None for a row with a conversation,
    or without either column."""
    if any(
        row.get(k) is not None for k in (cfg.messages_key, "conversations", cfg.prompt_key, "question", "instruction")
    ):
        return None
    return next((key for key in (IDS, TEXT) if row.get(key) is not None), None)


def unread_columns(row: Mapping[str, Any], cfg: DataConfig) -> Iterator[str]:
    """Yield the filled columns with a conversation or a text that are not read because another one is."""
    named = row.get(cfg.prompt_key) is not None or row.get("question") is not None
    alpaca = not named and row.get("instruction") is not None
    answers = ("output", *COMPLETION_KEYS) if alpaca else COMPLETION_KEYS if row.get(cfg.prompt_key) is not None else ()
    filled = [key for key in (cfg.messages_key, "conversations", *answers, TEXT, IDS, DOCUMENTS) if row.get(key)]
    read = {cfg.messages_key, "conversations", *answers}
    yield from filled[1:] if filled and filled[0] in read else filled
    if named and row.get(cfg.messages_key) is None:
        yield from (key for key in ("instruction", *CONTEXT_COLUMNS) if row.get(key) and key != cfg.prompt_key)


def text_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the ids [t] int64 of a text with the tokens that the tokenizer adds, ending with the end-of-sequence
    token."""
    ids = rendered_ids(tokenizer(text))
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:].tolist() == [end] else np.append(ids, np.int64(end))


def text_row(tokenizer: Tokenizer, row: Mapping[str, Any], where: str) -> Rendered:
    """Return the training row of a text. Every token but the first is trained; the first has no predictor."""
    text = row[TEXT]
    if not isinstance(text, str):
        raise Refused(f"{where}: {TEXT!r} must be text, got {kind_of(text)}")
    if not text.strip():
        raise RowRefused("an empty text")
    return _trained(text_ids(tokenizer, text), np.array(True))


def ids_row(row: Mapping[str, Any], where: str) -> Rendered:
    """Return the training row of a row that was tokenised before, without its padding."""
    ids = _integers(row[IDS], where, IDS)
    if not len(ids) or ids.min() < 0:
        raise Refused(f"{where}: {IDS!r} must be a list of token ids, got {row[IDS][:8]}")
    mask = np.ones(len(ids), bool)
    if (labels := row.get("labels")) is not None:
        labels = _same_length(ids, labels, where, "labels")
        mask &= labels != NOT_TRAINED
        if not (labels == ids)[mask].all():
            shifted = len(ids) > 1 and (labels[:-1] == ids[1:])[mask[:-1]].all()
            prefix = "those of the next token" if shifted else "other ids"
            raise Refused(
                f"{where}: 'labels' are {prefix} than {IDS!r} where they are not {NOT_TRAINED}."
                f" Fix: labels at the place of their own token, {NOT_TRAINED} where nothing is trained"
            )
    for key in row:
        if key in MASKS and row[key] is not None:
            mask &= _same_length(ids, row[key], where, key, least=0, most=1) == 1
        elif (key.endswith("mask") or key.endswith("masks")) and key not in NEVER_READ and row[key] is not None:
            raise Refused(f"{where}: {key!r} is not read beside {IDS!r}. Fix: one of {', '.join(MASKS)}, or labels")
    real = np.ones(len(ids), bool)
    if (attended := row.get("attention_mask")) is not None:
        real = _same_length(ids, attended, where, "attention_mask", least=0, most=1) == 1
    if (positions := row.get("position_ids")) is not None:
        positions = _same_length(ids, positions, where, "position_ids")[real]
        if not np.array_equal(positions, np.arange(len(positions))):
            raise Refused(f"{where}: 'position_ids' begin anew: several rows in one. Fix: a row for each")
    if len(row.get("seq_lengths") or ()) > 1:
        raise Refused(f"{where}: 'seq_lengths' has several rows in one. Fix: a row for each")
    return _trained(ids[real], mask[real])


def _trained(ids: np.ndarray, mask: np.ndarray) -> Rendered:
    mask = np.array(np.broadcast_to(mask, len(ids)))
    mask[:1] = False
    if not mask.any():
        raise RowRefused("no token to train behind the first", f"{len(ids)} tokens")
    return Rendered(ids, mask)


def _same_length(
    ids: np.ndarray, value: Any, where: str, column: str, least: int = NOT_TRAINED, most: int = 1 << 31
) -> Any:
    found = _integers(value, where, column)
    if len(found) != len(ids):
        raise Refused(f"{where}: {column!r} has {len(found)} values and {IDS!r} has {len(ids)}. Fix: as many")
    if len(found) and not least <= found.min() <= found.max() <= most:
        raise Refused(f"{where}: {column!r} must be from {least} to {most}, got {found.min()} to {found.max()}")
    return found


def _integers(value: Any, where: str, column: str) -> np.ndarray:
    if not isinstance(value, list) or not all(type(item) in (int, bool) for item in value):
        raise Refused(f"{where}: {column!r} must be a list of integers, got {kind_of(value)}")
    return np.array(value, np.int64)
