"""The losses of a teacher, against dense float64: divergences by hand, over a few ids and over the whole vocabulary,
with temperatures of both sides and the rest of the ids; the reverse KL as an advantage."""

import asyncio
import gc
import math
import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from each import each
from facts import use_chunks
from fakes import put
from passes import forward_backward
from small_columns import F64, columns, f64
from test_linear_logprob import LargestTensor
from test_virtual_ranks import config_of, samples
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from verl.algorithms import estimators as adv
from verl.algorithms import losses
from verl.batch import pack
from verl.config.tree import changed
from verl.driver.assemble import offline_learner
from verl.driver.step import Step, experience_and_update
from verl.model_engine.base import TeacherHead
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.lm_head import read_teacher
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.linear_logprob import linear_logprob
from verl.nn.linear_teacher import HeadWeights, logprobs_at, top_k
from verl.nn.linear_teacher import divergence as with_figures
from verl.nn.logit_chunks import NONE
from verl.objective import Term, TermValue

N, V = 21, 13
BETAS = (0.0, 0.3, 0.5, 1.0)


def divergence(hidden, *sides):
    return with_figures(hidden, *sides, torch.zeros(len(hidden), dtype=torch.int64))[0]


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.exp() * (a - b)).sum(-1)


def plain(s: torch.Tensor, t: torch.Tensor, beta: float) -> torch.Tensor:
    """The definition: [..., V] log-probs of student and teacher."""
    if beta in (0.0, 1.0):
        return kl(s, t) if beta else kl(t, s)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def dense_pair(student, teacher, row, *, top=None, temperature=None):
    """[n, V] log-probs of both models at the answer of a row of one turn, at its temperature (the teacher's own, if
    given); top: of the teacher's likeliest and of all others together, [n, top + 1]."""
    ids, first = np.concatenate([s.ids for s in row.segments]), len(row.segments[0].ids) - 1
    ids = torch.from_numpy(ids)[None]
    s = torch.log_softmax(student(ids).logits[0, first:-1] / row.temperature, -1)
    with torch.no_grad():
        t = torch.log_softmax(teacher(ids).logits[0, first:-1] / (temperature or row.temperature), -1)
    if top is None:
        return s, t
    named = t.topk(top, -1).indices
    inside = torch.zeros_like(t, dtype=torch.bool).scatter(-1, named, True)
    rest = [x.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True) for x in (s, t)]
    return tuple(torch.cat([x.gather(-1, named), r], -1) for x, r in zip((s, t), rest, strict=True))


def dense(hidden, head: HeadWeights, temperature) -> torch.Tensor:
    z = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    z = head.cap * torch.tanh(z / head.cap) if head.cap else z
    return torch.log_softmax(z / temperature[:, None], -1)


@pytest.fixture
def sides(monkeypatch):
    """(hidden, head, temperature) of a student and of a wider teacher; chunks of 4 rows."""
    use_chunks(monkeypatch, least_rows=4, at_once=0)
    torch.manual_seed(0)
    out = []
    for width, cap in ((5, 2.0), (7, 0.0)):
        hidden, weight, bias = (torch.randn(*s, dtype=F64) for s in ((N, width), (V, width), (V,)))
        leaves = [x.requires_grad_(width == 5) for x in (hidden, weight, bias)]
        out.append((leaves[0], HeadWeights(*leaves[1:], cap), torch.rand(N, dtype=F64) + 0.4))
    return out


