"""Select the files of a folder or a pattern that are read together: the files of one split, each file once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import Refused

SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("eval", "evaluation", "heldout", "holdout"), "evaluation"),
}
"""Words in a file's name, with the split that they mean."""
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that the `datasets` library writes beside the rows."""
SHOWN_FILES = 2


def split_of(path: str) -> str:
    """Return the split that a file's name, or a folder in its path, indicates; "" if none does."""
    return SPLITS.get(_split_word(path), "")


def _split_word(path: str) -> str:
    words = re.split(r"[^a-z]+", path.lower())
    return next((word for word in words if word in SPLITS), "")


def is_without_rows(path: str) -> bool:
    """Return True for files that contain no rows in spite of their ending: metadata and hidden files."""
    name = path.rpartition("/")[2]
    return name in METADATA or name.startswith(".")


def refuse_mixed(url: str, paths: Sequence[str], stems: Sequence[str]) -> None:
    """Raise ValueError for files of several splits, for held-out files beside files of no split, and for one name in
    two formats."""
    root = os.path.commonpath([path.rpartition("/")[0] or "." for path in paths])
    names = [path.removeprefix(f"{root}/") for path in paths]
    of_split: dict[str, list[str]] = {}
    for name in names:
        of_split.setdefault(split_of(name), []).append(name)
    named = of_split.keys() - {""}
    if len(named) > 1 or ("" in of_split and named - {"train"}):
        held = [
            f"{split or 'no split'} ({', '.join(these[:SHOWN_FILES])}{', ...' if len(these) > SHOWN_FILES else ''})"
            for split, these in of_split.items()
        ]
        first = max(filter(split_of, names), key=lambda name: split_of(name) == "train")
        folder, _, name = first.rpartition("/")
        pattern = f"{root}/*{_split_word(name)}*" if not folder else f"{root}/{folder}/*"
        raise Refused(f"{url}: files of several splits: {'; '.join(held)}. Fix: name the files of one, e.g. {pattern}")
    twice = next((stem for k, stem in enumerate(stems) if stem in stems[:k]), None)
    if twice is not None:
        both = [name for name, stem in zip(names, stems) if stem == twice]
        raise Refused(
            f"{url}: the same name in several formats: {', '.join(both)}; the rows would be read more than once."
            " Fix: name the files of one format"
        )


def saved_splits(dataset_dict: bytes) -> list[str]:
    """Return the splits that the dataset_dict.json of `DatasetDict.save_to_disk` lists."""
    found: Any = json.loads(dataset_dict)
    return [str(name) for name in found.get("splits", ())]


def saved_files(state: bytes) -> list[str]:
    """Return the names of the files of rows that the state.json of `Dataset.save_to_disk` lists, in their order."""
    found: Any = json.loads(state)
    return [str(file["filename"]) for file in found.get("_data_files", ())]
