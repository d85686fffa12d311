"""A model of Megatron-Core on one rank: its chunks of layers, with names and values of Hugging Face tensors.

A skeleton of the transformers model, without storage, has names, shapes and configuration. The weights are in
Megatron's parameters, and the table of names (megatron_names.py) says where."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.checkpoint.score import WEIGHT as SCORE_WEIGHT
from verl.errors import Refused
from verl.model_engine.base import WeightPart
from verl.model_engine.layout import Layout
from verl.model_engine.megatron_names import (
    Piece,
    delivered_once,
    head_size,
    layers_of_chunks,
    name_of_chunk,
    pieces_of,
    run_of_halves,
    run_of_rows,
)
from verl.model_engine.megatron_options import (
    INSTEAD,
    ROPE_TYPES,
    Options,
    divisions_refused,
    layer_windows,
    properties_refused,
    sizes_refused,
)
from verl.model_engine.megatron_shims import computing_on, quiet
from verl.model_engine.meshes import arranged, patience
from verl.model_engine.pipeline import StageModel, column_of
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sharded import Fill
from verl.nn.heads import ValueHead
from verl.nn.linear_logprob import Vocabulary
from verl.nn.torch_compat import all_gather_single

BATCH_NAMES = 32
"""How many tensors are read from the files at a time."""


def begin_ranks(layout: Layout, options: Options) -> None:
    """Create Megatron's process groups of this process, once. Raise Refused if it has those of another layout."""
    from megatron.core import parallel_state as ranks

    sizes = (layout.tensor, layout.pipeline, layout.expert, options.virtual_stages, options.expert_tensor)
    if ranks.model_parallel_is_initialized():
        found = (
            ranks.get_tensor_model_parallel_world_size(),
            ranks.get_pipeline_model_parallel_world_size(),
            ranks.get_expert_model_parallel_world_size(),
            ranks.get_virtual_pipeline_model_parallel_world_size() or 1,
            ranks.get_expert_tensor_parallel_world_size(),
        )
        if found != sizes:
            raise Refused(
                f"model.engine=megatron: the ranks of this process are divided by {found} (tensor, pipeline, expert, "
                f"chunks, expert tensor), and {sizes} are wanted: use one layout for all models"
            )
        return
    ranks.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(options),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=options.expert_tensor,
        distributed_timeout_minutes=math.ceil(patience().total_seconds() / 60),
        create_gloo_process_groups=False,
    )


def _virtual(options: Options) -> int | None:
    """Return the number of chunks of a stage, as Megatron has it: None for one, which selects another schedule."""
    return options.virtual_stages if options.virtual_stages > 1 else None


def transformer_config(config: Any, settings: EngineSettings, layout: Layout, options: Options) -> Any:
    """Return Megatron's configuration of a model and of its schedule. config: of transformers."""
    from megatron.core.transformer import TransformerConfig

    biased = bool(getattr(config, "attention_bias", False)), bool(getattr(config, "mlp_bias", False))
    recompute: dict[str, dict[str, Any]] = {"selective": {"recompute_granularity": "selective"}}
    recompute["full"] = {"recompute_granularity": "full", "recompute_method": "uniform"} | {"recompute_num_layers": 1}
    (window,) = layer_windows(config.to_dict())
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type.startswith("qwen3"),
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=all(biased),
        add_qkv_bias=config.model_type == "qwen2" or biased[0],
        window_size=None if window is None else (window - 1, 0),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(options),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=options.expert_tensor,
        sequence_parallel=layout.tensor > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False,
        calculate_per_token_loss=True,  # gradients are summed: the weights of a step hold its one division
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        perform_initialization=False,  # all weights are read
        use_cpu_initialization=settings.device == "cpu",
        **_experts(config),
        **recompute.get(settings.gradient_checkpointing, {}),
    )


def _experts(config: Any) -> dict[str, Any]:
    """Return the settings of experts; empty for a model without them."""
    if not getattr(config, "num_experts", None):
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
    }


def norm(config: Any, hidden_size: int, eps: float) -> nn.Module:
    """Build an RMSNorm; Megatron's own one without Transformer Engine refuses sequence parallelism, in which its
    gradient is summed over the tensor ranks, since each has other tokens."""
    made = nn.RMSNorm(hidden_size, eps=eps)
    made.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


