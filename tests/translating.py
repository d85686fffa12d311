"""One command line with keys of verl's, for tests: its translation, or a ValueError with all that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from verl.config.compat.translate import translated
from verl.config.overrides import Translation, VerlDefaults, read_line


def translate(
    args: Sequence[str], *, prompts_per_step: int | None = None, verl_defaults: VerlDefaults | None = None
) -> Translation:
    line = read_line(args)
    made, problems = translated(line.rest, line.native, prompts_per_step=prompts_per_step, verl_defaults=verl_defaults)
    if line.faults or problems:
        raise ValueError("\n".join([*line.faults, *problems]))
    return made
