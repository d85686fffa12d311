"""What a step needs of its surroundings: the parts of a run that compute, without playing, publishing or recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.algorithms.resolve import Algorithm
from verl.config.schema import Config
from verl.driver.run import Step
from verl.types import Refs
from verl.workers.group import WorkerGroup


@dataclass(slots=True, kw_only=True)
class StepHost:
    """Stands in for a `Run` where samples come from elsewhere: a replay, the Python face, a user's own flow."""

    config: Config
    algorithm: Algorithm
    actor: WorkerGroup
    ref: WorkerGroup | None
    compute: WorkerGroup
    critic: WorkerGroup | None = None
    reward: WorkerGroup | None = None  # a recorded step has its rewards
    kl_coef: float = 0.0
    critic_warm: bool = False

    def __post_init__(self) -> None:
        if self.algorithm.kl_reward is not None and not self.kl_coef:
            self.kl_coef = self.algorithm.kl_reward.coef

    async def call(self, group: WorkerGroup, method: str, *args: Any) -> Any:
        return group.submit(method, *args, split="first").result(timeout=self.config.run.wait_timeout_s)

    async def trained(self, step: Step, refs: Refs) -> None:
        """Nothing to free: no scheduler holds slots here."""

    def close(self) -> None:
        for group in (self.actor, self.ref, self.critic, self.compute):
            if group is not None:
                group.close()
