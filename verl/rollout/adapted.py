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
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from verl.config.adapter import CONFIG, WEIGHTS, copy_adapter, rank_of, read_adapter
from verl.config.model_files import read_weight_headers
from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.rollout.api import Api, Deadlines, Expected
from verl.rollout.base import Capabilities, RolloutContext, check_inputs
from verl.rollout.calls import PendingCall
from verl.rollout.connected import Server
from verl.rollout.http import ServerGone, ServerLate, ServerRefused
from verl.rollout.launching import Launch

DROPS_S = 5.0  # for dropping all adapters at the end, from a server that keeps running
LAYER = re.compile(r"(?!.*(vision|visual|audio)).*\.layers\.\d+\.")
TARGETS = ("q_proj", "o_proj", "down_proj")  # the adapter of zeros targets the first of these that the model has


class AdaptedServer(Server):
    """A server with LoRA adapters. A publish changes the base, and with it the answers of all adapters. Each load gets
    a new name at the server, so that no prefix or request of an earlier load is used for it."""

    def __init__(
        self,
        context: RolloutContext,
        expected: Expected,
        api: Api,
        at: str | Launch,
        able: Capabilities,
        deadlines: Deadlines | None,
        api_key: str | None,
        router: str | None,
    ) -> None:
        if able.lora_rank and context.place is not None:
            projection_of(Path(context.place.model))
        super().__init__(context, expected, api, at, deadlines or Deadlines(), api_key, router)
        self._able = able
        self._pending: dict[str, PendingCall] = {}
        self._scoring = Counter[str]()  # running scores, by the name at the server
        self._adapters: dict[str, tuple[str, str]] = {}  # (name at the server, copy of the folder), by name
        self._own = self._model
        self._changing = set[str]()  # names that are loaded or dropped now
        self._strays: list[str] = []  # names at the server that failed to load, in an unknown state
        self._copies: OwnFolder | None = None

    async def load_adapter(self, name: str, folder: str) -> None:
        self._check_alive()
        check_inputs(self._able, "load_adapter", name, ())
        await self._up()
        place = self._context.place
        assert place is not None, "a server has a place"
        if name in ("", self._own):
            raise ValueError(f"load_adapter: {name!r} is the model's own name; give the adapter another one")
        self._check_idle("load_adapter", name)
        read_adapter(Path(folder), Path(place.model))
        if (rank := rank_of(Path(folder))) > self._able.lora_rank:
            fix = f"set rollout.engine_options.max_lora_rank to at least {rank}"
            raise ValueError(f"{folder}: rank {rank} is above the engine's {self._able.lora_rank}; {fix}")
        there, copied = f"{self._tag}-{next(self._number)}-{name}", self._copy_of(folder)
        with self._change(name):
            try:
                await self._loaded_there(there, copied)
            except ValueError:
                shutil.rmtree(copied)
                raise
            except BaseException:  # the server may have loaded it
                self._strays.append(there)
                raise
            before, self._adapters[name] = self._adapters.get(name), (there, copied)
            if before is not None:  # if the drop fails it stays loaded, unused
                with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
                    await self._dropped_there(*before)

    async def drop_adapter(self, name: str) -> None:
        self._check_alive()
        await self._up()
        self._served_name("drop_adapter", name)
        self._check_idle("drop_adapter", name)
        with self._change(name):
            await self._dropped_there(*self._adapters[name])
            del self._adapters[name]

    @contextlib.contextmanager
    def _change(self, name: str) -> Iterator[None]:
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.remove(name)

    async def _disconnect(self) -> None:
        """Drop all adapters from a server that keeps running: it would end when it looks for their deleted folders."""
        try:
            if self._copies is not None and self._launch is None:
                with contextlib.suppress(ServerGone, ServerLate, ServerRefused, TimeoutError):
                    async with asyncio.timeout(DROPS_S):
                        for there in (*(there for there, _ in self._adapters.values()), *self._strays, self._model):
                            await self._post_adapter(*self._api.dropping(there))
        finally:
            await super()._disconnect()

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

    def _served_name(self, what: str, adapter: str | None) -> str:
        """Return the server's name of an adapter, or of the model."""
        if adapter is None:
            return self._model
        if adapter in self._changing:
            raise ValueError(f"{what}: {adapter!r} is being loaded or dropped; wait for that")
        if adapter not in self._adapters:
            there = ", ".join(sorted(self._adapters)) or "none"
            raise ValueError(f"{what}: no adapter {adapter!r} was loaded (there are: {there}); load_adapter first")
        return self._adapters[adapter][0]

    def _check_idle(self, what: str, name: str) -> None:
        """Refuse a change while requests of the adapter run: a part of their tokens would silently be of another
        one."""
        if name in self._changing:
            raise ValueError(f"{what}: {name!r} is being loaded or dropped already; wait for that")
        there, _ = self._adapters.get(name, ("", ""))
        if busy := sum(call.model == there for call in self._pending.values()) + self._scoring[there]:
            raise ValueError(f"{what}: {busy} requests of {name!r} run; wait for them, or abort them")

    async def _load_adapters(self) -> None:
        """Load the adapters of the server before into a new one."""
        self._own = self._model
        if self._able.lora_rank and (place := self._context.place) is not None:
            write_nothing(nothing := self._new_folder(), Path(place.model))
            self._model = f"{self._tag}-nothing"
            await self._loaded_there(self._model, str(nothing))
        for there, folder in list(self._adapters.values()):
            await self._loaded_there(there, folder)

    async def _loaded_there(self, there: str, folder: str) -> None:
        try:
            await self._post_adapter(*self._api.adapting(there, folder))
        except ServerRefused as e:
            fix = self._expected.needs.get("adapters", "it has to be started for adapters")
            raise ValueError(f"{folder}: {self._expected.name} does not take this adapter ({e}); {fix}") from e

    async def _dropped_there(self, there: str, copied: str) -> None:
        await self._post_adapter(*self._api.dropping(there))
        shutil.rmtree(copied)

    async def _post_adapter(self, path: str, body: Mapping[str, Any]) -> None:
        await self._http.post(path, body, timeout_s=self._limits.control_s, text=True)


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
