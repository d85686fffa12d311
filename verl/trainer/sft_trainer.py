"""`python -m verl.trainer.sft_trainer key=value ...`: for existing SFT scripts, with verl's own defaults."""

import sys

from verl.cli import guarded, supervised
from verl.trainer import is_spare_rank


def main(args: list[str]) -> int:
    return 0 if is_spare_rank() else guarded(lambda: supervised(args, "sft", verl_defaults="sft"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
