"""The state of an engine in a checkpoint: weights, optimizer states, counters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from verl.model_engine.local_model import LocalModel
from verl.model_engine.offload import Offload
from verl.model_engine.snapshot import Snapshot, load_state
from verl.model_engine.updates import Updates


class EngineState:
    """Saves, copies and loads the state of a model and its optimizer."""

    def __init__(self, local: LocalModel, updates: Updates, offload: Offload) -> None:
        self._local, self._updates, self._offload = local, updates, offload

    def now(self) -> Snapshot:
        """Return the present state without a copy."""
        params, optimizer = self._local.trained_parameters(), self._updates.optimizer
        state: dict[str, Tensor] = {f"model.{name}": p for name, p in params.items()}
        for name, p in params.items():
            for key, value in (optimizer.state.get(p, {}) if optimizer else {}).items():
                state[f"optimizer.{key}.{name}"] = value
        counters = {
            "optimizer_step": self._updates.steps,
            "skipped": self._updates.skipped,
            "copied": self._updates.copied,
        }
        return Snapshot(state, tuple(self._local.exported()), self._local.delivered, counters)

    def snapshot(self) -> Snapshot:
        with self._offload.still():
            return self.now().copied(partial(self._on_host, copy=True))

    def save(self, path: Path) -> None:
        with self._offload.still():
            self.now().copied(partial(self._on_host, copy=False)).save(path)

    def load(self, path: Path) -> None:
        params = self._local.trained_parameters()
        names, part_of = self._local.trained_names(), self._local.part_of
        frozen = self._local.settings.freeze
        counters = load_state(path, names, params, self._updates.optimizer, part_of, frozen)
        counted = (int(counters.get(name, 0)) for name in ("optimizer_step", "skipped", "copied"))
        self._updates.steps, self._updates.skipped, self._updates.copied = counted

    def _on_host(self, t: Tensor, *, copy: bool) -> Tensor:
        return self._offload.on_host(t, copy=copy)
