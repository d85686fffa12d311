"""`python -m verl.trainer.sft_trainer key=value ...`: for existing SFT scripts, with verl's own defaults."""

import sys

from verl.cli import guarded, supervised


def main(args: list[str]) -> int:
    return guarded(lambda: supervised(args, "sft", verl_defaults="sft"), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
