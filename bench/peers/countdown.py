"""A slow tool, the same for every arm: an environment of TRL's kind, and the rows that use it.

prompt    40*7=
call      calculator(expression="40*7")
result    40*6, after a while; 40*5 to the next one, and so on
answer    #40, once the result was 40*0
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from typing import Any

TRAJECTORIES, CALLS, MEAN_S = 64, 7, 0.5


def waits_s(number: int) -> list[float]:
    """[CALLS] of the trajectory that began as the number-th of its step."""
    rng = random.Random(number)
    return [rng.expovariate(1 / MEAN_S) for _ in range(CALLS)]


class AtOnce:
    """The same, without a wait: what is left is generation."""

    def reset(self, **columns: Any) -> None:
        self.waits_s = [0.0] * CALLS

    async def calculator(self, expression: str) -> str:
        """
        Count down.

        Args:
            expression: Such as 12*7.
        """
        found = re.fullmatch(r"(\d\d)\*([1-9])", expression)
        if found is None:
            raise ValueError("it takes NUMBER*NUMBER")
        await asyncio.sleep(self.waits_s.pop() if self.waits_s else 0.0)
        return f"{found[1]}*{int(found[2]) - 1}"


class Countdown(AtOnce):
    """Waits are drawn. The first step, which is dropped in every arm, waits for nothing."""

    _begun = itertools.count()

    def reset(self, **columns: Any) -> None:
        step, number = divmod(next(self._begun), TRAJECTORIES)
        self.waits_s = waits_s(number) if step else [0.0] * CALLS
