"""Facts about types of devices: the sizes of what is computed at once. Results do not depend on them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Sizes that suit a type of device."""

    logit_chunk_bytes: int
    """Bytes of a chunk of float32 logits in training. On a CPU small enough for its caches. On a GPU large enough that
    a product fills it."""
    logit_chunk_rows: int
    """The fewest rows of such a chunk: each chunk reads and writes the whole gradient of the head."""
    kept_score_keys: int
    """The most keys with which attention keeps its probabilities for the backward pass; 0: it never does. On a CPU two
    batched products are then faster than a fused kernel."""
    segment_keys: int
    """The most keys of a segment with which attention in training is one call of a kernel of `trained_attention`; 0:
    any number. That of a CPU multiplies small matrices, which torch's products are slow for."""
    free_padding: int
    """Score elements of padding that cost less than the dozen kernel launches of another block of attention."""
    compacts_rows: bool
    """Rows that a mask selects are copied together before they are computed. On a GPU the host would have to wait for
    their number, so all rows are computed, and those outside the mask replaced by 0."""
    copies_weights: bool
    """A model trained in bfloat16 computes with a copy of its float32 weights, cast once per optimizer step. Autocast
    casts them in every pass, and keeps the residual stream, queries and keys in float32: twice the memory of
    activations, and a dtype that the variable-length attention kernel does not take."""
    recomputes: bool
    """Results of norms and gates are computed again in the backward pass: one pass over memory in place of keeping
    them. A CPU, which has more memory for its speed, keeps them."""
    masked_queries: int
    """Query rows of one attention call with a mask, in a prefill; they limit the size of the mask of a long chunk."""
    mixed_tokens: tuple[int, ...]
    """Prompt tokens that a decode step computes beside its rows: the sizes to which they are padded, each with a graph
    of its own; the largest is the limit of a step. Empty: prompts have passes of their own, between steps. A step on a
    GPU reads all weights for little arithmetic; prompt tokens share these reads. On a CPU a few dozen rows fill the
    cores, and rows and prompts are computed by kernels of their own, which are faster."""
    idle_tokens: tuple[int, ...]
    """Prompt tokens of a step without rows: the sizes to which they are padded, each with a graph of its own. Longer
    passes are not captured, nor are any if there are no sizes."""
    launch_products: int
    """Products with weights of a layer for which a card is busy no longer than the host is launching the layer outside
    of a graph. A size of `idle_tokens` with more of them would add the time of padding, and save none."""
    sampled_logits: int
    """Logits in memory at once in a lane when sampling; smaller blocks read the head more often."""
    scored_tokens: int
    """Tokens with logits in memory at once when scoring."""
    moment_values: int
    """Values of an optimizer's 8-bit moments in memory at once in float32: a CPU's caches hold them."""

    def chunk_rows(self, vocab_size: int) -> int:
        """Return the rows of one chunk of logits."""
        return max(self.logit_chunk_rows, self.logit_chunk_bytes // (4 * vocab_size))


DEVICES: Mapping[str, DeviceFacts] = MappingProxyType(
    {
        "cpu": DeviceFacts(
            logit_chunk_bytes=16 << 20,
            logit_chunk_rows=64,
            kept_score_keys=256,
            segment_keys=256,
            free_padding=1 << 15,
            compacts_rows=True,
            copies_weights=False,
            recomputes=False,
            masked_queries=1024,
            mixed_tokens=(),
            idle_tokens=(),
            launch_products=0,
            sampled_logits=1 << 25,
            scored_tokens=1024,
            moment_values=1 << 19,
        ),
        "cuda": DeviceFacts(
            logit_chunk_bytes=256 << 20,
            logit_chunk_rows=64,
            kept_score_keys=0,
            segment_keys=0,
            free_padding=1 << 15,
            compacts_rows=False,
            copies_weights=True,
            recomputes=True,
            masked_queries=1024,
            mixed_tokens=(256, 1024),
            idle_tokens=(64, 128, 256, 512, 1024),
            launch_products=1 << 33,
            sampled_logits=1 << 25,
            scored_tokens=1024,
            moment_values=1 << 26,
        ),
    }
)
"""The facts by type of device. None of those of a GPU is from a recorded measurement."""


def device_facts(kind: str) -> DeviceFacts:
    """Return the facts of a type of device; of one without a row, those of a GPU."""
    return DEVICES.get(kind, DEVICES["cuda"])
