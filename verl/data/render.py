"""Render rows to token ids in chunks: the jobs, which run in this process or in workers, and the merging of their
results."""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from verl.chat.conversation import Rendered, render_conversation
from verl.chat.images import ImagePrompts, image_prompts
from verl.chat.limits import TemplateOverrun, bounded_memory
from verl.chat.load import require_chat_template
from verl.chat.messages import KNOWN_KEYS, Messages
from verl.chat.template import (
    Message,
    Renderer,
    RenderError,
    RowRefused,
    TemplateAudit,
    Tokenizer,
    audit_template,
    refuse_unsupported,
    render_prompt,
)
from verl.config.schema import DataConfig
from verl.data.columns import REASONING_COLUMNS, unread_system, unread_texts
from verl.data.files import RawRow
from verl.data.formats import (
    FEEDBACK,
    ONE_ANSWER,
    Players,
    TaskRow,
    asks_for_a_judge,
    conversation_row,
    hinted,
    row_kwargs,
    stored_answer,
    task_row,
    with_system,
)
from verl.data.images import ImageRules, SeenRow, cut_images, expanded, expanded_row, packed_images, paths_of
from verl.data.lost import Coverage, texts_of
from verl.data.media import refuse_media
from verl.data.plain import TEXT, ids_row, plain_column, text_row, unread_columns
from verl.data.special import Found, SpecialTokens, add_found
from verl.data.truths import kind_of_truth, unread_truths
from verl.data.values import content_hash
from verl.errors import Refused
from verl.types import TaskImage

