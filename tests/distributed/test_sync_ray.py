"""The contract of a checkpoint engine with a rollout engine in another process, which reads shared memory there. It is
kept between the cases: what one of them leaves in it, the next one's weights replace."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from typing import Any

import pytest
import torch
from contracts import test_weight_sync_contract as contract
from contracts.test_weight_sync_contract import CHANGES, PROBES, TOLERANCE, World, distance, scores, trainer

from tests.rollouts import interrupted
from tests.worker_contract import nothing
from verl.model_engine.layout import Layout
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
