"""A run under a virtual clock, token by token: the real scheduler, and replicas with decode steps that take longer for
more sequences. It predicts the time of a step, the waits, and the staleness of what is trained."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verl.driver.scheduler import Scheduler, StepBatch
from verl.errors import Refused
from verl.planner.clock import VirtualRun

Lengths = Callable[[random.Random], int]
"""Draws the number of tokens of one answer."""
STEPS_APART = 1e-6  # decode steps; sequences with ends that differ by less end together


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths of a log-normal distribution, cut off at `most_tokens`."""

    mu: float
    sigma: float
    most_tokens: int

    def __call__(self, drawn: random.Random) -> int:
        return max(1, min(self.most_tokens, round(math.exp(drawn.gauss(self.mu, self.sigma)))))


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """Lengths that are drawn from those of a run's answers."""

    tokens: tuple[int, ...]

    def __call__(self, drawn: random.Random) -> int:
        return drawn.choice(self.tokens)

    def resampled(self, drawn: random.Random) -> RecordedLengths:
        """Return as many lengths, drawn from these with replacement: what another run of this size could have had."""
        return RecordedLengths(tuple(drawn.choices(self.tokens, k=len(self.tokens))))


def lognormal(mean_tokens: float, sigma: float, most_tokens: int) -> LogNormal:
    """Return lengths of a log-normal distribution with this mean, cut off at
    `most_tokens`; sigma is the standard deviation of the logarithm."""
    if not (mean_tokens >= 1 and 0 <= sigma < math.inf and most_tokens >= 1):
        raise Refused(f"lengths: {mean_tokens=}, {sigma=}, {most_tokens=}: a mean of 1 or more, a sigma of 0 or more")
    return LogNormal(math.log(mean_tokens) - sigma**2 / 2, sigma, most_tokens)


