"""A player with everything real but the model, in virtual time: what the tests of verl/driver/rollouts.py are played
on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fakes import FakeEngine, FunctionReward, VirtualTime

from verl.agent_loop.base import AgentLoopFactory
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.algorithms.resolve import Algorithm, resolve
from verl.data.cursor import Cursor
from verl.driver.queue_rows import QueueRows
from verl.driver.rollouts import RolloutManager
from verl.driver.scheduler import Scheduler
from verl.driver.trajectories import TrajectoryRunner
from verl.track.events import EventLog, read_events
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Refs, Sampling, Score, Task, derive_seed
from verl.workers.waits import Waits

SEED = 11
SAMPLING = Sampling(max_tokens=8)


def jitter(seed: int) -> float:
    """0 to 4 s."""
    return random.Random(seed).random() * 4


def by_id(request: Any) -> Score:
    """A reward that differs within a group and is a function of the place alone."""
    return Score((derive_seed(request.request_id) % 1000) / 1000)


def seed_of(draw: int, index: int, attempt: int = 0, purpose: str = "train", epoch: int = 0) -> int:
    """hash(run seed, purpose, epoch, draw, task, index, attempt, turn)."""
    return derive_seed(SEED, purpose, epoch, draw, f"task{draw}", index, attempt, 0)


def task_of(index: int) -> Task:
    return Task(
        task_id=f"task{index}",
        index=index,
        messages=({"role": "user", "content": f"q{index}"},),
        prompt_ids=np.array([1, 2, 3 + index % 5]),
        ground_truth=str(index),
        extra_info={"split": "train"},
        row={"ability": "math"},
    )


@dataclass
class Stage:
    """A player with everything real but the model."""

    tmp_path: Path
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(delay_s=jitter))
    reward: Callable[[Any], Any] = by_id
    loop: AgentLoopFactory = lambda server, task: SingleTurnLoop(None, server, None)
    algorithm: Algorithm = field(default_factory=lambda: resolve("grpo"))
    prompts: int = 4
    n: int = 4
    steps: int = 20
    tasks: int = 1000
    epochs: int | None = None
    staleness: float = 0.0
    oversample: float = 0.0
    sync_every: int = 1
    max_attempts: int = 1
    timeout_s: float = 600.0
    play_timeout_s: float = 600.0
    max_invalid_share: float = 1.0

    def __post_init__(self) -> None:
        self.engine.version = max(self.engine.version, 0)
        self.queue, self.waits = MemoryQueue(), Waits()
        self.events = EventLog(self.tmp_path, 0)
        self.cursor = EndingCursor(self.tasks, 0, shuffle=False, epochs=self.epochs)
        self.scheduler = Scheduler(
            prompts_per_step=self.prompts,
            total_steps=self.steps,
            staleness=self.staleness,
            oversample=self.oversample,
            sync_every=self.sync_every,
            max_draws_per_group=self.algorithm.group_filter.max_draws_per_group,
            on_exhausted=self.algorithm.group_filter.on_exhausted,
        )
        reward = self.reward if hasattr(self.reward, "score") else FunctionReward(self.reward)
        self.trajectories = TrajectoryRunner(
            engine=self.engine,
            loop=self.loop,
            reward=reward,
            decode=lambda ids: " ".join(map(str, ids)),  # type: ignore[arg-type]
            waits=self.waits,
            seed=SEED,
            max_attempts=self.max_attempts,
            timeout_s=self.timeout_s,
            reward_timeout_s=self.timeout_s,
        )
        self.rows = QueueRows(self.queue, self.waits)
        self.groups = RolloutManager(
            scheduler=self.scheduler,
            cursor=self.cursor,
            tasks=SimpleTasks(self.tasks),
            trajectories=self.trajectories,
            algorithm=self.algorithm,
            sampling=SAMPLING,
            samples_per_prompt=self.n,
            rows=self.rows,
            events=self.events,
            waits=self.waits,
            timeout_s=self.play_timeout_s,
            eager=self.staleness > 0,
            max_invalid_share=self.max_invalid_share,
            unread=len,
        )

    async def step(self, *, publish: bool = True) -> Refs:
        """One turn of the driver, without the training."""
        step = self.scheduler.next_step
        refs = await self.groups.take(step)
        self.groups.on_trained(step, refs)
        self.queue.drop(refs)
        if publish and self.scheduler.publish_due(step):
            self.engine.version += 1
            self.groups.on_published(self.engine.version)
        return refs

    def log(self, kind: str) -> list[dict[str, Any]]:
        self.events.flush()
        return [dict(e.data) for e in read_events(self.tmp_path, {kind})]

    def released(self) -> Counter[str]:
        return Counter(e["reason"] for e in self.log("released"))


class EndingCursor(Cursor):
    """A cursor that ends, as the protocol of the driver allows; None: never."""

    def __init__(self, num_tasks: int, seed: int, *, shuffle: bool, epochs: int | None) -> None:
        super().__init__(num_tasks, seed, shuffle)
        self.epochs = epochs

    def next(self) -> Any:
        ended = self.epochs is not None and self.state()["next_draw"] >= self.epochs * self.num_tasks
        return None if ended and not self.state()["returned"] else super().next()


class SimpleTasks:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Task:
        return task_of(index)


def play(test: Callable[[], Any]) -> Any:
    """Run to the end. No task may be left in the loop, and its exception handler may not be called."""
    said: list[str] = []

    async def main() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context)))
        result = await test()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"
        return result

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        result = runner.run(main())
    assert not said, said
    return result


def groups_of(refs: Refs) -> list[str]:
    return list(refs.groups())


def group_id(draw: int) -> str:
    return f"g{draw:08d}"
