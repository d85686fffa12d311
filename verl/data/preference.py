"""Render preference rows (data/pairs.py) to token ids with loss masks, as a table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from verl.chat.conversation import Rendered
from verl.chat.template import RowRefused, Tokenizer, shared
from verl.config.schema import DataConfig
from verl.data.files import RawRow
from verl.data.formats import row_kwargs
from verl.data.images import packed_images
from verl.data.media import refuse_media
from verl.data.pairs import PreferenceRow, gap_of, pair_of_texts, pair_row, unpaired_rows
from verl.data.plain import text_ids
from verl.data.render import Entry, RenderJob, RowCounts
from verl.data.source import ConversationTable, LoadReport, images_key, load_arrays, refuse_empty, rules_of_model
from verl.data.values import names_of
from verl.errors import Refused


@dataclass(frozen=True, slots=True)
class Pair:
    """The tokens of one row; the masks are True for the tokens of the answers. An unpaired row has no `rejected`."""

    chosen: Rendered
    rejected: Rendered | None
    desirable: bool = True
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class PairTable:
    """The rendered rows. `key` is a hash of their content; results that are computed from them once (reference
    log-probs) are stored under it."""

    pairs: Sequence[Pair]
    report: LoadReport
    key: str

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def has_images(self) -> bool:
        """True if any row has an image."""
        return any(pair.chosen.images for pair in self.pairs)

    def kinds_of_media(self) -> tuple[bool, bool]:
        """Return whether any row has an image, and whether any has a sound, which rows of pairs have not."""
        return self.has_images, False

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
    model: Path | None = None,
) -> PairTable:
    """Read, render and check all rows. A row of more than data.max_tokens_per_row tokens raises ValueError, or is
    dropped if data.truncation is left or right, since a cut answer is not the answer that was compared. stops: see
    `RenderJob` · model: see `load_tasks`."""
    images = rules_of_model(model, cfg, tokenizer)
    job = PairJob(tokenizer, cfg, template_kwargs or {}, stops, images, paired=paired, needs_gap=needs_gap)
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
    return PairTable(pairs, report, digest.hexdigest() + images_key(arrays, images))


@dataclass(kw_only=True)
class PairJob(RenderJob):
    """Renders preference rows to ids and loss masks of the answers: two entries per pair, chosen first, or one
    entry."""

    paired: bool
    needs_gap: bool

    flat: ClassVar = {"ids": np.int32, "mask": np.bool_, "images": np.uint8}
    scalar: ClassVar = {"desirable": np.bool_, "gap": np.float64}

    def entries(self, raw: RawRow, counts: RowCounts) -> list[Entry]:
        if self.paired and (texts := pair_of_texts(raw, self.cfg)) is not None:
            return self._text_entries(raw, texts, counts)
        rows = [pair_row(raw, self.cfg)] if self.paired else unpaired_rows(raw, self.cfg)
        return [entry for row in rows for entry in self._entries_of(raw, row, counts)]

    def _entries_of(self, raw: RawRow, row: PreferenceRow, counts: RowCounts) -> list[Entry]:
        every = row.prompt + row.chosen + (row.rejected or ())
        seen = self.seen(raw, every)
        self.count_text(seen.messages, raw.where, counts)
        self.count_columns(raw, seen.messages, counts)
        kwargs, start = {**self.template_kwargs, **row_kwargs(raw.row, raw.where)}, len(row.prompt)
        end = start + len(row.chosen)
        prompt, chosen, rejected = seen.messages[:start], seen.messages[start:end], seen.messages[end:]
        if any(isinstance(m["content"], list) for m in chosen + rejected):
            raise Refused(f"{raw.where}: an image in an answer. Fix: images in the prompt, which both answers share")
        rendered = [
            self.conversation(seen._replace(messages=prompt + answer), kwargs, row.tools, start, last_only=True)[-1]
            for answer in (chosen, rejected)
            if answer
        ]
        return self._fitting(raw, rendered, row.gap, row.desirable)

    def _text_entries(self, raw: RawRow, texts: tuple[str, str], counts: RowCounts) -> list[Entry]:
        """Return the entries of two texts without a prompt. They are tokenised without a template, and their common
        beginning is not trained."""
        refuse_media(raw.row, (), raw.where)
        self.count_text([{"content": text} for text in texts], raw.where, counts)
        better, worse = both = [text_ids(self.tokenizer, text) for text in texts]
        common = shared(better.tolist(), worse.tolist())
        if not common:
            raise Refused(
                f"{raw.where}: no {self.cfg.prompt_key!r}, and 'chosen' and 'rejected' do not begin with the same text."
                f" Fix: add a {self.cfg.prompt_key!r} column, or give both as whole conversations"
            )
        if min(map(len, both)) == common:
            raise RowRefused("one answer is the beginning of the other")
        rendered = [Rendered(ids, np.arange(len(ids)) >= common) for ids in both]
        return self._fitting(raw, rendered, gap_of(raw.row, raw.where))

    def _fitting(
        self, raw: RawRow, rendered: Sequence[Rendered], gap: float | None, desirable: bool = True
    ) -> list[Entry]:
        if self.needs_gap and gap is None:
            raise Refused(
                f"{raw.where}: no true rewards: this loss needs chosen_score and rejected_score, or margin"
                f" (columns: {names_of(raw.row)})"
            )
        longest = max(len(r.ids) for r in rendered)
        if longest > self.cfg.max_tokens_per_row:
            if self.cfg.truncation == "error":
                raise Refused(
                    f"{raw.where}: {longest} tokens, data.max_tokens_per_row is {self.cfg.max_tokens_per_row}."
                    " Fix: a higher limit, or data.truncation=right to drop such rows"
                )
            raise RowRefused("too long")
        facts = {"desirable": desirable, "gap": math.nan if gap is None else gap}
        return [{"ids": r.ids, "mask": r.mask, "images": packed_images(r.images), **facts} for r in rendered]
