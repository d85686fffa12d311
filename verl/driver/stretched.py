"""The effect of a resume with another number of steps on the learning rate, and on the noise of the rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from verl.config.noise import noise_of
from verl.config.schema import Config
from verl.driver.models import policy_optim
from verl.model_engine.optim import learning_rate
from verl.planner.sizes import policy_updates
from verl.track.events import read_events


def stretched(config: Config, records: Path, done: int, total_steps: int) -> list[str]:
    """Return a line for the user for each value of the next step that is another one than by the schedule of the
    attempt before.

    A schedule has the length of the run: with more steps it is stretched, and the rate rises in its middle."""
    lengths = [event.data["total_steps"] for event in read_events(records, {"resumed"}) if "total_steps" in event.data]
    before = lengths[-1] if lengths else total_steps
    if not done or before == total_steps or done >= total_steps:
        return []
    verb = "stretched" if total_steps > before else "shortened"
    return [
        f"{name} {old:.1e} -> {new:.1e}".replace("e-0", "e-")
        + f": the schedule is {verb} from {before} to {total_steps} steps"
        for name, old, new in _values(config, done, before, total_steps)
        if abs(old - new) > 1e-3 * max(old, new)
    ]


def _values(config: Config, done: int, before: int, total_steps: int) -> Iterator[tuple[str, float, float]]:
    """Yield (name, value by a run of `before` steps, value by one of `total_steps`) of the next step."""

    def rate(steps: int) -> float:
        updates = policy_updates(config, steps)
        return learning_rate(policy_optim(config, updates), policy_updates(config, done))

    yield "lr", rate(before), rate(total_steps)
    if (noise := noise_of(config)) is not None:
        version = done // noise.sync_every
        old, new = (replace(noise, steps=steps).sigma_of(version) for steps in (before, total_steps))
        yield "noise sigma", old, new
