"""As `verl.trainer.main_ppo`, one step ahead: the prompts of the next step are answered while this one is trained."""

import sys

from verl.experimental.fully_async_policy.fully_async_main import below
from verl.trainer.main_ppo import main as ppo

DEFAULTS = ("async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=1")


def main(args: list[str]) -> int:
    """Run with verl's defaults below the arguments; a file of the user's has its own."""
    return ppo(below(DEFAULTS, args), "verl.experimental.one_step_off_policy.main_ppo")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
