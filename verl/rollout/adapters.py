"""LoRA adapters in a running server: loaded under names, which requests give in place of the model's name.

A request without an adapter uses one that changes nothing. On a CPU, vLLM 0.32 silently samples requests without an
adapter wrongly, by whole nats, if requests with one are in the same batch. Batches in which all have one are correct.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from verl.config.adapter import CONFIG, WEIGHTS, copy_adapter, rank_of, read_adapter
from verl.config.model_files import read_weight_headers
from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.parameter_set import POLICY_SET
from verl.rollout.base import Capabilities, RolloutContext
from verl.rollout.calls import RunningCalls
from verl.rollout.connection import ServerConnection
from verl.rollout.http import ServerGone, ServerLate, ServerRefused

DROPS_S = 5.0  # for dropping all adapters at the end, from a server that keeps running
LAYER = re.compile(r"(?!.*(vision|visual|audio)).*\.layers\.\d+\.")
TARGETS = ("q_proj", "o_proj", "down_proj")  # the adapter of zeros targets the first of these that the model has


class ServerAdapters:
    """The LoRA adapters of one server. A publish changes the base, and with it the answers of all adapters. Each load
    gets a new name at the server, so that no prefix or request of an earlier load is used for it."""

    def __init__(self, connection: ServerConnection, calls: RunningCalls) -> None:
        self._connection, self._calls = connection, calls
        self._loaded: dict[str, tuple[str, str]] = {}  # (name at the server, copy of the folder), by name
        self._own_name = connection.model  # of the model, at the server
        self._changing = set[str]()  # names that are loaded or dropped now
        self._strays: list[str] = []  # names at the server that failed to load, in an unknown state
        self._copies: OwnFolder | None = None

    def served_name(self, what: str, adapter: str) -> str:
        """Return the server's name of an adapter, or of the model. `what` names the caller in errors."""
        if adapter == POLICY_SET.id:
            return self._connection.model
        if adapter in self._changing:
            raise ValueError(f"{what}: {adapter!r} is being loaded or dropped; wait for that")
        if adapter not in self._loaded:
            there = ", ".join(sorted(self._loaded)) or "none"
            raise ValueError(f"{what}: no adapter {adapter!r} was loaded (there are: {there}); load_adapter first")
        return self._loaded[adapter][0]

    async def load(self, name: str, folder: str) -> None:
        """Load a copy of the folder under this name, in place of an earlier adapter of the name."""
        connection, place = self._connection, self._connection.context.place
        assert place is not None, "a server has a place"
        if name in ("", self._own_name):
            raise ValueError(f"load_adapter: {name!r} is the model's own name; give the adapter another one")
        self._check_idle("load_adapter", name)
        read_adapter(Path(folder), Path(place.model))
        if (rank := rank_of(Path(folder))) > connection.able.lora_rank:
            fix = f"set rollout.engine_options.max_lora_rank to at least {rank}"
            raise ValueError(f"{folder}: rank {rank} is above the engine's {connection.able.lora_rank}; {fix}")
        there, copied = connection.new_id(name), self._copy_of(folder)
        with self._change(name):
            try:
                await self._post_load(there, copied)
            except ValueError:
                shutil.rmtree(copied)
                raise
            except BaseException:  # the server may have loaded it
                self._strays.append(there)
                raise
            before, self._loaded[name] = self._loaded.get(name), (there, copied)
            if before is not None:  # if the drop fails it stays loaded, unused
                with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
                    await self._post_drop(*before)

    async def drop(self, name: str) -> None:
        self.served_name("drop_adapter", name)
        self._check_idle("drop_adapter", name)
        with self._change(name):
            await self._post_drop(*self._loaded[name])
            del self._loaded[name]

    async def load_all(self) -> None:
        """Load the adapters of the process before into a new one. A server without adapters needs nothing."""
        connection = self._connection
        self._own_name = connection.model
        if connection.able.lora_rank and (place := connection.context.place) is not None:
            write_nothing(nothing := self._new_folder(), Path(place.model))
            connection.model = f"{connection.tag}-nothing"
            await self._post_load(connection.model, str(nothing))
        for there, folder in list(self._loaded.values()):
            await self._post_load(there, folder)

    async def close(self) -> None:
        """Drop all adapters from a server that keeps running: it would end when it looks for their deleted folders."""
        if self._copies is not None and self._connection.launch is None:
            ours = (*(there for there, _ in self._loaded.values()), *self._strays, self._connection.model)
            with contextlib.suppress(ServerGone, ServerLate, ServerRefused, TimeoutError):
                async with asyncio.timeout(DROPS_S):
                    for there in ours:
                        await self._post(*self._connection.api.dropping(there))

    @contextlib.contextmanager
    def _change(self, name: str) -> Iterator[None]:
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.remove(name)

    def _check_idle(self, what: str, name: str) -> None:
        """Refuse a change while requests of the adapter run: a part of their tokens would silently be of another
        one."""
        if name in self._changing:
            raise ValueError(f"{what}: {name!r} is being loaded or dropped already; wait for that")
        there, _ = self._loaded.get(name, ("", ""))
        if busy := self._calls.busy(there):
            raise ValueError(f"{what}: {busy} requests of {name!r} run; wait for them, or abort them")

    def _copy_of(self, folder: str) -> str:
        """Copy the folder: vLLM may read it again at any time, after other adapters took its slot, and would end if it
        were deleted."""
        copy_adapter(Path(folder), copied := self._new_folder())
        return str(copied)

    def _new_folder(self) -> Path:
        """Make a folder that is deleted with this engine."""
        if self._copies is None:
            self._copies = OwnFolder("verl-adapter-copies-")
        return Path(tempfile.mkdtemp(dir=self._copies.path))

    async def _post_load(self, there: str, folder: str) -> None:
        try:
            await self._post(*self._connection.api.adapting(there, folder))
        except ServerRefused as e:
            name, needs = self._connection.name, self._connection.expected.needs
            fix = needs.get("adapters", "it has to be started for adapters")
            raise ValueError(f"{folder}: {name} does not take this adapter ({e}); {fix}") from e

    async def _post_drop(self, there: str, copied: str) -> None:
        await self._post(*self._connection.api.dropping(there))
        shutil.rmtree(copied)

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        await self._connection.http.post(path, body, timeout_s=self._connection.limits.control_s, text=True)


