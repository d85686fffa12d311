"""`python -m tests.hanging VERB ...`: the command line, in which a file in the folder HANGING stops work in progress.

    update   holds the number of an optimizer step of the language model: behind it the update does not end
    write    a checkpoint that is written from a copy does not end
The stopped work is recorded by a file `in_update` or `in_write`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.cli import main
from verl.config import backends
from verl.model_engine import rank_engine, torch_engine
from verl.model_engine.snapshot import Snapshot

FOLDER = "HANGING"


def built(options: Any, context: Any) -> Any:
    folder = Path(os.environ[FOLDER])
    engine = (rank_engine if dist.is_initialized() else torch_engine).build(options, context)
    step, save = engine.optim_step, Snapshot.save

    def stepped() -> Any:
        found = step()
        if (folder / "update").exists() and (folder / "update").read_text() == str(engine.optimizer_step):
            (folder / "in_update").touch()
            x = torch.ones(64, 64, requires_grad=True)
            while (folder / "update").exists():  # in and out of kernels, as an update is
                (x @ x).sum().backward()
        return found

    def written(self: Snapshot, path: Path) -> None:
        save(self, path)
        while (folder / "write").exists():
            (folder / "in_write").touch()
            time.sleep(0.05)

    if context.optim is not None and context.head == "lm":
        engine.optim_step, Snapshot.save = stepped, written
    return engine


def hangs(args: Sequence[str] | None = None) -> int:
    for name, backend in [*backends.MODEL.items()]:
        backends.MODEL[name] = replace(backend, build="tests.hanging:built")
    return main(args)


if __name__ == "__main__":
    sys.exit(hangs())
