"""Hugging Face tensors inside Megatron-Core's parameters: the table of names, and the part that a rank has of each.

Megatron keeps the projections of queries, keys and values in one matrix, ordered by group of heads (all queries of a
group, its keys, its values), the gate above the up projection in another one, and every expert in parameters of its
own. A row of the table says where a tensor is; the same row reads weights, gradients and optimizer states, and writes
them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from verl.errors import Refused
from verl.model_engine.layout import Layout, RankPlace
from verl.names import did_you_mean

Way = Literal["whole", "rows", "columns", "q", "k", "v", "gate", "up", "experts in", "experts out"]
"""How a tensor is in a parameter: whole on every rank · rows or columns: tensor ranks share that dimension · q, k, v:
rows of a group of heads · gate, up: the first or the second half of a rank's rows · experts in, experts out: stacked
over experts, of which ranks share the rows of gate and of up, and the columns of down."""


class NameRow(NamedTuple):
    """One module of a layer, or of the model around the layers: its name here and there, without `.weight`."""

    hf: str
    megatron: str
    way: Way


AROUND = (
    NameRow("model.embed_tokens", "embedding.word_embeddings", "rows"),
    NameRow("model.norm", "decoder.final_layernorm", "whole"),
    NameRow("lm_head", "output_layer", "rows"),
)
NORMS = (
    NameRow("input_layernorm", "input_layernorm", "whole"),
    NameRow("post_attention_layernorm", "pre_mlp_layernorm", "whole"),
)
ATTENTION = (
    NameRow("self_attn.q_proj", "self_attention.linear_qkv", "q"),
    NameRow("self_attn.k_proj", "self_attention.linear_qkv", "k"),
    NameRow("self_attn.v_proj", "self_attention.linear_qkv", "v"),
    NameRow("self_attn.o_proj", "self_attention.linear_proj", "columns"),
)
HEAD_NORMS = (
    NameRow("self_attn.q_norm", "self_attention.q_layernorm", "whole"),
    NameRow("self_attn.k_norm", "self_attention.k_layernorm", "whole"),
)
MLP = (
    NameRow("mlp.gate_proj", "mlp.linear_fc1", "gate"),
    NameRow("mlp.up_proj", "mlp.linear_fc1", "up"),
    NameRow("mlp.down_proj", "mlp.linear_fc2", "columns"),
)
EXPERTS = (
    NameRow("mlp.gate", "mlp.router", "whole"),
    NameRow("mlp.experts.gate_up_proj", "mlp.experts.local_experts.{}.linear_fc1", "experts in"),
    NameRow("mlp.experts.down_proj", "mlp.experts.local_experts.{}.linear_fc2", "experts out"),
)
DENSE = (*NORMS, *ATTENTION, *MLP)
FAMILIES: Mapping[str, tuple[NameRow, ...]] = MappingProxyType(
    {
        "llama": DENSE,
        "mistral": DENSE,
        "qwen2": DENSE,
        "qwen3": (*DENSE, *HEAD_NORMS),
        "qwen3_moe": (*NORMS, *ATTENTION, *HEAD_NORMS, *EXPERTS),
    }
)
"""Model type -> the modules of one layer."""
IN_EXPERTS: Mapping[Way, int] = MappingProxyType({"experts in": 1, "experts out": 2})
"""The dimension of a stack [experts, out, in] that the ranks of one expert share."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_LAYER_OF_CHUNK = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    part: tuple[int, ...]
    """The shape of this rank's part."""
    sources: tuple[str, ...]
    """Megatron's parameters that have the part: one, or one per expert. Layers have their numbers in the model."""
    pick: Callable[[Tensor], Tensor]
    """Returns the view of a Megatron tensor (a weight, its gradient, its moments) that has the part."""
    split: int | None
    """The dimension that the tensor ranks share, or with `experts` the ranks that share an expert; None: every rank has
    the whole."""
    experts: bool
    """The tensor is stacked over experts, which the expert ranks share."""
    paired: bool = False
    """The rows are those of a gate above as many of an up projection, and each rank that shares an expert has a run of
    both: they are exchanged for a run of rows."""
    delivers: bool = True
    """False for the copy of a tied embedding on the last stage: the first stage delivers it."""

    def view(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the part, from tensors of the sources, without a copy unless it is of experts: heads of queries, keys
        or values as [groups, heads of a group, head_dim, ...], all else as [*part]."""
        return self.read(tensors) if self.experts else self.pick(tensors[0])

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the part [*part], from tensors of the sources. It shares their storage where its order is theirs."""
        if not self.experts:
            return self.pick(tensors[0]).reshape(self.part)
        return torch.stack([*tensors])

    def write(self, tensors: Sequence[Tensor], part: Tensor) -> None:
        """Copy the part [*part] into tensors of the sources."""
        if not self.experts:
            view = self.pick(tensors[0])
            assert view.ndim != part.ndim or view.shape == part.shape, f"{self.name}: {part.shape} is not {view.shape}"
            view.copy_(part.reshape(view.shape))
            return
        for tensor, one in zip(tensors, part, strict=True):
            tensor.copy_(one)


def layers_of_chunks(layers: int, layout: Layout, stage: int, virtual_stages: int) -> list[range]:
    """Return the layers of each chunk of a stage. The first chunks of all stages follow one another, then the second
    ones; all have as many layers."""
    each = layers // (layout.pipeline * virtual_stages)
    firsts = ((chunk * layout.pipeline + stage) * each for chunk in range(virtual_stages))
    return [range(first, first + each) for first in firsts]


def name_of_chunk(name: str, first: int) -> str:
    """Return the name of a chunk's parameter with the number that its layer has in the whole model. first: that of the
    chunk's first layer"""
    return _LAYER_OF_CHUNK.sub(lambda found: f"decoder.layers.{int(found[1]) + first}.", name)


def pieces_of(model: Any, layout: Layout, place: RankPlace, expert_tensor: int, here: Container[int]) -> list[Piece]:
    """Return this rank's parts of a model's tensors. model: a causal LM, without storage · expert_tensor: how many
    ranks share an expert · here: the layers of this rank's stage. Raise Refused for a family or a tensor that the table
    does not have."""
    config = model.config.get_text_config()
    rows = rows_of(config.model_type)
    first, last = place.pipeline == 0, place.pipeline == layout.pipeline - 1
    found = []
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, tensor in _tensors(model):
        layer = _LAYER.match(name)
        inner = layer[2] if layer else name
        row, leaf = _row(rows if layer else AROUND, inner, name, config.model_type)
        target = f"{row.megatron}.{leaf}"
        if layer:
            if int(layer[1]) not in here:
                continue
            target = f"decoder.layers.{layer[1]}.{target}"
        elif not (first if row.hf == "model.embed_tokens" else last):
            if row.hf == "model.embed_tokens" and tied and last:
                found.append(_piece(name, tensor.shape, row, leaf, "output_layer.weight", config, layout, 1, False))
            continue
        found.append(_piece(name, tuple(tensor.shape), row, leaf, target, config, layout, expert_tensor, True))
    return found


def delivered_once(stages: Sequence[Sequence[Piece]]) -> None:
    """Raise Refused if two stages would deliver, and save, the same tensor. stages: the pieces of each stage"""
    numbers = Counter(piece.name for pieces in stages for piece in pieces if piece.delivers)
    if twice := [name for name, number in numbers.items() if number > 1]:
        raise Refused(
            f"model.engine=megatron: {twice[0]} would be delivered by {numbers[twice[0]]} stages, and only one may: "
            "use model.engine=sharded"
        )


def rows_of(model_type: str) -> tuple[NameRow, ...]:
    """Return the modules of a layer of this family. Raise Refused for another family."""
    if model_type not in FAMILIES:
        hint = did_you_mean(model_type, FAMILIES)
        raise Refused(
            f"model.engine=megatron has no names of {model_type} models; {hint}it has those of {', '.join(FAMILIES)}: "
            "use model.engine=sharded"
        )
    return FAMILIES[model_type]


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    saved = {*model.state_dict()}
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _row(rows: Sequence[NameRow], inner: str, name: str, kind: str) -> tuple[NameRow, str]:
    """Return the row of a tensor, and the end of its name: weight or bias."""
    for row in rows:
        if row.way in IN_EXPERTS and inner == row.hf:
            return row, "weight"
        if inner in (f"{row.hf}.weight", f"{row.hf}.bias"):
            return row, inner.rpartition(".")[2]
    raise Refused(
        f"model.engine=megatron: {name} is not in the table of names of {kind} models: use model.engine=sharded"
    )


def _piece(
    name: str,
    shape: tuple[int, ...],
    row: NameRow,
    leaf: str,
    target: str,
    config: Any,
    layout: Layout,
    expert_tensor: int,
    delivers: bool,
) -> Piece:
    way: Way = "whole" if row.way == "columns" and leaf == "bias" else row.way
    if way in IN_EXPERTS:
        count, shared = shape[0] // layout.expert, IN_EXPERTS[way]
        part = (count, *(size // (expert_tensor if dim == shared else 1) for dim, size in enumerate(shape[1:], 1)))
        sources, paired = tuple(target.format(i) for i in range(count)), expert_tensor > 1 and way == "experts in"
        return Piece(name, tuple(shape), part, sources, _same, shared, experts=True, paired=paired)
    split = None if way == "whole" else 1 if way == "columns" else 0
    part = tuple(size // layout.tensor if dim == split else size for dim, size in enumerate(shape))
    pick = _pick_of(way, config)
    return Piece(name, tuple(shape), part, (target,), pick, split, experts=False, delivers=delivers)


def run_of_rows(parts: Sequence[Tensor], at: int) -> Tensor:
    """Return run `at` of the rows [experts, rows, in] of a gate above an up projection, from the parts of the ranks
    that share each expert: rows of the gate above as many of the other."""
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], 1).chunk(len(parts), 1)[at]


def run_of_halves(parts: Sequence[Tensor], at: int) -> Tensor:
    """Return part `at` of what `run_of_rows` made runs of."""
    return torch.cat([half.chunk(len(parts), 1)[at] for half in torch.cat([*parts], 1).chunk(2, 1)], 1)


def _same(t: Tensor) -> Tensor:
    return t


def _pick_of(way: Way, config: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that selects the elements of a tensor in a Megatron parameter, as a view of it."""
    if way in ("gate", "up"):
        half = 0 if way == "gate" else 1
        return lambda t: t.chunk(2)[half]
    if way not in ("q", "k", "v"):
        return _same
    queries = config.num_attention_heads // config.num_key_value_heads
    of_heads = {"q": slice(0, queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}[way]
    width = head_size(config)

    def heads(t: Tensor) -> Tensor:
        """Return the heads [groups, heads of a group, head_dim, ...] of a tensor [groups * all of a group, ...]."""
        return t.view(-1, queries + 2, width, *t.shape[1:])[:, of_heads]

    return heads


def head_size(config: Any) -> int:
    """Return the number of channels of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
