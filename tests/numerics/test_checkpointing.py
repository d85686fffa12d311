"""Layers that are computed again in the backward pass, whole or without their products: the same gradients in less
memory, as much as the plan says."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from live_bytes import LiveBytes
from test_attention import make, rows, run
from test_engine import VOCAB, samples
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.batch import pack
from verl.config.model_files import ModelFacts
from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.model_engine.memory import RankWork, layer_bytes_per_token, memory
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn import attention, recompute
from verl.types import Sample, Segment

POLICIES = ("none", "selective", "full")
NAMES = ("qwen3", "qwen2", "llama", "mistral", "gemma2", "gpt2")
COPY: dict[str, Any] = {"dtype": "bfloat16", "emulate_bf16": False, "copies_weights": True}


class Count(TorchDispatchMode):
    """The operations of a pass by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@each("name, options", [(name, o) for name in NAMES for o in ({}, {"dtype": "float32"}, COPY)])
def test_every_policy_has_the_bits_of_none(name: str, options: dict[str, Any]) -> None:
    model, batch = make(name), pack(rows())
    logprobs, exact = run(model, batch, **options)
    for policy in POLICIES[1:]:
        again, found = run(model, batch, **options, gradient_checkpointing=policy)
        assert torch.equal(again, logprobs), policy
        assert all(torch.equal(g, found[n]) for n, g in exact.items()), policy


def test_selective_repeats_no_product_and_full_all_that_are_read_again() -> None:
    model, batch = make("qwen3"), pack(rows())
    counts = {}
    for policy in POLICIES:
        with Count() as count:
            run(model, batch, dtype="float32", gradient_checkpointing=policy)
        counts[policy] = count.of
    layers = model.config.num_hidden_layers
    assert counts["selective"]["mm"] == counts["none"]["mm"]
    assert counts["full"]["mm"] == counts["none"]["mm"] + 6 * layers  # the last one is not read in the backward pass


def test_another_word_is_refused() -> None:
    with pytest.raises(Refused, match="gradient_checkpointing=auto: an engine has none, selective and full"):
        run(make("qwen3"), pack(rows()), gradient_checkpointing="auto")


# -- memory ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("verl_tests::flash", mutates_args=())
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As large and as long alive as what a flash kernel has; its numbers are not read."""
    return torch.zeros_like(q)


flash.register_fake(lambda q, k, v: torch.empty_like(q))
flash.register_autograd(
    lambda ctx, d_out: tuple(torch.zeros_like(x) for x in ctx.saved_tensors[1:]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, *inputs),
)

SHAPE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}
FAMILIES = {
    "qwen3": lambda layers: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, vocab_size=VOCAB, num_key_value_heads=8, num_hidden_layers=layers)
    ),
    "llama": lambda layers: LlamaForCausalLM(
        LlamaConfig(**SHAPE, vocab_size=VOCAB, num_key_value_heads=8, num_hidden_layers=layers)
    ),
}
"""Layers of the shape of Qwen3-0.6B."""


def facts(family: str, layers: int) -> ModelFacts:
    given: dict[str, Any] = {
        **{"folder": "", "architecture": "", "layers": layers, "hidden": 1024, "intermediate": 3072, "heads": 16},
        **{"kv_heads": 8, "head_dim": 128, "vocab": VOCAB, "max_context_tokens": None, "tied": True},
        **{
            "has_output_head": True,
            "parameters": 10**7,
            "largest_parameters": 10**4,
            "body_parameters": 10**7,
            "embedding_parameters": 10**4,
        },
        **{"expert_parameters": 0, "stored_dtype": "", "stored_bytes": 0, "has_chat_template": False},
    }
    return ModelFacts(**given, model_type=family)


def one_row(tokens: int) -> Sample:
    ids = np.arange(tokens) % VOCAB
    first = samples(1)[0]
    return Sample(
        **{name: getattr(first, name) for name in ("sample_id", "trajectory_id", "group_id", "purpose")},
        segments=(Segment(ids=ids, source="prompt"), *first.segments[1:]),
    )


TOKENS = (8192, 16384)
"""So many that gradients of weights are small beside activations."""


@cache
def engine_of(family: str, layers: int, policy: str, dtype: str) -> TorchEngine:
    with torch.device("meta"):
        model = FAMILIES[family](layers)
    settings = EngineSettings(
        optim=OptimSpec(lr=1.0),
        dtype=dtype,
        device="meta",
        gradient_checkpointing=policy,
        max_tokens_per_microbatch=10**6,
    )
    engine = TorchEngine(model, settings)
    with engine.passes._compute_weights():  # the copy of its weights is made, and not counted
        return engine


def measured(family: str, layers: int, policy: str, dtype: str, tokens: int) -> tuple[int, int]:
    """The bytes that are alive between the passes of one row, and the most at once in both, on the device `meta`."""
    engine, batch = engine_of(family, layers, policy, dtype), pack([one_row(tokens)])
    with LiveBytes() as live, engine.passes._compute_weights():
        hidden = engine.passes._hidden(batch)
        between = live.now
        hidden.sum().backward()
    engine.local.model.zero_grad()
    return between, live.peak


def per_token(family: str, policy: str, dtype: str, layers: int) -> tuple[float, float]:
    few, many = (measured(family, layers, policy, dtype, tokens) for tokens in TOKENS)
    return tuple((b - a) / (TOKENS[1] - TOKENS[0]) for a, b in zip(few, many, strict=True))  # type: ignore[return-value]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_attend", lambda plan, q, k, v, *_: torch.ops.verl_tests.flash(q, k, v))
    monkeypatch.setattr(recompute, "KEPT", (*recompute.KEPT, "verl_tests.flash"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_policy_keeps_what_the_plan_says(family: str, dtype: str, as_on_a_gpu: None) -> None:
    kept = {}
    for policy in POLICIES:
        two, four = (per_token(family, policy, dtype, layers) for layers in (2, 4))
        work = RankWork(tokens=1, passes=2, device="cuda", dtype=dtype, checkpointing=policy)
        kept[policy] = (four[0] - two[0]) / 2
        planned = layer_bytes_per_token(facts(family, 4), Layout(), work, policy)
        assert kept[policy] <= 1.01 * planned <= 1.25 * kept[policy], (policy, kept[policy], planned)
        peak = memory(facts(family, 4), Layout(), work)["activations"]
        assert four[1] <= 1.06 * peak <= 1.35 * four[1], (policy, four[1], peak)
    assert kept["full"] < kept["selective"] / 10
    if family == "qwen3":  # llama, without norms of queries and keys, keeps fewer bytes than its products have
        assert kept["selective"] < 0.9 * kept["none"]
