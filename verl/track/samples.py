"""The columnar store of samples: `runs/<name>/samples/step_000012.parquet`, evaluation in `eval_step_000012.parquet`.

One row is one training row. Ids, masks and per-token numbers are stored exactly, because a replay reads them; the texts
are derived from them. Any Parquet reader opens the files (pandas, DuckDB, `pyarrow.parquet.read_table`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.columns import recorded
from verl.errors import Refused
from verl.track.files import replacing
from verl.types import Facts

FOLDER = "samples"
MEDIA_FOLDER = "media"
"""The content of the media of recorded rows, by its hash (`FolderMedia`)."""
Kind = Literal["train", "eval"]

_FILE_NAME = re.compile(r"(eval_)?step_(\d+)\.parquet")
_ROWS_PER_GROUP = 256
_TEXTS = ("prompt_text", "response_text", "ground_truth")
_REPEATED = ("sample_id", "trajectory_id", "group_id", "task_id", "purpose", "prompt_text", "response_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow(Facts):
    """One sample as it was trained on (or evaluated): its facts, P prompt tokens (the first segment), R response tokens
    (all that follow, environment tokens included)."""

    step: int
    prompt_text: str
    response_text: str
    prompt_ids: np.ndarray
    """[P] int64."""
    response_ids: np.ndarray
    """[R] int64."""
    response_mask: np.ndarray
    """[R] uint8: 1 for tokens that the policy sampled and for those of a stored answer."""
    tokens: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Recorded name of a column (`recorded` in verl/columns.py) -> its values [R]. Columns that were not computed are
    left out."""
    version_min: int = -1
    """The oldest weight version of the sampled tokens; -1 if there are none."""
    version_max: int = -1
    """The newest weight version of the sampled tokens; -1 if there are none."""
    ground_truth: str = ""
    """The ground truth of the task, as JSON if it is not a text."""
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """`Sample.context`; empty without one."""
    segments: bytes = b""
    """The segments of a sample with media, side channels or an adapter (`packed_segments` in packed.py)."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def response_tokens(self) -> int:
        return len(self.response_ids)

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))


TOKEN_FIELDS: Mapping[str, np.dtype] = {c.recorded: np.dtype(c.dtype) for c in recorded()}
"""The names and dtypes of the arrays in `SampleRow.tokens`. Each is a column of the file, which is null for rows
without it."""

_ARRAY_FIELDS: Mapping[str, np.dtype] = {
    "prompt_ids": np.dtype(np.int64),
    "response_ids": np.dtype(np.int64),
    "response_mask": np.dtype(np.uint8),
    "context": np.dtype(np.int64),
    **TOKEN_FIELDS,
}
_COUNTS = ("prompt_tokens", "response_tokens", "loss_tokens")
_SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_FACTS: Mapping[str, pa.DataType] = {
    name: _SCALARS.get(hint, pa.string()) for name, hint in get_type_hints(Facts).items()
}
"""Facts as columns of the file. Mappings are stored as JSON, all other types but numbers as text."""
_MAPPINGS = [name for name, hint in get_type_hints(Facts).items() if get_origin(hint) is Mapping]
_TYPES: Mapping[str, pa.DataType] = {
    "step": pa.int64(),
    **_FACTS,
    **dict.fromkeys(_TEXTS, pa.string()),
    **{name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in _ARRAY_FIELDS.items()},
    **dict.fromkeys(("version_min", "version_max"), pa.int64()),
    "segments": pa.binary(),
    **dict.fromkeys(_COUNTS, pa.int64()),
}
SCHEMA = pa.schema(list(_TYPES.items()))
SCALARS = [name for name in _TYPES if name not in (*_ARRAY_FIELDS, *_TEXTS, "segments")]
"""The columns that are cheap to read as a whole: all but texts and arrays."""
_DEFAULTS: Mapping[str, Callable[[], Any]] = {
    f.name: (lambda f=f: f.default) if f.default is not MISSING else f.default_factory  # type: ignore[misc]
    for f in fields(SampleRow)
    if f.default is not MISSING or f.default_factory is not MISSING
}
"""The values of columns that are null, or that files of older versions do not have."""


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
    about = {"compression": "zstd", "row_group_size": _ROWS_PER_GROUP, "use_dictionary": list(_REPEATED)}
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
        return _rows_of(_table(path, SCHEMA.names, filters))


def _table(path: Path, names: Sequence[str], filters: Any = None) -> pa.Table:
    """Read columns of a file. A column that has a default may be absent, since files of older versions lack it."""
    if absent := {*SCHEMA.names} - {*pq.read_schema(path).names, *_DEFAULTS, *TOKEN_FIELDS, *_COUNTS}:
        raise KeyError(f"it has no column {sorted(absent)[0]}")
    return pq.read_table(path, columns=list(names), schema=SCHEMA, filters=filters)


def _rows_of(table: pa.Table) -> list[SampleRow]:
    columns: dict[str, Sequence[Any]] = {}
    for name in SCHEMA.names:
        if name in _ARRAY_FIELDS:
            columns[name] = table.column(name).to_numpy()
        elif name not in _COUNTS:
            columns[name] = table.column(name).to_pylist()
    for name in _MAPPINGS:
        columns[name] = [None if text is None else json.loads(text) for text in columns[name]]
    tokens = zip(*(columns.pop(name) for name in TOKEN_FIELDS))
    columns["tokens"] = [{n: a for n, a in zip(TOKEN_FIELDS, arrays) if a is not None} for arrays in tokens]
    for name, default in _DEFAULTS.items():
        columns[name] = [default() if value is None else value for value in columns[name]]
    return [SampleRow(**dict(zip(columns, row))) for row in zip(*columns.values())]


def read_scalars(run_dir: Path, step: int, kind: Kind = "train") -> list[dict[str, Any]]:
    """Return the scalar columns (`SCALARS`) of one step, without texts and arrays, for selection and plots."""
    with _readable(path := _existing(run_dir, step, kind)):
        return _table(path, SCALARS).to_pylist()


def _existing(run_dir: Path, step: int, kind: Kind) -> Path:
    path = samples_path(run_dir, step, kind)
    if not path.exists():
        known = sample_steps(run_dir, kind)
        span = f"{len(known)} steps from {known[0]} to {known[-1]}" if known else "none"
        raise Refused(f"no {kind} samples of step {step} in {run_dir} (there are: {span})")
    return path


def _check(row: SampleRow, step: int) -> None:
    assert row.step == step, f"row {row.sample_id} belongs to step {row.step}, not {step}"
    count = row.response_tokens
    for name, array in {"response_mask": row.response_mask, **row.tokens}.items():
        assert array.shape == (count,), f"{name} of {row.sample_id} is {array.shape} for {count} response tokens"


def _column(name: str, rows: Sequence[SampleRow]) -> pa.Array:
    values: list[Any] = [row.tokens.get(name) if name in TOKEN_FIELDS else getattr(row, name) for row in rows]
    if name in _ARRAY_FIELDS:
        values = [None if array is None else _exact(name, array, _ARRAY_FIELDS[name]) for array in values]
    elif values and isinstance(values[0], Mapping):
        values = [json.dumps({k: float(v) for k, v in mapping.items()}) for mapping in values]
    elif name in _TEXTS:
        values = [text.encode("utf-8", "replace").decode() for text in values]
    return pa.array(values, SCHEMA.field(name).type)


def _exact(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    stored = array.astype(dtype, copy=False)
    exact = array.dtype == dtype or (array.dtype.kind in "bui" and np.array_equal(stored, array))
    assert exact, f"{name} must be {dtype} (a replay reads it back bit for bit), got {array.dtype}"
    return stored
