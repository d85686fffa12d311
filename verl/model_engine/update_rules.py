"""Optimizers with smaller states than AdamW, or with another kind of update, for whole and sharded tensors.

A rule updates one parameter. A sharded parameter is a DTensor of which this rank has some rows; a rule computes with
them, and sums over the ranks where a value depends on other rows. States are tensors: those with a row per row of the
parameter are sharded like it, others are equal on all ranks, so a checkpoint does not depend on the number of ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from verl.accel.devices import device_facts
from verl.model_engine import optimizer_table
from verl.model_engine.hf_parts import part_and_place
from verl.model_engine.optimizer_table import BLOCK, keeps_float32
from verl.nn.quant import code_values

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """One step of one parameter: its gradient and the settings of its group. The tensors are this rank's rows."""

    parameter: nn.Parameter
    values: Tensor
    grad: Tensor
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float

    def decay(self) -> None:
        """Shrink the parameter by the decoupled weight decay."""
        if self.weight_decay:
            self.values.mul_(1 - self.lr * self.weight_decay)

    def add(self, direction: Tensor) -> None:
        """Move the parameter by -lr times a direction."""
        self.values.add_(direction, alpha=-self.lr)


class Rule(Protocol):
    """How an optimizer updates a parameter."""

    def begin(self, p: nn.Parameter) -> State:
        """Return the states of a parameter before its first update."""
        ...

    def update(self, one: ParameterUpdate, state: State) -> None:
        """Update one parameter and its states in place."""
        ...


class ByRule(torch.optim.Optimizer):
    """An optimizer that updates each parameter by a rule. Its groups have the keys of `ParameterUpdate`."""

    def __init__(self, groups: Sequence[dict[str, Any]], rule: Rule) -> None:
        super().__init__(groups, {})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(self.rule.begin(p))
                keys = ("lr", "weight_decay", "betas", "eps")
                self.rule.update(ParameterUpdate(p, local(p), local(p.grad), *(group[key] for key in keys)), state)


def local(t: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its storage."""
    part: Tensor = t.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def sum_over_rows(value: Tensor, p: Tensor) -> Tensor:
    """Add up a value, in place, over the ranks that have different rows of a parameter."""
    if isinstance(p, DTensor):
        for dim, placement in enumerate(p.placements):
            if placement.is_shard():
                dist.all_reduce(value, group=p.device_mesh.get_group(dim))
    return value


def rows_like(p: Tensor, *columns: int) -> Tensor:
    """Return zeros [rows of p, *columns], of which this rank has the same rows as of the parameter."""
    zeros = torch.zeros((len(local(p)), *columns), dtype=p.dtype, device=p.device)
    return like(zeros, p)


def like(part: Tensor, p: Tensor) -> Tensor:
    """Return the tensor of which `part` is this rank's part, with its rows on the ranks that have those of `p`."""
    if not isinstance(p, DTensor):
        return part
    shape = (len(p), *part.shape[1:])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def count(state: State) -> float:
    """Count a step and return its number; 1 is the first."""
    return float(state["step"].add_(1))


def steps() -> Tensor:
    """Return the count of steps of a parameter that has had none, in host memory."""
    return torch.zeros(())


# -- Muon --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MuonRule:
    """Muon for matrices: the momentum, made orthogonal.

    At scale 0.2 as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. A sharded matrix is gathered, and each rank
    computes the whole direction, so its bits do not depend on the number of ranks.
    """

    settings: optimizer_table.Muon

    def begin(self, p: nn.Parameter) -> State:
        return {"momentum_buffer": torch.zeros_like(p)}

    def update(self, one: ParameterUpdate, state: State) -> None:
        s, momentum = self.settings, local(state["momentum_buffer"])
        momentum.lerp_(one.grad, 1 - s.momentum)
        direction = like(one.grad.lerp(momentum, s.momentum) if s.nesterov else momentum, one.parameter)
        mine, index = part_and_place(direction)
        whole = direction.full_tensor() if isinstance(direction, DTensor) else mine
        one.decay()
        size = s.scale * math.sqrt(max(whole.shape))
        one.values.add_(orthogonal(whole, s.iterations)[index], alpha=-one.lr * size)


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Return a bfloat16 matrix with the singular vectors of [m, n] and singular values near 1, by the quintic
    Newton-Schulz iteration of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon)."""
    x = matrix.bfloat16()
    turned = len(x) > x.shape[1]
    if turned:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if turned else x


# -- Adam-mini ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdamMiniRule:
    """Adam with one second moment for a block of values (Zhang et al. 2024, arXiv 2406.16793): for each head of a query
    or key projection, each row of another matrix, and each vector; a bias has one per value.

    head_rows: rows of a head, by parameter, for projections of queries and keys · biases: the parameters that are
    biases
    """

    head_rows: Mapping[nn.Parameter, int]
    biases: frozenset[nn.Parameter]

    def begin(self, p: nn.Parameter) -> State:
        state = {"step": steps(), "exp_avg": torch.zeros_like(p)}
        if p in self.biases:
            return state | {"exp_avg_sq": torch.zeros_like(p)}
        if p in self.head_rows:
            return state | {"exp_avg_sq": torch.zeros(len(p) // self.head_rows[p], dtype=p.dtype, device=p.device)}
        if p.ndim == 1:
            return state | {"exp_avg_sq": torch.zeros((), dtype=p.dtype, device=p.device)}
        return state | {"exp_avg_sq": rows_like(p, *p.shape[1:-1], 1)}

    def update(self, one: ParameterUpdate, state: State) -> None:
        (first, second), p = one.betas, one.parameter
        t, mean, square = count(state), local(state["exp_avg"]), local(state["exp_avg_sq"])
        square.mul_(second).add_(self._mean_square(one), alpha=1 - second)
        mean.lerp_(one.grad, 1 - first)
        one.decay()
        deviation = (square.sqrt() / math.sqrt(1 - second**t)).add_(one.eps)
        if p in self.head_rows:
            deviation = deviation[self._heads(p)].unsqueeze(1)
        one.add(mean * (1 / (1 - first**t) / deviation))

    def _mean_square(self, one: ParameterUpdate) -> Tensor:
        """Return the mean of the squared gradient in each block."""
        p, square = one.parameter, one.grad.square()
        if p in self.biases:
            return square
        if p in self.head_rows:
            heads = square.new_zeros(len(p) // self.head_rows[p])
            heads.index_add_(0, self._heads(p), square.sum(1))
            return sum_over_rows(heads, p) / (self.head_rows[p] * p.shape[1])
        if p.ndim == 1:
            return sum_over_rows(square.sum(), p) / p.numel()
        return square.mean(-1, keepdim=True)

    def _heads(self, p: nn.Parameter) -> Tensor:
        """Return the head of each row of this rank's part."""
        rows = part_and_place(p)[1][0] if isinstance(p, DTensor) else slice(0, len(p))
        return torch.arange(rows.start, rows.stop, device=p.device) // self.head_rows[p]


