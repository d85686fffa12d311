"""The size of a chunk of logits, which the log-probs and the plan of a run share. No torch."""

CHUNK_BYTES = 16 << 20
"""Bytes of a chunk of float32 logits: small enough for the caches, large enough for a matrix product."""
CHUNK_ROWS = 64
"""The least rows of a chunk: each one reads and writes the whole gradient of the head."""


def chunk_rows(vocab_size: int, *, bytes_at_once: int = CHUNK_BYTES, least: int = CHUNK_ROWS) -> int:
    """Return the rows of one chunk of logits."""
    return max(least, bytes_at_once // (4 * vocab_size))
