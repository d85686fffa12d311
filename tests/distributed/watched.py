"""Parts with which workers are built in place of their own: they record the memory of the processes where it changes
most."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.driver import assemble
from verl.model_engine import rank_engine
from verl.model_engine.offload import Offload
from verl.models.pictures import Pictures
from verl.rollout.native.runner import NativeRunner
from verl.weight_sync import shm
from verl.workers.role import Role, RoleSpec, build_roles

FOLDER = "WATCHED"  # a variable of the workers' environment
_rollout_engine, _awake = assemble.rollout_engine, Offload.awake


def tensor_bytes() -> int:
    """Return the bytes of all tensors of this process, each storage once, without the files of a transport, which would
    be in host memory beside any device."""
    files = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if shm.PREFIX in line]
    shared = [tuple(int(end, 16) for end in place.split("-")) for place in files]
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if not any(low <= storage.data_ptr() < high for low, high in shared):
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _settle() -> None:
    """Exclude the present objects, which are many, from later searches."""
    gc.collect()
    gc.freeze()


def note(device: int) -> None:
    with (Path(os.environ[FOLDER]) / f"{device}-{os.getpid()}").open("a") as file:
        file.write(f"{time.monotonic_ns()} {tensor_bytes()}\n")


def around(owner: type, name: str, device: int) -> None:
    method: Callable[..., Any] = getattr(owner, name)

    def noted(*args: Any, **named: Any) -> Any:
        note(device)
        found = method(*args, **named)
        note(device)
        return found

    setattr(owner, name, noted)


def model(options: Any, context: Any) -> Any:
    """The engine of a rank; nothing is noted before it is there, when no rollout engine has weights yet."""
    device, first = dist.get_rank(), Offload.awake is _awake
    if first:  # of the roles in this process
        _settle()
    engine = rank_engine.build(options, context)
    if first:
        around(torch.optim.AdamW, "step", device)

        @contextmanager
        def awake(self: Offload, *parts: Any) -> Iterator[None]:
            with _awake(self, *parts):
                note(device)
                yield
                note(device)
            note(device)

        Offload.awake = awake
    weights = engine.weights

    def streamed(*args: Any) -> Iterator[Any]:
        for found in weights(*args):
            note(device)
            yield found

    engine.weights = streamed
    return engine


def rollout_engine(config: Any, tokenizer: Any, device: str, replica: int, *more: Any) -> Any:
    _settle()
    for name in ("load", "drop_kv", "drop_weights"):
        around(NativeRunner, name, replica)
    return _rollout_engine(config, tokenizer, device, replica, *more)


def peaks(folder: Path) -> dict[int, int]:
    """By device: the most that its processes held together, each counted as it was last noted."""
    found: dict[int, int] = {}
    for device in sorted({int(path.name.partition("-")[0]) for path in folder.iterdir()}):
        notes = [(*map(int, line.split()), path.name) for path in folder.glob(f"{device}-*") for line in path.open()]
        holds: dict[str, int] = {}
        for _, size, process in sorted(notes):
            holds[process] = size
            found[device] = max(found.get(device, 0), sum(holds.values()))
    return found


def roles_that_note_images(spec: RoleSpec, folder: Path, *, ranks: Any) -> list[Role]:
    """The workers of these ranks; a file of each process lists the images that it processed."""
    processed = Pictures._processed

    def noted(self: Pictures, image: Any, where: str) -> Any:
        with (folder / str(os.getpid())).open("a") as file:
            file.write(f"{where}\n")
        return processed(self, image, where)

    Pictures._processed = noted  # type: ignore[method-assign]
    return build_roles(spec, ranks=ranks)
