"""`python -m verl.trainer.main_ppo key=value ...`: for existing launch scripts, with verl's own defaults."""

import sys

from verl.cli import train_verb
from verl.trainer import door, is_spare_rank


def main(args: list[str], module: str = "verl.trainer.main_ppo") -> int:
    def work() -> int:
        return 0 if is_spare_rank() else train_verb(args, verl_defaults="rl")

    return door(module, "train", "Reinforcement learning.", work, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