def build_chunk(model: Any, config: Any, here: range, number: int) -> Any:
    """Build a chunk of layers, with the embeddings before the model's first one and the head after its last one. model:
    of transformers, without storage · config: Megatron's · here: the layers · number: of the chunk in its stage"""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    text = model.config.get_text_config()
    layer = get_gpt_layer_local_spec(config.num_moe_experts, False, config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    chunk = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * len(here), layer_norm=norm),
        vocab_size=text.vocab_size,
        max_sequence_length=text.max_position_embeddings,
        pre_process=here.start == 0,
        post_process=here.stop == config.num_layers,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=None if config.virtual_pipeline_model_parallel_size is None else number,
    )
    rope = model.base_model.rotary_emb
    if rope.rope_type not in ROPE_TYPES or rope.attention_scaling != 1.0:
        has = f"rope_type={rope.rope_type} scales attention by {rope.attention_scaling:g}"
        raise Refused(f"model.engine=megatron: {has}; it has {', '.join(ROPE_TYPES)}, unscaled: {INSTEAD}")
    chunk.rotary_pos_emb.inv_freq = rope.inv_freq.clone().float()
    padding = model.get_input_embeddings().padding_idx
    if here.start == 0 and padding is not None:
        chunk.embedding.register_forward_hook(partial(_without_padding, padding=padding), with_kwargs=True)
    return chunk


def _without_padding(_: nn.Module, args: object, given: Mapping[str, Any], out: Tensor, *, padding: int) -> Tensor:
    """Stop the gradient to the row of the padding id in the embeddings [s, b, h], as transformers does."""
    from megatron.core import parallel_state as ranks

    ids = given["input_ids"].T
    if len(ids) != len(out):  # each tensor rank has other tokens
        ids = ids.chunk(ranks.get_tensor_model_parallel_world_size())[ranks.get_tensor_model_parallel_rank()]
    return torch.where((ids == padding)[..., None], out.detach(), out)