def same_gradients(got, expected, leaves, shape) -> None:
    upstream = torch.randn(*shape, dtype=F64)
    upstream[::3] = 0
    found, wanted = (torch.autograd.grad((x * upstream).sum(), leaves, retain_graph=True) for x in (got, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# -- the head in chunks ------------------------------------------------------------------------------------------------


@each("beta", BETAS)
def test_the_whole_vocabulary_in_chunks_is_the_definition(sides, beta):
    (h, head, t), (teacher, teachers, u) = sides
    got = divergence(h, head, t, teacher, teachers, u, beta)
    expected = plain(dense(h, head, t), dense(teacher, teachers, u), beta)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert (got >= 0).all()
    s, theirs, drawn = dense(h, head, t), dense(teacher, teachers, u), torch.arange(N) % V
    _, figures = with_figures(h, head, t, teacher, teachers, u, beta, drawn)
    same = (s.argmax(-1) == theirs.argmax(-1)).to(F64)
    wanted = [theirs.gather(-1, drawn[:, None])[:, 0], same, -(theirs.exp() * theirs).sum(-1)]
    torch.testing.assert_close(figures, torch.stack(wanted, -1), rtol=1e-10, atol=1e-12)
    assert not figures.requires_grad and 0 < same.mean() < 1
    same_gradients(got, expected, (h, head.weight, head.bias), (N,))
    small = [x[:3].detach().requires_grad_() for x in (h,)]
    assert torch.autograd.gradcheck(
        lambda x, w, b: divergence(x, HeadWeights(w, b, 2.0), t[:3], teacher[:3], teachers, u[:3], beta),
        (small[0], head.weight.detach().requires_grad_(), head.bias.detach().requires_grad_()),
    )


@each("k", [1, 4, V - 1, V])
def test_ids_and_the_rest_are_a_distribution(sides, k):
    (h, head, t), (teacher, teachers, u) = sides
    ids, topk, _ = top_k(teacher, teachers, u, k)
    theirs = dense(teacher, teachers, u)
    torch.testing.assert_close(topk[:, :k], theirs.topk(k).values)
    torch.testing.assert_close(topk[:, :k], theirs.gather(-1, ids))
    drawn = ids[:, -1].roll(1)  # of some rows among those that are taken out of the rest, of some not
    own = top_k(teacher, teachers, u, k, drawn)[2]
    torch.testing.assert_close(own, theirs.gather(-1, drawn[:, None])[:, 0], rtol=1e-10, atol=1e-12)
    got, s = logprobs_at(h, head, ids, t), dense(h, head, t)
    torch.testing.assert_close(got[:, :k], s.gather(-1, ids))
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(N, dtype=F64))
    torch.testing.assert_close(topk.exp().sum(-1), torch.ones(N, dtype=F64))
    if k == V:
        assert (got[:, k] == NONE).all() and (topk[:, k] == NONE).all(), "nothing is left"
        got, expected = got[:, :k], s.gather(-1, ids)
    else:
        inside = torch.zeros(N, V, dtype=torch.bool).scatter(-1, ids, True)
        expected = torch.cat([s.gather(-1, ids), s.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)], -1)
        torch.testing.assert_close(got, expected)
    same_gradients(got, expected, (h, head.weight, head.bias), got.shape)


@each("beta", BETAS)
def test_all_ids_are_the_whole_vocabulary(sides, beta):
    (h, head, t), (teacher, teachers, u) = sides
    ids, topk, _ = top_k(teacher, teachers, u, V)
    few = losses.token_divergence(logprobs_at(h, head, ids, t), topk, beta)
    whole = divergence(h, head, t, teacher, teachers, u, beta)
    torch.testing.assert_close(few, whole, rtol=1e-10, atol=1e-12)
    same_gradients(few, whole, (h, head.weight, head.bias), (N,))
    for k in (1, 4):  # fewer outcomes never differ more
        ids, topk, _ = top_k(teacher, teachers, u, k)
        assert (losses.token_divergence(logprobs_at(h, head, ids, t), topk, beta) <= whole + 1e-12).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_one_pass_reads_the_drawn_token_and_the_named_ones(sides, with_entropy):
    (h, head, t), (teacher, teachers, u) = sides
    rng = torch.Generator().manual_seed(3)
    ids, drawn = top_k(teacher, teachers, u, 4)[0], torch.randint(0, V, (N,), generator=rng)
    lp, entropy, _, at = linear_logprob(
        h, head.weight, drawn, t, ids=ids, bias=head.bias, cap=head.cap, entropy=with_entropy
    )
    s = dense(h, head, t)
    inside = torch.zeros(N, V, dtype=torch.bool).scatter(-1, ids, True)
    rest = s.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)
    expected = [s.gather(-1, drawn[:, None])[:, 0], torch.cat([s.gather(-1, ids), rest], -1), -(s.exp() * s).sum(-1)]
    got = [lp, at] if entropy is None else [lp, at, entropy]
    scales = [torch.randn(x.shape, dtype=F64, generator=rng) for x in expected]
    scales[0][2], scales[1][3] = 0.0, 0.0  # rows of which only one is needed
    sums = []
    for found in (got, expected[: len(got)]):
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
        loss = sum((x * scale).sum() for x, scale in zip(found, scales))
        sums.append(torch.autograd.grad(loss, (h, head.weight, head.bias), retain_graph=True))
    for a, b in zip(*sums):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@each("far", [-20.7, -95.0, -120.0])
