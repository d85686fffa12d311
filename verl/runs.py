"""Join the segments of a row to runs of tokens, and cut the runs so that the rows of a trajectory share their common
tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from verl.types import LEARNED, Medium, Sample, Segment


def runs_of(sample: Sample) -> list[list[Segment]]:
    """Return the non-empty segments of a row in runs: neighbours that are all trained or all context. This keeps the
    tree shallow, since spans of several weight versions are one run. The first segment is a run of its own, because a
    group shares it."""
    runs: list[list[Segment]] = []
    for i, s in enumerate(sample.segments):
        if len(s.ids) == 0:
            continue
        if i > 1 and runs and (runs[-1][0].source in LEARNED) == (s.source in LEARNED):
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs


def cuts_of(samples: Sequence[Sample]) -> dict[int, set[int]]:
    """Return, for each row of a trajectory with several rows, the token positions at which its runs are cut: where two
    rows begin to differ, and at the ends of the other rows' runs before that."""
    of: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        of.setdefault(sample.trajectory_id, []).append(i)
    out: dict[int, set[int]] = {}
    for rows in (rows for rows in of.values() if len(rows) > 1):
        numbers: dict[str, int] = {}
        ids = {i: _inputs_of(samples[i], numbers) for i in rows}
        ends = {i: np.cumsum([sum(len(s.ids) for s in run) for run in runs_of(samples[i])]) for i in rows}
        for i, j in itertools.permutations(rows, 2):
            n = min(len(ids[i]), len(ids[j]))
            differs = np.flatnonzero(ids[i][:n] != ids[j][:n])
            shared = int(differs[0]) if len(differs) else n
            out.setdefault(i, set()).update((shared, *ends[j][ends[j] < shared].tolist()))
    return out


def _inputs_of(sample: Sample, numbers: dict[str, int]) -> np.ndarray:
    """Return [t] int64: the ids of a row, with numbers below 0 for the tokens of media, which differ between media and
    within each. numbers: those of the references so far."""
    ids, at = np.concatenate([s.ids for s in sample.segments]).astype(np.int64), 0
    for s in sample.segments:
        for m in s.media:
            first = numbers.setdefault(m.reference, len(numbers)) << 32
            ids[at + m.start : at + m.end] = -1 - first - np.arange(m.tokens)
        at += len(s.ids)
    return ids


def media_of(run: Sequence[Segment]) -> tuple[Medium, ...]:
    """Return the media of a run, with places counted from the run's first token."""
    if len(run) == 1:  # the usual case
        return run[0].media
    found, at = list[Medium](), 0
    for s in run:
        found += [m._replace(start=at + m.start) for m in s.media]
        at += len(s.ids)
    return tuple(found)


def cut_runs(runs: list[list[Segment]], cuts: set[int]) -> Iterator[list[Segment]]:
    """Yield the runs of a row, cut at these token positions of the row. No cut is inside of a medium, since two rows
    differ where their media begin."""
    at = 0
    for run in runs:
        parts: list[Segment] = []
        for s in run:
            inside = sorted(c - at for c in cuts if at < c < at + len(s.ids))
            for a, b in itertools.pairwise((0, *inside, len(s.ids))):
                if at + a in cuts and parts:
                    yield parts
                    parts = []
                parts.append(s if not inside else slice_of(s, a, b))
            at += len(s.ids)
        yield parts


def slice_of(s: Segment, a: int, b: int) -> Segment:
    logprobs = None if s.logprobs is None else s.logprobs[a:b]
    side = {name: channel[a:b] for name, channel in s.side.items()}
    media = tuple(m._replace(start=m.start - a) for m in s.media if a <= m.start < b)
    return replace(s, ids=s.ids[a:b], logprobs=logprobs, side=side, media=media)
