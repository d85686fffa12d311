"""The memory of a run, by item and by phase of a step: of one process with everything in it, and of one rank of a pool.
The estimates are rather too high than too low. The items of a role are those of its engine (`memory` of the engine's
row in config/backends.py); this module adds them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from verl.algorithms.presets import settled
from verl.config.adapter import teacher_models
from verl.config.backends import engine_name, longest_sequence, memory_of, options_of, rollout_caches
from verl.config.cluster import roles_of_policy, roles_on_base
from verl.config.devices import (
    base_format,
    compute_dtype,
    device_type_of,
    drops_rollout_weights,
    dtype_of,
    offloaded,
    rollout_dtype,
)
from verl.config.image_models import frozen_values
from verl.config.lora_layers import factors_of, reads_codes, trained_factors
from verl.config.model_files import ModelFacts, describe_model, find_model_folder, read_model_config, text_config
from verl.config.on_base import REWARD_MODEL, adapters_on_base
from verl.config.schema import Config
from verl.model_engine.layout import Layout
from verl.model_engine.memory import DTYPE_BYTES, LOGPROB_COPIES, MATRIX_BYTES, RankWork, quantised_values
from verl.planner.towers import kept_images, tower_bytes, trains_tower
from verl.rollout.native.options import KEPT_KV_BYTES
from verl.weight_sync.options import Ipc
from verl.wire import FP8, FP8_BLOCK
from verl.workers.pools import NO_MODEL

TRAINED = ("actor", "critic")
PARTS = {"weights": "weights", "optimizer": "optimizer states"}
"""The items of a role's state that may be off the device between two uses."""
KEPT_IMAGES = ("processed images", "image features")
"""The images that a process keeps between passes."""
CACHES = ("KV cache", "row states", "prefix cache")
"""The memory of rows and prompts in a rollout engine."""
HELD = ("weights", "gradient buffer", "optimizer states", "gathered factors", "teacher's head")
AT_HEAD = ("compute copy of shards", "gathered embeddings", "head's compute copy", "log-prob chunk")
IN_LAYERS = ("compute copy of shards", "gathered embeddings", "gathered layers")
SUMMED = ("gradients", "gradients of one copy")
BACKWARD = (
    *SUMMED,
    "head's gradient",
    "compute copy of weights",
    "activations",
    "image tower's activations",
    "waiting passes",
)
MOMENTS: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType(
    {
        "infer": (
            (*IN_LAYERS, "kept buffer", "layer's compute copy", "inference activations"),
            ("image tower's layer",),
            (*AT_HEAD, "inference activations"),
        ),
        "update": (
            (*BACKWARD, *IN_LAYERS, "gathered gradients"),
            (*BACKWARD, *AT_HEAD),
            # at the end of a backward pass
            ("compute copy of shards", *SUMMED, "reduced embeddings", "exchanged gradients", "waiting passes"),
        ),
        "publish": (("gathered embeddings", "gathered layers"), ("largest whole weight",)),
    }
)
"""The temporary items of each phase of a role: for each moment of highest use, the items that are in memory
together."""

MEASURED_RANGE = (0.9, 1.12)
"""The least and the most that ranks held in the fullest phase of 42 measured steps, as shares of the plan
(bench/plan_memory.py)."""
DIVERGENCE_COPIES = 6
"""Arrays of that size for the divergence from a teacher: log-probs and probabilities of both, their mixture, and the
difference from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes per item, and the items that are on a device at once."""

    items: dict[str, int]
    """Bytes by item."""
    phases: dict[str, tuple[str, ...]]
    """The items that are held at once, by phase of a step."""
    peaks: dict[str, int]
    """The sum of each phase's items."""
    peak_phase: str
    peak_bytes: int
    peak_bytes_range: tuple[int, int]
    """The peak with the error of the plan on measured steps, from low to high."""


def error_text() -> str:
    """Return the error of planned bytes as a line."""
    less, more = (abs(share - 1) for share in MEASURED_RANGE)
    return f"the tensors of measured steps, on CPUs, held at most {less:.0%} less and {more:.0%} more than planned"


def bytes_range(planned: int) -> tuple[int, int]:
    """Return from how many to how many bytes a rank holds of which so many are planned."""
    low, high = (int(share * planned) for share in MEASURED_RANGE)
    return low, high


