"""A version of the weights as a model folder: its content, and how its tensors are written and read.

Tensors have the names of a saved folder. Experts that are one tensor in memory are several tensors there, each a run of
its rows; verl's own replicas read them as the one tensor."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from verl.checkpoint.block_fp8 import quantization_config, unreadable
from verl.checkpoint.hf import skeleton
from verl.checkpoint.safetensors_file import DTYPES, host_bytes
from verl.nn.fp8 import SCALES
from verl.weight_sync.base import Entry, Parts, SyncError, TensorStream, WeightSource, saved_parts
from verl.weight_sync.shm import PIDS

PREFIX = "verl-versions"
WEIGHTS = "model.safetensors"
KEPT = 2  # versions: a late reader may still read the one before
VERSION, WHOLE = "verl_version", "verl_whole"  # metadata keys; the second lists tensors that are stored in parts
NOT_LINKED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a version's file of weights."""

    head: bytes
    """The length of the header, and the header."""
    starts: Mapping[str, int]
    """The first byte of each delivered tensor, from the beginning of the file."""
    num_bytes: int
    """The size of the file."""


@dataclass(frozen=True, slots=True)
class FolderForm:
    """The form of a model's weights in the folders of its versions."""

    parts: Parts = field(default_factory=dict)
    """The tensors that are stored in parts, by the name that the engine delivers."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that the model's own lacks: the quantisation of weights in blocks of 8 bits."""


def folder_form(model: Path | None, shapes: Mapping[str, Entry]) -> FolderForm:
    """Return the form of folders with these tensors. model: the folder of the model; None: names are not known."""
    made = skeleton(model) if model else None
    parts = saved_parts(made, shapes)
    quantised = any(name.endswith(SCALES) for name in shapes)
    if made is None or not quantised or unreadable(made):
        return FolderForm(parts)
    return FolderForm(parts, {"quantization_config": quantization_config(made)})


def file_layout(version: int, shapes: Mapping[str, Entry], in_parts: Parts) -> FileLayout:
    """Return the layout of these tensors. The widest dtypes are first, so that each tensor starts at a multiple of its
    item size."""
    about = {"format": "pt", VERSION: str(version)}
    header: dict[str, object] = {"__metadata__": about}
    whole: dict[str, tuple[str, tuple[int, ...], int]] = {}
    starts, end = dict[str, int](), 0
    for name, entry in sorted(shapes.items(), key=lambda item: -vars(torch)[item[1].dtype].itemsize):
        dtype = vars(torch)[entry.dtype]
        starts[name], end = end, end + prod(entry.shape) * dtype.itemsize
        for part, shape, row in in_parts.get(name, [(name, entry.shape, 0)]):
            at = starts[name] + row * prod(entry.shape[-1:]) * dtype.itemsize
            offsets = [at, at + prod(shape) * dtype.itemsize]
            header[part] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
        if name in in_parts:
            whole[name] = (entry.dtype, entry.shape, starts[name])
    if whole:
        about[WHOLE] = json.dumps([whole, [part for parts in in_parts.values() for part, _, _ in parts]])
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = len(text).to_bytes(8, "little") + text
    return FileLayout(head, {name: len(head) + start for name, start in starts.items()}, len(head) + end)


def begin_folder(folder: Path, layout: FileLayout, model: Path | None, config: Mapping[str, Any]) -> None:
    """Make the file of weights, without tensors, in a new folder, and links to the other files of the model folder.
    config: fields of config.json with values of their own; without any, it is linked too. Raise OSError if the file
    does not fit on the disk."""
    if layout.num_bytes > (free := shutil.disk_usage(folder).free):
        size = f"{layout.num_bytes / 1e6:.0f} MB of weights"
        raise OSError(f"{size} do not fit into {folder.parent} ({free / 1e6:.0f} MB free)")
    with (folder / WEIGHTS).open("wb") as file:
        file.write(layout.head)
        file.truncate(layout.num_bytes)
    for path in model.iterdir() if model else ():
        if path.name == "config.json" and config:
            (folder / path.name).write_text(json.dumps({**json.loads(path.read_text()), **config}, indent=2))
        elif path.is_file() and not path.name.endswith(NOT_LINKED):
            (folder / path.name).symlink_to(path.resolve())


