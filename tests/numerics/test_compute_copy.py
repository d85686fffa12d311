"""Training in bfloat16 with a copy of the weights that computes: the masters, their gradients and all that is made of
them are as without the copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from facts import use_facts
from test_engine import NLL, VOCAB, assert_equal, batch_of, gradients, make, params, samples
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.algorithms.losses import nll
from verl.batch import pack
from verl.model_engine import settings
from verl.model_engine.base import EngineContext
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sibling import build_sibling
from verl.model_engine.torch_engine import TorchEngine, build
from verl.nn import attention, fused
from verl.objective import Term, TermValue
from verl.types import Segment

OPTIM = OptimSpec(lr=1e-2, weight_decay=0.1, average=0.5)


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


def engine(model: Any, **options: Any) -> TorchEngine:
    options = {"optim": OPTIM, "dtype": "bfloat16", "emulate_bf16": False, "copies_weights": True, **options}
    return TorchEngine(copy.deepcopy(model), EngineSettings(**options))


def logprobs(e: TorchEngine, **how: Any) -> torch.Tensor:
    return e.infer(pack(samples()), ("logprobs",), **how)["logprobs"]


def flat(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.double().flatten() for g in grads.values()])


def error_of(e: TorchEngine, exact: dict[str, torch.Tensor], **how: int) -> float:
    e.forward_backward(batch_of(samples()), NLL, **how)
    found = gradients_now(e)
    return float((flat(found) - flat(exact)).norm() / flat(exact).norm())


def gradients_now(e: TorchEngine) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in e.local.trained().named_parameters()}


@pytest.mark.parametrize("mode", ["auto", "padded"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradients_are_float32_and_as_near_as_those_of_autocast(tied: bool, mode: str) -> None:
    made = make(tied)
    exact = gradients(engine(made, dtype="float64", attention_mode=mode), batch_of(samples()))
    own, cast = engine(made, attention_mode=mode), engine(made, attention_mode=mode, copies_weights=False)
    error, usual = error_of(own, exact), error_of(cast, exact)
    assert 1e-6 < error < 1.6 * usual < 0.1, (error, usual)
    assert all(g.dtype == torch.float32 for g in gradients_now(own).values())
    assert all(p.dtype == torch.float32 for p in own.model.parameters())
    assert_equal(params(own), params(cast), exact=True)


def test_gradients_of_many_micro_batches_are_summed_in_float32(model: Any) -> None:
    """A sum in bfloat16 would be rounded at each micro-batch, to one part in 256."""
    whole = engine(model)
    for _ in range(64):  # in bfloat16 the last ones would be lost
        whole.forward_backward(batch_of(samples()), NLL)
    once = engine(model)
    once.forward_backward(batch_of(samples()), NLL)
    for name, total in gradients_now(whole).items():
        torch.testing.assert_close(total, 64 * gradients_now(once)[name], rtol=1e-5, atol=1e-7)


def changed_by_step(e: TorchEngine, path: Path) -> None:
    e.forward_backward(batch_of(samples()), NLL)
    e.optim_step()


def changed_by_load(e: TorchEngine, path: Path) -> None:
    other = engine(make(seed=7))
    changed_by_step(other, path)
    other.save(path)
    e.load(path)


def changed_in_place(e: TorchEngine, path: Path) -> None:
    with torch.no_grad():
        for p in e.model.parameters():
            p.mul_(1.5)


@pytest.mark.parametrize("change", [changed_by_step, changed_by_load, changed_in_place])
def test_the_copy_follows_the_masters(model: Any, change: Callable[[TorchEngine, Path], None], tmp_path: Path) -> None:
    e = engine(model)
    before = logprobs(e)
    change(e, tmp_path)
    after = logprobs(e)
    assert not torch.equal(before, after)
    assert torch.equal(after, logprobs(engine(e.model)))


def test_the_average_of_the_weights_is_computed_with_and_left(model: Any) -> None:
    e = engine(model)
    for _ in range(2):
        changed_by_step(e, Path())
    now, averaged = logprobs(e), logprobs(e, average=True)
    assert not torch.equal(now, averaged) and torch.equal(now, logprobs(e))
    with torch.no_grad():
        for p, state in e.optimizer.state.items():  # type: ignore[union-attr]
            p.copy_(state["average"])
    assert torch.equal(averaged, logprobs(engine(e.model)))


@each("options", [{}, {"optim": None}, {"offload": ("weights", "optimizer")}, {"gradient_checkpointing": "full"}])
def test_what_is_kept_published_and_saved_is_of_the_masters(options: dict[str, Any]) -> None:
    made = make()
    e, plain = engine(made, **options), engine(made, **options, copies_weights=False)
    before = logprobs(e)
    with e.awake("weights"):
        names = [name for name, _ in e.local.named_weights()]
        assert_equal(params(e), params(plain), exact=True)
        assert all(p.dtype == torch.float32 for p in e.model.parameters())
    assert [name for name, _ in e.weights()] == names == [name for name, _ in plain.weights()]
    assert e.tied == plain.tied and e.snapshot_bytes == plain.snapshot_bytes
    if options.get("optim", OPTIM):
        with pytest.raises(KeyError, match="w/missing"):  # after an error the masters are back too
            e.forward_backward(pack(samples()), (Term(name="missing", fn=nll),))
        assert all(p.dtype == torch.float32 for p in e.model.parameters())
        changed_by_step(e, Path())
        changed_by_step(plain, Path())
        assert all(p.grad is None for p in e.model.parameters())
    assert torch.equal(before, logprobs(engine(made, **options)))


def test_the_copy_is_made_once_per_optimizer_step_and_not_kept_beside_offloaded_weights(model: Any) -> None:
    e, frozen = engine(model), engine(model, optim=None)
    assert frozen.passes._copy is not None and e.passes._copy is not None
    logprobs(frozen)
    assert not frozen.passes._copy._copies
    logprobs(e)
    first = {id(c): c._version for c in e.passes._copy._copies.values()}
    for _ in range(3):
        e.forward_backward(batch_of(samples()), NLL, 3)
    assert {id(c): c._version for c in e.passes._copy._copies.values()} == first
    e.optim_step()
    logprobs(e)
    assert {id(c): c._version for c in e.passes._copy._copies.values()} == {i: v + 1 for i, v in first.items()}


def test_a_critic_reads_its_values_in_float32(model: Any) -> None:
    e, exact = engine(model, head="value"), engine(model, head="value", dtype="float32")
    for critic in (e, exact):
        with torch.no_grad():
            critic.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    a, b = (x.infer(pack(samples()), ("values",))["values"] for x in (e, exact))
    assert a.dtype == torch.float32 and 0 < (a - b).abs().max() < 0.1 * b.abs().max()


def test_parameters_that_a_model_keeps_in_float32_stay_so(model: Any) -> None:
    kept = copy.deepcopy(model)
    kept._keep_in_fp32_modules_strict = {"norm"}
    e = engine(kept)
    with e.passes._compute_weights():
        kinds = {n: p.dtype for n, p in e.model.named_parameters()}
    assert kinds.pop("model.norm.weight") == torch.float32 and {*kinds.values()} == {torch.bfloat16}


def test_a_critic_computes_with_the_policys_copy_of_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a copy of its own. An update casts the factors alone."""
    use_facts(monkeypatch, settings, copies_weights=True)
    monkeypatch.setattr(settings, "native_bf16", lambda device: True)
    make().save_pretrained(tmp_path)
    given: Any = {"folder": tmp_path, "lora": LoraSpec(rank=4), "optim": OptimSpec(lr=1e-2), "dtype": "bfloat16"}
    policy, context = build(Options(), EngineContext(**given)), EngineContext(**given, head="value")
    critic, alone = build_sibling(policy, Options(), context), build(Options(), context)
    terms = (Term(name="loss", fn=lambda c: TermValue((c["values"] - 1) ** 2), outputs=("values",)),)
    for _ in range(3):
        for e in (critic, alone):
            e.forward_backward(batch_of(samples()), terms)
            e.optim_step()
        changed_by_step(policy, Path())
        found = [e.infer(pack(samples()), ("values",))["values"] for e in (critic, alone)]
        assert torch.equal(*found) and found[0].abs().max() > 0
    policys, own = (e.passes._copy._copies for e in (policy, critic))
    base = [p for p in own if not p.requires_grad]
    assert len(base) > 10 and all(own[p] is policys[p] for p in base)
    assert {*own} - {*base} and not ({*own} - {*base}) & {*policys}, "each role has factors of its own"
    assert all(own[p]._version == 0 for p in base) and all(own[p]._version > 1 for p in {*own} - {*base})


