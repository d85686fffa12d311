"""Build the models of a run: the engine of each role's folder, and the workers around it. The table of engines is in
config/backends.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from verl.algorithms.presets import settled
from verl.algorithms.resolve import Algorithm
from verl.algorithms.sections import POLICY, TEACHER, is_url, split_key
from verl.algorithms.specs import GKD
from verl.chat import load_tokenizer, turn_end
from verl.chat.template import Tokenizer
from verl.checkpoint.hf import HfExport
from verl.checkpoint.score import classifier_config
from verl.config.adapter import base_of
from verl.config.backends import backend_of, import_object, longest_sequence, options_of
from verl.config.cluster import roles_of_policy
from verl.config.devices import base_format, dtype_of
from verl.config.image_models import frozen_parts
from verl.config.model_files import describe_model, has_tokenizer
from verl.config.model_folder import further_note, rope_note
from verl.config.on_base import REWARD_MODEL
from verl.config.routes import replays_routes
from verl.config.schema import Config
from verl.driver.banned import policy_banned
from verl.errors import Refused
from verl.model_engine.base import EngineContext, ModelEngine, ServedAt, TeacherHead
from verl.model_engine.lora_spec import LoraSpec, trained_by
from verl.model_engine.optim import OptimSpec, without_rates
from verl.nn.heads import Head
from verl.nn.quant import Kind
from verl.planner.sizes import warmup_steps
from verl.rollout.base import Peers
from verl.transfer_queue.base import TransferQueue
from verl.weight_sync.base import Outlet
from verl.workers.ahead import EarlyOutputs
from verl.workers.group import Cluster, Died
from verl.workers.inproc import InprocCluster
from verl.workers.model_workers import ModelWorkers
from verl.workers.role import AS_SAMPLED, RoleSpec, View, build_roles, roles_of
from verl.workers.teachers import Teachers

COMPARED_TEXTS = 1000  # texts of random tokens by which the tokenizers of a teacher and of the policy are compared


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Settings that all models of a run share."""

    config: Config
    """The configuration of the run."""
    queue: TransferQueue
    """The queue that the workers read and write."""
    device: str
    """The device of a role that is not in `devices`."""
    updates: int
    """Optimizer steps of the whole run, for schedules and the share of the warm-up."""
    crash_dir: Path | None = None
    """Folder for the batches of updates that were skipped."""
    cluster: Cluster = field(default_factory=InprocCluster)
    """The processes of the workers."""
    say: Callable[[str], None] = print
    """Prints a line for the user."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Role -> its device."""
    peers: Peers = field(default_factory=Peers)
    """The processes of the rollout's servers."""
    actor: ModelWorkers | None = None
    """The policy's workers, once they are started."""
    longest: int | None = None
    """Tokens of the longest row of a supervised stage; None: prompt and response of the configuration."""
    tokenizer: Any = None
    """The run's tokenizer, which decides with the model's folder which ids are never sampled; None: it is loaded."""


def workers_of(
    context: ModelContext, spec: RoleSpec, view: View = AS_SAMPLED, died: Died | None = None
) -> ModelWorkers:
    """Start the worker group of one model, or open the model in the policy's workers, on the policy's base. died:
    called with the error if the group dies; then the run continues without it."""
    if spec.name in roles_of_policy(context.config):
        return _on_base_of_policy(context, spec, view)
    layout = None if spec.behind_server else context.cluster.layout
    size = layout.world_size if layout else 1
    group = context.cluster.start(spec.name, build_roles, (spec,), world_size=size, died=died)
    place = spec.name if spec.behind_server else context.cluster.place(spec.name)  # a server uses no device of the run
    return ModelWorkers(group, layout=layout, view=view, place=place)


def _on_base_of_policy(context: ModelContext, spec: RoleSpec, view: View) -> ModelWorkers:
    """Open a model in the policy's workers, on the frozen base of the policy, and on its device."""
    assert context.actor is not None, "the policy is started first"
    device, dtype = context.devices.get("actor", context.device), dtype_of(context.config, "actor")
    own = replace(spec.context, device=device, dtype=dtype)
    if own.adapter is not None:
        own = replace(own, adapter=None, lora=LoraSpec(path=str(own.adapter)))
    group = context.actor.open_sibling(replace(spec, engine=backend_of(context.config, "model").sibling, context=own))
    return ModelWorkers(group, layout=context.cluster.layout, view=view, place=context.cluster.place("actor"))


