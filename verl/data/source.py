"""Files -> tokenised tables (cached by content hash) and the cursor that draws from them.

table = load_tasks(files, tokenizer, cfg.data, template_kwargs=cfg.model.template_kwargs)
cursor = Cursor(len(table), seed)
task = table[cursor.next().index]
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import logging
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.chat.conversation import Rendered, TrainOn
from verl.chat.template import Tool, audit_template
from verl.config.schema import DataConfig
from verl.data.cache import cache_path, load_cached, store_cached
from verl.data.cursor import Cursor, Draw
from verl.data.files import DataFile, RawRow, expand_files, fingerprint, read_rows
from verl.data.parallel import run_chunks
from verl.data.render import ConversationJob, Packed, PromptJob, TaskFormat, decode_row, merge
from verl.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ConversationTable", "Cursor", "Draw", "LoadReport", "TaskTable", "load_conversations", "load_tasks"]

IN_PROCESS_ROWS = 2000  # fewer are done before a worker has imported its tokenizer
CHUNK_ROWS = 256
WORKER_TIMEOUT_S = 300.0
TRUNCATIONS = ("error", "left", "right", "middle")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of the rows. `refused`: SFT rows without an exact rendering, by reason."""

    files: tuple[str, ...]
    rows_read: int
    rows_kept: int
    rows_filtered: int
    shortest_filtered_tokens: int
    rows_truncated: int
    refused: Mapping[str, int] = field(default_factory=dict)
    example: str = ""
    entries: int
    total_tokens: int
    longest_tokens: int
    from_cache: bool
    wall_s: float

    def summary(self) -> str:
        parts = [f"{self.rows_kept} of {self.rows_read} rows"]
        if self.entries != self.rows_kept:
            parts.append(f"{self.entries} training rows")
        if self.rows_filtered:
            parts.append(f"{self.rows_filtered} filtered as too long")
        if self.rows_truncated:
            parts.append(f"{self.rows_truncated} truncated")
        parts += [f"{count} refused: {reason}" for reason, count in self.refused.items()]
        where = "cached" if self.from_cache else f"{self.wall_s:.1f} s"
        return f"{', '.join(parts)}; {self.total_tokens} tokens, longest {self.longest_tokens} ({where})"


class TaskTable:
    """RL prompts: ids in one flat array, rows as JSON text that is decoded when asked for."""

    def __init__(self, arrays: Mapping[str, np.ndarray], format: TaskFormat, report: LoadReport, key: str) -> None:
        self.report = report
        self.key = key
        """Content hash of data, tokenizer and options: equal keys hold equal tables."""
        self.prompt_lengths = arrays["lengths"]
        self._format = format
        self._ids, self._rows = arrays["ids"], arrays["rows"]
        self._starts, self._row_starts = _starts(arrays["lengths"]), _starts(arrays["row_lengths"])
        self._numbers, self._hashes = arrays["numbers"], arrays["hashes"]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> Task:
        index = _checked(index, len(self))
        row = decode_row(self._rows[self._row_starts[index] : self._row_starts[index + 1]].tobytes())
        task = self._format.read(row, f"row {int(self._numbers[index]) + 1} of the data")
        return Task(
            task_id=self.task_id(index),
            index=index,
            messages=task.messages,
            prompt_ids=self._ids[self._starts[index] : self._starts[index + 1]].astype(np.int64),
            data_source=task.data_source,
            ground_truth=task.ground_truth,
            extra_info=task.extra_info,
            row=row,
        )

    def task_id(self, index: int) -> str:
        """Hash of the row's content, and its number in the files: stable under filters, distinct for duplicates."""
        return f"{int(self._hashes[index]):012x}-{int(self._numbers[index])}"


