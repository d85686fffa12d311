"""`python -m verl.trainer.sft_trainer key=value ...`: for existing SFT scripts, with verl's own defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.cli import guarded, supervised


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: supervised(args, "sft", verl_defaults="sft"))


if __name__ == "__main__":
    sys.exit(main())
