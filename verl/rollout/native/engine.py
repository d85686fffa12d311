"""The embedded rollout engine: in-process continuous batching, no extra to install, CPU or one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.rollout.base import Capabilities, DecodeFn
from verl.rollout.native.architecture import ARCHITECTURES
from verl.rollout.native.draft import Drafter
from verl.rollout.native.front import AsyncEngine
from verl.rollout.native.runner import NativeRunner


class NativeEngine(AsyncEngine):
    """Weights come by `load_weights`; there is nothing to generate with before the first.

    `deterministic`: a sequence's tokens and log-probs are bitwise independent of what else is in the batch, for the
    price of fixed decode shapes. `lanes`: CPU threads that each decode a share of the rows (None: all of torch's).
    `num_speculative_tokens`: of a row that are guessed per step from its own and its siblings' texts and kept if the row's draws
    confirm them, where a step has room for more rows at no cost (0: none); no result changes.
    `max_kv_tokens`: that resident sequences may come to hold together (None: all rows at full length); more wait.
    `compiled`: use kernels.c on a CPU where it compiles; `without_kernels` is the reason if it does not.
    """

    def __init__(
        self,
        hf_config: Any,
        *,
        max_context_tokens: int,
        eos_token_ids: Sequence[int],
        decode: DecodeFn | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_concurrent_sequences: int = 256,
        max_prefill_tokens: int = 8192,
        prefix_cache_tokens: int = 65536,
        deterministic: bool = False,
        lanes: int | None = None,
        compiled: bool = True,
        num_speculative_tokens: int = 0,
        max_kv_tokens: int | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype={dtype}: native computes float32 or bfloat16")
        check_positive(
            max_context_tokens=max_context_tokens,
            max_concurrent_sequences=max_concurrent_sequences,
            max_prefill_tokens=max_prefill_tokens,
            lanes=1 if lanes is None else lanes,
        )
        if num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: must be 0 (no guesses) or more")
        runner = NativeRunner(
            hf_config,
            max_context_tokens=max_context_tokens,
            dtype=dtype,
            device=torch.device(device),
            max_rows=max_concurrent_sequences,
            max_prefill_tokens=max_prefill_tokens,
            prefix_cache_tokens=prefix_cache_tokens,
            deterministic=deterministic,
            lanes=torch.get_num_threads() if lanes is None else lanes,
            compiled=compiled,
            max_kv_tokens=max_kv_tokens,
        )
        self.without_kernels = runner.without_kernels
        capabilities = Capabilities(
            logprobs="processed",
            prefix_cache=prefix_cache_tokens > 0,
            in_flight_update=True,
            architectures=tuple(ARCHITECTURES),
            max_context_tokens=max_context_tokens,
        )
        speculation = (
            (Drafter(num_speculative_tokens, max_concurrent_sequences), runner) if num_speculative_tokens else None
        )
        super().__init__(
            runner, eos_token_ids=eos_token_ids, decode=decode, capabilities=capabilities, speculation=speculation
        )


def check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