ID_BYTES = 6
# Settings that pick or order the rows and the work on them, so that the same files and rows give the same table.
SAME_TABLE = (
    *("train_files", "eval_files", "shuffle", "seed", "max_rows", "max_eval_rows", "num_workers", "cache_dir"),
    "dataset_class",  # its rows are written to a file, and the file is in the key
    "media_hosts",  # rows of another host are refused, not left out
)
CUT_AWAY = "no assistant token is left after truncation"
OWN_SYSTEM = "column {!r} is not read: the messages have a system message of their own"
Entry = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class RowCounts:
    """Statistics of the rows."""

    rows_read: int = 0
    """Rows of the files."""
    rows_kept: int = 0
    """Rows with at least one entry."""
    rows_filtered: int = 0
    """Rows dropped because they are too long."""
    shortest_filtered_tokens: int = 0
    """The length of the shortest filtered row."""
    rows_truncated: int = 0
    """Rows cut because they are too long."""
    rows_unthinking: int = 0
    """Rows with turns rendered with enable_thinking=false."""
    refused: dict[str, int] = field(default_factory=dict)
    """Number of rows without an exact rendering, by reason."""
    example: str = ""
    """The place and the error of the first refused row."""
    characters: dict[str, list[int]] = field(default_factory=dict)
    """File -> [number of characters in its messages, number of those without a token]."""
    lost: dict[str, str] = field(default_factory=dict)
    """File -> an example of its characters without a token."""
    special: Found = field(default_factory=dict)
    """Special tokens in the messages' text."""
    judged: str = ""
    """The place of the first row that requires a judge."""
    truths: Found = field(default_factory=dict)
    """Kinds of ground truth by data_source, of the rows that a reward function scores."""
    unread: dict[str, str] = field(default_factory=dict)
    """Warnings about columns that are not read -> the place of the first such row."""
    unread_keys: dict[str, str] = field(default_factory=dict)
    """Keys of messages that neither verl nor the chat template reads -> the place of the first such row."""

    def add(self, other: RowCounts) -> None:
        for name in ("rows_read", "rows_kept", "rows_filtered", "rows_truncated", "rows_unthinking"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        shortest = (self.shortest_filtered_tokens, other.shortest_filtered_tokens)
        self.shortest_filtered_tokens = min(filter(None, shortest), default=0)
        for reason, count in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + count
        self.example, self.judged = self.example or other.example, self.judged or other.judged
        for file, found in other.characters.items():
            self.characters[file] = [a + b for a, b in zip(self.characters.get(file, (0, 0)), found, strict=True)]
        self.lost = other.lost | self.lost
        self.unread = other.unread | self.unread
        self.unread_keys = other.unread_keys | self.unread_keys
        add_found(self.special, other.special)
        add_found(self.truths, other.truths)


Chunk = tuple[RowCounts, dict[str, np.ndarray]]  # the entries of consecutive rows, as arrays by name


def merge(chunks: Iterable[Chunk]) -> Chunk:
    """Concatenate the chunks in order. `numbers`, the row of each entry in its chunk, becomes the row in all chunks
    together."""
    total, columns = RowCounts(), list[dict[str, np.ndarray]]()
    for counts, arrays in chunks:
        columns.append({**arrays, "numbers": arrays["numbers"] + total.rows_read})
        total.add(counts)
    return total, {name: np.concatenate([c[name] for c in columns]) for name in (columns[0] if columns else ())}


@dataclass
class RenderJob:
    """Renders rows to entries of a table: one, several or none per row. A row that raises RowRefused is dropped and
    counted by its reason."""

    tokenizer: Tokenizer
    cfg: DataConfig
    template_kwargs: Mapping[str, Any]
    stops: tuple[int, ...] = ()  # the tokens at which an answer ends, beside the tokenizer's end-of-sequence token
    images: ImageRules | None = None  # reads the images of rows; None: rows with images are refused
    measured: TemplateAudit | None = field(init=False, default=None)
    coverage: Coverage = field(init=False)
    special: SpecialTokens = field(init=False)

    flat: ClassVar[Mapping[str, type[np.generic]]]  # columns with many values per entry, and "<name>_lengths"
    scalar: ClassVar[Mapping[str, type[np.generic]]] = {}  # columns with one value per entry

    def __post_init__(self) -> None:
        with bounded_memory():
            if self.tokenizer.chat_template:
                self.measured = audit_template(self.tokenizer, self.template_kwargs, self.stops)
        self.coverage, self.special = Coverage(self.tokenizer), SpecialTokens(self.tokenizer)

    @property
    def audit(self) -> TemplateAudit:
        """Return the measured properties of the chat template. Raise ValueError if the tokenizer has no template."""
        if self.measured is None:
            require_chat_template(self.tokenizer, self.tokenizer.name_or_path)
        assert self.measured is not None
        return self.measured

    @cached_property
    def _image_prompts(self) -> ImagePrompts:
        assert self.images is not None
        return image_prompts(self.tokenizer, *self.images.model, self.images.placeholders)

    def prepare(self) -> None:
        """Compute for the copies of this job in workers what needs the model's configuration, and so torch."""
        if self.images is not None:
            _ = self._image_prompts, self.images.model_type

    def answer(self, question: Any) -> Any:
        """Return the answer of `ImageRules`."""
        assert self.images is not None, "a copy that reads images asks"
        return self.images.answer(question)

    def connect(self, ask: Callable[[Any], Any]) -> None:
        """Ask the job in the parent for the tokens of images."""
        if self.images is not None:
            self.images.ask = ask

    def entries(self, raw: RawRow, counts: RowCounts) -> list[Entry]:
        raise NotImplementedError

    def seen(self, raw: RawRow, messages: Messages) -> SeenRow:
        """Return the row with its images. Raise Refused if it has media that the model does not read."""
        if self.images is not None:
            return self.images.seen(raw.row, messages, raw.where, self._text_ids)
        refuse_media(raw.row, messages, raw.where)
        return SeenRow(messages, raw.row, raw.row, ())

    def conversation(
        self,
        seen: SeenRow,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        train_from: int,
        *,
        last_only: bool = False,
        may_skip_thinking: bool = False,
    ) -> list[Rendered]:
        """Return the training rows of a conversation (`render_conversation`) with the tokens of its images."""
        render = render_conversation if self.images is None else self._image_prompts.conversation
        rows = render(
            self.tokenizer,
            seen.messages,
            self.audit,
            kwargs,
            tools=tools,
            train_from=train_from,
            last_only=last_only,
            may_skip_thinking=may_skip_thinking,
        )
        if self.images is None:
            return rows
        return [expanded_row(row, self.images.placeholders.values(), seen.images) for row in rows]

    def _text_ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def count_text(self, messages: Sequence[Message], where: str, counts: RowCounts) -> None:
        """Count, in a row's messages, text without ids, text that is read as control tokens, and keys that are not
        read."""
        file, texts = where.rpartition(":")[0], texts_of(messages)
        for key in {key for m in messages for key in m.keys() - KNOWN_KEYS}:
            self._count_key(rf"\b{re.escape(key)}\b", key, where, counts)
        if role := next((m["role"] for m in messages if m.get("name") and m["role"] != "tool"), None):
            self._count_key(r"\bm\w*(\.name\b|\[.name.\])", f"name of {role}", where, counts)
        found = counts.characters.setdefault(file, [0, 0])
        as_text = self._image_prompts.plain.control.keys() if self.images is not None else ()
        if held := set().union(*map(self.special.held, texts)).difference(as_text):
            add_found(counts.special, {file: {token: [1, where] for token in held}})
        for text in texts:
            lost = self.coverage.lost(text)
            found[0] += len(text)
            found[1] += len(lost)
            if lost and file not in counts.lost:
                counts.lost[file] = f"{lost[:20]!r} of {text[:60]!r} ({where})"

    def count_columns(self, raw: RawRow, messages: Sequence[Message], counts: RowCounts) -> None:
        """Count the columns with a system message, reasoning or a prompt that is in none of the row's messages."""
        for column in unread_system(raw.row, messages):
            counts.unread.setdefault(OWN_SYSTEM.format(column), raw.where)
        whole = any(raw.row.get(key) is not None for key in (self.cfg.messages_key, "conversations"))
        columns = (*REASONING_COLUMNS, self.cfg.prompt_key) if whole else REASONING_COLUMNS
        for column in unread_texts(raw.row, messages, columns):
            counts.unread.setdefault(f"column {column!r} is not read, and no message has its text", raw.where)

    def _count_key(self, pattern: str, key: str, where: str, counts: RowCounts) -> None:
        """Note a key of a message that is not read, unless the source of the chat template contains it."""
        if not re.search(pattern, str(self.tokenizer.chat_template)):
            counts.unread_keys.setdefault(key, where)

    def options(self) -> dict[str, Any]:
        """Return all options on which the result depends, apart from the tokenizer and the files."""
        made = ("tokenizer", "cfg", "measured", "coverage", "special")
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in made}
        data = {name: value for name, value in asdict(self.cfg).items() if name not in SAME_TABLE}
        return {"job": type(self).__name__, **own, **data}

    def __call__(self, rows: Sequence[RawRow], progress: Callable[[int], None]) -> Chunk:
        counts, kept, numbers = RowCounts(rows_read=len(rows)), list[Entry](), list[int]()
        with bounded_memory():  # one limit for all rows: setting it for each would take a tenth of the time
            for number, raw in enumerate(rows):
                try:
                    found = self.entries(raw, counts)
                except RowRefused as exc:
                    counts.refused[exc.reason] = counts.refused.get(exc.reason, 0) + 1
                    counts.example = counts.example or f"{raw.where}: {exc}"
                except TemplateOverrun as exc:
                    raise Refused(f"{raw.where}: {exc}") from exc
                else:
                    kept += found
                    numbers += [number] * len(found)
                    counts.rows_kept += bool(found)
                progress(number + 1)
        arrays = {"numbers": np.array(numbers, np.int64)}
        for name, dtype in self.flat.items():
            parts = [entry[name] for entry in kept]
            arrays[name] = np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype, casting="unsafe")
            arrays[f"{name}_lengths"] = np.array([len(p) for p in parts], np.int64)
        for name, dtype in self.scalar.items():
            arrays[name] = np.array([entry[name] for entry in kept], dtype)
        return counts, arrays