def test_a_small_rest_has_the_gradient_of_its_shares(far):
    z = torch.tensor([[3.0, 2.0, far, far - 0.6]], requires_grad=True)
    got = logprobs_at(z, HeadWeights(torch.eye(4)), torch.tensor([[0, 1]]), torch.ones(1))
    (grad,) = torch.autograd.grad(got[0, 2], z)
    exact = z.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact[0, 2:].logsumexp(0) - exact[0].logsumexp(0), exact)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-7)


def test_what_no_pass_reads_backward_is_let_go(sides):
    """Without a collector: what is kept for the backward pass does not hold what it belongs to."""
    (h, head, t), (teacher, teachers, u) = sides
    gc.disable()
    try:
        outputs = linear_logprob(
            h, head.weight, torch.zeros(N, dtype=torch.long), t, ids=top_k(teacher, teachers, u, 4)[0]
        )
        kept = [weakref.ref(x) for x in outputs if x is not None]
        assert len(kept) == 2
        del outputs
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_a_rest_that_is_almost_nothing_keeps_its_digits():
    """In float32, 1 - the sum of the others is 0 or noise where the rest is 1e-9."""
    z = torch.tensor([[0.0, 0.0, -20.7, -21.3]])
    got = logprobs_at(z, HeadWeights(torch.eye(4)), torch.tensor([[0, 1]]), torch.ones(1))
    exact = (z[0, 2:].double().exp().sum() / z.double().exp().sum()).log()
    torch.testing.assert_close(got[0, 2].double(), exact, rtol=1e-6, atol=0)


def test_a_broken_row_without_gradient_reaches_nothing(sides):
    (h, head, t), (teacher, teachers, u) = sides
    broken, theirs = h.detach().clone(), teacher.clone()
    broken[3] = theirs[5] = torch.nan
    for read in (
        lambda x, y: divergence(x, head, t, y, teachers, u, 0.5),
        lambda x, y: logprobs_at(x, head, top_k(teacher, teachers, u, 3)[0], t).sum(-1),
    ):
        weight = torch.ones(N, dtype=F64)
        weight[[3, 5]] = 0
        found = []
        for x, y in ((broken, theirs), (h.detach(), teacher)):
            leaf = x.clone().requires_grad_()
            value = torch.where(weight > 0, read(leaf, y), 0.0)
            found.append(torch.autograd.grad((value * weight).sum(), (leaf, head.weight)))
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)


def test_memory_does_not_depend_on_the_vocabulary(monkeypatch):
    use_chunks(monkeypatch, least_rows=1, at_once=64 << 10)
    n, width, largest = 600, 8, {}
    for vocab in (50, 5000):
        hidden, weight = torch.randn(n, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
        head, ones = HeadWeights(weight), torch.ones(n)
        with LargestTensor(ignored=vocab * width) as mode:
            states = torch.randn(n, width)
            value = divergence(hidden, head, ones, states, HeadWeights(weight.detach()), ones, 0.5)
            drawn = torch.randint(0, vocab, (n,))
            ids, *_ = top_k(hidden.detach(), HeadWeights(weight.detach()), ones, 4, drawn)
            (value.sum() + logprobs_at(hidden, head, ids, ones).sum()).backward()
        largest[vocab] = mode.largest
        assert mode.largest <= max(64 << 10, 8 * n * width), largest
    assert n * 5000 * 4 > 100 * max(largest.values()), "full logits would have been seen"


# -- losses and advantages by hand -------------------------------------------------------------------------------------


def test_the_divergence_by_hand():
    """Three outcomes; the last is the rest."""
    s, t = f64(0.5, 0.3, 0.2).log(), f64(0.25, 0.25, 0.5).log()
    forward = 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.3) + 0.5 * math.log(0.5 / 0.2)
    reverse = 0.5 * math.log(0.5 / 0.25) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.5)
    assert float(losses.token_divergence(s, t, 0.0)) == pytest.approx(forward, rel=1e-12)
    assert float(losses.token_divergence(s, t, 1.0)) == pytest.approx(reverse, rel=1e-12)
    m = [0.25 * 0.25 + 0.75 * 0.5, 0.25 * 0.25 + 0.75 * 0.3, 0.25 * 0.5 + 0.75 * 0.2]
    jsd = 0.25 * sum(p * math.log(p / x) for p, x in zip((0.25, 0.25, 0.5), m))
    jsd += 0.75 * sum(p * math.log(p / x) for p, x in zip((0.5, 0.3, 0.2), m))
    assert float(losses.token_divergence(s, t, 0.25)) == pytest.approx(jsd, rel=1e-12)
    for beta in BETAS:
        assert float(losses.token_divergence(t, t, beta)) == pytest.approx(0, abs=1e-15)


