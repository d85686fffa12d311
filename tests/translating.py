"""One command line in verl's keys, for tests: what it says, or a ValueError with all that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from verl.config.compat.translate import Translation, VerlDefaults, translated


def translate(
    args: Sequence[str], *, prompts_per_step: int | None = None, verl_defaults: VerlDefaults | None = None
) -> Translation:
    said, problems = translated(args, prompts_per_step=prompts_per_step, verl_defaults=verl_defaults)
    if problems:
        raise ValueError("\n".join(problems))
    return said
