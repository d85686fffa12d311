"""The contract of a checkpoint engine with a rollout engine in another process, which reads shared memory there. It is
kept between the cases: what one of them leaves in it, the next one's weights replace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from inspect import unwrap
from typing import Any

import pytest
import torch
from contracts import test_weight_sync_contract as contract
from contracts.test_weight_sync_contract import CHANGES, PROBES, TOLERANCE, World, distance, scores, trainer

from tests.rollouts import interrupted
from tests.worker_contract import nothing
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.quant_linear import quantise_linears
from verl.rollout.base import GenerateRequest
from verl.types import Sampling
from verl.workers.pools import Pool
from verl.workers.ray.cluster import RayCluster


class Kept(contract.Replica):
    async def close(self) -> None:
        """With the cluster."""


@pytest.fixture(scope="module")
def over_ray(ray_session) -> Iterator[Any]:
    """Builds the engine of a context, once of a kind."""
    found: dict[tuple[Any, ...], Kept] = {}
    cluster = RayCluster({"main": Pool()}, {"rollout": "main"}, layout=Layout(), set_up=nothing, replicas=2)

    def build(context: Any) -> Kept:
        kind = (context.hf_config.tie_word_embeddings, context.max_context_tokens)
        if kind not in found:
            found[kind] = Kept(cluster.replica(len(found), interrupted, (context,)))
        return found[kind]

    yield build
    cluster.close()


@pytest.fixture(autouse=True)
def everywhere(over_ray, monkeypatch) -> None:
    """Replace the engine `native` of the contract by that engine over Ray."""
    monkeypatch.setitem(contract.ROLLOUTS, "native", over_ray)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_base_is_sent_once_then_factors_alone_and_a_quantised_one_as_its_codes(quantised):
    async def test() -> None:
        model, settings = copy.deepcopy(contract._fresh(True)), trainer().settings
        if quantised:
            quantise_linears(model, "nf4")
        world = World(TorchEngine(model, replace(settings, lora=LoraSpec(rank=4, alpha=8.0))), "shm")
        replica = world.rollout("native")
        await replica.sleep(2)
        await replica.wake()
        able = await replica.capabilities()
        assert able.lora_policy and able.lora_rank >= 4 and able.weights.codes and not replica.base
        world.actor.wire_format, world.actor.delivery = able.weights, "base and factors"
        base = {name: t.nbytes for name, t in world.engine.local.coded_weights()}
        factors = {name: t.nbytes for name, t in world.engine.local.exported()}
        report = await world.publish([replica], 0)
        assert report.num_bytes == sum(base.values()) + sum(factors.values()) and replica.base
        world.actor.delivery = "factors"
        for version in (1, 2):
            await world.update()
            report = await world.publish([replica], version)
            assert report.num_bytes == sum(factors.values()) and replica.version == version
            assert distance(await scores(replica), world.logprobs()) < (1e-5 if quantised else TOLERANCE)
        await replica.close()

    contract.run(test)


def test_a_lora_set_is_published_beside_the_policy():
    async def test() -> None:
        world, folder = World(trainer(), "shm"), contract._base_and_adapter(True)
        replica, outlet = world.rollout("native"), contract.shm_outlet()
        await world.publish([replica], 0)
        before = await replica.score(PROBES[0])
        world.actor.open_set("a", folder / "a", folder / "base", outlet).result(60)
        given = {"exclusive": True, "on_inflight": ["wait"], "timeout_s": 60}
        report = await world.sync.publish(world.actor.of_set("a"), [replica], version=3, **given)
        assert report.version == 3 and report.canary_mean_abs < TOLERANCE and replica.version == 0
        assert distance([await replica.score(PROBES[0], parameters="a")], [before]) > 0.05
        request = GenerateRequest("r", PROBES[0], Sampling(max_tokens=4, seed=1, ignore_eos=True), parameters="a")
        assert (await replica.generate(request)).spans == ((3, 0, 4),)
        await replica.drop_set("a")
        assert distance([await replica.score(PROBES[0])], [before]) == 0
        await replica.close()

    contract.run(test)


both = pytest.mark.parametrize("backend", ["shm", "shm, buckets"])


@both
def test_after_a_large_step_the_rollout_scores_as_the_trainer_does(backend):
    test = unwrap(contract.test_after_a_large_step_the_rollout_scores_as_the_trainer_does)
    test(backend, "native", True, False)


def test_later_versions_verify_a_sample_that_covers_everything_in_sixteen():
    contract.test_later_versions_verify_a_sample_that_covers_everything_in_sixteen("shm")


@both
@pytest.mark.parametrize(
    "change", ["not sent, though in the manifest", "of another shape", "changed after its manifest"]
)
def test_a_tensor_that_does_not_match_its_manifest_raises(change, backend):
    assert change in CHANGES
    unwrap(contract.test_a_tensor_that_does_not_match_its_manifest_raises)(backend, "full", "native", change)


def test_frozen_weights_pushed_twice_are_unchanged_and_no_alarm():
    contract.test_frozen_weights_pushed_twice_are_unchanged_and_no_alarm("shm", "full")


@both
def test_a_rollout_in_flight_keeps_its_tokens_and_marks_the_version_of_each(backend):
    async def test() -> None:
        world = World(trainer(), backend)
        replica = world.rollout(max_context_tokens=512)
        await world.publish([replica], 0)
        some = await replica._ask("begin", PROBES[0], Sampling(max_tokens=500, seed=3))
        assert 0 < some < 500
        await world.update()
        await world.publish([replica], 1, exclusive=False, on_inflight="keep")
        assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await replica.resume()
        done = await replica._ask("end")
        assert [version for version, _, _ in done.spans] == [0, 1] and done.spans[-1][2] == len(done.ids) == 500
        assert torch.isfinite(torch.tensor(done.logprobs)).all()

    contract.run(test)
