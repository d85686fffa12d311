"""The columnar sample store: exact round trip, missing columns, atomic replacement."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.track.samples import SCALARS, TOKEN_FIELDS, SampleRow, read_samples, read_scalars, sample_steps, write_samples


def make_row(step=12, index=0, response=5, **changes):
    row = SampleRow(
        step=step,
        sample_id=f"g{index // 4}-{index}#0",
        trajectory_id=f"g{index // 4}-{index}",
        group_id=f"g{index // 4}",
        task_id=f"task-{index // 4}",
        purpose="train",
        prompt_text="2 + 2 = ?",
        response_text="it is\n4",
        prompt_ids=np.arange(3, dtype=np.int64),
        response_ids=np.arange(response, dtype=np.int64) + 2**40,
        response_mask=np.ones(response, np.uint8),
        reward=0.1 + 0.2,
        components={"acc": 1 / 3},
        temperature=0.7,
    )
    tokens = {name: changes.pop(name) for name in [*changes] if name in TOKEN_FIELDS}
    return dataclasses.replace(row, tokens={n: array for n, array in tokens.items() if array is not None}, **changes)


def assert_same(a: SampleRow, b: SampleRow):
    names = [field.name for field in dataclasses.fields(SampleRow) if field.name != "tokens"]
    assert a.tokens.keys() == b.tokens.keys()
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in names}
    for name, (x, y) in (pairs | {name: (a.tokens[name], b.tokens[name]) for name in a.tokens}).items():
        if isinstance(x, np.ndarray):
            assert y.dtype == x.dtype and y.shape == x.shape, name
            assert y.tobytes() == x.tobytes(), name
        elif isinstance(x, float):
            assert np.float64(x).tobytes() == np.float64(y).tobytes(), name
        else:
            assert x == y, name


def test_every_bit_of_every_column_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for i, n in enumerate((0, 1, 7, 300)):
        tokens = {
            name: (
                rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
                if dtype.kind == "f"
                else rng.integers(-1, 99, n).astype(dtype)
            )
            for name, dtype in TOKEN_FIELDS.items()
        }
        rows.append(make_row(index=i, response=n, reward=float("nan") if i == 1 else -0.0, **tokens))
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    rows.append(make_row(index=9, response=6, rollout_logprobs=special, components={"x": float("inf")}))
    write_samples(tmp_path, 12, rows)
    back = read_samples(tmp_path, 12)
    assert len(back) == len(rows)
    for a, b in zip(rows, back):
        assert_same(a, b)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_round_trip_of_arbitrary_rows(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("samples")
    floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
    rows = []
    for i in range(data.draw(st.integers(0, 4))):
        n = data.draw(st.integers(0, 6))
        column = st.one_of(st.none(), st.lists(floats, min_size=n, max_size=n).map(lambda v: np.array(v, np.float32)))
        rows.append(
            make_row(
                index=i,
                response=n,
                rollout_logprobs=data.draw(column),
                advantages=data.draw(column),
                entropy=data.draw(column),
                prompt_text=data.draw(st.text(max_size=8)),
                reward=data.draw(st.floats()),
                response_ids=np.array(
                    data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n, max_size=n)), np.int64
                ),
                components=data.draw(st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=2)),
            )
        )
    write_samples(folder, 12, rows)
    for a, b in zip(rows, read_samples(folder, 12), strict=True):
        assert_same(a, b)


def test_choice_of_rows_scalars_and_other_readers(tmp_path):
    path = write_samples(tmp_path, 12, [make_row(index=i) for i in range(10)])
    chosen = read_samples(tmp_path, 12, sample_ids={"g0-1#0", "g2-8#0", "absent"})
    assert [row.sample_id for row in chosen] == ["g0-1#0", "g2-8#0"]
    assert chosen[1].response_ids[0] == 2**40
    scalars = read_scalars(tmp_path, 12)
    assert set(scalars[0]) == set(SCALARS) and scalars[3]["response_tokens"] == 5 and scalars[3]["loss_tokens"] == 5
    assert pq.read_table(path, columns=["sample_id"]).num_rows == 10


def test_steps_kinds_and_replacement(tmp_path):
    assert sample_steps(tmp_path) == []
    write_samples(tmp_path, 12, [make_row()])
    write_samples(tmp_path, 2, [])
    write_samples(tmp_path, 12, [make_row(index=i) for i in range(3)])
    write_samples(tmp_path, 12, [make_row(purpose="eval")], "eval")
    assert (tmp_path / "samples" / "step_000012.parquet").exists()
    assert (tmp_path / "samples" / "eval_step_000012.parquet").exists()
    assert sample_steps(tmp_path) == [2, 12] and sample_steps(tmp_path, "eval") == [12]
    assert len(read_samples(tmp_path, 12)) == 3 and read_samples(tmp_path, 2) == []
    assert len(list((tmp_path / "samples").iterdir())) == 3
    with pytest.raises(ValueError, match=r"no train samples of step 5 .*2 steps from 2 to 12"):
        read_samples(tmp_path, 5)


def test_what_would_not_be_exact_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="rollout_logprobs must be float32"):
        write_samples(tmp_path, 12, [make_row(rollout_logprobs=np.zeros(5))])
    with pytest.raises(AssertionError, match="response_mask must be uint8"):
        write_samples(tmp_path, 12, [make_row(response_mask=np.full(5, 300))])
    with pytest.raises(AssertionError, match=r"advantages of g0-0#0 is \(4,\) for 5"):
        write_samples(tmp_path, 12, [make_row(advantages=np.zeros(4, np.float32))])
    with pytest.raises(AssertionError, match="belongs to step 12, not 13"):
        write_samples(tmp_path, 13, [make_row()])


def test_texts_that_are_no_unicode_do_not_stop_a_run(tmp_path):
    write_samples(tmp_path, 12, [make_row(response_text="half \ud83d emoji", response_mask=np.ones(5, bool))])
    [row] = read_samples(tmp_path, 12)
    assert row.response_text == "half ? emoji" and row.loss_tokens == 5
