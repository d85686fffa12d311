"""The packed batch: a forest of segments, no padding, and the hidden row that predicts each loss token.

    tokens   ids[T] positions[T]            segment s owns tokens seg_start[s]:seg_start[s+1] and continues parent[s]
    loss     targets[L] target_from[L]      hidden row target_from[l] predicts targets[l]; rows are contiguous in L
    rows     leaf[R] row_start[R+1]         row r ends in segment leaf[r]; its loss tokens are
    row_start[r]:row_start[r+1]

A flat pack is the case without parents. A prompt shared by a group is one segment whose last position predicts the
first token of every response, which is why targets are never made by shifting ids by one.
Columns are [L, ...] per loss token, row columns [R, ...]. `sequence[r]` is the trajectory of row r: the unit of
"sequence" means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from verl.media_tokens import MediaTokens, joined_media, place_media
from verl.routes import concat_routes, joined_routes, routes_of
from verl.runs import cut_runs, cuts_of, media_of, runs_of, slice_of
from verl.types import LEARNED, ROUTES, Medium, Sample, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    ids: Tensor  # [T] int64
    positions: Tensor  # [..., T] int64
    seg_start: np.ndarray  # [S+1] int64
    parent: np.ndarray  # [S] int64, -1 at a root; parents precede their children
    leaf: np.ndarray  # [R] int64
    row_start: np.ndarray  # [R+1] int64
    sequence: np.ndarray  # [R] int64, trajectory of each row, 0..num_sequences-1
    target_from: Tensor  # [L] int64
    targets: Tensor  # [L] int64
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [L, ...]
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [R, ...]
    media: MediaTokens | None = None  # the tokens that are placeholders of media; None: all are text
    routes: Tensor | None = None  # [layers, k, T]: experts of each token in the rollout, or NO_ROUTE (verl/routes.py)

    @property
    def num_tokens(self) -> int:
        return int(self.seg_start[-1])

    @property
    def num_rows(self) -> int:
        return len(self.leaf)

    @property
    def num_sequences(self) -> int:
        return int(self.sequence.max()) + 1 if len(self.sequence) else 0

    @property
    def num_loss_tokens(self) -> int:
        return int(self.row_start[-1])

    @property
    def row_of(self) -> Tensor:
        """Return [L] int64: the row of each loss token."""
        return torch.from_numpy(np.repeat(np.arange(self.num_rows), np.diff(self.row_start)))

    @property
    def sequence_of(self) -> Tensor:
        """Return [L] int64: the trajectory of each loss token."""
        return torch.from_numpy(np.repeat(self.sequence, np.diff(self.row_start)))

    def with_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        for name, column in columns.items():
            assert len(column) == self.num_loss_tokens, (
                f"{name}: {len(column)} values, {self.num_loss_tokens} loss tokens"
            )
        return replace(self, columns={**self.columns, **columns})

    def with_row_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        for name, column in columns.items():
            assert len(column) == self.num_rows, f"{name}: {len(column)} values for {self.num_rows} rows"
        return replace(self, row_columns={**self.row_columns, **columns})


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Per-token [L, ...] and per-sequence [S] data with the layout that joins them: the data that algorithms read.

    `mask` [L] bool: True = sampled by the policy (or part of a stored answer) and not rejected. Sequence = trajectory,
    whatever its number of rows.
    """

    token: Mapping[str, Tensor]
    sequence: Mapping[str, Tensor]
    sequence_of: Tensor  # [L] int64
    num_sequences: int
    mask: Tensor  # [L] bool

    def __getitem__(self, name: str) -> Tensor:
        return self.token[name]

    def __contains__(self, name: str) -> bool:
        return name in self.token

    def with_token(self, columns: Mapping[str, Tensor]) -> Columns:
        return replace(self, token={**self.token, **columns})

    def counts(self) -> Tensor:
        """Return [S] float64: the number of tokens of each sequence in the mask."""
        return segment_sum(self.mask.double(), self.sequence_of, self.num_sequences)

    def sum(self, x: Tensor) -> Tensor:
        """Return [S]: the sum of x [L] over the tokens of each sequence in the mask."""
        return segment_sum(torch.where(self.mask, x, torch.zeros_like(x)), self.sequence_of, self.num_sequences)

    def mean(self, x: Tensor) -> Tensor:
        """Return [S]: the mean of x [L] over the tokens of each sequence in the mask; 0 for a sequence without any."""
        return self.sum(x) / self.counts().clamp(min=1).to(x.dtype)

    def cleaned(self) -> Columns:
        """Return a copy with 0 outside the mask, so that NaN there affects neither values nor gradients."""
        zeroed = {n: _where(self.mask, c) if c.is_floating_point() else c for n, c in self.token.items()}
        return replace(self, token=zeroed)


