"""Join the segments of a row to runs of tokens, and cut the runs so that the rows of a trajectory share their common
tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from verl.types import LEARNED, Sample, Segment


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
        ids = {i: np.concatenate([s.ids for s in samples[i].segments]) for i in rows}
        ends = {i: np.cumsum([sum(len(s.ids) for s in run) for run in runs_of(samples[i])]) for i in rows}
        for i, j in itertools.permutations(rows, 2):
            n = min(len(ids[i]), len(ids[j]))
            differs = np.flatnonzero(ids[i][:n] != ids[j][:n])
            shared = int(differs[0]) if len(differs) else n
            out.setdefault(i, set()).update((shared, *ends[j][ends[j] < shared].tolist()))
    return out


def cut_runs(runs: list[list[Segment]], cuts: set[int]) -> Iterator[list[Segment]]:
    """Yield the runs of a row, cut at these token positions of the row. The media of a cut segment stay with its first
    part."""
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
    return replace(s, ids=s.ids[a:b], logprobs=logprobs, side=side, media=() if a else s.media)
