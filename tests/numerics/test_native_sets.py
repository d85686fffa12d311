"""LoRA sets of the native engine against transformers with the trainer's hook on its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from each import check_each, matrix
from on_device import ON_CPU, close_to
from rollouts import finish
from test_mixed_steps import PLAIN, SIZES, steps
from test_rollout_numerics import CONFIGS, PROMPTS, engine, logprobs_of, reference
from torch import Tensor, nn

from verl.errors import Refused
from verl.nn.expert_lora import experts_of
from verl.nn.lora import low_ranks, with_low_ranks
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import paged
from verl.rollout.native.architecture import ARCHITECTURES
from verl.types import Sampling

LINEAR = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "shared_expert_gate",
)
Sets = dict[str, tuple[ParameterSet, dict[str, Tensor]]]
DECODE_OPS = PLAIN if ON_CPU else None
"""Of fused steps: `PLAIN` reads numbers on the host, which no graph of a GPU can contain: its own are chosen."""
FUSED: dict[str, Any] = {"compiled": False, "layout": "plain", "paged": True, "decode_ops": DECODE_OPS}
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "torch": {"compiled": False, "layout": "plain"},
    **({"packed": {"compiled": False, "layout": "packed"}} if ON_CPU else {}),  # a layout of oneDNN
    "pages": {"compiled": False, "layout": "plain", "paged": True},
    "fused pages": {**FUSED, "prompts": ((), ())},
    "mixed steps": {**FUSED, "prompts": (SIZES, ())},
    "fixed rows": {"compiled": False, "layout": "plain", "deterministic": True},
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 16)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))


def lora(module: nn.Module, name: str, rank: int, scale: float, *ends: str, seed: int, experts: bool = False) -> Any:
    """A set of random factors of the linear layers whose names end so, and of experts."""
    every = {f"{n}.weight" for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    shapes = {n.removesuffix(".weight"): p.shape for n, p in module.named_parameters() if n in every}
    shapes = {n: shape for n, shape in shapes.items() if n.endswith(ends or LINEAR)}
    shapes |= {n: module.get_parameter(n).shape for n in experts_of(module) if experts}
    one = ParameterSet(id=name, kind="lora", base="x", rank=rank, scale=scale, targets=tuple(shapes))
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for target, (*many, out, into) in shapes.items():
        a, b = one.factors(target)
        tensors[a] = torch.randn(*many, rank, into, generator=draw) * 0.15
        tensors[b] = torch.randn(*many, out, rank, generator=draw) * 0.15
    return one, tensors


def three(module: nn.Module, experts: bool = False) -> Sets:
    """Sets of unlike ranks, scales and targets. experts: those of two sets have factors"""
    return {
        "all": lora(module, "all", 4, 2.0, seed=1, experts=experts),
        "some": lora(module, "some", 3, 0.7, "q_proj", "v_proj", "up_proj", seed=2, experts=experts),
        "one": lora(module, "one", 6, -1.3, "1.self_attn.k_proj", seed=3),
    }


def add(core: EngineCore, sets: Sets, version: int = 0) -> None:
    for one, tensors in sets.values():
        core.runner.add_set(one, tensors)  # type: ignore[attr-defined]
        core.sets[one.id] = version


def asked(names: Sequence[str], prompts: Sequence[np.ndarray] = PROMPTS, tokens: int = 8) -> list[ActiveRequest]:
    """Two requests for each prompt and set: neighbours have other sets, and end at other times."""
    return [
        ActiveRequest(
            GenerateRequest(f"{i}/{j}/{name}", prompt, Sampling(max_tokens=tokens + 5 * j, seed=i), parameters=name)
        )
        for j in range(2)
        for i, prompt in enumerate(prompts)
        for name in names
    ]


def of_set(module: nn.Module, sets: Sets, name: str) -> Any:
    """A context in which transformers' model computes with the set."""
    if name == POLICY_SET.id:
        return nullcontext()
    one, tensors = sets[name]
    return with_low_ranks(module, low_ranks(one, tensors, module), one.scale)


