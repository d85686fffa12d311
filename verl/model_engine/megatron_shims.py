"""Megatron-Core on a device that is not CUDA: the version that this engine is written for, and the few places where it
names CUDA although nothing of CUDA is used.

Nothing is changed on a GPU. On a CPU the changes are made inside `computing_on` and undone after it."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verl.errors import Refused

SUPPORTED = "0.19."
INSTALL = "pip install --no-deps --ignore-requires-python megatron-core==0.19.2 triton==3.9.0"


def check_version() -> str:
    """Return a line if Megatron-Core does not declare this Python, else "". Raise Refused if it is missing, is another
    version than this engine is written for, or would take an optimizer of another package, which keeps its states in
    another way."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        raise Refused(f"model.engine=megatron: Megatron-Core is missing in {sys.executable}: {INSTALL}") from None
    if not found.startswith(SUPPORTED):
        raise Refused(f"model.engine=megatron: megatron-core {found} is not {SUPPORTED}x, which it is for: {INSTALL}")
    for module, name in (("transformer_engine", "Transformer Engine"), ("apex", "Apex")):
        if find_spec(module) is not None:
            fix = "use an environment without it (make megatron-env)"
            raise Refused(
                f"model.engine=megatron: Megatron would use the optimizer of {name}, which was not run; {fix}"
            )
    if sys.version_info < (3, 12):
        return f"megatron-core {found} declares Python 3.12; it runs on {sys.version.split()[0]} too"
    return ""


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the context Megatron does not warn that optional packages are missing, nor that GPTModel is deprecated."""
    gpt = logging.getLogger("megatron.core.models.gpt.gpt_model")
    level = gpt.level
    gpt.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gpt.setLevel(level)


class _OnHost(TorchFunctionMode):
    """Tensors that are wanted on `cuda` are made on the CPU, and the optimizers, which compare names of types, see a
    float32 tensor as one of CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        device = given.get("device")
        if device is not None and torch.device(device).type == "cuda":
            given["device"] = torch.device("cpu")
        if func is Tensor.cuda:
            return args[0]
        found = func(*args, **given)
        if func is Tensor.type and found == "torch.FloatTensor":
            return "torch.cuda.FloatTensor"
        return found


class _NoStream:
    """A stream of a device that computes in order: nothing waits."""

    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: object = None) -> _NoStream:
        return self


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor of the CPU as Megatron returns one of CUDA: it leaves out the conversion of what is there."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _on_host_again(backward: Callable[..., Any]) -> Any:
    """Return the backward pass of a checkpoint that computes its layers again on the CPU: autograd does not keep the
    mode of the forward pass."""

    def run(context: Any, *gradients: Any) -> Any:
        with _OnHost():
            return backward(context, *gradients)

    return staticmethod(run)


def _gathering(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return Megatron's gathering of runs of rows, which may be unlike: gloo has none of those."""

    def run(mine: Tensor, group: Any, sizes: Sequence[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return gather(mine, group, None, use_global_buffer)
        every = gather(_of_length(mine, max(sizes)), group).chunk(len(sizes))
        return torch.cat([part[:size] for part, size in zip(every, sizes, strict=True)])

    return run


def _scattering(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return Megatron's sums of runs of rows, each of which one rank gets; they may be unlike."""

    def run(every: Tensor, group: Any, sizes: Sequence[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return scatter(every, group, None, use_global_buffer)
        parts = [_of_length(part, max(sizes)) for part in every.split(list(sizes))]
        return scatter(torch.cat(parts), group)[: sizes[group.rank()]]

    return run


def _of_length(rows: Tensor, length: int) -> Tensor:
    """Return so many rows, the last ones of zeros."""
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Return a context in which Megatron computes on this device."""
    if device.type == "cuda":
        yield
        return
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "current_stream", _NoStream),
            (torch.cuda, "Stream", _NoStream),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.cuda, "synchronize", lambda device=None: None),
            (token_dispatcher, "maybe_move_tensor_to_cpu", _moved_to_cpu),
            (mappings, "_gather_along_first_dim", _gathering(mappings._gather_along_first_dim)),
            (mappings, "_reduce_scatter_along_first_dim", _scattering(mappings._reduce_scatter_along_first_dim)),
            (random.CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext()),
            (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
            (random.CheckpointFunction, "backward", _on_host_again(random.CheckpointFunction.backward)),
        ):
            stack.callback(setattr, owner, name, inspect.getattr_static(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_OnHost())
        yield
