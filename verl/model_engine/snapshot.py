"""The state of an engine at one moment: written immediately, or copied and written while training continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.checkpoint.shards import agreed, load_tensors, save_tensors, tensor_names
from verl.errors import Refused

COUNTERS = "engine.json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors and counters of an engine. All ranks call the same methods in the same order."""

    state: Mapping[str, Tensor]
    """Weights and moments by their names in a checkpoint."""
    named: Sequence[tuple[str, Tensor | None]]
    """Weights by their Hugging Face names; None: another rank has the weight."""
    whole: Callable[[str, Tensor | None], Tensor]
    """Gathers a whole tensor from its name and this rank's part."""
    counters: Mapping[str, int] | None
    """The counters; None if another rank writes them."""
    group: Any = None
    """The ranks that write this snapshot together; None: the default group."""

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Snapshot:
        """Return a snapshot of copies; a tensor that is in both collections is copied once."""
        copies: dict[int, Tensor] = {}

        def of(t: Tensor) -> Tensor:
            if id(t) not in copies:
                copies[id(t)] = copy(t.detach())
            return copies[id(t)]

        state = {name: of(t) for name, t in self.state.items()}
        return replace(self, state=state, named=[(name, None if t is None else of(t)) for name, t in self.named])

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank's tensors."""
        named = (t for _, t in self.named if t is not None)
        distinct = {id(t): t for t in (*self.state.values(), *named)}.values()
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in distinct)

    def without_tensors(self) -> Snapshot:
        """Return the snapshot of a rank that holds only a copy of another rank's part."""
        return replace(self, state={}, named=(), counters=None)

    def save(self, path: Path) -> None:
        if not self.state and self.group is None:
            return
        save_tensors(path, {name: t.detach() for name, t in self.state.items()}, self.group)
        with agreed(self.group):
            if self.counters is not None:
                (path / COUNTERS).write_text(json.dumps(self.counters))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as the engine does, one whole tensor at a time."""
        return ((name, self.whole(name, tensor)) for name, tensor in self.named)


@torch.no_grad()
def load_state(
    path: Path, names: Set[str], params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Fill this rank's tensors from the folder that `save` wrote, and return the counters. names: all names of the
    whole model. Raise ValueError if the folder is of another model."""
    found = tensor_names(path)
    saved = {name.removeprefix("model.") for name in found if name.startswith("model.")}
    if differing := sorted(names ^ saved):
        raise Refused(f"the checkpoint is of another model: {len(differing)} parameters differ, e.g. {differing[:3]}")
    into: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in params.items()}
    if optimizer is not None:
        optimizer.state.clear()
        for full in (name for name in found if name.startswith("optimizer.")):
            key, name = full.removeprefix("optimizer.").split(".", 1)
            if (p := params.get(name)) is None:
                continue  # a parameter of another rank
            into[full] = torch.zeros((), device=p.device) if key == "step" else torch.empty_like(p)
            optimizer.state[p][key] = into[full]
    load_tensors(path, into)
    counters: dict[str, int] = json.loads((path / COUNTERS).read_text())
    return counters
