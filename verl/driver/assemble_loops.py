"""Who plays the tasks of a run, and where: what is the user's code runs beside the driver, if not said otherwise."""

from __future__ import annotations

from typing import Any

from verl.agent_loop.registry import Loops, load_loops, of_the_user
from verl.agent_loop.runner import Runner, hosted_loops
from verl.config.schema import Config
from verl.driver.setup import eos_ids, load_tokenizer_of, set_up_process


async def loops_of(config: Config, tokenizer: Any) -> Loops:
    """In a process of their own where code of the user's plays."""
    if of_the_user(config.agent):
        return await hosted_loops(Runner(loops_there, config, silent_s=config.agent.tool_timeout_s), config, tokenizer)
    return load_loops(config, tokenizer, eos_ids(config, tokenizer))


def loops_there(config: Config) -> Loops:
    """The same loops, made in that process."""
    set_up_process(config)
    tokenizer = load_tokenizer_of(config)
    return load_loops(config, tokenizer, eos_ids(config, tokenizer))
