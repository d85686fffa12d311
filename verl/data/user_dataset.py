"""The base of a user's dataset class, under verl's names. It runs in a process of the sandbox.

    class Mine(RLHFDataset):                     from verl.utils.dataset.rl_dataset import RLHFDataset
        def _build_messages(self, example): ...

`write_rows` builds the class with verl's arguments, reads its rows once and writes them as JSON lines. From there on
they are rows of a file: the same reader, checks and rendering.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from omegaconf import OmegaConf

from verl.chat.encoding import rendered_ids
from verl.data.files import expand_files, read_rows
from verl.data.formats import COMPLETION_KEYS
from verl.data.media_items import IMAGE, SOUND, VIDEO
from verl.data.pixels import encoded_pixels, is_pixels, upright
from verl.data.values import kind_of
from verl.sandbox.messages import BadResult

READ_TWICE = 8  # rows, the first of them
ROW_IDS = ("raw_prompt_ids", "input_ids")
BESIDE_IDS = ("attention_mask", "position_ids", "full_prompts")
_MEDIA = {column for kind in (IMAGE, VIDEO, SOUND) for column in kind.columns}
PLACEHOLDER = "dummy_tensor"
"""A column that verl adds so that a batch has a tensor."""
UNUSED = {
    "on_batch_end": "changes the rows during the training, and rows are read once",
    "collate_fn": "makes batches of its own, and rows are packed here one by one",
    "__getitems__": "makes batches of its own, and rows are packed here one by one",
}
"""Methods that would change the training in verl and are not called here -> the reason, for the error message."""


class Frame(Sequence[dict[str, Any]]):
    """The rows, with the part of the interface of `datasets.Dataset` that subclasses of verl's dataset use."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: Any) -> Any:
        """Return a copy of a row, or the values of a column."""
        return [row.get(item) for row in self.rows] if isinstance(item, str) else dict(self.rows[int(item)])

    def select(self, indices: Iterable[int]) -> Frame:
        return Frame(self.rows[int(i)] for i in indices)

    def filter(self, function: Callable[[dict[str, Any]], Any], **_: Any) -> Frame:
        """Keep the rows for which the function returns true. Other arguments (the number of processes) are ignored."""
        return Frame(row for row in self if function(row))

    def map(self, function: Callable[[dict[str, Any]], Mapping[str, Any] | None], **_: Any) -> Frame:
        """Add the columns that the function returns to each row."""
        return Frame({**row, **(function(dict(row)) or {})} for row in self)

    def remove_columns(self, names: str | Sequence[str]) -> Frame:
        missing = {names} if isinstance(names, str) else {*names}
        return Frame({key: value for key, value in row.items() if key not in missing} for row in self)


