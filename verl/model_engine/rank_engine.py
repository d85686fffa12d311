"""Build the engine of one rank among many, sharded, with a stage of the layers if the layout has stages; and that of
another role on the frozen base of a first one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist

from verl.errors import Refused
from verl.model_engine.adapter import open_adapter
from verl.model_engine.base import EngineContext
from verl.model_engine.hf_parts import open_skeleton
from verl.model_engine.options import Options
from verl.model_engine.pipeline import PipelinedEngine
from verl.model_engine.sharded import ShardedEngine, ShardedModel
from verl.model_engine.torch_engine import TorchEngine
from verl.model_engine.torch_engine import build as build_torch


def build(options: Options, context: EngineContext) -> TorchEngine:
    """Build this rank's engine of a folder, of which it reads its part. Weights that are not in safetensors files are
    read whole by every rank; during this, host memory has the float32 model once per rank."""
    if not dist.is_initialized():
        raise Refused(
            "model.engine=sharded wants one process per rank, and this process has no others: use model.engine=torch"
        )
    c, kind = context, PipelinedEngine if context.layout.pipeline > 1 else ShardedEngine
    trusted = c.trust_remote_code
    found = open_skeleton(c.folder, trust_remote_code=trusted, needs_lm_head=c.head == "lm", quantised=True)
    if found is None:
        return build_torch(options, c, partial(kind, layout=c.layout))
    fill = open_adapter(c.adapter, c.folder, found.model).after(found.fill) if c.adapter else found.fill
    return build_torch(options, c, partial(kind, layout=c.layout, fill=fill), model=found.model)


def build_rank_sibling(engine: TorchEngine, options: Options, context: EngineContext) -> TorchEngine:
    """Build this rank's engine of another role of the same folder. It gathers the frozen weights from the shards of the
    first engine. The two engines take turns, in the same order on all ranks."""
    c, lender = context, engine.local
    assert isinstance(lender, ShardedModel) and lender.lora and c.lora, "only the base of LoRA is shared"
    assert not engine.settings.offload, "offloaded weights have one owner"
    trusted = c.trust_remote_code
    found = open_skeleton(c.folder, trust_remote_code=trusted, needs_lm_head=c.head == "lm", quantised=True)
    stage, fill = PipelinedEngine if c.layout.pipeline > 1 else ShardedEngine, None if found is None else found.fill
    kind = partial(stage, layout=c.layout, lender=lender, fill=fill)
    options = replace(options, offload_frozen=False)  # the base stays where it is
    return build_torch(options, c, kind, model=found.model if found is not None else None)