def test_the_metrics_of_the_likeliest_tokens():
    c = columns([1.0, 0.0], tokens=1)
    c = c.with_token({"logprobs_at": f64(0.5, 0.3, 0.2, 0.6, 0.3, 0.1).view(2, 3).log()})
    c = c.with_token({"teacher_topk": f64(0.7, 0.2, 0.1, 0.9, 0.05, 0.05).view(2, 3).log()})
    found = losses.gkd_topk(c, beta=1.0).metrics
    torch.testing.assert_close(found["teacher_coverage"][0], f64(0.9, 0.95))
    torch.testing.assert_close(found["student_coverage"][0], f64(0.8, 0.9))
    entropy = [-sum(p * math.log(p) for p in row) for row in ((0.5, 0.3, 0.2), (0.6, 0.3, 0.1))]
    torch.testing.assert_close(found["student_entropy"][0], f64(*entropy))


@pytest.mark.parametrize("name", ["gkd", "gkd_topk"])
def test_the_divergence_is_told_by_quarter_of_the_answer_and_by_teacher(name, tiny_model, tiny_teacher):
    """The same figures whatever is packed together, of the tokens of each part alone; and of all of them."""
    from test_several_teachers import one_turn, rows, several

    found = []
    for budget in (64, 16384):
        config = config_of(name, tiny_model, tiny_teacher, 1, budget)
        if name == "gkd_topk":
            config = several(name, tiny_model, {"a": tiny_teacher, "b": tiny_model})
            config = changed(config, {"step.max_tokens_per_microbatch": budget})
        step, _, _ = one_turn(config, rows())
        found.append({n: m for n, m in step.metrics.items() if n.startswith("actor/teacher_divergence")})
    assert {n: m.value for n, m in found[0].items()} == pytest.approx({n: m.value for n, m in found[1].items()})
    whole = found[0].pop("actor/teacher_divergence")
    of = lambda *names: [found[0][f"actor/teacher_divergence/{n}"] for n in names]  # noqa: E731
    for parts in (of(*(f"quarter_{q}" for q in (1, 2, 3, 4))), of("a", "b")):
        assert sum(m.count for m in parts) == whole.count and all(0 < m.count < whole.count for m in parts)
        assert sum(m.total for m in parts) == pytest.approx(whole.total)
    if name == "gkd_topk":  # the policy is the same as itself
        assert of("b")[0].value == pytest.approx(0, abs=1e-6) and of("a")[0].value > 1e-4


