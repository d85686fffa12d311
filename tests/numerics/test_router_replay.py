"""Router replay: the rollout records the experts of each token, and the trainer computes the token with them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import families
import hybrid
import numpy as np
import pytest
import sounds
import torch
import vision_families
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.rollouts import finish, native_core, source_of
from verl.accel.families import ROUTED_TYPES
from verl.agent_loop.base import AgentLoopOutput
from verl.batch import Batch, Ragged, concat, pack, select_rows, unshare
from verl.driver.routes import with_routes
from verl.driver.stages import SFT_TERMS
from verl.errors import Refused
from verl.model_engine.base import EngineCapabilities
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.recorded import RecordedCall
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native.options import Options
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.rows import queued_samples
from verl.types import NO_ROUTE, ROUTES, Refs, Sample, Sampling, Segment, ref_of
from verl.workers.rank_batch import RankStep, informed
from verl.workers.role import Role, View

SIZES: dict[str, Any] = families.SIZES | dict(
    vocab_size=64,
    num_hidden_layers=3,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    mlp_only_layers=[1],
)
EXPERTS = ("layers.0.", "layers.2.")
PROMPTS = [np.random.default_rng(i).integers(0, 64, n) for i, n in enumerate((3, 90, 17, 40, 17))]


def model(kind: str = "qwen3_moe", **more: Any) -> Any:
    if kind != "qwen3_moe":
        return hybrid.model(kind).eval()
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | more)).eval()


def sampled(core: Any, prompts: Sequence[np.ndarray] = PROMPTS, tokens: int = 20) -> list[Completion]:
    requests = (
        ActiveRequest(GenerateRequest(str(i), prompt, Sampling(max_tokens=tokens - 3 * (i % 3), seed=i), routes=True))
        for i, prompt in enumerate(prompts)
    )
    found = finish(core, requests)
    return [found[str(i)] for i in range(len(prompts))]


def routers(module: Any) -> list[Any]:
    return [m for m in module.modules() if type(m).__name__.endswith("TopKRouter")]


@torch.no_grad()
def chosen_by(module: Any, ids: np.ndarray) -> np.ndarray:
    """Return the experts [t, layers, k] that transformers' model chooses for a sequence."""
    found: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda m, args, out: found.append(out[2])) for r in routers(module)]
    module(torch.from_numpy(ids)[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


@torch.no_grad()
def logprobs_with(module: Any, ids: np.ndarray, routes: np.ndarray) -> Tensor:
    """Return log-probs [t-1] by transformers' model with routers that are written here."""
    for number, router in enumerate(routers(module)):

        def forward(x: Tensor, router: Any = router, number: int = number) -> tuple[Tensor, Tensor, Tensor]:
            logits = x @ router.weight.t()
            own = logits.topk(router.top_k).indices
            wanted = torch.from_numpy(routes[:, number].astype(np.int64))
            experts = torch.where(wanted < 0, own, wanted)
            share = torch.stack([logits.softmax(-1)[i, row] for i, row in enumerate(experts)])
            if getattr(router, "norm_topk_prob", True):
                share = share / share.sum(-1, keepdim=True)
            return logits, share, experts

        router.forward = forward
    z = module(torch.from_numpy(ids)[None]).logits[0]
    for router in routers(module):
        del router.forward
    return torch.log_softmax(z, -1)[:-1].gather(-1, torch.from_numpy(ids)[1:, None])[:, 0]


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize(
    "given", [{}, {"deterministic": True}, {"lanes": 2, "paged": True}, {"look_ahead": True, "lanes": 2}]
)
def test_the_rollout_records_the_experts_of_every_token(kind: str, given: dict[str, Any]) -> None:
    """Of prompts in several passes, of prompts that begin with a stored one, and of rows that move to other places."""
    module = model(kind)
    core = native_core(module.config, source_of(module), max_prefill_tokens=64, rows=3, replay_routes=True, **given)
    first = sampled(core)
    longer = [np.concatenate([p, c.ids]) for p, c in zip(PROMPTS, first)]
    for prompts, found in ((PROMPTS, first), (longer, sampled(core, longer))):
        for prompt, c in zip(prompts, found):
            ids = np.concatenate([prompt, c.ids])
            assert c.routes is not None and c.routes.dtype == np.int8 and len(c.routes) == len(ids)
            assert (c.routes[-1] == NO_ROUTE).all()
            np.testing.assert_array_equal(c.routes[:-1], chosen_by(module, ids)[:-1])
    assert core.runner.stats()["reused_tokens"] > 0 or given.get("deterministic") or kind != "qwen3_moe"
    plain = native_core(module.config, source_of(module), max_prefill_tokens=64, rows=3, **given | {"paged": False})
    for a, b in zip(first, sampled(plain), strict=True):
        assert b.routes is None and np.array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


@torch.no_grad()
def test_a_request_that_waits_again_keeps_the_routes_of_the_weights_that_sampled_it() -> None:
    """Its KV is computed again with the weights of two newer versions; earlier tokens have the experts of theirs."""
    versions = [model() for _ in range(3)]
    for number, module in enumerate(versions):
        for router in routers(module):
            router.weight += number * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(number))
    core = native_core(versions[0].config, source_of(versions[0]), replay_routes=True)
    core.add(ActiveRequest(GenerateRequest("a", PROMPTS[2], Sampling(max_tokens=12), routes=True)))
    for number in (1, 2):
        for _ in range(3):
            core.step()
        core.sleep(1)
        core.load(source_of(versions[number], number))
    other = ActiveRequest(GenerateRequest("nobody trains on it", PROMPTS[1], Sampling(max_tokens=2)))
    found = finish(core, [other])
    c = found["a"]
    assert found["nobody trains on it"].routes is None
    assert [version for version, _, _ in c.spans] == [0, 1, 2] and c.routes is not None
    ids = np.concatenate([PROMPTS[2], c.ids])
    # the last token before a pause is not computed until the next version
    ends = [len(PROMPTS[2]) + end - 1 for _, _, end in c.spans]
    chosen = [chosen_by(module, ids) for module in versions]
    first = ends[0]
    assert (chosen[0][:first] != chosen[1][:first]).any()
    np.testing.assert_array_equal(c.routes[:first], chosen[0][:first])
    assert (c.routes[ends[2]] == NO_ROUTE).all() and len(c.routes) == ends[2] + 1
    for version in (1, 2):
        ran = slice(ends[version - 1], ends[version])
        np.testing.assert_array_equal(c.routes[ran], chosen[version][ran])


def rows(
    seed: int, routes: bool = True, experts: tuple[int, int, int] = (2, 2, 6), vocabulary: int = 64
) -> list[Sample]:
    """Two groups of answers with a shared prompt, and a row of two turns, with random routes. experts: the layers, the
    experts of a token, and all experts"""
    r, (layers, k, of) = np.random.default_rng(seed), experts

    def segment(source: Any, n: int) -> Segment:
        choices = np.argsort(r.random((n, layers, of)), -1)[..., :k].astype(np.int8)
        side = {ROUTES: choices} if routes else {}
        logprobs = r.normal(-2, 0.5, n).astype(np.float32) if source == "sampled" else None
        version = 0 if source == "sampled" else -1
        return Segment(ids=r.integers(1, vocabulary, n), source=source, logprobs=logprobs, version=version, side=side)

    out = []
    for g in range(2):
        prompt = segment("prompt", 7)
        for i in range(3):
            turns = (prompt, segment("sampled", 5 + i), *((segment("env", 3), segment("sampled", 4)) if i else ()))
            name = f"{g}/{i}"
            given: dict[str, Any] = {"sample_id": f"{name}#0", "trajectory_id": name, "group_id": str(g)}
            out.append(Sample(**given, purpose="train", segments=turns, reward=float(i)))
    return out


def whole(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([s.ids for s in sample.segments])
    return ids, np.concatenate([s.side[ROUTES] for s in sample.segments])


def engine(module: Any, **given: Any) -> TorchEngine:
    settings: dict[str, Any] = {"dtype": "float32", "optim": OptimSpec(lr=1e-3), "max_tokens_per_microbatch": 40}
    return TorchEngine(copy.deepcopy(module), EngineSettings(**settings | given))


def step(e: TorchEngine, batch: Batch) -> dict[str, Tensor]:
    """Return log-probs and gradients of one step."""
    n = batch.num_loss_tokens
    weights = torch.full((n,), 1 / n, dtype=torch.float64)
    given = batch.with_columns({"w/loss": weights, "mask": torch.ones(n, dtype=torch.bool)})
    out = e.forward_backward(given, SFT_TERMS, extra_outputs=("logprobs",))
    grads = {name: p.grad for name, p in e.model.named_parameters() if p.grad is not None}
    return {"logprobs": out.columns["logprobs"], **grads}


def test_replayed_own_routes_change_no_bit_and_others_are_those_of_patched_routers() -> None:
    module = model()
    samples = rows(0)
    batch = pack(samples)
    assert batch.num_tokens < sum(s.total_tokens for s in samples) and batch.routes is not None  # prompts are shared
    plain, replaying = engine(module), engine(module, replays_routes=True)
    own = pack(
        [
            replace(
                s,
                segments=tuple(
                    replace(part, side={ROUTES: found})
                    for part, found in zip(
                        s.segments,
                        np.split(chosen_by(module, whole(s)[0]), np.cumsum([len(p.ids) for p in s.segments])[:-1]),
                        strict=True,
                    )
                ),
            )
            for s in samples
        ]
    )
    for name, value in step(plain, own).items():
        assert torch.equal(value, step(engine(module, replays_routes=True), own)[name]), name
    found = replaying.infer(batch, ("logprobs",))["logprobs"]
    expected = []
    for s in samples:
        ids, routes = whole(s)
        learned = np.concatenate([np.full(len(p.ids), p.source == "sampled") for p in s.segments])
        expected.append(logprobs_with(copy.deepcopy(module), ids, routes)[torch.from_numpy(learned[1:])])
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2e-5)
    assert float((found - plain.infer(batch, ("logprobs",))["logprobs"]).abs().max()) > 0.05
    flat = replaying.infer(unshare(batch), ("logprobs",))["logprobs"]
    torch.testing.assert_close(flat, found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_layer_that_is_computed_again_has_the_same_routes(checkpointing: str) -> None:
    module, batch = model(), pack(rows(1))
    expected = step(engine(module, replays_routes=True), batch)
    found = step(engine(module, replays_routes=True, gradient_checkpointing=checkpointing), batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)
    gates = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2 and all(float(expected[name].abs().max()) > 1e-4 for name in gates)


def test_routes_pass_the_queue_and_the_cuts_of_a_batch() -> None:
    samples = rows(2)
    queue = MemoryQueue()
    asyncio.run(queue.put(samples))
    refs = Refs(ref_of(s) for s in samples)
    batch = pack(queued_samples(queue, refs))
    assert batch.routes is not None and ROUTES not in {name.removeprefix("side/") for name in batch.columns}
    torch.testing.assert_close(batch.routes, pack(samples).routes)
    parts = [select_rows(batch, np.array(some)) for some in ([0, 1], [2], [3, 4, 5])]
    torch.testing.assert_close(concat([unshare(part) for part in parts]).routes, unshare(batch).routes)
    half = pack([samples[0], replace(rows(2, routes=False)[3])])
    assert half.routes is not None and (half.routes == NO_ROUTE).any() and (half.routes != NO_ROUTE).any()
    other = replace(samples[1], segments=(rows(3)[0].segments[0], *samples[1].segments[1:]))
    same_ids = replace(other.segments[0], ids=samples[0].segments[0].ids)
    apart = pack([samples[0], replace(other, segments=(same_ids, *other.segments[1:]))])
    assert apart.num_tokens == samples[0].total_tokens + other.total_tokens  # other routes are another prompt
    told = informed(replace(samples[1], context=np.array([7, 5, 6])))
    assert all(ROUTES not in s.side for s in told.segments)


@pytest.mark.parametrize("kept", ["whole", "once"])
def test_a_row_of_several_turns_has_the_routes_of_the_first_pass_over_each_token(kept: str) -> None:
    """Also if each call keeps the routes only of tokens that no earlier one has computed."""
    record: list[RecordedCall] = []

    def call(prompt: Sequence[int], answer: Sequence[int], first: int) -> None:
        n = len(prompt) + len(answer)
        routes = np.arange(first, first + n, dtype=np.int8)[:, None, None].repeat(2, 1)
        routes[-1] = NO_ROUTE
        ids = np.array(answer, np.int64)
        logprobs = np.zeros(len(ids), np.float32)
        made = Completion(str(first), ids, logprobs, ((0, 0, len(ids)),), "eos", routes=routes)
        request = GenerateRequest(str(first), np.array(prompt, np.int64), Sampling(max_tokens=2))
        record.append(RecordedCall.of(request, made, record if kept == "once" else ()))

    call([1, 2], [3, 4], 10)
    call([1, 2, 3, 4, 5], [6, 7], 30)
    call([1, 9], [8], 60)
    call([1, 2, 3, 4, 5, 6, 7], [2], 80)
    lengths = [len(c.completion.routes) for c in record]  # type: ignore[arg-type]
    assert lengths == ([4, 4, 2, 2] if kept == "once" else [4, 7, 3, 8])
    parts: list[tuple[Any, list[int]]] = [("prompt", [1, 2]), ("env", [3, 4, 5]), ("env", [6, 7, 8])]
    segments = [Segment(ids=np.array(ids, np.int64), source=source) for source, ids in parts]
    found = np.concatenate([s.side[ROUTES] for s in with_routes(segments, record)])[:, 0, 0]
    assert found.tolist() == [10, 11, 12, 33, 34, 35, 86, NO_ROUTE]
    (other,) = with_routes([Segment(ids=np.array([1, 9, 8]), source="prompt")], record)
    assert other.side[ROUTES][:, 0, 0].tolist() == [10, 61, NO_ROUTE]
    assert with_routes(segments, []) == tuple(segments)
    assert AgentLoopOutput([1], [2], [1]).routed_experts is None


def test_what_the_trainer_computes_is_nearer_to_the_rollout_with_its_routes() -> None:
    """Routers of the rollout that round otherwise choose others: the mean difference of log-probs falls."""
    module = model()
    rounded = copy.deepcopy(module)
    for router in routers(rounded):
        router.weight.data = router.weight.data.to(torch.float8_e4m3fn).float()
    core = native_core(module.config, source_of(rounded), replay_routes=True)
    samples = []
    for i, (prompt, c) in enumerate(zip(PROMPTS, sampled(core))):
        side = ({ROUTES: c.routes[: len(prompt)]}, {ROUTES: c.routes[len(prompt) :]})  # type: ignore[index]
        answer = Segment(ids=c.ids, source="sampled", logprobs=c.logprobs, version=0, side=side[1])
        given: dict[str, Any] = {"sample_id": f"{i}", "trajectory_id": f"{i}", "group_id": f"{i}", "purpose": "train"}
        samples.append(Sample(**given, segments=(Segment(ids=prompt, source="prompt", side=side[0]), answer)))
    batch = pack(samples)
    ro = batch.columns["rollout_logprobs"]
    off = [
        float((engine(module, replays_routes=on).infer(batch, ("logprobs",))["logprobs"] - ro).abs().mean())
        for on in (False, True)
    ]
    assert off[1] < 0.5 * off[0], off


def test_routes_of_another_model_and_models_without_routers_are_refused() -> None:
    batch = pack(rows(4))
    with pytest.raises(ValueError, match="2 layers x 2 experts, the highest number 5; this one has 2 layers x 3 of 6"):
        engine(model(num_experts_per_tok=3), replays_routes=True).infer(batch, ("logprobs",))
    with pytest.raises(ValueError, match="this one has 3 layers x 2 of 6"):
        engine(model(mlp_only_layers=[]), replays_routes=True).infer(batch, ("logprobs",))
    with pytest.raises(ValueError, match="of different models"):
        other = replace(batch, routes=torch.zeros(1, 2, batch.num_tokens, dtype=torch.int8))
        concat([batch, other])
    with pytest.raises(Refused, match="attention=auto"):
        engine(model(), replays_routes=True, attention_mode="padded")
    dense = hybrid.model("qwen3_5_text")
    with pytest.raises(Refused, match="its routers are not known"):
        engine(dense, replays_routes=True)
    with pytest.raises(Refused, match="the model has no experts"):
        native_core(dense.config, source_of(dense), replay_routes=True)
    assert not Options().replay_routes


@pytest.mark.parametrize("kind", ["average", "start"])
def test_weights_that_no_rollout_had_choose_themselves(kind: str) -> None:
    """The moving average of the weights, and those that the training of LoRA factors started from."""
    batch = pack(rows(5))
    if kind == "average":
        e = engine(model(), replays_routes=True, optim=OptimSpec(lr=1e-2, average=0.5))
    else:
        e = engine(model(), replays_routes=True, optim=OptimSpec(lr=1e-1), lora=LoraSpec(rank=4))
    step(e, batch)
    e.optim_step()
    found = e.infer(batch, ("logprobs",), **{kind: True})["logprobs"]
    assert torch.equal(found, e.infer(replace(batch, routes=None), ("logprobs",), **{kind: True})["logprobs"])
    own = e.infer(replace(batch, routes=None), ("logprobs",))["logprobs"]
    assert not torch.equal(found, own), "the weights have not moved"
    if kind == "start":
        assert torch.equal(found, engine(model()).infer(batch, ("logprobs",))["logprobs"])


def apart(count: int, prompt: int = 60) -> list[Sample]:
    """Return a group of rows with one prompt, each with other routes, and answers of 5 tokens."""
    found = []
    for i in range(count):
        r = np.random.default_rng(i)
        sides = [{ROUTES: np.argsort(r.random((n, 2, 6)), -1)[..., :2].astype(np.int8)} for n in (prompt, 5)]
        answer = Segment(
            ids=r.integers(1, 64, 5), source="sampled", logprobs=np.full(5, -1, np.float32), version=0, side=sides[1]
        )
        names: dict[str, Any] = {"sample_id": f"{i}", "trajectory_id": f"{i}", "group_id": "g"}
        segments = (Segment(ids=np.arange(prompt), source="prompt", side=sides[0]), answer)
        found.append(Sample(**names, purpose="train", segments=segments))
    return found


def test_rows_of_a_group_with_different_routes_stay_within_the_token_budget() -> None:
    """One pass is predicted, since the lengths of 8 rows are 100 tokens with a shared prompt; four are needed."""
    e = engine(model(), replays_routes=True, max_tokens_per_microbatch=130)
    batch, sizes = pack(apart(8)), list[int]()
    assert batch.num_tokens == 8 * 65
    e.model.get_input_embeddings().register_forward_hook(lambda module, args, out: sizes.append(out.shape[-2]))
    n = batch.num_loss_tokens
    weights = torch.full((n,), 1 / n, dtype=torch.float64)
    given = batch.with_columns({"w/loss": weights, "mask": torch.ones(n, dtype=torch.bool)})
    e.forward_backward(given, SFT_TERMS, num_microbatches=1)
    assert sizes == [130] * 4


class Reader:
    """An engine that records the batches that it is given."""

    def __init__(self, replays: bool) -> None:
        self.seen: list[Batch] = []
        self.capabilities = EngineCapabilities(
            shares_prefix=True,
            max_tokens_per_microbatch=64,
            outputs=("logprobs", "scores"),
            trains=False,
            one_pass=True,
            replays_routes=replays,
        )

    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False, start: bool = False) -> Any:
        self.seen.append(batch)
        sizes = {"scores": batch.num_rows}
        return {name: torch.zeros(sizes.get(name, batch.num_loss_tokens)) for name in columns}


@pytest.mark.parametrize("replays", [False, True])
def test_only_a_model_that_replays_routes_reads_them(replays: bool) -> None:
    """The others share a prompt also where its routes differ."""
    queue, samples = MemoryQueue(), apart(3)
    asyncio.run(queue.put(samples))
    refs = Refs(ref_of(s) for s in samples)
    ones, at = torch.ones(15), np.arange(0, 16, 5)
    masks = {name: Ragged(ones.bool(), at) for name in ("loss_mask", "m/loss")}
    queue.write(refs, {"w/loss": Ragged(ones.double(), at), **masks})
    reader = Reader(replays)
    role, every = Role("actor", queue, reader), RankStep(refs)  # type: ignore[arg-type]
    role.infer(every, {"logprobs": "old_logprobs"})
    role.logprobs(every)
    role.measure(every, SFT_TERMS, ())
    role.score(every, 1.0, False)
    assert [b.num_tokens for b in reader.seen] == [195 if replays else 75] * 4
    assert all((b.routes is not None) == replays for b in reader.seen)
    for view in (View(average=True), View(start=True)):
        role.infer(every, {"logprobs": "ref_logprobs"}, view)
        assert reader.seen[-1].num_tokens == 75 and reader.seen[-1].routes is None


def made(kind: str) -> Any:
    """Return a tiny model whose language model has this type."""
    if kind == "qwen3_vl_moe_text":
        return vision_families.model("qwen3_vl_moe").eval()
    return sounds.thinker("qwen3_omni_moe_thinker").eval() if kind == "qwen3_omni_moe_text" else model(kind)


@pytest.mark.parametrize("kind", sorted(set(ROUTED_TYPES) - {"qwen3_moe"}))
def test_routers_of_each_known_type_compute_with_the_given_experts(kind: str) -> None:
    module = made(kind)
    config = module.config.get_text_config()
    assert config.model_type == kind
    layers, chosen, experts = len(routers(module)), config.num_experts_per_tok, config.num_experts
    samples, expected = rows(6, experts=(layers, chosen, experts), vocabulary=50), []
    batch = pack(samples)
    found = engine(module, replays_routes=True).infer(batch, ("logprobs",))["logprobs"]
    for s in samples:
        ids, routes = whole(s)
        learned = np.concatenate([np.full(len(p.ids), p.source == "sampled") for p in s.segments])
        expected.append(logprobs_with(copy.deepcopy(module), ids, routes)[torch.from_numpy(learned[1:])])
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2e-5)
    plain = engine(module).infer(batch, ("logprobs",))["logprobs"]
    assert float((found - plain).abs().max()) > 0.01
