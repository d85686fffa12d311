"""The FSDP engine at world size 1 against plain torch, and what it refuses."""

import copy

import numpy as np
import pytest
import torch

from verl.algorithms.losses import nll, ppo_clip
from verl.algorithms.weights import term_weights
from verl.batch import pack
from verl.model_engine.optim import OptimSpec, learning_rate
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.linear_logprob import linear_logprob
from verl.nn.packing import probe_batch
from verl.objective import Term, TermValue
from verl.types import Refs, Sample, Segment, ref_of
from verl.workers.compute import step_columns

NLL = (Term(name="loss", fn=nll, aggregate="token-mean"),)


def rows(n=6, seed=0, vocab=48):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        head, tail = rng.integers(1, vocab, 3 + i % 3), rng.integers(1, vocab, 2 + i)
        segments = (
            Segment(ids=head, source="prompt"),
            Segment(ids=tail, source="sampled", logprobs=np.zeros(len(tail), np.float32), version=0),
        )
        out.append(
            Sample(
                sample_id=str(i),
                trajectory_id=str(i),
                group_id=str(i // 2),
                purpose="train",
                segments=segments,
                reward=1.0,
            )
        )
    return out


def batch_of(samples, terms=NLL):
    refs = Refs(ref_of(s) for s in samples)
    batch = pack(samples)
    return batch.with_columns(term_weights(step_columns(refs, batch.columns), terms))


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=48,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            tie_word_embeddings=True,
        )
    )


def engine(model, **options):
    options = {"dtype": "float32", "optim": OptimSpec(lr=1e-3, weight_decay=0.1), **options}
    return TorchEngine(copy.deepcopy(model), EngineSettings(**options))


