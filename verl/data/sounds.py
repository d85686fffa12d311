"""Sounds of rows that are no files: arrays of samples, and OpenAI's `input_audio`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl.errors import Refused
from verl.models.sound_files import wav_file

_ARRAY = frozenset({"array", "sampling_rate"})
_OPENAI = "input_audio"
LOUDEST = 8.0
"""The largest value of a sample of an array: louder ones are integers, of which the scale is not known."""


def sounds_as_files(value: Any, where: str) -> Any:
    """Return a row, or a part of it, in which each sound is a file: an array with its rate is a WAV file of float32,
    and the text of OpenAI's `input_audio` is a data URL. Raise Refused, with `where`, for an array that is no sound."""
    if isinstance(value, Mapping):
        if _ARRAY <= value.keys() <= _ARRAY | {"path"} and value["array"] is not None:
            return {"bytes": _file_of(value, where), "path": value.get("path")}
        inner = value.get(_OPENAI)
        if isinstance(inner, Mapping) and isinstance(inner.get("data"), str):
            kind = inner.get("format") or "wav"
            return {**value, _OPENAI: f"data:audio/{kind};base64,{inner['data']}"}
        return {key: sounds_as_files(one, where) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Mapping, list, tuple)):
        return type(value)(sounds_as_files(one, where) for one in value)
    return value


def _file_of(sound: Mapping[str, Any], where: str) -> bytes:
    """Return the WAV file of an array of samples."""
    try:
        samples = np.asarray(sound["array"], np.float64)
    except (ValueError, TypeError) as e:
        raise Refused(f"{where}: an array that is no list of samples: {e}") from e
    rate = sound["sampling_rate"]
    if not isinstance(rate, int) or rate < 1:
        raise Refused(f"{where}: an array with sampling_rate={rate!r}. Fix: a whole number of samples a second")
    if samples.ndim != 1:
        raise Refused(f"{where}: an array of {samples.ndim} dimensions. Fix: the samples of one channel")
    if not len(samples):
        raise Refused(f"{where}: a sound without samples")
    if not np.isfinite(samples).all() or (loudest := float(np.abs(samples).max())) > LOUDEST:
        shown = f"values up to {loudest:g}" if np.isfinite(samples).all() else "values that are no finite numbers"
        raise Refused(f"{where}: an array with {shown}. Fix: floats between -1 and 1")
    return wav_file(samples, rate)