# -- APOLLO ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApolloRule:
    """APOLLO (Zhu et al. 2025, arXiv 2412.05270): Adam's moments are kept of a random projection of the gradient. The
    factor by which Adam's update changes the norm of the projection scales the gradient itself, per row or column, or
    as a whole at rank 1.

    names: of the parameters; a projection depends on the name and the step only
    """

    settings: optimizer_table.Apollo
    names: Mapping[nn.Parameter, str]

    def begin(self, p: nn.Parameter) -> State:
        rank = self._rank(p)
        tall = len(p) >= p.shape[1]
        moments = [
            rows_like(p, rank) if tall else torch.zeros(rank, p.shape[1], dtype=p.dtype, device=p.device)
            for _ in range(2)
        ]
        norm = torch.zeros((), dtype=p.dtype, device=p.device)
        return {"step": steps(), "exp_avg": moments[0], "exp_avg_sq": moments[1], "norm": norm}

    def update(self, one: ParameterUpdate, state: State) -> None:
        (first, second), p, s = one.betas, one.parameter, self.settings
        small = self.projected(one.grad, p, int(state["step"]))
        t, mean, square = count(state), local(state["exp_avg"]), local(state["exp_avg_sq"])
        mean.lerp_(small, 1 - first)
        square.lerp_(small.square(), 1 - second)
        moved = mean / square.sqrt().add_(one.eps)
        tall = len(p) >= p.shape[1]
        if s.rank > 1:  # one factor for each row of a tall matrix, each column of a wide one
            factor = moved.norm(dim=int(tall)) / (small.norm(dim=int(tall)) + 1e-8)
            scaled = one.grad * (factor.unsqueeze(1) if tall else factor)
        else:
            squares = torch.stack([moved.square().sum(), small.square().sum()])
            over, under = (sum_over_rows(squares, p) if tall else squares).sqrt()
            scaled = one.grad * (over / (under + 1e-8))
        norm, before = sum_over_rows(scaled.square().sum(), p).sqrt(), state["norm"]
        # a norm grows by at most 1% per step (Fira, arXiv 2410.01623)
        limiter = torch.where(before > 0, (norm / (before + 1e-8)).clamp(min=1.01) / 1.01, torch.ones_like(norm))
        before.copy_(norm / limiter)
        size = math.sqrt(s.scale) * math.sqrt(1 - second**t) / (1 - first**t)
        one.add(scaled / limiter * size)
        one.decay()

    def projected(self, grad: Tensor, p: nn.Parameter, step: int) -> Tensor:
        """Return the gradient in the space of the moments: this rank's rows [rows, rank] of a tall matrix; [rank,
        columns] of a wide one, on all ranks."""
        rank, (rows, columns) = self._rank(p), p.shape
        if rows >= columns:
            return grad @ self.projection(p, step, (rank, columns)).T
        mine = part_and_place(p)[1][0] if isinstance(p, DTensor) else slice(0, rows)
        return sum_over_rows(self.projection(p, step, (rows, rank))[mine].T @ grad, p)

    def projection(self, p: nn.Parameter, step: int, shape: tuple[int, int]) -> Tensor:
        """Return a random matrix with entries of variance 1 / rank."""
        seed = zlib.crc32(f"{self.names[p]} {step // self.settings.renew_every}".encode())
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (drawn / math.sqrt(self._rank(p))).to(p.device, p.dtype)

    def _rank(self, p: nn.Parameter) -> int:
        return min(self.settings.rank, *p.shape)