@dataclass(frozen=True, slots=True)
class Ragged:
    """One column of several samples: values [N, ...]; those of sample i are at offsets[i]:offsets[i+1]."""

    values: Tensor
    offsets: np.ndarray  # [R+1] int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> Tensor:
        return self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def rows(self) -> Sequence[Tensor]:
        """Views of all rows."""
        return self.values.split(np.diff(self.offsets).tolist())


def _where(mask: Tensor, column: Tensor) -> Tensor:
    shaped = mask.view(-1, *[1] * (column.dim() - 1))
    return torch.where(shaped, column, torch.zeros_like(column))


# -- building --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """A run of tokens in the prefix tree under construction."""

    ids: np.ndarray
    parent: int
    depth: int  # tokens before this node
    media: tuple[Medium, ...] = ()
    routes: np.ndarray | None = None  # [t, layers, k]
    children: dict[_Key, int] = field(default_factory=dict)


_Key = tuple[str | None, tuple[Medium, ...], bytes, bytes]
"""The identity of a run of tokens as an input: the adapter that reads it, its media, its ids, the routes of its tokens.
Ids alone do not suffice: two images have the same placeholder ids."""


def pack(samples: Sequence[Sample], *, share_prefix: bool = True) -> Batch:
    """Pack samples into one forest. Equal leading segments are stored once when `share_prefix`; rows of one trajectory
    share all their common tokens.

    Loss tokens are the sampled and stored ones, except the first token of a row (nothing predicts it). The samples
    provide the columns `rollout_logprobs` [L] float32 (NaN where stored), `versions` [L] int64 (the weights that
    sampled each token; -1: none) and `side/NAME` [L, ...], and the row column `temperature` [R] float32.
    """
    nodes: list[_Node] = []
    roots: dict[_Key, int] = {}
    leaf: list[int] = []
    per_row: list[list[tuple[int, int, int]]] = []  # (node, first sampled offset in node, end) of each row
    drawn: list[Segment] = []  # the sampled segments in row order, without first tokens of rows
    cuts = cuts_of(samples) if share_prefix else {}
    for i, sample in enumerate(samples):
        at, spans = -1, []
        for parts in cut_runs(runs_of(sample), cuts[i]) if i in cuts else runs_of(sample):
            ids = np.concatenate([s.ids for s in parts]) if len(parts) > 1 else np.asarray(parts[0].ids)
            ids = ids.astype(np.int64, copy=False)  # one dtype: equal bytes are equal ids
            media = media_of(parts)
            routes = routes_of(parts)
            key = (sample.adapter, media, ids.tobytes(), b"" if routes is None else routes.tobytes())
            siblings = nodes[at].children if at >= 0 else roots
            found = siblings.get(key) if share_prefix else None
            if found is None:
                depth = nodes[at].depth + len(nodes[at].ids) if at >= 0 else 0
                nodes.append(_Node(ids, at, depth, media, routes))
                found = len(nodes) - 1
                siblings[key] = found
            first = 1 if at < 0 else 0
            at = found
            if parts[0].source in LEARNED:
                spans.append((at, first, len(ids)))
                drawn += [slice_of(parts[0], 1, len(parts[0].ids)), *parts[1:]] if first else parts
        if at < 0:
            raise ValueError(f"sample {sample.sample_id} has no tokens")
        leaf.append(at)
        per_row.append(spans)
    return _assemble(samples, nodes, leaf, per_row, drawn)


