"""The torch engine: precision, optimizer, state, heads."""

import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from each import each
from on_device import DEVICE, close_to
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.algorithms.losses import nll, ppo_clip
from verl.batch import Batch, pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.fused import fuse
from verl.objective import Term, TermValue
from verl.types import Sample, Segment

VOCAB = 40
NLL = (Term(name="loss", fn=nll),)


def make(tied=True, seed=1):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=tied,
        )
    )


@pytest.fixture(scope="module")
def model():
    return make()


def engine(model, **options) -> TorchEngine:
    options = {"dtype": "float64", "optim": OptimSpec(lr=1e-2, weight_decay=0.1), "device": str(DEVICE), **options}
    return TorchEngine(copy.deepcopy(model), EngineSettings(**options))


def samples(n=6, seed=0, temperatures=(1.0,)) -> list[Sample]:
    rng, out = np.random.default_rng(seed), []
    prompts = [rng.integers(1, VOCAB, k) for k in (3, 5, 1)]
    for i in range(n):
        tail = rng.integers(1, VOCAB, 2 + 2 * i)
        turns = (
            Segment(ids=prompts[i % 3], source="prompt"),
            Segment(ids=tail, source="sampled", logprobs=np.zeros(len(tail), np.float32), version=0),
        )
        out.append(
            Sample(
                sample_id=str(i),
                trajectory_id=str(i),
                group_id=str(i % 3),
                purpose="train",
                segments=turns,
                temperature=temperatures[i % len(temperatures)],
            )
        )
    return out


def batch_of(rows: list[Sample], name="loss") -> Batch:
    batch = pack(rows)
    return batch.with_columns(
        {f"w/{name}": torch.full((batch.num_loss_tokens,), 1 / batch.num_loss_tokens, dtype=torch.float64)}
    )


def gradients(e: TorchEngine, batch: Batch, terms=NLL) -> dict[str, torch.Tensor]:
    e.forward_backward(batch, terms)
    found = {n: p.grad.cpu().clone() for n, p in e.local.trained().named_parameters() if p.grad is not None}
    e.optimizer.zero_grad()
    return found


def params(e: TorchEngine) -> dict[str, torch.Tensor]:
    return {n: p.detach().cpu().clone() for n, p in e.model.named_parameters()}


def assert_equal(got, expected, exact=False, **tolerance):
    assert set(got) == set(expected)
    for n, x in expected.items():
        if exact:
            assert torch.equal(got[n], x), n
        else:
            torch.testing.assert_close(
                got[n], x, **{"rtol": 1e-8, "atol": 1e-12, **tolerance}, msg=lambda m, n=n: f"{n}: {m}"
            )


# -- against plain torch ---------------------------------------------------------------------------------------------


