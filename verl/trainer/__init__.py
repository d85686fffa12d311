"""Entry points under verl's own names, for launch scripts that exist."""

from verl.workers.torchrun import launched


def is_spare_rank() -> bool:
    """Whether torchrun started this process beside the one that drives reinforcement learning, with the batch sizes of
    the whole: the first rank is the run, the others have nothing to do."""
    launch = launched()
    if launch is None:
        return False
    if launch.rank == 0:
        alone = "this one trains alone, with the batch sizes of all; the others end"
        print(f"torchrun started {launch.world_size} processes: {alone}")
    return launch.rank != 0