def workers_around(context: ModelContext, engine: ModelEngine, spec: RoleSpec) -> ModelWorkers:
    """Start a worker group around an engine of this process."""
    return ModelWorkers(context.cluster.start(spec.name, partial(roles_of, engine), (spec,)))


def policy_optim(config: Config, updates: int) -> OptimSpec:
    """Return the optimizer of the trained model for a run of `updates` optimizer steps."""
    o = config.optim
    return OptimSpec(
        name=o.name,
        options=o.options,
        lr=o.lr,
        weight_decay=o.weight_decay,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        clip_grad_norm=o.clip_grad_norm,
        schedule=o.schedule,
        warmup_steps=warmup_steps(o, updates),
        total_steps=max(1, updates),  # 0 if a critic warms up during the whole run; a schedule needs a length
        decay_ratio=o.decay_ratio,
        min_lr_ratio=o.min_lr_ratio,
    )


def critic_optim(config: Config, updates: int) -> OptimSpec:
    """Return the optimizer of the value model for a run of `updates` optimizer steps. The rate is constant after the
    warm-up."""
    o, c = config.optim, config.critic
    return OptimSpec(
        name=o.name,
        options=without_rates(o.options),  # rates of roles are the policy's
        lr=c.lr,
        weight_decay=c.weight_decay,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        clip_grad_norm=c.clip_grad_norm,
        schedule="constant",
        warmup_steps=warmup_steps(c, updates),
        total_steps=updates,
    )


def trained(
    context: ModelContext,
    name: str,
    *,
    head: Head = "lm",
    share_prefix: bool = True,
    updates: int | None = None,
    hf_export: HfExport | None = None,
    outlet: Outlet | None = None,
) -> RoleSpec:
    """Return the specification of the trained model. share_prefix: prompts will be shared · updates: its optimizer
    steps if they are fewer than the run's (warm-up of a critic) · outlet: publishes its weights."""
    optim = policy_optim(context.config, context.updates if updates is None else updates)
    spec = role_spec(context, name, optim=optim, head=head)
    path = context.config.model.path
    for note in (rope_note(path, spec.context.longest), further_note(path) if name == "actor" else None):
        if note is not None:
            context.say(note)
    spec = replace(spec, context=replace(spec.context, freeze=frozen_parts(context.config)))
    if name == "actor":
        t, own = context.config.teacher, teacher_head(context.config)
        student = replace(spec.context, teacher=own, top_k=t.top_k, optim=replace(optim, average=t.ema))
        student = replace(student, replays_routes=replays_routes(context.config))
        spec = replace(spec, context=student)
    return replace(spec, proven=True, share_prefix=share_prefix, hf_export=hf_export, outlet=outlet)


def critic(context: ModelContext, algorithm: Algorithm) -> ModelWorkers:
    """Start the value model with its own optimizer: the policy's engine with a value head."""
    c, optim = context.config.critic, critic_optim(context.config, context.updates)
    if c.path is not None:
        _tokenizer_of(context.config, "critic.path", Path(c.path).expanduser())
    spec = replace(role_spec(context, "critic", optim=optim, head="value", path=c.path), proven=True)
    return workers_of(context, spec)


def reference(context: ModelContext, algorithm: Algorithm) -> ModelWorkers:
    """Start the reference model: the start weights, never trained. Under LoRA it is the policy as of its start."""
    if "ref" in roles_of_policy(context.config):
        assert context.actor is not None, "the policy is started first"
        return context.actor.with_view(View(start=True))
    return workers_of(context, role_spec(context, "ref"))


def teacher(context: ModelContext, algorithm: Algorithm) -> ModelWorkers:
    """Start the teachers: a frozen model of its own folder, several of them, or the policy itself."""
    t = context.config.teacher
    view, roles = View(t.temperature, informed=t.hint_key is not None, average=t.ema > 0), t.roles()
    if t.path == POLICY:
        assert context.actor is not None, "the policy stands before whoever is learned from"
        return context.actor.with_view(view)
    if not roles:
        raise Refused(f"teacher.path is missing: {algorithm.name} learns from a teacher; set teacher.path=FOLDER")
    specs = {role: _teacher_spec(context, algorithm, role, path) for role, path in roles.items()}
    if not t.paths:
        return workers_of(context, specs[TEACHER], view)

    def report_death(error: BaseException) -> None:
        context.say(f"warning: {error}; its samples are Invalid from now on, the other teachers go on")

    members = {
        name: workers_of(context, spec, view, report_death) for name, spec in zip(t.paths, specs.values(), strict=True)
    }
    share = 0.75 / (2 if asks_ahead(context.config) else 1)  # time remains for failed rows
    return Teachers(members, t.pick, t.shares(), share * context.config.run.wait_timeout_s)


