"""Load files into tokenised tables, cached by a hash of their content; a cursor (data/cursor.py) draws from the
tables."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import logging
import marshal
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl.chat.conversation import Rendered
from verl.chat.template import Tokenizer
from verl.config.schema import DataConfig
from verl.data.cache import cache_path, load_cached, store_cached
from verl.data.cursor import Cursor, Draw
from verl.data.dataset_class import rows_of_class
from verl.data.files import DataFile, expand_files, fingerprint, read_rows
from verl.data.formats import ONE_ANSWER, Players, TaskRow
from verl.data.images import ImageRules, image_rules, images_of, unchanged
from verl.data.lost import lost_lines
from verl.data.parallel import run_chunks
from verl.data.render import ID_BYTES, Chunk, ConversationJob, PromptJob, RenderJob, RowCounts, merge
from verl.data.special import special_lines
from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.models.sounds import is_sound
from verl.types import Task, TaskImage

__all__ = ["ConversationTable", "Cursor", "Draw", "LoadReport", "TaskTable", "load_conversations", "load_tasks"]

IN_PROCESS_ROWS = 2000  # fewer rows are rendered in the time in which a worker starts
CHUNK_ROWS = 256
WORKER_TIMEOUT_S = 300.0
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class LoadReport(RowCounts):
    """Statistics of the rows of these files, and the size of the table."""

    files: tuple[str, ...]
    entries: int
    total_tokens: int
    longest_tokens: int
    largest_id: int
    from_cache: bool
    wall_s: float
    made: str = ""
    """A hash of the rows that a dataset class made; "" if the rows are from files."""

    @property
    def contents(self) -> dict[str, str]:
        """Return the values that define the run, in addition to the files named by its keys."""
        return {"data.dataset_class": self.made} if self.made else {}

    def summary(self) -> str:
        parts = [f"{self.rows_kept} of {self.rows_read} rows"]
        if self.entries != self.rows_kept:
            parts.append(f"{self.entries} training rows")
        if self.rows_filtered:
            parts.append(f"{self.rows_filtered} filtered as too long")
        if self.rows_truncated:
            parts.append(f"{self.rows_truncated} truncated")
        if self.rows_unthinking:
            parts.append(
                f"{self.rows_unthinking} with turns without a thought, behind the prompt of enable_thinking=false"
            )
        parts += [f"{count} refused: {reason}" for reason, count in self.refused.items()]
        where = "cached" if self.from_cache else f"{self.wall_s:.1f} s"
        return f"{', '.join(parts)}; {self.total_tokens} tokens, longest {self.longest_tokens} ({where})"


def kind_with_length(media: Sequence[TaskImage]) -> str:
    """Return which of the kinds with a length in time is first among these: "video" or "sound"; "": all are images."""
    head = next((one.head for one in media if one.head), b"")
    return "" if not head else "sound" if is_sound(head) else "video"


class _Table:
    """Entries of different lengths, stored in flat arrays. `key` is a hash of data, tokenizer and options: tables with
    equal keys have equal content."""

    def __init__(self, arrays: Mapping[str, np.ndarray], report: LoadReport, key: str) -> None:
        self.report, self.key, self._arrays = report, key, arrays
        names = [name for name in arrays if f"{name}_lengths" in arrays]
        self._ends = {name: np.cumsum(arrays[f"{name}_lengths"], dtype=np.int64) for name in names}

    def __len__(self) -> int:
        return len(self._ends["ids"])

    @property
    def has_images(self) -> bool:
        """True if any row has an image."""
        return len(self._arrays["images"]) > 0

    def kinds_of_media(self) -> tuple[bool, bool]:
        """Return whether any row has an image or a video, and whether any has a sound."""
        every = {is_sound(image.head) for images in _entries_of(self._arrays) for image in images}
        return False in every, True in every

    def _part(self, name: str, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of a table with {len(self)} entries")
        ends = self._ends[name]
        return self._arrays[name][ends[index - 1] if index else 0 : ends[index]]


class TaskTable(_Table):
    """The table of RL prompts. Rows are parsed when the table is made; reading an entry only decodes it."""

    def __getitem__(self, index: int) -> Task:
        index = int(index)
        ids = self._part("ids", index).astype(np.int64)
        row, parsed = marshal.loads(self._part("rows", index).data)
        # The hash of the row's content, and its number in the files: stable under filters, distinct for duplicates.
        task_id = f"{int(self._arrays['hashes'][index]):0{2 * ID_BYTES}x}-{int(self._arrays['numbers'][index])}"
        parts = {name: self._part(name, index).astype(np.int64) for name in ("context", "answer")}
        own: dict[str, Any] = {f"{name}_ids": part if len(part) else None for name, part in parts.items()}
        own["images"] = self.images_at(index)
        return Task(task_id=task_id, index=index, prompt_ids=ids, row=row, **{**own, **TaskRow(*parsed)._asdict()})

    def images_at(self, index: int) -> tuple[TaskImage, ...]:
        """Return the images of an entry."""
        return images_of(self._part("images", index))

    def first_with_images(self) -> int | None:
        """Return the index of the first entry with images; None if there is none."""
        return next(map(int, np.flatnonzero(self._arrays["images_lengths"])), None)

    def first_with_length(self) -> tuple[int, str] | None:
        """Return the index of the first entry with a video or a sound, and which of them it has; None if there is
        none."""
        for index in map(int, np.flatnonzero(self._arrays["images_lengths"])):
            if kind := kind_with_length(self.images_at(index)):
                return index, kind
        return None


class ConversationTable(_Table):
    """The table of SFT rows: ids and loss masks. One row of the data may have several entries."""

    def __getitem__(self, index: int) -> Rendered:
        ids, mask = self._part("ids", index).astype(np.int64), self._part("mask", index).astype(np.bool_)
        return Rendered(ids, mask, images=images_of(self._part("images", index)))


def load_tasks(
    files: Sequence[str],
    tokenizer: Tokenizer,
    cfg: DataConfig,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    max_rows: int | None = None,
    players: Players = ONE_ANSWER,
    stops: tuple[int, ...] = (),
    model: Path | None = None,
) -> TaskTable:
    """Render, tokenise and filter RL prompts.

    players: the loops and tools of the run
    stops: see `RenderJob`
    model: the folder of the policy, which may read images; None: rows with images are refused
    """
    images = rules_of_model(model, cfg, tokenizer, sounds=True)
    job = PromptJob(tokenizer, cfg, template_kwargs or {}, stops, players=players, images=images)
    arrays, report, key = load_arrays(files, job, max_rows)
    if report.refused:
        refuse_empty(report)
    if not report.entries:
        shortest = report.shortest_filtered_tokens
        raise Refused(
            f"no rows left of {report.rows_read} in {', '.join(report.files)}: {report.rows_filtered} prompts are"
            f" longer than data.max_prompt_tokens={cfg.max_prompt_tokens} (the shortest has {shortest} tokens). Fix:"
            f" data.max_prompt_tokens={shortest} or more, or data.filter_overlong_prompts=false with data.truncation"
        )
    return TaskTable(arrays, report, key)


def load_conversations(
    files: Sequence[str],
    tokenizer: Tokenizer,
    cfg: DataConfig,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    max_rows: int | None = None,
    stops: tuple[int, ...] = (),
    model: Path | None = None,
) -> ConversationTable:
    """Render and tokenise SFT conversations with exact loss masks. Rows that have no exact mask are dropped and
    counted.

    stops: see `RenderJob`
    model: see `load_tasks`
    """
    if cfg.truncation == "middle":
        raise Refused(
            "data.truncation=middle: a conversation cut in its middle joins words that nobody wrote."
            " Fix: error, left or right"
        )
    images = rules_of_model(model, cfg, tokenizer)
    job = ConversationJob(tokenizer, cfg, template_kwargs or {}, stops, images=images)
    arrays, report, key = load_arrays(files, job, max_rows)
    refuse_empty(report)
    return ConversationTable(arrays, report, key + images_key(arrays, images))


def rules_of_model(
    model: Path | None, cfg: DataConfig, tokenizer: Tokenizer, *, sounds: bool = False
) -> ImageRules | None:
    """Return the reader of images and videos for the model in a folder; None if its rows are rendered as text. sounds:
    rows may have sounds too"""
    if model is None:
        return None
    content = cache_path(cfg.cache_dir, "").parent / "media"
    return image_rules(model, content, tokenizer, sounds=sounds, hosts=cfg.media_hosts)


def images_key(arrays: Mapping[str, np.ndarray], rules: ImageRules | None) -> str:
    """Return a hash of the sizes of all images of a table and of how they become pixels, which are the same on every
    node; "" if it has none."""
    parts = _entries_of(arrays)
    sizes = [(i.num_bytes, i.start, i.tokens, i.head) for images in parts for i in images]
    if not sizes:
        return ""
    assert rules is not None, "without rules, rows with images are refused"
    return hashlib.blake2b(repr((rules.digest, sizes)).encode(), digest_size=16).hexdigest()


def refuse_empty(report: LoadReport) -> None:
    if not report.entries:
        counts = ", ".join(f"{count} x {reason}" for reason, count in report.refused.items())
        raise Refused(
            f"no rows left of {report.rows_read} in {', '.join(report.files)}: {counts}. First: {report.example}"
        )


def load_arrays(
    files: Sequence[str], job: RenderJob, max_rows: int | None
) -> tuple[dict[str, np.ndarray], LoadReport, str]:
    """Return (arrays, report, key) of the rendered rows: from the cache if the same bytes were rendered with the same
    options before, else from the files."""
    start = time.monotonic()
    made = None if job.cfg.dataset_class is None else _class_rows(files, job, max_rows)
    found = expand_files(files) if made is None else [made[0]]
    marks = [fingerprint(f) for f in found]
    key = _table_key(marks, job, max_rows)
    path = cache_path(job.cfg.cache_dir, key)
    cached = load_cached(path)
    cached = None if cached is not None and _images_changed(cached[1]) else cached
    if cached is not None:
        counts, arrays = RowCounts(**cached[0]), cached[1]
    else:
        counts, arrays = _render(found, job, max_rows)
        if not counts.rows_read:
            raise Refused(f"no rows in {', '.join(f.url for f in found)}")
        for file, mark in zip(found, marks, strict=True):
            if fingerprint(file) != mark:
                raise Refused(f"{file.url}: changed while it was read. Fix: start again when it is written")
        store_cached(path, asdict(counts), arrays)
    report = LoadReport(
        **asdict(counts),
        files=tuple(f.url for f in found),
        entries=len(arrays["ids_lengths"]),
        total_tokens=len(arrays["ids"]),
        longest_tokens=int(arrays["ids_lengths"].max(initial=0)),
        largest_id=max(int(arrays[name].max(initial=0)) for name in ("ids", "context", "answer") if name in arrays),
        from_cache=cached is not None,
        wall_s=time.monotonic() - start,
        made="" if made is None else marks[0],
    )
    logger.info("data: %s", report.summary())
    special = special_lines(counts.special, job.tokenizer.special_tokens_map)
    unread = [f"{line} (first {where})" for line, where in counts.unread.items()]
    if keys := counts.unread_keys:
        where = ", ".join(f"{key!r} (first {where})" for key, where in keys.items())
        unread.append(f"keys of messages that neither verl nor the chat template reads: {where}")
    for line in [*lost_lines(counts.characters, counts.lost), *special, *unread]:
        logger.warning("data: %s", line)
    return arrays, report, key


def _images_changed(arrays: Mapping[str, np.ndarray]) -> bool:
    """Return True if a file of an image in a cached table is another one now, or gone."""
    return any(unchanged(image) for images in _entries_of(arrays) for image in images)


def _entries_of(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[TaskImage, ...]]:
    """Yield the images of each entry of a table."""
    if len(arrays["images"]):
        ends = np.cumsum(arrays["images_lengths"])
        yield from (images_of(arrays["images"][a:b]) for a, b in zip(ends - arrays["images_lengths"], ends))


def _class_rows(files: Sequence[str], job: RenderJob, max_rows: int | None) -> tuple[DataFile, OwnFolder]:
    kind: Literal["rl", "sft"] = "rl" if isinstance(job, PromptJob) else "sft"
    return rows_of_class(files, job.cfg, kind, job.tokenizer, dict(job.template_kwargs), max_rows)


def _render(files: list[DataFile], job: RenderJob, max_rows: int | None) -> Chunk:
    rows = itertools.islice(itertools.chain.from_iterable(map(read_rows, files)), max_rows)
    head = list(itertools.islice(rows, IN_PROCESS_ROWS + 1))
    every = itertools.chain(head, rows)
    chunks = iter(lambda: list(itertools.islice(every, CHUNK_ROWS)), [])
    if len(head) <= IN_PROCESS_ROWS or job.cfg.num_workers < 2:
        return merge(job(chunk, lambda rows_done: None) for chunk in chunks)
    return merge(run_chunks(job, chunks, num_workers=job.cfg.num_workers, timeout_s=WORKER_TIMEOUT_S))


def _table_key(marks: list[str], job: RenderJob, max_rows: int | None) -> str:
    """Return a hash of everything on which the table depends: files, tokenizer, template, options, and the code that
    renders."""
    template = str(job.tokenizer.chat_template)
    parts = {
        "files": marks,
        "max_rows": max_rows,
        "options": job.options(),
        "template": template,
        "tokenizer": tokenizer_fingerprint(job.tokenizer),
        "python": sys.version_info[:2],  # marshal's format
        "packages": [importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")],
        "code": _code_fingerprint(),
        # Templates that print today's date render differently tomorrow.
        "date": time.strftime("%Y-%m-%d") if "strftime_now" in template else None,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return a fingerprint of the files that turn text into ids; the chat template is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = backend.to_str().encode() if backend is not None else pickle.dumps(tokenizer)
    digest = hashlib.blake2b(core, digest_size=16)
    digest.update(json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str).encode())
    digest.update(type(tokenizer).__name__.encode())
    return digest.hexdigest()


def _code_fingerprint() -> str:
    room = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for folder in (room, room.parent / "chat", room.parent / "models"):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