def assert_exact(done: Mapping[str, Completion], module: nn.Module, sets: Sets, prompts: Sequence[np.ndarray]) -> None:
    """The log-probs are those of transformers, up to the steps of float32 at their size."""
    for key, one in done.items():
        number, _, name = key.split("/")
        with of_set(module, sets, name):
            expected = logprobs_of(module, prompts[int(number)], one.ids, 1.0)
        np.testing.assert_allclose(one.logprobs, expected, atol=close_to(3e-6), rtol=1e-6, err_msg=key)


FAMILIES = (
    *("qwen3 bias", "qwen2", "llama bias", "mistral narrow window", "gemma2", "gemma3", "qwen3 moe"),
    *("qwen3.5", "qwen3.5 moe", "qwen3 next"),
)


@pytest.mark.on_device
@matrix("way", WAYS, quick=("compiled", "pages"))
def test_a_batch_of_several_sets_computes_each_as_transformers_does(way: str) -> None:
    """Prompts in passes with and without a past, shared by the requests of a set, decode with rows that move."""

    def check(name: str) -> None:
        module = reference(CONFIGS[name])
        core = engine(CONFIGS[name], module, **{"prefix_cache_tokens": 4096, **WAYS[way]})
        assert core.runner.lora_experts or not ON_CPU or "paged" in WAYS[way]  # type: ignore[attr-defined]
        sets = three(module, experts=core.runner.lora_experts)  # type: ignore[attr-defined]
        add(core, sets)
        done = finish(core, asked((POLICY_SET.id, *sets)))
        assert_exact(done, module, sets, PROMPTS)
        cached = {(key.split("/")[0], key.split("/")[2]): 0 for key in done}
        for key, one in done.items():
            cached[key.split("/")[0], key.split("/")[2]] += one.cached_tokens
        assert all(n == len(PROMPTS[int(i)]) for (i, _), n in cached.items()), "each set computes a prompt once"
        for scored in (POLICY_SET.id, *sets):
            with of_set(module, sets, scored):
                expected = logprobs_of(module, PROMPTS[1][:1], PROMPTS[1][1:], 1.0)
            found = core.runner.score(PROMPTS[1], 1.0, parameters=scored).logprobs
            np.testing.assert_allclose(found, expected, atol=close_to(3e-6), rtol=1e-6)

    check_each(FAMILIES, check)


def test_rows_without_a_set_have_the_bits_that_they_have_alone() -> None:
    module = reference(CONFIGS["qwen3"])
    sets, plain = three(module), asked((POLICY_SET.id,))
    alone = finish(engine(CONFIGS["qwen3"], module), plain)
    core = engine(CONFIGS["qwen3"], module)
    add(core, sets)
    beside = finish(core, asked((POLICY_SET.id, *sets)))
    for key, one in alone.items():
        assert one.ids.tolist() == beside[key].ids.tolist() and (one.logprobs == beside[key].logprobs).all()


def test_the_families_are_all_that_native_computes() -> None:
    """But for models that read images, which take no sets."""
    read_text = {name for name, one in ARCHITECTURES.items() if one.axes == "one" or one.delta != "none"}
    assert {CONFIGS[name].model_type for name in FAMILIES} == read_text


@pytest.mark.parametrize("way", ["compiled", "fixed rows"])
def test_deterministic_bits_of_a_set_do_not_depend_on_its_neighbours(way: str) -> None:
    module = reference(CONFIGS["qwen3"])
    sets = three(module)
    given = {**WAYS[way], "deterministic": True, "rows": 40}
    together, alone = (engine(CONFIGS["qwen3"], module, **given) for _ in range(2))
    for core in (together, alone):
        add(core, sets)
    done = finish(together, asked((POLICY_SET.id, *sets)))
    for request in asked(("all", "some"), PROMPTS[:2]):
        one = finish(alone, [request])[request.given.id]
        same = done[one.request_id]
        assert one.ids.tolist() == same.ids.tolist() and (one.logprobs == same.logprobs).all()


