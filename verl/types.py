"""The words of the project (docs/design) as frozen dataclasses. Standard library and numpy only; no torch.

Text is a view: sampled ids are never re-tokenised, and the loss mask of a sample is derived from each segment's
`source` alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from verl.medium import Grid as Grid
from verl.medium import Medium as Medium
from verl.medium import TaskImage as TaskImage

Source = Literal["prompt", "sampled", "env", "stored"]
LEARNED: frozenset[Source] = frozenset(("sampled", "stored"))
"""The sources of trained tokens: sampled by the policy, or an answer stored in the data, which no policy sampled."""
Purpose = Literal["train", "baseline", "eval"]
Cut = Literal["length", "context_full", "max_turns", "max_tool_calls", "wall"]
StopReason = Literal["eos", "stop", "abort", "tool", "no_progress", "error", Cut]
CUT: frozenset[StopReason] = frozenset(get_args(Cut))
"""The stop reasons of answers that were ended by a limit, not by the model."""
Outcome = Literal["ok", "invalid", "failed", "cancelled"]
Unit = Literal["token", "turn", "sequence", "group", "step", "update"]
Kind = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The parameters with which tokens are sampled. They are part of the sample, because the trainer applies the same
    temperature.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `stop` are strings, `stop_token_ids` ids; both end the
    response and are part of it. `seed` makes the sampled tokens a function of (seed, position) alone. `position` is
    that of the first sampled token, if the prompt ends with a part of the same response that another engine has
    sampled. `noise`: the policy samples under the exploration noise of the engine. `banned` are ids with probability 0.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    position: int = 0
    noise: bool = False
    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: at least one token must be sampled")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be >= 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be >= 0 (0 is off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1]")

    def of_call(self, max_tokens: int, seed: int) -> Sampling:
        """Return the same distribution for one call. `replace` takes twice as long, once per trajectory."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            seed=seed,
            position=self.position,
            noise=self.noise,
            banned=self.banned,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One dataset row. `row` contains all its columns; `prompt_ids` the rendered, tokenised prompt.

    media: the images of the prompt, once the task is admitted and their content is in the queue's store
    lost: why their content could not be read; "" if it could
    """

    task_id: str
    index: int
    messages: tuple[Mapping[str, Any], ...]
    prompt_ids: np.ndarray  # [P] int64
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    agent: str = ""
    images: tuple[TaskImage, ...] = ()
    media: tuple[Medium, ...] = ()
    lost: str = ""
    teacher: str = ""
    context_ids: np.ndarray | None = None
    answer_ids: np.ndarray | None = None
    taught: bool = True
    row: Mapping[str, Any] = field(default_factory=dict)


TEMPLATE = -3
"""The version of tokens that the chat template wrote around a tool's answer: ends of turns, headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens with one source and, if sampled, one weight version, or the version `TEMPLATE`.

    ids [t] int64; logprobs [t] float32 behaviour log-probs (only if sampled); side {name: [t, ...]} length-checked.
    media: the only tokens that are placeholders of media; any other token is text, whatever its id is.
    """

    ids: np.ndarray
    source: Source
    logprobs: np.ndarray | None = None
    version: int = -1
    media: tuple[Medium, ...] = ()
    side: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.ids.ndim == 1, f"segment ids must be [t], got {self.ids.shape}"
        if self.source == "sampled":
            assert self.logprobs is not None, "a sampled segment carries one behaviour log-prob per token"
            assert len(self.logprobs) == len(self.ids), f"{len(self.logprobs)} log-probs for {len(self.ids)} ids"
        assert self.source != "stored" or (self.logprobs is None and self.version == -1), "nobody drew what was stored"
        for name, channel in self.side.items():
            if len(channel) != len(self.ids):
                raise ValueError(f"side channel {name!r} has {len(channel)} rows for {len(self.ids)} tokens")
        if self.media:
            self._check_media()

    def _check_media(self) -> None:
        if self.source in LEARNED:
            raise ValueError(f"a {self.source} segment has media: what is trained is text")
        end = 0
        for m in self.media:
            if m.tokens < 1 or m.start < end or m.end > len(self.ids):
                raise ValueError(f"{m}: media are in order, apart, and whole within the {len(self.ids)} tokens")
            end = m.end


SHAPED = frozenset({"score", "overlong_penalty", "stop_properly"})
"""The components that penalties (reward/shaping.py) add to a reward."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of an attempt."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)  # The extra keys of a dict reward.
    pred: str | None = None  # The answer that the reward function found in the text.
    turn_rewards: tuple[float, ...] | None = None  # Further rewards, one per turn of the model.
    feedback: str = ""  # A text about the attempt, for a teacher that reads it.


