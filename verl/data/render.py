"""Rows -> token ids, chunk by chunk: the jobs that run in-process or in worker processes, and how results are packed."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.chat.conversation import Rendered, TrainOn, render_conversation
from verl.chat.template import RenderError, RowRefused, TemplateAudit, Tool, refuse_unsupported, render_prompt
from verl.data.files import RawRow
from verl.data.formats import ConversationRow, TaskRow, to_conversation_row, to_task_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_KEY = "\0bytes"  # JSON has no bytes; no column is called this
ID_BYTES = 6
CUT_AWAY = "no assistant token is left after truncation"


@dataclass(slots=True)
class Packed:
    """The result of some rows in a row: flat arrays by name, and what became of the rows that are not in them."""

    arrays: dict[str, np.ndarray]
    rows_read: int = 0
    rows_filtered: int = 0
    rows_truncated: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    example: str = ""  # the first refusal, with its place
    shortest_filtered: int = 0


def merge(parts: Iterable[Packed]) -> Packed:
    """Concatenate, in order; `numbers` (row of the chunk) becomes the row of the whole."""
    out, columns = Packed({}), list[dict[str, np.ndarray]]()
    for part in parts:
        columns.append({**part.arrays, "numbers": part.arrays["numbers"] + out.rows_read})
        out.rows_read += part.rows_read
        out.rows_filtered += part.rows_filtered
        out.rows_truncated += part.rows_truncated
        out.example = out.example or part.example
        out.shortest_filtered = min(filter(None, (out.shortest_filtered, part.shortest_filtered)), default=0)
        for reason, count in part.refused.items():
            out.refused[reason] = out.refused.get(reason, 0) + count
    if columns:
        out.arrays = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFormat:
    """How a row becomes messages. Also needed when a row is decoded later."""

    prompt_key: str
    tools_key: str | None
    system_prompt: str | None

    def read(self, row: Mapping[str, Any], where: str) -> TaskRow:
        return to_task_row(
            row, where=where, prompt_key=self.prompt_key, tools_key=self.tools_key, system_prompt=self.system_prompt
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """RL rows -> prompt ids."""

    tokenizer: PreTrainedTokenizerBase
    audit: TemplateAudit
    format: TaskFormat
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Tool] | None
    max_prompt_tokens: int
    filter_overlong_prompts: bool
    truncation: str

    def options(self) -> dict[str, Any]:
        """Everything but the tokenizer that the result depends on."""
        f = self.format
        return {
            "job": "prompts",
            "format": [f.prompt_key, f.tools_key, f.system_prompt],
            "template_kwargs": dict(self.template_kwargs),
            "tools": self.tools,
            "length": [self.max_prompt_tokens, self.filter_overlong_prompts, self.truncation],
        }

    def __call__(self, rows: Sequence[RawRow], progress: Callable[[int], None]) -> Packed:
        out = Packed({}, rows_read=len(rows))
        prompts, blobs, numbers, hashes = [], [], [], []
        for number, raw in enumerate(rows):
            ids = self._fit(self._render(raw), raw.where, out)
            if ids is not None:
                prompts.append(ids)
                blobs.append(np.frombuffer(encode_row(raw.row), np.uint8))
                numbers.append(number)
                hashes.append(int(row_hash(raw.row), 16))
            progress(number + 1)
        out.arrays = {
            "ids": _flat(prompts, np.int32),
            "lengths": np.array([len(p) for p in prompts], np.int64),
            "rows": _flat(blobs, np.uint8),
            "row_lengths": np.array([len(b) for b in blobs], np.int64),
            "numbers": np.array(numbers, np.int64),
            "hashes": np.array(hashes, np.uint64),
        }
        return out

    def _render(self, raw: RawRow) -> np.ndarray:
        task = self.format.read(raw.row, raw.where)
        tools = task.tools or self.tools
        try:
            refuse_unsupported(task.messages, self.audit, tools)
            ids = render_prompt(self.tokenizer, task.messages, template_kwargs=self.template_kwargs, tools=tools)
        except RowRefused as exc:
            raise ValueError(
                f"{raw.where}: the prompt has {exc}. Fix: another model.chat_template, or no such part"
            ) from exc
        except RenderError as exc:
            raise ValueError(f"{raw.where}: {exc}") from exc
        if not len(ids):
            raise ValueError(f"{raw.where}: the chat template renders this prompt to no token at all")
        return ids

    def _fit(self, ids: np.ndarray, where: str, out: Packed) -> np.ndarray | None:
        if len(ids) <= self.max_prompt_tokens:
            return ids
        if self.filter_overlong_prompts:
            out.rows_filtered += 1
            out.shortest_filtered = min(out.shortest_filtered or len(ids), len(ids))
            return None
        if self.truncation == "error":
            raise ValueError(
                f"{where}: the prompt has {len(ids)} tokens, data.max_prompt_tokens is {self.max_prompt_tokens}."
                " Fix: data.filter_overlong_prompts=true, data.truncation=left|right|middle, or a higher limit"
            )
        out.rows_truncated += 1
        return ids[kept_positions(len(ids), self.max_prompt_tokens, self.truncation)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationJob:
    """SFT rows -> ids and loss masks. One row may give several (see render_conversation), or none, counted by reason."""

    tokenizer: PreTrainedTokenizerBase
    audit: TemplateAudit
    template_kwargs: Mapping[str, Any]
    messages_key: str
    prompt_key: str
    tools_key: str | None
    system_prompt: str | None
    max_tokens_per_row: int
    truncation: str
    train_on: TrainOn

    def options(self) -> dict[str, Any]:
        """Everything but the tokenizer that the result depends on."""
        return {
            "job": "conversations",
            "format": [self.messages_key, self.prompt_key, self.tools_key, self.system_prompt],
            "template_kwargs": dict(self.template_kwargs),
            "length": [self.max_tokens_per_row, self.truncation],
            "train_on": self.train_on,
        }

    def __call__(self, rows: Sequence[RawRow], progress: Callable[[int], None]) -> Packed:
        out = Packed({}, rows_read=len(rows))
        kept: list[Rendered] = []
        numbers: list[int] = []
        for number, raw in enumerate(rows):
            conversation = to_conversation_row(
                raw.row,
                where=raw.where,
                messages_key=self.messages_key,
                prompt_key=self.prompt_key,
                tools_key=self.tools_key,
                system_prompt=self.system_prompt,
            )
            try:
                fitted = [self._fit(r, raw.where, out) for r in self._render(conversation)]
            except RowRefused as exc:
                out.refused[exc.reason] = out.refused.get(exc.reason, 0) + 1
                out.example = out.example or f"{raw.where}: {exc}"
            else:
                kept += fitted
                numbers += [number] * len(fitted)
            progress(number + 1)
        out.arrays = {
            "ids": _flat([r.ids for r in kept], np.int32),
            "mask": _flat([r.mask for r in kept], np.bool_),
            "lengths": np.array([len(r.ids) for r in kept], np.int64),
            "loss_lengths": np.array([int(r.mask.sum()) for r in kept], np.int64),
            "numbers": np.array(numbers, np.int64),
        }
        return out

    def _render(self, row: ConversationRow) -> list[Rendered]:
        thinking = {} if row.enable_thinking is None else {"enable_thinking": row.enable_thinking}
        return render_conversation(
            self.tokenizer,
            row.messages,
            self.audit,
            template_kwargs={**self.template_kwargs, **thinking},
            tools=row.tools,
            train_on=self.train_on,
            train_from=row.train_from,
        )

    def _fit(self, row: Rendered, where: str, out: Packed) -> Rendered:
        if len(row.ids) <= self.max_tokens_per_row:
            return row
        if self.truncation == "error":
            raise ValueError(
                f"{where}: the conversation has {len(row.ids)} tokens, data.max_tokens_per_row is"
                f" {self.max_tokens_per_row}. Fix: data.truncation=left|right, or a higher limit"
            )
        keep = kept_positions(len(row.ids), self.max_tokens_per_row, self.truncation)
        ids, mask = row.ids[keep], row.mask[keep].copy()
        mask[0] = False  # nothing predicts the first token
        if not mask.any():
            raise RowRefused(CUT_AWAY, f"{len(row.ids)} tokens, data.max_tokens_per_row={self.max_tokens_per_row}")
        out.rows_truncated += 1
        return Rendered(ids, mask)


# ---- small parts -----------------------------------------------------------------------------------------------------


def kept_positions(length: int, limit: int, truncation: str) -> np.ndarray:
    """Which positions stay. left drops the beginning, right the end, middle what lies between the two halves."""
    assert length > limit, f"{length} tokens need no truncation to {limit}"
    if truncation == "left":
        return np.arange(length - limit, length)
    if truncation == "right":
        return np.arange(limit)
    assert truncation == "middle", f"truncation {truncation!r} was not checked"
    half = limit // 2
    return np.concatenate([np.arange(half), np.arange(length - (limit - half), length)])


def encode_row(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=True, separators=(",", ":"), default=_encode_bytes).encode("ascii")


def decode_row(blob: bytes) -> dict[str, Any]:
    return json.loads(blob, object_hook=_decode_bytes if b"\\u0000bytes" in blob else None)


def row_hash(row: Mapping[str, Any]) -> str:
    """Of the content: the same whatever the order of the columns."""
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":"), default=_encode_bytes)
    return hashlib.blake2b(canonical.encode("ascii"), digest_size=ID_BYTES).hexdigest()


def _encode_bytes(value: Any) -> dict[str, str]:
    assert isinstance(value, bytes), f"rows hold JSON types and bytes, got {type(value).__name__}"
    return {BYTES_KEY: base64.b64encode(value).decode("ascii")}


def _decode_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES_KEY]) if value.keys() == {BYTES_KEY} else value


def _flat(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
