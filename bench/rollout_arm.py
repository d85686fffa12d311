"""The same rollouts by verl's native engine.

python bench/rollout_arm.py SPEC.json RESULT.json
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from verl.rollout.base import GenerateRequest


async def run(spec: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig

    import verl
    from verl.model_engine.hf_model import load_causal_lm
    from verl.model_engine.torch_engine import DTYPES
    from verl.rollout.base import RolloutContext
    from verl.rollout.native.engine import build
    from verl.rollout.native.options import Options
    from verl.serve import FolderWeights
    from verl.types import Sampling

    torch.set_num_threads(spec["threads"])
    model = load_causal_lm(Path(spec["model"]))

    context = RolloutContext(
        hf_config=AutoConfig.from_pretrained(spec["model"]),
        max_context_tokens=spec["max_context_tokens"],
        dtype=DTYPES[spec["dtype"]],
    )
    engine = build(Options(), context)
    await engine.load_weights(FolderWeights(model))
    rounds = []
    for number, (prompts, lengths) in enumerate(spec["rollouts"]):
        began, own = time.perf_counter(), psutil.Process().cpu_times()
        calls = [
            engine.generate(
                GenerateRequest(
                    f"{number}/{i}",
                    np.asarray(ids),
                    Sampling(max_tokens=n, temperature=spec["temperature"], seed=i, ignore_eos=True),
                )
            )
            for i, (ids, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        done = await asyncio.gather(*calls)
        wall, after = time.perf_counter() - began, psutil.Process().cpu_times()
        assert [len(c.ids) for c in done] == lengths and all(len(c.logprobs) == len(c.ids) for c in done)
        rounds.append(
            {"wall_s": wall, "cpu_s": after.user + after.system - own.user - own.system, "tokens": sum(lengths)}
        )
    stats = engine.stats()
    await engine.close()
    versions = {"verl": verl.__version__, "torch": torch.__version__}
    return {"rollouts": rounds[1:], "versions": versions, "prefill_tokens": stats["prefill_tokens"]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))))
