"""Answers to one prompt with the configured rollout engine: a look at a model, nothing trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from verl.chat import render_prompt
from verl.config.schema import Config
from verl.driver.assemble import rollout_engine
from verl.driver.setup import decoder, device_of, load_tokenizer_of, set_up_process
from verl.model_engine.torch_engine import TorchEngine, load_causal_lm
from verl.rollout.base import Completion, RolloutEngine
from verl.types import Sampling, derive_seed
from verl.weight_sync.base import CheckedReader
from verl.weight_sync.local import LocalOutlet
from verl.weight_sync.sender import WeightSender


def generate_once(config: Config, prompt: str, n: int) -> list[tuple[str, str, float]]:
    """[(text, stop reason, mean log-prob per token)] of n answers; greedy if rollout.temperature=0."""
    set_up_process(config)
    tokenizer = load_tokenizer_of(config)
    messages = [{"role": "user", "content": prompt}]
    ids = render_prompt(tokenizer, messages, template_kwargs=config.model.template_kwargs)
    if len(ids) > config.data.max_prompt_tokens:
        raise ValueError(f"the prompt has {len(ids)} tokens, data.max_prompt_tokens={config.data.max_prompt_tokens}")
    device = device_of(config)
    engine = TorchEngine(load_causal_lm(Path(config.model.path)), dtype=config.model.dtype, device=device)
    rollout = rollout_engine(config, tokenizer, device)
    r = config.rollout
    sampling = [
        Sampling(
            max_tokens=r.max_response_tokens,
            temperature=r.temperature,
            top_p=r.top_p,
            top_k=r.top_k,
            min_p=r.min_p,
            stop=tuple(r.stop),
            stop_token_ids=tuple(r.stop_token_ids),
            seed=derive_seed(config.run.seed, "generate", i),
        )
        for i in range(n)
    ]
    found = uvloop.run(_generate(rollout, engine, ids, sampling, config.run.wait_timeout_s))
    decode = decoder(tokenizer)
    return [
        (decode(c.ids.tolist()), c.stop_reason, float(np.mean(c.logprobs)) if len(c.logprobs) else 0.0) for c in found
    ]


async def _generate(
    rollout: RolloutEngine, engine: TorchEngine, ids: np.ndarray, sampling: Sequence[Sampling], timeout_s: float
) -> list[Completion]:
    outlet = LocalOutlet()
    sent = WeightSender(outlet).send(engine, 0, (), copy=False)
    try:
        await rollout.load_weights(CheckedReader(sent.source))
        plays = [rollout.generate(f"generate/{i}", ids, s, prefix_key="generate") for i, s in enumerate(sampling)]
        return list(await asyncio.wait_for(asyncio.gather(*plays), timeout_s))
    finally:
        await rollout.close()
