"""Packing is a capability proven per model and attention backend, not assumed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch, pack, unshare
from verl.types import Sample, Segment


def probe_batch(vocab_size: int, *, share_prefix: bool) -> Batch:
    """Two responses to one prompt and a third sequence, with ids spread over the vocabulary."""
    ids = np.arange(1, 25, dtype=np.int64) * 7919 % max(2, vocab_size - 1)
    prompt, tails = ids[:6], (ids[6:11], ids[11:18])

    def sample(i: int, head: np.ndarray, tail: np.ndarray) -> Sample:
        response = Segment(ids=tail, source="sampled", logprobs=np.zeros(len(tail), np.float32), version=0)
        segments = (Segment(ids=head, source="prompt"), response)
        return Sample(sample_id=str(i), trajectory_id=str(i), group_id="probe", purpose="train", segments=segments)

    samples = [sample(0, prompt, tails[0]), sample(1, prompt, tails[1]), sample(2, ids[18:20], ids[20:24])]
    return pack(samples, share_prefix=share_prefix)


def probe_sequences(vocab_size: int) -> list[Tensor]:
    """The probe's sequences, each whole."""
    batch = unshare(probe_batch(vocab_size, share_prefix=False))
    return [batch.ids[a:b] for a, b in zip(batch.seg_start[:-1], batch.seg_start[1:])]


def refuse_noise(infer: Callable[[Batch], Tensor], vocab_size: int, *, what: str) -> None:
    """ValueError where two passes over a probe differ."""
    batch = probe_batch(vocab_size, share_prefix=False)
    first, second = infer(batch), infer(batch)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise ValueError(
            f"{what}: two passes over the same tokens differ by {float((first - second).abs().max()):.3g}: the model "
            "draws random numbers (a dropout that its config.json does not switch off?), so its log-probs are not "
            "those of one policy"
        )


def check_packing(
    ours: Callable[[Batch], Tensor],  # -> log-probs [L]
    alone: Callable[[Tensor], Tensor],  # ids [t] -> log-probs [t-1] by the model's own forward pass and full logits
    vocab_size: int,
    *,
    share_prefix: bool,
    what: str,
    padded: bool = False,
) -> float:
    """The largest difference of a probe's log-probs, `padded` or packed, from those of each sequence run alone. Raises
    ValueError when they differ: packing leaks, or this model changes its logits."""
    batch = probe_batch(vocab_size, share_prefix=share_prefix)
    got = ours(batch)
    worst = 0.0
    for row, ids in enumerate(probe_sequences(vocab_size)):
        span = slice(int(batch.row_start[row]), int(batch.row_start[row + 1]))
        expected = alone(ids)[-(span.stop - span.start) :]
        worst = max(worst, float((got[span] - expected).abs().max()))
    if not worst <= 1e-3:
        how = "padded" if padded else "packed"
        fix = "Set model.engine_options.attention=padded (and model.engine_options.share_prefix=false)."
        if padded:
            fix = "It does more to its logits than an output layer does: there is no way to train it here."
        raise ValueError(
            f"{what}: {how} log-probs differ from those of each sequence alone by {worst:.3g}, so training on {how} "
            f"sequences would be wrong for this model. {fix}"
        )
    return worst
