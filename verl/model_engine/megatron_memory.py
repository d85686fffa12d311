"""The memory of one rank of Megatron-Core, by item, for the plan: equal stages, whole weights and one buffer of their
gradients on each data rank, and the activations of its own layers. No torch."""

from __future__ import annotations

from verl.config.model_files import ModelFacts
from verl.model_engine.layout import Layout
from verl.model_engine.memory import RankWork, chunk_bytes, layer_parameters, outside_layers


def megatron_memory(model: ModelFacts, layout: Layout, work: RankWork) -> dict[str, int]:
    """Return the bytes of one rank by item, as `memory` does for the other engines."""
    of_experts = layout.expert * work.expert_tensor
    layers, last = model.layers // layout.pipeline, work.stage == layout.pipeline - 1
    sparse = model.expert_parameters // model.layers
    whole = model.parameters if work.head else model.body_parameters
    layer = layer_parameters(model)
    outside = outside_layers(model, layout, whole - layer * model.layers, work.stage) // layout.tensor
    dense, experts = layers * (layer - sparse) // layout.tensor + outside, layers * sparse // of_experts
    size = 2 if work.dtype == "bfloat16" and work.device != "cpu" else 4  # products on a CPU have float32 operands
    kept, waits = (layer_bytes(model, layout, work, size, how) for how in ("none", work.checkpointing))
    copies = 2 * (dense + experts) if size == 2 else 0  # of autocast, of each weight in a pass
    width = 4 * model.hidden
    items = {
        "weights": 4 * (dense + experts),
        "compute copy of weights": copies,
        "inference activations": work.tokens * (kept + 2 * width),
    }
    if work.head and last:
        vocab = model.vocab // layout.tensor
        items["log-prob chunk"] = chunk_bytes(work, vocab)
        items["head's gradient"] = 4 * vocab * model.hidden * work.trains
    if work.publishes:
        largest = max(model.vocab * model.hidden, layer)
        items["largest whole weight"] = (1 + (layout.tensor > 1)) * 4 * largest  # parts are joined
    if not work.trains:
        return items
    activations = work.tokens * (layers // work.virtual_stages * waits + 2 * width)  # of a pass in one chunk
    again = work.tokens * kept * (work.checkpointing != "none")  # of the layer that is computed again
    over, over_experts = (layout.data, layout.data * layout.tensor // of_experts) if work.divides_states else (1, 1)
    waiting = (_flying(layout, work) - 1) * activations
    exchanged = 4 * max(dense, experts)
    if work.virtual_stages > 1:  # a buffer per chunk, one after the other, when no pass waits
        exchanged = max(0, 4 * max((dense - outside) // work.virtual_stages + outside, experts) - waiting)
    return items | {
        "gradient buffer": 4 * (dense + experts),
        "optimizer states": 8 * (dense // over + experts // over_experts),
        "gradients": 0,  # they are in the buffer from the start
        # gloo sums the parts of data ranks in a copy of the whole buffer; NCCL has none
        "exchanged gradients": exchanged * (work.divides_states and work.device == "cpu"),
        "activations": activations + again,
        "waiting passes": waiting,
    }


def _flying(layout: Layout, work: RankWork) -> int:
    """Return how many passes through a chunk wait for their backward passes at once, the present one among them."""
    chunks, stages = work.virtual_stages, layout.pipeline
    if chunks == 1:
        return min(stages - work.stage, work.passes)
    passes = -(-work.passes // stages) * stages  # those that are added are counted as the others
    return min(2 * (stages - work.stage - 1) + (chunks - 1) * stages + 1, passes * chunks)


def layer_bytes(model: ModelFacts, layout: Layout, work: RankWork, size: int, how: str) -> int:
    """Return the bytes that one layer keeps per token for its backward pass, if it computes again what `how` names:
    none, selective (attention's scores) or full. size: the bytes of an operand of a product.

    Of each norm its input, the same divided by its root mean square, and its output; of the MLP both halves, the gate's
    activation and the product; queries before and after norm and rotation, keys and values repeated for every head, and
    the scores of each row, so the longest row counts."""
    wide, q, kv = 4 * model.hidden, model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    if how == "full":
        return wide // layout.tensor
    normed = model.model_type.startswith("qwen3")  # queries and keys
    heads = q + kv + normed * (2 * q + kv // 2)
    heads += 2 * q + kv // 2 if how == "selective" else 4 * q + model.heads * work.longest
    casts = 2 * size * model.hidden * (size != 4)
    return (6 * wide + casts + size * (5 * model.intermediate + heads)) // layout.tensor