def test_a_divergence_beside_a_policy_loss_by_hand():
    """GRPO's clipped loss as it is, and 0.5 x the mean of the divergence over the tokens of the step, each with its own
    weights; at the step that halves its coefficient, a quarter."""
    from verl.algorithms.resolve import resolve
    from verl.algorithms.weights import term_weights

    given = {"divergence_coef": 0.5, "divergence_beta": 0.0, "kl_loss_coef": 0.0, "aggregation": "token-mean"}
    algorithm = resolve("grpo", {**given, "coef_schedule": {"divergence_coef": [[1, 1], [3, 0]]}})
    assert [t.name for t in algorithm.terms] == ["pg_loss", "divergence_loss"] and algorithm.roles() == {"teacher"}
    plain = resolve("grpo", {**given, "divergence_coef": 0.0})
    assert [t.name for t in plain.terms] == ["pg_loss"] and not plain.roles()
    student, teacher = f64(0.5, 0.3, 0.2, 0.6, 0.3, 0.1).view(2, 3), f64(0.7, 0.2, 0.1, 0.9, 0.05, 0.05).view(2, 3)
    c = columns([1.0, 0.0], tokens=1).with_token({"logprobs_at": student.log(), "teacher_topk": teacher.log()})
    c = c.with_token({"logprobs": f64(-1.0, -2.0).log_softmax(0), "advantages": f64(0.7, -0.7)})
    kl = [sum(t * math.log(t / s) for t, s in zip(*pair)) for pair in zip(teacher.tolist(), student.tolist())]
    for number, factor in ((1, 0.5), (2, 0.25), (3, 0.0)):
        now, said = algorithm.at(number)
        weights = term_weights(c, now.terms)
        value = {t.name: float((weights[f"w/{t.name}"] * t.fn(c).values).sum()) for t in now.terms}
        assert said == {"divergence_coef": factor} and value["divergence_loss"] == pytest.approx(factor * sum(kl) / 2)
        own = term_weights(c, plain.terms)["w/pg_loss"]
        assert value["pg_loss"] == float((own * plain.terms[0].fn(c).values).sum()) == pytest.approx(0.0, abs=1e-12)


def test_a_turn_of_grpo_with_a_teacher_beside_it_is_the_sum_of_both(tiny_model, tiny_teacher):
    """The gradient of the whole step: that of GRPO alone, and the coefficient times that of the divergence alone."""
    from test_virtual_ranks import turn

    alone = {"kl_loss_coef": 0.0, "aggregation": "token-mean"}
    found = {}
    for name, options in (
        ("grpo", alone),
        ("gkd_topk", {"beta": 0.5, "aggregation": "token-mean"}),
        ("both", {**alone, "divergence_coef": 0.3}),
    ):
        config = config_of("grpo" if name == "both" else name, tiny_model, tiny_teacher, 1, 64)
        config = changed(config, {"teacher.path": None if name == "grpo" else str(tiny_teacher), "teacher.top_k": 5})
        config = changed(config, {"algorithm.options": dict(options)})
        config = changed(config, {"step.updates_per_step": 1, "step.epochs_per_step": 1})
        grads, metrics, _, _ = turn(config, samples(0))
        found[name] = torch.cat([g.flatten() for g in grads[0].values()]), metrics
    expected = found["grpo"][0] + 0.3 * found["gkd_topk"][0]
    torch.testing.assert_close(found["both"][0], expected, rtol=1e-9, atol=1e-12)
    both = found["both"][1]
    assert both["actor/divergence_loss"] == pytest.approx(0.3 * both["actor/teacher_divergence"]) != 0


def test_a_quarter_is_of_the_trainable_tokens_of_a_sequence():
    c = columns([1.0, 0.0], tokens=4)
    assert losses._quarters(c).tolist() == [0, 1, 2, 3] * 2
    c = replace(c, mask=torch.tensor([1, 0, 1, 0, 0, 0, 0, 1]).bool())
    assert losses._quarters(c)[c.mask].tolist() == [0, 2, 0]


@pytest.mark.parametrize("gamma, expected", [(0.0, [0.2, -0.4, 0.1, 0]), (0.5, [0.2 - 0.15, -0.3, 0.1, 0])])
def test_opd_by_hand(gamma, expected):
    """A hole, and an answer without a reward; the second answer has one token."""
    c = columns([1.0, 0.0, 9.0], ["g"] * 3, tokens=[3, 1, 1], mask=[True, False, True, True, True], valid=[1, 1, 0])
    c = replace(c, sequence={**c.sequence, "valid": torch.tensor([True, True, False])})
    drawn = f64(-1, -1, -1, -1, -1)
    likes = f64(0.2, torch.nan, -0.4, 0.1, 7.0)
    if gamma:
        likes[2] = -0.3
    found = adv.opd(c.with_token({"rollout_logprobs": drawn, "teacher_logprobs": drawn + likes}), gamma=gamma)
    torch.testing.assert_close(found["advantages"], f64(expected[0], 0, expected[1], expected[2], 0))
    assert found["teacher/kl"].value == pytest.approx(-(0.2 + float(likes[2]) + 0.1) / 3)
    both = adv.opd(
        c.with_token({"rollout_logprobs": drawn, "teacher_logprobs": drawn + likes}),
        gamma=gamma,
        teacher_coef=0.5,
        reward_coef=2.0,
    )["advantages"]
    reward = 2 * adv.grpo(c)["advantages"]
    torch.testing.assert_close(both, 0.5 * found["advantages"] + reward)


