"""Publishes of a policy with modules that are trained whole beside its factors: later versions are both, without the
base, and replicas compute with them what they compute with merged weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_policy_factors import Changed, Reads, Stale, World, codes_of, scores
from test_weight_sync_contract import PROBES, ROLLOUTS, TOLERANCE, _fresh, distance, run, trainer, worlds  # noqa: F401 - fixtures of the same worlds

from verl.model_engine.lora import is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.quant_linear import quantise_linears
from verl.parameter_set import check_base
from verl.rollout.base import GenerateRequest, Sampling
from verl.rollout.noise import NoiseSchedule
from verl.weight_sync.base import SyncError
from verl.weight_sync.sender import WeightSender
from verl.wire import FP8, WireFormat

SAVED = ["embed_tokens", "lm_head", "norm"]


class WholeWorld(World):
    """A world whose policy is a frozen base with factors of rank 4 and modules that are trained whole."""

    def __init__(self, backend: str = "local", *, saved: Any = SAVED, kind: Any = None, **more: Any) -> None:
        lora, model = (
            LoraSpec(rank=4, alpha=8.0, modules_to_save=saved, exclude=["o_proj"]),
            copy.deepcopy(_fresh(False)),
        )
        if kind is not None:
            quantise_linears(model, kind)
        super().__init__(TorchEngine(model, replace(trainer().settings, lora=lora)), backend, **more)

    def publish(self, replicas: Any, version: int, delivery: Any = None, **more: Any) -> Any:
        lack = not all(one.base for one in replicas)
        self.actor.delivery = delivery or ("base and factors" if lack else "factors")
        return super().publish(replicas, version, **more)

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        named, saved = self.engine.model.named_parameters(), self.engine.local.lora.parameters.replaced
        return {name: p for name, p in named if is_factor(name) or name in saved}


@pytest.mark.parametrize("backend", ["local", "shm", "disk", "tcp"])
@pytest.mark.parametrize("kind", ROLLOUTS)
def test_later_versions_are_the_factors_and_these_modules_alone(kind: str, backend: str) -> None:
    async def test() -> None:
        world = WholeWorld(backend)
        replica, merged = world.rollout(kind), world.rollout(kind)
        whole = await world.publish([replica], 0)
        assert whole.num_bytes == sum(p.nbytes for p in world.engine.model.parameters())
        start = await scores(replica)
        for version, mode in ((1, "wait"), (2, "keep")):
            await world.update()
            report = await world.publish([replica], version, exclusive=version == 1, on_inflight=mode)
            assert report.num_bytes == sum(p.nbytes for p in world.trained.values()) and report.changed
            assert report.canary_mean_abs < TOLERANCE and not report.alarms
            assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await world.publish([merged], 3, "merged")
        assert distance(await scores(replica), await scores(merged)) < 1e-5
        assert distance(await scores(replica), start) > 0.05
        with torch.no_grad():
            world.engine.model.lm_head.weight.mul_(1.5)
        assert distance(await scores(replica), await scores(merged)) < 1e-5, "the trainer's memory is not read"
        for one in (replica, merged):
            await one.close()

    run(test)


class StaleModules(Stale):
    """Hands over these modules, and no factor, as the version before had them."""

    def __call__(self, source: Any) -> Any:
        named = frozenset(source.parameters.replaced)

        def change(tensors: Any) -> Any:
            for name, tensor in tensors:
                yield name, self.before.get(name, tensor) if name in named else tensor
                self.before[name] = tensor.clone()

        return Reads(source, change)


@pytest.mark.parametrize("kind", ROLLOUTS)
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_stale_module_is_caught_by_the_canary(kind: str, module: str) -> None:
    async def test() -> None:
        world = WholeWorld(saved=[module])
        replica = Changed(world.rollout(kind), StaleModules())
        await world.publish([replica], 0)
        for _ in range(3):
            await world.update()
        with pytest.raises(SyncError, match="log-probs of the canary differ"):
            await world.publish([replica], 1)
        await replica.close()

    run(test)


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_on_a_quantised_base_the_replica_has_an_embedding_and_a_head_of_its_own(backend: str) -> None:
    async def test() -> None:
        world = WholeWorld(backend, kind="nf4")
        world.actor.wire_format = WireFormat("float32", codes=True)
        replica = world.rollout()
        await world.publish([replica], 0)
        mine = {id(one.codes) for one in codes_of(replica)}
        for version in (1, 2):
            before = await scores(replica)
            await world.update()
            assert distance(await scores(replica), before) == 0, "a tensor that is trained is not shared"
            report = await world.publish([replica], version, exclusive=version == 1)
            assert report.num_bytes == sum(p.nbytes for p in world.trained.values())
            assert distance(await scores(replica), world.logprobs()) < 1e-5
        assert {id(one.codes) for one in codes_of(replica)} == mine, "no code is sent again"
        await replica.close()

    run(test)


def test_a_projection_that_is_trained_whole_is_sent_in_blocks_of_8_bits() -> None:
    async def test() -> None:
        world = WholeWorld(saved=["o_proj", "norm"], tolerance=None)
        world.group._workers[0].publishing.sender = WeightSender(world.outlet, dtype=FP8)
        replica = world.rollout("native", dtype=torch.float32, fp8=True)
        world.actor.wire_format = (await replica.capabilities()).weights
        await world.publish([replica], 0)
        for version in (1, 2):
            await world.update()
            report = await world.publish([replica], version)
            values = sum(p.nbytes for name, p in world.trained.items() if "o_proj" in name)
            assert report.num_bytes < sum(p.nbytes for p in world.trained.values()) - 0.7 * values
        own = world.engine.own_logprobs(PROBES, FP8, False)
        for got, expected in zip(await scores(replica), own, strict=True):
            assert abs(got - expected).max() < 0.05, "the pass in bfloat16 of the same blocks"
        await replica.close()

    run(test)


def test_norms_that_are_trained_whole_have_the_noise_of_their_version() -> None:
    async def test() -> None:
        world = WholeWorld(saved=["post_attention_layernorm"])  # the other norms are not written
        noise = NoiseSchedule(sigma_start=0.02, sigma_end=0.02, steps=8, sync_every=1, seed=1)
        replica, other = (world.rollout("native", noise=noise) for _ in range(2))
        request = GenerateRequest("r", PROBES[0], Sampling(max_tokens=8, noise=True, ignore_eos=True, seed=3))
        await world.publish([replica], 0)
        await replica.generate(request)
        await world.update()
        await world.publish([replica], 1)
        assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await world.publish([other], 1, "base and factors")
        found = [await one.generate(replace(request, id="s")) for one in (replica, other)]
        assert found[0].ids.tolist() == found[1].ids.tolist()
        assert abs(found[0].logprobs - found[1].logprobs).max() < 1e-5
        for one in (replica, other):
            await one.close()

    run(test)


def test_an_engine_that_takes_factors_alone_refuses_such_a_policy() -> None:
    spec = WholeWorld(saved=["norm"]).engine.local.lora.of_policy
    given = replace(spec, base="b"), "b", 8, True
    check_base(*given, lora_whole=True)
    with pytest.raises(
        ValueError, match=r"it has model\.\S*norm\.weight whole, which this rollout engine does not take"
    ):
        check_base(*given)
