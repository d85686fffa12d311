"""LoRA sets in a running server: their factors are written as the folder of an adapter, which the server loads under a
name that requests give in place of the model's name. The policy is such a set too, if LoRA trains it.

A request of a policy without factors uses an adapter that changes nothing. On a CPU, vLLM 0.32 silently samples
requests without an adapter wrongly, by whole nats, if requests with one are in the same batch. Batches in which all
have one are correct.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.adapter import CONFIG, TARGETS, WEIGHTS, one_projection, peft_config
from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.parameter_set import POLICY_SET, ParameterSet, check_base, set_of
from verl.rollout.base import Capabilities, PauseMode, RolloutContext, WeightReader, check_live
from verl.rollout.calls import PendingCall, RunningCalls, ended
from verl.rollout.connection import ServerConnection
from verl.rollout.http import ServerGone, ServerLate, ServerRefused

DROPS_S = 5.0  # for dropping all adapters at the end, from a server that keeps running


@dataclass(frozen=True, slots=True)
class ServedSet:
    """One version of a LoRA set that a server has loaded."""

    version: int
    there: str
    """The name by which requests select it at the server."""
    folder: Path
    """The folder that the server reads, now or later: vLLM reads it again after other adapters took its slot."""


class ServerAdapters:
    """The LoRA sets of one server. Each version is loaded under a new name, so the server uses neither cached prefixes
    nor requests of one version for another."""

    def __init__(self, connection: ServerConnection, calls: RunningCalls) -> None:
        self._connection, self._calls = connection, calls
        self._sets: dict[str, ServedSet] = {}
        self._unused: list[ServedSet] = []  # still at the server, or in an unknown state
        self._folders: OwnFolder | None = None

    def served(self, what: str, name: str) -> tuple[str, int]:
        """Return the name at the server of a parameter set, and its version. `what` names the caller in errors."""
        check_live(what, name, self._sets)
        found = self._sets.get(name)
        return (self._connection.model, self._connection.version) if found is None else (found.there, found.version)

    @property
    def has_policy(self) -> bool:
        """True if the policy is a LoRA set here."""
        return POLICY_SET.id in self._sets

    async def load(self, source: WeightReader, mode: PauseMode) -> int:
        """Make a version of a LoRA set live and return it, as `make_live` does."""
        parameters = set_of(source)
        check_base(
            parameters, self._connection.identity, self._connection.able.lora_rank, self._connection.able.lora_experts
        )
        folder = await self.written(parameters, source.tensors())
        began = time.perf_counter()
        await self.make_live(parameters, source.version, folder, mode)
        source.seconds["load"] = time.perf_counter() - began
        return source.version

    async def written(self, parameters: ParameterSet, tensors: Iterable[tuple[str, object]]) -> Path:
        """Write the factors of a set as the folder of an adapter, and return it."""
        place, folder = self._connection.context.place, self._new_folder()
        assert place is not None, "a server has a place"
        await asyncio.to_thread(partial(write_set, folder, parameters, tensors, place.model))
        return folder

    async def make_live(self, parameters: ParameterSet, version: int, folder: Path, mode: PauseMode) -> None:
        """Let the server load a version of a set from its folder. Later requests use it. Running requests finish under
        the version that they began with; mode abort: they return with their tokens."""
        new = ServedSet(version, self._connection.new_id(parameters.id), folder)
        try:
            await self._post_load(new)
        except BaseException:  # the server may have loaded it
            self._unused.append(new)
            raise
        if (before := self._sets.get(parameters.id)) is not None:
            self._unused.append(before)
        self._sets[parameters.id] = new
        if before is not None and mode == "abort":
            await self._calls.abort_and_wait([one for one in self._calls.pending.values() if one.model == before.there])
        await self._drop_unused()

    async def drop(self, name: str) -> None:
        """Drop a set. Its running requests finish. Nothing is done for a set that the server does not have."""
        if (found := self._sets.pop(name, None)) is not None:
            self._unused.append(found)
        await self._drop_unused()

    async def finish(self) -> None:
        """Let the running requests of all sets finish before the weights under them change. In a paused server they
        return with the tokens that they have."""
        calls = [one for one in self._on_sets() if one.sent]
        async with self._connection.deadline(self._connection.limits.request_s, f"{len(calls)} requests of LoRA sets"):
            await ended(calls, None)

    async def abort(self) -> None:
        """End the requests of all sets with the tokens that they have."""
        await self._calls.abort_and_wait(self._on_sets())

    async def base_changed(self) -> None:
        """Drop all sets, since the weights under them have changed."""
        self._unused += self._sets.values()
        self._sets.clear()
        await self._drop_unused()

    async def load_zeros(self) -> None:
        """Load the adapter of zeros into a new process, which has no sets. A server without adapters needs nothing."""
        connection = self._connection
        self._unused.clear()
        self._sets.clear()
        if connection.able.lora_rank and (place := connection.context.place) is not None:
            write_nothing(nothing := self._new_folder(), Path(place.model))
            connection.model = f"{connection.tag}-nothing"
            await self._post_load(ServedSet(0, connection.model, nothing))

    async def close(self) -> None:
        """Drop all adapters from a server that keeps running: it would end when it looks for their deleted folders."""
        if self._folders is not None and self._connection.launch is None:
            ours = (*(one.there for one in (*self._sets.values(), *self._unused)), self._connection.model)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DROPS_S):
                    for there in ours:  # one that was not loaded is refused, and the others are dropped all the same
                        with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
                            await self._post(*self._connection.api.dropping(there))

    def _on_sets(self) -> list[PendingCall]:
        """Return the requests of all sets."""
        whole = None if self.has_policy else POLICY_SET.id
        return [one for one in self._calls.pending.values() if one.request.parameters != whole]

    async def _drop_unused(self) -> None:
        """Drop the versions that no request uses. One that the server does not drop stays there, unused."""
        for one in [one for one in self._unused if not self._calls.busy(one.there)]:
            with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
                await self._post(*self._connection.api.dropping(one.there))
                self._unused.remove(one)
                shutil.rmtree(one.folder)

    def _new_folder(self) -> Path:
        """Make a folder that is deleted with this engine."""
        if self._folders is None:
            self._folders = OwnFolder("verl-lora-sets-")
        return Path(tempfile.mkdtemp(dir=self._folders.path))

    async def _post_load(self, new: ServedSet) -> None:
        try:
            await self._post(*self._connection.api.adapting(new.there, str(new.folder)))
        except ServerRefused as e:
            name, needs = self._connection.name, self._connection.expected.needs
            fix = needs.get("adapters", "it has to be started for adapters")
            raise ValueError(f"{name} does not take this adapter ({e}); {fix}") from e

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        await self._connection.http.post(path, body, timeout_s=self._connection.limits.control_s, text=True)


def write_set(folder: Path, parameters: ParameterSet, tensors: Iterable[tuple[str, object]], base: str) -> None:
    """Write the factors of a LoRA set as the folder of an adapter, in PEFT's layout."""
    from safetensors.torch import save_file

    (folder / CONFIG).write_text(json.dumps(peft_config(parameters, base)))
    save_file({name: t.detach().cpu().clone() for name, t in tensors}, folder / WEIGHTS)  # type: ignore[attr-defined]


def check_adaptable(context: RolloutContext, able: Capabilities) -> None:
    """Raise Refused for a model that adapters cannot target, if the engine is to load any."""
    if able.lora_rank and context.place is not None:
        projection_of(Path(context.place.model))


def projection_of(base: Path) -> Mapping[str, tuple[int, int]]:
    """Return `one_projection` of a model folder. Raise ValueError if the model has none."""
    if found := one_projection(base):
        return found
    wanted = ", ".join(TARGETS)
    raise Refused(f"model.path={base}: it has none of {wanted}; leave rollout.engine_options.max_lora_rank out")


def write_nothing(folder: Path, base: Path) -> None:
    """Write an adapter that adds zeros to a projection of each layer of this model."""
    import torch

    targets = projection_of(base)
    kind = next(iter(targets)).rpartition(".")[2]
    nothing = ParameterSet(id="nothing", kind="lora", rank=1, targets=(kind,))
    zeros = dict[str, object]()
    for module, (out, into) in targets.items():
        zeros |= zip(nothing.factors(module), (torch.zeros(1, into), torch.zeros(out, 1)))
    write_set(folder, nothing, zeros.items(), str(base))
