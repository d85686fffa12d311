"""Answers to one prompt from the configured rollout engine, to look at a model; no training."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import uvloop

from verl.chat import render_prompt
from verl.chat.template import audit_template
from verl.config.proven import unproven
from verl.config.schema import Config
from verl.config.validate import validate
from verl.data.lost import Coverage, lost_lines
from verl.driver.assemble import checkpoint_engine, context_of, rollout_engine, sampling_of
from verl.driver.models import role_spec, workers_of
from verl.driver.setup import decoder, load_tokenizer_of, require_an_end, set_up_process, template_lines
from verl.driver.stopping import unless_stopped
from verl.rollout.base import Completion
from verl.types import derive_seed
from verl.workers.waits import Waits


def generate_once(config: Config, prompt: str, n: int) -> list[tuple[str, str, float]]:
    """Return (text, stop reason, mean log-prob per token) of n answers; greedy if rollout.temperature=0."""
    validate(config, "generate")
    set_up_process(config)
    tokenizer = load_tokenizer_of(config)
    require_an_end(config, tokenizer)
    for line in (*unproven(config, ("rollout",)), *template_lines(config, tokenizer)):
        print(line)
    lost = Coverage(tokenizer).lost(prompt)
    for line in lost_lines({"prompt": (len(prompt), len(lost))}, {"prompt": repr(lost[:20])}):
        print(f"warning: {line}")
    messages = [{"role": "user", "content": prompt}]
    kwargs = config.model.template_kwargs
    ids = render_prompt(tokenizer, messages, kwargs, audit=audit_template(tokenizer, kwargs))
    if len(ids) > config.data.max_prompt_tokens:
        raise ValueError(f"the prompt has {len(ids)} tokens, data.max_prompt_tokens={config.data.max_prompt_tokens}")
    decode = decoder(tokenizer)
    return [
        (decode(c.ids.tolist()), c.stop_reason, float(np.mean(c.logprobs)) if len(c.logprobs) else 0.0)
        for c in uvloop.run(unless_stopped(_generate(config, tokenizer, ids, n)))
    ]


async def _generate(config: Config, tokenizer: Any, ids: np.ndarray, n: int) -> list[Completion]:
    # one server is enough; no router is started
    options = {key: value for key, value in config.rollout.engine_options.items() if key != "router"}
    config = replace(config, rollout=replace(config.rollout, engine_options=options))
    context, sync, timeout_s = context_of(config), checkpoint_engine(config), config.run.wait_timeout_s
    async with contextlib.AsyncExitStack() as started:
        started.callback(context.cluster.close)
        model = workers_of(context, replace(role_spec(context, "actor"), outlet=sync.outlet()))
        started.callback(model.close)
        rollout = rollout_engine(config, tokenizer, context.devices["rollout"])
        started.push_async_callback(rollout.close)
        await sync.publish(model, [rollout], version=0, exclusive=True, on_inflight=["wait"], timeout_s=timeout_s)
        seeds = [derive_seed(config.run.seed, "generate", i) for i in range(n)]
        samplings = [replace(sampling_of(config), seed=seed) for seed in seeds]
        asked = [rollout.generate(f"generate/{i}", ids, s, prefix_key="generate") for i, s in enumerate(samplings)]
        return await Waits().wait(asyncio.gather(*asked), who="generate", what="the answers", timeout_s=timeout_s)
