"""Weights from the trainer's segment of shared memory into vLLM 0.32. This file runs in vLLM's own environment, which
has no verl: it is imported in every worker as `--worker-extension-cls verl_weights.Extension`.

A segment (verl/weight_sync/shm.py): version, length of the index, first byte of the tensors and length of a handle as 8
bytes each, the index in msgpack, the tensors or the handle of a GPU's memory that has them (weight_sync/device.py).
"""

import math
import mmap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

HEAD_BYTES = 32


@dataclass
class Init(WeightTransferInitInfo):
    pass


@dataclass
class Update(WeightTransferUpdateInfo):
    """path: of the segment · version: that it must hold · names: of its tensors (None: all) · checksums: crc32 by name,
    of those that are compared · parts: what one of them is in a saved folder, by name: (name, shape, first row) ·
    passes: it is written again once it was read."""

    path: str
    version: int
    names: list[str] | None = None
    checksums: dict[str, int] = field(default_factory=dict)
    parts: dict[str, list[tuple[str, list[int], int]]] = field(default_factory=dict)
    passes: bool = False


class Segment:
    """A mapped segment. Its tensors are views of it: they are read before the trainer writes it again."""

    def __init__(self, path: str) -> None:
        try:
            with open(path, "r+b") as file:
                self._found = mmap.mmap(file.fileno(), 0)
        except FileNotFoundError:
            raise RuntimeError(
                f"{path} is not on this machine: weights reach servers of the trainer's machine"
            ) from None

    @property
    def version(self) -> int:
        return int.from_bytes(self._found[:8], "little", signed=True)

    def tensors(self, update: Update) -> Iterator[tuple[str, torch.Tensor]]:
        size, first, length = (int.from_bytes(self._found[at : at + 8], "little") for at in (8, 16, 24))
        lies = _opened(self._found[first : first + length]) if length else None
        parts = msgspec.msgpack.decode(self._found[HEAD_BYTES : HEAD_BYTES + size])
        wanted = None if update.names is None else set(update.names)
        if wanted is not None and (absent := sorted(wanted - {part[0] for part in parts})):
            raise RuntimeError(f"{update.path} holds no {absent[:3]}")
        for name, dtype_name, shape, start, num_bytes, *_ in parts:
            if wanted is not None and name not in wanted:
                continue
            dtype = getattr(torch, dtype_name)
            if num_bytes:
                if lies is None:
                    raw = torch.frombuffer(self._found, dtype=torch.uint8, count=num_bytes, offset=first + start)
                else:
                    raw = lies[start : start + num_bytes]
                raw = raw.clone() if update.passes else raw  # vLLM copies a layer once it is complete
                tensor = raw.view(dtype).view(shape)
            else:
                raw, tensor = torch.empty(0, dtype=torch.uint8), torch.empty(shape, dtype=dtype)
            expected = update.checksums.get(name)
            if expected is not None and zlib.crc32(raw.cpu().numpy().data) != expected:
                raise RuntimeError(f"version {update.version}: {name} is not what the trainer sent (checksum)")
            if name not in update.parts:
                yield name, tensor
                continue
            rows = tensor.view(-1, tensor.shape[-1])
            for part, of, row in update.parts[name]:  # the same bytes
                yield part, rows[row : row + math.prod(of[:-1])].view(of)
        if lies is not None:  # the copies of it have ended: its owner writes it again
            torch.cuda.synchronize(lies.device)

    def require(self, version: int) -> None:
        if self.version != version:
            raise RuntimeError(f"version {version} was expected in shared memory, and {self.version} is there")


@lru_cache(maxsize=2)  # as many as there are of a sender
def _opened(handle: bytes) -> torch.Tensor:
    """uint8, the memory of a GPU that the trainer's process has."""
    gpu, num_bytes, allocation, storage_bytes, storage_offset, *rest = msgspec.msgpack.decode(handle)
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if gpu not in seen:
        raise RuntimeError(
            f"the weights lie on GPU {gpu}, and this process sees {', '.join(seen) or 'none'}: set sync.engine=shm"
        )
    shared = (seen.index(gpu), allocation, storage_bytes, storage_offset, False, *rest)
    return rebuild_cuda_tensor(torch.Tensor, (num_bytes,), (1,), 0, TypedStorage, torch.uint8, *shared)


def _plain(name: str) -> str:
    """Of a parameter, as it is called where vLLM serves no adapters."""
    return name.replace(".base_layer.", ".")


class Engine(WeightTransferEngine[Init, Update]):
    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None:
        """Every update says where it is."""

    def start_weight_update(self) -> None:
        self.read: list[str] = []
        self.filled: set[str] = set()
        self.segments: list[Segment] = []  # vLLM copies a layer once it is complete: they stay mapped until then
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which would wait for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        segment = Segment(update_info.path)
        segment.require(update_info.version)
        self.segments.append(segment)
        self.filled |= set(self.model.load_weights(self._noted(segment.tensors(update_info))) or ())
        segment.require(update_info.version)  # nobody wrote over it meanwhile

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self.segments = []
        for module in self.model.modules():  # a head that is tied is packed by itself, and nothing came under its name
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def report(self) -> dict[str, list[str]]:
        """loaded: names that were read · missing: parameters of the model that no tensor went into."""
        parts = {_plain(name) for name, _ in self.model.named_parameters()}  # a tied one has one name
        return {"loaded": sorted(self.read), "missing": sorted(parts - set(map(_plain, self.filled)))}

    def shutdown(self) -> None:
        pass

    def _noted(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            self.read.append(name)


WeightTransferEngineFactory.register_engine("verl", Engine)


class Extension:
    """Part of vLLM's worker."""

    def loaded_weights(self) -> dict[str, list[str]]:
        """Of the last update, for `/collective_rpc`."""
        return self.weight_transfer_engine.report()  # type: ignore[attr-defined]

    def served_model(self) -> dict[str, Any]:
        """Which model this is: its folder, and sizes by their names in config.json. splits: a seeded request whose
        prefill is split over steps would end this server."""
        whole = self.vllm_config  # type: ignore[attr-defined]
        config, sizes = whole.model_config, ("vocab_size", "hidden_size", "num_hidden_layers")
        splits = whole.device_config.device_type == "cpu" and whole.scheduler_config.enable_chunked_prefill
        told = {key: getattr(config.hf_text_config, key) for key in sizes}
        return {"model": config.model, "splits": splits, **told}
