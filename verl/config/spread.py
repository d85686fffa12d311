"""The placement of a run over processes, and the memory of one rank of each pool, by role and phase. Estimates, as in
memory.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from verl.algorithms.presets import settled
from verl.config.adapter import teacher_models
from verl.config.backends import address_of, engine_name, layout_of, options_of
from verl.config.cluster import NO_MODEL, dtype_of, places_of
from verl.config.memory import (
    DTYPE_BYTES,
    LOGPROB_CHUNK_BYTES,
    LOGPROB_COPIES,
    Memory,
    bucket_bytes,
    device_buckets,
    drops_rollout_weights,
    layer_bytes_per_token,
    offloaded,
    rollout_items,
    summed,
    teacher_items,
)
from verl.config.model_files import ModelFacts, describe_model
from verl.config.schema import Config
from verl.model_engine.layout import Layout, layers_of_stages
from verl.weight_sync.options import Ipc, Shm, Tcp

TRAINED = ("actor", "critic")
PARTS = {"weights": "weights", "optimizer": "optimizer states"}
"""The items of a role's state that may be off the device between two uses."""
HELD = ("weights", "optimizer states", "teacher's head")
AT_HEAD = ("gathered embeddings", "head's compute copy", "log-prob chunk")
IN_LAYERS = ("gathered embeddings", "gathered layers")
BACKWARD = ("gradients", "head's gradient", "compute copy of weights", "activations", "waiting passes")
MOMENTS: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType(
    {
        "infer": (
            (*IN_LAYERS, "kept buffer", "layer's compute copy", "inference activations"),
            (*AT_HEAD, "inference activations"),
        ),
        "update": (
            (*BACKWARD, *IN_LAYERS, "gathered gradients"),
            (*BACKWARD, *AT_HEAD),
            ("gradients", "reduced embeddings", "waiting passes"),  # at the end of a backward pass
        ),
        "publish": (IN_LAYERS, ("largest whole weight",)),
    }
)
"""The temporary items of each phase of a role: those that are held at once at each moment of highest use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool of processes."""

    nodes: int
    ranks_per_node: int
    each: dict[str, float]
    """The resources of one rank, by Ray's names."""
    roles: tuple[str, ...]
    replicas: int
    """Rollout engines in this pool."""
    device: str
    memory: Memory
    """The memory of its fullest rank, on `device`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The placement of a run over processes."""

    backend: str
    address: str | None
    """The address of a running cluster; None: one is started for this run."""
    layout: str
    """The layout of a model, in words."""
    queue: str
    """The engine of the queue."""
    sync: str
    """The engine of the weight sync."""
    shared_bytes: int
    """A host's shared memory for two versions of the weights that are being sent, or for two buckets."""
    pools: dict[str, PoolPlan]

    @property
    def fullest(self) -> Memory:
        return max((pool.memory for pool in self.pools.values()), key=lambda memory: memory.peak_bytes)


