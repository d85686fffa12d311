"""`python -m verl.trainer.main_ppo key=value ...`: the entry point of existing launch scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.cli import guarded, print_finished, print_notes


def main(argv: Sequence[str] | None = None) -> int:
    """verl's keys with verl's own defaults; see config/dialect.py."""
    args = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        from verl.config.load import load_config

        resolved = load_config(args, verl_defaults="rl")
        print_notes(resolved.notes)
        from verl.driver.launch import run_rl

        finished = run_rl(resolved)
        print_finished(finished.steps, finished.seconds, finished.evals, finished.dir, finished.report)
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