def _teacher_spec(context: ModelContext, algorithm: Algorithm, role: str, path: str) -> RoleSpec:
    """Return the specification of a teacher in a folder or behind a URL. It must have the policy's tokenizer."""
    key = f"teacher.path{role.removeprefix(TEACHER).replace('_', 's.', 1)}"
    config, base = context.config, base_of(path, context.config.model.path)
    spec, adapter = role_spec(context, role, path=base), Path(path) if base != path else None
    spec = replace(spec, context=replace(spec.context, top_k=config.teacher.top_k, adapter=adapter))
    ours = load_tokenizer(config.model.tokenizer_path or config.model.path, trust_remote_code=False)
    if is_url(path):
        texts = tuple((text, ids) for text, ids in drawn_texts(ours, texts=COMPARED_TEXTS))
        top = any(need.output == "topk_ids" for need in algorithm.needs(1))
        url, secret = split_key(path)
        longest, vocab = longest_sequence(config), describe_model(config.model.path).vocab
        # a server that hangs must fail before the driver's deadline; a step may wait for two calls
        budget_s = config.run.wait_timeout_s / (3 if asks_ahead(config) else 2)
        served = ServedAt(url=url, key=secret, longest=longest, vocab=vocab, texts=texts, top=top, budget_s=budget_s)
        return replace(spec, engine="verl.model_engine.served:build", options=served, behind_server=True)
    if adapter is not None:
        context.say(f"{key}={path}: an adapter, of the model in {base}{_shared(context, role)}")
    words = base if adapter is not None and not has_tokenizer(adapter) else path
    refuse_other_words(ours, _tokenizer_of(config, key, Path(words).expanduser()), f"{key}={path}")
    return replace(spec, proven=True)


def _shared(context: ModelContext, role: str) -> str:
    """Return the end of a line about a role's adapter: where the role computes, if it has no model of its own."""
    if role not in roles_of_policy(context.config):
        return ""
    kind = base_format(context.config)
    return ", as a set on the policy's frozen base" + (f", which is in {kind}" if kind != "none" else "")


def refuse_other_words(ours: Tokenizer, theirs: Tokenizer, what: str) -> None:
    """Raise ValueError if the tokenizers split text differently: texts of random tokens must get the same ids from
    both."""
    for text, a in drawn_texts(ours, texts=COMPARED_TEXTS):
        if a != (b := tuple(theirs(text, add_special_tokens=False)["input_ids"])):
            why = f"its tokenizer reads {text!r} as {list(b)}, the policy's as {list(a)}"
            raise Refused(f"{what}: {why}; take a teacher with the policy's tokenizer")


