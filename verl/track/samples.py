"""The columnar store of samples: `runs/<name>/samples/step_000012.parquet`, evaluation in `eval_step_000012.parquet`.

One row is one training row. Ids, masks and per-token numbers are stored exactly, because a replay reads them; the texts
are derived from them. Any Parquet reader opens the files (pandas, DuckDB, `pyarrow.parquet.read_table`)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import Refused
from verl.track.files import replacing
from verl.types import Outcome, Purpose, StopReason

FOLDER = "samples"
Kind = Literal["train", "eval"]

_FILE_NAME = re.compile(r"(eval_)?step_(\d+)\.parquet")
_ROWS_PER_GROUP = 256
_TEXTS = ("prompt_text", "response_text", "ground_truth")
_TEXT_FIELDS = ("sample_id", "trajectory_id", "group_id", "task_id", "purpose", "prompt_text", "response_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample as it was trained on (or evaluated): P prompt tokens (the first segment), R response tokens (all that
    follow, environment tokens included). A per-token array is None if it was not computed."""

    step: int
    sample_id: str
    trajectory_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    prompt_text: str
    response_text: str
    prompt_ids: np.ndarray  # [P] int64
    response_ids: np.ndarray  # [R] int64
    response_mask: np.ndarray  # [R] uint8, 1 where the policy sampled the token, or it is of a stored answer
    rollout_logprobs: np.ndarray | None = None  # [R] float32, NaN where masked or stored
    old_logprobs: np.ndarray | None = None  # [R] float32
    ref_logprobs: np.ndarray | None = None  # [R] float32
    advantages: np.ndarray | None = None  # [R] float32
    entropy: np.ndarray | None = None  # [R] float32
    values: np.ndarray | None = None  # [R] float32
    returns: np.ndarray | None = None  # [R] float32
    token_versions: np.ndarray | None = None  # [R] int32, the weight version that sampled the token, -1 where masked
    reward: float = float("nan")
    components: Mapping[str, float] = field(default_factory=dict)
    version_min: int = -1
    version_max: int = -1
    stop_reason: StopReason = "eos"
    outcome: Outcome = "ok"
    temperature: float = 1.0
    ground_truth: str = ""  # of the task; JSON where it is no text
    teacher: str = ""  # of several
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # what a teacher read, as in `Sample`
    segments: bytes = b""  # of a sample with media, side channels or an adapter: see `driver/state.py`

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def response_tokens(self) -> int:
        return len(self.response_ids)

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))


# Per-token arrays of a row that may be None, each as long as the response.
TOKEN_FIELDS: dict[str, np.dtype] = {f.name: np.dtype(np.float32) for f in fields(SampleRow) if f.default is None}
TOKEN_FIELDS["token_versions"] = np.dtype(np.int32)

_ARRAY_FIELDS: Mapping[str, np.dtype] = {
    "prompt_ids": np.dtype(np.int64),
    "response_ids": np.dtype(np.int64),
    "response_mask": np.dtype(np.uint8),
    "context": np.dtype(np.int64),
    **TOKEN_FIELDS,
}
_COUNTS = ("prompt_tokens", "response_tokens", "loss_tokens")
_TYPES: Mapping[str, pa.DataType] = {
    "step": pa.int64(),
    **dict.fromkeys(_TEXT_FIELDS, pa.string()),
    **{name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in _ARRAY_FIELDS.items()},
    "reward": pa.float64(),
    "components": pa.string(),
    **dict.fromkeys(("version_min", "version_max"), pa.int64()),
    **dict.fromkeys(("stop_reason", "outcome"), pa.string()),
    "temperature": pa.float64(),
    "ground_truth": pa.string(),
    "teacher": pa.string(),
    "segments": pa.binary(),
    **dict.fromkeys(_COUNTS, pa.int64()),
}
SCHEMA = pa.schema(list(_TYPES.items()))
# The columns that are cheap to read whole: everything but texts and arrays.
SCALARS = [name for name in _TYPES if name not in (*_ARRAY_FIELDS, *_TEXTS, "segments")]


class DamagedSamples(Refused):
    """A file of samples that cannot be read."""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        if not path.is_file():
            raise OSError("no file")
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise DamagedSamples(f"{path} cannot be read: {' '.join(str(e).split())[:200]}") from e


