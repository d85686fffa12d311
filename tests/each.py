"""Tables are checked in loops, not with a case of pytest for each row: failures are collected, and each has the name of
its row."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import pytest
from _pytest.mark import ParameterSet

FULL_GRID = bool(os.environ.get("FULL_GRID"))
"""True if rows are also checked that repeat a property of others (`make test-all`)."""


def check_each(cases: Iterable[Any], check: Callable[[Any], object], name: Callable[[Any], object] = str) -> None:
    """Run `check` on every case; all failures together, each with the name of its case, rather than the first alone."""
    failed: list[Exception] = []
    names: list[str] = []
    table = list(cases)
    assert table, "a table without a row proves nothing"
    for case in table:
        try:
            check(case)
        except pytest.skip.Exception as e:
            raise AssertionError(f"{name(case)}: a row that is skipped would hide the others") from e
        except pytest.fail.Exception as e:  # `pytest.raises` where nothing was raised: no Exception for Python
            failed.append(AssertionError(e.msg).with_traceback(e.__traceback__))
        except Exception as e:
            failed.append(e)
        if len(failed) > len(names):
            names.append(str(name(case)))
            failed[-1].add_note(f"case: {names[-1]}")
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(table)} cases failed: {'; '.join(names)[:2000]}", failed)


def named(value: Any) -> str:
    """A row, as a failure calls it."""
    if isinstance(value, tuple):
        return ", ".join(map(named, value))
    return str(getattr(value, "__name__", None) or getattr(value, "id", None) or value)[:160]


def matrix(arguments: str, rows: Iterable[Any], quick: int | Iterable[Any] = 1, **more: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` of which `make test` runs the rows `quick` (the first so many, or those that are equal
    to one of these); the others are marked `slow`."""
    several = "," in arguments
    chosen = None if isinstance(quick, int) else list(quick)
    table: list[Any] = []
    for number, row in enumerate(rows):
        marks, name = (), None
        if isinstance(row, ParameterSet):
            row, marks, name = row.values if several else row.values[0], row.marks, row.id
        if not (number < quick if isinstance(quick, int) else row in chosen):
            marks = (*marks, pytest.mark.slow)
        table.append(pytest.param(*(row if several else (row,)), marks=marks, id=name))
    return pytest.mark.parametrize(arguments, table, **more)


def each(
    arguments: str, rows: Iterable[Any], name: Callable[[Any], object] = named, quick: int | None = None
) -> Callable[[Callable], Callable]:
    """`pytest.mark.parametrize` for rows of milliseconds: one case of pytest that runs them all (see `check_each`).
    With `quick` they are two: the first so many, and the others, which is marked `slow`.

    Every row has a folder, patches, output and log of its own; other fixtures are made once for all of them."""
    keys = [key.strip() for key in arguments.split(",")]
    table = list(enumerate(rows))
    parts = {"all": table} if quick is None else {"some": table[:quick], "others": table[quick:]}

    def decorate(test: Callable) -> Callable:
        @wraps(test)
        def whole(part: str = "all", **given: Any) -> None:
            def check(numbered: tuple[int, Any]) -> None:
                number, row = numbered
                values = dict(zip(keys, row if len(keys) > 1 else (row,), strict=True))
                with ExitStack() as patches:
                    own = dict(given)
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patches.enter_context(own["monkeypatch"].context())
                    if "tmp_path" in own:
                        own["tmp_path"] = own["tmp_path"] / f"row{number}"
                        own["tmp_path"].mkdir()
                    for key in ("capsys", "capfd"):
                        if key in own:
                            own[key].readouterr()
                    if "caplog" in own:
                        own["caplog"].clear()
                    test(**own, **values)

            check_each(parts[part], check, lambda numbered: name(numbered[1]))

        signature = inspect.signature(test)
        missing = set(keys) - set(signature.parameters)
        assert not missing, f"{test.__name__} does not take {missing}"
        rest = [p for key, p in signature.parameters.items() if key not in keys]
        if quick is not None:
            rest.append(inspect.Parameter("part", inspect.Parameter.KEYWORD_ONLY))
        whole.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return whole if quick is None else matrix("part", parts)(whole)

    return decorate
