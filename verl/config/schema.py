"""One typed configuration tree. Units are in the names; each field declares the bounds and choices of its key.

No torch here. `load.py` composes the tree (Hydra), `plan.py` derives every size from it, `compat/` maps verl's own
keys, `backends.py` names the engines, each of which brings the options below its `engine_options`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from verl.agent_loop.sections import AgentConfig
from verl.algorithms.sections import CriticConfig, PreferenceConfig, TeacherConfig
from verl.bounds import (
    Betas,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    adjustable,
    one_of,
)
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.rollout.server.options import ServeConfig
from verl.track.health import HealthLimits
from verl.workers.sections import ClusterConfig, ParallelConfig

COMPUTE_SCORE, BY_DATA_SOURCE = "compute_score", "verl.reward.compute"
"""The name of a reward function that is not given, and the module of the rules."""
Sink = Annotated[str, one_of("console|jsonl|tensorboard|wandb")]
FIRST_RUN = (
    *("model.path", "data.train_files", "data.eval_files", "data.max_prompt_tokens", "reward.path", "algorithm.name"),
    *("step.prompts_per_step", "step.samples_per_prompt", "rollout.max_response_tokens", "optim.lr"),
    *("run.name", "run.total_steps"),
)
"""All that a first run has to think about; every other key has a default that fits."""


@dataclass(frozen=True)
class RunConfig:
    name: str = adjustable("run")  # The run directory is `<root_dir>/<name>`.
    root_dir: str = adjustable("runs")
    seed: int = 0
    total_steps: PositiveInt | None = adjustable(None)
    """Steps of the loop. Null: derived from `total_epochs` and the length of the data."""
    total_epochs: PositiveInt = adjustable(1)
    resume: str = adjustable("auto")
    """auto: from the latest valid checkpoint in its folder · never: refuse a used one · PATH"""
    deterministic: bool = adjustable(False)
    """Fixed decode shapes: a cut run is bitwise equal where batch composition is not."""
    save_every_steps: NonNegativeInt | None = adjustable(None)
    """Null: by time. 0: only at the end, and when it is stopped."""
    keep_last_checkpoints: PositiveInt = adjustable(2)
    keep_every_steps: NonNegativeInt = adjustable(0)  # Checkpoints of these steps are never pruned. 0: none.
    keep_best: str | None = adjustable(None)
    """A metric (`eval/acc/greedy`): the checkpoint with its best value is never pruned."""
    eval_every_steps: NonNegativeInt = adjustable(0)
    eval_before: bool = adjustable(True)
    eval_after: bool = adjustable(True)
    threads: PositiveInt | None = adjustable(None)  # CPU threads for torch. Null: all cores.
    grace_s: NonNegative = adjustable(25.0)
    """From SIGTERM or Ctrl-C to a saved state; a longer step is given up. `verl serve`: to the end; answers that are
    not ready by then are cut short."""
    wait_timeout_s: Positive = adjustable(600.0)  # Deadline of a wait in the loop (call, publish, batch).


@dataclass(frozen=True)
class ModelConfig:
    path: str = "???"  # A Hugging Face folder (config.json, safetensors, tokenizer).
    tokenizer_path: str | None = None
    chat_template: str | None = None  # A Jinja file that replaces the tokenizer's template.
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # For apply_chat_template (enable_thinking: false).
    trust_remote_code: bool = False
    dtype: Annotated[str, one_of("auto|bfloat16|float32")] = "auto"
    """Compute precision over float32 masters. auto: bfloat16 where the device computes it natively, else float32 (a CPU
    without AVX512-BF16 or AMX emulates bfloat16, many times slower)."""
    head_dtype: Annotated[str, one_of("auto|float32")] = "auto"
    """Precision of the head's product and logits, in training and in the rollout. auto: `dtype`. With float32 too, its
    weights and hidden states are rounded to `dtype`."""
    device: Annotated[str, one_of("auto|cpu|cuda")] = adjustable("auto")
    gradient_checkpointing: Annotated[str, one_of("none|selective|full|auto")] = adjustable("none")
    """The part of a layer that is computed again in the backward pass. selective: all but matrix products and
    attention; full: all; auto: the first of none, selective and full that fits the memory, by the plan. true is full,
    and false is none."""
    freeze: list[Annotated[str, one_of("vision|projector|audio|language")]] = field(default_factory=list)
    """Parts of a model that reads images which are not trained."""
    lora: dict[str, Any] = field(default_factory=dict)  # Of model_engine/lora_spec.py: rank, alpha, targets, path.
    quantization: Annotated[str, one_of("none|nf4|int8")] = "none"
    """The frozen base of LoRA in 4 or 8 bits, as bitsandbytes has it."""
    engine: str = adjustable("torch")
    engine_options: dict[str, Any] = adjustable(factory=dict)  # Of model_engine/options.py: attention, ...
    python: str | None = adjustable(None)
    """The bin/python of the environment that computes the models, with cluster.backend=processes. Null: this one."""


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)  # JSONL, Parquet or CSV; paths or fsspec URLs (s3://...).
    eval_files: list[str] = field(default_factory=list)
    dataset_class: str | None = None  # FILE.py:Class or module:Class, a dataset as verl's: it makes rows of the files.
    prompt_key: str = "prompt"
    messages_key: str = "messages"  # SFT rows: the conversation.
    tools_key: str | None = None
    max_prompt_tokens: PositiveInt = 1024
    filter_overlong_prompts: bool = True  # False: an over-long prompt is an error unless `truncation` is left or right.
    truncation: Annotated[str, one_of("error|left|right|middle")] = "error"  # Of over-long prompts not filtered.
    shuffle: bool = True
    seed: int | None = None  # Of the shuffle. Null: run.seed.
    max_rows: PositiveInt | None = None
    max_eval_rows: PositiveInt | None = None  # Null: all; where supervised, the first 256 are evaluated.
    num_workers: NonNegativeInt = adjustable(2)  # Processes that render, tokenise and filter.
    cache_dir: str | None = adjustable(None)  # Tokenised rows by content hash. Null: ~/.cache/verl.
    media_hosts: list[str] = adjustable(factory=list)
    """Hosts (example.org) from which images, videos and sounds that rows name by a URL are downloaded, once."""
    system_prompt: str | None = None  # Prepended when a row has no system message.
    max_tokens_per_row: Annotated[int, Meta(ge=2)] = 1024  # SFT: longer rows are refused or cut, by `truncation`.


@dataclass(frozen=True)
class AlgorithmConfig:
    name: str = "grpo"  # A preset: `verl show algorithms`.
    loss: str | None = None  # `module:function`, a user's own per-token loss in place of the preset's policy term.
    advantage: str | None = None  # `module:function`, a user's own estimator.
    options: dict[str, Any] = field(default_factory=dict)
    """The settings of algorithms/specs.py; null: the preset's. Most are keys of the tree (`algorithm.clip_low`, see
    tree.py); what few algorithms have is set as options.NAME (`verl show algorithm=NAME`)."""

    def given(self) -> dict[str, Any]:
        """The settings that are not null, by key. The preset has the others."""
        every = {**self.options, "loss": self.loss, "advantage": self.advantage}
        return {key: value for key, value in every.items() if value is not None}


@dataclass(frozen=True)
class StepConfig:
    prompts_per_step: PositiveInt = 64  # Groups taken per step; rows, where supervised.
    samples_per_prompt: PositiveInt = 8
    updates_per_step: PositiveInt = 1  # Optimizer steps per step; each takes an equal share of the groups.
    epochs_per_step: PositiveInt = 1  # Passes over the step's samples (verl: ppo_epochs).
    max_tokens_per_microbatch: PositiveInt = adjustable(16384)
    """The tokens of one forward and backward pass; a sequence is never split."""


@dataclass(frozen=True)
class OptimConfig:
    name: Annotated[str, one_of("|".join(OPTIMIZERS))] = "adamw"
    options: dict[str, Any] = field(default_factory=dict)  # Of model_engine/optimizer_table.py: momentum, rank, lr.
    lr: Positive = adjustable(1e-6)
    weight_decay: NonNegative = 0.01
    betas: Betas = field(default_factory=lambda: [0.9, 0.999])
    eps: Positive = 1e-8
    clip_grad_norm: Positive = 1.0
    schedule: Annotated[str, one_of("constant|linear|cosine|wsd")] = adjustable("constant")
    """After the warm-up. wsd: stable, then linear over the last `decay_ratio` of the run."""
    decay_ratio: PositiveShare = adjustable(0.2)
    warmup_steps: NonNegativeInt = adjustable(0)
    """Optimizer steps. The first update uses lr / (warmup_steps + 1), never 0."""
    warmup_ratio: Share = adjustable(0.0)  # Share of all optimizer steps that warms up, where `warmup_steps` is 0.
    min_lr_ratio: Share = adjustable(0.0)


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = adjustable("native")  # native | hf | vllm | server: a name of backends.ROLLOUT.
    python: str | None = None  # Of the environment that a server (vllm) is started in: its bin/python. Null: this one.
    url: str | None = None  # A server that runs already (http://127.0.0.1:8000), on this machine; several with commas.
    replicas: PositiveInt = adjustable(1)  # Engines side by side; the requests of a group go to one of them.
    dtype: Annotated[str, one_of("auto|float32|bfloat16|fp8")] = "auto"
    """auto: as the trainer computes · float32 · bfloat16 · fp8: projections in blocks of 8 bits, the rest bfloat16."""
    temperature: NonNegative = 1.0
    top_p: PositiveShare = 1.0  # Truncation is refused for training: the trainer cannot reproduce it.
    top_k: NonNegativeInt = 0
    min_p: Share = 0.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_response_tokens: PositiveInt = 1024
    max_concurrent_sequences: PositiveInt = adjustable(256)
    engine_options: dict[str, Any] = adjustable(factory=dict)  # Of rollout/native/options.py: max_kv_tokens, ...


@dataclass(frozen=True)
class PipelineConfig:
    staleness: NonNegative = 0.0  # 0: synchronous. A group is trained at most ceil(staleness) versions after admission.
    sync_every: PositiveInt = 1  # Publish the weights every so many steps.
    placement: Annotated[str, one_of("auto|colocated|split")] = adjustable("auto")
    """colocated: rollout and training share devices, and rollout sleeps while models train · split: they do not · auto:
    colocated where nothing is in flight during an update (staleness 0)."""
    partial_rollout: bool = False  # In-flight generations continue under new weights (versions are per span).
    oversample: NonNegative = 0.0  # Extra groups admitted, as a share of a step; kept if their deadline allows.
    max_attempts: PositiveInt = adjustable(2)  # Tries of one trajectory if its rollout fails or its reward is Invalid.
    max_invalid_share: Share = adjustable(0.2)
    """Stop when more than this share of a step's trajectories had no valid reward."""