# -- what is saved for the backward pass -------------------------------------------------------------------------------


def qwen3_layers(layers: int) -> Any:
    """Layers of the shape of Qwen3-0.6B."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, head_dim=128, num_hidden_layers=layers, **sizes))


def saved_bytes(e: TorchEngine, tokens: int) -> int:
    """The bytes of the storages that a forward pass over one sequence keeps for its backward pass."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack_one(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    ids = np.arange(tokens) % VOCAB
    row = replace(samples(1)[0], segments=(Segment(ids=ids, source="prompt"), *samples(1)[0].segments[1:]))
    with torch.autograd.graph.saved_tensors_hooks(pack_one, lambda t: t), e.passes._compute_weights():
        e.passes._hidden(pack([row]))
    return sum(storage.nbytes() for storage in kept.values())


class Flash(torch.autograd.Function):
    """Saves what a flash kernel saves: queries, keys, values and its result in half precision."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.bfloat16() + 0
        ctx.save_for_backward(out, *(x.bfloat16() for x in (q, k, v)))
        return out


def bytes_per_token(monkeypatch: pytest.MonkeyPatch, *, recomputes: bool, autocast: bool = False) -> float:
    """Bytes per token and layer that are saved, without what does not grow with the tokens: copies of weights."""
    monkeypatch.setattr(attention, "_attend", lambda plan, q, k, v, *_: Flash.apply(q, k, v))
    use_facts(monkeypatch, fused, recomputes=recomputes)
    counts = []
    for layers in (1, 2):
        e = engine(qwen3_layers(layers), copies_weights=not autocast, optim=OptimSpec(lr=1.0))
        if autocast:
            fused.unfuse(e.local.model)
        counts.append(saved_bytes(e, 96) - saved_bytes(e, 32))
    return (counts[1] - counts[0]) / 64


def test_a_layer_saves_half_of_what_it_saves_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bytes_per_token(monkeypatch, recomputes=False, autocast=True)
    kept, again = (bytes_per_token(monkeypatch, recomputes=r) for r in (False, True))
    hidden, wide = 2 * 1024, 2 * 3072  # in bfloat16: the results of two norms and of the gate are not saved
    assert kept - again == 2 * hidden + wide
    assert kept < 46_000 and kept <= 0.6 * before, (kept, before)
    assert again < 36_000 and again <= 0.45 * before, (again, before)