@dataclass(frozen=True, slots=True)
class Invalid:
    """No reward exists (timeout, crash, malformed). It is part of no advantage, statistic or loss."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a task: an append-only list of segments, with its reward and outcome.

    branches: the further rows of a history that was rewritten, each beginning with its prompt. A sampled segment is in
    one row only; elsewhere the same tokens are context
    agent: the counts of the loop (`tool_calls`, seconds of tools ...)
    timeline: if it has several turns, its events `turn` and `tool` with times in seconds from its start
    """

    trajectory_id: str
    group_id: str
    task_id: str
    index: int
    purpose: Purpose
    attempt: int
    sampling: Sampling
    segments: tuple[Segment, ...]
    stop_reason: StopReason
    outcome: Outcome = "ok"
    reward: Score | Invalid | None = None
    turns: int = 1
    wall_s: float = 0.0
    error: str = ""
    branches: tuple[tuple[Segment, ...], ...] = ()
    agent: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[Mapping[str, Any], ...] = ()

    @property
    def rows(self) -> tuple[tuple[Segment, ...], ...]:
        return (self.segments, *self.branches)

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([s.ids for s in self.segments]) if self.segments else np.zeros(0, np.int64)

    @property
    def response_ids(self) -> np.ndarray:
        """The ids after the prompt of the last row, including those of the environment."""
        return response_ids_of(self.rows[-1])

    @property
    def loss_tokens(self) -> int:
        return sum(map(learned_tokens, self.rows))

    @property
    def versions(self) -> tuple[int, int]:
        """(oldest, newest) weight version of the sampled segments; (-1, -1) if there are none."""
        return versions_of(self.segments if not self.branches else [s for row in self.rows for s in row])


def learned_tokens(segments: Sequence[Segment]) -> int:
    n = 0
    for s in segments:  # a loop, because a generator costs twice as much and this runs once per trajectory
        if s.source in LEARNED:
            n += len(s.ids)
    return n


def versions_of(segments: Sequence[Segment]) -> tuple[int, int]:
    """Return (oldest, newest) weight version of the sampled segments; (-1, -1) if there are none."""
    # trajectories with one turn, the usual case
    if len(segments) == 2 and segments[1].source == "sampled" and segments[0].source == "prompt":
        return segments[1].version, segments[1].version
    found = [s.version for s in segments if s.source == "sampled"]
    return (min(found), max(found)) if found else (-1, -1)


