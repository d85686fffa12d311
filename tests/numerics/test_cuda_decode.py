"""The whole native engine with pages through the Triton kernels, in Triton's interpreter, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreted import Launches, fix_bf16_products
from rollouts import finish
from test_rollout_numerics import CONFIGS, engine, logprobs_of, reference

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.cuda import decode
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import paged
from verl.types import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
FAMILIES = ("qwen3", "qwen2", "llama mqa", "mistral narrow window", "gemma2", "gemma3", "qwen3 moe")
PAGE = 16


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", PAGE)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))
    fix_bf16_products(monkeypatch)


def fused(config: Any, module: Any, **options: Any) -> EngineCore:
    core = engine(config, module, rows=5, compiled=False, layout="plain", paged=True, fused=True, **options)
    assert core.runner._paged is not None and core.runner._paged._ops is not None
    return core


def answers(core: EngineCore, sampling: Sampling, lengths: tuple[int, ...] = (31, 5, 1)) -> dict[str, tuple[Any, Any]]:
    """Prompts of these lengths and their completions. Three rows decode in a bucket of four, then of two and one."""
    prompts = {str(i): np.random.default_rng(i).integers(0, 67, n) for i, n in enumerate(lengths)}
    tokens = {str(i): sampling.max_tokens - 2 * i for i in range(len(lengths))}
    asked = (
        ActiveRequest(GenerateRequest(i, prompts[i], Sampling(max_tokens=n, temperature=sampling.temperature, seed=3)))
        for i, n in tokens.items()
    )
    return {i: (prompts[i], completion) for i, completion in finish(core, asked).items()}


def exact(module: Any, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs by transformers in float64."""
    module.set_experts_implementation("eager")  # its grouped product knows no float64
    logits = module.double()(torch.from_numpy(np.concatenate([prompt, ids]))[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_transformers(name: str) -> None:
    """Over the end of a page (16 and 32 tokens), within and beyond a window of 24."""
    module = reference(CONFIGS[name])
    for prompt, completion in answers(fused(CONFIGS[name], module), Sampling(max_tokens=6, temperature=0.7)).values():
        np.testing.assert_allclose(
            completion.logprobs, exact(module, prompt, completion.ids, 0.7), atol=1e-6, rtol=5e-7
        )


def test_a_row_in_several_parts_equals_transformers() -> None:
    module = reference(CONFIGS["qwen3"])
    core = fused(CONFIGS["qwen3"], module, max_context_tokens=512, max_prefill_tokens=512)
    for prompt, completion in answers(core, Sampling(max_tokens=6, temperature=0.0), (300, 254)).values():
        np.testing.assert_allclose(completion.logprobs, exact(module, prompt, completion.ids, 1.0), atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_bfloat16_is_as_far_from_float32_as_the_plain_path(name: str) -> None:
    """Norms are rounded at the same places, so bf16 through the kernels is not a coarser bf16."""
    module, rounded = (reference(CONFIGS[name], torch.bfloat16) for _ in range(2))
    plain = engine(CONFIGS[name], rounded, rows=5, dtype=torch.bfloat16, emulate_bf16=False, compiled=False,
                   layout="plain", paged=name != "gemma2", fused=False)  # fmt: skip
    core = fused(CONFIGS[name], rounded, dtype=torch.bfloat16, emulate_bf16=False)
    errors = []
    for one in (core, plain):
        found = answers(one, Sampling(max_tokens=6, temperature=1.0)).values()
        off = [completion.logprobs - logprobs_of(module, prompt, completion.ids, 1.0) for prompt, completion in found]
        errors.append(float(np.sqrt(np.mean(np.concatenate(off) ** 2))))
    assert errors[0] < 1.3 * errors[1], errors


def recorded_step(name: str, rows: int, max_context_tokens: int, patch: pytest.MonkeyPatch) -> list[str]:
    """The launches of one decode step of `rows` rows at position 40."""
    core = fused(CONFIGS[name], reference(CONFIGS[name]), max_context_tokens=max_context_tokens)
    step = core.runner._paged
    kv = torch.zeros(len(CONFIGS[name].to_dict().get("layer_types") or (0, 0)), 2, step._model.shape.kv_heads, 40,
                     step._model.shape.head_dim)  # fmt: skip
    step.cache.fill(0, rows, kv)
    step.cache.extend(np.full(rows, 40))
    step._model.rotary.reserve(max_context_tokens)
    inputs = torch.tensor([[1] * rows, [40] * rows, [0] * rows, [0] * rows])
    with torch.inference_mode(), Launches(patch) as launches:
        step._sample(inputs, step.cache.table.shape[1])
    return launches.names


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma2", "gemma3", "mistral window"])
@pytest.mark.parametrize("max_context_tokens", [256, 512])
def test_a_layer_is_ten_launches_at_most(name: str, max_context_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one part per row (256 tokens) nine, since nothing is merged."""
    names = recorded_step(name, 1, max_context_tokens, monkeypatch)
    layers = CONFIGS[name].num_hidden_layers
    merged = max_context_tokens > 256
    assert names.count("_attend_part") == names.count("_rotate_and_store") == names.count("_gated") == layers
    assert names.count("_merge_parts") == merged * layers and names.count("_add_norm") == 2 * layers + 1
    assert sum(n in ("mm", "addmm", "addmm_") for n in names) == 4 * layers + 1
    once = {"index_select", "mul_", "div_", "tanh_", "_reduce_block", "_draw"}  # embedding and its scale, cap, draw
    assert len([n for n in names if n not in once]) == (9 + merged) * layers + 2, names
    assert sum(n in once for n in names) <= 7


def test_what_the_kernels_lack_is_said_and_computed_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert decode.missing(cpu, 128, 4096, 256) is None
    assert "compute capability 7.5, below 8.0" in str(decode.missing(cuda, 128, 4096, 256))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert decode.missing(cuda, 128, 4096, 256) is None
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(decode.shutil, "which", lambda name: None)
    assert "no C compiler" in str(decode.missing(cuda, 128, 4096, 256))
    assert "head_dim=512" in str(decode.missing(cpu, 512, 4096, 256))
    assert "hidden_size=20000" in str(decode.missing(cpu, 128, 20000, 256))
    assert "pages of 24 tokens" in str(decode.missing(cpu, 128, 4096, 24))
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in str(decode.missing(cpu, 128, 4096, 256))
    module = reference(CONFIGS["qwen3"])
    core = engine(CONFIGS["qwen3"], module, rows=5, compiled=False, layout="plain", paged=True, fused=True)
    assert core.runner._paged._ops is None and "Triton is not installed" in core.runner.without_fused
    for prompt, completion in answers(core, Sampling(max_tokens=5, temperature=1.0)).values():
        np.testing.assert_allclose(completion.logprobs, logprobs_of(module, prompt, completion.ids, 1.0), atol=1e-5)
