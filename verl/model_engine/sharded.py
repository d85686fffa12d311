"""The model engine of one rank among many: FSDP2 over torch.distributed; otherwise as in one process.

Every parameter is a DTensor of which a rank has a part; a layer's parameters are gathered when a pass reaches it. The
code of a pass is that of `TorchEngine`, so this module contains no loss. All ranks of a layout call the same methods in
the same order. Gradients are summed, never averaged: the weights of a step already contain its one division."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.batch import Batch, exactly, part_of
from verl.errors import Refused
from verl.media_tokens import MediaTokens
from verl.model_engine.base import WeightPart
from verl.model_engine.hf_parts import Index, part_and_place
from verl.model_engine.layout import Layout
from verl.model_engine.local_model import LocalModel
from verl.model_engine.lora import is_factor
from verl.model_engine.meshes import Meshes, host_meshes, meshes_of, patience
from verl.model_engine.options import cannot, image_faults
from verl.model_engine.passes import Passes, Reader, ReplicaWeights, Which
from verl.model_engine.settings import DEFAULTS, EngineSettings
from verl.model_engine.sharded_copy import ShardedCopy, accumulate_in_float32
from verl.model_engine.snapshot import Snapshot
from verl.model_engine.state import EngineState
from verl.model_engine.torch_engine import TorchEngine
from verl.model_engine.units import GatheredRoot, gathered_units, layers_of, shard_unit
from verl.nn.attention import plan_attention
from verl.nn.expert_parallel import ExpertParallel
from verl.nn.fp8 import RoundedInputs, as_computed, in_blocks
from verl.nn.precision import rounded_in_place
from verl.nn.rope import fix_rope
from verl.nn.sequence_parallel import HeadExchange, KeyGather, check_heads
from verl.nn.tensor_parallel import TensorParallel
from verl.nn.torch_compat import share_shards

Fill = Callable[[Mapping[str, Tensor]], None]


class ShardedModel(LocalModel):
    """A model of which this rank has parts. layout: the arrangement of the ranks of the default process group, which
    exists and has a timeout · fill: reads this rank's parts of a model that was built without storage · lender: the
    model of another role, whose parts of the frozen weights this one uses."""

    _of_a_pipeline = False

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        layout: Layout,
        fill: Fill | None = None,
        lender: ShardedModel | None = None,
    ) -> None:
        assert layout.world_size == dist.get_world_size(), (layout, dist.get_world_size())
        assert (layout.pipeline > 1) == self._of_a_pipeline, layout
        for line in cannot(layout):
            raise Refused(line)
        self.layout, self._fill_parts, self._lender = layout, fill, lender
        self.place = layout.place(dist.get_rank())
        self.suffix = f"_rank{dist.get_rank()}"
        self._factors = dict[str, Tensor]()
        super().__init__(model, settings)

    def _place(self) -> None:
        layout = self.layout
        lent = self._lender.meshes if self._lender is not None else None
        self.meshes: Meshes = lent or meshes_of(layout, self.device.type)
        self.mesh = self.meshes.weights
        over = self.mesh["replicate", "shard"] if layout.replicate > 1 else self.mesh["shard"]
        experts, over_experts = self._spread_experts()
        for p in {*self.model.parameters()} - {*self.trained().parameters()}:
            p.requires_grad_(False)  # parameters of a head that is not trained
        if layout.tokens > 1 and not self.settings.packed:
            key = f"parallel.{layout.tokens_key}={layout.tokens}"
            raise Refused(f"{key} wants model.engine_options.attention=auto")
        if layout.sequence > 1:
            check_heads(self.model.config.get_text_config(), layout.sequence, layout.tensor)
        self.root: Any = GatheredRoot(self.model, self.value_head)
        lm_head = self.model.get_output_embeddings()
        tied = lm_head.weight is self.model.get_input_embeddings().weight
        alone = [lm_head] if self.value_head is not None and not tied else []
        self._shard([*experts], [*gathered_units(self.model), *alone], over, over_experts)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.register_forward_pre_hook(accumulate_in_float32)
        register_fsdp_forward_method(self.root, "run")
        if self._lender is not None:
            self._use_weights_of(self._lender)
        elif self._fill_parts is not None:
            self._make_room()
            saved, buffers = self.model.state_dict(), dict(self.model.named_buffers())
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            every = parameters | {name: b for name, b in buffers.items() if name in saved}
            self._fill_parts({name: t for name, t in every.items() if not is_factor(name)})

    def _shard(
        self, experts: list[nn.Module], units: list[nn.Module], over: DeviceMesh, over_experts: DeviceMesh | None
    ) -> None:
        """Share the parameters of the model among the ranks. experts: the modules of experts that ranks have, over
        their mesh · units: the modules that are gathered together, over the mesh of weights"""
        tensor = TensorParallel(self.model, self.mesh["tensor"]) if self.layout.tensor > 1 else None
        for module in (*experts, *units, self.root):
            if tensor is not None:
                tensor.split(module)
            shard_unit(module, mesh=over_experts if module in experts else over)
        if tensor is not None:
            self.vocabulary = tensor.finish()

    def _make_room(self) -> None:
        """Allocate this rank's parts of a model that was built without storage; tied parameters stay one tensor."""
        before = {id(p): p for p in self.root.parameters() if p.is_meta}
        made = {i: nn.Parameter(torch.empty_like(p, device=self.device), p.requires_grad) for i, p in before.items()}
        for module in self.root.modules():
            module._parameters.update({name: made.get(id(p), p) for name, p in module._parameters.items()})
        self.root._apply(lambda t: t)  # only this makes FSDP gather from the new storage

    def _use_weights_of(self, lender: ShardedModel) -> None:
        """Use the lender's parts of the frozen weights, and its buffers. Those that it trains whole are read again."""
        assert lender.lora is not None
        every, body = dict(self.model.named_parameters()), {id(p) for p in self.trained().parameters()}
        own = {n: p for n, p in every.items() if n in lender.lora.parameters.replaced and id(p) in body}
        names = {f"model.{name}" for name in every.keys() - own.keys() if not is_factor(name)}
        share_shards(self.root, lender.root, names)
        for name, buffer in lender.model.named_buffers():
            _owner(self.model, name)._buffers[name.rpartition(".")[2]] = buffer
        self._make_room()
        if self._fill_parts is not None and own:
            self._fill_parts({name: p for name, p in self.model.named_parameters() if name in own})

    def _spread_experts(self) -> tuple[list[nn.Module], DeviceMesh | None]:
        """Return the modules of experts, and the mesh over which their parameters are sharded. It has fewer ranks than
        that of other parameters, since other ranks have other experts."""
        layout, mesh = self.layout, self.meshes.experts
        if mesh is None:
            return [], None
        spread = ExpertParallel(self.model, mesh["expert"])
        return spread.modules, mesh["replicate", "part"] if layout.replicate > 1 else mesh["part"]

    # -- what is trained -----------------------------------------------------------------------------------------------

    def one_mesh_each(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.layout.expert == 1:
            return list(groups)
        return [
            {**group, "params": params}
            for group in groups
            for apart in (False, True)
            if (params := [p for p in group["params"] if ("expert" in p.device_mesh.mesh_dim_names) == apart])
        ]

    def trained_parts(self) -> list[nn.Parameter]:
        found = []
        for p in super().trained_parts():
            if p.grad is not None:
                part = nn.Parameter(part_of_rank(p))
                part.grad = part_of_rank(p.grad)
                found.append(part)
        return found

    def grad_norm(self) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank, so that all ranks skip a non-finite one or
        none does."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for p in self._counted():
            if p.grad is not None:
                split = _split_by_tensor(p)
                norm = torch.linalg.vector_norm(part_of_rank(p.grad), dtype=torch.float64)
                squares[int(split)] += norm.square()
        dist.all_reduce(squares, group=self.mesh.get_group("shard"))
        if self.layout.tensor > 1:
            dist.all_reduce(squares[1], group=self.mesh.get_group("tensor"))
        if self.layout.pipeline > 1:
            dist.all_reduce(squares, group=self.mesh.get_group("pipeline"))
        return squares.sum().sqrt().to(self.settings.precision.master)

    def _counted(self) -> list[nn.Parameter]:
        """Return the parameters that this rank counts in the norm."""
        return super().trained_parts()

    def local(self, t: Tensor) -> Tensor:
        return t.to_local() if isinstance(t, DTensor) else t

    def dimensions(self, t: DTensor) -> tuple[str, ...]:
        """Return the dimensions of the engine's meshes over which a tensor is spread."""
        assert t.device_mesh.mesh_dim_names is not None
        return t.device_mesh.mesh_dim_names

    def start_factor(self, p: Any, whole: Tensor) -> Tensor:
        if _split_by_tensor(p):
            placement = p.placements[p.device_mesh.mesh_dim_names.index("tensor")]
            whole = whole.chunk(self.layout.tensor, placement.dim)[p.device_mesh.get_local_rank("tensor")]
        if self.layout.expert > 1 and "expert" in p.device_mesh.mesh_dim_names:
            whole = whole.chunk(self.layout.expert)[p.device_mesh.get_local_rank("expert")]
        return super().start_factor(p, whole)

    # -- what is published ---------------------------------------------------------------------------------------------

    def whole(self, p: Tensor) -> Tensor:
        p = p.detach()
        if not isinstance(p, DTensor):
            return p
        if p.device_mesh.ndim > 1:  # first over the ranks of a slice, then over the slices
            p = p.redistribute(placements=[*[Replicate()] * (p.device_mesh.ndim - 1), p.placements[-1]])
        return p.full_tensor()

    def weight_parts(self) -> Iterator[WeightPart]:
        return (self._part(name, tensor, self._merged_part) for name, tensor in self.named_weights())

    def parts_of(self, named: Iterable[tuple[str, Tensor | None]]) -> Iterator[WeightPart]:
        return (self._part(name, tensor, lambda name, mine, index: mine) for name, tensor in named)

    def _part(self, name: str, tensor: Tensor | None, read: Callable[[str, Tensor, Index], Tensor]) -> WeightPart:
        """Return this rank's part of a tensor. Of several ranks with the same values the first one delivers them. read:
        returns what is delivered of a name, this rank's part of the tensor and its position."""
        assert tensor is not None, name
        mine, index = part_and_place(tensor)
        copies = (self.place.data, self.place.sequence, self.place.tensor)
        if isinstance(tensor, DTensor):
            mesh: Any = tensor.device_mesh
            pairs = zip(mesh.get_coordinate(), tensor.placements, strict=True)
            copies = tuple(at for at, placement in pairs if placement.is_replicate())
        delivers = not any(copies) and mine.numel() > 0
        found = partial(read, name, mine, index) if delivers else None
        return WeightPart(name, tuple(tensor.shape), tensor.dtype, found, index)

    def gather_factors(self) -> None:
        named = self.model.named_parameters() if self.lora is not None else ()
        self._factors = {name: self.whole(p).clone() for name, p in named if is_factor(name)}

    def _merged_part(self, name: str, mine: Tensor, index: Index) -> Tensor:
        return mine if self.lora is None else self.lora.merged(name, mine, self._gathered_factor, index)

    def _gathered_factor(self, name: str) -> Tensor:
        """Return a whole factor that `gather_factors` gathered, of which this rank's part is still the same."""
        assert name in self._factors, f"{name} was not gathered before the parts of the weights were read"
        mine, index = part_and_place(self.model.get_parameter(name))
        now, then = mine.nan_to_num(), self._factors[name][index].nan_to_num()
        assert torch.equal(now, then), f"{name} has changed since it was gathered"
        return self._factors[name]


class ShardedPasses(Passes):
    """The passes of a rank. Each is a collective: all ranks run the same number of passes, in the same order."""

    local: ShardedModel

    def __init__(self, local: ShardedModel) -> None:
        super().__init__(local)
        self._layout = local.layout
        self._encodes = False  # the tower runs in this pass, on all ranks
        if self._vision is not None:
            for line in image_faults(self._layout, type(local.model).__name__, mutual=bool(self._vision.mutual)):
                raise Refused(line)

    def cuts(self, batch: Batch, count: int = 0) -> list[np.ndarray]:
        """Return the rows of each pass. Every rank has as many passes as the rank that needs most; some may have no
        row."""
        parts = super().cuts(batch, count)
        most = torch.tensor(len(parts), device=self.local.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return exactly(parts, int(most))

    def policy_outputs(self, batch: Batch) -> dict[str, Tensor]:
        lm_head = self.local.model.get_output_embeddings()
        if isinstance(lm_head, FSDPModule):
            lm_head.unshard()
        try:
            return self._run(super().policy_outputs, batch)
        finally:
            for module in (self.local.root, lm_head):
                if isinstance(module, FSDPModule):
                    module.reshard()

    def models_own(self, probes: Sequence[Tensor], form: ReplicaWeights) -> list[Tensor]:
        """Compute as `Passes.models_own` does, with a second model without storage, as transformers makes it. A layer's
        weights are gathered when the pass reaches it and dropped after it, so that no rank ever has the whole model."""
        model = self.local.model
        with torch.device("meta"):
            own: Any = type(model)(copy.deepcopy(model.config)).eval().requires_grad_(False)
        own.set_attn_implementation(self.models_attention)
        fix_rope(own, self.local.settings.longest)
        sharded = dict(model.named_parameters(remove_duplicate=False))
        layers = {id(module) for module in layers_of(own)}
        rounded = RoundedInputs() if form.fp8_inputs else None
        if self.local.lora is not None and not form.merged:
            self.local.lora.add_to(own, self.local.whole_factor)
        fill = partial(self._fill, own, sharded, form=form, rounded=rounded)
        inside = set[str]()
        for prefix, module in list(own.named_modules()):
            if id(module) in layers:
                names = [f"{prefix}.{name}" for name, _ in module.named_parameters()]
                inside |= {*names}
                module.register_forward_pre_hook(lambda *_, names=names: fill(names))
                module.register_forward_hook(lambda *_, names=names: _drop(own, names))
        every = [name for name, _ in own.named_parameters(remove_duplicate=False)]
        fill([name for name in every if name not in inside])
        for name, buffer in model.named_buffers():
            _owner(own, name)._buffers[name.rpartition(".")[2]] = buffer
        with rounded or nullcontext():
            return [self._alone(own, ids) for ids in probes]

    def _fill(
        self,
        own: nn.Module,
        sharded: dict[str, nn.Parameter],
        names: Sequence[str],
        *,
        form: ReplicaWeights,
        rounded: RoundedInputs | None,
    ) -> None:
        for name in names:
            weight = self.local.delivered(name, sharded.get(name))
            weight = self.local.with_factors(name, weight) if form.merged else weight
            made = nn.Parameter(as_computed(name, weight, form.dtype, fp8=form.fp8), requires_grad=False)
            _owner(own, name)._parameters[name.rpartition(".")[2]] = made
            if rounded is not None and in_blocks(name, made.shape):
                rounded.add(made)

    def _outputs(self, batch: Batch, wanted: Sequence[str]) -> dict[str, Tensor]:
        return self._run(super()._outputs, batch, wanted)

    def _run(self, fn: Callable[..., dict[str, Tensor]], batch: Batch, *args: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.local.root.run(fn, batch, *args)
        return found

    def _value_outputs(self, name: str, rows: Tensor, which: Which) -> dict[str, Tensor]:
        return {n: x.clone() for n, x in super()._value_outputs(name, rows, which).items()}  # FSDP rejects views

    def _hidden_packed(self, batch: Batch) -> Tensor:
        """Return the hidden states of this rank's tokens: a run of the batch if ranks share the tokens, else all."""
        if self._layout.tokens == 1:
            return super()._hidden_packed(batch)
        over = self._exchange(batch)
        plan = plan_attention(batch, self.local.device, queries=over.queries)
        plan.exchange = over
        media = None if batch.media is None else over.media_of_mine(batch.media)
        ids, positions = over.mine(batch.ids), over.mine(batch.positions)
        return self._states(ids, positions, plan, media, self._routed(batch, over.mine))

    def _inputs(self, ids: Tensor, media: MediaTokens | None) -> dict[str, Any]:
        """Return the inputs of the decoder. If a rank has an image in this pass, all ranks run the tower: its
        weights are gathered, and its gradients are summed over the ranks."""
        if media is None and self._encodes:
            assert self._vision is not None
            media = self._vision.unread(ids.numel())
        return super()._inputs(ids, media)

    def _read(self, batch: Batch, hidden: Tensor, index: Tensor, fn: Reader) -> dict[str, Tensor]:
        """Compute outputs from the states that this rank has, and return those of all ranks that share the tokens."""
        if self._layout.tokens == 1:
            return super()._read(batch, hidden, index, fn)
        over = self._exchange(batch)
        which = over.rows_of_mine(index)
        found = fn(hidden.index_select(0, (index[which] % over.run).to(self.local.device)), which)
        return {name: over.together(values, which, len(index)) for name, values in found.items()}

    def _exchange(self, batch: Batch) -> HeadExchange | KeyGather:
        kind = KeyGather if self._layout.context > 1 else HeadExchange
        return kind(self.local.meshes.sharers, batch.num_tokens)

    def _cut(self, batch: Batch, count: int = 0, among: np.ndarray | None = None) -> Iterator[np.ndarray]:
        parts = list(super()._cut(batch, count, among))
        encodes = self._passes_with_images(batch, parts)
        for i, rows in enumerate(parts):
            self._meet_copies(last := i == len(parts) - 1)
            # copies sum a module's gradients of earlier passes only if it runs in the last one
            self._encodes = encodes[i] or (last and self._layout.replicate > 1 and any(encodes))
            yield rows
        self._encodes = False

    def _passes_with_images(self, batch: Batch, parts: Sequence[np.ndarray]) -> list[bool]:
        """Return for each pass if any rank has an image in it."""
        if self._vision is None:
            return [False] * len(parts)
        mine = [batch.media is not None and part_of(batch, rows).media is not None for rows in parts]
        found = torch.tensor(mine, dtype=torch.int32, device=self.local.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [one > 0 for one in found.tolist()]

    def _meet_copies(self, meet: bool) -> None:
        """Set whether the next backward pass sums gradients over the copies of the model: the last of a step does."""
        if self._layout.replicate > 1:
            self.local.root.set_requires_all_reduce(meet)

    @contextmanager
    def _compute_weights(self) -> Iterator[None]:
        """Inside the context FSDP gathers the weights that compute: from a copy of the shards, or from the shards
        rounded in place, since FSDP does not read `p.data` again."""
        with self._gathered_weights():
            try:
                yield
            finally:
                self.local.root.reshard()  # else the next pass would use these weights, even if they have changed

    def _gathered_weights(self) -> AbstractContextManager[None]:
        if self._copy is not None:
            return self._copy.in_place()
        if not self._precision.rounds:
            return nullcontext()
        return rounded_in_place([part_of_rank(p) for p in self.local.model.parameters()], self._precision.dtype)

    def _compute_copy(self) -> ShardedCopy:
        return ShardedCopy(self.local.model, self.local.root, self.compute)


class ShardedState(EngineState):
    """The state of all ranks together; the first rank writes the counters."""

    _local: ShardedModel
    _host: tuple[list[DeviceMesh], dist.ProcessGroup] | None = None
    """The process groups of snapshots in host memory: meshes without and with experts, the group of all ranks."""

    def now(self) -> Snapshot:
        now = super().now()
        return now if dist.get_rank() == 0 else replace(now, counters=None)

    def snapshot(self) -> Snapshot:
        """Return a snapshot. Its ranks communicate in process groups of their own, apart from the messages of
        training."""
        meshes, group = self._meet_on_host()
        return replace(super().snapshot(), group=group, whole=partial(self._local.delivered, on_host=meshes[0]))

    def save(self, path: Path) -> None:
        if self._offload.moves("weights") or self._offload.moves("optimizer"):
            self._meet_on_host()
        super().save(path)

    def _meet_on_host(self) -> tuple[list[DeviceMesh], dist.ProcessGroup]:
        if self._host is None:
            self._host = host_meshes(self._local.layout), dist.new_group(backend="gloo", timeout=patience())
        return self._host

    def _on_host(self, t: Tensor, *, copy: bool) -> Tensor:
        if not isinstance(t, DTensor):
            return super()._on_host(t, copy=copy)
        local = t.to_local()
        if (part := super()._on_host(local, copy=copy)) is local:
            return t
        assert self._host is not None
        names = self._local.dimensions(t)
        mesh = self._host[0]["expert" in names][names]
        return DTensor(part, replace(t._spec, mesh=mesh), requires_grad=False)


class ShardedEngine(TorchEngine):
    """A `TorchEngine` on many ranks; the arguments are those of `ShardedModel`."""

    _parts: tuple[type[ShardedModel], type[ShardedPasses]] = ShardedModel, ShardedPasses

    def __init__(
        self,
        model: Any,
        settings: EngineSettings = DEFAULTS,
        *,
        layout: Layout,
        fill: Fill | None = None,
        lender: ShardedModel | None = None,
    ) -> None:
        made, passes = self._parts
        self._compose(made(model, settings, layout, fill, lender), passes, ShardedState)


def part_of_rank(p: Any) -> Tensor:
    """Return this rank's part of a parameter or gradient."""
    part: Tensor = p.detach().to_local()
    return part


def _split_by_tensor(p: Any) -> bool:
    """Return True if the ranks of tensor parallelism have different parts of a parameter."""
    names = p.device_mesh.mesh_dim_names
    return "tensor" in names and isinstance(p.placements[names.index("tensor")], Shard)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _drop(own: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        shape = own.get_parameter(name).shape
        empty = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        _owner(own, name)._parameters[name.rpartition(".")[2]] = empty