def lengths_like(tokens: Sequence[int]) -> RecordedLengths:
    """Return lengths that are drawn from those of a run's answers."""
    if not tokens or min(tokens) < 1:
        raise Refused(f"lengths: {len(tokens)} recorded answers, of 1 token or more each")
    return RecordedLengths(tuple(tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The time of a decode step of one replica."""

    base_s: float
    """The time of a step without sequences: reading the weights, launching kernels."""
    sequence_s: float
    """The time that each sequence adds: reading its keys and values."""

    def step_s(self, sequences: int) -> float:
        return self.base_s + self.sequence_s * sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of a step, and the replicas that sample."""

    replicas: int
    sequences: int
    """The most sequences that one replica decodes at once."""
    samples_per_prompt: int
    lengths: Lengths
    decoding: Decoding
    update_s: float
    """From a complete batch to the end of its update."""
    publish_s: float = 0.0
    """From the end of an update to the new weights in all replicas, which do not decode meanwhile."""
    shared: bool = False
    """Rollout and training share their devices: nothing is decoded during updates and publishes."""
    partial_rollout: bool = False
    """Running requests continue under new weights. Otherwise a publish waits until all of them have ended."""
    resume_s: float = 0.0
    """The seconds for which a replica computes keys and values anew, for each request that continues."""
    reward_s: float = 0.0
    """From the end of an answer to its reward."""
    tool_calls: float = 0.0
    """Calls of tools in an answer, on average."""
    tool_s: float = 0.0
    """The seconds of such a call, in which another sequence may take the place of this one in its replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The means of a simulated run per publish (`sync_every` steps), without its first ones."""

    period_s: float
    """The time from one publish to the next."""
    wait_s: float
    """The time in which the trainer waits for a batch."""
    tokens: float
    """The trained tokens of answers."""
    idle_share: float
    """The mean share of the replicas' time in which they decode nothing."""
    staleness: Mapping[int, float]
    """The share of the trained groups by the number of publishes since their admission."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.period_s


class Spans(list[tuple[str, float, float]]):
    """The (name, start, end) in seconds of what a part of a simulated run did, in order."""

    def add(self, name: str, start_s: float, end_s: float) -> None:
        """Add a span, or lengthen the last one if it is of this name and ends where this one starts."""
        if end_s <= start_s:
            return
        if self and self[-1][0] == name and self[-1][2] == start_s:
            start_s = self.pop()[1]
        self.append((name, start_s, end_s))


class _Replica:
    """An engine under the virtual clock: in each decode step every sequence gets one token."""

    def __init__(self, most: int, decoding: Decoding) -> None:
        self.most, self.decoding, self.spans = most, decoding, Spans()
        self.running: list[tuple[float, int, str]] = []  # a heap: decode steps of the replica at its end, number, group
        self.waiting: deque[tuple[int, int, str]] = deque()  # tokens, number, group
        self.steps = 0.0  # decode steps so far
        self.since_s = 0.0  # the time up to which they are counted
        self.idle_s = 0.0
        self.event = 0  # the number of its event; earlier events are void

    def count(self, now_s: float, decodes: bool) -> None:
        """Count the decode steps up to now."""
        past_s, self.since_s = now_s - self.since_s, now_s
        if decodes and self.running:
            self.steps += past_s / self.decoding.step_s(len(self.running))
            self.spans.add("decode", now_s - past_s, now_s)
        else:
            self.idle_s += past_s

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.most:
            tokens, number, group_id = self.waiting.popleft()
            heapq.heappush(self.running, (self.steps + tokens, number, group_id))

    def ended(self) -> list[tuple[int, str]]:
        """Remove the sequences that have ended, and return their numbers and groups."""
        found = []
        while self.running and self.running[0][0] <= self.steps + STEPS_APART:
            found.append(heapq.heappop(self.running)[1:])
        return found

    def pause(self, seconds: float) -> None:
        """Decode nothing for these seconds: the running sequences end so many decode steps later."""
        if self.running:
            self.steps -= seconds / self.decoding.step_s(len(self.running))

    def next_end_s(self) -> float:
        """Return the seconds until its next sequence ends."""
        return max(0.0, self.running[0][0] - self.steps) * self.decoding.step_s(len(self.running))


class SimulatedRun(VirtualRun):
    """A run of this workload. Each sample is added to the replica with the fewest, and waits there for its decode
    steps."""

    def __init__(self, scheduler: Scheduler, work: Workload, *, seed: int = 0) -> None:
        super().__init__(scheduler)
        self.work, self.rng = work, random.Random(seed)
        self.replicas = [_Replica(work.sequences, work.decoding) for _ in range(work.replicas)]
        self.loads = [0] * work.replicas  # samples of each replica that have not ended
        self.changed = set[int]()  # replicas that got samples since the last event
        self.left: dict[str, int] = {}  # samples of each group that have no reward yet
        self.turns: dict[int, deque[int]] = {}  # tokens of the turns of a sample that have not begun, by its number
        self.tokens_of: dict[str, int] = {}
        self.drawn = self.samples = 0
        self.draining = False  # a publish waits for the running requests
        self.state = (True, False)  # at the last event: replicas decode, and they begin no request
        self.free_since_s = self.waited_s = self.publish_since_s = 0.0
        self.spans = Spans()  # of the trainer
        self.trained_tokens = 0
        self.lags: Counter[int] = Counter()
        self.ends: list[tuple[float, float, int, float]] = []  # at each publish: time, waits, tokens, idle seconds

    def draw(self) -> str:
        self.drawn += 1
        return str(self.drawn)

    def play(self, group_id: str) -> None:
        self.running.add(group_id)
        self.left[group_id], self.tokens_of[group_id] = self.work.samples_per_prompt, 0
        for _ in range(self.work.samples_per_prompt):
            tokens, self.samples = self.work.lengths(self.rng), self.samples + 1
            self.tokens_of[group_id] += tokens
            index = min(range(len(self.loads)), key=self.loads.__getitem__)
            self.turns[self.samples] = self._turns(tokens)
            self.loads[index] += 1
            self._begin_turn(index, self.samples, group_id)

    def _turns(self, tokens: int) -> deque[int]:
        """Return the tokens of the turns of an answer, which are about equal, with a call between each two."""
        whole, part = divmod(self.work.tool_calls, 1)
        count = min(tokens, 1 + int(whole) + (part > 0 and self.rng.random() < part))
        return deque(tokens * (i + 1) // count - tokens * i // count for i in range(count))

    def _begin_turn(self, index: int, number: int, group_id: str) -> None:
        self.replicas[index].waiting.append((self.turns[number].popleft(), number, group_id))
        self.changed.add(index)

    def settle(self) -> None:
        """Let the replicas begin or stop after the driver's moves, and schedule when their next sequences end."""
        trains = self.batch is not None
        decodes = self.draining or not (self.publishing or (self.work.shared and trains))
        before, self.state = self.state, (decodes, self.draining)
        for index in self.changed if before == self.state else range(len(self.replicas)):
            one = self.replicas[index]
            one.count(self.now_s, before[0])
            if decodes and not self.draining:
                one.fill()
            self._schedule(index)
        self.changed.clear()

    def _schedule(self, index: int) -> None:
        one = self.replicas[index]
        one.event += 1
        if one.running and self.state[0]:
            self.at(one.next_end_s(), "decoded", f"{index} {one.event}")

    def happened(self, event: str, name: str) -> None:
        """Handle the end of sequences on a replica, of a call of a tool, or of a reward."""
        if event == "graded":
            self._graded(name)
            return
        index, number, *group = name.split()
        if event == "returned":
            self._begin_turn(int(index), int(number), *group)
        elif int(number) == self.replicas[int(index)].event:
            self._decoded(int(index))

    def _decoded(self, index: int) -> None:
        one = self.replicas[index]
        one.count(self.now_s, True)
        for number, group_id in one.ended():
            if self.turns[number]:
                self.at(self.work.tool_s, "returned", f"{index} {number} {group_id}")
                continue
            del self.turns[number]
            self.loads[index] -= 1
            if self.work.reward_s:
                self.at(self.work.reward_s, "graded", group_id)
            else:
                self._graded(group_id)
        if not self.draining:
            one.fill()
        self._schedule(index)
        if self.draining and not any(one.running for one in self.replicas):
            self.draining = False
            self.at(self.work.publish_s, "published")

    def _graded(self, group_id: str) -> None:
        self.left[group_id] -= 1
        if not self.left[group_id] and group_id in self.running:
            self.running.discard(group_id)
            self.ended(group_id)

    def update_s(self) -> float:
        return self.work.update_s

    def taken(self, batch: StepBatch) -> None:
        self.waited_s += self.now_s - self.free_since_s
        self.spans.add("wait", self.free_since_s, self.now_s)
        self.lags.update(batch.staleness)
        self.trained_tokens += sum(self.tokens_of.pop(group_id) for group_id in batch.group_ids)

    def trained(self, batch: StepBatch) -> None:
        self.spans.add("update", self.now_s - self.work.update_s, self.now_s)
        self.free_since_s = self.now_s

    def publish(self) -> None:
        self.publishing, self.publish_since_s = True, self.now_s
        self.draining = not self.work.partial_rollout and any(one.running for one in self.replicas)
        if not self.draining:
            self.at(self.work.publish_s, "published")

    def published(self) -> int:
        self.spans.add("publish", self.publish_since_s, self.now_s)
        self.free_since_s = self.now_s
        for one in self.replicas:
            one.count(self.now_s, self.state[0])
            one.pause(self.work.resume_s * len(one.running))
        self.ends.append((self.now_s, self.waited_s, self.trained_tokens, sum(one.idle_s for one in self.replicas)))
        return super().published()


def play_until(scheduler: Scheduler, work: Workload, publishes: int, seed: int = 0) -> SimulatedRun:
    """Play a run until its publish number `publishes`."""
    run = SimulatedRun(scheduler, work, seed=seed)
    while len(run.ends) < publishes:
        run.admit()
        run.take()
        run.admit()  # a batch frees the look-ahead at once
        run.settle()
        assert not run.stuck, scheduler.why_waiting(run.now_s)
        run.advance()
    return run


def simulate(scheduler: Scheduler, work: Workload, *, publishes: int, warm: int = 2, seed: int = 0) -> Simulated:
    """Play a run until its publish number `publishes`, and return its means after the first `warm` ones."""
    if not 0 < warm < publishes:
        raise Refused(f"{publishes=}: more than the {warm} that do not count")
    return means_of(play_until(scheduler, work, publishes, seed), warm)


def means_of(run: SimulatedRun, warm: int) -> Simulated:
    """Return the means of a run after its first `warm` publishes."""
    (begin_s, waited_s, tokens, idle_s), (end_s, all_waited_s, all_tokens, all_idle_s) = (
        run.ends[warm - 1],
        run.ends[-1],
    )
    counted, groups = len(run.ends) - warm, run.lags.total()
    return Simulated(
        period_s=(end_s - begin_s) / counted,
        wait_s=(all_waited_s - waited_s) / counted,
        tokens=(all_tokens - tokens) / counted,
        idle_share=(all_idle_s - idle_s) / (end_s - begin_s) / run.work.replicas,
        staleness={lag: number / groups for lag, number in sorted(run.lags.items())},
    )
