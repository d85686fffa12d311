"""`python -m verl.trainer.sft_trainer key=value ...`: the entry point of existing SFT scripts, with verl's own defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.cli import guarded, sft


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: sft(args, verl_defaults="sft"))


if __name__ == "__main__":
    sys.exit(main())