@dataclass(frozen=True)
class RewardConfig:
    path: str | None = None
    """`FILE.py:function` or `module:function`; without `:function` it is compute_score. Null: by data_source, as
    verl.reward.compute_score."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_s: Positive = adjustable(30.0)
    memory_limit_mb: PositiveInt = adjustable(2048)
    num_workers: PositiveInt = adjustable(2)
    model: str | None = None
    """A folder that `verl rm` made (or any one-label sequence classifier over the policy's tokens). With `path` too,
    the function's score and `model_coef` x the model's are summed; without, the model alone is the reward."""
    model_coef: float = 1.0
    stage: Annotated[str, one_of("stream|batch")] = "stream"
    """stream: each answer is scored as it ends, beside the rollout · batch: all at once in the experience stage."""
    overlong_buffer_tokens: NonNegativeInt = 0  # DAPO soft penalty over the last so many tokens of the budget. 0: off.
    overlong_penalty: NonNegative = 1.0

    def grader(self) -> tuple[str, str]:
        """Return the file or module of the reward function, and its name."""
        path = BY_DATA_SOURCE if self.path is None else self.path
        file, colon, name = path.rpartition(":")
        named = colon and "/" not in name and not name.endswith(".py")  # pkg://module, /data:1/grade.py
        return (file, name) if named else (path, COMPUTE_SCORE)


@dataclass(frozen=True)
class EvalConfig:
    samples_per_prompt: PositiveInt = 1
    temperature: NonNegative = 0.0
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    max_response_tokens: PositiveInt | None = None  # Null: as in the rollout.
    also_sampled: bool = False  # Evaluate a second time with the rollout's own temperature (`sampled` beside `greedy`).


@dataclass(frozen=True)
class QueueConfig:
    engine: str = adjustable("memory")  # a name of backends.QUEUE.
    engine_options: dict[str, Any] = adjustable(factory=dict)  # Of transfer_queue/options.py: max_bytes, ...


@dataclass(frozen=True)
class SyncConfig:
    engine: str = adjustable("local")  # a name of backends.SYNC.
    engine_options: dict[str, Any] = adjustable(factory=dict)  # Of weight_sync/options.py: host, delta.
    canary: bool = adjustable(True)  # Log-probs of fixed probe sequences, trainer against rollout, at every publish.
    canary_tolerance: Positive | None = adjustable(None)  # Mean |dlogp| of likely tokens. Null: what rounding explains.


@dataclass(frozen=True)
class TrackConfig:
    sinks: list[Sink] = field(default_factory=lambda: ["console", "jsonl"])  # jsonl is always written.
    project: str = "verl"
    samples_per_step: NonNegativeInt = 0  # Trajectories kept per step in samples/. 0: all (replay needs all).
    report_every_steps: NonNegativeInt = 0  # 0: the report is written at the end.
    cluster_file: str | None = None  # Figures of its devices: the seconds that they predict are recorded at the start.


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    health: HealthLimits = adjustable(factory=HealthLimits)
    track: TrackConfig = adjustable(factory=TrackConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    cluster: ClusterConfig = adjustable(factory=ClusterConfig)
    parallel: ParallelConfig = adjustable(factory=ParallelConfig)
    serve: ServeConfig = adjustable(factory=ServeConfig)
