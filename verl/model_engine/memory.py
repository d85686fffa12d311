"""The memory of one rank of a model, by item, for the plan of a run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from verl.accel.devices import device_facts
from verl.accel.families import FUSED_TYPES
from verl.config.model_files import ModelFacts
from verl.model_engine.layout import Layout, layers_of_stages
from verl.model_engine.optimizer_table import optimizer_bytes

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float32": 4})
MATRIX_BYTES: Mapping[str, float] = MappingProxyType(
    {"none": 4.0, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1 + 4 / 1024}
)
"""Bytes of a value of a frozen matrix, with its scales. int8: for rows of 1024 values."""
LOGPROB_COPIES = 2
"""Arrays of the size of a chunk of logits that exist at once where torch's operations read it: the logits, which become
their gradient in place, and their exponentials. Some models and algorithms need a further one (`logprob_copies` in
planner/memory.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The properties of a rank's work on which its memory depends."""

    tokens: int
    """Tokens of a micro-batch on this rank."""
    longest: int = 0
    """Tokens of the longest row."""
    passes: int = 1
    """Micro-batches of a step; a pipeline stage has as many at once as there are stages from this one on."""
    stage: int = 0
    device: str = "cpu"
    """The type of its device."""
    dtype: str = "float32"
    """The dtype that it computes in; masters are float32."""
    checkpointing: str = "none"
    """The part of a layer that is computed again in the backward pass: none, selective or full."""
    float32_head: bool = False
    """The head is multiplied in float32 (`model.head_dtype`)."""
    logit_copies: int = LOGPROB_COPIES
    """Float32 arrays of the size of a chunk of logits that exist at once where torch's operations read it."""
    compares_logits: bool = False
    """Whole distributions are compared with a teacher's: by torch's operations, on every device."""
    head: bool = True
    """The model has a language-model head: a policy or a teacher. Critics and reward models have none."""
    trains: bool = True
    optimizer: str = "adamw"
    """A row of optimizer_table.py."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    factors: int | None = None
    """The values in the factors of LoRA, which alone are trained; None: all weights are trained."""
    frozen: int = 0
    """The values that are not trained, though LoRA trains no factors: those of parts of a model that reads images."""
    frozen_outside: int = 0
    """Those in embeddings and heads among them."""
    expert_factors: int = 0
    """Those of experts among them, which tensor ranks do not divide."""
    factors_rank: int = 0
    """The rank of those factors."""
    saved: int = 0
    """The values in weights that are trained whole beside the factors."""
    saves_head: bool = False
    """The output head is among them."""
    borrows: bool = False
    """The frozen weights are those of another role of the rank."""
    quantisation: str = "none"
    """The format of the frozen matrices in layers: none (float32), nf4 or int8."""
    publishes: bool = False
    """The weights are published: they are gathered one by one."""
    tower_bytes: int = 0
    """Bytes that a pass keeps of the tower that encodes its images; 0 if no gradient flows through it."""
    tower_layer_bytes: int = 0
    """Bytes that one layer of that tower computes in a pass."""
    virtual_stages: int = 1
    """Chunks of layers of a stage, of which passes go through one after the other."""
    expert_tensor: int = 1
    """Ranks that share the matrices of an expert."""
    divides_states: bool = True
    """Data ranks that hold whole weights divide the optimizer's states (Megatron's distributed optimizer)."""


def quantised_values(model: ModelFacts) -> int:
    """Return the number of values that are quantised in a frozen base: those of layers, without experts."""
    return layer_parameters(model) * model.layers - model.expert_parameters


def layer_parameters(model: ModelFacts) -> int:
    """Return the parameters of a layer of the language model, with a share of those outside of layers."""
    return (model.body_parameters - model.embedding_parameters - model.encoder_parameters) // model.layers


def copies_weights(work: RankWork) -> bool:
    """Return True if the model computes with a bfloat16 copy of its weights (compute_copy.py, sharded_copy.py) in place
    of autocast."""
    return device_facts(work.device).copies_weights and work.dtype == "bfloat16"


def chunk_bytes(work: RankWork, vocab: int) -> int:
    """Return the bytes of a chunk of logits over so many ids, with the arrays of its size beside it. The kernels of a
    CUDA device (`logit_sums`, `logit_gradients`) make none: they read the product in its dtype, and write the gradient
    in its place."""
    values = vocab * min(work.tokens, device_facts(work.device).chunk_rows(vocab))
    if work.device == "cuda" and not work.compares_logits:
        return values * (4 if work.float32_head else DTYPE_BYTES[work.dtype])
    return 4 * values * work.logit_copies


def residual_bytes_per_token(model: ModelFacts, work: RankWork) -> int:
    """Return the bytes of the residual stream per token: float32 under autocast, since embeddings are not cast."""
    return (2 if copies_weights(work) else 4) * model.hidden


def layer_bytes_per_token(model: ModelFacts, layout: Layout, work: RankWork, how: str = "none") -> int:
    """Return the bytes that one decoder layer keeps per token for its backward pass, if it computes again what `how`
    names.

    full: its input alone · selective: also the results of seven products and of attention · none: the arguments of two
    norms, q, k, v before and after norm and rotation, the attention's output, gate and up, and where the device keeps
    them, or the family is not fused, also the results of norms and gates. Unfused, and under autocast, that is within
    15% of Qwen2 and Llama."""
    residual, size, tensor = residual_bytes_per_token(model, work), DTYPE_BYTES[work.dtype], layout.tensor
    q, kv, wide = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim, model.intermediate
    if how == "full":
        return residual
    if how == "selective":
        return residual + size * (2 * model.hidden + (2 * q + kv + 2 * wide) // tensor)
    copies = copies_weights(work)
    fused, again = model.model_type in FUSED_TYPES, device_facts(work.device).recomputes
    if fused and (copies or work.dtype == "float32") and (work.checkpointing == "none" or not again):
        norms = 2 if again and tensor == 1 else 4  # slices of a layer take their input through a node of its own
        return size * (norms * model.hidden + (3 * q + 3 * kv // 2 + (2 if again else 3) * wide) // tensor)
    arrays = 2 * model.hidden + (2 * (q + kv) + q + 4 * wide) // tensor
    return size * arrays + (2 * size if copies else 4 * 4) * model.hidden


def memory(model: ModelFacts, layout: Layout, work: RankWork) -> dict[str, int]:
    """Return the bytes of one rank by item. Items that a phase does not use are not held in it (planner/memory.py)."""
    share = _Share(model, layout, work)
    copies = copies_weights(work)
    residual = residual_bytes_per_token(model, work)
    kept, waits = (layer_bytes_per_token(model, layout, work, how) for how in ("none", work.checkpointing))
    working = DTYPE_BYTES[work.dtype] * (2 * model.hidden + 4 * model.intermediate // layout.tensor)
    if layout.context > 1:  # keys and values of the tokens of all ranks
        keys = 2 * model.kv_heads * model.head_dim // layout.tensor
        kept += layout.context * keys * DTYPE_BYTES[work.dtype]
        waits += layout.context * keys * DTYPE_BYTES[work.dtype] * (work.checkpointing == "none")
    whole = DTYPE_BYTES["bfloat16" if copies else "float32"]  # bytes of a gathered weight
    items = {
        "weights": (4 + 2 * copies * (not share.gathers)) * share.own
        + int(MATRIX_BYTES[work.quantisation] * share.codes),
        "compute copy of shards": 2 * copies * share.gathers * share.weights,  # in passes only
        "gathered embeddings": whole * share.outside // 4,
        # one layer beside the buffer of this or the next gathering: FSDP copies what only this rank has
        "gathered layers": max(
            whole * share.gathers * (1 + share.cut) * share.dense // 4
            + whole * share.gathers * (1 + share.experts_cut) * share.experts // 4,
            whole * share.gathers * model.encoder_gathered,  # before the layers of the language model
        ),
        # of the previous gathering, until the next ended
        "kept buffer": whole * share.cut * max(share.outside, share.dense) // 4,
        "layer's compute copy": share.half * (share.dense + share.experts) // 4,
        "inference activations": work.tokens * (kept + 2 * residual),
        "image tower's layer": work.tower_layer_bytes,  # before the layers of the language model
    }
    if work.head and work.stage == layout.pipeline - 1:
        vocab = -(-model.vocab // layout.tensor)
        trains_head = work.factors is None or work.saves_head
        items["log-prob chunk"] = chunk_bytes(work, vocab)
        product = 0 if work.float32_head else share.half or 4 * copies  # of a chunk, before it is added in float32
        items["head's gradient"] = (4 + product) * vocab * model.hidden * (work.trains and trains_head)
        cast = 4 * (work.dtype == "bfloat16") if work.float32_head else share.half  # bytes of a weight in the product
        items["head's compute copy"] = cast * vocab * model.hidden
    if work.publishes:
        # tensors are collected one by one and joined; later stages receive those of the first
        several = layout.shard * layout.tensor > 1 and work.stage == 0
        # a rank that gathers nothing and trains factors makes only what it merges, a layer's; others have the head too
        whole_head = model.vocab * model.hidden * bool(share.gathers or work.factors is None)
        largest = 4 * max(whole_head, share.layer)
        # over data ranks first: the part of a tensor rank, from which all parts are collected
        part = largest // layout.tensor * (several and min(layout.shard, layout.tensor) > 1)
        items["largest whole weight"] = (1 + several) * largest + part
        # kept between publishes; each rank merges its parts of the weights with them
        items["gathered factors"] = 4 * share.gathers * share.factors
    return items | (_training(share, kept, waits, working, residual) if work.trains else {})


class _Share:
    """The part of a model that one rank holds and gathers. Sizes of tensors are in bytes of float32."""

    def __init__(self, model: ModelFacts, layout: Layout, work: RankWork) -> None:
        self.layout, self.work, tensor = layout, work, layout.tensor
        self.layer, encoder = layer_parameters(model), model.encoder_parameters
        self.model_layers = model.layers
        self.layers = len(layers_of_stages(model.layers, layout.pipeline)[work.stage])
        whole = model.parameters if work.head else model.body_parameters
        root = outside_layers(model, layout, whole - encoder - self.layer * model.layers, work.stage)
        sparse = model.expert_parameters // model.layers  # per layer: experts are not divided by tensor ranks
        count, rest = self.layer * self.layers + root + encoder, sparse * self.layers
        self.weights = (count - rest) // (layout.shard * tensor) + rest // layout.shard
        outside = root // (layout.shard * tensor)
        still, still_outside = (n // (layout.shard * tensor) for n in (work.frozen, work.frozen_outside))
        self.trained, rest_outside = self.weights - still, max(0, outside - still_outside)
        self.states = _states_bytes(work, max(0, self.trained - rest_outside), rest_outside, model.hidden)
        codes = (self.layer - sparse) * self.layers * (work.quantisation != "none")  # on one rank alone
        self.factors = (work.factors or 0) * self.layers // model.layers
        self.saved = -(-work.saved // (layout.shard * tensor))  # at both ends of a pipeline: embedding or head
        if work.factors is not None:
            of_experts = work.expert_factors * self.layers // model.layers
            self.trained = -(-(self.factors - of_experts) // (layout.shard * tensor)) - (-of_experts // layout.shard)
            self.states = _states_bytes(work, self.trained, self.saved, work.factors_rank)
            self.weights += self.trained + self.saved  # the values of the start are kept
            self.trained += self.saved
        self.own, self.codes = (self.trained + self.saved, 0) if work.borrows else (self.weights - codes, codes)
        self.gathers, self.cut = int(layout.world_size > 1), layout.shard > 1
        self.outside, self.dense = 4 * root // tensor * self.gathers, 4 * (self.layer - sparse) // tensor
        self.experts, self.experts_cut = 4 * sparse // layout.expert, layout.shard > layout.expert
        if layout.expert == 1:
            self.dense, self.experts = self.dense + self.experts, 0
        by_autocast = work.dtype == "bfloat16" and not copies_weights(work)
        self.half = DTYPE_BYTES[work.dtype] * by_autocast  # bytes of a weight's copy, if a pass makes one


def _training(share: _Share, kept: int, waits: int, working: int, residual: int) -> dict[str, int]:
    """Return the items of a rank that is trained, from bytes per token: of a layer that is computed again, of one that
    waits for its backward pass, of the gradients inside a layer, and of the residual."""
    layout, work = share.layout, share.work
    outside, gathered = share.outside, max(share.dense, share.experts)  # the weights with gradients that are sent
    if work.factors is not None:  # those of the other weights are not computed
        outside, gathered = 4 * share.gathers * work.saved // layout.tensor, 4 * work.factors // share.model_layers
    again = work.checkpointing != "none"  # one layer after the other is computed again, and freed
    through = share.layers * waits + (kept if again else working)
    # sending, in transfer, receiving; a critic's last stage computes no logits, tied or not
    reduced = (3 * outside + share.cut * outside // layout.shard) * (work.stage == 0 or work.head)
    copies = share.half * (1 if again else share.layers) * (share.dense + share.experts) // 4
    activations = work.tokens * (through + 2 * residual)
    waiting = activations + copies * (not again)  # of one pass, until its backward pass
    flying = min(layout.pipeline - work.stage, work.passes)
    apart = layout.replicate > 1 and work.passes > 1
    # no gradients exist beside the first backward pass; those of the only one take the place of what it has used
    not_yet = min(4 * share.trained, waiting) * (work.passes == flying)
    alone = flying == 1
    return {
        "optimizer states": share.states,
        "gradients": 4 * share.trained,
        # as computed, and in the buffer from which they are sent
        "gathered gradients": share.gathers * 2 * gathered,
        "reduced embeddings": reduced,
        # of earlier passes, summed over the ranks of one copy of the model: they are freed layer by layer, while the
        # last pass makes the gradients and sums them over the copies. Two layers are under way at once
        "gradients of one copy": 2 * max(outside, gathered) // layout.shard * apart,
        "compute copy of weights": copies,
        "activations": activations - not_yet * alone,
        "image tower's activations": work.tower_bytes,
        "waiting passes": (flying - 1) * waiting
        - not_yet * (not alone),  # kept for the backward passes of the earlier ones
    }


def _states_bytes(work: RankWork, matrices: int, others: int, short_side: int) -> int:
    """Return the bytes of the optimizer's states for so many values in matrices of layers and elsewhere."""
    return optimizer_bytes(
        work.optimizer, work.optimizer_options, matrices=matrices, others=others, short_side=short_side
    )


def outside_layers(model: ModelFacts, layout: Layout, root: int, stage: int) -> int:
    """Return a stage's parameters that belong to no layer and are gathered for a whole pass. root: those of the whole
    model: embeddings on the first stage, last norm and head on the last, tied ones on both."""
    first, last = stage == 0, stage == layout.pipeline - 1
    embeddings = model.embedding_parameters if first or (last and model.tied) else 0
    return embeddings + (root - model.embedding_parameters if last else 0)
