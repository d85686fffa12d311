"""Samples as columns of the queue and back. `COLUMNS` in verl/columns.py declares the columns.

A sample that is read has the facts of its ref, which the driver may have changed since the row was put: an outcome, a
number of copies. The column `facts` makes a row complete for readers without its ref.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from verl.batch import Ragged, pack
from verl.columns import SIDE, declared
from verl.transfer_queue.base import TransferQueue
from verl.types import LEARNED, ROUTES, TEMPLATE, Facts, Medium, Ref, Refs, Sample, Segment, Source, facts_of

SOURCES: tuple[Source, ...] = ("prompt", "sampled", "env", "stored")
ALWAYS, SOMETIMES = ("ids", "segments", "rollout_logprobs"), ("context", "extras")
"""The columns from which a sample is rebuilt, besides its side channels: those that every row has, and those that some
rows have."""
_CODE = {source: i for i, source in enumerate(SOURCES)}


class _Extras(msgspec.Struct, frozen=True, omit_defaults=True):
    """Media and side-channel positions of a row's segments; written only for rows that have some."""

    media: dict[int, tuple[Medium, ...]] = {}
    """Position of a segment -> its media."""
    side: dict[str, tuple[int, ...]] = {}
    """Channel -> the segments that have it."""


def _plain(value: object) -> object:
    """Return a str subclass or a number of numpy as a plain value, which msgpack can encode."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in the facts of a sample")


_pack = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_facts = msgspec.msgpack.Decoder(Facts).decode
_extras = msgspec.msgpack.Decoder(_Extras).decode


def columns_of(sample: Sample) -> dict[str, np.ndarray]:
    """Return the columns of one row; no other object shares their arrays."""
    segments = sample.segments
    lengths = [len(s.ids) for s in segments]
    learned = [s for s in segments if s.source in LEARNED]
    logprobs = [np.full(len(s.ids), np.nan, np.float32) if s.logprobs is None else s.logprobs for s in learned]
    if logprobs and segments[0].source in LEARNED:
        logprobs[0] = logprobs[0][1:]  # no token precedes a row's first token: it is no loss token
    mask, at = np.zeros(sum(lengths), np.bool_), 0
    for segment, length in zip(segments, lengths):
        if segment.source in LEARNED:
            mask[at : at + length] = True
        at += length
    side: dict[str, tuple[int, ...]] = {}
    for name in sorted({name for s in segments for name in s.side}):
        side[name] = tuple(i for i, s in enumerate(segments) if name in s.side)
    media = {i: s.media for i, s in enumerate(segments) if s.media}
    layout = [(n, _CODE[s.source], s.version) for n, s in zip(lengths, segments)]
    made: dict[str, Any] = {
        "facts": np.frombuffer(bytearray(_pack(facts_of(sample))), np.uint8),
        "ids": np.concatenate([s.ids for s in segments]) if segments else np.zeros(0, np.int64),
        "mask": mask,
        "segments": np.array(layout, np.int64),
        "rollout_logprobs": np.concatenate(logprobs) if logprobs else np.zeros(0, np.float32),
    }
    if media or side:
        made["extras"] = np.frombuffer(bytearray(_pack(_Extras(media, side))), np.uint8)
    if sample.context is not None:
        made["context"] = sample.context.copy()
    for name, owners in side.items():
        made[SIDE + name] = np.concatenate([segments[i].side[name] for i in owners])
    return {name: values if (c := declared(name)) is None else c.typed(values) for name, values in made.items()}


def queued_samples(queue: TransferQueue, refs: Refs, without: Collection[str] = ()) -> list[Sample]:
    """Return the rows of the queue as samples, in the order of `refs`, with the facts of their refs. without: the side
    channels that are not read."""
    if not refs:
        return []
    rows: list[dict[str, np.ndarray]] = [{} for _ in refs]
    for name, values in queue.read(refs, ALWAYS).items():
        for row, part in zip(rows, _split(values), strict=True):
            row[name] = part
    place = {sample_id: i for i, sample_id in enumerate(refs.ids)}
    for name in queue.columns(refs):
        if name in SOMETIMES or (name.startswith(SIDE) and name.removeprefix(SIDE) not in without):
            have = queue.having(refs, name)
            for ref, part in zip(have, _split(queue.read(have, (name,))[name]), strict=True):
                rows[place[ref.sample_id]][name] = part
    return [_sample(ref, row, without) for ref, row in zip(refs, rows)]


def read_tokens(queue: TransferQueue, refs: Refs, names: Sequence[str]) -> dict[str, Ragged]:
    """Return columns with one value per loss token. Side channels, which the queue has only for the tokens of their
    segments, are taken from the packed rows."""
    side = [name for name in names if name.startswith(SIDE)]
    found = queue.read(refs, [name for name in names if name not in side])
    if side and refs:
        batch = pack(queued_samples(queue, refs, without=(ROUTES,)), share_prefix=False)
        if missing := [name for name in side if name not in batch.columns]:
            what = f"{len(refs)} of {len(refs)} samples, e.g. {refs[0].sample_id}"
            raise ValueError(f"column {missing[0]!r} was not written for {what}")
        found |= {name: Ragged(batch.columns[name], batch.row_start) for name in side}
    return found


def facts_column(rows: Sequence[Facts]) -> Ragged:
    """Return the column `facts` of these rows."""
    parts = [bytearray(_pack(facts_of(row))) for row in rows]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Ragged(torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8)), offsets)


def read_facts(queue: TransferQueue, refs: Refs) -> list[Facts]:
    """Return the facts that were last written to the rows."""
    return [_facts(part.data) for part in _split(queue.read(refs, ("facts",))["facts"])]


def observed_tokens(segments: np.ndarray) -> int:
    """Count the environment's tokens after the first sampled token, without template text, from the column `segments`
    of a row: `batch.observed` turns them into loss tokens."""
    drawn = np.flatnonzero(segments[:, 1] == _CODE["sampled"])
    behind = segments[drawn[0] :] if len(drawn) else segments[:0]
    return int(behind[(behind[:, 1] == _CODE["env"]) & (behind[:, 2] != TEMPLATE), 0].sum())


def _split(column: Ragged) -> list[np.ndarray]:
    values, offsets = column.values.numpy(), column.offsets.tolist()
    return [values[a:b] for a, b in zip(offsets, offsets[1:])]


def _sample(ref: Ref, columns: dict[str, np.ndarray], without: Collection[str]) -> Sample:
    extras = _extras(columns["extras"].data) if "extras" in columns else _Extras()
    segments: list[Segment] = []
    at = drawn = 0
    taken = dict.fromkeys(extras.side, 0)
    for i, (length, code, version) in enumerate(columns["segments"].tolist()):
        own: dict[str, Any] = {"media": extras.media[i]} if i in extras.media else {}
        if extras.side:
            own["side"] = side = {}
            for name in (n for n, owners in extras.side.items() if i in owners and n not in without):
                side[name] = columns[SIDE + name][taken[name] : taken[name] + length]
                taken[name] += length
        if SOURCES[code] in LEARNED:
            first = 1 if i == 0 and length else 0  # no column has its log-prob: no token predicts it
            logprobs = columns["rollout_logprobs"][drawn : drawn + length - first]
            drawn += length - first
            if code == _CODE["sampled"]:
                own["logprobs"] = np.concatenate([np.full(1, np.nan, np.float32), logprobs]) if first else logprobs
        segments.append(Segment(ids=columns["ids"][at : at + length], source=SOURCES[code], version=version, **own))
        at += length
    return Sample(**facts_of(ref), segments=tuple(segments), context=columns.get("context"))
