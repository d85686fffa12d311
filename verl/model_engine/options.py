"""The options of the torch engine. No torch: configuration and plan read this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from verl.model_engine.layout import Layout, use

TENSOR_PLANS = (
    *("arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_unified_text", "gpt_neox", "granite", "helium", "hrm_text", "hyperclovax", "internlm3", "iquestcoder"),
    *("jais2", "llama", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "phi"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "vaultgemma", "youtu"),
)
"""The model types that support parallel.tensor: transformers has a plan, and nn/tensor_parallel.py supports all its
styles (a test compares)."""

EXPERT_PLANS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""The model types that support parallel.expert: they have transformers' fused experts, and each was compared with one
process."""

EXPERT_FACTORS = (*EXPERT_PLANS, "qwen3_5_moe_text", "qwen3_next")
"""The model types with experts that can have factors of LoRA."""

NO_STAGES = ("gemma4_unified_text", "hrm_text", "nanochat", "nemotron", "olmoe")
PIPELINE_PLANS = tuple(kind for kind in sorted({*TENSOR_PLANS, *EXPERT_PLANS}) if kind not in NO_STAGES)
"""The model types that parallel.pipeline can cut into stages: transformers has a plan, and each was compared with the
whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """The options that move the state of a model off the device between two uses."""

    offload_weights: bool = False
    """Weights of trained models are on the device only while they are used; otherwise an accelerator's are in host
    memory, and a CPU's in a file below TMPDIR."""
    offload_optimizer: bool = False
    """The same for optimizer states."""
    offload_frozen: bool = False
    """The same for weights of models that are not trained (reference, teacher, reward model)."""

    def offload(self, *, trained: bool) -> tuple[Literal["weights", "optimizer"], ...]:
        """Return the parts of a model's state that leave the device."""
        weights = self.offload_weights if trained else self.offload_frozen
        return (*(("weights",) if weights else ()), *(("optimizer",) if trained and self.offload_optimizer else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Offloading):
    """The options of the torch engine."""

    attention: Literal["auto", "padded"] = "auto"
    """auto: the best packed attention for the device · padded: one row per sequence, the reference implementation."""
    compile: bool = False
    """Decoder layers are compiled by torch.compile, all but their attention; only the families whose kernels are chosen
    by verl's table otherwise (llama, mistral, qwen2, qwen3)."""
    max_skipped_updates: Annotated[int, Meta(ge=0)] = 3
    """How many non-finite gradients in a row are skipped, each with its batch written to disk, before the run stops."""
    share_prefix: bool = True
    """In training a prompt is computed once per group and micro-batch."""


def cannot(layout: Layout) -> Iterator[str]:
    """Yield a line for each property of a layout that the sharded engine does not support."""
    if layout.shard % layout.expert:
        message = f"parallel.expert={layout.expert} does not divide the {layout.shard} ranks that hold one copy"
        tensor = ", over tensor ranks with model.engine=megatron alone" if layout.tensor > 1 else ""
        yield f"{message}, over which experts are spread{tensor}: {use(layout.shard)}"


def image_faults(layout: Layout, what: str, *, mutual: bool) -> Iterator[str]:
    """Yield a line for each property of a layout that a model which reads images cannot have. mutual: the tokens of an
    image attend to each other."""
    if mutual and layout.tokens > 1:
        why = f"{what} has images whose tokens attend to each other, and ranks would divide them"
        yield f"parallel.{layout.tokens_key}={layout.tokens}: {why}; use parallel.{layout.tokens_key}=1"
    for name, size in (("tensor", layout.tensor), ("pipeline", layout.pipeline), ("expert", layout.expert)):
        if size > 1:
            why = "its ranks divide language models alone"
            ways = "parallel.replicate" if mutual else "parallel.replicate, parallel.sequence or parallel.context"
            fix = f"use parallel.{name}=1: ranks share it by FSDP, with {ways} too"
            yield f"parallel.{name}={size}: {what} reads images, and {why}; {fix}"