class ConversationTable:
    """SFT rows: ids and loss masks, flat. Several entries may come from one row of the data."""

    def __init__(self, arrays: Mapping[str, np.ndarray], report: LoadReport, key: str) -> None:
        self.report = report
        self.key = key
        self.lengths, self.loss_lengths = arrays["lengths"], arrays["loss_lengths"]
        self.row_numbers = arrays["numbers"]
        """0-based row of the data that an entry comes from."""
        self._ids, self._mask = arrays["ids"], arrays["mask"]
        self._starts = _starts(arrays["lengths"])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Rendered:
        index = _checked(index, len(self))
        span = slice(int(self._starts[index]), int(self._starts[index + 1]))
        return Rendered(self._ids[span].astype(np.int64), np.array(self._mask[span], np.bool_))


def load_tasks(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] | None = None,
    max_rows: int | None = None,
    worker_timeout_s: float = WORKER_TIMEOUT_S,
) -> TaskTable:
    """Render, tokenise and filter RL prompts. `tools` are shown in every prompt whose row brings none of its own."""
    _check(cfg, max_rows)
    kwargs = dict(template_kwargs or {})
    job = PromptJob(
        tokenizer=tokenizer,
        audit=audit_template(tokenizer, kwargs),
        format=TaskFormat(prompt_key=cfg.prompt_key, tools_key=cfg.tools_key, system_prompt=cfg.system_prompt),
        template_kwargs=kwargs,
        tools=[dict(t) for t in tools] if tools else None,
        max_prompt_tokens=cfg.max_prompt_tokens,
        filter_overlong_prompts=cfg.filter_overlong_prompts,
        truncation=cfg.truncation,
    )
    arrays, report, key = _load(files, job, cfg, max_rows, worker_timeout_s)
    if not report.entries:
        shortest = report.shortest_filtered_tokens
        raise ValueError(
            f"no rows left of {report.rows_read} in {', '.join(report.files)}: {report.rows_filtered} prompts are longer"
            f" than data.max_prompt_tokens={cfg.max_prompt_tokens} (the shortest has {shortest} tokens)."
            f" Fix: data.max_prompt_tokens={shortest} or more, or data.filter_overlong_prompts=false with data.truncation"
        )
    return TaskTable(arrays, job.format, report, key)


def load_conversations(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    train_on: TrainOn = "all_assistant",
    max_rows: int | None = None,
    worker_timeout_s: float = WORKER_TIMEOUT_S,
) -> ConversationTable:
    """Render and tokenise SFT conversations with exact loss masks. Rows without one are dropped, counted and reported."""
    _check(cfg, max_rows)
    if cfg.truncation == "middle":
        raise ValueError(
            "data.truncation=middle: a conversation cut in its middle joins words that nobody wrote."
            " Fix: error, left or right"
        )
    kwargs = dict(template_kwargs or {})
    job = ConversationJob(
        tokenizer=tokenizer,
        audit=audit_template(tokenizer, kwargs),
        template_kwargs=kwargs,
        messages_key=cfg.messages_key,
        prompt_key=cfg.prompt_key,
        tools_key=cfg.tools_key,
        system_prompt=cfg.system_prompt,
        max_tokens_per_row=cfg.max_tokens_per_row,
        truncation=cfg.truncation,
        train_on=train_on,
    )
    arrays, report, key = _load(files, job, cfg, max_rows, worker_timeout_s)
    if not report.entries:
        counts = ", ".join(f"{count} x {reason}" for reason, count in report.refused.items())
        raise ValueError(
            f"no rows left of {report.rows_read} in {', '.join(report.files)}: {counts}. First: {report.example}"
        )
    return ConversationTable(arrays, report, key)


# ---- loading ---------------------------------------------------------------------------------------------------------


def _check(cfg: DataConfig, max_rows: int | None) -> None:
    if cfg.truncation not in TRUNCATIONS:
        raise ValueError(f"data.truncation={cfg.truncation!r}. Fix: one of {', '.join(TRUNCATIONS)}")
    for name, limit in (("max_prompt_tokens", cfg.max_prompt_tokens), ("max_tokens_per_row", cfg.max_tokens_per_row)):
        if limit < 1:
            raise ValueError(f"data.{name}={limit}: must be at least 1")
    if cfg.num_workers < 0:
        raise ValueError(f"data.num_workers={cfg.num_workers}: must be 0 (in this process) or more")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows={max_rows}: must be at least 1, or null for all rows")


