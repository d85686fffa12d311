"""`python -m verl.trainer.sft_trainer key=value ...`: for existing SFT scripts, with verl's own defaults."""

import sys

from verl.cli import supervised_verb
from verl.trainer import door


def main(args: list[str]) -> int:
    def work() -> int:
        return supervised_verb(args, "sft", verl_defaults="sft")

    return door("verl.trainer.sft_trainer", "sft", "Supervised fine-tuning.", work, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
