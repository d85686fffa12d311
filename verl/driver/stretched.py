"""The effect of a resume with another number of steps on the learning rate."""

from __future__ import annotations

from pathlib import Path

from verl.config.schema import Config
from verl.driver.models import policy_optim
from verl.model_engine.optim import learning_rate
from verl.planner.sizes import policy_updates
from verl.track.events import read_events


def stretched(config: Config, records: Path, done: int, total_steps: int) -> list[str]:
    """Return a line for the user if the next step has another learning rate than by the schedule of the attempt before;
    else an empty list.

    A schedule has the length of the run: with more steps it is stretched, and the rate rises in its middle."""
    lengths = [event.data["total_steps"] for event in read_events(records, {"resumed"}) if "total_steps" in event.data]
    before = lengths[-1] if lengths else total_steps
    if not done or before == total_steps or done >= total_steps:
        return []
    updates = (policy_updates(config, steps) for steps in (before, total_steps))
    old, new = (learning_rate(policy_optim(config, n), policy_updates(config, done)) for n in updates)
    if abs(old - new) <= 1e-3 * max(old, new):
        return []
    verb = "stretched" if total_steps > before else "shortened"
    shown = f"lr {old:.1e} -> {new:.1e}".replace("e-0", "e-")
    return [f"{shown}: the schedule is {verb} from {before} to {total_steps} steps"]
