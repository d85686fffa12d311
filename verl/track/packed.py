"""Arrays and segments as bytes of msgpack: in the state of a checkpoint, and in the samples that are recorded."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from verl.types import Sample, Segment


def packed_segments(sample: Sample) -> bytes:
    """Return the adapter and the segments of a sample as bytes for the record."""
    return msgspec.msgpack.encode((sample.adapter, sample.segments), enc_hook=packed_value)


def unpacked_segments(data: bytes) -> tuple[str | None, tuple[Segment, ...]]:
    return msgspec.msgpack.decode(data, type=tuple[str | None, tuple[Segment, ...]], dec_hook=unpacked_value)


def packed_value(value: Any) -> Any:
    """Convert arrays and numpy's scalars to types that msgpack has."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"neither a checkpoint nor the record of samples can have a {type(value).__name__}")


def unpacked_value(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, f"{kind} has no decoder"
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
