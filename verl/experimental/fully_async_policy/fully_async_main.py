"""As `verl.trainer.main_ppo`, with the defaults of verl's asynchronous entry point."""

import sys

from verl.trainer.main_ppo import main as ppo

DEFAULTS = (
    "data.train_batch_size=0",
    "async_training.staleness_threshold=0.1",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=1",
    "async_training.partial_rollout=True",
)


def main(args: list[str]) -> int:
    """Run with verl's defaults below the arguments; a file of the user's has its own."""
    given = {arg.lstrip("+").partition("=")[0] for arg in args}
    own_file = bool(given & {"--config-path", "-cp"})
    beside = [] if own_file else [default for default in DEFAULTS if default.partition("=")[0] not in given]
    return ppo([*beside, *args], "verl.experimental.fully_async_policy.fully_async_main")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
