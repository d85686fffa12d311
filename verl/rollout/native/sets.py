"""LoRA sets of the native engine: B (A x * scale) is added to the products of the rows of a set, never to its weights.

The factors are fused as the weights are (`Projections`): one A for all projections of a product, one B with a block for
each. The arithmetic is that of `nn/lora.py`: both products and their multiple are rounded to the dtype of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.accel.linear import FilledLinear, Filling, Layers, Linear, LowRankParts, LowRankRows, Plain, Products
from verl.accel.transfer import to_device
from verl.errors import Refused
from verl.nn.lora import LowRank, fitted
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.rollout.native.architecture import Shape
from verl.rollout.native.layers import Experts, FeedForward, SharedExpert
from verl.rollout.native.projections import Projections, expert_tensors, interleaved, projections
from verl.rollout.native.weights import Layer

NO_SET = -1
"""The number of the set of a row that has none."""
ProductT = TypeVar("ProductT", bound=Linear, covariant=True)
Added = Callable[[Tensor, Tensor], Tensor]
"""A function of (result of a product [n, out], its input [n, in]) that adds factors to the result, and returns it."""


class SetRows(Protocol):
    """The sets of the rows of one call."""

    def added(self, key: str) -> Added | None:
        """Return the function that adds the factors of these rows to a product; None if none of their sets has any."""
        ...


class Adapted:
    """A product to whose results the factors of LoRA sets are added."""

    nbytes = 0

    def __init__(self, base: Linear, added: Added) -> None:
        self._base, self.bias, self._added = base, base.bias, added

    def __call__(self, x: Tensor) -> Tensor:
        return self._added(self._base(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.add_(self(x))


def adapted(layer: Layer, i: int, rows: SetRows | None) -> Layer:
    """Return layer i as it computes rows of LoRA sets."""
    if rows is None:
        return layer

    def made(key: str, base: Linear) -> Linear:
        added = rows.added(f"{i}.{key}")
        return base if added is None else Adapted(base, added)

    def block(key: str, mlp: FeedForward) -> FeedForward:
        return FeedForward(made(key + "up", mlp.up), made(key + "down", mlp.down), mlp.activation, mlp.gated)

    mlp = layer.mlp
    if isinstance(mlp, FeedForward):
        mlp = block("", mlp)
    elif isinstance(rows, GroupedRows) and (rows.has_experts or mlp.shared is not None):
        of_all = mlp.shared
        if of_all is not None:
            of_all = SharedExpert(block("shared_", of_all.block), made("shared_gate", of_all.gate))
        mlp = AdaptedExperts(mlp, i, rows, of_all)
    return replace(layer, qkv=made("qkv", layer.qkv), out=made("out", layer.out), mlp=mlp)


class AdaptedExperts(Experts):
    """The experts of layer i, to whose products the factors of LoRA sets are added."""

    def __init__(self, base: Experts, i: int, rows: GroupedRows, shared: SharedExpert | None) -> None:
        super().__init__(base.router, base.experts, base.chosen, base.normalised, None, shared)
        self._layer, self._rows = i, rows

    def expert(self, number: int, rows: Tensor) -> FeedForward:
        one = self.experts[number]
        if not self._rows.has_experts:
            return one

        def made(name: str, base: Linear) -> Linear:
            return Adapted(base, partial(self._rows.add_of_expert, f"{self._layer}.{name}.{number}", rows))

        return FeedForward(made("up", one.up), made("down", one.down), one.activation, one.gated)


@dataclass(frozen=True, slots=True)
class Fused:
    """The factors of a set in one product."""

    a: Tensor
    """[parts x rank, in]: A of each of its projections, one below the other; 0 for one without factors."""
    blocks: tuple[Tensor | None, ...]
    """B [out, rank] of each projection, in the order of rows of the fused weights; None for one without factors."""
    sizes: tuple[int, ...]
    """The outputs of each projection."""

    @property
    def b(self) -> Tensor:
        """All of B [sum of out, parts x rank]: each block in its own rows and columns, 0 elsewhere."""
        rank = len(self.a) // len(self.blocks)
        whole, start = self.a.new_zeros(sum(self.sizes), len(self.a)), 0
        for i, (block, rows) in enumerate(zip(self.blocks, self.sizes, strict=True)):
            if block is not None:
                whole[start : start + rows, i * rank : (i + 1) * rank] = block
            start += rows
        return whole


@dataclass(frozen=True, slots=True)
class Factors(Generic[ProductT]):
    """The factors of a set in one product, in the layout in which they are multiplied."""

    a: ProductT
    """A of each of its projections, one below the other."""
    blocks: tuple[ProductT | None, ...]
    """B of each projection, in the order of rows of the fused weights; None for one without factors."""
    sizes: tuple[int, ...]
    """The outputs of each projection."""

    def times(self, x: Tensor, scale: float) -> Tensor:
        """Return B (A x * scale) [n, out] for x [n, in]."""
        low = self.a(x).mul_(scale).view(len(x), len(self.blocks), -1)
        each = [
            x.new_zeros(len(x), size) if block is None else block(low[:, i].contiguous())
            for i, (block, size) in enumerate(zip(self.blocks, self.sizes, strict=True))
        ]
        return torch.cat(each, dim=1) if len(each) > 1 else each[0]


def fused_factors(one: Projections, factors: Mapping[str, LowRank], half: int) -> Fused | None:
    """Return the factors by module as those of one product, or None if none of its projections has any. half: half the
    size of a head; rows of heads are interleaved as in the weights."""
    mine = [factors.get(name) for name, _ in one.parts]
    some = next((low for low in mine if low is not None), None)
    if some is None:
        return None
    a = torch.cat([torch.zeros_like(some.a) if low is None else low.a for low in mine])
    blocks = [None if low is None else low.b for low in mine]
    for i, block in enumerate(blocks[: one.rotated]):
        blocks[i] = None if block is None else interleaved(block, half)
    for i, order in enumerate(one.orders):
        block = blocks[i]
        blocks[i] = block if block is None or order is None else block.index_select(0, order.to(block.device))
    return Fused(a, tuple(blocks), tuple(rows for _, rows in one.parts))


def empty_factors(one: Projections, factors: Mapping[str, LowRank], products: Products) -> Factors[FilledLinear] | None:
    """Return what `fused_factors` returns, in a layout that is still to be filled (`factor_fillings`). Rows of A of
    projections without factors are 0."""
    mine = [factors.get(name) for name, _ in one.parts]
    some = next((low for low in mine if low is not None), None)
    if some is None:
        return None
    rank = len(some.a)
    a = products.empty(len(mine) * rank, one.width)
    for i, low in enumerate(mine):
        if low is None:
            a.fill(torch.zeros_like(some.a), first=i * rank)
    blocks = tuple(None if low is None else products.empty(*low.b.shape) for low in mine)
    return Factors(a, blocks, tuple(rows for _, rows in one.parts))


def factor_fillings(
    one: Projections, factors: Mapping[str, LowRank], half: int, made: Factors[FilledLinear]
) -> Iterator[Filling]:
    """Yield what writes the factors by module into `made`, over those of an earlier version. Each is copied once."""
    for i, ((name, _), block) in enumerate(zip(one.parts, made.blocks, strict=True)):
        if block is not None:
            low = factors[name]
            yield Filling(made.a, low.a.contiguous(), first=i * len(low.a))
            order = one.order(i)
            b = low.b.contiguous() if order is None else low.b.index_select(0, order)
            yield Filling(block, b, pairs=half if i < one.rotated else 0)


@dataclass(frozen=True, slots=True)
class LoraSet:
    """A live set, by the names of the products that have factors."""

    parameters: ParameterSet
    fused: Mapping[str, Fused]
    """Its factors, if they are stacked too."""
    products: Mapping[str, Factors[Linear]]
    """The products with A and B, for each expert those of its own."""
    filled: Mapping[str, Factors[FilledLinear]]
    """Those over which a later version can be written."""
    joined: object
    """The factors as the function of all layers reads them; None if there is no such function."""
    layers: Layers | None
    """That function."""

    def times(self, key: str, x: Tensor) -> Tensor:
        """Return B (A x * scale) [n, out] for x [n, in]."""
        return self.products[key].times(x, self.parameters.scale)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows by set: the factors of a set are multiplied with its own rows. `whole`: they are multiplied with all rows,
    for products of which the bits depend on the number of rows."""

    groups: Sequence[tuple[LoraSet, slice | Tensor]]
    whole: bool
    order: Tensor
    """The rows [n] sorted by set, those without one first."""
    spans: Sequence[LowRankRows]
    """The places of each set in that order, for a function of all layers."""

    @property
    def has_experts(self) -> bool:
        """True if a set has factors of experts."""
        return any(one.parameters.experts for one, _ in self.groups)

    def added(self, key: str) -> Added | None:
        found = [group for group in self.groups if key in group[0].products]
        return partial(self._add, key, found) if found else None

    def add_of_expert(self, key: str, tokens: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Add the factors of an expert's product to its results y [n, out] for x [n, in]. tokens: the rows of the call
        [n] that chose this expert"""
        for one, rows in self.groups:
            if key in one.products:
                if isinstance(rows, slice):
                    mine = (tokens >= rows.start) & (tokens < rows.stop)
                else:
                    mine = torch.isin(tokens, rows)
                if mine.any():
                    y[mine] += one.times(key, x[mine])
        return y

    def _add(self, key: str, groups: Sequence[tuple[LoraSet, slice | Tensor]], y: Tensor, x: Tensor) -> Tensor:
        for one, rows in groups:
            more = one.times(key, x)[rows] if self.whole else one.times(key, x[rows])
            if isinstance(rows, slice):
                y[rows].add_(more)
            else:
                y.index_add_(0, rows, more)
        return y


class StackedFactors:
    """The factors of all sets in memory that a captured graph can read while sets change: every row is multiplied with
    all of A, and keeps what belongs to its own set. There is room for `places` sets of up to `rank`."""

    def __init__(
        self,
        places: int,
        rank: int,
        parts: Mapping[str, Projections],
        like: Tensor,
        make: Callable[[Tensor, None], Linear],
    ) -> None:
        """like: a tensor of their dtype and device · make: makes a product that reads its weight where it is"""
        self.places, self.rank, self._parts = places, rank, parts
        columns = {key: places * len(one.parts) * rank for key, one in parts.items()}
        self.a = {key: like.new_zeros(columns[key], one.width) for key, one in parts.items()}
        self.b = {key: like.new_zeros(sum(rows for _, rows in one.parts), columns[key]) for key, one in parts.items()}
        self.scales = torch.zeros(places, dtype=torch.float32, device=like.device)
        self._products = {key: (make(self.a[key], None), make(self.b[key], None)) for key in parts}

    def fits(self, number: int, one: LoraSet) -> bool:
        """Return True if there is room for this set."""
        return number < self.places and one.parameters.rank <= self.rank and one.fused.keys() <= self.a.keys()

    def write(self, number: int, one: LoraSet | None) -> None:
        """Write the factors of a set in its place; None: zeros."""
        self.scales[number] = 0.0 if one is None else one.parameters.scale
        for key, a in self.a.items():
            parts = len(self._parts[key].parts)
            into_a = a.view(self.places, parts, self.rank, -1)[number]
            into_b = self.b[key].view(-1, self.places, parts, self.rank)[:, number]
            into_a.zero_()  # B of what is 0 there has no effect
            if one is not None and (fused := one.fused.get(key)) is not None:
                rank = one.parameters.rank
                into_a[:, :rank] = fused.a.view(parts, rank, -1)
                into_b[:, :, :rank] = fused.b.view(-1, parts, rank)

    def times(self, key: str, x: Tensor, own: Tensor, scales: Tensor) -> Tensor:
        """Return what the sets add to a product [n, out] for x [n, in]. own [n, places, 1]: the set of each row ·
        scales [n, 1]"""
        a, b = self._products[key]
        low = torch.where(own, a(x).view(len(x), self.places, -1), 0)  # not a factor: 0 x NaN is NaN
        return b((low.flatten(1) * scales).to(x.dtype)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows of a step of fixed shape, with the set of each."""

    stacked: StackedFactors
    own: Tensor
    scales: Tensor

    def added(self, key: str) -> Added | None:
        return partial(self._add, key) if key in self.stacked.a else None

    def _add(self, key: str, y: Tensor, x: Tensor) -> Tensor:
        return y.add_(self.stacked.times(key, x, self.own, self.scales))


class LiveSets:
    """The live LoRA sets of a runner. Each has a number while it is live. Factors are rounded to `dtype`, and kept and
    multiplied in `compute_dtype`."""

    def __init__(
        self,
        shape: Shape,
        products: Products,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        *,
        stacks: bool,
    ) -> None:
        """stacks: steps of fixed shape read the sets (`masked`)."""
        self._products, self._dtype, self._like = products, dtype, torch.empty(0, dtype=compute_dtype, device=device)
        self._half, self._layers = shape.head_dim // 2, shape.layers
        every = (one for i in range(shape.layers) for one in projections(shape, i) if not one.key.endswith("router"))
        self._parts = {one.key: one for one in every}
        self._sizes: dict[str, tuple[int, ...]] = {
            name: (one.width, rows) for one in self._parts.values() for name, rows in one.parts
        }
        self._experts = dict[str, str]()  # the names of the products, by tensor
        for name, key, (n, out, into) in (one for i in range(shape.layers) for one in expert_tensors(shape, i)):
            if not stacks:  # steps of fixed shape read experts as one tensor
                self._experts[name], self._sizes[name] = key, (n, into, out)
        self._live: dict[str, tuple[int, LoraSet]] = {}
        self._stacks = stacks
        self._stacked: StackedFactors | None = None

    def __len__(self) -> int:
        return len(self._live)

    def number(self, name: str) -> int:
        """Return the number of a live set, or NO_SET for the policy's own weights."""
        found = self._live.get(name)
        return NO_SET if found is None else found[0]

    def add(self, parameters: ParameterSet, tensors: Mapping[str, Tensor], joined: Layers | None) -> bool:
        """Make a version of a set live, in place of an earlier one. Return True if the memory that `masked` reads has
        moved. Raise Refused for factors that do not fit the model, and for those of a set on top of the policy that are
        not finite. joined: the function of all layers that computes with the set."""
        if parameters.id != POLICY_SET.id:  # those of the policy are refused where they are sent (`WeightSender`)
            _refuse_not_finite(parameters.id, tensors)
        low = fitted(parameters, tensors, partial(self._size_of, parameters))
        here = {name: LowRank(self._kept(one.a), self._kept(one.b)) for name, one in low.items()}
        known = self._live.get(parameters.id)
        if known is not None and self._overwrites(known[1], parameters, joined):
            self._fill(here, known[1].filled)
            self._live[parameters.id] = known[0], replace(known[1], parameters=parameters)
            return False
        fused, products, filled = self._products_of(here)
        read = None if joined is None else joined.low_ranks(self._by_layer(parameters, products))
        one = LoraSet(parameters, fused, products, filled, read, joined)
        number = self._free() if known is None else known[0]
        self._live[parameters.id] = number, one
        return self._stacks and self._stack(number, one)

    def _overwrites(self, live: LoraSet, parameters: ParameterSet, layers: Layers | None) -> bool:
        """Return True if a version of a live set can be written over the one before: no step runs meanwhile, and it has
        the same layout."""
        same = replace(live.parameters, base=parameters.base) == parameters and live.layers is layers
        return same and self._products.fills and not self._stacks and not parameters.experts

    def drop(self, name: str) -> None:
        """Forget a set."""
        number, _ = self._live.pop(name)
        if self._stacked is not None:
            self._stacked.write(number, None)

    def grouped(self, numbers: np.ndarray, *, whole: bool = False) -> GroupedRows | None:
        """Return the rows of a call by their sets' numbers [n]; None if no row has a set."""
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        if ordered[-1] == NO_SET:
            return None
        groups, spans, by_number = [], [], {number: one for number, one in self._live.values()}
        starts = np.flatnonzero(np.diff(ordered, prepend=NO_SET)).tolist()
        for first, end in pairwise([*starts, len(order)]):
            one = by_number[int(ordered[first])]
            groups.append((one, self._places(order[first:end])))
            spans.append(LowRankRows(first, end, one.joined))
        return GroupedRows(groups, whole, self._on_device(order), spans)

    def masked(self, numbers: Tensor) -> MaskedRows:
        """Return the rows of a step by their sets' numbers [n] on the device."""
        assert self._stacked is not None
        places = torch.arange(self._stacked.places, device=numbers.device)
        own = (numbers[:, None] == places)[:, :, None]
        return MaskedRows(self._stacked, own, self._stacked.scales.index_select(0, numbers.clamp(min=0))[:, None])

    def _places(self, rows: np.ndarray) -> slice | Tensor:
        first, last = int(rows[0]), int(rows[-1]) + 1
        if last - first == len(rows):
            return slice(first, last)
        return self._on_device(rows)

    def _on_device(self, rows: np.ndarray) -> Tensor:
        return to_device(rows, self._like.device)

    def _fill(self, here: Mapping[str, LowRank], products: Mapping[str, Factors[FilledLinear]]) -> None:
        """Write factors into products that were made for them."""
        every = (factor_fillings(self._parts[key], here, self._half, made) for key, made in products.items())
        self._products.fill_each([*chain.from_iterable(every)])

    def _products_of(
        self, here: Mapping[str, LowRank]
    ) -> tuple[dict[str, Fused], dict[str, Factors[Linear]], dict[str, Factors[FilledLinear]]]:
        """Return the factors by product: those that are stacked too, all in the layout of the products, and those of
        them that can be filled again."""
        make, half = self._products.make, self._half
        if self._products.fills and not self._stacks:
            empty = {key: empty_factors(one, here, self._products) for key, one in self._parts.items()}
            packed = {key: made for key, made in empty.items() if made is not None}
            self._fill(here, packed)
            return {}, {**packed, **self._of_experts(here)}, packed
        found = {key: fused_factors(one, here, half) for key, one in self._parts.items()}
        fused = {key: made for key, made in found.items() if made is not None}
        products = {
            key: Factors(make(one.a, None), tuple(None if b is None else make(b, None) for b in one.blocks), one.sizes)
            for key, one in fused.items()
        }
        return fused if self._stacks else {}, products | self._of_experts(here), {}

    def _of_experts(self, here: Mapping[str, LowRank]) -> dict[str, Factors[Linear]]:
        """Return the factors of experts by product, in the layout of the products."""
        make, found = self._products.make, dict[str, Factors[Linear]]()
        for name in here.keys() & self._experts.keys():
            for e, (a, b) in enumerate(zip(here[name].a, here[name].b, strict=True)):
                found[f"{self._experts[name]}.{e}"] = Factors(make(a, None), (make(b, None),), (len(b),))
        return found

    def _by_layer(self, parameters: ParameterSet, products: Mapping[str, Factors[Linear]]) -> LowRankParts:
        layers = [dict[str, tuple[Linear, Sequence[Linear | None]]]() for _ in range(self._layers)]
        for key, one in products.items():
            layer, name = key.split(".")
            layers[int(layer)][name] = one.a, one.blocks
        return LowRankParts(layers, parameters.rank, parameters.scale)

    def _kept(self, factor: Tensor) -> Tensor:
        """Return a factor as it is multiplied: a copy, unless it is written into another layout."""
        found = factor.to(self._like.device, self._dtype).to(self._like.dtype)
        copied = found is not factor or (self._products.fills and not self._stacks)
        return found if copied else found.clone()

    def _size_of(self, parameters: ParameterSet, module: str) -> tuple[int, ...]:
        """Return (inputs, outputs) of a module that can have factors, or (experts, inputs, outputs) of experts."""
        if (found := self._sizes.get(module)) is not None:
            return found
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in self._sizes}))
        raise Refused(
            f"LoRA set {parameters.id!r}: its target {module} is none of the layers that the native engine "
            f"adapts ({kinds} of {self._layers} layers): leave it out of "
            "target_modules, or use rollout.engine=hf"
        )

    def _free(self) -> int:
        taken = {number for number, _ in self._live.values()}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _stack(self, number: int, one: LoraSet) -> bool:
        """Write a set into the memory that `masked` reads. Return True if it is new memory, since the set did not
        fit."""
        before = self._stacked
        if before is not None and before.fits(number, one):
            before.write(number, one)
            return False
        places, rank, keys = (0, 0, set[str]()) if before is None else (before.places, before.rank, {*before.a})
        places, rank = 1 << max(places - 1, number).bit_length(), max(rank, one.parameters.rank)
        parts = {key: part for key, part in self._parts.items() if key in keys | one.fused.keys()}
        make = self._products.make if self._products.keeps else Plain
        self._stacked = StackedFactors(places, rank, parts, self._like, make)
        for at, live in self._live.values():
            self._stacked.write(at, live)
        return True


def _refuse_not_finite(name: str, tensors: Mapping[str, Tensor]) -> None:
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    doubtful = [name for name, sound in zip(tensors, sums.isfinite().tolist()) if not sound]
    if bad := [name for name in doubtful if not bool(tensors[name].isfinite().all())]:
        raise Refused(f"LoRA set {name!r}: {bad[0]} has values that are not finite; publish another version")
