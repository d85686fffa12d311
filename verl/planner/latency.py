"""The seconds and bytes of a role's calls on a number of devices: a roofline of products, memory reads and collectives.

A call is computed by replicas of the model, each divided over `tensor` devices per layer and `pipeline` stages. Nothing
overlaps: the estimates are upper bounds at the shares that a device reaches (`hardware.Device`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl.planner.hardware import Nodes

RESERVE = 0.1
"""The share of a device's memory that is left to the allocator and the runtime."""
REDUCES = 2
"""All-reduces over the tensor devices per layer, in a forward pass, in its recomputation and in a backward pass."""
TENSOR = (1, 2, 4, 8, 16)
PIPELINE = (1, 2, 4, 8)

Kind = Literal["generate", "infer", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a model."""

    parameters: float
    active_parameters: float
    """The parameters with which a token is multiplied."""
    layers: int
    hidden: int
    kv_width: int
    """The numbers of a key, over all heads of a layer, on average."""
    expert_parameters: float = 0.0
    """The parameters of all routed experts."""
    active_expert_parameters: float = 0.0
    """Those of the experts that one token passes through."""

    @property
    def kv_values(self) -> int:
        """The numbers of the keys and values of a token, over all layers."""
        return 2 * self.layers * self.kv_width

    def forward_flops(self, context: float) -> float:
        """Return the operations of a forward pass per token, in rows of `context` tokens."""
        return 2 * self.active_parameters + 2 * self.layers * self.hidden * context

    def read_parameters(self, tokens: int) -> float:
        """Return the parameters that a pass over this number of tokens reads: of the routed experts each that a token
        is sent to, where all experts are as likely."""
        if not self.expert_parameters:
            return self.active_parameters
        missed = (1 - self.active_expert_parameters / self.expert_parameters) ** tokens
        return self.active_parameters - self.active_expert_parameters + (1 - missed) * self.expert_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of a step."""

    sequences: int
    prompt_tokens: float
    response_tokens: float
    updates: int
    """Optimizer steps."""
    micro_tokens: float = 16384
    """Tokens of a pass of one replica, at least those of a row."""
    prompt_shares: int = 1
    """Answers for which a prompt is computed once, in the rollout and in a pass."""
    recomputed: bool = True
    """The backward pass computes the activations again (gradient checkpointing)."""
    weight_gradients: bool = True
    """The weights have gradients; False: those of LoRA's factors alone, whose products are not counted."""
    reward_s: float = 0.0
    tool_calls: float = 0.0
    tool_s: float = 0.0
    """The seconds from an answer to its reward, its calls of tools on average, and the seconds of one of them."""
    at_once: int = 0
    """The most answers that an engine decodes at once; 0: as many as its memory has room for."""
    fp8: bool = False
    """Engines multiply in FP8, where a device can."""
    weight_bytes: float = 0.0
    """The bytes of a weight that a decode step reads, for engines that compute with codes; 0: those of an item."""

    @property
    def waits_s(self) -> float:
        """The seconds that an answer waits beside its decode steps."""
        return self.reward_s + self.tool_calls * self.tool_s

    @property
    def row_tokens(self) -> float:
        """The context of the last token of a row."""
        return self.prompt_tokens + self.response_tokens

    @property
    def computed_tokens(self) -> float:
        """The tokens of a row that a pass computes."""
        return self.prompt_tokens / self.prompt_shares + self.response_tokens

    def passes(self, rows: int) -> int:
        """Return the number of passes of a replica over this number of rows."""
        return math.ceil(rows / max(1, int(self.micro_tokens / self.computed_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The bytes of a trained parameter beside its weight."""

    gradient: float = 4
    states: float = 12
    """The bytes of the optimizer, with the float32 master; divided over the replicas too."""
    reduced: float = 2
    """The bytes of a gradient that is sent to be summed."""
    sharded: bool = False
    """Weights and gradients are divided over the replicas too: each pass gathers them, and each backward pass sums
    (FSDP)."""
    weight: float = 0.0
    """The bytes of a trained model's weight: of a base in codes, or of masters that no factors change; 0: an item's."""
    decoded: float = 0.0
    """The bytes of a weight that are read and written when a pass computes the values of its codes; 0: no codes."""


@dataclass(frozen=True, slots=True)
class Division:
    """How the devices of a role divide its model."""

    tensor: int
    pipeline: int
    replicas: int

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.replicas


def divisions(devices: int, model: ModelSize, at: Nodes, sequences: int) -> Iterator[Division]:
    """Yield the ways to divide a model over this number of devices: a layer over devices of one node, stages of equal
    size, and no replica without a row of an update."""
    for tensor in TENSOR:
        for pipeline in PIPELINE:
            replicas, rest = divmod(devices, tensor * pipeline)
            fits = tensor <= at.devices_per_node and model.layers % pipeline == 0
            if fits and not rest and 1 <= replicas <= sequences:
                yield Division(tensor, pipeline, replicas)


def held_bytes(model: ModelSize, by: Division, trained: bool, stored: Stored, item_bytes: float = 2) -> float:
    """Return the bytes of one device that a role holds between its calls. item_bytes: of a weight."""
    part = model.parameters / (by.tensor * by.pipeline)
    held = (stored.weight or item_bytes) + stored.gradient if trained else item_bytes
    return (held * part) / (by.replicas if stored.sharded else 1) + trained * stored.states * part / by.replicas


LAYER_BYTES = 17
"""The bytes of a layer's activations per hidden value and byte of an item (34 in 16 bits, arXiv 2205.05198)."""


def activation_bytes(model: ModelSize, by: Division, work: StepWork, item_bytes: float = 2) -> float:
    """Return the bytes of one device for the inputs of checkpointed layers, of as many passes as there are stages, and
    one layer that is computed again; without checkpointing those of all layers."""
    values = max(work.row_tokens, work.micro_tokens) * model.hidden / by.tensor
    kept = model.layers + LAYER_BYTES if work.recomputed else LAYER_BYTES * model.layers / by.pipeline
    return item_bytes * values * kept


def forward_s(
    model: ModelSize, by: Division, at: Nodes, work: StepWork, sequences: float, reduces: float = REDUCES
) -> float:
    """Return the seconds of a forward pass over all tokens of `sequences` sequences, without gathered weights.
    reduces: all-reduces over the tensor devices of each layer. Each stage sends its part of the hidden values once per
    `REDUCES` of them."""
    rows = math.ceil(sequences / by.replicas)
    tokens = rows * work.computed_tokens
    products = tokens * model.forward_flops(work.row_tokens) / (by.tensor * by.pipeline * at.device.flops(model.hidden))
    reduced = reduces * model.layers / by.pipeline * _reduced_bytes(model, by.tensor, at, tokens) / at.link
    sent = 0.0
    if by.pipeline > 1:
        values = at.device.item_bytes * tokens * model.hidden / by.tensor
        sent = reduces / REDUCES * values / moved_per_s(by, at)
    passes = work.passes(rows)
    return (passes + by.pipeline - 1) / passes * (products + reduced + sent)


def _reduced_bytes(model: ModelSize, tensor: int, at: Nodes, tokens: float) -> float:
    """Return the bytes of a device for an all-reduce of the hidden values of these tokens over `tensor` devices."""
    return 2 * (tensor - 1) / tensor * at.device.item_bytes * tokens * model.hidden


def summed_s(model: ModelSize, by: Division, at: Nodes, item_bytes: float) -> float:
    """Return the seconds in which replicas sum gradients and return weights: `item_bytes` per parameter, both together.
    A ring moves them between nodes once if a node has several replicas of a part, layer by layer."""
    if by.replicas == 1:
        return 0.0
    model_devices = by.tensor * by.pipeline
    nodes = math.ceil(by.devices / at.devices_per_node)
    if nodes == 1:
        moved = (by.replicas - 1) / by.replicas * item_bytes * model.parameters / model_devices
        return moved / at.link
    on_node = min(1.0, at.devices_per_node / model_devices)  # the share of a model on one node
    rings = max(1, nodes * on_node)  # nodes of one ring
    moved_s = (rings - 1) / rings * item_bytes * model.parameters * on_node / at.network
    return moved_s + (rings > 1) * model.layers / by.pipeline * at.network_us / 1e6


def decoded_s(model: ModelSize, by: Division, at: Nodes, stored: Stored) -> float:
    """Return the seconds in which a pass computes the weights of a device from their codes once."""
    return stored.decoded * model.parameters / (by.tensor * by.pipeline) / at.device.read


def infer_s(model: ModelSize, by: Division, at: Nodes, work: StepWork, stored: Stored) -> float:
    """Return the seconds of a forward pass over all rows of a step."""
    passes = work.passes(math.ceil(work.sequences / by.replicas))
    gathered = passes * summed_s(model, by, at, at.device.item_bytes) if stored.sharded else 0.0
    return forward_s(model, by, at, work, work.sequences) + gathered + passes * decoded_s(model, by, at, stored)


def update_s(model: ModelSize, by: Division, at: Nodes, work: StepWork, stored: Stored) -> float:
    """Return the seconds of the optimizer steps of a step."""
    sequences = work.sequences / work.updates
    products = 2 + work.recomputed + work.weight_gradients  # each as many as those of a forward pass
    passes = products * forward_s(model, by, at, work, sequences, reduces=REDUCES * (2 + work.recomputed) / products)
    states = 2 * stored.states * model.parameters / by.devices / at.device.read
    cuts = work.passes(math.ceil(sequences / by.replicas))
    sums, moved = 1, stored.reduced + at.device.item_bytes
    if stored.sharded:  # weights are gathered for the forward and for the backward pass
        sums, moved = cuts, stored.reduced + 2 * at.device.item_bytes
    decoded = cuts * (2 + work.recomputed) * decoded_s(model, by, at, stored)
    return work.updates * (passes + states + sums * summed_s(model, by, at, moved) + decoded)


@dataclass(frozen=True, slots=True)
class EnginePace:
    """The pace of a rollout engine."""

    waves: int
    """How often the engine is filled to generate its share of a step."""
    batch: int
    """The sequences that it decodes at once."""
    empty_s: float
    """The seconds of a decode step beside its sequences: the weights are read, of experts those of one token."""
    full_s: float
    """The seconds of a decode step with `batch` sequences."""
    prompts_s: float
    """The seconds of the prompts of its share."""
    resume_s: float
    """The seconds in which the keys and values of a row are computed anew when half of its answer is decoded."""


def engine_pace(
    model: ModelSize, devices: int, tensor: int, at: Nodes, work: StepWork, room_bytes: float
) -> EnginePace | None:
    """Return the pace of engines of `tensor` devices each that share the answers of a step; None if not one answer's
    keys and values fit. room_bytes: of one device, for keys and values; infinite: they fit."""
    engines = devices // tensor
    share = math.ceil(work.sequences / engines)
    kv_bytes = at.device.item_bytes * model.kv_values
    most = share if room_bytes == math.inf else int(tensor * room_bytes / (kv_bytes * work.row_tokens))
    most = min(most, work.at_once or most)
    if most < 1:
        return None
    waves = math.ceil(share / most)
    batch = math.ceil(share / waves)
    context = work.prompt_tokens + work.response_tokens / 2
    weight_bytes = work.weight_bytes or at.device.item_bytes
    weights, first = (weight_bytes * model.read_parameters(tokens) for tokens in (batch, 1))
    faster = at.device.faster(work.fp8)
    products = batch * model.forward_flops(context) / (tensor * at.device.decode_flops(model.hidden) * faster)
    reduces = (tensor > 1) * REDUCES * model.layers
    fixed = reduces * at.device.link_us / 1e6 + at.device.step_ms / 1000
    added = reduces * _reduced_bytes(model, tensor, at, batch) / at.link + batch * at.device.sequence_us / 1e6
    reads = (weights + batch * context * kv_bytes) / (tensor * at.device.read)
    full = max(reads, products) + (1 - at.device.overlap) * min(reads, products) + added
    prompts = _prefill_s(model, tensor, at, work, share * work.prompt_tokens / work.prompt_shares, work.prompt_tokens)
    resumed = _prefill_s(model, tensor, at, work, context, context)
    return EnginePace(waves, batch, first / (tensor * at.device.read) + fixed, full + fixed, prompts, resumed)


def _prefill_s(model: ModelSize, tensor: int, at: Nodes, work: StepWork, tokens: float, context: float) -> float:
    """Return the seconds in which an engine computes the keys and values of these tokens, in rows of `context`."""
    rate = tensor * at.device.flops(model.hidden) * at.device.faster(work.fp8)
    reduced = (tensor > 1) * REDUCES * model.layers * _reduced_bytes(model, tensor, at, tokens)
    return tokens * model.forward_flops(context) / rate + reduced / at.link


def generate_s(
    model: ModelSize, devices: int, tensor: int, at: Nodes, work: StepWork, room_bytes: float
) -> float | None:
    """Return the seconds of all answers by engines of `tensor` devices each; None if not one answer's keys and values
    fit. Answers of the last wave wait for tools and rewards; the place of others is taken meanwhile. room_bytes: of one
    device, for keys and values."""
    pace = engine_pace(model, devices, tensor, at, work, room_bytes)
    if pace is None:
        return None
    return pace.prompts_s + pace.waves * work.response_tokens * pace.full_s + work.waits_s


def resharded_bytes(parameters: float, by: Division, tensor: int, whole: bool = False, item_bytes: float = 2) -> float:
    """Return the bytes that a device receives between an update and the next answers. whole: every device gathers the
    model first; else it gathers the rest of the part that it computes with (HybridFlow, arXiv 2409.19256, table 2)."""
    held = parameters / (by.tensor * by.pipeline)
    wanted = parameters if whole else parameters / tensor
    return item_bytes * max(0.0, wanted - held)


def published_s(version_bytes: float, tensor: int, at: Nodes, far: bool) -> float:
    """Return the seconds in which engines of `tensor` devices get a version of the weights that other devices trained:
    each node receives it once over the network if they are on other nodes (`far`), and each device its part."""
    return far * version_bytes / at.network + version_bytes / tensor / at.link


def moved_per_s(by: Division, at: Nodes) -> float:
    """Return the bytes per second that a device receives from those that hold the rest of its model: of its node, or
    of other nodes if a model's parts are on several."""
    inside = by.tensor * by.pipeline <= at.devices_per_node
    return at.link if inside else at.network / at.devices_per_node