@dataclass
class PromptJob(RenderJob):
    """Renders RL rows to prompt ids, with the parsed fields of each row (`types.Task`), so that a row is parsed only
    once.

    The fields are stored by marshal: it keeps JSON types and bytes exactly, stores a text that occurs twice only once,
    and executes nothing when it is read.
    """

    players: Players = ONE_ANSWER

    flat: ClassVar = {"ids": np.int32, "rows": np.uint8, "images": np.uint8, "context": np.int32, "answer": np.int32}
    scalar: ClassVar = {"hashes": np.uint64}

    def entries(self, raw: RawRow, counts: RowCounts) -> list[Entry]:
        task, limit = task_row(raw, self.cfg, self.players), self.cfg.max_prompt_tokens
        messages, row, named, files = self.seen(raw, task.messages)
        facts = {**paths_of(files), **task.extra_info}
        raw, task = RawRow(raw.where, row), task._replace(messages=messages, extra_info=facts)
        for name, value in row_kwargs(raw.row, raw.where).items():
            if name not in self.template_kwargs or self.template_kwargs[name] != value:
                prefix = f"the row sets {name}={value!r} for the chat template, and a run has one setting for all rows"
                raise Refused(f"{raw.where}: {prefix}. Fix: model.template_kwargs.{name}={value}, or drop the column")
        self.count_text(task.messages, raw.where, counts)
        for column in unread_system(raw.row, task.messages):
            counts.unread.setdefault(OWN_SYSTEM.format(column), raw.where)
        ids, context = self._prompt(task.messages, task, raw.where), np.zeros(0, np.int64)
        images = tuple[TaskImage, ...]()
        if files and self.images is not None:
            self._refuse_beside_images(raw.where)
            ids, images = expanded(ids, self.images.placeholders.values(), files)
        if (key := self.players.hint_key) is not None:
            messages = with_system(hinted(raw.row, key, task.messages, raw.where), self.cfg, raw.row)
            if key != FEEDBACK:
                self.count_text(messages[-1:], raw.where, counts)
                context = self._prompt(messages, task, raw.where)
        answer = self._answer(raw, task, ids, counts)
        if (longest := max(len(ids), len(context))) > limit:
            if self.cfg.filter_overlong_prompts:
                counts.rows_filtered += 1
                counts.shortest_filtered_tokens = min(counts.shortest_filtered_tokens or longest, longest)
                return []
            if images:
                raise Refused(
                    f"{raw.where}: the prompt has {longest} tokens, data.max_prompt_tokens is {limit}, and prompts with"
                    " images are not cut. Fix: data.filter_overlong_prompts=true, smaller images, or a higher limit"
                )
            if self.cfg.truncation == "error" or len(context) > limit:  # a teacher's prompt is never cut
                owner = "the prompt" if len(ids) == longest else f"the prompt with {key!r}"
                raise Refused(
                    f"{raw.where}: {owner} has {longest} tokens, data.max_prompt_tokens is {limit}."
                    " Fix: data.filter_overlong_prompts=true, data.truncation=left|right|middle, or a higher limit"
                )
            counts.rows_truncated += 1
            ids = ids[kept_positions(len(ids), limit, self.cfg.truncation)]
        counts.judged = counts.judged or (raw.where if asks_for_a_judge(raw) else "")
        self._count_truth(raw, task, counts)
        blob = np.frombuffer(marshal.dumps((raw.row, tuple(task))), np.uint8)
        number, seen = int(content_hash(named, ID_BYTES), 16), packed_images(images)
        return [{"ids": ids, "rows": blob, "images": seen, "context": context, "answer": answer, "hashes": number}]

    def _refuse_beside_images(self, where: str) -> None:
        for what in ("hint", "answer"):
            if (key := getattr(self.players, f"{what}_key")) is not None:
                raise Refused(
                    f"{where}: a row with images, and a run that reads a {what} of {key!r} to each prompt: that prompt"
                    " is rendered as text only. Fix: rows of text"
                )

    def _count_truth(self, raw: RawRow, task: TaskRow, counts: RowCounts) -> None:
        if self.players.graded(task.agent):
            kinds = counts.truths.setdefault(task.data_source, {})
            kinds.setdefault(kind_of_truth(task.ground_truth), [0, raw.where])[0] += 1
        if raw.row.get(self.cfg.prompt_key) is None and "question" in raw.row:
            return  # GSM8K as published: the truth is a part of the answer
        read_otherwise = (self.cfg.prompt_key, self.players.hint_key, self.players.answer_key)
        for column in unread_truths(raw.row, task.ground_truth):
            if column not in read_otherwise:
                prefix = f"column {column!r} is not read: the ground truth is another"
                counts.unread.setdefault(prefix, raw.where)

    def _answer(self, raw: RawRow, task: TaskRow, prompt: np.ndarray, counts: RowCounts) -> np.ndarray:
        """Return the ids [A] int64 of the row's stored answer with the end of the turn, as it is rendered after its
        prompt; empty if the run uses no stored answers."""
        if (key := self.players.answer_key) is None:
            return np.zeros(0, np.int64)
        prefix = stored_answer(raw.row, key, raw.where)
        self.count_text([prefix], raw.where, counts)
        turns, n = (*task.messages, prefix), len(task.messages)
        try:
            (row,) = render_conversation(
                self.tokenizer, turns, self.audit, self.template_kwargs, tools=task.tools, train_from=n
            )
        except RowRefused as exc:
            raise Refused(f"{raw.where}: the stored answer in {key!r}: {exc}. Fix: drop the row") from exc
        end, most = len(prompt) + int(row.mask.sum()), self.players.answer_tokens
        assert np.array_equal(row.ids[: len(prompt)], prompt) and row.mask[len(prompt) : end].all()
        if end - len(prompt) > most:
            long = f"{end - len(prompt)} tokens, rollout.max_response_tokens is {most}"
            if self.cfg.filter_overlong_prompts:
                raise RowRefused("a stored answer that is too long", long)
            fix = "Fix: raise it, or data.filter_overlong_prompts=true, which drops such rows"
            raise Refused(f"{raw.where}: the stored answer in {key!r} has {long}. {fix}")
        return row.ids[len(prompt) : end]

    def _prompt(self, messages: Messages, task: TaskRow, where: str) -> np.ndarray:
        try:
            refuse_unsupported(messages, self.audit, task.tools)
            self._refuse_control(task.tools or (), where)
            if self.images is not None:
                r = Renderer(self.tokenizer, self.template_kwargs, task.tools, self.audit.spelling)
                ids = self._image_prompts.ids(r, messages, self.audit)
            else:
                ids = render_prompt(self.tokenizer, messages, self.template_kwargs, task.tools, self.audit)
        except RowRefused as exc:
            fix = "Fix: another model.chat_template, or no such part"
            raise Refused(f"{where}: the prompt has {exc}. {fix}") from exc
        except RenderError as exc:
            raise Refused(f"{where}: {exc}") from exc
        if not len(ids):
            raise Refused(f"{where}: the chat template renders this prompt to no token at all")
        return ids

    def _refuse_control(self, tools: Sequence[Mapping[str, Any]], where: str) -> None:
        """Raise ValueError for a tool schema with special tokens in its text, since a schema may be from a foreign
        server."""
        for tool in tools:
            if held := sorted(self.special.held(json.dumps(tool, ensure_ascii=False, default=str))):
                raise Refused(
                    f"{where}: the schema of tool {tool.get('function', tool).get('name')!r} holds {', '.join(held)}, "
                    "which would be read as control tokens. Fix: another description, or leave the tool out"
                )


