"""A pass of prompts is one call of variable-length attention per layer: by Triton's kernel in its interpreter, and by
what flash kernels are given, with a double of torch's function in plain torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import decode_references as references
import numpy as np
import pytest
import torch
from each import matrix
from on_device import ON_CPU, close_to
from rollouts import finish
from test_cuda_decode import exact
from test_no_waits import NoReads
from test_rollout_numerics import CONFIGS, engine, reference

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.cuda import decode, prompts, segments
from verl.accel.cuda.rows import TRITON
from verl.accel.operations import Use
from verl.accel.table import choose
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native.model import Chunk, Model
from verl.rollout.native.ops import choose_ops
from verl.rollout.native.weights import Storage, weights_of
from verl.types import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
META, CUDA = torch.device("meta"), torch.device("cuda")
FLASH = "torch's flash kernel"
LENGTHS = (31, 5, 1, 17)  # queries and keys around blocks of 16
ADDED = 9  # tokens after a prompt that is stored


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    for name in ("BLOCK_QUERIES", "BLOCK_KEYS"):
        patch.setattr(prompts, name, 16)


def check_engine(name: str, kernel: Any, patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Prompts of several lengths, then one that continues the first of them beside a new one: log-probs of transformers
    in float64, one call of the kernel for each layer of a pass, and no other attention of prompts."""
    module, calls = reference(CONFIGS[name]), Counter[int]()

    def counted(q: Any, k: Any, v: Any, starts: Any, *rest: Any, **read: Any) -> Any:
        calls[len(starts) - 1] += 1
        return kernel(q, k, v, starts, *rest, **read)

    def refused(*args: Any) -> Any:
        raise AssertionError("a prompt is computed alone, or padded")

    patch.setattr("verl.rollout.native.model.attend_causal", refused)
    given = {"layout": "plain", "prefix_cache_tokens": 4096, "prompts": ((), ()), **options}  # passes, and no steps
    core = engine(CONFIGS[name], module, rows=5, compiled=False, **given)
    core.runner.model.prompt_attention = counted  # type: ignore[attr-defined]
    first = [np.random.default_rng(i).integers(0, 67, n) for i, n in enumerate(LENGTHS)]
    longer = [np.concatenate([first[0], np.arange(ADDED)]), np.arange(3)]
    layers = CONFIGS[name].num_hidden_layers
    for given, passes in ((first, (len(LENGTHS),)), (longer, (2,))):
        answer(core, module, given)
        if "max_prefill_tokens" not in options:
            assert calls == {n: layers for n in passes}, "one call of each layer for all prompts"
        calls.clear()
    assert core.runner.stats()["reused_tokens"] >= LENGTHS[0], "the second pass continued a stored prompt"


def answer(core: EngineCore, module: Any, given: list[np.ndarray]) -> None:
    settings = Sampling(max_tokens=3, temperature=0.7, seed=3, ignore_eos=True)
    asked = (ActiveRequest(GenerateRequest(str(i), prompt, settings)) for i, prompt in enumerate(given))
    for i, completion in finish(core, asked).items():
        expected = exact(module, given[int(i)], completion.ids, 0.7)
        np.testing.assert_allclose(completion.logprobs, expected, atol=close_to(1e-6), rtol=1e-6)


FAMILIES = ("qwen3", "qwen2", "llama mha", "llama mqa", "mistral narrow window", "gemma2", "gemma3", "qwen3 moe")


@pytest.mark.on_device
@matrix("name", FAMILIES, quick=("qwen3", "gemma2"))
def test_the_kernel_of_triton_computes_all_prompts_of_a_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    check_engine(name, prompts.attend_prompts, monkeypatch)


@pytest.mark.on_device
@matrix("name", ["qwen3", "mistral narrow window"])
def test_prompts_cut_into_passes_are_those_of_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    check_engine(name, prompts.attend_prompts, monkeypatch, max_prefill_tokens=16)


def documented(q: Any, k: Any, v: Any, bounds: Any, *, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
    """What `torch_compat.varlen_attention` computes on a card, by plain torch."""
    starts, key_starts, *longest = bounds
    assert [int(x.diff().max()) for x in (starts, key_starts)] == longest
    assert starts.dtype == key_starts.dtype == torch.int32 and window_size[1] == 0
    read = {"scale": scale, "window": window_size[0] + 1}  # -1: no window
    return references.prompt_attention(q, k, v, starts, key_starts, tuple(longest), **read)


@matrix("name", ["qwen3", "llama mqa", "mistral narrow window", "gemma3"], quick=("qwen3", "mistral narrow window"))
@pytest.mark.parametrize("passes", [False, True])
def test_flash_kernels_are_given_all_prompts_of_a_pass(name: str, passes: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(segments, "varlen_attention", documented)
    check_engine(name, segments.torch_segments, monkeypatch, **({"max_prefill_tokens": 16} if passes else {}))


@pytest.mark.parametrize(
    "dtype,sizes,kernel,why",
    [
        (torch.bfloat16, {"head_dim": 128}, FLASH, "flash-attn 2 is not installed"),
        (torch.bfloat16, {"head_dim": 128, "capped": 1}, TRITON, "variable-length kernels do not cap scores"),
        (torch.float16, {"head_dim": 20}, TRITON, "head_dim=20: torch's flash kernel computes multiples of 8"),
        (torch.float32, {"head_dim": 128}, TRITON, None),
    ],
)
def test_the_table_chooses_flash_kernels_where_they_compute_a_model(
    dtype: torch.dtype, sizes: dict[str, int], kernel: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decode, "_cannot_build", lambda: None)
    monkeypatch.setattr(segments, "flash_attn", lambda name: None)
    found = choose("prompt_attention", Use(CUDA, dtype, sizes))
    assert found is not None and found.kernel.name == kernel
    assert (why in found.passed_over.values()) if why else not found.passed_over
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose("prompt_attention", Use(CUDA, dtype, sizes)) is None, "prompts are padded there"


def test_the_engine_says_to_the_table_that_scores_are_capped() -> None:
    for name, capped in (("gemma2", 1), ("qwen3", 0)):
        runner: Any = engine(CONFIGS[name], reference(CONFIGS[name])).runner
        assert runner._use().sizes["capped"] == capped
        assert not ON_CPU or runner.model.prompt_attention is None, "a CPU pads prompts"


@matrix("name", ["qwen2", "mistral narrow window"])
@pytest.mark.parametrize("past", [0, 40])
def test_a_pass_reads_nothing_of_the_device(name: str, past: int) -> None:
    """In bfloat16 on the device `meta`, with torch's kernel."""
    model, dtype = Model(CONFIGS[name], 256, META), torch.bfloat16
    plain = choose_ops(META, dtype, compiled=False)
    model.weights = weights_of(Storage(model.shape, dtype, dtype, META), plain)
    use = Use(META, dtype, {"head_dim": model.shape.head_dim})
    found = choose("prompt_attention", use)
    assert found is not None and found.kernel.name == FLASH
    model.prompt_attention = found.call
    s, ids = model.shape, torch.empty(20, dtype=torch.int64, device=META)
    pasts = (torch.empty(s.layers, 2, s.kv_heads, n, s.head_dim, dtype=dtype, device=META) for n in (0, past))
    with NoReads() as mode:
        kv, hidden = model.prefill([Chunk(ids, each, None, None) for each in pasts])
    assert (kv.shape[3], len(hidden)) == (40, 40) and hidden.device == META
    assert mode.calls["_varlen_attn"] == s.layers
