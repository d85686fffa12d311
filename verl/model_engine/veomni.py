"""The model engine of one rank with VeOmni: its model code and its FSDP2, around our passes, optimizer and checkpoints.

VeOmni builds the model (`build_foundation_model`, with its operations), arranges the ranks (`init_parallel_state`) and
shards the weights (`build_parallelize_model`). The rest is the engine of `sharded.py`: the folder is read by its names,
rows are packed by our attention, which shares the tokens of a row among ranks (Ulysses) where VeOmni's own needs flash
attention, gradients are summed, and a checkpoint continues on either engine.

Written against VeOmni 0.1.12, which needs transformers 5.9; its environment is another one than that of the driver."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl.errors import Refused
from verl.model_engine.adapter import open_adapter
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_parts import open_skeleton, part_and_place
from verl.model_engine.layout import Layout
from verl.model_engine.options import Options
from verl.model_engine.sharded import ShardedEngine, ShardedModel, ShardedPasses
from verl.model_engine.torch_engine import TorchEngine
from verl.model_engine.torch_engine import build as build_torch
from verl.model_engine.veomni_options import families_fault

PLAIN = ("moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss")
"""The operations of the supported families that have several implementations in VeOmni. Its defaults need packages
that are not part of a CUDA build of torch, and the passes never call its loss."""


class VeomniModel(ShardedModel):
    """A model that VeOmni shards over the ranks of the default process group."""

    def _shard(
        self, experts: list[nn.Module], units: list[nn.Module], over: DeviceMesh, over_experts: DeviceMesh | None
    ) -> None:
        """Share the parameters as VeOmni does, whose mesh has the ranks of `over` in the same order."""
        from veomni.arguments import MixedPrecisionConfig
        from veomni.distributed.parallel_state import use_parallel_state
        from veomni.distributed.torch_parallelize import build_parallelize_model

        head = {} if self.value_head is None else {n: p.detach().clone() for n, p in self.value_head.named_parameters()}
        with use_parallel_state(parallel_state_of(self.layout, self.device.type)):
            build_parallelize_model(
                self.root,
                init_device="meta",
                basic_modules=sorted({type(module).__name__ for module in units}),
                mixed_precision=MixedPrecisionConfig(enable=False),  # the engine computes with a copy of its own
                enable_gradient_checkpointing=False,  # of which the engine has done its part
                should_skip_hf_weight_load=True,
            )
        for name, whole in head.items():  # VeOmni gave every parameter a new storage
            mine, index = part_and_place(self.root.value_head.get_parameter(name))
            mine.copy_(whole[index])

    def dimensions(self, t: DTensor) -> tuple[str, ...]:
        return ("replicate", "shard")[-t.device_mesh.ndim :]  # VeOmni's mesh has names of its own


class VeomniEngine(ShardedEngine):
    """A `ShardedEngine` of a model that VeOmni built and sharded."""

    _parts = VeomniModel, ShardedPasses


def parallel_state_of(layout: Layout, device_type: str) -> Any:
    """Return VeOmni's arrangement of the ranks. All ranks call this in the same order."""
    from veomni.distributed.parallel_state import init_parallel_state

    return init_parallel_state(
        dp_size=layout.data,
        dp_replicate_size=layout.replicate,
        dp_shard_size=layout.data // layout.replicate,
        ulysses_size=layout.sequence,
        device_type=device_type,
        name=None,
    )


def foundation_model(config: Any) -> Any:
    """Return VeOmni's model of a configuration, in float32 and without storage. Raise Refused for a family that was not
    compared with the single process."""
    from veomni.arguments import OpsImplementationConfig
    from veomni.models import build_foundation_model

    if line := families_fault(config.model_type):
        raise Refused(line)
    config._experts_implementation = "eager"  # VeOmni's experts choose by its operations, and refuse another value
    config.architectures = config.architectures or [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    plain = OpsImplementationConfig(attn_implementation="sdpa", **{f"{name}_implementation": "eager" for name in PLAIN})
    return build_foundation_model(config, torch_dtype="float32", init_device="meta", ops_implementation=plain)


def build(options: Options, context: EngineContext) -> TorchEngine:
    """Build this rank's engine of a folder, of which it reads its part. Raise Refused for one process, and for a folder
    without safetensors."""
    c = context
    if not dist.is_initialized() or c.layout.world_size == 1:
        raise Refused("model.engine=veomni wants several ranks: set cluster.ranks_per_node, or use model.engine=torch")
    found = open_skeleton(c.folder, needs_lm_head=c.head == "lm", make=foundation_model)
    if found is None:
        raise Refused(f"{c.folder}: model.engine=veomni reads safetensors; convert the folder, or use sharded")
    fill = open_adapter(c.adapter, c.folder, found.model).after(found.fill) if c.adapter else found.fill
    kind = partial(VeomniEngine, layout=c.layout, fill=fill)
    return build_torch(options, c, kind, model=found.model)