def fill_folder(
    folder: Path, layout: FileLayout, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write all tensors, in the order of the shapes."""
    with (folder / WEIGHTS).open("r+b") as file:
        for expected, (name, tensor) in zip(shapes, tensors, strict=True):
            assert name == expected, f"{name} comes where {expected} was told of"
            if tensor.numel():
                file.seek(layout.starts[name])
                file.write(host_bytes(tensor))


def slice_runs(shape: Sequence[int], index: Sequence[slice]) -> tuple[int, list[int]]:
    """Return the contiguous runs of a slice of a row-major tensor: (elements of each run, the first element of each
    run in the whole tensor, in the order of the slice's own elements)."""
    spans = [piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    inner = len(shape)
    while inner and spans[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    outer = spans[: max(0, inner - 1)]
    first = spans[inner - 1][0] * strides[inner - 1] if inner else 0
    length = (spans[inner - 1][1] - spans[inner - 1][0]) * strides[inner - 1] if inner else prod(shape)
    places = product(*(range(*span) for span in outer))
    return length, [first + sum(at * stride for at, stride in zip(place, strides, strict=False)) for place in places]


class FolderParts:
    """The file of weights of a folder, which several processes write and then read. Bytes that a process has written
    are in the file after `flush`. A process writes only byte ranges of its own and maps nothing, since file systems
    that several hosts share allow no more."""

    def __init__(self, folder: Path, layout: FileLayout, shapes: Mapping[str, Entry]) -> None:
        self._path, self._layout, self._shapes = folder / WEIGHTS, layout, shapes
        self._file: int | None = None

    def write(self, name: str, index: Sequence[slice], tensor: Tensor) -> None:
        """Write a slice of a tensor."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY)
        content, item_bytes = host_bytes(tensor), tensor.element_size()
        length, starts = slice_runs(self._shapes[name].shape, index)
        for number, start in enumerate(starts):
            run = content[number * length * item_bytes : (number + 1) * length * item_bytes]
            at = self._layout.starts[name] + start * item_bytes
            while run:
                done = os.pwrite(self._file, run, at)
                run, at = run[done:], at + done

    def flush(self) -> None:
        """Store the bytes that this process has written, so that other hosts that open the file later read them."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, after all processes have flushed."""
        entry = self._shapes[name]
        with self._path.open("rb") as file:
            return _tensor_at(file, self._layout.starts[name], entry.shape, entry.dtype)


class FolderStream(TensorStream):
    """The `TensorStream` of one model folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS
        if not self._path.is_file():
            raise SyncError(
                f"{folder} is not here: with sync.engine=disk the trainer and its replicas see one folder; on several "
                "machines set sync.engine_options.folder to a shared one"
            )

    @property
    def version(self) -> int:
        with safe_open(self._path, framework="pt") as file:
            return int(file.metadata()[VERSION])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self._path, framework="pt") as file, self._path.open("rb") as raw:
            whole, parts = json.loads(file.metadata().get(WHOLE, "[{}, []]"))
            for name in sorted({*file.keys()} - {*parts}):
                yield name, file.get_tensor(name)
            first = 8 + int.from_bytes(raw.read(8), "little")
            for name, (dtype, shape, start) in whole.items():
                yield name, _tensor_at(raw, first + start, shape, dtype)

    def write_some(self, sent: WeightSource, folder: Path) -> None:
        shapes = sent.delivered
        stored = self._path.parent
        form = folder_form(stored if (stored / "config.json").is_file() else None, shapes)
        layout = file_layout(sent.version, shapes, form.parts)
        folder.mkdir()
        begin_folder(folder, layout, stored, form.config)
        file, left = FolderParts(folder, layout, shapes), {*shapes}
        for name, tensor in self.tensors():
            if (entry := shapes.get(name)) is not None:
                if why := entry.difference(name, tensor):
                    raise SyncError(f"version {sent.version}: {why}")
                file.write(name, [slice(0, size) for size in tensor.shape], tensor)
                left.remove(name)
        file.flush()
        if left:
            raise SyncError(f"version {sent.version}: {len(left)} tensors are not in {stored}, e.g. {min(left)}")


def _tensor_at(file: BufferedReader, start: int, shape: Sequence[int], dtype: str) -> Tensor:
    found = torch.empty(tuple(shape), dtype=vars(torch)[dtype])
    if found.numel():
        file.seek(start)
        file.readinto(found.view(-1).view(torch.uint8).numpy().data)
    return found


def remove_stale_folders(parent: Path) -> None:
    """Delete the folders of this machine's processes that were killed. Other machines may have folders with similar
    names in the parent."""
    for path in parent.glob(f"{PREFIX}-{_machine()}-*"):
        machine, pid, _ = path.name.removeprefix(f"{PREFIX}-").rsplit("-", 2)
        if machine == _machine() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _machine() -> str:
    """Return the identity of a process-id namespace: containers may share one host name."""
    return f"{socket.gethostname()}.{PIDS}"


def version_folder(parent: Path) -> Path:
    """Make a folder of this process in `parent` and return it. If the process is killed, the next one on this machine
    deletes it. Other users cannot open a folder among temporary files; a folder elsewhere has the default
    permissions."""
    remove_stale_folders(parent)
    root = parent / f"{PREFIX}-{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    root.mkdir(parents=True, mode=0o700 if parent == Path(tempfile.gettempdir()).absolute() else 0o777)
    return root