@pytest.mark.on_device
@each("clip, budget", product([0.01, 1e9, 0.0], [10_000, 25]))
def test_updates_equal_a_plain_loop_over_padded_rows(model, clip, budget):
    """Clipping, decay groups, warm-up and the aggregation of two micro-batch budgets, for three updates in float64."""
    spec = OptimSpec(lr=1e-2, weight_decay=0.1, warmup_steps=2, clip_grad_norm=clip)
    ours, reference, rows = (
        engine(model, optim=spec, max_tokens_per_microbatch=budget),
        copy.deepcopy(model).double(),
        samples(),
    )
    fuse(reference, packed=False)  # transformers' own norm rounds to float32, which Adam would magnify
    decayed, plain = ([p for p in reference.parameters() if (p.dim() > 1) == big] for big in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    ids = torch.zeros(len(rows), max(s.total_tokens for s in rows), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, s in enumerate(rows):
        flat, start = torch.from_numpy(np.concatenate([x.ids for x in s.segments])), len(s.segments[0].ids)
        ids[i, : len(flat)], mask[i, : len(flat)], labels[i, start : len(flat)] = flat, 1, flat[start:]
    for step in range(3):
        out = ours.forward_backward(batch_of(rows), NLL)
        metrics = ours.optim_step()
        logits = reference(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or 1e9)
        for group in optimizer.param_groups:
            group["lr"] = (1e-2 / 3, 2e-2 / 3, 1e-2)[step]
        optimizer.step()
        optimizer.zero_grad()
        assert out.metrics["loss"].value == pytest.approx(float(loss.detach()), rel=1e-9)
        assert metrics["grad_norm"].value == pytest.approx(float(norm), rel=1e-8), "the norm before clipping"
        assert metrics["lr"].value == pytest.approx(optimizer.param_groups[0]["lr"])
    assert_equal(params(ours), dict(reference.named_parameters()), rtol=1e-6, atol=1e-9)


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.on_device
def test_gradient_checkpointing_changes_nothing(model):
    assert_equal(
        gradients(engine(model, gradient_checkpointing="full"), batch_of(samples())),
        gradients(engine(model), batch_of(samples())),
    )


@pytest.mark.parametrize("emulate", [False, True], ids=["autocast", "emulated"])
def test_bfloat16_is_close_to_float32(model, emulate):
    low, high = engine(model, dtype="bfloat16", emulate_bf16=emulate), engine(model, dtype="float32")
    assert all(p.dtype == torch.float32 for p in low.model.parameters())
    a, b = (gradients(e, batch_of(samples())) for e in (low, high))
    assert all(g.dtype == torch.float32 for g in a.values())
    cosine = torch.nn.functional.cosine_similarity(
        torch.cat([g.flatten() for g in a.values()]), torch.cat([g.flatten() for g in b.values()]), dim=0
    )
    assert 0.99 < cosine < 1 - 1e-9, "close, and not the same computation"
    x, y = (e.infer(pack(samples()), ("logprobs",))["logprobs"] for e in (low, high))
    assert x.dtype == torch.float32 and 0 < (x - y).abs().max() < 0.1


def test_emulated_bfloat16_is_rounded_weights_in_float32_arithmetic(model):
    e, by_hand = engine(model, dtype="bfloat16", emulate_bf16=True), copy.deepcopy(model)
    with torch.no_grad():
        for p in by_hand.parameters():
            p.copy_(p.bfloat16())
    plain = engine(by_hand, dtype="float32")
    before = params(e)
    assert torch.equal(
        e.infer(pack(samples()), ("logprobs",))["logprobs"], plain.infer(pack(samples()), ("logprobs",))["logprobs"]
    )
    assert_equal(gradients(e, batch_of(samples())), gradients(plain, batch_of(samples())), exact=True)
    assert_equal(params(e), before, exact=True)  # the masters are not rounded
    with pytest.raises(KeyError, match="w/missing"):  # also when a term fails
        e.forward_backward(pack(samples()), (Term(name="missing", fn=nll),))
    assert_equal(params(e), before, exact=True)
    e.forward_backward(batch_of(samples()), NLL)
    e.optim_step()
    assert any(not torch.equal(p, p.bfloat16().float()) for p in e.model.parameters())


def test_no_noise_in_the_forward_pass():
    torch.manual_seed(0)
    noisy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=0.5,
        )
    )
    for mode in ("auto", "padded"):
        e = engine(noisy, attention_mode=mode)
        first = e.forward_backward(batch_of(samples()), NLL).columns["logprobs"]
        torch.testing.assert_close(first, e.infer(pack(samples()), ("logprobs",))["logprobs"], rtol=0, atol=0)


# -- temperature -----------------------------------------------------------------------------------------------------


@pytest.mark.on_device
def test_ratio_is_one_when_the_rollout_used_the_same_temperature(model):
    """T in {0.3, 0.7, 1, 1.5}, one per row: behaviour log-probs from full logits of the model itself."""
    rows = samples(temperatures=(0.3, 0.7, 1.0, 1.5))
    e, reference = engine(model, dtype="float32", max_tokens_per_microbatch=30), copy.deepcopy(model).eval()
    behaviour = []
    for s in rows:
        ids, start = torch.from_numpy(np.concatenate([x.ids for x in s.segments])), len(s.segments[0].ids)
        with torch.no_grad():
            logp = (reference(input_ids=ids[None]).logits[0, start - 1 : -1] / s.temperature).log_softmax(-1)
        behaviour.append(logp.gather(-1, ids[start:, None])[:, 0])
    batch = batch_of(rows, "pg").with_columns({"old_logprobs": torch.cat(behaviour)})
    batch = batch.with_columns({"advantages": torch.ones(batch.num_loss_tokens)})
    out = e.forward_backward(batch, (Term(name="pg", fn=ppo_clip),))
    ratio = (out.columns["logprobs"] - torch.cat(behaviour)).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=close_to(1e-5))
    assert out.metrics["pg_clipfrac"].value == 0 and out.metrics["pg"].value == pytest.approx(-1, abs=close_to(1e-5))
    wrong = pack([replace(s, temperature=1.0) for s in rows])
    assert (e.infer(wrong, ("logprobs",))["logprobs"] - torch.cat(behaviour)).abs().max() > 0.05, (
        "a test that 1.0 would pass proves nothing"
    )