def _load(
    files: Sequence[str], job: PromptJob | ConversationJob, cfg: DataConfig, max_rows: int | None, timeout_s: float
) -> tuple[dict[str, np.ndarray], LoadReport, str]:
    """From the cache if these bytes were rendered so before, else from the files."""
    start = time.monotonic()
    found = expand_files(files)
    marks = [fingerprint(f) for f in found]
    key = _table_key(marks, job, max_rows)
    path = cache_path(cfg.cache_dir, key)
    cached = load_cached(path)
    if cached is not None:
        numbers, arrays = cached
    else:
        packed = _render(found, job, cfg.num_workers, max_rows, timeout_s)
        if not packed.rows_read:
            raise ValueError(f"no rows in {', '.join(f.url for f in found)}")
        for file, mark in zip(found, marks, strict=True):
            if fingerprint(file) != mark:
                raise ValueError(f"{file.url}: changed while it was read. Fix: start again when it is written")
        numbers, arrays = _numbers_of(packed), packed.arrays
        store_cached(path, numbers, arrays)
    report = LoadReport(
        **numbers,
        files=tuple(f.url for f in found),
        entries=len(arrays["lengths"]),
        total_tokens=len(arrays["ids"]),
        longest_tokens=int(arrays["lengths"].max(initial=0)),
        from_cache=cached is not None,
        wall_s=time.monotonic() - start,
    )
    logger.info("data: %s", report.summary())
    return arrays, report, key


def _numbers_of(packed: Packed) -> dict[str, Any]:
    return {
        "rows_read": packed.rows_read,
        "rows_kept": len(np.unique(packed.arrays["numbers"])),
        "rows_filtered": packed.rows_filtered,
        "rows_truncated": packed.rows_truncated,
        "refused": packed.refused,
        "example": packed.example,
        "shortest_filtered_tokens": packed.shortest_filtered,
    }


def _render(
    files: list[DataFile], job: PromptJob | ConversationJob, num_workers: int, max_rows: int | None, timeout_s: float
) -> Packed:
    rows = itertools.islice(itertools.chain.from_iterable(map(read_rows, files)), max_rows)
    head = list(itertools.islice(rows, IN_PROCESS_ROWS + 1))
    chunks = _chunks(itertools.chain(head, rows))
    if len(head) <= IN_PROCESS_ROWS or num_workers < 2:
        return merge(job(chunk, lambda rows_done: None) for chunk in chunks)
    return merge(run_chunks(job, chunks, num_workers=num_workers, timeout_s=timeout_s))


def _chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, CHUNK_ROWS)):
        yield chunk


# ---- cache key -------------------------------------------------------------------------------------------------------


def _table_key(marks: list[str], job: PromptJob | ConversationJob, max_rows: int | None) -> str:
    """Hash of all that the table depends on: files, tokenizer, template, options, and the code that renders."""
    template = str(job.tokenizer.chat_template)
    parts = {
        "files": marks,
        "max_rows": max_rows,
        "options": job.options(),
        "template": template,
        "tokenizer": tokenizer_fingerprint(job.tokenizer),
        "packages": [importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")],
        "code": _code_fingerprint(),
        # Templates that print today's date render differently tomorrow.
        "date": time.strftime("%Y-%m-%d") if "strftime_now" in template else None,
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what turns text into ids; the chat template is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = backend.to_str().encode() if backend is not None else pickle.dumps(tokenizer)
    digest = hashlib.blake2b(core, digest_size=16)
    digest.update(json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str).encode())
    digest.update(type(tokenizer).__name__.encode())
    return digest.hexdigest()


def _code_fingerprint() -> str:
    room = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for file in [*sorted(room.glob("*.py")), *sorted((room.parent / "chat").glob("*.py"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _checked(index: int, size: int) -> int:
    if not 0 <= index < size:
        raise IndexError(f"index {index} of a table with {size} entries")
    return int(index)
