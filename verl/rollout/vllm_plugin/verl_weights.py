"""Loads weights from the trainer's shared-memory segment into vLLM 0.32.

This file runs in vLLM's own environment, which has no verl. Every worker imports it, by
`--worker-extension-cls verl_weights.Extension`.

A segment (verl/weight_sync/shm.py) has the version, the length of the index, the first byte of the tensors and the
length of a handle as 8 bytes each; then the index in msgpack; then the tensors, or the handle of GPU memory with them
(weight_sync/device.py).
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
SCALES = ("weight_scale", "weight_scale_inv")  # of weights in blocks of 8 bits, which are float32 in every model


@dataclass
class Init(WeightTransferInitInfo):
    """The settings of the transfer, which vLLM requires. There are none."""

    pass


@dataclass
class SegmentUpdate(WeightTransferUpdateInfo):
    """One update of the weights, or one bucket of it."""

    path: str
    """The path of the segment."""
    version: int
    """The version that the segment must have."""
    names: list[str] | None = None
    """The tensors to load. None: all."""
    checksums: dict[str, int] = field(default_factory=dict)
    """crc32 by name, of the tensors that are compared."""
    parts: dict[str, list[tuple[str, list[int], int]]] = field(default_factory=dict)
    """The tensors of a saved folder that one tensor consists of, by name: (name, shape, first row)."""
    passes: bool = False
    """The segment is overwritten after it was read."""


class SharedSegment:
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

    def tensors(self, update: SegmentUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the wanted tensors of the segment by name, compared with their checksums, and cut into the parts that
        vLLM reads."""
        size, first, length = (int.from_bytes(self._found[at : at + 8], "little") for at in (8, 16, 24))
        on_device = _opened(self._found[first : first + length]) if length else None
        parts = msgspec.msgpack.decode(self._found[HEAD_BYTES : HEAD_BYTES + size])
        wanted = None if update.names is None else set(update.names)
        if wanted is not None and (absent := sorted(wanted - {part[0] for part in parts})):
            raise RuntimeError(f"{update.path} holds no {absent[:3]}")
        for name, dtype_name, shape, start, num_bytes, *_ in parts:
            if wanted is not None and name not in wanted:
                continue
            dtype = getattr(torch, dtype_name)
            if num_bytes:
                if on_device is None:
                    raw = torch.frombuffer(self._found, dtype=torch.uint8, count=num_bytes, offset=first + start)
                else:
                    raw = on_device[start : start + num_bytes]
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
            for part, of, row in update.parts[name]:  # views of the same bytes
                yield part, rows[row : row + math.prod(of[:-1])].view(of)
        if on_device is not None:  # its owner overwrites the memory when the copies have ended
            torch.cuda.synchronize(on_device.device)

    def require(self, version: int) -> None:
        """Raise RuntimeError if the segment has another version."""
        if self.version != version:
            raise RuntimeError(f"version {version} was expected in shared memory, and {self.version} is there")


@lru_cache(maxsize=2)  # a sender has two segments
def _opened(handle: bytes) -> torch.Tensor:
    """Return the GPU memory that the trainer's process shares by this handle, as uint8."""
    gpu, num_bytes, allocation, storage_bytes, storage_offset, *rest = msgspec.msgpack.decode(handle)
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if gpu not in seen:
        raise RuntimeError(
            f"the weights lie on GPU {gpu}, and this process sees {', '.join(seen) or 'none'}: set sync.engine=shm"
        )
    shared = (seen.index(gpu), allocation, storage_bytes, storage_offset, False, *rest)
    return rebuild_cuda_tensor(torch.Tensor, (num_bytes,), (1,), 0, TypedStorage, torch.uint8, *shared)


def _plain(name: str) -> str:
    """Return a parameter's name without the suffix that vLLM adds when it serves adapters."""
    return name.replace(".base_layer.", ".")


class Engine(WeightTransferEngine[Init, SegmentUpdate]):
    """The weight transfer engine `verl` of vLLM: it loads the tensors of segments into a worker's model, layer by
    layer."""

    init_info_cls, update_info_cls = Init, SegmentUpdate

    def init_transfer_engine(self, init_info: Init) -> None:
        """Do nothing: every update has its own path."""

    def start_weight_update(self) -> None:
        self.read: list[str] = []
        self.filled: set[str] = set()
        self.segments: list[SharedSegment] = []  # vLLM copies a layer once it is complete: they stay mapped until then
        initialize_layerwise_reload(self.model)
        self.loadable = self._names()  # processing adds parameters and drops some: those of quantised layers

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the tensors of one segment. The base class would also wait for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SegmentUpdate) -> None:
        """Load the tensors of one segment into the model. Raise RuntimeError if it has another version, also
        afterwards."""
        segment = SharedSegment(update_info.path)
        segment.require(update_info.version)
        self.segments.append(segment)
        self.filled |= set(self.model.load_weights(self._noted(segment.tensors(update_info))) or ())
        segment.require(update_info.version)  # it was not overwritten meanwhile

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self.segments = []
        for module in self.model.modules():  # a tied head is packed separately, and has no tensor of its own
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def report(self) -> dict[str, list[str]]:
        """Return the names that were read (loaded) and the parameters that got no tensor (missing)."""
        parts = self.loadable & self._names()
        return {"loaded": sorted(self.read), "missing": sorted(parts - set(map(_plain, self.filled)))}

    def shutdown(self) -> None:
        pass

    def _names(self) -> set[str]:
        """Return the names of the present parameters. A tied one has one name."""
        return {_plain(name) for name, _ in self.model.named_parameters()}

    def _noted(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and record the name of each after it was read."""
        for name, tensor in tensors:
            yield name, tensor
            self.read.append(name)


WeightTransferEngineFactory.register_engine("verl", Engine)


class Extension:
    """Methods that vLLM adds to the class of its workers."""

    def loaded_weights(self) -> dict[str, list[str]]:
        """Return the report of the last update, for `/collective_rpc`."""
        return self.weight_transfer_engine.report()  # type: ignore[attr-defined]

    def served_model(self) -> dict[str, Any]:
        """Return the model's folder and its sizes by their names in config.json. `splits` is true if a prefill may be
        split over steps: a seeded request would then end this server. `normalises` is true if the patches of images are
        normalised here. `float32` has the names of the parameters that
        this worker keeps in float32, though its model has another dtype, without the scales of quantised weights."""
        whole = self.vllm_config  # type: ignore[attr-defined]
        config, sizes = whole.model_config, ("vocab_size", "hidden_size", "num_hidden_layers")
        splits = whole.device_config.device_type == "cpu" and whole.scheduler_config.enable_chunked_prefill
        found = {key: getattr(config.hf_text_config, key) for key in sizes}
        every = self.get_model().named_parameters() if config.dtype != torch.float32 else ()  # type: ignore[attr-defined]
        kept = [_plain(name) for name, t in every if t.dtype == torch.float32 and not name.endswith(SCALES)]
        images = config.multimodal_config
        normalises = images is not None and bool(images.mm_device_do_normalize)
        return {"model": config.model, "splits": splits, "normalises": normalises, "float32": kept, **found}