# -- optimizer and state ---------------------------------------------------------------------------------------------


def poisoned(batch: Batch) -> Batch:
    weight = batch.columns["w/loss"].clone()
    weight[3] = float("inf")
    return batch.with_columns({"w/loss": weight})


def moments_of(e: TorchEngine) -> dict[str, torch.Tensor]:
    held = enumerate(e.optimizer.state[p] for p in e.optimizer.parameters)
    return {f"{n}/{k}": v.clone() for n, entry in held for k, v in entry.items()}


@pytest.mark.on_device
def test_a_non_finite_gradient_reaches_neither_weights_nor_moments(model, tmp_path):
    e = engine(model, dump_dir=tmp_path / "dump", optim=OptimSpec(lr=1e-2, max_skipped_updates=1))
    e.forward_backward(batch_of(samples()), NLL)
    e.optim_step()
    weights, moments = params(e), moments_of(e)

    def poison():
        e.forward_backward(poisoned(batch_of(samples())), NLL)
        return e.optim_step()

    metrics = poison()
    assert metrics["skipped_updates"].value == 1 and e.optimizer_step == 1
    dumped = torch.load(next((tmp_path / "dump").glob("nonfinite_update_1_1.pt")), weights_only=False)
    assert dumped["ids"].tolist() == batch_of(samples()).ids.tolist() and dumped["columns"]["w/loss"][3] == float("inf")
    assert dumped["terms"] == ("loss",) and not np.isfinite(dumped["grad_norm"])
    with pytest.raises(
        FloatingPointError,
        match=r"(?s)2.* in a row \(limit model.engine_options.max_skipped_updates=1\); the weights are unchanged, "
        r".*nonfinite",
    ):
        poison()
    assert_equal(params(e), weights, exact=True)
    assert_equal(moments_of(e), moments, exact=True)
    assert all(p.grad is None for p in e.model.parameters()), "the gradient does not leak into the next update"


@pytest.mark.on_device
def test_only_skips_in_a_row_stop_the_run(model):
    e = engine(model, optim=OptimSpec(lr=1e-2, max_skipped_updates=1))
    for _ in range(3):
        e.forward_backward(poisoned(batch_of(samples())), NLL)
        assert e.optim_step()["skipped_updates"].value == 1
        e.forward_backward(batch_of(samples()), NLL)
        assert e.optim_step()["skipped_updates"].value == 0
    assert e.optimizer_step == 3


def test_state_continues_bitwise_with_the_same_rates(model, tmp_path):
    spec = OptimSpec(lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=6)

    def step(e, seed):
        e.forward_backward(batch_of(samples(seed=seed)), NLL)
        return e.optim_step()["lr"].value

    straight, first = engine(model, optim=spec, dtype="float32"), engine(model, optim=spec, dtype="float32")
    rates = [step(straight, i) for i in range(6)]
    assert [step(first, i) for i in range(3)] == rates[:3]
    first.save(tmp_path / "third")
    resumed = engine(make(seed=9), optim=spec, dtype="float32")
    step(resumed, 77)  # its earlier state is replaced, moments included
    step(first, 50)  # the engine that saved may continue
    resumed.load(tmp_path / "third")
    assert resumed.optimizer_step == 3 and [step(resumed, i) for i in range(3, 6)] == rates[3:]
    assert_equal(params(resumed), params(straight), exact=True)
    engine(make(seed=9), optim=spec, dtype="float32").save(tmp_path / "fresh")
    resumed.load(tmp_path / "fresh")
    assert not moments_of(resumed) and resumed.optimizer_step == 0
    with pytest.raises(ValueError, match="the checkpoint is of another model: 1 parameters differ"):
        engine(make(tied=False), optim=spec, dtype="float32").load(tmp_path / "fresh")


