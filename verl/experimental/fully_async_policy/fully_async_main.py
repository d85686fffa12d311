"""As `verl.trainer.main_ppo`, with the defaults of verl's asynchronous entry point."""

import sys
from collections.abc import Sequence

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
    return ppo(below(DEFAULTS, args), "verl.experimental.fully_async_policy.fully_async_main")


def below(defaults: Sequence[str], args: list[str]) -> list[str]:
    """Return the arguments with those defaults before them that they do not give."""
    words = [arg.lstrip("+").partition("=") for arg in args]
    given = {key for key, _, _ in words}
    packaged = {"config", "./config"}  # the folder of verl's own files
    own_file = any(key in ("--config-path", "-cp") and value not in packaged for key, _, value in words)
    return [*(() if own_file else (d for d in defaults if d.partition("=")[0] not in given)), *args]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