class RLHFDataset:
    """verl's dataset of prompts: subclasses override how files are read, rows filtered and messages built."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key, self.video_key = config.get("image_key", "images"), config.get("video_key", "videos")
        self.max_prompt_length, self.truncation = config.get("max_prompt_length", 1024), config.get("truncation")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", True)
        self.apply_chat_template_kwargs = config.get("apply_chat_template_kwargs", {})
        self.return_raw_chat, self.return_full_prompt, self.need_tools_kwargs = True, False, False
        self.num_workers, self.shuffle, self.seed = 1, config.get("shuffle", False), config.get("seed")
        self.dataframe: Any = Frame(())
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: files are read in place."""

    def _read_files_and_tokenize(self) -> None:
        """Set `dataframe` to the rows of the files."""
        rows = (raw.row for file in expand_files(self.data_files) for raw in read_rows(file))
        frame = Frame(rows)
        if 0 < self.max_samples < len(frame):
            frame = frame.select(range(self.max_samples))
        self.dataframe = self.maybe_filter_out_long_prompts(frame)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return all rows. Prompts that are too long are filtered later, as for rows of a file."""
        return dataframe

    def resume_dataset_state(self) -> None:
        """Do nothing: a resumed run reads the same rows again."""

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        return example[key or self.prompt_key]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row)
        extra = row.get("extra_info") or {}
        given = {name: extra.get(name) for name in ("index", "tools_kwargs", "interaction_kwargs")}
        return row | {name: value for name, value in given.items() if value is not None}


def write_rows(
    *,
    named: str,
    files: Sequence[str],
    out: str,
    kind: Literal["rl", "sft"],
    tokenizer: Any,
    options: Mapping[str, Any],
    max_rows: int | None,
    load: Callable[[str], Any],
) -> int:
    """Write the rows of the class to the file `out` as JSON lines, and return their number. Raise BadResult for a class
    or a row that cannot be used.

    options: the settings of `data`, under verl's names
    load: imports the class by the text `named`
    """
    cls = load(named)
    for method, why in UNUSED.items():
        if hasattr(cls, method):
            raise BadResult(f"{named}: its method {method} {why}; take it out")
    dataset = _built(cls, files, tokenizer, OmegaConf.create(dict(options)), max_rows, kind)
    if not hasattr(dataset, "__len__"):
        raise BadResult(f"{named}: it has no __len__: give a class with __len__ and __getitem__")
    count = int(len(dataset)) if max_rows is None else min(int(len(dataset)), max_rows)
    with Path(out).open("w", encoding="utf-8") as file:
        for number in range(count):
            where = f"{named}:{number + 1}:"
            line = _line(dataset[number], where, kind, tokenizer, options)
            if number < READ_TWICE and _line(dataset[number], where, kind, tokenizer, options) != line:
                raise BadResult(f"{where} it gives another row when it is read again, and rows are read once")
            file.write(f"{line}\n")
    return count


def _built(cls: Any, files: Sequence[str], tokenizer: Any, config: Any, max_rows: int | None, kind: str) -> Any:
    """Construct the class with the arguments that verl passes, for prompts (rl) or for conversations (sft)."""
    most = -1 if max_rows is None else max_rows
    if kind == "rl":
        given = {"data_files": list(files), "tokenizer": tokenizer, "config": config, "processor": None}
        return cls(**given, max_samples=most)
    return cls(parquet_files=list(files), tokenizer=tokenizer, config=config, max_samples=most)


def _line(row: Any, where: str, kind: str, tokenizer: Any, options: Mapping[str, Any]) -> str:
    if not isinstance(row, Mapping):
        raise BadResult(f"{where} it returned {kind_of(row)}: return a mapping of columns")
    media = {*_MEDIA, "raw_prompt", options.get("prompt_key"), "messages"}
    plain = {
        str(key): _plain(value, f"{where} {str(key)!r}", media=key in media)
        for key, value in row.items()
        if key != PLACEHOLDER
    }
    plain = _prompt_row(plain, where, tokenizer, options) if kind == "rl" else _ids_row(plain, where)
    return json.dumps(plain, ensure_ascii=True)


def _prompt_row(row: dict[str, Any], where: str, tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with its messages in the prompt column and without token ids. Raise BadResult if the row has ids
    that are not those of its messages."""
    key = options["prompt_key"]
    messages = row.pop("raw_prompt", row.get(key))
    if messages is None:
        columns = ", ".join(sorted(row))
        raise BadResult(f"{where} no 'raw_prompt' with the messages (columns: {columns}): return them beside the ids")
    attended = row.get("attention_mask")
    for name in (name for name in ROW_IDS if row.get(name) is not None):
        ids = row[name]
        if name == "input_ids" and attended is not None and len(attended) == len(ids):
            ids = [i for i, real in zip(ids, attended) if real]
        kwargs = dict(options["apply_chat_template_kwargs"])
        rendered = rendered_ids(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **kwargs)).tolist()
        if ids != rendered and not len(ids) == options["max_prompt_length"] < len(rendered):
            message = "and the messages are what is asked: give messages that render to these ids, or leave the ids out"
            raise BadResult(f"{where} {name!r} are not the ids of its messages, {message}")
    missing = {*ROW_IDS, *BESIDE_IDS} if any(name in row for name in ROW_IDS) else set()
    return {name: value for name, value in row.items() if name not in missing} | {key: messages}


def _ids_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the row. Raise BadResult if its loss mask may be shifted by one: before version 0.6, verl marked the token
    before a trained one."""
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if ids is None or mask is None or row.get("labels") is not None:
        return row
    real = [m for m, attended in zip(mask, row.get("attention_mask") or [1] * len(mask)) if attended]
    if len(mask) == len(ids) and real and not real[-1] and any(real):
        message = "it may mark the place before a trained token, as verl once did, or the token itself"
        fix = f"give 'labels' (-100 where nothing is trained), or {' or '.join(COMPLETION_KEYS)} beside a prompt"
        raise BadResult(f"{where} 'loss_mask' is 0 at the last token: {message}; {fix}")
    return row


def _plain(value: Any, where: str, *, media: bool) -> Any:
    """Return a value converted to JSON types. media: it may have bytes and images of Pillow, which become data URLs"""
    if media and (isinstance(value, bytes) or is_pixels(value)):
        return _data_url(value, where)
    if value is None or isinstance(value, str | bool | int | float):
        return str(value) if isinstance(value, str) else value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, media=media) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, media=media) for item in value]
    if isinstance(value, np.ndarray | np.generic) or callable(getattr(value, "tolist", None)):  # also torch's
        return _plain(value.tolist(), where, media=media)
    raise BadResult(f"{where} is a {type(value).__name__}: give text, numbers, lists and mappings of them")


def _data_url(value: Any, where: str) -> str:
    try:
        content = value if isinstance(value, bytes) else encoded_pixels(upright(value), where)
    except ValueError as e:
        raise BadResult(str(e)) from e
    return f"data:;base64,{base64.b64encode(content).decode()}"


def parts_of(named: str) -> Iterator[str]:
    """Yield the file or module and then the class of `FILE.py:Class`; nothing for a text of another form."""
    path, colon, name = named.rpartition(":")
    if colon and path and name.isidentifier():
        yield from (path, name)