@pytest.mark.on_device
def test_nothing_to_train_on_is_a_zero_gradient_and_no_nan(model):
    e = engine(model, optim=OptimSpec(lr=1e-2, weight_decay=0.0))
    batch = batch_of(samples())
    batch = batch.with_columns({"w/loss": torch.zeros(batch.num_loss_tokens, dtype=torch.float64)})
    before = params(e)
    out = e.forward_backward(batch, NLL)
    assert out.metrics["loss"].value == 0
    assert all(not p.grad.any() for p in e.model.parameters()), "backward ran, so that collectives match"
    assert e.optim_step()["grad_norm"].value == 0
    assert_equal(params(e), before, exact=True)


# -- heads and outputs -----------------------------------------------------------------------------------------------


@pytest.mark.on_device
def test_a_critic_trains_its_body_and_scores_the_last_token(model, tmp_path):
    e, rows = engine(model, head="value"), samples()
    batch = batch_of(rows)
    fresh = e.infer(batch, ("values", "scores"))
    assert fresh["values"].shape == (batch.num_loss_tokens,) and fresh["scores"].shape == (batch.num_rows,)
    assert not fresh["values"].any() and not fresh["scores"].any(), "a fresh critic predicts 0"
    fit = (Term(name="loss", fn=lambda c: TermValue((c["values"] - 1) ** 2), outputs=("values",)),)
    losses = []
    for _ in range(8):
        losses.append(e.forward_backward(batch, fit).metrics["loss"].value)
        e.optim_step()
    assert losses[-1] < 0.7 * losses[0]
    found = gradients(e, batch, fit)
    assert found["model.embed_tokens.weight"].abs().sum() > 0 and found["value_head.weight"].abs().sum() > 0
    split = engine(model, head="value", max_tokens_per_microbatch=20)
    e.save(tmp_path / "critic")
    split.load(tmp_path / "critic")
    assert_equal(gradients(split, batch, fit), found)
    got = split.infer(batch, ("values", "scores"))
    body, head = copy.deepcopy(e.model).eval(), copy.deepcopy(e.value_head).cpu()
    body.set_attn_implementation("sdpa")
    plain = make().double()
    plain.load_state_dict(body.state_dict())
    for r, s in enumerate(rows):
        ids, start = torch.from_numpy(np.concatenate([x.ids for x in s.segments])), len(s.segments[0].ids)
        with torch.no_grad():
            values = head(plain.model(input_ids=ids[None]).last_hidden_state[0])
        span = slice(int(batch.row_start[r]), int(batch.row_start[r + 1]))
        torch.testing.assert_close(got["values"][span], values[start - 1 : -1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got["scores"][r], values[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.on_device
def test_outputs_are_what_was_asked_in_batch_order(model):
    e, batch = engine(model, max_tokens_per_microbatch=20), pack(samples())
    found = e.infer(batch, ("entropy", "logprobs", "sum_pi_squared"))
    whole = engine(model).infer(batch, ("logprobs",))
    torch.testing.assert_close(found["logprobs"], whole["logprobs"])
    assert set(found) == {"entropy", "logprobs", "sum_pi_squared"} and (found["entropy"] > 0).all()
    assert ((found["sum_pi_squared"] >= 1 / VOCAB) & (found["sum_pi_squared"] <= 1)).all()
    with pytest.raises(AssertionError, match=r"head='lm' gives .* not \('values',\)"):
        e.infer(batch, ("values",))
    frozen = engine(model, optim=None)
    assert not any(p.requires_grad for p in frozen.model.parameters()) and not frozen.model.training
    with pytest.raises(AssertionError, match="without an optimizer"):
        frozen.forward_backward(batch_of(samples()), NLL)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_have_their_hugging_face_names_once(tied):
    e = engine(make(tied), dtype="float32")
    names = [n for n, _ in e.weights()]
    assert len(names) == len(set(names)) and ("lm_head.weight" in names) != tied
    assert set(names) == set(dict(make(tied).named_parameters()))