def _assemble(
    samples: Sequence[Sample],
    nodes: list[_Node],
    leaf: list[int],
    per_row: list[list[tuple[int, int, int]]],
    drawn: list[Segment],
) -> Batch:
    lengths = np.array([len(n.ids) for n in nodes], np.int64)
    seg_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    parent = np.array([n.parent for n in nodes], np.int64)
    depth = np.array([n.depth for n in nodes], np.int64)
    ids = np.concatenate([n.ids for n in nodes]).astype(np.int64)
    spans = [(row, node, first, end) for row, spans in enumerate(per_row) for node, first, end in spans]
    where, came_from, counts = [], [], np.zeros(len(leaf), np.int64)
    for row, node, first, end in spans:
        at = np.arange(seg_start[node] + first, seg_start[node] + end)
        before = at - 1
        if first == 0 and len(before):  # the first token of a segment is predicted by its parent's last position
            before[0] = seg_start[parent[node] + 1] - 1
        where.append(at)
        came_from.append(before)
        counts[row] += end - first
    at_all = np.concatenate(where) if where else np.zeros(0, np.int64)
    names: dict[str, int] = {}
    sequence = np.array([names.setdefault(s.trajectory_id, len(names)) for s in samples], np.int64)
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(ranges(depth, lengths)),
        seg_start=seg_start,
        parent=parent,
        leaf=np.array(leaf, np.int64),
        row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        sequence=sequence,
        target_from=torch.from_numpy(np.concatenate(came_from) if came_from else np.zeros(0, np.int64)),
        targets=torch.from_numpy(ids[at_all]),
        columns=_drawn_columns(drawn),
        row_columns={
            "temperature": torch.tensor([s.temperature or 1.0 for s in samples], dtype=torch.float32),
            "taught": torch.tensor([s.taught for s in samples], dtype=torch.bool),
            "banned": torch.tensor([s.banned for s in samples], dtype=torch.bool),
        },
        media=place_media([n.media for n in nodes], seg_start),
        routes=joined_routes([(n.routes, len(n.ids)) for n in nodes]),
    )


def _drawn_columns(drawn: Sequence[Segment]) -> dict[str, Tensor]:
    """Return the sampler's records of each loss token; for a stored one NaN, no version and side channels of 0."""
    logprobs = [np.full(len(s.ids), np.nan) if s.logprobs is None else s.logprobs for s in drawn]
    flat = np.concatenate(logprobs) if logprobs else np.zeros(0)
    versions = np.repeat(np.array([s.version for s in drawn], np.int64), [len(s.ids) for s in drawn])
    columns = {"rollout_logprobs": torch.from_numpy(flat.astype(np.float32)), "versions": torch.from_numpy(versions)}
    for name in sorted({name for s in drawn for name in s.side} - {ROUTES}):
        without = sum(name not in s.side for s in drawn if s.source != "stored")
        if without:
            raise ValueError(f"side channel {name!r} is missing in {without} of {len(drawn)} sampled segments")
        like = next(s.side[name] for s in drawn if name in s.side)
        none = [np.zeros((0 if name in s.side else len(s.ids), *like.shape[1:]), like.dtype) for s in drawn]
        columns[f"side/{name}"] = torch.from_numpy(np.concatenate([s.side.get(name, z) for s, z in zip(drawn, none)]))
    return columns


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [start_0 .. start_0+length_0-1, start_1 .. ] as one int64 array."""
    lengths = np.asarray(lengths, np.int64)
    offsets = np.repeat(np.asarray(starts, np.int64) - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets


# -- selecting and splitting -----------------------------------------------------------------------------------------


def select_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Return the batch of these rows, in this order, with only the segments that they need."""
    if np.array_equal(rows, np.arange(batch.num_rows)):
        return batch
    needed = np.zeros(len(batch.parent), bool)
    at = batch.leaf[rows]
    while len(at):
        needed[at] = True
        at = batch.parent[at]
        at = at[at >= 0]
    kept = np.flatnonzero(needed)
    new_of_old = np.cumsum(needed) - 1
    lengths = np.diff(batch.seg_start)
    tokens = ranges(batch.seg_start[kept], lengths[kept])
    new_token = np.full(batch.num_tokens, -1, np.int64)
    new_token[tokens] = np.arange(len(tokens))
    counts = np.diff(batch.row_start)[rows]
    loss = torch.from_numpy(ranges(batch.row_start[rows], counts))
    _, sequence = np.unique(batch.sequence[rows], return_inverse=True)
    old_parent = batch.parent[kept]
    token_index, row_index = torch.from_numpy(tokens), torch.from_numpy(np.asarray(rows, np.int64))
    return Batch(
        ids=batch.ids[token_index],
        positions=batch.positions[..., token_index],
        seg_start=np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int64),
        parent=np.where(old_parent >= 0, new_of_old[old_parent], -1),
        leaf=new_of_old[batch.leaf[rows]],
        row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        sequence=sequence.astype(np.int64),
        target_from=torch.from_numpy(new_token)[batch.target_from[loss]],
        targets=batch.targets[loss],
        columns={name: c[loss] for name, c in batch.columns.items()},
        row_columns={name: c[row_index] for name, c in batch.row_columns.items()},
        media=batch.media and batch.media.at(token_index),
        routes=None if batch.routes is None else batch.routes[..., token_index],
    )


