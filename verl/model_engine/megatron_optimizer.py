"""Megatron's optimizer around a rank's chunks: gradients that are summed over the data ranks, updates, and its states
by the names of Hugging Face, so that a checkpoint is the same as that of every other engine and layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.batch import Batch
from verl.errors import Refused
from verl.model_engine.megatron_model import MegatronModel
from verl.model_engine.megatron_names import Piece
from verl.model_engine.megatron_shims import computing_on
from verl.model_engine.meshes import patience
from verl.model_engine.optim import learning_rate
from verl.model_engine.snapshot import Snapshot, load_state
from verl.model_engine.state import EngineState
from verl.model_engine.updates import Updates
from verl.types import Metric, Metrics

MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronUpdates(Updates):
    """The optimizer steps of a rank. distributed: each data rank has the states of a part of the weights"""

    _local: MegatronModel

    def __init__(self, local: MegatronModel, *, distributed: bool) -> None:
        self._local, self._dump_dir, self.spec = local, local.settings.dump_dir, local.settings.optim
        self.optimizer: Any = None
        self.wrapped: list[Any] = []
        """The chunks with their gradient buffers, from which the gradients are summed over the data ranks."""
        self.steps = self.skipped = self.copied = 0
        self._has_gradient, self._distributed = False, distributed
        if self.spec is None:
            return
        if self.spec.name != "adamw" or self.spec.options or self.spec.average:
            given = f"optim.name={self.spec.name}" if self.spec.name != "adamw" else "optim.options or an average"
            raise Refused(f"{given} with model.engine=megatron: its optimizer is adamw alone; use model.engine=sharded")
        with computing_on(local.device):
            self._wrap(distributed)

    def _wrap(self, distributed: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        spec, config = self.spec, self._local.megatron
        assert spec is not None
        given = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
        self.wrapped = [DistributedDataParallel(config, given, chunk) for chunk in self._local.chunks]
        self._parameters = {name: p for name, p in self._local.parameters.items() if p.requires_grad}

        def summed(chunks: Any, num_tokens: Any, pg_collection: Any = None, force_all_reduce: bool = False) -> None:
            """Sum the gradients, of which none is divided: the weights of a step hold its one division."""
            finalize_model_grads(chunks, None, pg_collection, force_all_reduce)

        without_sums = [chunk.no_sync for chunk in self.wrapped]
        config.finalize_model_grads_func = summed
        config.no_sync_func = without_sums if len(without_sums) > 1 else without_sums[0]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.lr,
                weight_decay=spec.weight_decay,
                adam_beta1=spec.betas[0],
                adam_beta2=spec.betas[1],
                adam_eps=spec.eps,
                clip_grad=max(spec.clip_grad_norm, 0.0),
                use_distributed_optimizer=distributed,
                params_dtype=torch.float32,
            ),
            self.wrapped,
            use_gloo_process_groups=False,
        )
        self._free_gradients()

    def begin_gradient(self) -> None:
        """Start the gradient of an optimizer step. It is summed over the ranks at the end of the passes, once."""
        assert self.wrapped, "this engine was built without an optimizer"
        assert not self._has_gradient, "Megatron sums the gradients of a step once: all its passes are in one call"
        if self._local.settings.offload:
            for chunk in self.wrapped:
                chunk.restore_grad_buffers(synchronize=False)
        self._has_gradient = True

    def step(self, last: tuple[Batch, Sequence[str]] | None) -> Metrics:
        assert self.optimizer is not None and self.spec is not None
        lr = learning_rate(self.spec, self.steps)
        with computing_on(self._local.device), torch.no_grad():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            finite = bool(torch.isfinite(torch.tensor(norm)))
            try:
                if finite:
                    for group in self.optimizer.param_groups:
                        group["lr"], group["weight_decay"] = lr, self.spec.weight_decay * group["wd_mult"]
                    self.optimizer.step()
                    self.steps, self.skipped = self.steps + 1, 0
                else:
                    self._refuse(norm, last)
            finally:
                self.zero_grad()
        return {
            "grad_norm": Metric(norm if finite else 0.0, 1, "update"),
            "lr": Metric(lr, 1, "update", "last"),
            "skipped_updates": Metric(0.0 if finite else 1.0, 1, "update", "sum"),
        }

    def zero_grad(self) -> None:
        """Drop the gradient."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._free_gradients()
        self._has_gradient = False

    def _free_gradients(self) -> None:
        """Give the memory of the gradients back until the next step, if the state leaves the device too."""
        if self._local.settings.offload:
            for chunk in self.wrapped:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)

    def tensors(self) -> list[Tensor]:
        return [t for _, states in self._states() for t in states.values() if t.ndim]

    # -- states --------------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Any]:
        """Yield Megatron's optimizers, of weights and of experts."""
        yield from getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield (trained tensor, or this rank's part of it; its states) of torch's optimizers."""
        for part in self._parts():
            for group in part.optimizer.param_groups if part.optimizer is not None else ():
                yield from ((p, part.optimizer.state[p]) for p in group["params"])

    def _shard(self, p: nn.Parameter) -> tuple[Tensor, slice] | None:
        """Return the tensor that the optimizer updates for a parameter, and its place in the flat parameter; None if
        another data rank has it."""
        for part in self._parts():
            places = getattr(part, "model_param_group_index_map", None)
            if places is None:
                if any(p is one for group in part.param_groups for one in group["params"]):
                    return p, slice(0, p.numel())
            elif p in places:
                group, order = places[p]
                at = part._get_model_param_range_map(p)["param"]
                return part.optimizer.param_groups[group]["params"][order], slice(at.start, at.end)
        return None

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        for part in self._parts():
            if part.optimizer is not None and p in part.optimizer.state:
                found: dict[str, Tensor] = part.optimizer.state[p]
                return found
        return {}

    @torch.no_grad()
    def moments(self, key: str) -> dict[str, Tensor]:
        """Return a moment of every trained parameter, whole, in host memory, by Megatron's names. One of them at a time
        is on the device. All ranks call this."""
        from megatron.core import parallel_state as ranks

        found = {}
        for name, p in self._parameters.items():
            flat, held = torch.zeros(p.numel(), device=p.device), self._shard(p)
            if held is not None:
                tensor, at = held
                flat[at] = self._local.seen(self._state_of(tensor)[key]).flatten().to(flat.device)
            if self._distributed:
                expert = not getattr(p, "allreduce", True)
                group = ranks.get_expert_data_parallel_group() if expert else ranks.get_data_parallel_group()
                dist.all_reduce(flat, group=group)
            found[name] = flat.view(p.shape).cpu()
        return found

    @torch.no_grad()
    def set_states(self, moments: Mapping[str, Mapping[str, Tensor]], steps: float) -> None:
        """Begin the states of all parameters from moments, whole, by Megatron's names."""
        for name, p in self._parameters.items():
            if (held := self._shard(p)) is None:
                continue
            tensor, at = held
            states = {key: moments[key][name].flatten()[at].clone().view(tensor.shape) for key in MOMENTS}
            for part in self._parts():
                if any(tensor is one for group in part.optimizer.param_groups for one in group["params"]):
                    part.optimizer.state[tensor] = {"step": torch.tensor(float(steps)), **states}


class _Loaded:
    """The states that a checkpoint has, by tensors with Hugging Face names: the optimizer that `load_state` fills."""

    def __init__(self) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    def begin(self, p: Tensor) -> dict[str, Tensor]:
        return {"step": torch.zeros(())} | {key: torch.zeros_like(p) for key in MOMENTS}


class MegatronState(EngineState):
    """The state of all ranks together, by Hugging Face names; the first rank writes the counters."""

    _local: MegatronModel
    _updates: MegatronUpdates
    _host: tuple[list[Any], Any] | None = None
    """Meshes in host memory and the group of all ranks, for snapshots that communicate beside training."""

    def now(self) -> Snapshot:
        """Return the present state, of which the moments are in host memory."""
        if self._host is None:
            self._host = self._local.host_meshes(), dist.new_group(backend="gloo", timeout=patience())
        meshes, group = self._host
        local, updates = self._local, self._updates
        state: dict[str, Tensor] = {}
        trained = local.trained_pieces()
        for name, piece in trained.items():
            state[f"model.{name}"] = local.wrapped(piece, local.part(piece), meshes)
        moments = {key: updates.moments(key) for key in MOMENTS} if updates.steps else {}
        for key, every in moments.items():
            for name, piece in trained.items():
                state[f"optimizer.{key}.{name}"] = local.wrapped(piece, local.part(piece, every), meshes)
            state |= {f"optimizer.{key}.{name}": every[name] for name in self._own_head()}
        for name, p in self._own_head().items():
            state[f"model.{name}"] = local.seen(p.detach())
        if moments:
            names = (*trained, *self._own_head())
            state |= {f"optimizer.step.{name}": torch.tensor(float(updates.steps)) for name in names}
        counters = {"optimizer_step": updates.steps, "skipped": updates.skipped, "copied": updates.copied}
        whole = partial(local.delivered, on_host=meshes[0])
        named = tuple(local.exported_on(meshes))
        return Snapshot(state, named, whole, counters if dist.get_rank() == 0 else None, group)

    def snapshot(self) -> Snapshot:
        with self._offload.still():
            return self.now().copied(_on_host)

    def save(self, path: Path) -> None:
        with self._offload.still():
            now = self.now().copied(_on_host)  # in Megatron several tensors share a storage, which is not saved
            replace(now, group=None).save(path)

    def _own_head(self) -> dict[str, nn.Parameter]:
        """Return the value head that this stage trains, by its names in the chunk and in a checkpoint."""
        if self._local.value_head is None or not self._local.is_last:
            return {}
        return {f"value_head.{name}": p for name, p in self._local.value_head.named_parameters()}

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank's tensors in a snapshot: weights, those that are exported, and two moments."""
        return 4 * 4 * sum(p.numel() for p in self._local.parameters.values())

    @torch.no_grad()
    def load(self, path: Path) -> None:
        local, head = self._local, self._own_head()
        pieces = {n: p for n, p in local.pieces.items() if n in local.trained_names()}
        params: dict[str, Any] = {n: local.wrapped(p, torch.empty(p.part)) for n, p in pieces.items()}
        params |= {name: p.detach() for name, p in head.items()}
        loaded = _Loaded() if local.settings.optim is not None else None
        counters = load_state(path, local.trained_names(), params, loaded, local.part_of)  # type: ignore[arg-type]
        for name, piece in pieces.items():
            local.write(piece, params[name].to_local())
        if loaded is not None and any(loaded.state.values()):
            self._restore(loaded, params, pieces, counters["optimizer_step"])
        counted = (int(counters.get(name, 0)) for name in ("optimizer_step", "skipped", "copied"))
        self._updates.steps, self._updates.skipped, self._updates.copied = counted

    def _restore(self, loaded: _Loaded, params: Mapping[str, Any], pieces: Mapping[str, Piece], steps: int) -> None:
        local = self._local
        moments: dict[str, dict[str, Tensor]] = {}
        for key in MOMENTS:
            every = moments[key] = {name: torch.zeros_like(p.detach()) for name, p in local.parameters.items()}
            for name, p in params.items():
                if name in pieces:
                    part = loaded.state[p][key].to_local()  # type: ignore[attr-defined]
                    local.write(pieces[name], part, every)
                else:
                    every[name].copy_(loaded.state[p][key])
        self._updates.set_states(moments, steps)


def _on_host(t: Tensor) -> Tensor:
    return t.to("cpu", copy=True)
