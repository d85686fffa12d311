"""The contract of a checkpoint engine (tests/contracts) where the replica is a real vLLM: the same functions, at the
server that most tests share. What breaks a server is in test_traps.py."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from real_server import Running, module_at

from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.rollout import vllm
from verl.rollout.base import GenerateRequest, RolloutContext, ServerPlace
from verl.rollout.client import ServedEngine
from verl.types import Sampling
from verl.weight_sync.base import SyncError, checksum
from verl.weight_sync.record import entry_of


@pytest.fixture(scope="module")
def sync(contract: ModuleType, running: Running) -> ModuleType:
    """The suite, with a trainer of the model that the server was started with."""
    found = module_at("test_weight_sync_contract.py", "sync_contract_of_vllm")

    def trainer(cls: type[TorchEngine] = TorchEngine, *, tied: bool = True, lr: float = 0.05) -> TorchEngine:
        assert tied, "the shared server's is"
        module = copy.deepcopy(contract.reference()).requires_grad_(True)
        return cls(module, EngineSettings(optim=OptimSpec(lr=lr, weight_decay=0.0), dtype="float32"))

    def rollout(context: RolloutContext) -> ServedEngine:
        place = ServerPlace(model=str(running.model), log=running.process.log, url=running.url)
        return vllm.build(vllm.Options(start_timeout_s=300), replace(context, place=place))

    async def warm() -> None:
        """Its first tokens take a while, for which no publish has to wait."""
        engine = contract.build("vllm")
        await engine.capabilities()
        await engine.close()

    asyncio.run(warm())
    found.trainer = trainer  # type: ignore[attr-defined]
    found.ROLLOUTS["vllm"] = rollout
    return found


HOSTS = pytest.mark.full("contracts/test_weight_sync_served.py has the other ways, to verl serve")
EACH = (
    ("shm", False),
    ("shm, buckets", True),
    *(pytest.param(*way, marks=HOSTS) for way in (("shm", True), ("tcp", True), ("tcp, delta", True))),
)


@pytest.mark.parametrize(("backend", "exclusive"), EACH)
def test_after_a_large_step_vllm_scores_as_the_trainer_does(sync: ModuleType, backend: str, exclusive: bool) -> None:
    sync.test_after_a_large_step_the_rollout_scores_as_the_trainer_does.__wrapped__(backend, "vllm", True, exclusive)


def test_a_prefix_computed_under_old_weights_is_never_used_after_a_publish(sync: ModuleType) -> None:
    sync.test_a_prefix_computed_under_old_weights_is_never_used_after_a_publish.__wrapped__("shm", "vllm")


@pytest.mark.parametrize(
    "change",
    [
        "changed after its manifest",
        *(pytest.param(one, marks=HOSTS) for one in ("not sent, though in the manifest", "of another shape")),
    ],
)
def test_a_bucket_that_is_not_what_was_told_raises(sync: ModuleType, change: str) -> None:
    async def test() -> None:
        world = sync.World(sync.trainer(), "shm, buckets", sender=sync.tampered(sync.CHANGES[change], sync.NORM))
        replica = world.rollout("vllm")
        with pytest.raises(SyncError, match=r"version 3.*input_layernorm"):
            await world.publish([replica], 3)
        await replica.close()

    sync.run(test)


@pytest.mark.parametrize("backend", ["shm", pytest.param("shm, buckets", marks=HOSTS)])
def test_the_canary_trips_where_wrong_weights_are_delivered_without_a_fault(sync: ModuleType, backend: str) -> None:
    """The names and bytes are those that were sent; the next publish mends it."""

    def wrong(manifest: dict[str, Any], tensors: dict[str, Any], name: str) -> None:
        tensors[name] = tensors[name] + 0.5
        manifest[name] = replace(entry_of(tensors[name]), checksum=checksum(tensors[name]))

    async def test() -> None:
        world = sync.World(sync.trainer(), backend, sender=sync.tampered(wrong, sync.NORM))
        replica = world.rollout("vllm")
        with pytest.raises(SyncError, match=r"version 1: rollout and trainer log-probs of the canary differ by \d"):
            await world.publish([replica], 1)
        whole = sync.World(sync.trainer(), backend)
        await whole.publish([replica], 2)
        assert sync.distance(await sync.scores(replica), whole.logprobs()) < sync.TOLERANCE
        await replica.close()

    sync.run(test)


@pytest.mark.parametrize("backend", ["shm, buckets", pytest.param("shm", marks=HOSTS)])
def test_publishes_while_requests_run_mark_the_version_of_each_token(
    contract: ModuleType, sync: ModuleType, backend: str
) -> None:
    """And what follows is by the new weights over the whole text: its log-probs are those that they score."""
    prompt = np.arange(4, 14)

    async def test() -> Any:
        world = sync.World(sync.trainer(lr=0.003), backend)
        replica = world.rollout("vllm", max_context_tokens=512)
        await world.publish([replica], 0)
        task = asyncio.create_task(
            replica.generate(GenerateRequest("r", prompt, Sampling(max_tokens=480, seed=3, ignore_eos=True)))
        )
        await asyncio.sleep(0)
        await world.update()
        await world.publish([replica], 1, exclusive=False, on_inflight="keep")
        done = await task
        scored = await replica.score(np.concatenate([prompt, done.ids]))
        await replica.close()
        if len(done.spans) == 1:
            contract.still(task)
            assert {v for v, _, _ in done.spans} == {1}, "it had not begun"
            raise contract.Ended
        (old, start, switch), (new, resumed, end) = done.spans
        assert (old, new, start, end) == (0, 1, 0, 480) and switch == resumed
        np.testing.assert_allclose(done.logprobs[switch:], scored[len(prompt) - 1 + switch :], atol=1e-4)
        assert torch.isfinite(torch.from_numpy(done.logprobs)).all()

    contract.meets(lambda: sync.run(test))()