def loss_index(batch: Batch, rows: np.ndarray) -> Tensor:
    """Return [l] the positions of the loss tokens of `rows` in the batch's columns."""
    return torch.from_numpy(ranges(batch.row_start[rows], np.diff(batch.row_start)[rows]))


def make_microbatches(batch: Batch, max_tokens: int) -> list[np.ndarray]:
    """Return the rows of each micro-batch: at most `max_tokens` tokens each, shared segments counted once, trajectories
    whole.

    Trajectories under one root stay neighbours. One trajectory longer than the budget gets its own micro-batch.
    """
    order = np.lexsort((np.arange(batch.num_rows), batch.sequence, roots_of(batch)))
    by_sequence: dict[int, list[int]] = {}
    for r in order:
        by_sequence.setdefault(int(batch.sequence[r]), []).append(int(r))
    lengths = np.diff(batch.seg_start)
    parts: list[list[int]] = []
    held: set[int] = set()
    used = 0
    for rows in by_sequence.values():
        path = _paths(batch.parent, [int(batch.leaf[r]) for r in rows])
        cost = int(sum(lengths[s] for s in path - held))
        if parts and used + cost <= max_tokens:
            parts[-1].extend(rows)
            held |= path
            used += cost
        else:
            parts.append(list(rows))
            held, used = path, int(sum(lengths[s] for s in path))
    return [np.array(p, np.int64) for p in parts]


def roots_of(batch: Batch) -> np.ndarray:
    """Return [R] int64: the first segment of each row."""
    root = np.arange(len(batch.parent))
    for s, p in enumerate(batch.parent):
        if p >= 0:
            root[s] = root[p]
    return root[batch.leaf]


def exactly(parts: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Return the same rows in `count` parts (0: unchanged). If there are too few, empty parts are added; if too many,
    the smallest neighbours are joined (rows shared less than was predicted from their lengths)."""
    parts = list(parts)
    while count and len(parts) > count:
        at = min(range(len(parts) - 1), key=lambda i: len(parts[i]) + len(parts[i + 1]))
        parts[at : at + 2] = [np.concatenate(parts[at : at + 2])]
    return parts + [np.zeros(0, np.int64)] * (count - len(parts))


def without_weight(batch: Batch) -> Batch:
    """Return one row with weight 0, for a rank without rows of its own, which must still take part in every
    collective."""
    row = select_rows(batch, np.zeros(1, np.int64))
    columns = {n: torch.zeros_like(c) if n.startswith(("w/", "m/")) else c for n, c in row.columns.items()}
    rows = {n: torch.zeros_like(c) if n.startswith("w/") else c for n, c in row.row_columns.items()}
    return replace(row, columns=columns, row_columns=rows)


def part_of(batch: Batch, rows: np.ndarray) -> Batch:
    """Return the batch of these rows; if there are none, one row with weight 0 (`without_weight`)."""
    return select_rows(batch, rows) if len(rows) else without_weight(batch)


def concat(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches, in order. Nothing is shared between two batches. They have the same columns."""
    if len(batches) == 1:
        return batches[0]

    def moved(arrays: Sequence[np.ndarray], by: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.where(a >= 0, a + n, a) for a, n in zip(arrays, by)])

    def before(counts: Sequence[int]) -> list[int]:
        return [0, *np.cumsum(counts)[:-1].tolist()]

    def edges(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.concatenate([np.diff(a) for a in arrays]))]).astype(np.int64)

    tokens = before([b.num_tokens for b in batches])
    segments = before([len(b.parent) for b in batches])
    return Batch(
        ids=torch.cat([b.ids for b in batches]),
        positions=torch.cat([b.positions for b in batches], -1),
        seg_start=edges([b.seg_start for b in batches]),
        parent=moved([b.parent for b in batches], segments),
        leaf=moved([b.leaf for b in batches], segments),
        row_start=edges([b.row_start for b in batches]),
        sequence=moved([b.sequence for b in batches], before([b.num_sequences for b in batches])),
        target_from=torch.cat([b.target_from + n for b, n in zip(batches, tokens)]),
        targets=torch.cat([b.targets for b in batches]),
        columns={name: torch.cat([b.columns[name] for b in batches]) for name in batches[0].columns},
        row_columns={name: torch.cat([b.row_columns[name] for b in batches]) for name in batches[0].row_columns},
        media=joined_media([(b.media, b.num_tokens) for b in batches]),
        routes=concat_routes([(b.routes, b.num_tokens) for b in batches]),
    )