def test_opd_moves_no_answer_without_a_valid_reward():
    """The teacher has log-probs of the answer, so that its signal alone would not be 0."""
    c = columns([1.0, 9.0], ["g"] * 2, tokens=[1, 1])
    c = replace(c, sequence={**c.sequence, "valid": torch.tensor([True, False]), "taught": torch.tensor([True, True])})
    found = adv.opd(c.with_token({"rollout_logprobs": f64(-1, -1), "teacher_logprobs": f64(-0.5, -0.25)}))
    assert found["advantages"].tolist() == [0.5, 0.0]


def test_opd_is_the_policy_gradient_of_the_reverse_kl():
    """On answers in exactly the policy's proportion."""
    p, q = f64(0.5, 0.25, 0.125, 0.125), f64(0.1, 0.2, 0.3, 0.4)
    logits = p.log().requires_grad_()
    actions = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    c = columns([0.0] * 8, tokens=1)
    c = c.with_token({"rollout_logprobs": p.log()[actions], "teacher_logprobs": q.log()[actions]})
    a = adv.opd(c)["advantages"]
    lp = logits.log_softmax(-1)
    got = torch.autograd.grad((-a * lp[actions]).mean(), logits)[0]
    exact = torch.autograd.grad(kl(logits.log_softmax(-1), q.log()), logits)[0]
    torch.testing.assert_close(got, exact)


# -- through the engines -----------------------------------------------------------------------------------------------


def engine(folder, **more) -> TorchEngine:
    return TorchEngine(load_causal_lm(folder), EngineSettings(dtype="float64", max_tokens_per_microbatch=64, **more))