class MegatronModel(StageModel):
    """This rank's part of a model. model: of transformers, without storage · fill: reads parts of its tensors"""

    def __init__(self, model: Any, settings: EngineSettings, layout: Layout, options: Options, fill: Fill) -> None:
        text = model.config.get_text_config()
        given, what = text.to_dict(), f"the {text.model_type}"
        sizes = sizes_refused(layout, options, given, what)
        for line in chain(divisions_refused(layout, options), sizes, properties_refused(given, what)):
            raise Refused(line)
        if settings.dtype == "float64" or settings.lora is not None or settings.freeze:
            raise Refused("model.engine=megatron trains all weights, in float32 or bfloat16: use model.engine=sharded")
        self.model, self.settings, self.device = model, settings, torch.device(settings.device)
        self.layout, self.place, self.suffix = layout, layout.place(dist.get_rank()), f"_rank{dist.get_rank()}"
        self.hidden_size, self.row_limit, self.lora = text.hidden_size, None, None
        self.stage, self.last_stage = self.place.pipeline, layout.pipeline - 1
        self.column = column_of(layout, range(layout.pipeline))
        self.value_head = self._value_head()
        self.seen: Callable[[Tensor], Tensor] = _identity
        """Returns a weight where it is: the engine's, which may offload it."""
        self.options = options
        self.meshes_of_parts = _meshes(layout, options.expert_tensor, self.device.type, None)
        chunks = [
            layers_of_chunks(text.num_hidden_layers, layout, stage, options.virtual_stages)
            for stage in range(layout.pipeline)
        ]
        stage_of = {layer: stage for stage, here in enumerate(chunks) for layer in chain.from_iterable(here)}
        here = self.layers_of_chunks = chunks[self.stage]
        every = [
            pieces_of(model, layout, replace(self.place, pipeline=stage), options.expert_tensor, {*chain(*of)})
            for stage, of in enumerate(chunks)
        ]
        delivered_once(every)
        self.pieces = {p.name: p for p in every[self.stage]}
        with quiet(), computing_on(self.device):
            begin_ranks(layout, options)
            self.megatron = transformer_config(text, settings, layout, options)
            made = (build_chunk(model, self.megatron, layers, number) for number, layers in enumerate(here))
            self.chunks = nn.ModuleList(chunk.to(self.device) for chunk in made)
        if self.value_head is not None and self.is_last:
            self.chunks[-1].value_head = self.value_head.to(self.device)
        self.parameters = {
            name_of_chunk(name, layers.start): p
            for chunk, layers in zip(self.chunks, here, strict=True)
            for name, p in chunk.named_parameters()
        }
        self._know_the_whole({name: self._stage_of(name, stage_of) for name, _ in _named(model)})
        for p in self.parameters.values():
            p.requires_grad_(settings.optim is not None)
        self._read(fill)
        self.chunks.train(settings.optim is not None)
        self.vocabulary = self._slice() if layout.tensor > 1 else None

    def _value_head(self) -> ValueHead | None:
        s = self.settings
        if s.head == "lm":
            return None
        made = ValueHead(self.hidden_size, bias=s.head == "value")
        if s.score is not None:
            made.weight.data.copy_(s.score)
        return made

    def _stage_of(self, name: str, of_layer: Mapping[int, int]) -> int:
        if name.startswith("model.layers."):
            return of_layer[int(name.split(".")[2])]
        return 0 if name.startswith("model.embed_tokens.") else self.last_stage

    @torch.no_grad()
    def _read(self, fill: Fill) -> None:
        """Read this rank's parts from the files, some at a time."""
        names = list(self.pieces)
        for start in range(0, len(names), BATCH_NAMES):
            self._read_some([self.pieces[name] for name in names[start : start + BATCH_NAMES]], fill)
        missing = {*self.parameters} - {s for p in self.pieces.values() for s in p.sources}
        left = [name for name in missing if not name.startswith("value_head.")]
        if left:
            raise Refused(f"model.engine=megatron: the folder has no tensor for {left[0]}: use model.engine=sharded")

    def _read_some(self, some: Sequence[Piece], fill: Fill) -> None:
        """Read the parts of these pieces, which are released before the next ones are made."""
        read = {p.name: self.wrapped(p, torch.empty(p.part)) for p in some}
        fill(read)
        for piece in some:
            self.write(piece, read[piece.name].to_local())

    def sources(self, piece: Piece, of: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """Return the tensors that have a piece, among these tensors by Megatron's names; None: the weights, in host
        memory while they are offloaded."""
        if of is None:
            return [self.seen(self.parameters[name].detach()) for name in piece.sources]
        return [of[name].detach() for name in piece.sources]

    def wrapped(self, piece: Piece, part: Tensor, meshes: Sequence[DeviceMesh] | None = None) -> Any:
        """Return the whole tensor of a piece, of which this rank has this part."""
        weights, experts = self.meshes_of_parts if meshes is None else meshes
        mesh = experts["replica", "expert", "expert_tensor"] if piece.experts else weights["data", "tensor"]
        placements = [Replicate(), Replicate() if piece.split is None else Shard(piece.split)]
        placements[1:1] = [Shard(0)] * piece.experts
        stride = torch.empty(piece.shape, device="meta").stride()
        given: Any = {"run_check": False, "shape": torch.Size(piece.shape), "stride": stride}
        return DTensor.from_local(part.contiguous(), mesh, placements, **given)

    def part(self, piece: Piece, of: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return this rank's part of a tensor, from the weights or from other tensors by Megatron's names. The ranks
        that share an expert call this together."""
        mine = piece.read(self.sources(piece, of))
        return self._exchanged(mine, run_of_rows) if piece.paired else mine

    def write(self, piece: Piece, part: Tensor, of: Mapping[str, Tensor] | None = None) -> None:
        """Write this rank's part of a tensor, as `part` returns it, into the weights or into other tensors by
        Megatron's names. The ranks that share an expert call this together."""
        part = part.to(self.device)
        piece.write(self.sources(piece, of), self._exchanged(part, run_of_halves) if piece.paired else part)

    def _exchanged(self, mine: Tensor, of: Callable[[Sequence[Tensor], int], Tensor]) -> Tensor:
        """Return what `of` selects for this rank of the parts of all ranks that share an expert, where this part is."""
        sent, mesh = mine.to(self.device).contiguous(), self.meshes_of_parts[1]["expert_tensor"]
        every = [torch.empty_like(sent) for _ in range(self.options.expert_tensor)]
        dist.all_gather(every, sent, group=mesh.get_group())
        return of(every, mesh.get_local_rank()).to(mine.device)

    def _view(self, piece: Piece) -> Tensor:
        """Return this rank's part of a weight as `Piece.view` has it."""
        return piece.view(self.sources(piece))

    def _slice(self) -> Vocabulary:
        from megatron.core import parallel_state as ranks

        group, size = ranks.get_tensor_model_parallel_group(), self.layout.tensor

        def gather(x: Tensor) -> Tensor:
            out = x.new_empty(size * len(x), *x.shape[1:])
            all_gather_single(out, x.contiguous(), group=group)
            return out.view(size, *x.shape)

        each = self.model.config.get_text_config().vocab_size // size
        return Vocabulary(
            each * self.place.tensor, _identity, gather
        )  # the gradient is summed where tokens are gathered

    def head_weight(self) -> Tensor:
        """Return this rank's slice of the head [V, H]; the last stage has it."""
        last: Any = self.chunks[-1]
        tied: bool = last.share_embeddings_and_output_weights
        found: Tensor = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        return found

    # -- what is trained, and published --------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        return [p.detach() for p in self.parameters.values()]

    def masters(self) -> dict[str, Tensor]:
        return {name: piece.read(self.sources(piece)) for name, piece in self.pieces.items()}  # one rank alone asks

    def trained_pieces(self) -> dict[str, Piece]:
        """Return the pieces of this stage that are trained and saved: not the copy of a tied embedding."""
        return {n: p for n, p in self.pieces.items() if p.delivers and n in self._whole_names}

    def named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        return self.exported_on(None)

    def exported_on(self, meshes: Sequence[DeviceMesh] | None) -> Iterator[tuple[str, Tensor | None]]:
        """Yield all weights as `named_weights` does, spread over these meshes; None: those of training."""
        for name in self._delivery:
            if name == SCORE_WEIGHT:
                yield name, self._score_weight().to(self.device) if self.is_last else None  # stages send it
            elif self._weights[name].stage == self.stage:
                yield name, self.wrapped(self.pieces[name], self.part(self.pieces[name]), meshes)
            else:
                yield name, None

    def weight_parts(self) -> Iterator[WeightPart]:
        for name in self._delivery:
            weight = self._weights[name]
            index = tuple(slice(0, size) for size in weight.shape)
            first = self.place.data == 0
            if weight.stage != self.stage:
                yield WeightPart(name, tuple(weight.shape), weight.dtype, None, index)
            elif name == SCORE_WEIGHT:
                mine = self._score_weight if first and self.place.tensor == 0 else None
                yield WeightPart(name, tuple(weight.shape), weight.dtype, mine, index)
            else:
                yield from self._parts_of(self.pieces[name], weight.dtype)

    def _parts_of(self, piece: Piece, dtype: torch.dtype) -> Iterator[WeightPart]:
        """Yield this rank's part of a weight; two of them if it has a run of a gate's rows and one of those below."""
        experts, index = self.meshes_of_parts[1], [slice(0, size) for size in piece.shape]
        at, delivers = self.place.tensor, self.place.data == 0 and (piece.split is not None or self.place.tensor == 0)
        if piece.experts:
            at, delivers = experts.get_local_rank("expert_tensor"), experts.get_local_rank("replica") == 0
            index[0] = _run(experts.get_local_rank("expert"), piece.part[0])
        if not piece.paired:
            if piece.split is not None:
                index[piece.split] = _run(at, piece.part[piece.split])
            read = partial(self._view, piece) if delivers else None
            yield WeightPart(piece.name, piece.shape, dtype, read, tuple(index))
            return
        rows = piece.part[1] // 2
        for half in range(2):
            read = partial(self._half, piece, half) if delivers else None
            index[1] = _run(half * self.options.expert_tensor + at, rows)
            yield WeightPart(piece.name, piece.shape, dtype, read, tuple(index))

    def _half(self, piece: Piece, half: int) -> Tensor:
        """Return the gate (0) or the up projection (1) of this rank's part of experts."""
        return piece.read(self.sources(piece)).chunk(2, 1)[half]

    def _score_weight(self) -> Tensor:
        """Return the weight of the value head, in host memory while it is offloaded."""
        assert self.value_head is not None
        return self.seen(self.value_head.weight.detach())

    def delivered(self, name: str, p: Tensor | None, on_host: Any = None) -> Tensor:
        owner = self._whole_tied.get(name, name)
        mine = self._weights[owner].stage == self.stage
        if mine and owner in self.pieces and not isinstance(p, DTensor):
            p = self.wrapped(self.pieces[owner], self.part(self.pieces[owner]))
        return super().delivered(name, p, on_host)

    def host_meshes(self) -> list[DeviceMesh]:
        """Create meshes for tensors in host memory, apart from those of training."""
        return _meshes(self.layout, self.options.expert_tensor, "cpu", "gloo")


def _run(number: int, size: int) -> slice:
    """Return a run of so many elements, of those that follow one another."""
    return slice(number * size, (number + 1) * size)


def _meshes(layout: Layout, expert_tensor: int, device: str, backend: str | None) -> list[DeviceMesh]:
    """Create the meshes over which weights, and experts, are spread. All ranks call this in the same order."""
    stages = {"pipeline": layout.pipeline}
    over = layout.data * layout.tensor // (layout.expert * expert_tensor)
    experts = {"replica": over, "expert": layout.expert, "expert_tensor": expert_tensor}
    every = (stages | {"data": layout.data, "tensor": layout.tensor}, stages | experts)
    return [arranged(device, sizes, None if backend is None else dict.fromkeys(sizes, backend)) for sizes in every]


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers()


def _identity(x: Tensor) -> Tensor:
    return x
