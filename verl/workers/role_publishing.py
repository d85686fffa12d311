"""Publishing of a role's weights: its parameter sets are sent to the replicas, as whole versions or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl.model_engine.base import ModelEngine, Publishes, Ranks
from verl.model_engine.lora_source import FrozenBase, PolicyFactors
from verl.parameter_set import POLICY_SET, Delivery
from verl.weight_sync.base import Entry, Outlet, Readers, Sent
from verl.weight_sync.sender import WeightSender
from verl.wire import WireFormat
from verl.workers.lora_sets import LoraSets


def is_first(ranks: Ranks) -> bool:
    """Return True on the one rank that returns and writes results that all ranks have in common."""
    return ranks.rank == 0 and ranks.primary


class RolePublishing:
    """The sender of a role's weights, and the LoRA sets on top of them. role: the role's name in messages · sender:
    None for a role that publishes nothing."""

    def __init__(self, role: str, engine: ModelEngine, sender: WeightSender | None, ranks: Ranks) -> None:
        self._role, self._engine, self._ranks = role, engine, ranks
        self.sender, self.lora_sets = sender, LoraSets()
        self._factors: dict[tuple[Delivery, bool], tuple[PolicyFactors, WeightSender]] = {}
        self._last_sender = sender  # by the last publish of the policy

    def open_set(self, name: str, folder: Path, base: Path, outlet: Outlet) -> None:
        """Open an adapter as a LoRA set on top of the present weights, to be published through its own outlet."""
        self.lora_sets.open(name, folder, base, outlet, self._engine, self._own_sender())

    def send(
        self,
        version: int,
        probes: Sequence[np.ndarray],
        copy: bool,
        form: WireFormat,
        parameters: str,
        delivery: Delivery,
    ) -> Sent | None:
        """Send the present weights of a set in the format that the replicas read. delivery: that of a policy with LoRA
        factors. The first rank returns the receipt."""
        merged = delivery == "merged"
        source, sender = self._publishing(parameters) if merged else self._of_factors(delivery, form.codes)
        sender.set_format(form)
        with self._engine.awake("weights"):
            if parameters == POLICY_SET.id:
                self._last_sender = sender
                self._engine.published(version)
            return sender.send(source, version, probes, copy=copy, first=is_first(self._ranks))

    def manifest(self, form: WireFormat) -> tuple[dict[str, Entry], str] | None:
        """Return the manifest that all versions of a stream have, and the address at which they are read; None on all
        ranks but the first."""
        sender = self._own_sender()
        sender.set_format(form)
        with self._engine.awake("weights"):
            found = sender.manifest(self._engine)
            return (found, sender.announce(self._engine)) if is_first(self._ranks) else None

    def stream(self, version: int, probes: Sequence[np.ndarray], readers: Readers, form: WireFormat) -> Sent | None:
        """Send the weights to readers that read them during the call. The first rank returns the receipt."""
        sender = self._own_sender()
        sender.set_format(form)
        with self._engine.awake("weights"):
            self._engine.published(version)
            if is_first(self._ranks):
                return sender.stream(self._engine, version, probes, readers)
            sender.attend(self._engine, version, probes)
            return None

    def lose_reader(self, turn: int, reader: int) -> None:
        if self.sender is not None:
            self.sender.lose(turn, reader)

    def release(self, version: int, parameters: str) -> None:
        """Release a version of a set that all living replicas have."""
        policy = parameters == POLICY_SET.id
        sender = self._last_sender if policy else self._publishing(parameters)[1]
        assert sender is not None
        sender.release(version)

    def _publishing(self, parameters: str) -> tuple[Publishes, WeightSender]:
        """Return (source, sender) of a parameter set."""
        whole = parameters == POLICY_SET.id
        return (self._engine, self._own_sender()) if whole else self.lora_sets.publishing(parameters)

    def _of_factors(self, delivery: Delivery, codes: bool) -> tuple[Publishes, WeightSender]:
        """Return (source, sender) of the policy's LoRA factors, with the base or without. codes: the replicas read
        those of a quantised base."""
        with_base, engine = delivery == "base and factors", self._engine
        key = delivery, codes and with_base
        if key not in self._factors:
            source = PolicyFactors(engine, with_base=with_base, codes=codes)  # type: ignore[arg-type]
            base = FrozenBase(engine)  # type: ignore[arg-type]
            sender = self._own_sender().for_factors(source.parameters, base, with_base=with_base)
            self._factors[key] = source, sender
        return self._factors[key]

    def _own_sender(self) -> WeightSender:
        assert self.sender is not None, f"{self._role} publishes nothing"
        return self.sender
