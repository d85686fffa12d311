"""`python -m verl.trainer.main_ppo key=value ...`: for existing launch scripts, with verl's own defaults."""

import sys

from verl.cli import guarded, train
from verl.trainer import is_spare_rank


def main(args: list[str]) -> int:
    return 0 if is_spare_rank() else guarded(lambda: train(args, verl_defaults="rl"), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