def check_adaptable(context: RolloutContext, able: Capabilities) -> None:
    """Raise Refused for a model that adapters cannot target, if the engine is to load any."""
    if able.lora_rank and context.place is not None:
        projection_of(Path(context.place.model))


def projection_of(base: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of one projection in all text layers of a model folder, by module name. Raise ValueError if it
    has none that an adapter can target."""
    weights = {n.removesuffix(".weight"): h.shape for n, h in read_weight_headers(base).items() if LAYER.match(n)}
    for kind in TARGETS:
        found = {name: shape for name, shape in weights.items() if name.endswith(f".{kind}") and len(shape) == 2}
        if found:
            return found
    wanted = ", ".join(TARGETS)
    raise Refused(f"model.path={base}: it has none of {wanted}; leave rollout.engine_options.max_lora_rank out")


def write_nothing(folder: Path, base: Path) -> None:
    """Write an adapter that adds zeros to a projection of each layer of this model."""
    targets = projection_of(base)
    kind = next(iter(targets)).rpartition(".")[2]
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [kind], "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(base), "inference_mode": True}))
    zeros = dict[str, np.ndarray]()
    for module, (out, into) in targets.items():
        for factor, shape in (("A", (1, into)), ("B", (out, 1))):
            zeros[f"base_model.model.{module}.lora_{factor}.weight"] = np.zeros(shape, np.float32)
    save_file(zeros, folder / WEIGHTS)
