"""Ids of placeholders: the policy never samples one, and the trainer has the normaliser of the ids that are left."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from facts import use_chunks
from fakes import put
from rollouts import source_of
from test_vision_rollout import ENGINES, PROMPTS, made, requests, rows_of
from torch import Tensor
from vision import END, IMAGE, KINDS, START, VIDEO, drawn, pictures, seen

from verl.algorithms.losses import nll
from verl.batch import Batch, pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.families import banned_ids
from verl.models.multimodal import with_pictures
from verl.nn.linear_logprob import Banned, Vocabulary, linear_logprob
from verl.nn.linear_teacher import HeadWeights, divergence, top_k
from verl.nn.logit_chunks import NONE
from verl.objective import Term
from verl.rollout.base import Completion, GenerateRequest
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.rows import queued_samples
from verl.types import Sample, Sampling, Segment, Trajectory, samples_of

BANNED = (START, END, IMAGE, VIDEO)
N, H, V, F64 = 60, 6, 23, torch.float64
IDS = torch.tensor([3, 11, 17])
ROWS = torch.arange(N) % 3 > 0
"""The rows of `IDS`: a row of each three has none."""


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, dtype=F64, requires_grad=True) for s in ((N, H), (V, H), (V,)))
    targets = torch.tensor([i for i in range(V) if i not in IDS.tolist()])[torch.randint(0, V - 3, (N,))]
    return hidden, weight, bias, targets, torch.rand(N, dtype=F64) + 0.3


def masked(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, cap: float = 0.0) -> Tensor:
    """Return the log-probs [N, V] by the definition."""
    z = hidden @ weight.T + (0 if bias is None else bias)
    z = cap * torch.tanh(z / cap) if cap else z
    return torch.log_softmax((z / temperature[:, None]).masked_fill(closed(), -torch.inf), -1)


def closed() -> Tensor:
    return ROWS[:, None] & torch.zeros(V, dtype=torch.bool).index_fill(0, IDS, True)


def plogp(logp: Tensor) -> Tensor:
    return (logp.exp() * logp.masked_fill(closed(), 0)).sum(-1)


@pytest.mark.parametrize("rows", [7, 1000])
@pytest.mark.parametrize("with_bias, cap", [(True, 0.0), (False, 2.0)])
def test_values_and_gradients_are_those_of_a_masked_softmax(
    inputs: Any, rows: int, with_bias: bool, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_chunks(monkeypatch, least_rows=rows, at_once=0)
    hidden, weight, bias, targets, temperature = inputs
    bias, leaves = (bias, (hidden, weight, bias)) if with_bias else (None, (hidden, weight))
    logp = masked(hidden, weight, bias, temperature, cap)
    other = (targets + 1) % V
    ids = torch.stack([targets, torch.where(torch.isin(other, IDS), (other + 1) % V, other)], 1)
    rest = torch.logsumexp(logp.scatter(1, ids, -torch.inf), -1, keepdim=True)
    expected = logp.gather(1, targets[:, None])[:, 0], -plogp(logp), torch.cat([logp.gather(1, ids), rest], 1)
    own, entropy, pi2, at = linear_logprob(
        *(hidden, weight, targets, temperature),
        **dict(bias=bias, cap=cap, entropy=True, sum_pi_squared=True, ids=ids, banned=Banned(IDS, ROWS)),
    )
    assert entropy is not None and pi2 is not None and at is not None
    found = own, entropy, at
    for got, want in zip((*found, pi2), (*expected, logp.exp().square().sum(-1)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    upstream = [torch.randn_like(x) for x in found]
    whole = [torch.autograd.grad(list(x), leaves, upstream) for x in (found, expected)]
    for got, want in zip(*whole, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    (first,) = torch.autograd.grad(
        linear_logprob(
            hidden, weight, targets, temperature, cap=cap, banned=Banned(IDS, torch.ones(N, dtype=torch.bool))
        )[0].sum(),
        [weight],
    )
    assert not first[IDS].any(), "a banned logit has no gradient"


def test_slices_of_a_vocabulary_ban_their_own_ids(inputs: Any) -> None:
    hidden, weight, _, targets, temperature = inputs
    logp = masked(hidden, weight, None, temperature)
    stacks: list[Tensor] = []

    def of(start: int, end: int, gather: Any) -> Any:
        part = Vocabulary(start, lambda x: x, gather)
        given = hidden, weight[start:end], targets, temperature
        return linear_logprob(*given, entropy=True, vocabulary=part, banned=Banned(IDS, ROWS))[:2]

    def keep(mine: Tensor) -> Tensor:
        stacks.append(mine)
        return torch.stack([mine, mine])

    for span in ((0, 12), (12, V)):
        of(*span, keep)
    parts = [of(*span, lambda _: torch.stack(stacks[:2])) for span in ((0, 12), (12, V))]
    expected = logp.gather(1, targets[:, None])[:, 0], -plogp(logp)
    for got in parts:
        for x, want in zip(got, expected, strict=True):
            torch.testing.assert_close(x, want, rtol=0, atol=1e-9)
    (want,) = torch.autograd.grad([x.sum() for x in expected], [weight], retain_graph=True)
    (got,) = torch.autograd.grad([x.sum() for part in parts for x in part], [weight])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_teacher_has_the_same_mask(inputs: Any, beta: float) -> None:
    hidden, weight, bias, targets, temperature = inputs
    torch.manual_seed(1)
    theirs, head = torch.randn(N, 4, dtype=F64), HeadWeights(torch.randn(V, 4, dtype=F64))
    s, t = masked(hidden, weight, bias, temperature), masked(theirs, head.weight, None, temperature)
    p, q = s.exp(), t.exp()
    m = (beta * q + (1 - beta) * p).masked_fill(closed(), 1).log()
    s, t = s.masked_fill(closed(), 0), t.masked_fill(closed(), 0)
    expected = {0.0: (q * (t - s)).sum(-1), 1.0: (p * (s - t)).sum(-1)}.get(
        beta, (beta * q * (t - m) + (1 - beta) * p * (s - m)).sum(-1)
    )
    banned, own = Banned(IDS, ROWS), HeadWeights(weight, bias)
    found, figures = divergence(hidden, own, temperature, theirs, head, temperature, beta, targets, banned)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert figures.isfinite().all()
    got, want = (torch.autograd.grad(x.sum(), (hidden, weight)) for x in (found, expected))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
    ids, logprobs, _ = top_k(hidden, own, temperature, 5, None, banned)
    assert not torch.isin(ids[ROWS], IDS).any() and torch.isin(ids[~ROWS], IDS).any()
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(N, dtype=F64), rtol=0, atol=1e-9)
    assert (
        linear_logprob(hidden, weight, targets, temperature, ids=IDS.expand(N, 3), banned=banned)[3][ROWS, :3] == NONE
    ).all()


def eager(kind: str) -> Any:
    """Return a model that would often sample a placeholder."""
    module = copy.deepcopy(made(kind))
    with torch.no_grad():
        module.lm_head.weight[list(BANNED)] *= 4
    return module


def wanting(given: list[GenerateRequest], **more: Any) -> list[GenerateRequest]:
    return [replace(one, sampling=replace(one.sampling, banned=BANNED, **more)) for one in given]


def sampled(engine: str, module: Any, given: list[GenerateRequest]) -> list[Completion]:
    async def run() -> list[Completion]:
        made_of = ENGINES[engine](module.config.model_type)
        await made_of.load_weights(source_of(module))
        found = list(await asyncio.gather(*map(made_of.generate, given)))
        await made_of.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("engine", ENGINES)
def test_no_placeholder_is_sampled_and_the_trainer_has_the_logprobs_of_the_rest(engine: str) -> None:
    """Rows with and without the mask are in one batch.."""
    module = eager("qwen2_5_vl")
    assert banned_ids(module.config) == BANNED
    given = wanting(requests(PROMPTS)) + [replace(one, id=f"free/{one.id}") for one in requests(PROMPTS)]
    found = sampled(engine, module, given)
    placeholders = [np.isin(one.ids, BANNED).mean() for one in found]
    assert not any(placeholders[: len(found) // 2]) and np.mean(placeholders[len(found) // 2 :]) > 0.2
    for more in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 3}):
        assert not any(np.isin(one.ids, BANNED).any() for one in sampled(engine, module, wanting(given[:3], **more)))
    rows = [replace(row, banned=bool(one.sampling.banned)) for row, one in zip(rows_of(given, found), given)]
    trainer = TorchEngine(copy.deepcopy(module), EngineSettings(dtype="float32", banned=BANNED))
    batch = with_pictures(pack(rows), pictures(), module.config)
    assert gap(trainer, batch) < 1e-5
    everywhere = batch.with_row_columns({"banned": torch.zeros(len(rows), dtype=torch.bool)})
    assert gap(trainer, everywhere) > 0.1, "the mask in the rollout alone"
    with pytest.raises(ValueError, match="this engine was built without them"):
        TorchEngine(module, EngineSettings(dtype="float32")).infer(batch, ("logprobs",))


def gap(trainer: TorchEngine, batch: Batch) -> float:
    found = trainer.infer(batch, ("logprobs",))["logprobs"]
    return float((found - batch.columns["rollout_logprobs"]).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_banned_logit_gets_no_gradient_and_a_banned_token_is_refused(kind: str) -> None:
    prompt = seen([1, 2, 3], "cat")
    names = {"sample_id": "s", "trajectory_id": "t", "group_id": "g", "purpose": "train"}
    row = Sample(**names, segments=(prompt, drawn(5, 6, 7)), banned=True)
    engine = TorchEngine(
        copy.deepcopy(made(kind)).requires_grad_(True),
        EngineSettings(dtype="float32", banned=BANNED, optim=OptimSpec(lr=0.1, weight_decay=0.0)),
    )
    batch = with_pictures(pack([row]), pictures(), engine.model.config).with_columns({"w/loss": torch.ones(3)})
    engine.forward_backward(batch, (Term(name="loss", fn=nll),))
    gradient = engine.model.lm_head.weight.grad
    assert not gradient[list(BANNED)].any() and gradient[:START].all(1).any()
    bad = pack([replace(row, segments=(prompt, drawn(5, IMAGE)))])
    with pytest.raises(ValueError, match=rf"token {IMAGE} was sampled in a row that bans the ids"):
        engine.infer(with_pictures(bad, pictures(), engine.model.config), ("logprobs",))


def test_a_request_bans_the_ids_of_its_model_or_none() -> None:
    (one,) = requests(PROMPTS[:1], 1)
    with pytest.raises(ValueError, match=r"banned=\(5,\): this model can ban the ids \(58, 59, 60, 61\), or none"):
        sampled("compiled", made("qwen2_vl"), [replace(one, sampling=replace(one.sampling, banned=(5,)))])


def test_a_sample_keeps_whether_ids_were_banned() -> None:
    """A stored answer was not sampled, and an older sample has no such fact: no id is banned for them."""
    prompt, queue = Segment(ids=np.arange(3), source="prompt"), MemoryQueue()
    last = {"sampled": drawn(5, 6), "stored": Segment(ids=np.arange(2), source="stored")}
    of = partial(Trajectory, group_id="g", task_id="t", index=0, purpose="train", attempt=0, stop_reason="eos")
    made_of = {}
    for banned in ((), BANNED):
        for source, segment in last.items():
            sampling = Sampling(max_tokens=4, banned=banned).of_call(3, 1)
            name = f"{source} {bool(banned)}"
            (made_of[name],) = samples_of(of(trajectory_id=name, sampling=sampling, segments=(prompt, segment)))
    refs = put(queue, list(made_of.values()))
    assert [row.banned for row in queued_samples(queue, refs)] == [False, False, True, False]
    assert pack(list(made_of.values())).row_columns["banned"].tolist() == [False, False, True, False]
