"""Rollouts of given lengths by vLLM's CPU build, in one process, log-probs returned, prefix cache on.

python vllm_rollout.py SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def main(spec: dict[str, Any], result: Path) -> None:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(spec["threads"]),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    torch.set_num_threads(spec["threads"])
    engine = LLM(
        spec["model"],
        skip_tokenizer_init=True,
        dtype=spec["dtype"],
        enforce_eager=not spec["compiled"],
        max_model_len=spec["max_context_tokens"],
        max_num_seqs=256,
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        block_size=32,
    )
    rounds = []
    for prompts, lengths in spec["rollouts"]:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        params = [
            SamplingParams(max_tokens=n, min_tokens=n, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
            for n in lengths
        ]
        began, own = time.perf_counter(), psutil.Process().cpu_times()
        out = engine.generate(inputs, params, use_tqdm=False)
        wall, after = time.perf_counter() - began, psutil.Process().cpu_times()
        assert [len(o.outputs[0].token_ids) for o in out] == lengths and out[0].outputs[0].logprobs is not None
        rounds.append(
            {"wall_s": wall, "cpu_s": after.user + after.system - own.user - own.system, "tokens": sum(lengths)}
        )
    result.write_text(
        json.dumps({"rollouts": rounds[1:], "versions": {"vllm": vllm.__version__, "torch": torch.__version__}})
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
