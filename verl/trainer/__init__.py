"""Entry points under verl's own names, for launch scripts that exist."""

from collections.abc import Callable, Sequence

from verl.cli import guarded
from verl.workers.torchrun import launched

HELP = """usage: python -m {module} key=value ...

{what}

Keys of verl that are not given have verl's own defaults; `verl show keys` lists what becomes of each. Our own keys may
be mixed in, and win: `verl {verb} --help` lists them.
"""


def door(module: str, verb: str, what: str, work: Callable[[], int], args: Sequence[str]) -> int:
    """Run one of verl's entry points, or print how it is called."""
    if {"-h", "--help"} & {*args}:
        print(HELP.format(module=module, verb=verb, what=what), end="")
        return 0
    return guarded(work, args)


def is_spare_rank() -> bool:
    """Return whether torchrun started this process beside the one that drives reinforcement learning. The first rank is
    the run and has the batch sizes of the whole; the others do nothing."""
    launch = launched()
    if launch is None:
        return False
    if launch.rank == 0:
        alone = "this one trains alone, with the batch sizes of all; the others end"
        print(f"torchrun started {launch.world_size} processes: {alone}")
    return launch.rank != 0
