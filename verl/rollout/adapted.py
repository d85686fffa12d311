"""LoRA adapters in a server that runs: loaded by their names, which requests give in the model's place.

What asks for none asks for one that changes nothing: vLLM 0.32 on a CPU draws requests without an adapter wrongly, by
whole nats and without a word, where requests with one are in the same batch; adapters of any kind beside each other it
draws as it should.
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
from verl.leftovers import OwnFolder
from verl.rollout.api import Api, Deadlines, Expected
from verl.rollout.base import Capabilities, RolloutContext, check_inputs
from verl.rollout.calls import Call
from verl.rollout.connected import Server
from verl.rollout.http import ServerGone, ServerLate, ServerRefused
from verl.rollout.launching import Launch

DROPS_S = 5.0  # for all that are dropped at the end, from a server that stays
LAYER = re.compile(r"(?!.*(vision|visual|audio)).*\.layers\.\d+\.")
TARGETS = ("q_proj", "o_proj", "down_proj")  # that the one of zeros is of, the first that the model has


class AdaptedServer(Server):
    """See `Adapting`. Its weights are those of the base: what is published changes the answers of adapters too. Each
    load has a name of its own there, so that no prefix and no request of an earlier one is taken for it."""

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
        self._pending: dict[str, Call] = {}
        self._scoring = Counter[str]()  # requests, by the names that they give
        self._adapters: dict[str, tuple[str, str]] = {}  # (name there, copy of the folder), by name
        self._own = self._model
        self._changing = set[str]()  # names that are loaded or dropped now
        self._strays: list[str] = []  # names there of those of which it is not known whether they are
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
            except BaseException:  # it may be there, and would be looked for
                self._strays.append(there)
                raise
            before, self._adapters[name] = self._adapters.get(name), (there, copied)
            if before is not None:  # it stays where that fails: nobody asks for it
                with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
                    await self._dropped_there(*before)

    async def drop_adapter(self, name: str) -> None:
        self._check_alive()
        await self._up()
        self._drawn_by("drop_adapter", name)
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

    async def _hung_up(self) -> None:
        """A server that stays would end where it looks for them."""
        try:
            if self._copies is not None and self._launch is None:
                with contextlib.suppress(ServerGone, ServerLate, ServerRefused, TimeoutError):
                    async with asyncio.timeout(DROPS_S):
                        for there in (*(there for there, _ in self._adapters.values()), *self._strays, self._model):
                            await self._tell(*self._api.dropping(there))
        finally:
            await super()._hung_up()

    def _copy_of(self, folder: str) -> str:
        """vLLM may read it again whenever others had its place, and ends where it is gone."""
        copy_adapter(Path(folder), copied := self._new_folder())
        return str(copied)

    def _new_folder(self) -> Path:
        """A new one, as long as this engine is there."""
        if self._copies is None:
            self._copies = OwnFolder("verl-adapter-copies-")
        return Path(tempfile.mkdtemp(dir=self._copies.path))

    def _drawn_by(self, what: str, adapter: str | None) -> str:
        """The name by which requests ask for it, or for the model."""
        if adapter is None:
            return self._model
        if adapter in self._changing:
            raise ValueError(f"{what}: {adapter!r} is being loaded or dropped; wait for that")
        if adapter not in self._adapters:
            there = ", ".join(sorted(self._adapters)) or "none"
            raise ValueError(f"{what}: no adapter {adapter!r} was loaded (there are: {there}); load_adapter first")
        return self._adapters[adapter][0]

    def _check_idle(self, what: str, name: str) -> None:
        """One that changed under a request would have drawn a part of its tokens without a word."""
        if name in self._changing:
            raise ValueError(f"{what}: {name!r} is being loaded or dropped already; wait for that")
        there, _ = self._adapters.get(name, ("", ""))
        if busy := sum(call.model == there for call in self._pending.values()) + self._scoring[there]:
            raise ValueError(f"{what}: {busy} requests of {name!r} run; wait for them, or abort them")

    async def _adapted(self) -> None:
        """A new server has those of the one before."""
        self._own = self._model
        if self._able.lora_rank and (place := self._context.place) is not None:
            write_nothing(nothing := self._new_folder(), Path(place.model))
            self._model = f"{self._tag}-nothing"
            await self._loaded_there(self._model, str(nothing))
        for there, folder in list(self._adapters.values()):
            await self._loaded_there(there, folder)

    async def _loaded_there(self, there: str, folder: str) -> None:
        try:
            await self._tell(*self._api.adapting(there, folder))
        except ServerRefused as e:
            fix = self._expected.needs.get("adapters", "it has to be started for adapters")
            raise ValueError(f"{folder}: {self._expected.name} does not take this adapter ({e}); {fix}") from e

    async def _dropped_there(self, there: str, copied: str) -> None:
        await self._tell(*self._api.dropping(there))
        shutil.rmtree(copied)

    async def _tell(self, path: str, body: Mapping[str, Any]) -> None:
        await self._http.post(path, body, timeout_s=self._limits.control_s, text=True)


def projection_of(base: Path) -> Mapping[str, tuple[int, ...]]:
    """The shapes of one projection in all text layers of a model folder, by the names of its modules. ValueError: it
    has none that adapters are of."""
    weights = {n.removesuffix(".weight"): h.shape for n, h in read_weight_headers(base).items() if LAYER.match(n)}
    for kind in TARGETS:
        found = {name: shape for name, shape in weights.items() if name.endswith(f".{kind}") and len(shape) == 2}
        if found:
            return found
    wanted = ", ".join(TARGETS)
    raise ValueError(f"model.path={base}: it has none of {wanted}; leave rollout.engine_options.max_lora_rank out")


def write_nothing(folder: Path, base: Path) -> None:
    """An adapter that adds zeros to a projection of each layer of this model."""
    targets = projection_of(base)
    kind = next(iter(targets)).rpartition(".")[2]
    said = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [kind], "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(said | {"base_model_name_or_path": str(base), "inference_mode": True}))
    zeros = dict[str, np.ndarray]()
    for module, (out, into) in targets.items():
        for factor, shape in (("A", (1, into)), ("B", (out, 1))):
            zeros[f"base_model.model.{module}.lora_{factor}.weight"] = np.zeros(shape, np.float32)
    save_file(zeros, folder / WEIGHTS)