@pytest.mark.parametrize("way", ["compiled", "pages", "mixed steps"])
def test_a_set_never_reads_the_prompts_of_another_set_or_version(way: str) -> None:
    """Nor does the policy. The prompts of the sets that did not change are kept."""
    config, prompt = CONFIGS["qwen3"], PROMPTS[1]
    module = reference(config)
    sets = three(module)
    core = engine(config, module, **{**WAYS[way], "prefix_cache_tokens": 4096})
    add(core, sets)
    names = POLICY_SET.id, *sets
    finish(core, asked(names, [prompt]))
    newer = {**sets, "some": lora(module, "some", 3, 0.7, "q_proj", "v_proj", "up_proj", seed=9)}
    add(core, {"some": newer["some"]}, version=1)
    longer = np.concatenate([prompt, PROMPTS[2]])
    done = finish(core, asked(names, [prompt, longer]))
    assert_exact(done, module, newer, [prompt, longer])
    for name in names:
        assert done[f"0/0/{name}"].cached_tokens == (0 if name == "some" else len(prompt))
    core.drop_set("some")
    add(core, {"some": sets["some"]}, version=2)
    again = finish(core, asked(("some",), [prompt]))
    assert again["0/0/some"].cached_tokens == 0
    assert_exact(again, module, sets, [prompt])


def test_a_later_version_of_a_set_is_written_over_the_one_before_if_it_is_like_it() -> None:
    """Every panel of it; one of another scale or with other targets gets memory of its own."""
    config, prompt = CONFIGS["qwen3"], PROMPTS[1]
    module = reference(config)
    core, ends = engine(config, module), ("q_proj", "v_proj", "up_proj")
    versions = [
        lora(module, "some", 3, 0.7, *ends, seed=2),
        lora(module, "some", 3, 0.7, *ends, seed=9),
        lora(module, "some", 3, 1.4, *ends, seed=9),
        lora(module, "some", 3, 1.4, "k_proj", seed=9),
        lora(module, "some", 3, 1.4, *ends, seed=4),
    ]

    def memory() -> list[int]:
        _, live = core.runner._sets._live["some"]  # type: ignore[attr-defined]
        return [one.memory.data_ptr() for made in live.products.values() for one in (made.a, *made.blocks) if one]

    places = list[list[int]]()
    for number, version in enumerate(versions):
        given = version[0], {name: tensor.clone() for name, tensor in version[1].items()}
        add(core, {"some": given}, number)
        for tensor in given[1].values():
            tensor.fill_(7.0)  # the trainer's own go on
        places.append(memory())
        assert_exact(finish(core, asked(("some",), [prompt])), module, {"some": version}, [prompt])
    assert places[0] == places[1] and all(a != b for a, b in zip(places[1:], places[2:]))


@pytest.mark.parametrize("way", ["compiled", "pages", "mixed steps"])
def test_a_prompt_in_progress_starts_again_with_a_new_version_of_its_set(way: str) -> None:
    config, prompt = CONFIGS["qwen3"], np.random.default_rng(7).integers(0, 67, 150)
    module = reference(config)
    sets = three(module)
    core = engine(config, module, **WAYS[way])  # passes of 64 tokens
    add(core, sets)
    busy, *rest = asked((POLICY_SET.id,), [prompt[:4]], tokens=60)
    core.add(busy)
    steps(core, 2)
    late = asked(("some",), [prompt])[0]
    core.add(late)
    done = steps(core, 2)
    assert late in core.waiting, "its prompt takes longer"
    newer = {"some": lora(module, "some", 3, 0.7, "q_proj", "v_proj", "up_proj", seed=9)}
    done |= {one.request_id: one for _, one in core.settle()}
    add(core, newer, version=1)
    done |= steps(core)
    assert_exact({"0/0/some": done["0/0/some"]}, module, newer, [prompt])


