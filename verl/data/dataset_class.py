"""Load the rows of a user's dataset class (`data.dataset_class`).

The class runs in a process of the sandbox with a deadline and a memory limit. That process writes its rows to a file of
JSON lines, which is then read like any file of rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import fsspec

from verl.chat.template import Tokenizer
from verl.config.frozen import thawed
from verl.config.schema import DataConfig
from verl.data.files import DataFile, expand_files
from verl.data.user_dataset import parts_of, write_rows
from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.sandbox.messages import CallableSpec, Failure
from verl.sandbox.pool import WorkerPool
from verl.sandbox.worker import load_module

DEADLINE_S = 3600.0  # for all rows: a class may tokenise each of them
MEMORY_MB = 32 << 10


def rows_of_class(
    files: Sequence[str],
    cfg: DataConfig,
    kind: Literal["rl", "sft"],
    tokenizer: Tokenizer,
    kwargs: dict[str, Any],
    max_rows: int | None,
) -> tuple[DataFile, OwnFolder]:
    """Return the file with the rows that the class makes of `files`, and the temporary folder of that file, which
    exists as long as the returned object. Raise ValueError, with the reason, if the class fails or makes no rows."""
    named, folder = str(cfg.dataset_class), OwnFolder("verl-rows-")
    read = [file.url for file in expand_files(files)]
    out = folder.path / "rows.jsonl"
    arguments = {
        **{"named": named, "files": read, "out": str(out), "kind": kind, "tokenizer": tokenizer},
        **{"options": _options(cfg, kwargs), "max_rows": max_rows},
    }
    with ThreadPoolExecutor(1) as thread:  # an event loop of its own: the caller may be in one
        found = thread.submit(asyncio.run, _written(arguments)).result()
    if isinstance(found, Failure):
        why = f"no rows within {DEADLINE_S:g} s" if found.reason == "timeout" else " ".join(found.detail.split())
        raise Refused(why if why.startswith(named) else f"data.dataset_class={named}: {why}")
    if not found:
        raise Refused(f"data.dataset_class={named}: no rows of {', '.join(read)}")
    return DataFile(named, fsspec.filesystem("file"), str(out)), folder


async def _written(arguments: dict[str, Any]) -> int | Failure:
    spec = CallableSpec(
        path=__name__, name="write_class_rows", parameters=tuple(arguments), returns=int, section="data"
    )
    pool: WorkerPool[int] = WorkerPool(spec, num_workers=1, timeout_s=DEADLINE_S, memory_limit_mb=MEMORY_MB)
    await pool.start()
    try:
        return await pool.call(arguments)
    finally:
        await pool.close()


write_class_rows = partial(write_rows, load=lambda named: _class_of(named))
"""The function that the sandbox's process runs: `write_rows` with a class that is imported in that process."""


def _class_of(named: str) -> Any:
    path, name = parts_of(named)
    return getattr(load_module(path, "data.dataset_class"), name)


def _options(cfg: DataConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the `config` argument of the class: the settings of `data` under verl's names."""
    return {
        **{"prompt_key": cfg.prompt_key, "messages_key": cfg.messages_key, "tools_key": cfg.tools_key or "tools"},
        **{"max_prompt_length": cfg.max_prompt_tokens, "max_length": cfg.max_tokens_per_row},
        **{"filter_overlong_prompts": cfg.filter_overlong_prompts, "filter_overlong_prompts_workers": 1},
        **{
            "truncation": cfg.truncation,
            "shuffle": cfg.shuffle,
            "seed": cfg.seed,
            "apply_chat_template_kwargs": thawed(kwargs),
        },
        **{"return_raw_chat": True, "return_raw_input_ids": False, "return_full_prompt": False, "use_shm": False},
        **{"image_key": "images", "video_key": "videos", "reward_fn_key": "data_source", "pad_mode": "no_padding"},
        "train_files": [*cfg.train_files],
        "val_files": [*cfg.eval_files],
    }
