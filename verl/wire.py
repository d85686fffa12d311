"""The format in which weights are sent from the trainer to rollout engines. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl.errors import Refused

FP8 = "fp8"
"""The value of rollout.dtype for projections in blocks of 8 bits; other tensors and the activations are bfloat16."""
FP8_INPUTS = "fp8 with its inputs"
"""The dtype of an engine with such projections that quantises their inputs too, each token by runs of columns."""
FP8_BLOCK = 128
"""The rows and the columns of a block of weights that share a scale; the columns of an input that do."""
FP8_CAPABILITY = (8, 9)
"""The first compute capability of NVIDIA cards that converts E4M3 values."""
FLOATS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23), "float64": (11, 52)}
"""The bits of exponent and mantissa of each dtype, by torch's name, the narrower ones first."""


JOINED = ("q_proj", "k_proj", "gate_proj", "w1", "q_a_proj")
"""Projections to which servers append the rows of another one: a block must not have rows of both."""
DIVIDED = {0: ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1: ("o_proj", "down_proj")}
"""Projections that the ranks of a server divide by their rows (0) or columns (1)."""


def split_block(name: str, shape: Sequence[int]) -> str:
    """Return why servers cannot read this tensor of a model folder in blocks, or "". It need not be a projection."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if len(shape) > 2 and ".experts." in name:
        return f"{name} {[*shape]}: experts that are saved as one tensor have no blocks that a server reads"
    if module in JOINED and len(shape) > 1 and shape[-2] % FP8_BLOCK:
        return f"{name} {[*shape]}: a server appends another projection, and no block of {FP8_BLOCK} rows ends there"
    return ""


def cut_block(name: str, shape: Sequence[int], ranks: int, kv_heads: int) -> str:
    """Return why the ranks of a server that divide a projection would cut a block of it, or ""."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    parts = min(ranks, kv_heads) if module in ("k_proj", "v_proj") else ranks
    side = next((shape[axis] for axis, names in DIVIDED.items() if module in names and len(shape) == 2), 0)
    if parts == 1 or side % (parts * FP8_BLOCK) == 0:
        return ""
    return (
        f"{name} {[*shape]}: a rank of {ranks} has {side / parts:g} of {side}, and no block of {FP8_BLOCK} ends there"
    )


def holds(wide: str, narrow: str) -> bool:
    """Return True if the first dtype represents every value of the second."""
    return all(a >= b for a, b in zip(FLOATS[wide], FLOATS[narrow], strict=True))


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The format in which an engine reads weights. The trainer converts them to it before it sends them."""

    dtype: str | None = None
    """The dtype of floating-point tensors, by torch's name; None: the trainer's own. A tensor is never widened."""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """The dtypes of tensors that the engine keeps in another dtype, by name: buffers, or router gates in float32."""
    fp8: bool = False
    """Projections are sent as values in 8 bits and scales (`nn/fp8.py`)."""
    fp8_inputs: bool = False
    """The engine quantises the inputs of these projections too. What is sent does not depend on it; the pass of the
    trainer that the canary compares with does."""
    codes: bool = False
    """Weights that the trainer has in 4 or 8 bits are sent as their codes and scales (`nn/quant.py`); otherwise they
    are dequantised."""

    def dtype_of(self, name: str) -> str | None:
        """Return the dtype in which the tensor `name` is sent; None: in the trainer's own."""
        return self.exceptions.get(name, self.dtype)

    @staticmethod
    def widest(formats: Sequence[WireFormat]) -> WireFormat:
        """Return the narrowest format that keeps every value that any of these formats keeps.

        One version is staged for all replicas; a replica with a narrower format rounds the tensors when it loads."""

        fp8 = {one.fp8 for one in formats}
        if len(fp8) > 1:
            raise Refused(
                "some replicas read weights in blocks of FP8 and others do not: set one rollout.dtype for all"
            )

        def widest_of(dtypes: Sequence[str | None]) -> str | None:
            known = [dtype for dtype in dtypes if dtype is not None]
            return next(d for d in FLOATS if all(holds(d, one) for one in known)) if len(known) == len(dtypes) else None

        dtype = widest_of([one.dtype for one in formats])
        names = sorted({name for one in formats for name in one.exceptions}) if dtype is not None else []
        every = {name: widest_of([one.dtype_of(name) for one in formats]) for name in names}
        kept = {name: of for name, of in every.items() if of is not None and of != dtype}
        inputs, codes = any(one.fp8_inputs for one in formats), all(one.codes for one in formats)
        return WireFormat(dtype, kept, fp8 == {True}, inputs, codes)


AS_HELD = WireFormat()
"""The format of an engine that reads every tensor in the dtype that the trainer has."""