@pytest.mark.parametrize("way", ["compiled", "pages"])
def test_sets_come_and_end_and_their_places_are_used_again(way: str) -> None:
    """More sets than there was room for, of higher ranks and other layers, while rows of others run."""
    config = CONFIGS["qwen3"]
    module = reference(config)
    sets = three(module)
    core = engine(config, module, **WAYS[way])
    for number, name in enumerate(("one", "some", "all")):
        add(core, {name: sets[name]})
        done = finish(core, asked(tuple(sets)[2 - number :][::-1], PROMPTS[:2]))
        assert_exact(done, module, sets, PROMPTS)
    core.drop_set("some")
    other = {**sets, "new": lora(module, "new", 2, 1.0, "o_proj", seed=5)}
    add(core, {"new": other["new"]})
    done = finish(core, asked((POLICY_SET.id, "all", "one", "new"), PROMPTS[:2]))
    assert_exact(done, module, other, PROMPTS)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("way", ["torch", "pages"])
def test_bfloat16_is_as_close_to_float32_as_the_hook_is(name: str, way: str) -> None:
    module = reference(CONFIGS[name], dtype=torch.bfloat16)
    exact = reference(CONFIGS[name], rounded=torch.bfloat16)
    one, tensors = lora(exact, "all", 8, 2.0, seed=1)
    sets = {"all": (one, {key: t.bfloat16().float() for key, t in tensors.items()})}
    core = engine(CONFIGS[name], module, dtype=torch.bfloat16, emulate_bf16=False, **WAYS[way])
    add(core, sets)
    ours, theirs = [], []
    for key, done in finish(core, asked(("all",), tokens=40)).items():
        prompt = PROMPTS[int(key[0])]
        with of_set(exact, sets, "all"):
            truth = logprobs_of(exact, prompt, done.ids, 1.0)
        ours.append(done.logprobs - truth)
        with of_set(module, sets, "all"):
            theirs.append(logprobs_of(module, prompt, done.ids, 1.0) - truth)
    error, bound = np.abs(np.concatenate(ours)), np.abs(np.concatenate(theirs))
    assert error.mean() < 1.2 * bound.mean() and error.max() < 2 * bound.max()


def test_a_set_that_does_not_fit_is_refused_in_one_line() -> None:
    module = reference(CONFIGS["qwen3 moe"])
    core = engine(CONFIGS["qwen3 moe"], module)
    good, tensors = lora(module, "a", 2, 1.0, "q_proj", seed=0)

    def refused(target: str, change: Any = None, **more: Any) -> str:
        targets = {"targets": (target,)} if target else {}
        one = ParameterSet(**{"id": "a", "kind": "lora", "base": "x", "rank": 2, "targets": good.targets, **targets})
        given = dict(zip(one.factors(target), tensors.values())) if target else dict(tensors)
        if change is not None:
            change(given)
        with pytest.raises(Refused) as e:
            core.runner.add_set(one, given)  # type: ignore[attr-defined]
        assert "\n" not in str(e.value)
        return str(e.value)

    first = next(iter(tensors))
    adapts = "none of the layers that the native engine adapts (down_proj, gate_proj, gate_up_proj, k_proj, o_proj, "
    for target in ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.0.up_proj", "model.embed_tokens"):
        assert f"its target {target} is {adapts}" in refused(target)
    assert "v_proj of 3 layers): leave it out of target_modules" in refused("model.layers.3.self_attn.q_proj")
    nan = "has values that are not finite"
    assert f"{first} {nan}" in refused("", lambda given: given.update({first: given[first] * torch.nan}))
    assert f"it has no {first}" in refused("", lambda given: given.pop(first))
    assert "it belongs to another model" in refused("", lambda given: given.update({first: given[first][:, :-1]}))
    core.runner.add_set(good, tensors)  # type: ignore[attr-defined]