def samples_path(run_dir: Path, step: int, kind: Kind = "train") -> Path:
    return run_dir / FOLDER / f"{'eval_' if kind == 'eval' else ''}step_{step:06d}.parquet"


def sample_steps(run_dir: Path, kind: Kind = "train") -> list[int]:
    """Return the steps that have samples, in order."""
    names = {path.name for path in (run_dir / FOLDER).glob("*.parquet")}
    steps = {int(match[2]) for match in map(_FILE_NAME.fullmatch, names) if match}
    return sorted(step for step in steps if samples_path(run_dir, step, kind).name in names)


def write_samples(run_dir: Path, step: int, rows: Sequence[SampleRow], kind: Kind = "train") -> Path:
    """Write the rows of one step, and replace the file of an earlier attempt."""
    for row in rows:
        _check(row, step)
    table = pa.Table.from_arrays([_column(name, rows) for name in SCHEMA.names], schema=SCHEMA)
    path = samples_path(run_dir, step, kind)
    about = {"compression": "zstd", "row_group_size": _ROWS_PER_GROUP, "use_dictionary": list(_TEXT_FIELDS)}
    with replacing(path) as file:
        pq.write_table(table, file, **about)
    return path


def read_samples(
    run_dir: Path, step: int, kind: Kind = "train", *, sample_ids: Collection[str] | None = None
) -> list[SampleRow]:
    """Return the rows of one step as they were written; `sample_ids` selects rows (in the order of the file)."""
    path = _existing(run_dir, step, kind)
    filters = None if sample_ids is None else [("sample_id", "in", list(sample_ids))]
    with _readable(path):
        return _rows_of(pq.read_table(path, schema=SCHEMA, filters=filters))


def _rows_of(table: pa.Table) -> list[SampleRow]:
    columns: dict[str, Sequence[Any]] = {}
    for name in SCHEMA.names:
        if name in _ARRAY_FIELDS:
            columns[name] = table.column(name).to_numpy()
        elif name not in _COUNTS:
            columns[name] = table.column(name).to_pylist()
    for name in ("ground_truth", "teacher"):  # absent in older files
        columns[name] = [text or "" for text in columns[name]]
    columns["segments"] = [found or b"" for found in columns["segments"]]
    columns["context"] = [np.zeros(0, np.int64) if ids is None else ids for ids in columns["context"]]
    columns["components"] = [json.loads(text) for text in columns["components"]]
    return [SampleRow(**dict(zip(columns, values))) for values in zip(*columns.values())]


def read_scalars(run_dir: Path, step: int, kind: Kind = "train") -> list[dict[str, Any]]:
    """Return the scalar columns (`SCALARS`) of one step, without texts and arrays, for selection and plots."""
    with _readable(path := _existing(run_dir, step, kind)):
        return pq.read_table(path, columns=SCALARS).to_pylist()


def _existing(run_dir: Path, step: int, kind: Kind) -> Path:
    path = samples_path(run_dir, step, kind)
    if not path.exists():
        known = sample_steps(run_dir, kind)
        span = f"{len(known)} steps from {known[0]} to {known[-1]}" if known else "none"
        raise Refused(f"no {kind} samples of step {step} in {run_dir} (there are: {span})")
    return path


def _check(row: SampleRow, step: int) -> None:
    assert row.step == step, f"row {row.sample_id} belongs to step {row.step}, not {step}"
    for name in ("response_mask", *TOKEN_FIELDS):
        array, count = getattr(row, name), row.response_tokens
        assert array is None or array.shape == (count,), (
            f"{name} of {row.sample_id} is {array.shape} for {count} response tokens"
        )


def _column(name: str, rows: Sequence[SampleRow]) -> pa.Array:
    values = [getattr(row, name) for row in rows]
    if name in _ARRAY_FIELDS:
        values = [None if array is None else _exact(name, array, _ARRAY_FIELDS[name]) for array in values]
    elif name == "components":
        values = [json.dumps({k: float(v) for k, v in components.items()}) for components in values]
    elif name in _TEXTS:
        values = [text.encode("utf-8", "replace").decode() for text in values]
    return pa.array(values, SCHEMA.field(name).type)


def _exact(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    stored = array.astype(dtype, copy=False)
    exact = array.dtype == dtype or (array.dtype.kind in "bui" and np.array_equal(stored, array))
    assert exact, f"{name} must be {dtype} (a replay reads it back bit for bit), got {array.dtype}"
    return stored