def summed(items: Mapping[str, int], named: Mapping[str, Sequence[str]]) -> MemoryEstimate:
    """Return the sums of phases that name items; items that do not exist or are 0 are left out."""
    phases = {name: tuple(i for i in parts if items.get(i)) for name, parts in named.items()}
    used = {i for parts in phases.values() for i in parts}
    peaks = {name: sum(items[i] for i in parts) for name, parts in phases.items()}
    top = max(peaks, key=lambda name: peaks[name])
    kept = {name: size for name, size in items.items() if name in used}
    return MemoryEstimate(
        items=kept,
        phases=phases,
        peaks=peaks,
        peak_phase=top,
        peak_bytes=peaks[top],
        peak_bytes_range=bytes_range(peaks[top]),
    )


# -- one role, one engine ----------------------------------------------------------------------------------------------


def role_items(
    config: Config, role: str, layout: Layout, tokens: int, *, stage: int = 0, passes: int = 1
) -> dict[str, int]:
    """Return the bytes of one rank of a role. tokens: those of a micro-batch on this rank · passes: those of a step."""
    teachers = teacher_models(config)
    if role in NO_MODEL or (role in config.teacher.roles() and role not in teachers):
        return {}
    assert config.model.gradient_checkpointing != "auto", "it is settled first (planner/checkpointing.py)"
    borrows = role in roles_of_policy(config)
    own = {"critic": config.critic.path, REWARD_MODEL: config.reward.model, **teachers}.get(role)
    factors = trained_factors(config, own) if role in TRAINED else None
    if (adapter := adapters_on_base(config).get(role)) is not None and borrows:
        own = config.model.path
        factors = factors_of(adapter, find_model_folder(own), head=role == REWARD_MODEL)
    frozen = frozen_values(config) if role == "actor" else (0, 0)
    tower = tower_bytes(config, own or config.model.path, tokens, dtype_bytes=DTYPE_BYTES[dtype_of(config, role)])
    through = role == "critic" or (role == "actor" and trains_tower(config))
    work = RankWork(
        tokens=tokens,
        longest=longest_sequence(config),
        passes=passes,
        stage=stage,
        device=device_type_of(config, role),
        dtype=dtype_of(config, role),
        checkpointing=config.model.gradient_checkpointing,
        float32_head=config.model.head_dtype == "float32",
        logit_copies=logprob_copies(config, own or config.model.path),
        compares_logits="hidden" in _outputs(config),
        head=role in ("actor", "ref", *teachers),
        trains=role in TRAINED,
        optimizer=config.optim.name,
        optimizer_options=config.optim.options,
        factors=factors.parameters if factors else None,
        frozen=frozen[0],
        frozen_outside=frozen[1],
        expert_factors=factors.of_experts if factors else 0,
        factors_rank=factors.rank if factors else 0,
        saved=factors.whole(head=role == "actor") if factors else 0,
        saves_head=role == "actor" and factors is not None and factors.whole() > factors.whole(head=False),
        borrows=borrows,
        quantisation=base_format(config, own) if factors else "none",
        publishes=role == "actor",
        tower_bytes=tower[0] * through,
        tower_layer_bytes=tower[1],
        virtual_stages=getattr(options_of(config, "model"), "virtual_stages", 1),
        expert_tensor=getattr(options_of(config, "model"), "expert_tensor", 1),
        divides_states=getattr(options_of(config, "model"), "distributed_optimizer", True),
    )
    items = dict(memory_of(config, "model")(describe_model(own or config.model.path), layout, work))
    if role == "actor" and factors and config.model.lora.get("path"):
        items["weights"] += 4 * factors.parameters  # the factors of the start, whole
    if role == "actor" and (head := _teachers_head(config, [*teachers.values()])):
        items["teacher's head"] = head
    return items


def logprob_copies(config: Config, path: str) -> int:
    """Return how many arrays of the size of a chunk of logits exist at once where torch's operations read it: one more
    than `LOGPROB_COPIES` if a model caps its logits (the slope of the cap), or if the algorithm reads squared
    probabilities (twice the logits) or a teacher's likeliest ids (the logits without them); `DIVERGENCE_COPIES` if it
    compares whole distributions."""
    capped = text_config(read_model_config(find_model_folder(path))).get("final_logit_softcapping")
    outputs = _outputs(config)
    copies = DIVERGENCE_COPIES if "hidden" in outputs else LOGPROB_COPIES
    return copies + bool(capped or outputs & {"sum_pi_squared", "topk_ids"})


