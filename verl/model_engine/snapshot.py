"""The state of an engine at one moment: written immediately, or copied and written while training continues."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.checkpoint.shards import agreed, load_tensors, save_tensors, tensor_names
from verl.errors import Refused
from verl.model_engine.optim import AVERAGE
from verl.model_engine.optimizers import Optimizer
from verl.models.families import Part

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
    path: Path,
    names: Set[str],
    params: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    part_of: Callable[[str], Part | None],
    frozen: Collection[Part] = (),
) -> dict[str, int]:
    """Fill this rank's tensors from the folder that `save` wrote, and return the counters. names: all names of the
    whole model · part_of: its part to which a name belongs · frozen: its parts that are not trained. Raise ValueError
    if the folder is of another model."""
    found = tensor_names(path)
    _refuse_other_names({n.removeprefix("model.") for n in found if n.startswith("model.")}, names, part_of, frozen)
    into: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in params.items()}
    if optimizer is not None:
        optimizer.state.clear()
        for name, keys in _states_by_parameter(found).items():
            if (p := params.get(name)) is None:
                continue  # a parameter of another rank
            state = optimizer.begin(p) | ({AVERAGE: torch.empty_like(p)} if AVERAGE in keys else {})
            if state.keys() != keys:
                raise Refused(
                    f"the checkpoint's optimizer has {', '.join(sorted(keys))} of {name}, and that of this run has "
                    f"{', '.join(sorted(state))}: resume with the optim.name that it was begun with"
                )
            into |= {f"optimizer.{key}.{name}": value for key, value in state.items()}
            optimizer.state[p].update(state)
    load_tensors(path, into)
    counters: dict[str, int] = json.loads((path / COUNTERS).read_text())
    return counters


def _refuse_other_names(
    saved: Set[str], names: Set[str], part_of: Callable[[str], Part | None], frozen: Collection[Part]
) -> None:
    """Raise Refused if a checkpoint has other parameters than this run trains."""
    if not (differing := sorted(saved ^ names)):
        return
    then, now = ({part_of(name) for name in every} for every in (saved, names))
    if {part_of(name) for name in differing} == then ^ now:  # all parameters of these parts
        before = {*frozen} - then | (now - then)
        was, here = (", ".join(part for part in get_args(Part) if part in every) for every in (before, frozen))
        raise Refused(
            f"the checkpoint was saved with model.freeze=[{was}], and this run has model.freeze=[{here}]: resume with "
            f"model.freeze=[{was}], or begin another run whose model.path is the checkpoint's folder hf"
        )
    raise Refused(f"the checkpoint is of another model: {len(differing)} parameters differ, e.g. {differing[:3]}")


def _states_by_parameter(found: Set[str]) -> dict[str, set[str]]:
    """Return the keys of the states of each parameter in a checkpoint."""
    keys = defaultdict[str, set[str]](set)
    for full in found:
        if full.startswith("optimizer."):
            key, name = full.removeprefix("optimizer.").split(".", 1)
            keys[name].add(key)
    return keys
