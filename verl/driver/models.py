"""The models of a run: folder and role -> engine -> workers. Which engine it is stands in a table of the
configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from verl.algorithms.resolve import Algorithm
from verl.chat import NO_TURN_END, TurnEnd, load_tokenizer, turn_end
from verl.chat.template import Tokenizer
from verl.checkpoint.hf import HfExport
from verl.checkpoint.score import classifier_config
from verl.config.backends import MODEL, load, options_of
from verl.config.plan import warmup_steps
from verl.config.schema import Config
from verl.model_engine.base import EngineContext, ModelEngine
from verl.model_engine.optim import OptimSpec
from verl.nn.heads import Head
from verl.transfer_queue.base import TransferQueue
from verl.weight_sync.base import Outlet
from verl.weight_sync.sender import WeightSender
from verl.workers.inproc import InprocGroup, SharedEngine, VirtualRank
from verl.workers.model_workers import ModelWorkers
from verl.workers.role import Role


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What all models of a run have in common. updates: optimizer steps of the whole run (schedules, warm-up share)."""

    config: Config
    queue: TransferQueue
    device: str
    updates: int
    crash_dir: Path | None = None


def workers_of(
    context: ModelContext,
    name: str,
    engine: ModelEngine,
    *,
    share_prefix: bool = True,
    hf_export: HfExport | None = None,
    outlet: Outlet | None = None,
    turn_end: TurnEnd = NO_TURN_END,
) -> ModelWorkers:
    """The worker group of one model: one rank, or virtual ranks that share the engine. outlet: where its weights are
    published from · turn_end: of a reward model's template."""
    config, can = context.config, engine.capabilities
    share = share_prefix and can.shares_prefix
    dtype = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    sender = WeightSender(outlet, dtype=dtype) if outlet is not None else None
    ranks = [VirtualRank(i, config.run.virtual_ranks) for i in range(config.run.virtual_ranks)]
    roles = [
        Role(
            name,
            context.queue,
            engine if len(ranks) == 1 else SharedEngine(engine, rank),
            share_prefix=share,
            ranks=rank,
            sender=sender,
            hf_export=hf_export,
            turn_end=turn_end,
        )
        for rank in ranks
    ]
    return ModelWorkers(InprocGroup(name, roles, ranks), replace(can, shares_prefix=share))


def policy_engine(
    context: ModelContext, *, head: Head = "lm", share_prefix: bool = True, updates: int | None = None
) -> ModelEngine:
    """The trained model, its forward pass proven. share_prefix: prompts will be shared · updates: its optimizer steps,
    where they are fewer than the run's (a critic's warm-up)."""
    o, updates = context.config.optim, context.updates if updates is None else updates
    spec = OptimSpec(
        lr=o.lr,
        weight_decay=o.weight_decay,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        clip_grad_norm=o.clip_grad_norm,
        schedule=o.schedule,
        warmup_steps=warmup_steps(context.config, updates),
        total_steps=max(1, updates),  # 0: a critic that warms up for the whole run; a schedule wants a length
        decay_ratio=o.decay_ratio,
        min_lr_ratio=o.min_lr_ratio,
    )
    return _proven(_engine(context, optim=spec, head=head), share_prefix)


def frozen_engine(context: ModelContext) -> ModelEngine:
    """The start weights, not trained."""
    return _engine(context, optim=None)


def critic(context: ModelContext, algorithm: Algorithm) -> ModelWorkers:
    """The value model with its own optimizer: the policy's engine with another head."""
    o, c = context.config.optim, context.config.critic
    spec = OptimSpec(
        lr=c.lr,
        weight_decay=c.weight_decay,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        clip_grad_norm=c.clip_grad_norm,
        schedule="constant",
        warmup_steps=c.warmup_steps,
        total_steps=context.updates,
    )
    if c.path is not None:
        _tokenizer_of(context.config, "critic.path", Path(c.path).expanduser())
    return workers_of(context, "critic", _proven(_engine(context, optim=spec, head="value", path=c.path)))


def reference(context: ModelContext, algorithm: Algorithm) -> ModelWorkers:
    return workers_of(context, "ref", frozen_engine(context))


def reward_model(context: ModelContext) -> ModelWorkers | None:
    """The trained reward model of `reward.model`, frozen. It must read the policy's tokens."""
    config = context.config
    if config.reward.model is None:
        return None
    folder = Path(config.reward.model).expanduser()
    theirs = _tokenizer_of(config, "reward.model", folder)
    engine = _proven(_engine(context, optim=None, head="score", path=str(folder)))
    return workers_of(context, "reward_model", engine, turn_end=turn_end(theirs, config.model.template_kwargs))


def _tokenizer_of(config: Config, key: str, folder: Path) -> Tokenizer:
    """The tokenizer of a model beside the policy; ValueError where the policy's ids are other words to it."""
    ours = load_tokenizer(config.model.tokenizer_path or config.model.path, trust_remote_code=False)
    theirs = load_tokenizer(folder, trust_remote_code=False)
    if ours.get_vocab() != theirs.get_vocab():
        raise ValueError(
            f"{key}={folder} has another vocabulary than the policy ({config.model.path}): it would read other words; "
            "train it from a model with the policy's tokenizer"
        )
    return theirs


def _proven(engine: ModelEngine, share_prefix: bool = True) -> ModelEngine:
    """The engine, if its forward pass gives the log-probs of the model's own; ValueError if not."""
    engine.check_packing(share_prefix=share_prefix and engine.capabilities.shares_prefix)
    return engine


def models_of(context: ModelContext, algorithm: Algorithm, actor: ModelWorkers) -> dict[str, ModelWorkers]:
    """The actor, and whatever else the algorithm has a column computed by."""
    builds = {need.role: need.build for need in algorithm.needs(1) if need.build}
    return {"actor": actor, **{role: load(builds[role])(context, algorithm) for role in sorted(builds)}}


def hf_export(config: Config, *, head: Head = "lm", pad_token_id: int | None = None) -> HfExport:
    source = Path(config.model.path).expanduser()
    return HfExport(
        source_dir=source,
        tokenizer_dir=Path(config.model.tokenizer_path) if config.model.tokenizer_path else None,
        chat_template=Path(config.model.chat_template).read_text() if config.model.chat_template else None,
        config_overrides=classifier_config(source, pad_token_id) if head == "score" else {},
    )


def checkpoint_bytes(engine: ModelEngine) -> int:
    """Master, two moments and the exported folder, float32."""
    return 4 * 4 * sum(p.numel() for p in engine.masters.values()) + (8 << 20)


def _engine(
    context: ModelContext, *, optim: OptimSpec | None, head: Head = "lm", path: str | None = None
) -> ModelEngine:
    config = context.config
    build = load(MODEL[config.model.engine].build)
    return build(
        options_of(config, "model"),
        EngineContext(
            folder=Path(path or config.model.path).expanduser(),
            head=head,
            optim=optim,
            dtype=config.model.dtype,
            device=context.device,
            max_tokens_per_microbatch=config.step.max_tokens_per_microbatch,
            gradient_checkpointing=config.model.gradient_checkpointing,
            trust_remote_code=config.model.trust_remote_code,
            dump_dir=context.crash_dir if optim is not None else None,
        ),
    )
