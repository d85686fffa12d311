"""The LoRA sets that a role publishes on top of its weights."""

from __future__ import annotations

from pathlib import Path

from verl.model_engine.base import ModelEngine, Publishes
from verl.model_engine.lora import read_lora
from verl.model_engine.lora_source import LoraSource
from verl.weight_sync.base import Outlet
from verl.weight_sync.sender import WeightSender


class LoraSets:
    """The sources and senders of the open LoRA sets, by id."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[LoraSource, WeightSender]] = {}

    def open(
        self, name: str, folder: Path, base: Path, outlet: Outlet, engine: ModelEngine, sender: WeightSender
    ) -> None:
        """Read an adapter in PEFT's layout as a LoRA set on top of the engine's model. An open set of the same name is
        replaced. base: the folder of a model that has the same tensor shapes · sender: the sender of the full set."""
        parameters, factors = read_lora(name, folder, base)
        source = LoraSource(engine, parameters, factors)  # type: ignore[arg-type]
        self._open[name] = source, sender.for_set(outlet, parameters, engine)

    def close(self, name: str) -> None:
        del self._open[name]

    def publishing(self, name: str) -> tuple[Publishes, WeightSender]:
        """Return (source, sender) of an open set."""
        return self._open[name]
