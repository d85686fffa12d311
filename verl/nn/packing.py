"""Checks at the start of a run that a model computes the same log-probs for packed or padded rows as for each row
alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch, pack, unshare
from verl.errors import Refused
from verl.types import Sample, Segment

_TOLERANCE = 1e-3
_WAY_OUT = "Set model.engine_options.attention=padded (and model.engine_options.share_prefix=false)."


def probe_batch(vocab_size: int, *, share_prefix: bool) -> Batch:
    """Return a packed batch of two responses to one prompt and a third sequence, with ids spread over the
    vocabulary."""
    ids = np.arange(1, 25, dtype=np.int64) * 7919 % max(2, vocab_size - 1)
    prompt, tails = ids[:6], (ids[6:11], ids[11:18])

    def sample(i: int, head: np.ndarray, tail: np.ndarray) -> Sample:
        response = Segment(ids=tail, source="sampled", logprobs=np.zeros(len(tail), np.float32), version=0)
        segments = (Segment(ids=head, source="prompt"), response)
        return Sample(sample_id=str(i), trajectory_id=str(i), group_id="probe", purpose="train", segments=segments)

    samples = [sample(0, prompt, tails[0]), sample(1, prompt, tails[1]), sample(2, ids[18:20], ids[20:24])]
    return pack(samples, share_prefix=share_prefix)


def probe_sequences(vocab_size: int) -> list[Tensor]:
    """Return the three sequences of the probe, each with its prompt, as ids [t]."""
    batch = unshare(probe_batch(vocab_size, share_prefix=False))
    return [batch.ids[a:b] for a, b in zip(batch.seg_start[:-1], batch.seg_start[1:])]


def refuse_noise(infer: Callable[[Batch], Tensor], vocab_size: int, *, what: str) -> None:
    """Raise ValueError if two passes over a probe differ, so that the model draws random numbers."""
    batch = probe_batch(vocab_size, share_prefix=False)
    first, second = infer(batch), infer(batch)
    if not torch.allclose(first, second, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
        raise Refused(
            f"{what}: two passes over the same tokens differ by {float((first - second).abs().max()):.3g}: the model "
            "draws random numbers (a dropout that its config.json does not switch off?), so its log-probs are not "
            "those of one policy"
        )


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Inside the context the sliding windows of `model` have four tokens, fewer than a row of the probe. They are
    attributes of its configuration, which its modules copy."""
    holders = {id(x): x for x in (model.config, model.config.get_text_config(), *model.modules())}
    found = [(vars(x), n, v) for x in holders.values() for n, v in vars(x).items() if _is_window(n, v)]
    for attributes, name, _ in found:
        attributes[name] = 4
    try:
        yield
    finally:
        for attributes, name, value in found:
            attributes[name] = value


def _is_window(name: str, value: object) -> bool:
    wide = "window" in name and "layer" not in name and "pattern" not in name
    return wide and type(value) is int and value > 0


@contextmanager
def refused(what: str, *, padded: bool) -> Iterator[None]:
    """Turn the errors of a model that cannot be called on packed or padded sequences into a ValueError with a
    remedy."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, NotImplementedError, RuntimeError) as e:
        ours = isinstance(e, RuntimeError) and not isinstance(e, NotImplementedError)
        if ours and not re.search("shape|size of tensor", str(e)):
            raise  # not a matter of the model: out of memory, a dead rank
        how, fix = ("padded", "There is no way to train it here.") if padded else ("packed", _WAY_OUT)
        raise Refused(f"{what} cannot be called on {how} sequences ({e}). {fix}") from e


def refuse_neighbours(ours: Callable[[Batch], Tensor], vocab_size: int, longest: int, *, what: str) -> float:
    """Return the largest change that a row of `longest` tokens causes in the log-probs of short rows of the same pass.
    Raise ValueError if there is a change. The last row of the probe gets the last positions of such a long row."""
    batch = probe_batch(vocab_size, share_prefix=False)
    start, end = int(batch.seg_start[np.flatnonzero(batch.parent < 0)[-1]]), batch.num_tokens
    if longest <= end - start:
        return 0.0
    far = batch.positions.clone()
    far[..., start:end] += longest - (end - start)
    rows = slice(0, int(batch.row_start[-2]))
    near = ours(batch)[rows]
    worst = float((ours(replace(batch, positions=far))[rows] - near).abs().max())
    if not worst <= _TOLERANCE:
        raise Refused(
            f"{what}: a row of {longest} tokens changes the log-probs of the short rows of its pass by {worst:.3g} "
            "(RoPE that follows the longest row?), so what shares a micro-batch would decide a gradient: there is no "
            "way to train it here with rows so long; lower data.max_prompt_tokens, rollout.max_response_tokens or "
            "data.max_tokens_per_row"
        )
    return worst


def check_packing(
    ours: Callable[[Batch], Tensor],  # -> log-probs [L]
    own: Callable[[Sequence[Tensor]], list[Tensor]],  # ids [t] each -> log-probs [t-1] by the model's own forward pass
    vocab_size: int,
    *,
    share_prefix: bool,
    what: str,
    padded: bool = False,
) -> float:
    """Return the largest difference of a probe's log-probs, `padded` or packed, from those of each sequence alone.
    Raise ValueError if they differ: packed rows influence each other, or the model changes its logits after the
    head."""
    batch = probe_batch(vocab_size, share_prefix=share_prefix)
    got = ours(batch)
    worst = 0.0
    for row, expected in enumerate(own(probe_sequences(vocab_size))):
        span = slice(int(batch.row_start[row]), int(batch.row_start[row + 1]))
        worst = max(worst, float((got[span] - expected[-(span.stop - span.start) :]).abs().max()))
    if not worst <= _TOLERANCE:
        how = "padded" if padded else "packed"
        fix = _WAY_OUT
        if padded:
            fix = "It does more to its logits than an output layer does: there is no way to train it here."
        raise Refused(
            f"{what}: {how} log-probs differ from those of each sequence alone by {worst:.3g}, so training on {how} "
            f"sequences would be wrong for this model. {fix}"
        )
    return worst
