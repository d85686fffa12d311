"""The physical limit: what a step must compute and move, and how fast this machine can."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

FORWARD_FLOPS_PER_PARAMETER = 2
TRAIN_FLOPS_PER_PARAMETER = 6  # forward, and twice that backward
BYTES = {"float32": 4, "bfloat16": 2}
SQUARE = 1024  # rows and columns of the matmul that shows the machine's peak
STREAM_BYTES = 256 << 20  # far more than any cache


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense transformer with tied or untied head. `parameters` are those that every token is multiplied
    with."""

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one step. The prompt tokens of a group count once, since one computation serves all its samples."""

    groups: int
    samples_per_prompt: int
    prompt_tokens_mean: float
    response_tokens_mean: float
    longest_response_tokens: float

    @property
    def response_tokens(self) -> float:
        return self.groups * self.samples_per_prompt * self.response_tokens_mean

    @property
    def tokens(self) -> float:
        return self.groups * self.prompt_tokens_mean + self.response_tokens

    @property
    def attended(self) -> float:
        """Query-key pairs of one forward pass over every token once (causal, means in place of the lengths)."""
        p, r = self.prompt_tokens_mean, self.response_tokens_mean
        return self.groups * (p * (p + 1) / 2 + self.samples_per_prompt * (r * p + r * (r + 1) / 2))


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured: the best of all passes. `gflop_per_s` is with all threads; neighbours on the machine depress it."""

    threads: int
    gflop_per_s: float
    gflop_per_core_s: float
    gflop_per_core_s_model_shapes: float
    gbyte_per_s: float

    @property
    def peak_gflop_per_s(self) -> float:
        """Return the rate of all cores together on an idle machine."""
        return max(self.gflop_per_s, self.threads * self.gflop_per_core_s)


@dataclass(frozen=True, slots=True)
class Limit:
    """The least one part of a step can take here."""

    gflop: float
    gbyte: float
    seconds: float


def forward_flops(shape: Shape, work: Work) -> float:
    """2 per parameter and token, and 4 per query-key pair, head and dimension (scores, then values)."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * work.attended
    return FORWARD_FLOPS_PER_PARAMETER * shape.parameters * work.tokens + attention


def train_flops(shape: Shape, work: Work) -> float:
    return forward_flops(shape, work) * TRAIN_FLOPS_PER_PARAMETER / FORWARD_FLOPS_PER_PARAMETER


def decode_bytes(shape: Shape, work: Work, dtype: str) -> float:
    """The weights once per tick, as many ticks as the longest response has tokens, and every key and value attended."""
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * work.attended
    return BYTES[dtype] * (shape.parameters * work.longest_response_tokens + kv)


def part_limits(shape: Shape, work: Work, machine: Machine, dtype: str) -> dict[str, Limit]:
    """rollout, update and step. Rollout is bound by compute or by memory; of the update only the compute is counted."""
    forward, moved = forward_flops(shape, work) / 1e9, decode_bytes(shape, work, dtype) / 1e9
    train = train_flops(shape, work) / 1e9
    rollout = Limit(forward, moved, max(forward / machine.peak_gflop_per_s, moved / machine.gbyte_per_s))
    update = Limit(train, 0.0, train / machine.peak_gflop_per_s)
    return {
        "rollout": rollout,
        "update": update,
        "step": Limit(forward + train, moved, rollout.seconds + update.seconds),
    }


def read_shape(model: Path) -> Shape:
    """From the files of a Hugging Face folder. The parameters that a tied embedding shares with the head count once."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    tied = config.get("tie_word_embeddings", False)
    unused = (
        0 if tied else config["vocab_size"] * config["hidden_size"]
    )  # an embedding is looked up, not multiplied with
    return Shape(
        _stored_parameters(model) - unused,
        config["num_hidden_layers"],
        heads,
        config.get("num_key_value_heads", heads),
        config.get("head_dim") or config["hidden_size"] // heads,
    )


def _stored_parameters(model: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                size = 1
                for n in tensors.get_slice(name).get_shape():
                    size *= n
                total += size
    return total


def has_native_bf16(capabilities: Mapping[str, Any]) -> bool:
    """Return True if `torch.cpu.get_capabilities()` has bf16. Elsewhere bf16 matmuls are emulated, many times slower
    than float32."""
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def precisions(capabilities: Mapping[str, Any]) -> tuple[str, ...]:
    return ("float32", "bfloat16") if has_native_bf16(capabilities) else ("float32",)


def measure(dtype: str, *, threads: int, hidden: int, ffn: int, rows: int) -> Machine:
    """Matmuls in `dtype`, large and as the model has them ([rows, hidden] x [hidden, ffn]), and a sum over memory."""
    import torch

    kind = getattr(torch, dtype)
    square, x, weight = (torch.randn(n, m).to(kind) for n, m in ((SQUARE, SQUARE), (rows, hidden), (ffn, hidden)))
    stream = torch.ones(STREAM_BYTES // 4)
    torch.set_num_threads(1)
    one, shaped = _gflop_per_s(square, square), _gflop_per_s(x, weight)
    torch.set_num_threads(threads)
    return Machine(threads, _gflop_per_s(square, square), one, shaped, 1e-9 * STREAM_BYTES / _best_s(stream.sum))


def best(measured: Sequence[Machine]) -> Machine:
    """Over all rounds: a neighbour can only slow a pass down."""
    return Machine(*(max(getattr(m, field.name) for m in measured) for field in fields(Machine)))


def _gflop_per_s(x: Any, weight: Any) -> float:
    """x W^T by the plain call, packed, and in panels, where the machine has them: the best."""
    from verl.accel.operations import Use
    from verl.accel.table import kernels_of

    use = Use(x.device, x.dtype)
    layouts = [found() for found in (kernel.load(use) for kernel in kernels_of("linear", use)) if callable(found)]
    seconds = min(_best_s(partial(layout.make(weight, None), x)) for layout in layouts)
    return 2e-9 * x.numel() * len(weight) / seconds


def _best_s(work: Callable[[], object], passes: int = 25) -> float:
    work()
    seconds = []
    for _ in range(passes):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)