@each("temperature, beta", product([None, 1.7], BETAS), quick=2)
def test_student_and_teacher_engines_give_what_two_models_do(tiny_model, tiny_teacher, beta, temperature):
    """Value and gradient of the mean divergence over ragged rows that share prompts, at the samples' temperature."""
    rows = [replace(s, temperature=0.7 if i % 3 else 1.3) for i, s in enumerate(samples(0))]
    batch, k = pack(rows), 19
    theirs = engine(tiny_teacher, top_k=k)
    u = batch.row_columns["temperature"][batch.row_of].double() if temperature is None else None
    u = torch.full((batch.num_loss_tokens,), temperature, dtype=F64) if u is None else u
    teacher_batch = batch.with_row_columns({"temperature": u[torch.from_numpy(batch.row_start[:-1])]})
    found = theirs.infer(teacher_batch, ("hidden", "topk_ids", "topk_logprobs", "logprobs"))
    torch.testing.assert_close(found["logprobs"], theirs.infer(teacher_batch, ("logprobs",))["logprobs"])
    assert found["topk_ids"].dtype == torch.int64 and found["topk_logprobs"].shape == (batch.num_loss_tokens, k + 1)
    weight = torch.rand(batch.num_loss_tokens, dtype=F64)
    batch = batch.with_columns({"teacher_hidden": found["hidden"], "teacher_ids": found["topk_ids"]})
    batch = batch.with_columns({"teacher_topk": found["topk_logprobs"], "w/full": weight, "w/few": weight})

    def value(c):
        return TermValue(c["divergence"])

    terms = {
        "full": Term(name="full", fn=value, outputs=("divergence",), inputs=("teacher_hidden",)),
        "few": Term(name="few", fn=lambda c: losses.gkd_topk(c, beta=beta), outputs=("logprobs_at",)),
    }
    student, own = load_causal_lm(tiny_model).double(), load_causal_lm(tiny_teacher).double()
    expected = torch.zeros((), dtype=F64)
    values, rest = [], []
    for r, row in enumerate(rows):
        ids = torch.from_numpy(np.concatenate([s.ids for s in row.segments]))
        first = len(row.segments[0].ids) - 1
        span = slice(int(batch.row_start[r]), int(batch.row_start[r + 1]))
        s = torch.log_softmax(student(ids[None]).logits[0, first:-1] / row.temperature, -1)
        with torch.no_grad():
            t = torch.log_softmax(own(ids[None]).logits[0, first:-1] / u[span, None], -1)
        values.append(plain(s, t, beta))
        named = found["topk_ids"][span]
        inside = torch.zeros_like(t, dtype=torch.bool).scatter(-1, named, True)
        pair = [
            torch.cat([x.gather(-1, named), x.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)], -1)
            for x in (s, t)
        ]
        rest.append(plain(*pair, beta))
    for name, dense_values in (("full", values), ("few", rest)):
        student.zero_grad()
        expected = (weight * torch.cat(dense_values)).sum()
        expected.backward(retain_graph=True)
        ours = engine(
            tiny_model, optim=OptimSpec(lr=1.0), teacher=read_teacher(TeacherHead(tiny_teacher, beta, temperature))
        )
        out = forward_backward(ours, batch, (terms[name],))
        assert out.metrics[name].value == pytest.approx(float(expected.detach()), rel=1e-6)
        grads = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
        for n, p in ours.model.named_parameters():
            scale = float(grads[n].abs().max())
            assert float((p.grad - grads[n]).abs().max()) <= 1e-6 * max(scale, 1e-6), (name, n)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_the_head_of_a_folder_alone_gives_its_logits(kind, tmp_path):
    """Tied embeddings under another name, and logits that are capped."""
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = Gemma2ForCausalLM(
            Gemma2Config(vocab_size=40, num_key_value_heads=1, head_dim=8, final_logit_softcapping=3.0, **sizes)
        )
    model.save_pretrained(tmp_path)
    head = read_teacher(TeacherHead(tmp_path, 0.5)).head
    ids = torch.randint(0, 40, (1, 9))
    with torch.no_grad():
        out = model.eval()(ids, output_hidden_states=True)
        got = head.logprobs(out.hidden_states[-1][0], torch.ones(9))
    torch.testing.assert_close(got, out.logits[0].log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_a_folder_without_a_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no lm_head.weight"):
        read_teacher(TeacherHead(tmp_path, 0.5))


# -- what a teacher cannot say -----------------------------------------------------------------------------------------


def turn_with(patch, name, tiny_model, tiny_teacher, spoiled: int, share: float):
    """Run one turn in which the teacher returns NaN for so many samples. Return (metrics, trained refs, the actor's
    gradients)."""
    config = config_of(name, tiny_model, tiny_teacher, 1, 16384)
    config = changed(config, {"step.updates_per_step": 1, "step.epochs_per_step": 1})
    config = changed(config, {"pipeline.max_invalid_share": share})
    learner = offline_learner(config, 1, tiny_model)
    infer = TorchEngine.infer

    def broken(self, batch, wanted, average, start):
        found = infer(self, batch, wanted, average, start)
        if self.optimizer is None:
            for r in range(spoiled):
                for column in found.values():
                    if column.is_floating_point():
                        column[int(batch.row_start[r])] = torch.nan
        return found

    patch.setattr(TorchEngine, "infer", broken)
    try:
        refs = put(learner.queue, samples(0))
        step = Step(0)
        asyncio.run(experience_and_update(learner, step, refs))
        return step, learner.queue.read(step.trained, ("loss_mask",))["loss_mask"]
    finally:
        learner.close()


@pytest.mark.parametrize("name", ["opd", "gkd", "gkd_topk"])
def test_a_sample_that_the_teacher_fails_on_is_invalid_and_not_zero(name, monkeypatch, tiny_model, tiny_teacher):
    step, mask = turn_with(monkeypatch, name, tiny_model, tiny_teacher, spoiled=2, share=0.2)
    assert [r.outcome for r in step.trained[:3]] == ["invalid", "invalid", "ok"]
    assert not mask.row(0).any() and not mask.row(1).any() and mask.row(2).all()
    assert step.metrics["teacher/invalid"].value == 2 / 16
    assert math.isfinite(step.metrics["actor/grad_norm"].value) and step.metrics["actor/grad_norm"].value > 0


def test_a_teacher_that_fails_on_too_many_stops_the_run(monkeypatch, tiny_model, tiny_teacher):
    with pytest.raises(ValueError, match=r"teacher: 4 of 16 samples have no finite number.*max_invalid_share=0.2"):
        turn_with(monkeypatch, "opd", tiny_model, tiny_teacher, spoiled=4, share=0.2)