def response_ids_of(segments: Sequence[Segment]) -> np.ndarray:
    """Return [R] int64: the ids after the first segment (the prompt). It may be a view."""
    if len(segments) == 2:
        return segments[1].ids
    return np.concatenate([s.ids for s in segments[1:]]) if len(segments) > 1 else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one task, created together by the controller. `group_id` is the only grouping key.

    row_images: of a restored group, as in `SavedGroup`: its task has no media before they are read again
    """

    group_id: str
    task: Task
    epoch: int
    draw: int
    admitted_version: int
    trajectories: tuple[Trajectory, ...] = ()
    row_images: tuple[str, ...] | None = ()


def fact(default: Any = MISSING, *, factory: Any = MISSING, column: str = "") -> Any:
    """Return a field of `Facts` with a default. column: algorithms read it under this name, per sequence
    (`Columns.sequence`), once a row has another value than the default."""
    if default is MISSING:
        return field(default_factory=factory, metadata={"column": column})
    return field(default=default, metadata={"column": column})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The scalars of a sample that do not follow from its tokens, declared once. `Sample`, `Ref` and the recorded
    `SampleRow` are subclasses. The queue's column `facts` is their encoding, and each fact is a column of samples/
    under its own name. Types are str (also a Literal or None), bool, int, float, and a mapping to float."""

    sample_id: str
    trajectory_id: str
    group_id: str
    purpose: Purpose
    task_id: str = ""
    stop_reason: StopReason = "eos"
    outcome: Outcome = "ok"
    temperature: float = 1.0
    """The temperature of sampling, which the trainer applies to the logits too."""
    reward: float = float("nan")
    """The reward; NaN if there is none."""
    components: Mapping[str, float] = fact(factory=dict, column="component")
    """The named parts of the reward."""
    adapter: str | None = None
    """The adapter with which the model computes this sample. None: the model itself."""
    teacher: str = fact("", column="teacher")
    """The name of the sample's teacher, if the run has several."""
    taught: bool = fact(True, column="taught")
    """False if the teacher's prompt needs feedback about the attempt and there is none."""
    copies: int = fact(1, column="copies")
    """The number of rows as which this row counts in its optimizer step (PF-PPO). 0: it was not selected."""
    noise_sigma: float = fact(0.0, column="noise_sigma")
    """The largest standard deviation of the exploration noise under which its tokens were sampled; 0 without noise."""
    banned: bool = False
    """It was sampled with `Sampling.banned`, and the trainer gives these ids probability 0 too."""

    @property
    def truncated(self) -> bool:
        """True if the answer was ended by a limit, not by the model."""
        return self.stop_reason in CUT


FACTS = tuple(f.name for f in fields(Facts))