# -- 8-bit AdamW -------------------------------------------------------------------------------------------------------


class Adam8bitRule:
    """AdamW with moments of 8 bits (Dettmers et al. 2022, arXiv 2110.02861), as in torchao and bitsandbytes: the values
    of a block share a scale, and are codes of a table. A block is within a row, so it does not depend on the ranks that
    have the rows. A small tensor, or one with one dimension, has moments in float32."""

    def begin(self, p: nn.Parameter) -> State:
        state = {"step": steps()}
        for name in ("exp_avg", "exp_avg_sq"):
            if keeps_float32(p.ndim, p.numel()):
                state[name] = torch.zeros_like(p)
            else:
                state[name] = torch.zeros_like(p, dtype=torch.uint8)
                state[f"{name}_scale"] = rows_like(p, *p.shape[1:-1], -(-p.shape[-1] // BLOCK))
        return state

    def update(self, one: ParameterUpdate, state: State) -> None:
        t = count(state)
        one.decay()
        tensors = {"values": one.values, "grad": one.grad.contiguous()}
        tensors |= {name: local(states) for name, states in state.items() if name != "step"}
        matrices = {name: x.view(-1, x.shape[-1] if x.ndim else 1) for name, x in tensors.items()}
        rows, columns = matrices["values"].shape
        at_once = max(1, device_facts(one.values.device.type).moment_values // max(1, columns))
        for first in range(0, rows, at_once):
            part = {name: x[first : first + at_once] for name, x in matrices.items()}
            self._update_rows(replace(one, values=part.pop("values"), grad=part.pop("grad")), part, t)

    def _update_rows(self, one: ParameterUpdate, state: State, t: float) -> None:
        first, second = one.betas
        mean, square = (self._read(state, name, signed) for name, signed in MOMENTS)
        mean.lerp_(one.grad, 1 - first)
        square.lerp_(one.grad.square(), 1 - second)
        deviation = (square.sqrt() / math.sqrt(1 - second**t)).add_(one.eps)
        one.add(mean / (1 - first**t) / deviation)
        for (name, signed), values in zip(MOMENTS, (mean, square), strict=True):
            self._write(state, name, signed, values)

    def _read(self, state: State, name: str, signed: bool) -> Tensor:
        codes = state[name]
        if codes.dtype != torch.uint8:
            return codes.clone()
        return from_codes(codes, state[f"{name}_scale"], signed=signed)

    def _write(self, state: State, name: str, signed: bool, values: Tensor) -> None:
        codes = state[name]
        if codes.dtype != torch.uint8:
            codes.copy_(values)
            return
        found, scale = to_codes(values, signed=signed)
        codes.copy_(found)
        state[f"{name}_scale"].copy_(scale)


MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""The moments of AdamW, and whether they have a sign."""


def to_codes(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the nearest codes (uint8, the shape of the values [..., n]) and the scales [..., ceil(n / 256)]."""
    n = values.shape[-1]
    blocks = pad(values, (0, -n % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1).clamp(min=1e-12)
    shares = (blocks / scale.unsqueeze(-1)).float().view(-1)
    tables = _tables(signed, values.device)
    code = tables.least.index_select(0, (shares.view(torch.int32) >> 16) + LOWEST)
    code += shares >= tables.next_from.index_select(0, code.int())
    return code.view(blocks.shape).flatten(-2)[..., :n], scale


def from_codes(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the values of codes and scales, as `to_codes` returns them."""
    n = codes.shape[-1]
    shares = _tables(signed, codes.device).values.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    blocks = pad(shares.to(scale), (0, -n % BLOCK)).unflatten(-1, (-1, BLOCK))
    return (blocks * scale.unsqueeze(-1)).flatten(-2)[..., :n]


LOWEST = 1 << 15
"""Minus the least number that the upper 16 bits of a float32 are, read as an integer with a sign."""


@dataclass(frozen=True, slots=True)
class _Tables:
    """The codes as tables on a device. Upper 16 bits of a float32 are those of many values, over which the code changes
    once at most: a lookup and a comparison find the code many times faster than a search.

    values: of each code [256] · next_from: the least value whose code is a higher one, by code [256] · least: the code
    of the least value with these upper bits [65536]
    """

    values: Tensor
    next_from: Tensor
    least: Tensor


@cache
def _tables(signed: bool, device: torch.device) -> _Tables:
    values = code_values(signed=signed)
    between = values[:-1] + (values[1:] - values[:-1]) * 0.5
    upper = torch.arange(-LOWEST, LOWEST, dtype=torch.int32) << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32)
    least = torch.bucketize(ends, between, right=True).amin(0).to(torch.uint8)
    next_from = torch.cat([between, torch.tensor([math.inf])])
    return _Tables(values.to(device), next_from.to(device), least.to(device))