class ConversationJob(RenderJob):
    """Renders SFT rows to ids and loss masks. One row may give several entries (see render_conversation)."""

    flat: ClassVar = {"ids": np.int32, "mask": np.bool_, "images": np.uint8}

    def entries(self, raw: RawRow, counts: RowCounts) -> list[Entry]:
        if (column := plain_column(raw.row, self.cfg)) is not None:
            refuse_media(raw.row, (), raw.where)
            if column == TEXT and isinstance(raw.row[TEXT], str):
                self.count_text([{"content": raw.row[TEXT]}], raw.where, counts)
            found = text_row(self.tokenizer, raw.row, raw.where) if column == TEXT else ids_row(raw.row, raw.where)
            return [self._fit(found, raw.where, counts)]
        row = conversation_row(raw, self.cfg)
        seen = self.seen(raw, row.messages)
        for column in unread_columns(raw.row, self.cfg):
            counts.unread.setdefault(f"column {column!r} is not read: the row has another conversation", raw.where)
        self.count_text(seen.messages, raw.where, counts)
        self.count_columns(raw, seen.messages, counts)
        kwargs = {**self.template_kwargs, **row.template_kwargs}
        rendered = self.conversation(seen, kwargs, row.tools, row.train_from, may_skip_thinking=True)
        counts.rows_unthinking += any(r.unthinking for r in rendered)
        return [self._fit(r, raw.where, counts) for r in rendered]

    def _fit(self, row: Rendered, where: str, counts: RowCounts) -> Entry:
        """Return the entry of a row, which is cut if it is too long."""
        length, limit = len(row.ids), self.cfg.max_tokens_per_row
        if length <= limit:
            return {"ids": row.ids, "mask": row.mask, "images": packed_images(row.images)}
        if self.cfg.truncation == "error":
            raise Refused(
                f"{where}: the row has {length} tokens, data.max_tokens_per_row is {limit}."
                " Fix: data.truncation=left|right, or a higher limit"
            )
        keep = kept_positions(length, limit, self.cfg.truncation)
        try:
            images = cut_images(row.images, int(keep[0]), int(keep[-1]) + 1)
        except ValueError as e:
            cut = f"{length} tokens, and data.truncation={self.cfg.truncation} to data.max_tokens_per_row={limit}"
            raise Refused(f"{where}: the row has {cut}: {e}. Fix: a higher limit, or smaller images") from e
        ids, mask = row.ids[keep], row.mask[keep].copy()
        mask[0] = False  # nothing predicts the first token
        if not mask.any():
            raise RowRefused(CUT_AWAY, f"{length} tokens, data.max_tokens_per_row={limit}")
        counts.rows_truncated += 1
        return {"ids": ids, "mask": mask, "images": packed_images(images)}


def kept_positions(length: int, limit: int, truncation: str) -> np.ndarray:
    """Return the positions of the tokens that truncation to `limit` keeps. left removes the beginning, right the end,
    and middle the tokens between the two halves."""
    assert length > limit, f"{length} tokens need no truncation to {limit}"
    if truncation == "left":
        return np.arange(length - limit, length)
    if truncation == "right":
        return np.arange(limit)
    assert truncation == "middle", f"truncation {truncation!r} was not checked"
    half = limit // 2
    return np.concatenate([np.arange(half), np.arange(length - (limit - half), length)])
