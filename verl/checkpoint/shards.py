"""Tensors of a checkpoint on torch.distributed.checkpoint: safetensors files that any number of ranks can read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from verl.errors import Refused

MAX_FILE_BYTES = 256 << 20  # a file is put together in memory before it is written


def save_tensors(path: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Write `tensors` into the new folder `path`, in files of bounded size. With many ranks each writes the parts that
    it has, and all ranks of `group` (None: the default group) call this. Raise OSError if the write fails."""
    with agreed(group):
        path.mkdir(parents=True, exist_ok=True)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    if not _alone():  # the first rank assigns files, also to tensors that only others hold
        every: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(every, sizes, group=group)
        sizes = {name: size for theirs in every for name, size in theirs.items()}
    file_of: dict[str, int] = {}
    index, held = 1, 0
    for name, size in sizes.items():
        if held and held + size > MAX_FILE_BYTES:
            index, held = index + 1, 0
        file_of[name], held = index, held + size
    writer = dcp.HuggingFaceStorageWriter(
        str(path), fqn_to_index_mapping=file_of, thread_count=1, save_distributed=not _alone()
    )
    with _own_errors():
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=_alone())


def tensor_names(path: Path) -> frozenset[str]:
    """Return the names that `save_tensors` wrote. Raise ValueError for any other folder."""
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        raise Refused(f"{path} holds no tensors of a checkpoint: use another checkpoint")
    with _own_errors():
        return frozenset(dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata)


def load_tensors(path: Path, into: dict[str, Tensor]) -> None:
    """Fill the given tensors in place from the folder `path`, which has all of them. Raise ValueError if a shape
    differs."""
    with _own_errors():
        reader = dcp.HuggingFaceStorageReader(str(path))
        found = reader.read_metadata().state_dict_metadata
        for name, tensor in into.items():
            if (size := tuple(found[name].size)) != tuple(tensor.shape):  # type: ignore[union-attr]
                sizes = f"is {list(size)}, but the model has {list(tensor.shape)}"
                raise Refused(f"{path}: {name} {sizes}: the checkpoint is of another model")
        dcp.load(into, storage_reader=reader, no_dist=_alone())


def _alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


@contextmanager
def agreed(group: Any) -> Iterator[None]:
    """Raise an OSError of any rank on all ranks; else the others would wait for the failed rank in their next
    exchange."""
    error: OSError | None = None
    try:
        yield
    except OSError as e:
        error = e
    found: list[OSError | None] = [error]
    if not _alone():
        found = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, error, group=group)
    if (first := error or next((e for e in found if e is not None), None)) is not None:
        raise first


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the cause of torch's `CheckpointException` in its place, and suppress torch's warning about a single
    process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as e:
            cause = next(iter(e.failures.values()))[0]
            raise cause from None
