"""The native engine on a base in 4 or 8 bits: it computes with the codes as with the dequantised weights, and shares
the trainer's codes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hybrid
import numpy as np
import pytest
import torch
from rollouts import finish, native_core
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.accel.cpu.linear import InRows
from verl.nn.quant_linear import quantise_linears, quantised_layers
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native.codes import CodedRows, RowsProduct
from verl.rollout.native.runner import NativeRunner
from verl.types import Sampling

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    if family == "qwen3_next":
        sizes = {"hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "initializer_range": 0.05}
        return hybrid.model(family, **sizes)  # type: ignore[no-any-return]
    if family == "qwen2":  # with biases of q, k and v
        model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=False))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.normal_()
    return model.float()


def tensors(model: PreTrainedModel, *, codes: bool) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p.detach()) for name, p in model.named_parameters())
    for name, layer in quantised_layers(model).items():
        of_codes = {f"{name}.{part}": t for part, t in layer.quantised.tensors().items()}
        yield from of_codes.items() if codes else [(f"{name}.weight", layer.weight)]


def source(model: PreTrainedModel, *, codes: bool, shares: bool = True, version: int = 0) -> Any:
    lasting = {name: shares for name, _ in tensors(model, codes=codes)}
    named = {"version": version, "passes": False, "seconds": {}, "lasting": lasting}
    return SimpleNamespace(**named, tensors=lambda: tensors(model, codes=codes))


def sampled(core: EngineCore) -> tuple[list[list[int]], np.ndarray]:
    """Greedy answers to prompts of several lengths, and all log-probs with those of a scored row."""
    jobs = []
    for i in range(9):
        ids = np.random.default_rng(i).integers(0, 61, 3 + 4 * i)
        jobs.append(ActiveRequest(GenerateRequest(str(i), ids, Sampling(max_tokens=6, temperature=0.0))))
    done = finish(core, iter(jobs))
    scores = core.runner.score(np.arange(40) % 61, 1.0).logprobs
    return [done[str(i)].ids.tolist() for i in range(9)], np.concatenate([*(c.logprobs for c in done.values()), scores])


def layers_of(core: EngineCore) -> Any:
    assert isinstance(core.runner, NativeRunner)
    return core.runner.model.live.layers


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_next"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("layout", ["panels", "plain"])
def test_it_computes_as_with_the_dequantised_weights(family: str, kind: Any, layout: str) -> None:
    model = model_of(family)
    quantise_linears(model, kind, skip=("k_proj", "up_proj") if layout == "plain" else ())
    coded, plain = (
        native_core(model.config, source(model, codes=codes), layout=layout, compiled=layout == "panels")
        for codes in (True, False)
    )
    assert coded.runner.model.live.params == plain.runner.model.live.params  # type: ignore[attr-defined]
    assert isinstance(layers_of(coded)[1].qkv, RowsProduct) and not isinstance(layers_of(plain)[1].qkv, RowsProduct)
    (ids, logprobs), (expected_ids, expected) = sampled(coded), sampled(plain)
    assert ids == expected_ids
    np.testing.assert_allclose(logprobs, expected, atol=1e-6 if layout == "plain" else 3e-6)


def test_rows_have_the_same_bits_in_every_batch() -> None:
    for kind in ("nf4", "int8"):
        model = model_of("qwen3")
        quantise_linears(model, kind)  # type: ignore[arg-type]
        many, one = (
            native_core(model.config, source(model, codes=True), rows=rows, deterministic=True) for rows in (16, 1)
        )
        assert (sampled(many)[1] == sampled(one)[1]).all()


@pytest.mark.parametrize(("kind", "family"), [("nf4", "qwen2"), ("int8", "qwen3")])
def test_tensors_are_the_trainers_own_where_they_last_and_else_a_copy(kind: Any, family: str) -> None:
    model = model_of(family)
    quantise_linears(model, kind)
    embed, head = (one.weight for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    mine = {layer.codes.data_ptr(): layer.codes.nbytes for layer in quantised_layers(model).values()}
    freed = []
    for shares in (True, False):
        core = native_core(model.config, source(model, codes=True, shares=shares))
        products = [one for layer in layers_of(core) for one in (layer.qkv, layer.out, layer.mlp.up, layer.mlp.down)]
        parts = [part for one in products for part, _ in one._parts]
        assert len(parts) == len(mine) == 14 and all(isinstance(part, CodedRows) for part in parts)
        assert ({part.weight.codes.data_ptr() for part in parts} == mine.keys()) == shares
        live = core.runner.model.live  # type: ignore[attr-defined]
        assert (live.embed.data_ptr() == embed.data_ptr()) == shares
        assert isinstance(live.head, InRows) == shares and (live.tied_head is None) == (shares or embed is not head)
        assert not shares or live.head.weight.data_ptr() == head.data_ptr()
        freed.append(core.runner.drop_weights())
    assert freed[0] == 0 and freed[1] >= sum(mine.values()) + embed.nbytes + head.nbytes


def test_codes_replace_weights_and_weights_replace_codes() -> None:
    model, other = model_of("qwen3"), model_of("qwen3")
    quantise_linears(model, "nf4")
    for p in other.parameters():
        p.data.mul_(1.5)
    exact = source(other, codes=False)
    core = native_core(model.config, exact)
    first = sampled(core)[1]
    core.load(source(model, codes=True, version=1))
    coded = sampled(core)[1]
    assert (coded == sampled(native_core(model.config, source(model, codes=True)))[1]).all()
    core.load(source(other, codes=False, version=2))
    assert (sampled(core)[1] == first).all() and not (coded == first).all()
    core.prepare(source(model, codes=True, version=3))()
    assert (sampled(core)[1] == coded).all()