def _outputs(config: Config) -> set[str]:
    """Return the names of the outputs that an algorithm reads."""
    needs = settled(config.algorithm.name, config.algorithm.given()).needs(config.step.updates_per_step)
    return {need.output for need in needs}


def _teachers_head(config: Config, teachers: Sequence[str]) -> int:
    """Return the bytes of the head of a teacher, which the policy holds to compare whole distributions."""
    preset = settled(config.algorithm.name, config.algorithm.given())
    if not teachers or "teacher" not in preset.roles() or "divergence" not in preset.loss.outputs:
        return 0
    model = describe_model(teachers[0])
    return DTYPE_BYTES[compute_dtype(config)] * model.vocab * model.hidden


def rollout_items(config: Config, model: ModelFacts) -> dict[str, int]:
    """Return the bytes of one rollout engine."""
    copy = DTYPE_BYTES[rollout_dtype(config)] * model.parameters
    if config.rollout.dtype == FP8 and device_type_of(config, "rollout") == "cuda":
        # the index of the scales of each row; a CPU multiplies with dequantised weights
        copy = wire_bytes(config, model) + 4 * _projected(model) // model.hidden
    local = engine_name(config, "sync") == "local"
    staged = {"quantised weights": wire_bytes(config, model)} if local and config.rollout.dtype == FP8 else {}
    incoming = copy
    if reads_codes(config):  # the trainer's own in one process; later versions are factors alone
        item_bytes, factors = DTYPE_BYTES[rollout_dtype(config)], trained_factors(config)
        exact = rollout_dtype(config) == "float32" and device_type_of(config, "rollout") == "cpu"
        shared = exact * (1 + (not model.tied)) * model.vocab * model.hidden  # embedding and head, unless trained whole
        shared -= 0 if factors is None else exact * factors.whole_outside()
        own = item_bytes * (model.parameters - quantised_values(model) - shared)
        copy = own if local else wire_bytes(config, model)
        incoming = 0 if factors is None else item_bytes * (factors.parameters + factors.whole())
    return {
        "rollout weights": copy,
        "incoming weights": incoming,
        **staged,
        **rollout_caches(config, bytes_per_token=kv_bytes_per_token(model, rollout_dtype(config))),
        "row states": config.rollout.max_concurrent_sequences * state_bytes_per_row(model, rollout_dtype(config)),
        "sampling logits": 2 * 4 * config.rollout.max_concurrent_sequences * model.vocab,
    }


def wire_bytes(config: Config, model: ModelFacts) -> int:
    """Return the bytes of a version as it is sent to replicas."""
    item_bytes = DTYPE_BYTES[rollout_dtype(config)]
    if reads_codes(config):
        coded = quantised_values(model)
        return item_bytes * (model.parameters - coded) + int(MATRIX_BYTES[base_format(config)] * coded)
    if config.rollout.dtype != FP8:
        return item_bytes * model.parameters
    projected = _projected(model)
    return item_bytes * (model.parameters - projected) + projected + 4 * projected // FP8_BLOCK**2


def _projected(model: ModelFacts) -> int:
    """Return the number of weights that FP8 quantises, rather too many: all but those of the embedding and the head."""
    return model.body_parameters - model.embedding_parameters


def kv_bytes_per_token(model: ModelFacts, dtype: str) -> int:
    attention = model.layers - model.states.layers
    return 2 * attention * model.kv_heads * model.head_dim * DTYPE_BYTES[dtype]


def state_bytes_per_row(model: ModelFacts, dtype: str) -> int:
    """Return the bytes that layers without keys and values keep of a row."""
    return 4 * model.states.float32_values + DTYPE_BYTES[dtype] * model.states.values


def bucket_bytes(bucket_mb: int, model: ModelFacts, dtype: str) -> int:
    """Return the size of a bucket through which weights are sent in `dtype`. The largest tensor is not split."""
    return max(bucket_mb << 20, DTYPE_BYTES[dtype] * model.largest_parameters)


def device_buckets(config: Config) -> dict[str, int]:
    """Return the bytes of the buckets on the trainer's device, which are allocated by the first publish."""
    options = options_of(config, "sync")
    if not isinstance(options, Ipc):
        return {}
    return {
        "buckets of weights": 2
        * bucket_bytes(options.bucket_mb, describe_model(config.model.path), rollout_dtype(config))
    }