def spread_of(config: Config, update_tokens: int) -> Spread | None:
    """Return the placement; None if everything runs in this process. update_tokens: the most tokens of one optimizer
    step."""
    c, layout = config.cluster, layout_of(config)
    if c.backend == "inproc":
        return None
    pools, lives = places_of(config)
    planned = {}
    for name, pool in pools.items():
        roles = tuple(role for role, at in lives.items() if at == name and role != "rollout")
        replicas = config.rollout.replicas if lives["rollout"] == name else 0
        planned[name] = PoolPlan(
            nodes=pool.nodes,
            ranks_per_node=pool.ranks_per_node,
            each=pool.bundle,
            roles=roles,
            replicas=replicas,
            device=pool.computes_on,
            memory=_memory(config, layout, roles, -(-replicas // pool.ranks), update_tokens),
        )
    return Spread(
        backend=c.backend,
        address=address_of(c.address),
        layout=words_of(layout),
        queue=engine_name(config, "queue"),
        sync=engine_name(config, "sync"),
        shared_bytes=2 * _on_their_way(config),
        pools=planned,
    )


def _on_their_way(config: Config) -> int:
    """Return the bytes in shared memory of a version of the weights, or of a bucket through which they are sent."""
    model, options = describe_model(config.model.path), options_of(config, "sync")
    if isinstance(options, Ipc):
        return 0
    if isinstance(options, Shm | Tcp) and options.bucket_mb is not None:
        return bucket_bytes(options.bucket_mb, model)
    return 4 * model.parameters


def on_this_machine(spread: Spread) -> Memory | None:
    """Return the host memory of all processes of a Ray that is started on this machine; None for another Ray, or
    none."""
    pools = {name: pool for name, pool in spread.pools.items() if pool.device == "cpu"}
    if spread.backend != "ray" or spread.address is not None or not pools:
        return None
    items = {"weights on their way": spread.shared_bytes}
    for name, pool in pools.items():
        of, ranks = pool.memory, pool.nodes * pool.ranks_per_node
        items |= {f"{item} of {name}": ranks * of.items[item] for item in of.phases[of.peak_phase]}
    return summed(items, {"every process at its peak": [*items]})


def words_of(layout: Layout) -> str:
    """Return the layout in words: 4 ranks = 2 data x 2 tensor: a rank holds 1/4 of a model."""
    parts = {"pipeline": layout.pipeline, "data": layout.data, "sequence": layout.sequence, "tensor": layout.tensor}
    product = " x ".join(f"{size} {name}" for name, size in parts.items() if size > 1) or "1 data"
    copies = f", in {layout.replicate} copies of the model" if layout.replicate > 1 else ""
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    held = layout.pipeline * layout.shard * layout.tensor
    return f"{ranks} = {product}{copies}: a rank holds {'about ' * (layout.pipeline > 1)}1/{held} of a model"


def _memory(config: Config, layout: Layout, roles: Sequence[str], replicas: int, update_tokens: int) -> Memory:
    """Return the memory of a pool's fullest rank: the first rank of every role and stage, with a replica if there is
    one."""
    stages = [_of_stage(config, layout, roles, replicas, update_tokens, s) for s in range(layout.pipeline)]
    return max(stages, key=lambda memory: memory.peak_bytes)


def _of_stage(
    config: Config, layout: Layout, roles: Sequence[str], replicas: int, update_tokens: int, stage: int
) -> Memory:
    budget = min(config.step.max_tokens_per_microbatch, update_tokens)
    tokens, passes = -(-budget // layout.sequence), -(-update_tokens // max(1, budget))
    items = {
        f"{role} {name}": size
        for role in roles
        for name, size in role_items(config, role, layout, tokens, stage=stage, passes=passes).items()
    }
    rollout = rollout_items(config, describe_model(config.model.path)) if replicas else {}
    items |= {name: replicas * size for name, size in rollout.items()}
    items |= device_buckets(config) if "actor" in roles else {}
    every = [f"{role} {name}" for role in roles for name in HELD] + ["rollout weights", "buckets of weights"]

    def held(*awake: str) -> list[str]:
        """Return the items that the roles hold. awake: the role that is computing, with its whole state while it is
        updated."""
        return [item for item in every if item in awake or item not in gone]

    gone = {f"{role} {PARTS[part]}" for role in roles for part in offloaded(config, trained=role in TRAINED)}
    gone |= {"rollout weights"} if drops_rollout_weights(config) else set()
    kept = ["KV cache", "prefix cache"] if config.pipeline.placement == "split" or config.pipeline.staleness else []
    needs = settled(config.algorithm.name, config.algorithm.given()).needs(config.step.updates_per_step)
    infer = dict.fromkeys([*(need.role for need in needs), *config.teacher.roles(), "reward_model"])
    phases = {"rollout": [*held("rollout weights"), "KV cache", "prefix cache", "sampling logits"]} if replicas else {}
    for role in (role for role in infer if role in roles):
        phases[f"infer {role}"] = [*held(f"{role} weights"), *fullest_moment(items, role, "infer"), *kept]
    for role in (role for role in TRAINED if role in roles):
        own = (f"{role} weights", f"{role} optimizer states")
        phases[f"update {role}"] = [*held(*own), *fullest_moment(items, role, "update"), *kept]
    phases["publish"] = [*held("actor weights"), *fullest_moment(items, "actor", "publish"), "incoming weights", *kept]
    return summed(items, phases)


def fullest_moment(items: Mapping[str, int], role: str, phase: str) -> list[str]:
    """Return the items of a role, prefixed by its name, that are held at once at the moment of highest use in a
    phase."""
    moments = [[f"{role} {name}" for name in names] for names in MOMENTS[phase]]
    return max(moments, key=lambda names: sum(items.get(name, 0) for name in names))


def role_items(
    config: Config, role: str, layout: Layout, tokens: int, *, stage: int = 0, passes: int = 1
) -> dict[str, int]:
    """Return the bytes of one rank of a role. tokens: those of a micro-batch on this rank · passes: those of a step; a
    pipeline holds as many at once as there are stages from this one on."""
    teachers = teacher_models(config)
    if role in NO_MODEL or (role in config.teacher.roles() and role not in teachers):
        return {}
    own = {"critic": config.critic.path, "reward_model": config.reward.model, **teachers}.get(role)
    model, trains = describe_model(own or config.model.path), role in TRAINED
    policies = ("actor", "ref", *teachers)
    whole = model.parameters if role in policies else model.body_parameters
    part, tensor, dtype = layout.shard * layout.tensor, layout.tensor, dtype_of(config, role)
    layer = (model.body_parameters - model.embedding_parameters) // model.layers
    layers = len(layers_of_stages(model.layers, layout.pipeline)[stage])
    root = _of_no_layer(model, layout, whole - layer * model.layers, stage)
    experts = model.expert_parameters // model.layers  # per layer: not cut, gathered from equal ranks
    count, sparse, flying = layer * layers + root, experts * layers, min(layout.pipeline - stage, passes)
    kept = (count - sparse) // part + sparse // layout.shard
    apart, cut = int(layout.world_size > 1), layout.shard > 1
    of_none, dense = 4 * root // tensor * apart, 4 * (layer - experts) // tensor  # gathered: outside layers, a layer
    spread, experts_cut = 4 * experts // layout.expert, layout.shard > layout.expert
    if layout.expert == 1:
        dense, spread = dense + spread, 0

    bytes_kept, residual = layer_bytes_per_token(model, dtype, tensor), 4 * model.hidden  # per token
    again = config.model.gradient_checkpointing  # the activations of a layer are recomputed and freed there
    through = layers * residual + bytes_kept if again else layers * bytes_kept
    vocab = -(-model.vocab // tensor)
    half = DTYPE_BYTES[dtype] * (dtype == "bfloat16")  # bytes of a weight's copy in the compute dtype
    rows = min(tokens, max(16, LOGPROB_CHUNK_BYTES // (4 * vocab)))
    items = {
        "weights": 4 * kept,
        "gathered embeddings": of_none,
        # one layer beside the buffer of this or the next gathering: FSDP copies what only this rank has
        "gathered layers": apart * ((1 + cut) * dense + (1 + experts_cut) * spread),
        "kept buffer": cut * max(of_none, dense),  # of the previous gathering, until the next one has ended
        "layer's compute copy": half * (dense + spread) // 4,
        "inference activations": tokens * (bytes_kept + 2 * residual),
    }
    if role in policies and stage == layout.pipeline - 1:
        items["log-prob chunk"] = LOGPROB_COPIES * rows * vocab * 4
        items["head's gradient"] = 4 * vocab * model.hidden * trains
        items["head's compute copy"] = half * vocab * model.hidden
    if role == "actor":
        items["teacher's head"] = teacher_items(config).get("teacher's head", 0)
        # tensors are collected one by one and joined; later stages receive those of the first
        items["largest whole weight"] = (1 + (part > 1 and stage == 0)) * 4 * max(model.vocab * model.hidden, layer)
    if not trains:
        return items
    # sending, in transfer, receiving; a critic's last stage computes no logits, tied or not
    reduced = (3 * of_none + cut * of_none // layout.shard) * (stage == 0 or role in policies)
    copies, through = half * (1 if again else layers) * (dense + spread) // 4, tokens * (through + 2 * residual)
    waiting = through + copies * (not again)  # of one pass, until its backward pass
    not_yet = min(4 * kept, waiting) * (passes == flying > 1)  # no gradients exist beside the first backward pass
    return items | {
        "optimizer states": (12 if role == "actor" and config.teacher.ema else 8) * kept,
        "gradients": 4 * kept,
        "gathered gradients": apart * 2 * max(dense, spread),  # as computed, and in the buffer from which they are sent
        "reduced embeddings": reduced,
        "compute copy of weights": copies,
        "activations": through,
        "waiting passes": (flying - 1) * waiting - not_yet,  # kept for the backward passes of the earlier ones
    }


def _of_no_layer(model: ModelFacts, layout: Layout, root: int, stage: int) -> int:
    """Return a stage's parameters that belong to no layer and are gathered for a whole pass. root: those of the whole
    model: embeddings on the first stage, last norm and head on the last, tied ones on both."""
    first, last = stage == 0, stage == layout.pipeline - 1
    embeddings = model.embedding_parameters if first or (last and model.tied) else 0
    return embeddings + (root - model.embedding_parameters if last else 0)
