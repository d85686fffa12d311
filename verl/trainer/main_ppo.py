"""`python -m verl.trainer.main_ppo key=value ...`: for existing launch scripts, with verl's own defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.cli import guarded, train


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: train(args, verl_defaults="rl"))


if __name__ == "__main__":
    sys.exit(main())