def test_three_steps_equal_plain_torch_on_padded_rows(model):
    samples = rows()
    ours, reference = engine(model), copy.deepcopy(model)
    decayed = [p for p in reference.parameters() if p.dim() > 1]
    plain = [p for p in reference.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-3
    )
    width = max(s.total_tokens for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask, target = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, s in enumerate(samples):
        whole = torch.from_numpy(np.concatenate([x.ids for x in s.segments]))
        ids[i, : len(whole)], mask[i, : len(whole)] = whole, 1
        target[i, len(s.segments[0].ids) : len(whole)] = whole[len(s.segments[0].ids) :]
    for _ in range(3):
        out = ours.forward_backward(batch_of(samples), NLL)
        logits = reference(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = ours.optim_step()
        assert out.metrics["loss"].value == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["grad_norm"].value == pytest.approx(float(norm), rel=1e-4)
    for (name, a), b in zip(ours.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_gradient_checkpointing_and_bfloat16(model):
    def grads(**options):
        e = engine(model, **options)
        e.forward_backward(batch_of(rows()), NLL)
        return torch.cat([p.grad.flatten() for p in e.model.parameters()])

    plain = grads()
    torch.testing.assert_close(grads(gradient_checkpointing="full"), plain, rtol=1e-4, atol=1e-6)
    low = grads(dtype="bfloat16")
    assert torch.nn.functional.cosine_similarity(low, plain, dim=0) > 0.995


def moments_of(e):
    """{parameter's number/name: tensor} of what the optimizer holds, copied."""
    held = enumerate(e.optimizer.state[p] for p in e.optimizer.parameters)
    return {f"{n}/{k}": v.clone() for n, entry in held for k, v in entry.items()}


def test_a_non_finite_gradient_never_reaches_the_weights(model, tmp_path):
    e = engine(model, dump_dir=tmp_path, optim=OptimSpec(lr=1e-2, max_skipped_updates=1))
    e.forward_backward(batch_of(rows()), NLL)
    e.optim_step()
    before, moments = copy.deepcopy(e.model.state_dict()), moments_of(e)
    poisoned = batch_of(rows())
    columns = {
        **poisoned.columns,
        "w/loss": torch.where(torch.arange(poisoned.num_loss_tokens) == 3, float("inf"), poisoned.columns["w/loss"]),
    }
    poisoned = poisoned.with_columns(columns)
    e.forward_backward(poisoned, NLL)
    metrics = e.optim_step()
    assert metrics["skipped_updates"].value == 1 and e.optimizer_step == 1
    assert all(torch.equal(v, before[k]) for k, v in e.model.state_dict().items())
    after = moments_of(e)
    assert after.keys() == moments.keys() and all(torch.equal(after[k], moments[k]) for k in moments)
    assert list(tmp_path.glob("nonfinite_update_*.pt"))
    e.forward_backward(poisoned, NLL)
    with pytest.raises(FloatingPointError, match="max_skipped_updates=1"):
        e.optim_step()
    assert all(torch.equal(v, before[k]) for k, v in e.model.state_dict().items())


def test_state_continues_bitwise(model, tmp_path):
    one, two = engine(model), engine(model)
    for step in range(4):
        for e in (one, two):
            e.forward_backward(batch_of(rows(seed=step)), NLL)
            e.optim_step()
        if step == 1:
            two.save(tmp_path / "saved")
            two = engine(model)
            two.load(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert one.optimizer_step == two.optimizer_step == 4
    with pytest.raises(ValueError, match="another model"):
        engine(model, head="value").load(tmp_path / "saved")


def test_temperature_is_per_row_and_gives_ratio_one(model):
    samples = [
        Sample(**{**{f: getattr(s, f) for f in s.__dataclass_fields__}, "temperature": t})
        for s, t in zip(rows(), (0.3, 0.7, 1.0, 1.5, 0.7, 1.0))
    ]
    e = engine(model)
    batch = pack(samples)
    got = e.infer(batch, ("logprobs", "entropy"))
    for i, s in enumerate(samples):
        whole = torch.from_numpy(np.concatenate([x.ids for x in s.segments]))
        with torch.no_grad():
            z = copy.deepcopy(model)(input_ids=whole[None]).logits[0, :-1] / s.temperature
        expected = z.log_softmax(-1).gather(-1, whole[1:, None])[:, 0][len(s.segments[0].ids) - 1 :]
        span = slice(int(batch.row_start[i]), int(batch.row_start[i + 1]))
        torch.testing.assert_close(got["logprobs"][span], expected, rtol=1e-5, atol=1e-5)
    terms = (Term(name="loss", fn=ppo_clip, inputs=("advantages",)),)
    batch = batch.with_columns({"old_logprobs": got["logprobs"], "advantages": torch.ones(batch.num_loss_tokens)})
    batch = batch.with_columns(term_weights(step_columns(Refs(ref_of(s) for s in samples), batch.columns), terms))
    out = e.forward_backward(batch, terms)
    assert out.metrics["ppo_kl"].value == pytest.approx(0, abs=1e-6) and out.metrics["pg_clipfrac"].value == 0


def test_a_value_head_makes_a_critic_of_the_same_engine(model):
    e = engine(model, head="value")
    batch = pack(rows())
    values = e.infer(batch, ("values", "scores"))
    assert values["values"].shape == (batch.num_loss_tokens,) and values["scores"].shape == (batch.num_rows,)
    assert float(values["values"].abs().max()) == 0, "a fresh critic predicts 0"
    fit = (Term(name="loss", fn=lambda c: TermValue((c["values"] - 1.0) ** 2), outputs=("values",)),)
    batch = batch.with_columns(term_weights(step_columns(Refs(ref_of(s) for s in rows()), batch.columns), fit))
    losses = []
    for _ in range(6):
        losses.append(e.forward_backward(batch, fit).metrics["loss"].value)
        e.optim_step()
    assert losses[-1] < losses[0]
    assert any(p.grad is None and p.requires_grad for p in e.model.parameters())


def test_learning_rates():
    spec = OptimSpec(lr=1.0, warmup_steps=3, schedule="linear", total_steps=7, min_lr_ratio=0.1)
    assert [round(learning_rate(spec, i), 4) for i in range(8)] == [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1]
    wsd = OptimSpec(lr=1.0, schedule="wsd", total_steps=10, decay_ratio=0.5)
    assert [round(learning_rate(wsd, i), 2) for i in (0, 5, 6, 8, 10)] == [1.0, 1.0, 0.8, 0.4, 0.0]
    assert learning_rate(OptimSpec(lr=0.5), 10_000) == 0.5
    with pytest.raises(ValueError, match="total_steps"):
        OptimSpec(lr=1.0, schedule="cosine")


def test_packing_is_proven_per_model_and_a_leak_is_refused(model, monkeypatch):
    from verl.nn import attention

    e = engine(model)
    assert e.check_packing(share_prefix=True) < 1e-4 and e.check_packing(share_prefix=False) < 1e-4
    real = attention.plan_attention

    def leaking(batch, device, **options):
        import dataclasses

        joined = dataclasses.replace(batch, seg_start=batch.seg_start[[0, -1]], parent=batch.parent[:1])
        return real(joined, device, **options)

    monkeypatch.setattr(attention, "plan_attention", leaking)
    with pytest.raises(ValueError, match="model.engine_options.attention=padded"):
        e.check_packing(share_prefix=False)


def test_no_gradient_crosses_sequences(model, monkeypatch):
    """In one pass with rows that nothing depends on, which an engine computes without a backward pass."""
    monkeypatch.setattr("verl.model_engine.passes.trained_rows", lambda batch, terms: np.ones(batch.num_rows, bool))
    e = engine(model)
    seen = {}
    embedding = e.model.get_input_embeddings()
    embedding.register_forward_hook(lambda m, i, out: seen.setdefault("x", out.retain_grad() or out))
    batch = probe_batch(48, share_prefix=True)
    weight = torch.zeros(batch.num_loss_tokens, dtype=torch.float64)
    weight[int(batch.row_start[2]) :] = 1.0  # the third sequence only
    e.forward_backward(batch.with_columns({"w/loss": weight}), NLL)
    grad = seen["x"].grad[0].abs().sum(-1)
    own = torch.zeros(batch.num_tokens, dtype=torch.bool)
    leaf = int(batch.leaf[2])
    while leaf >= 0:
        own[batch.seg_start[leaf] : batch.seg_start[leaf + 1]] = True
        leaf = int(batch.parent[leaf])
    assert float(grad[~own].max()) == 0.0 and float(grad[own].max()) > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_linear_logprob_equals_dense(temperature):
    torch.manual_seed(0)
    h, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((37, 8), (53, 8), (53,)))
    target, t = torch.randint(0, 53, (37,)), torch.full((37,), temperature, dtype=torch.float64)
    upstream = torch.randn(2, 37, dtype=torch.float64)

    def grads(lp, entropy):
        return torch.autograd.grad((lp * upstream[0]).sum() + (entropy * upstream[1]).sum(), (h, w, b))

    logp = ((h @ w.T + b) / temperature).log_softmax(-1)
    dense = grads(logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1))
    lp, entropy, pi2, _ = linear_logprob(h, w, target, t, bias=b, entropy=True, sum_pi_squared=True)
    torch.testing.assert_close(lp, logp.gather(-1, target[:, None])[:, 0])
    torch.testing.assert_close(pi2, logp.exp().pow(2).sum(-1))
    for a, e in zip(grads(lp, entropy), dense, strict=True):
        torch.testing.assert_close(a, e)


def test_saved_tensors_do_not_depend_on_the_vocabulary():
    """Never [tokens, vocab]: what the graph keeps is hidden, weight and a few numbers per token."""

    def saved(vocab):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            h, w = torch.randn(256, 16, requires_grad=True), torch.randn(vocab, 16, requires_grad=True)
            linear_logprob(h, w, torch.randint(0, vocab, (256,)), torch.ones(256), entropy=True)
        weights = 16 * vocab
        return sum(t.numel() for t in kept if t.numel() != weights)

    assert saved(50_000) == saved(5_000) < 3 * 256 * 16
