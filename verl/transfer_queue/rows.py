"""Samples as columns and back. The columns of a row of T tokens in S segments, L of them loss tokens:

ids               [T] int64
mask              [T] bool: sampled by the policy, or stored
segments          [S, 3] int64: length, source (its position in `SOURCES`), weight version
rollout_logprobs  [L] float32: of the distribution that was sampled from; NaN of a stored answer
temperature       [1] float32
reward            [1] float64, NaN without one · component/NAME [1] float64, NaN where a reward had none
side/NAME         [t, ...]: of the tokens of those segments that have the channel
context           [1 + C] int64, where a teacher reads another prompt (`Sample.context`)
facts             [n] uint8: task, stop reason, adapter, media references as JSON; ids and outcome are in the ref
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from verl.batch import Ragged
from verl.transfer_queue.base import TransferQueue
from verl.types import LEARNED, TEMPLATE, Ref, Refs, Sample, Segment, Source, StopReason

SOURCES: tuple[Source, ...] = ("prompt", "sampled", "env", "stored")
SAMPLE_COLUMNS = ("ids", "segments", "rollout_logprobs", "temperature", "reward", "facts")
COMPONENT, SIDE, CONTEXT = "component/", "side/", "context"
_CODE = {source: i for i, source in enumerate(SOURCES)}


class _Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a sample that are neither numbers nor in its ref."""

    task_id: str = ""
    stop_reason: StopReason = "eos"
    adapter: str | None = None
    media: dict[int, tuple[str, ...]] = {}
    """Position of a segment -> its references."""
    side: dict[str, tuple[int, ...]] = {}
    """Channel -> the segments that have it."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Facts).decode


def columns_of(sample: Sample) -> dict[str, np.ndarray]:
    """Return the columns of one row, as arrays that no other object shares."""
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
    facts = _Facts(
        task_id=sample.task_id,
        stop_reason=sample.stop_reason,
        adapter=sample.adapter,
        media={i: s.media for i, s in enumerate(segments) if s.media},
        side=side,
    )
    layout = [(n, _CODE[s.source], s.version) for n, s in zip(lengths, segments)]
    out = {
        "ids": np.concatenate([s.ids for s in segments], dtype=np.int64) if segments else np.zeros(0, np.int64),
        "mask": mask,
        "segments": np.array(layout, np.int64).reshape(-1, 3),
        "rollout_logprobs": np.concatenate(logprobs, dtype=np.float32) if logprobs else np.zeros(0, np.float32),
        "temperature": np.array((sample.temperature,), np.float32),
        "reward": np.array((sample.reward,), np.float64),
        "facts": np.frombuffer(bytearray(_encode(facts)), np.uint8),
    }
    for name, value in sample.components.items():
        out[COMPONENT + name] = np.array((value,), np.float64)
    for name, owners in side.items():
        out[SIDE + name] = np.concatenate([segments[i].side[name] for i in owners])
    if sample.context is not None:
        out[CONTEXT] = sample.context.copy()
    return out


def read_samples(queue: TransferQueue, refs: Refs) -> list[Sample]:
    """Return the rows of the queue as samples, in the order of `refs`."""
    if not refs:
        return []
    found = queue.read(refs, SAMPLE_COLUMNS)
    facts = [_decode(row.data) for row in _split(found["facts"])]
    more = [name for name in queue.columns(refs) if name.startswith((COMPONENT, SIDE)) or name == CONTEXT]
    extra: list[dict[str, np.ndarray]] = [{} for _ in refs]
    for name in more:
        place = {sample_id: i for i, sample_id in enumerate(refs.ids)}
        have = queue.having(refs, name)
        for ref, row in zip(have, _split(queue.read(have, (name,))[name]), strict=True):
            extra[place[ref.sample_id]][name] = row
    columns = {name: _split(found[name]) for name in SAMPLE_COLUMNS if name != "facts"}
    return [
        _sample(ref, f, {n: rows[i] for n, rows in columns.items()} | extra[i])
        for i, (ref, f) in enumerate(zip(refs, facts))
    ]


def observed_tokens(segments: np.ndarray) -> int:
    """Count the tokens that `batch.observed` makes loss tokens, from the column `segments` of a row."""
    drawn = np.flatnonzero(segments[:, 1] == _CODE["sampled"])
    behind = segments[drawn[0] :] if len(drawn) else segments[:0]
    return int(behind[(behind[:, 1] == _CODE["env"]) & (behind[:, 2] != TEMPLATE), 0].sum())


def _split(column: Ragged) -> list[np.ndarray]:
    values, offsets = column.values.numpy(), column.offsets.tolist()
    return [values[a:b] for a, b in zip(offsets, offsets[1:])]


def _sample(ref: Ref, facts: _Facts, columns: dict[str, np.ndarray]) -> Sample:
    segments: list[Segment] = []
    at = drawn = 0
    taken = dict.fromkeys(facts.side, 0)
    for i, (length, code, version) in enumerate(columns["segments"].tolist()):
        own: dict[str, Any] = {"media": facts.media[i]} if i in facts.media else {}
        if facts.side:
            own["side"] = side = {}
            for name in (n for n, owners in facts.side.items() if i in owners):
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
    return Sample(
        sample_id=ref.sample_id,
        trajectory_id=ref.trajectory_id,
        group_id=ref.group_id,
        purpose=ref.purpose,
        segments=tuple(segments),
        temperature=float(columns["temperature"][0]),
        reward=float(columns["reward"][0]),
        components={n.removeprefix(COMPONENT): float(v[0]) for n, v in columns.items() if n.startswith(COMPONENT)},
        outcome=ref.outcome,
        truncated=ref.truncated,
        task_id=facts.task_id,
        stop_reason=facts.stop_reason,
        adapter=facts.adapter,
        teacher=ref.teacher,
        context=columns.get(CONTEXT),
        untaught=ref.untaught,
    )