# -- one process -------------------------------------------------------------------------------------------------------


def process_memory(config: Config, update_tokens: int) -> MemoryEstimate:
    """Return the memory of a run in one process. update_tokens: the most tokens of one optimizer step."""
    budget = min(config.step.max_tokens_per_microbatch, update_tokens)
    items = _process_items(config, budget, -(-update_tokens // max(1, budget)))
    flying: tuple[str, ...] = ()
    if config.pipeline.placement == "split" or config.pipeline.staleness > 0:
        flying = CACHES
    elif items["KV cache"] + items["row states"] <= KEPT_KV_BYTES:
        flying = ("KV cache", "row states")
    own = (
        "master weights",
        "optimizer states",
        "reference policy",
        "critic with its optimizer",
        "teacher",
        "reward model",
    )
    away = {"reference policy", "teacher", "reward model"} if offloaded(config, trained=False) else set[str]()
    away |= {"rollout weights"} if drops_rollout_weights(config) else set()
    parts = {"weights": "master weights", "optimizer": "optimizer states"}
    away |= {parts[part] for part in offloaded(config, trained=True)}

    def held(*awake: str) -> tuple[str, ...]:
        here = (item for item in (*own, "rollout weights") if item in awake or item not in away)
        return (*here, "teacher's head", "buckets of weights", *KEPT_IMAGES)

    at_head = ("log-prob chunk", "head's compute copy")
    weights, frozen = "master weights", ("reference policy", "teacher", "reward model")
    named = {
        "rollout": (*held("rollout weights"), *CACHES, "sampling logits"),
        "experience": (
            *(*held(weights, *frozen), "inference activations", "image tower's layer", "teacher's activations"),
            *(*at_head, *flying),
        ),
        "update": (
            *held(weights, "optimizer states"),
            *("gradients", "compute copy of weights", "activations", "image tower's activations"),
            *(*at_head, "head's gradient", *flying),
        ),
        "publish": (*held(weights), "incoming weights", "quantised weights", *flying),
    }
    return summed(items, named)


def _process_items(config: Config, tokens: int, passes: int) -> dict[str, int]:
    """Return the items of all roles in one process, for passes of so many tokens. A critic is one item, which is always
    counted."""
    alone = Layout()
    model, preset = describe_model(config.model.path), settled(config.algorithm.name, config.algorithm.given())
    actor, rollout = role_items(config, "actor", alone, tokens, passes=passes), rollout_items(config, model)
    critic = role_items(config, "critic", alone, tokens) if preset.critic else {}
    learned = [role_items(config, role, alone, tokens) for role in teacher_models(config)]
    teachers = learned if "teacher" in preset.roles() else []
    scorer = role_items(config, REWARD_MODEL, alone, tokens) if config.reward.model is not None else {}
    average = actor["gradients"] if config.teacher.ema else 0  # as large as what is trained
    snapshot = actor["weights"] if config.pipeline.staleness > 0 else 0  # training continues while it is sent
    return {
        "master weights": actor["weights"],
        **{name: actor[name] for name in ("gradients", "optimizer states", "compute copy of weights")},
        "reference policy": actor["weights"] if needs_reference(config) and "ref" not in roles_of_policy(config) else 0,
        "critic with its optimizer": sum(critic.get(n, 0) for n in ("weights", "gradients", "optimizer states")),
        "teacher": average or sum(items["weights"] for items in teachers),
        "reward model": scorer.get("weights", 0),
        "teacher's activations": max((items["inference activations"] for items in teachers), default=0),
        "teacher's head": actor.get("teacher's head", 0),
        **device_buckets(config),
        **rollout,
        "incoming weights": rollout["incoming weights"] + snapshot,
        **kept_images(config),
        **{name: actor[name] for name in ("activations", "inference activations", "log-prob chunk")},
        **{name: actor.get(name, 0) for name in ("image tower's activations", "image tower's layer")},
        **{name: actor[name] for name in ("head's compute copy", "head's gradient")},
    }


def needs_reference(config: Config) -> bool:
    """Return whether a KL term needs a frozen copy of the policy."""
    return "ref" in settled(config.algorithm.name, config.algorithm.given()).roles()


# -- one rank of a pool ------------------------------------------------------------------------------------------------


def pool_rank_memory(
    config: Config, layout: Layout, roles: Sequence[str], replicas: int, update_tokens: int, *, arriving_bytes: int = 0
) -> MemoryEstimate:
    """Return the memory of a pool's fullest rank: the first rank of every role and stage, with a replica if there is
    one. arriving_bytes: the memory of a process that fetches weights, outside of its model."""
    arriving = {"arriving weights": arriving_bytes} if replicas else {}
    if "actor" in roles:
        roles = [*roles, *(role for role in roles_on_base(config) if role != "ref")]
    stages = [
        _stage_memory(config, layout, roles, replicas, update_tokens, s, arriving) for s in range(layout.pipeline)
    ]
    return max(stages, key=lambda memory: memory.peak_bytes)


def _stage_memory(
    config: Config,
    layout: Layout,
    roles: Sequence[str],
    replicas: int,
    update_tokens: int,
    stage: int,
    arriving: Mapping[str, int],
) -> MemoryEstimate:
    """Return the memory of the rank of a stage. arriving: the bytes of weights that are being fetched, by item."""
    items = {**_rank_items(config, layout, roles, replicas, update_tokens, stage), **arriving}
    every = [f"{role} {name}" for role in roles for name in HELD] + ["rollout weights", "buckets of weights"]
    every += KEPT_IMAGES

    def held(*awake: str) -> list[str]:
        """Return the items that the roles hold. awake: the role that is computing, with its whole state while it is
        updated."""
        return [item for item in every if item in awake or item not in away]

    away = {f"{role} {PARTS[part]}" for role in roles for part in offloaded(config, trained=role in TRAINED)}
    away |= {f"{role} gradient buffer" for role in roles if offloaded(config, trained=role in TRAINED)}
    away |= {"rollout weights"} if drops_rollout_weights(config) else set()
    kept = [*CACHES] if config.pipeline.placement == "split" or config.pipeline.staleness else []
    phases = {"rollout": [*held("rollout weights"), *CACHES, "sampling logits"]} if replicas else {}
    for role in _inferring(config, roles):
        phases[f"infer {role}"] = [*held(f"{role} weights"), *fullest_moment(items, role, "infer"), *kept]
    for role in (role for role in TRAINED if role in roles):
        own = [f"{role} {item}" for item in ("weights", "gradient buffer", "optimizer states")]
        phases[f"update {role}"] = [*held(*own), *fullest_moment(items, role, "update"), *kept]
    flying = [*fullest_moment(items, "actor", "publish"), "incoming weights", *arriving]
    phases["publish"] = [*held("actor weights"), *flying, *kept]
    return summed(items, phases)


def _rank_items(
    config: Config, layout: Layout, roles: Sequence[str], replicas: int, update_tokens: int, stage: int
) -> dict[str, int]:
    """Return the items of a rank, those of a role with the role's name before them."""
    budget = min(config.step.max_tokens_per_microbatch, update_tokens)
    tokens, passes = -(-budget // layout.tokens), -(-update_tokens // max(1, budget))
    items = {
        f"{role} {name}": size
        for role in roles
        for name, size in role_items(config, role, layout, tokens, stage=stage, passes=passes).items()
    }
    if config.teacher.ema and "actor" in roles:
        items["actor optimizer states"] += items["actor gradients"]  # the average of the weights is kept beside them
    rollout = rollout_items(config, describe_model(config.model.path)) if replicas else {}
    items |= {name: replicas * size for name, size in rollout.items()} | kept_images(config)
    return items | (device_buckets(config) if "actor" in roles else {})


def _inferring(config: Config, roles: Iterable[str]) -> list[str]:
    """Return those of the roles that infer before the update, in their order in a step."""
    needs = settled(config.algorithm.name, config.algorithm.given()).needs(config.step.updates_per_step)
    order = dict.fromkeys([*(need.role for need in needs), *config.teacher.roles(), REWARD_MODEL])
    return [role for role in order if role in roles]


def fullest_moment(items: Mapping[str, int], role: str, phase: str) -> list[str]:
    """Return the items of a role, prefixed by its name, that are held at once at the moment of highest use in a
    phase."""
    moments = [[f"{role} {name}" for name in names] for names in MOMENTS[phase]]
    return max(moments, key=lambda names: sum(items.get(name, 0) for name in names))