def _paths(parent: np.ndarray, leaves: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for s in leaves:
        while s >= 0 and s not in found:
            found.add(s)
            s = int(parent[s])
    return found


def unshare(batch: Batch) -> Batch:
    """Return the same rows as a flat pack: one segment per row, with prefixes repeated. Tests compare the shared path
    with it."""
    chains = [_chain(batch.parent, int(leaf)) for leaf in batch.leaf]
    lengths = np.diff(batch.seg_start)
    tokens, starts, target_from = [], [0], batch.target_from.clone()
    for r, chain in enumerate(chains):
        index = np.concatenate([np.arange(batch.seg_start[s], batch.seg_start[s + 1]) for s in chain])
        place = np.full(batch.num_tokens, -1, np.int64)
        place[index] = starts[-1] + np.arange(len(index))
        span = slice(int(batch.row_start[r]), int(batch.row_start[r + 1]))
        target_from[span] = torch.from_numpy(place)[batch.target_from[span]]
        tokens.append(index)
        starts.append(starts[-1] + int(sum(lengths[s] for s in chain)))
    token_index = torch.from_numpy(np.concatenate(tokens))
    return replace(
        batch,
        ids=batch.ids[token_index],
        positions=batch.positions[..., token_index],
        seg_start=np.array(starts, np.int64),
        parent=np.full(len(chains), -1, np.int64),
        leaf=np.arange(len(chains), dtype=np.int64),
        target_from=target_from,
        media=batch.media and batch.media.at(token_index),
        routes=None if batch.routes is None else batch.routes[..., token_index],
    )


def padded_rows(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return one padded row per sequence: ids [R, W], a bool mask [R, W] of its tokens, and for each token [T] of the
    batch its index in the masked tokens; a shared token has that of its last row."""
    flat = unshare(batch)
    lengths = torch.from_numpy(np.diff(flat.seg_start))
    place = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.zeros(place.shape, dtype=torch.int64)
    ids[place] = flat.ids
    origin = torch.empty(batch.num_tokens, dtype=torch.int64)
    token_of = unshare(replace(batch, ids=torch.arange(batch.num_tokens))).ids
    origin[token_of] = torch.arange(len(flat.ids))
    return ids, place, origin


def _chain(parent: np.ndarray, leaf: int) -> list[int]:
    """Return the segments from the root to `leaf`."""
    chain = [leaf]
    while parent[chain[-1]] >= 0:
        chain.append(int(parent[chain[-1]]))
    return chain[::-1]


# -- segment reductions ----------------------------------------------------------------------------------------------


def segment_sum(x: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Sum x[L, ...] by segment[L] -> [num_segments, ...]. Differentiable; empty segments give 0."""
    out = torch.zeros((num_segments, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return out.index_add(0, segment, x)
