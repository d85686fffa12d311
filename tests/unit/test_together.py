"""Processes without a controller that do not see one run directory are refused before a checkpoint lacks their part."""

from __future__ import annotations

import copy
import shutil
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import small_args

from verl.config.load import load_config
from verl.driver import home
from verl.driver.together import open_together


def drivers(number: int, told: list[Any]) -> Any:
    def gather(value: Any) -> Future[list[Any]]:
        if number == 0:
            told.append(value)
        future: Future[list[Any]] = Future()
        future.set_result([told[-1]])
        return future

    return SimpleNamespace(number=number, gather=gather)


def test_another_folder_of_the_same_name(tmp_path, tiny_model, arithmetic_data):
    resolved, told = load_config(small_args(tmp_path, tiny_model, arithmetic_data)), []
    first = open_together(resolved, "train", drivers(0, told))
    second = open_together(copy.deepcopy(resolved), "train", drivers(1, told))
    assert second.path == first.path and second.records != first.records
    first.path.rename(tmp_path / "of_the_first")
    shutil.copytree(tmp_path / "of_the_first", first.path)
    (first.path / home.MARK).write_text("of an earlier run on this node's own disk")
    with pytest.raises(ValueError, match="does not see the run directory"):
        open_together(copy.deepcopy(resolved), "train", drivers(1, told))


def test_what_the_first_is_refused_ends_all(tmp_path, tiny_model, arithmetic_data):
    """With its words, and nothing is written."""
    resolved, told = load_config(small_args(tmp_path, tiny_model, arithmetic_data, "run.resume=never")), []
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text("")
    for number in range(2):
        with pytest.raises(ValueError, match="^run.resume=never, but"):
            open_together(copy.deepcopy(resolved), "train", drivers(number, told))
    assert len(told) == 1 and sorted(p.name for p in (tmp_path / "r").iterdir()) == [".lock", "metrics.jsonl"]


def test_another_source(tmp_path, tiny_model, arithmetic_data):
    resolved, told = load_config(small_args(tmp_path, tiny_model, arithmetic_data)), []
    open_together(resolved, "train", drivers(0, told))
    (place, *more), error = told[-1]
    told.append(((replace(place, versions=tuple((name, "another") for name, _ in place.versions)), *more), error))
    with pytest.raises(ValueError, match="has Python .* has another: install the same"):
        open_together(copy.deepcopy(resolved), "train", drivers(1, told))