def facts_of(row: Facts) -> dict[str, Any]:
    """Return the facts of a sample, ref or record by name."""
    return {name: getattr(row, name) for name in FACTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Facts):
    """One training row linearised from a trajectory (the trajectory is the unit of sequence means and advantages)."""

    segments: tuple[Segment, ...]
    context: np.ndarray | None = None
    """[1 + C] int64: the number of first tokens that a teacher's prompt replaces, and its ids."""

    @property
    def total_tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    @property
    def media(self) -> tuple[str, ...]:
        """The references of its media, in order."""
        return tuple(medium.reference for segment in self.segments for medium in segment.media)

    @property
    def loss_tokens(self) -> int:
        """The number of sampled and stored tokens, without the first one of the row, which has no predictor."""
        n = learned_tokens(self.segments)
        return n - (1 if self.segments and self.segments[0].source in LEARNED and len(self.segments[0].ids) else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref(Facts):
    """The driver's record of one sample: only scalars, enough to select, balance and plan. Never tensors."""

    prompt_tokens: int
    total_tokens: int
    loss_tokens: int
    version_min: int
    version_max: int
    stored: bool = False
    """True for an answer that no policy sampled: it has no version, and usually no reward."""


class Refs(tuple[Ref, ...]):
    """An ordered collection of `Ref`. Its order is the row order of every column that is read with it."""

    __slots__ = ()

    @property
    def ids(self) -> list[str]:
        return [r.sample_id for r in self]

    def of(self, purpose: Purpose) -> Refs:
        return Refs(r for r in self if r.purpose == purpose)

    def sampled(self) -> Refs:
        """The refs of samples that the policy sampled; stored answers are left out."""
        return Refs(r for r in self if not r.stored)

    def rewarded(self) -> Refs:
        """The refs of samples that take part in advantages. Stored answers without a reward are left out."""
        return Refs(r for r in self if not r.stored or r.reward == r.reward)

    def groups(self) -> dict[str, Refs]:
        found: dict[str, list[Ref]] = {}
        for r in self:
            found.setdefault(r.group_id, []).append(r)
        return {g: Refs(rs) for g, rs in found.items()}


def ref_of(sample: Sample) -> Ref:
    oldest, newest = versions_of(sample.segments)
    return Ref(
        **facts_of(sample),
        prompt_tokens=len(sample.segments[0].ids),
        total_tokens=sample.total_tokens,
        loss_tokens=sample.loss_tokens,
        version_min=oldest,
        version_max=newest,
        stored=any(s.source == "stored" for s in sample.segments),
    )


def with_task(sample: Sample, task: Task) -> Sample:
    """Return the sample with the facts of its task that teachers need. A row that does not begin with the task's
    prompt, because its history was rewritten, gets no teacher context."""
    n, context = len(task.prompt_ids), None
    if task.context_ids is not None:
        first = np.concatenate([s.ids for s in sample.segments])[:n]
        if np.array_equal(first, task.prompt_ids):
            context = np.concatenate([[n], task.context_ids]).astype(np.int64)
    if context is None and not task.teacher and task.taught:
        return sample  # `replace` is not free, and this runs once per trajectory
    return replace(sample, teacher=task.teacher, context=context, taught=task.taught)


ROUTES, NO_ROUTE = "routed_experts", -1
"""The side channel with the experts [t, layers with experts, k] that first computed a token in the rollout, and the
value for a token that was not computed there: the last one of an answer."""
NOISE_SIDE = "noise_sigma"
"""The side channel with the standard deviation of the exploration noise under which a token was sampled."""


def _noise_of(segments: Sequence[Segment]) -> float:
    """Return the largest standard deviation of the noise under which these segments were sampled."""
    return max((float(s.side[NOISE_SIDE].max()) for s in segments if len(s.side.get(NOISE_SIDE, ()))), default=0.0)


def samples_of(trajectory: Trajectory) -> tuple[Sample, ...]:
    """Return one sample for each row of a trajectory. An append-only trajectory has exactly one row."""
    score = trajectory.reward
    return tuple(
        Sample(
            sample_id=f"{trajectory.trajectory_id}#{k}",
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            purpose=trajectory.purpose,
            task_id=trajectory.task_id,
            stop_reason=trajectory.stop_reason,
            outcome=trajectory.outcome,
            temperature=trajectory.sampling.temperature,
            reward=score.value if isinstance(score, Score) else float("nan"),
            components=score.components if isinstance(score, Score) else {},
            noise_sigma=_noise_of(segments) if trajectory.sampling.noise else 0.0,
            banned=bool(trajectory.sampling.banned) and all(s.source != "stored" for s in segments),
            segments=segments,
        )
        for k, segments in enumerate(trajectory.rows)
    )


def derive_seed(*parts: object) -> int:
    """Return a 63-bit hash of the parts as a seed. It does not depend on batch, worker, restart or order.

    seed(sample) = derive_seed(run seed, purpose, epoch, draw, task, index, turn, attempt)
    """
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that can be reduced over micro-batches and ranks: (total, count, unit). It is reduced once, at the end
    of a step.

    kind: mean: total / count; sum: total; max, min: the extreme of the totals; last: the later one
    """

    total: float
    count: float = 1.0
    unit: Unit = "step"
    kind: Kind = "mean"

    def merge(self, other: Metric) -> Metric:
        assert (self.unit, self.kind) == (other.unit, other.kind), f"cannot merge {self} with {other}"
        if self.kind in ("mean", "sum"):
            return Metric(self.total + other.total, self.count + other.count, self.unit, self.kind)
        if self.kind == "last":
            return other
        extreme = max if self.kind == "max" else min
        return Metric(extreme(self.total, other.total), self.count + other.count, self.unit, self.kind)

    @property
    def value(self) -> float:
        if self.kind != "mean":
            return self.total
        return self.total / self.count if self.count else float("nan")


Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge the metrics of micro-batches, ranks or phases; the result does not depend on how they were split."""
    out: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            out[name] = out[name].merge(metric) if name in out else metric
    return out


def as_ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids, dtype=np.int64)
