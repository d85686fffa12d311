"""A nested state on disk without pickle: tensors in one safetensors file, everything else in one JSON file.

    state.json            the tree; a dict with one key that starts with "$" stands for something JSON has no word for
    tensors.safetensors   tensors and arrays, named by their path in the tree

The round trip is exact, bit for bit and type for type: None, bool, int, float (nan and inf too), str, bytes, list, tuple,
dict with any scalar keys, OrderedDict, dense tensors, numpy arrays and scalars. Whatever else is refused, with its path.
Tensors come back as plain tensors on the CPU, each with its own storage. Atomicity is the store's business.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from verl.checkpoint.safetensors_file import DTYPES, write_tensors

FORMAT = 1
_TREE, _TENSORS = "state.json", "tensors.safetensors"
_ARRAY_KINDS = "biufcmMSU"  # fixed-size items; objects and records need pickle or a schema


def save_state(directory: Path | str, state: Mapping[str, Any]) -> None:
    """Write `state` into `directory` (created). ValueError names the path of what cannot be represented."""
    directory = Path(directory)
    writer = _Encoder()
    tree = writer.encode(state, ())
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / _TENSORS, writer.tensors)
    with open(directory / _TREE, "w") as f:
        json.dump({"format": FORMAT, "tree": tree}, f, allow_nan=False)


def load_state(directory: Path | str) -> dict[str, Any]:
    directory = Path(directory)
    try:
        content = json.loads((directory / _TREE).read_text())
    except ValueError as e:
        raise ValueError(f"{directory / _TREE} is not JSON ({e}): the file is damaged, use another checkpoint") from e
    if content["format"] != FORMAT:
        raise ValueError(f"{directory / _TREE} has format {content['format']}, this version reads {FORMAT}")
    try:
        with safe_open(directory / _TENSORS, "pt") as file:
            return _Decoder(file).decode(content["tree"])
    except SafetensorError as e:
        raise ValueError(f"{directory / _TENSORS} is damaged ({e}): use another checkpoint") from e


@dataclass(slots=True)
class _Encoder:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        """Exact types only: a subclass (np.float64 of float, IntEnum of int) would come back as something else."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind in (list, tuple):
            items = [self.encode(v, (*path, str(i))) for i, v in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (dict, OrderedDict):
            return self._encode_dict(value, path)
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(_checked(value, path), path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._encode_array(value, path)
        raise _refused(path, f"a {kind.__module__}.{kind.__qualname__}", "store plain data, arrays or tensors instead")

    def _encode_dict(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        for key in value:
            if type(key) not in (str, int, float, bool, type(None), tuple):
                raise _refused(path, f"a key of type {type(key).__name__}", "use str or int keys")
        plain = type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value)
        if plain:
            return {k: self.encode(v, (*path, k)) for k, v in value.items()}
        pairs = [[self.encode(k, (*path, "key")), self.encode(v, (*path, str(k)))] for k, v in value.items()]
        return {"$dict" if type(value) is dict else "$ordered": pairs}

    def _encode_array(self, value: np.ndarray | np.generic, path: tuple[str, ...]) -> Any:
        """As raw bytes beside the dtype: numpy has types that torch does not."""
        array = np.asarray(value)
        if array.dtype.kind not in _ARRAY_KINDS:
            raise _refused(path, f"a numpy array of {array.dtype}", "use numbers, booleans or fixed-size strings")
        raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.nbytes else torch.empty(0)
        entry = {"dtype": array.dtype.str, "shape": list(array.shape), "data": self._keep(raw.to(torch.uint8), path)}
        return {"$array" if type(value) is np.ndarray else "$scalar": entry}

    def _keep(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        name = wanted = "/".join(path) or "tensor"
        clashes = 0
        while name in self.tensors or name == "__metadata__":  # a key may itself contain a slash
            clashes += 1
            name = f"{wanted}#{clashes}"
        self.tensors[name] = tensor
        return name


@dataclass(slots=True)
class _Decoder:
    file: Any  # safe_open has no public type

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(v) for v in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {k: self.decode(v) for k, v in value.items()}
        content = value[tag]
        match tag:
            case "$float":
                return float(content)
            case "$tuple":
                return tuple(self.decode(v) for v in content)
            case "$dict":
                return {self.decode(k): self.decode(v) for k, v in content}
            case "$ordered":
                return OrderedDict((self.decode(k), self.decode(v)) for k, v in content)
            case "$bytes":
                return base64.b64decode(content)
            case "$tensor":
                return self.file.get_tensor(content).clone()  # else it stays a window into the file
            case "$array":
                return self._array(content)
            case "$scalar":
                return self._array(content)[()]
        raise ValueError(f"{tag!r} in {_TREE} is not known to this version of verl")

    def _array(self, entry: Mapping[str, Any]) -> np.ndarray:
        raw = self.file.get_tensor(entry["data"]).numpy().tobytes()
        return np.frombuffer(bytearray(raw), dtype=np.dtype(entry["dtype"])).reshape(entry["shape"])


def _checked(tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(path, f"a {type(tensor).__name__}", "store a full, plain tensor (DTensor: full_tensor())")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise _refused(path, f"a tensor of layout {tensor.layout}", "store it dense")
    if tensor.device.type == "meta":
        raise _refused(path, "a tensor without data (meta device)", "materialise it first")
    if tensor.dtype not in DTYPES:
        raise _refused(path, f"a tensor of {tensor.dtype}", "convert it to a type that safetensors has")
    return tensor


def _refused(path: tuple[str, ...], what: str, fix: str) -> ValueError:
    return ValueError(f"state[{'/'.join(path)}] is {what}, which a checkpoint cannot hold: {fix}")