def drawn_texts(ours: Tokenizer, *, texts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield this number of texts of eight random tokens each, with the ids into which the tokenizer splits them."""
    ids, rng = sorted(ours.get_vocab().values()), random.Random(0)
    for _ in range(texts):
        text = str(ours.decode(rng.choices(ids, k=8)))
        yield text, tuple(ours(text, add_special_tokens=False)["input_ids"])


def teacher_head(config: Config) -> TeacherHead | None:
    """Return the teacher that the policy is compared with over the whole vocabulary; None if the loss reads no such
    output."""
    loss, t = settled(config.algorithm.name, config.algorithm.given()).loss, config.teacher
    if not isinstance(loss, GKD) or t.path is None:
        return None
    base = base_of(t.path, config.model.path)
    adapter = Path(t.path) if base != t.path else None
    return TeacherHead(Path(base).expanduser(), loss.beta, t.temperature, adapter)


def reward_model(context: ModelContext) -> ModelWorkers | None:
    """Start the trained reward model of `reward.model`, frozen. It must have the policy's vocabulary."""
    config = context.config
    if config.reward.model is None:
        return None
    folder = Path(config.reward.model).expanduser()
    base = base_of(str(folder), config.model.path)
    adapter = folder if base != str(folder) else None
    theirs = _tokenizer_of(config, "reward.model", folder if has_tokenizer(folder) else Path(base).expanduser())
    spec = role_spec(context, REWARD_MODEL, head="score", path=base)
    spec = replace(spec, context=replace(spec.context, adapter=adapter))
    if adapter is not None:
        context.say(f"reward.model={adapter}: an adapter, of the model in {base}{_shared(context, REWARD_MODEL)}")
    end = turn_end(theirs, config.model.template_kwargs)
    return workers_of(context, replace(spec, proven=True, turn_end=end))


def scorers_of(context: ModelContext, actor: ModelWorkers) -> dict[str, ModelWorkers]:
    """Start the reward model, by its role, if there is one. It may be opened in the policy's workers."""
    found = reward_model(replace(context, actor=actor))
    return {} if found is None else {REWARD_MODEL: found}


def _tokenizer_of(config: Config, key: str, folder: Path) -> Tokenizer:
    """Load the tokenizer of another model. Raise ValueError if its vocabulary differs from the policy's."""
    ours = load_tokenizer(config.model.tokenizer_path or config.model.path, trust_remote_code=False)
    theirs = load_tokenizer(folder, trust_remote_code=False)
    if ours.get_vocab() != theirs.get_vocab():
        raise Refused(
            f"{key}={folder} has another vocabulary than the policy ({config.model.path}): it would read other words; "
            "train it from a model with the policy's tokenizer"
        )
    return theirs


def models_of(context: ModelContext, algorithm: Algorithm, actor: ModelWorkers) -> dict[str, ModelWorkers]:
    """Start the models of all columns that the algorithm needs; return them by role, with the actor."""
    builds, context = {n.role: n.build for n in algorithm.needs(1) if n.build}, replace(context, actor=actor)
    return {"actor": actor, **{role: import_object(builds[role])(context, algorithm) for role in sorted(builds)}}


def asks_ahead(config: Config) -> bool:
    """Return whether frozen models may compute rows before the step. The packing of rows then depends on the order in
    which groups end."""
    return config.pipeline.staleness > 0 and not config.run.deterministic


def early_models(config: Config, algorithm: Algorithm, models: Mapping[str, ModelWorkers]) -> dict[str, EarlyOutputs]:
    """Return the frozen models that compute a group's rows as soon as the group is complete: those that share their
    devices with no other model."""
    made: dict[str, EarlyOutputs] = {}
    wanted = (
        algorithm.outputs_by_role(config.step.updates_per_step * config.step.epochs_per_step)
        if asks_ahead(config)
        else {}
    )
    for role, outputs in wanted.items():
        others = frozenset[str]().union(*(m.places for name, m in models.items() if name != role))
        if models[role].places.isdisjoint(others) and not models[role].trains:
            made[role] = EarlyOutputs(models[role], outputs, config.step.prompts_per_step, config.run.wait_timeout_s)
    return made


def hf_export(config: Config, *, head: Head = "lm", pad_token_id: int | None = None) -> HfExport:
    """Return the settings of the Hugging Face folder that every checkpoint contains."""
    source = Path(config.model.path).expanduser()
    return HfExport(
        source_dir=source,
        tokenizer_dir=Path(config.model.tokenizer_path) if config.model.tokenizer_path else None,
        chat_template=Path(config.model.chat_template).read_text() if config.model.chat_template else None,
        config_overrides=classifier_config(source, pad_token_id) if head == "score" else {},
    )


def role_spec(
    context: ModelContext, name: str, *, optim: OptimSpec | None = None, head: Head = "lm", path: str | None = None
) -> RoleSpec:
    """Return the specification of a model's workers. Without `optim` the model is frozen; without `path` it is
    model.path."""
    config = context.config
    lora = trained_by(config.model.lora, config.run.seed) if optim is not None else None
    kind = "none" if lora is None else base_format(config, path)
    return RoleSpec(
        name=name,
        queue=context.queue,
        engine=backend_of(config, "model").build,
        options=options_of(config, "model"),
        sync_dtype=config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype,
        context=EngineContext(
            folder=Path(path or config.model.path).expanduser(),
            head=head,
            optim=optim,
            dtype=dtype_of(config, name),
            head_dtype=config.model.head_dtype,
            device=context.devices.get(name, context.device),
            max_tokens_per_microbatch=config.step.max_tokens_per_microbatch,
            gradient_checkpointing=config.model.gradient_checkpointing,
            trust_remote_code=config.model.trust_remote_code,
            dump_dir=context.crash_dir if optim is not None else None,
            layout=context.cluster.layout,
            longest=context.longest or longest_sequence(config),
            lora=lora,
            banned=policy_banned(config, context.tokenizer),
            quantisation=cast(Kind, kind) if kind != "none" else None,
        ),
    )
