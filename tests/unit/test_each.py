"""A table in a loop reports as much as a case of pytest for each row would."""

import logging
import os

import pytest
from each import check_each, each, matrix


def failures_of(test, **given):
    with pytest.raises(ExceptionGroup) as caught:
        test(**given)
    return caught.value


def test_every_row_runs_and_those_that_fail_are_named():
    ran = []

    @each("a, b", [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
    def test(a, b):
        ran.append(a)
        if a == 3:
            raise KeyError(b)
        assert a != 2, b

    found = failures_of(test)
    assert ran == [1, 2, 3, 4]
    assert found.message == "2 of 4 cases failed: 2, two; 3, three"
    assert [type(e) for e in found.exceptions] == [AssertionError, KeyError]
    assert [e.__notes__ for e in found.exceptions] == [["case: 2, two"], ["case: 3, three"]]


def test_what_did_not_raise_is_a_row_that_failed_and_hides_none():
    @each("error", [ValueError, KeyError, OSError])
    def test(error):
        with pytest.raises(ValueError):
            if error is not KeyError:
                raise error

    found = failures_of(test)
    assert found.message == "2 of 3 cases failed: KeyError; OSError"
    assert "DID NOT RAISE" in str(found.exceptions[0]) and isinstance(found.exceptions[1], OSError)


def test_a_row_has_a_folder_patches_output_and_log_of_its_own(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv("VERL_EACH", "before")

    @each("row", range(3))
    def test(row, tmp_path, monkeypatch, capsys, caplog):
        assert not list(tmp_path.iterdir()) and os.environ["VERL_EACH"] == "before"
        assert not capsys.readouterr().out and not caplog.text
        (tmp_path / "file").touch()
        monkeypatch.setenv("VERL_EACH", "changed")
        print("said")
        logging.getLogger("verl").warning("said")
        assert caplog.text

    test(tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys, caplog=caplog)


def test_a_table_that_proves_nothing_is_no_test():
    with pytest.raises(AssertionError, match="without a row"):
        check_each([], print)
    with pytest.raises(AssertionError, match="b: a row that is skipped would hide the others"):
        check_each("ab", lambda case: case == "b" and pytest.skip("not here"))
    with pytest.raises(AssertionError, match="does not take {'b'}"):
        each("a, b", [(1, 2)])(lambda a: None)


@pytest.mark.parametrize("other", ["x"])
@each("row", [1, 2])
def test_pytest_gives_the_rest(row, other, tmp_path):
    assert other == "x" and row in (1, 2) and tmp_path.name.startswith("row")


def rows_of(test):
    """The rows that pytest would run, and whether each is slow."""
    (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return [(row.values, "slow" in [m.name for m in row.marks], row.id) for row in mark.args[1]]


def test_of_a_matrix_some_rows_are_quick_and_keep_their_marks_and_names():
    def test(a, b=None):
        pass

    full = pytest.param(3, marks=pytest.mark.full("1"), id="three")
    matrix("a", [1, (2, 2), full])(test)
    assert rows_of(test) == [((1,), False, None), (((2, 2),), True, None), ((3,), True, "three")]
    assert [m.name for m in test.pytestmark[0].args[1][2].marks] == ["full", "slow"]
    test.pytestmark.clear()
    matrix("a, b", [(1, 2), pytest.param(3, 4, id="x")], quick=[(3, 4)])(test)
    assert rows_of(test) == [((1, 2), True, None), ((3, 4), False, "x")]


def test_of_a_table_some_rows_are_quick_and_none_is_lost():
    ran = []

    @each("a", [1, 2, 3], quick=1)
    def test(a):
        ran.append(a)

    assert rows_of(test) == [(("some",), False, None), (("others",), True, None)]
    test(part="some")
    assert ran == [1]
    test(part="others")
    assert ran == [1, 2, 3]
