"""Publishes of a policy with LoRA factors: base and factors once, then the factors alone; each is verified."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from adapting import LOAD, AdaptingServer, SglangServer
from test_weight_sync_contract import (  # noqa: F401 - fixtures of the same worlds
    BACKENDS,
    PROBES,
    QUICK,
    ROLLOUTS,
    TOLERANCE,
    Replica,
    World,
    _base_and_adapter,
    _fresh,
    distance,
    run,
    trainer,
    worlds,
)

from verl.driver.publisher import Publisher
from verl.errors import Refused
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.quant_linear import quantise_linears, quantised_layers
from verl.rollout import sglang
from verl.rollout.base import GenerateRequest, ReplicaLost, RolloutContext, Sampling
from verl.rollout.router import Router
from verl.weight_sync.base import CheckedReader, SyncError
from verl.weight_sync.sender import WeightSender
from verl.wire import AS_HELD, FP8, WireFormat

KINDS = [*ROLLOUTS, "server", "sglang"]
WHOLE = [name for name in BACKENDS if name in QUICK and "buckets" not in name] + ["tcp"]
DELIVERIES = [(kind, backend) for kind in ROLLOUTS for backend in WHOLE] + [("server", "shm"), ("server", "tcp")]
DELIVERIES += [("sglang", "disk")]


SERVERS: list[AdaptingServer] = []  # those of a test


@pytest.fixture(autouse=True)
def servers() -> Iterator[None]:
    yield
    for server in SERVERS:
        server.stop()
    SERVERS.clear()


def backend_of(kind: str) -> str:
    return {"server": "shm", "sglang": "disk"}.get(kind, "local")


class FactorsWorld(World):
    """A world whose policy is a frozen base with factors of rank 4. Replicas get the base when they lack it."""

    def __init__(self, backend: str = "local", **more: Any) -> None:
        settings = replace(trainer().settings, lora=LoraSpec(rank=4, alpha=8.0))
        super().__init__(TorchEngine(copy.deepcopy(_fresh(True)), settings), backend, **more)

    def rollout(self, kind: str = "native", **more: Any) -> Any:
        """Return a rollout engine; kind server: the client of a server that loads adapters."""
        if kind not in ("server", "sglang"):
            return super().rollout(kind, **more)
        made = AdaptingServer if kind == "server" else SglangServer
        SERVERS.append(server := made(_fresh(True), _base_and_adapter(True) / "base"))
        return server.client(**more)

    def publish(self, replicas, version: int, **more: Any) -> Any:
        bare = not all(one.base for one in replicas)
        self.actor.delivery = "base and factors" if bare else "factors"
        return super().publish(replicas, version, **more)


class CodesWorld(FactorsWorld):
    """A world with a frozen quantised base, for replicas that read codes or do not."""

    def __init__(self, backend: str, kind: Any, *, codes: bool) -> None:
        settings, model = replace(trainer().settings, lora=LoraSpec(rank=4, alpha=8.0)), copy.deepcopy(_fresh(True))
        quantise_linears(model, kind)
        World.__init__(self, TorchEngine(model, settings), backend)
        self.actor.wire_format = WireFormat("float32", codes=codes)
        self.layers = quantised_layers(self.engine.model)


async def scores(replica) -> list[np.ndarray]:
    return [await replica.score(ids) for ids in PROBES]


def bytes_of(world: World, *, factors: bool) -> int:
    named = world.engine.model.named_parameters()
    return sum(p.nbytes for name, p in named if (".lora_" in name) == factors)


@pytest.mark.parametrize("kind, backend", DELIVERIES)
def test_base_and_factors_once_then_the_factors_alone(kind, backend):
    async def test():
        world = FactorsWorld(backend)
        replica = world.rollout(kind)
        first = await world.publish([replica], 0)
        assert first.num_bytes == bytes_of(world, factors=True) + bytes_of(world, factors=False)
        before = await scores(replica)
        for version in (1, 2):
            await world.update()
            report = await world.publish([replica], version, exclusive=version == 1)
            assert report.num_bytes == bytes_of(world, factors=True) and report.changed and not report.alarms
            assert report.canary_mean_abs < TOLERANCE and replica.version == version
            assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        assert distance(await scores(replica), before) > 0.05, "the factors matter"
        await replica.close()

    run(test)


@pytest.mark.parametrize("backend", WHOLE)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_base_is_sent_as_its_codes_and_kept_without_a_copy_in_one_process(backend, kind):
    async def test():
        world = CodesWorld(backend, kind, codes=True)
        replica = world.rollout("native")
        assert (await replica.capabilities()).weights.codes
        report = await world.publish([replica], 0, exclusive=kind == "nf4")
        assert report.num_bytes == bytes_of_codes(world)
        await world.update()
        await world.publish([replica], 1)
        assert distance(await scores(replica), world.logprobs()) < 1e-5
        mine = {layer.codes.data_ptr() for layer in world.layers.values()}
        kept = {t.codes.data_ptr() for t in codes_of(replica)}
        assert len(kept) == 14 and (kept == mine if backend == "local" else not kept & mine)
        await replica.close()

    run(test)


def bytes_of_codes(world: CodesWorld) -> int:
    """Those of factors, codes with their scales, and all other weights."""
    of_codes = sum(t.nbytes for layer in world.layers.values() for t in layer.quantised.tensors().values())
    return of_codes + bytes_of(world, factors=True) + bytes_of(world, factors=False)


def codes_of(replica) -> list[Any]:
    layers = replica._runner.model.live.layers
    products = [one for layer in layers for one in (layer.qkv, layer.out, layer.mlp.up, layer.mlp.down)]
    return [part.weight for one in products for part, _ in one._parts]


def test_an_engine_that_reads_no_codes_gets_the_dequantised_base():
    async def test():
        world = CodesWorld("local", "nf4", codes=False)
        replica = world.rollout("hf")
        assert not (await replica.capabilities()).weights.codes
        await world.publish([replica], 0)
        await world.update()
        await world.publish([replica], 1)
        assert distance(await scores(replica), world.logprobs()) < 1e-5
        await replica.close()

    run(test)


def test_codes_that_were_changed_on_their_way_are_refused(monkeypatch):
    async def test():
        world = CodesWorld("shm", "nf4", codes=True)
        replica = world.rollout("native")
        stage = type(world.outlet).stage

        def changed(outlet, version, shapes, named):
            name = "model.layers.1.mlp.up_proj.weight"
            return stage(outlet, version, shapes, ((n, t ^ 1 if n == name else t) for n, t in named))

        monkeypatch.setattr(type(world.outlet), "stage", changed)
        with pytest.raises(SyncError, match=r"layers\.1\.mlp\.up_proj\.weight changed between"):
            await world.publish([replica], 0)
        await replica.close()

    run(test)


@pytest.mark.parametrize("kind", ROLLOUTS)
def test_an_engine_that_was_started_again_gets_the_base_too(kind):
    async def test():
        world = FactorsWorld()
        first, second = world.rollout(kind), world.rollout(kind)
        await world.publish([first], 0)
        await world.update()
        world.actor.delivery = "factors"
        with pytest.raises(SyncError, match="the weights under it have no identity here"):
            await World.publish(world, [second], 1)
        await world.publish([first, second], 2)
        for replica in (first, second):
            assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await first.sleep(2)
        await first.wake()
        assert not first.base, "its weights are gone"
        await world.publish([first, second], 3)
        assert distance(await scores(first), world.logprobs()) < TOLERANCE
        for replica in (first, second):
            await replica.close()

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_version_replaces_base_and_factors(kind):
    async def test():
        world = FactorsWorld(backend_of(kind))
        replica = world.rollout(kind)
        await world.publish([replica], 0)
        await world.update()
        world.actor.delivery = "merged"
        await World.publish(world, [replica], 1)
        assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await world.update()
        await World.publish(world, [replica], 2)
        assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await replica.close()

    run(test)


@pytest.mark.parametrize("kind", ROLLOUTS)
def test_a_request_goes_on_under_later_factors_and_marks_its_versions(kind):
    async def test():
        world = FactorsWorld()
        replica = world.rollout(kind)
        await world.publish([replica], 0)
        request = GenerateRequest("r", PROBES[0], Sampling(max_tokens=40, seed=1, ignore_eos=True))
        answering = asyncio.create_task(replica.generate(request))
        await asyncio.sleep(0.01)
        await world.update()
        await world.publish([replica], 1, on_inflight="keep", exclusive=False)
        found = await answering
        assert [version for version, _, _ in found.spans] in ([0, 1], [0], [1]) and found.parameters == "policy"
        assert (await replica.generate(replace(request, id="s"))).spans == ((1, 0, 40),)
        await replica.close()

    run(test)


def test_a_base_that_was_written_is_another_one():
    """Its identity is computed again, though only some versions do so for a base that nothing has written."""

    async def test():
        world = FactorsWorld()
        replica = world.rollout()
        for version in range(3):
            await world.publish([replica], version)
        with torch.no_grad():
            world.engine.model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.01)
        with pytest.raises(SyncError, match="belongs to the weights .*, and the engine has"):
            await world.publish([replica], 3)
        await replica.close()

    run(test)


class Changed(Replica):
    """A replica that is handed other factors than were sent, by `change` of the reader."""

    def __init__(self, inner: Any, change: Any) -> None:
        super().__init__(inner)
        self.change = change

    async def load_weights(self, source, *, on_inflight="wait"):
        return await self.inner.load_weights(self.change(source), on_inflight=on_inflight)


class Reads(CheckedReader):
    """A source seen through `change`, perhaps as another set."""

    def __init__(self, source: Any, change: Any = iter, **other: Any) -> None:
        super().__init__(replace(source.source, parameters=replace(source.parameters, **other)))
        self.delivered, self._source, self._change = source.delivered, source, change

    def tensors(self) -> Any:
        return self._change(self._source.tensors())


def zeroed(source: Any) -> Any:
    """The adapter is dropped."""
    return Reads(source, lambda tensors: ((n, torch.zeros_like(t) if "lora_B" in n else t) for n, t in tensors))


def halved(source: Any) -> Any:
    """Half of the targets keep what they had at first."""
    return Reads(source, lambda tensors: ((n, t * 0 if "lora_B" in n and "layers.1" in n else t) for n, t in tensors))


def doubled(source: Any) -> Any:
    """Another alpha."""
    return Reads(source, scale=2 * source.parameters.scale)


def of_another_base(source: Any) -> Any:
    return Reads(source, base="another")


class Stale:
    """Hands over the factors of the version before."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}

    def __call__(self, source: Any) -> Any:
        def change(tensors):
            for name, tensor in tensors:
                yield name, self.before.get(name, tensor)
                self.before[name] = tensor.clone()

        return Reads(source, change)


FAULTS = {"dropped": zeroed, "half": halved, "stale": Stale, "other base": of_another_base, "alpha doubled": doubled}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_factors_that_do_not_act_as_they_were_trained_are_caught(kind, fault):
    async def test():
        world = FactorsWorld(backend_of(kind))
        change = FAULTS[fault]() if fault == "stale" else FAULTS[fault]
        replica = Changed(world.rollout(kind), change if fault == "stale" else lambda source: source)
        await world.publish([replica], 0)
        replica.change = change
        for _ in range(3):
            await world.update()
        text = "belongs to the weights another" if fault == "other base" else "log-probs of the canary differ"
        with pytest.raises(SyncError, match=text):
            await world.publish([replica], 1)
        await replica.close()

    run(test)


def test_a_base_in_blocks_of_8_bits_and_factors_that_are_not():
    async def test():
        world = FactorsWorld(tolerance=None)
        world.group._workers[0].publishing.sender = WeightSender(world.outlet, dtype=FP8)
        replica = world.rollout("native", dtype=torch.float32, fp8=True)
        world.actor.wire_format = (await replica.capabilities()).weights
        whole = await world.publish([replica], 0)
        for version in (1, 2):
            await world.update()
            report = await world.publish([replica], version)
            assert report.num_bytes == bytes_of(world, factors=True) < whole.num_bytes / 2
        own = [torch.from_numpy(x) for x in world.engine.own_logprobs(PROBES, FP8, False)]
        for mine, theirs in zip(await scores(replica), own, strict=True):
            assert abs(mine - theirs.numpy()).max() < 0.05, "the pass in bfloat16 of the same blocks"
        await replica.close()

    run(test)


def test_a_replica_that_failed_an_update_of_the_factors_is_given_up():
    """Its answers would be of another policy. It does not only drop the factors, as for another LoRA set."""

    class Replaceable(Changed):
        replaceable, lost = True, ""

        def lose(self, why: BaseException) -> None:
            self.lost = str(why)

    async def test():
        world = FactorsWorld()
        good = world.rollout()
        bad = Replaceable(world.rollout(), lambda source: source)
        await world.publish([good, bad], 0)
        for _ in range(3):
            await world.update()
        bad.change = zeroed
        report = await world.publish([good, bad], 1)
        assert list(report.failed_replicas) == [1] and "log-probs of the canary differ" in bad.lost
        for replica in (good, bad.inner):
            await replica.close()

    run(test)


def test_the_publisher_sends_the_base_to_replicas_that_lack_it():
    def able(rank: int, lora_policy: bool = True, lora_experts: bool = False, lora_whole: bool = False) -> Any:
        able = {"lora_policy": lora_policy, "lora_rank": rank, "lora_experts": lora_experts, "lora_whole": lora_whole}
        return SimpleNamespace(**able, in_flight_update=True, weights=AS_HELD)

    def delivery(
        rank: int, bases: list[str], *ables: Any, experts: bool = False, whole: bool = False, **more: bool
    ) -> str:
        given: dict[str, Any] = dict.fromkeys(("waits", "note", "published", "lora"))
        given |= {"trainer": SimpleNamespace(), "engine": None, "trained_rank": rank}
        given |= {"trained_experts": experts, "trained_whole": whole, **more}
        given |= {"replicas": [SimpleNamespace(base=base) for base in bases]}
        made = Publisher(**given, timeout_s=1.0, exclusive=True, partial_rollout=False)
        for one in ables:
            made.join(one)
        made._requested = len(bases)
        return made._delivery()

    assert delivery(8, [""], able(64)) == "base and factors"
    assert delivery(8, ["w", ""], able(64), able(64)) == "base and factors"
    assert delivery(8, ["w", "w"], able(64), able(64)) == "factors"
    assert delivery(8, ["w", "w"], able(64), able(4)) == "merged"
    assert delivery(8, ["w"], able(64, lora_policy=False)) == "merged"
    assert delivery(8, ["w"], able(64), experts=True) == "merged"
    assert delivery(8, ["w"], able(64, lora_experts=True), experts=True) == "factors"
    assert delivery(8, ["w"], able(64), whole=True) == "merged"
    assert delivery(8, ["w"], able(64, lora_whole=True), whole=True) == "factors"
    assert delivery(8, ["w"], able(64, lora_whole=True), whole=True, quantised_base=True) == "factors"
    assert delivery(8, ["w"], able(64), quantised_base=True) == "factors", "no module is trained whole"
    with pytest.raises(Refused, match=r"^model\.lora\.modules_to_save on a quantised base: [^\n]*install gcc[^\n]*$"):
        delivery(8, ["w"], able(64), whole=True, quantised_base=True)
    assert delivery(8, ["w"], able(64), sends_factors=False) == "merged", "so the run is configured"


def test_no_other_set_is_published_beside_factors_of_the_policy(tmp_path):
    given: dict[str, Any] = dict.fromkeys(("waits", "note", "published", "lora", "trainer", "engine"))
    made = Publisher(**given, replicas=[], timeout_s=1.0, exclusive=True, partial_rollout=False, trained_rank=8)
    for made.sends_factors in (True, False):  # False: its replicas get merged weights
        with pytest.raises(Refused, match="LoRA set 'style': the policy of this run is a LoRA set itself"):
            asyncio.run(made.publish_adapter("style", tmp_path))


def test_a_server_keeps_one_version_of_the_factors_and_those_that_running_requests_use():
    async def test():
        world = FactorsWorld("shm")
        replica = world.rollout("server")
        await world.publish([replica], 0)
        (server,) = SERVERS
        assert server.adapters() == ["nothing", "policy"]
        server.engine.holds = True
        request = GenerateRequest("r", PROBES[0], Sampling(max_tokens=5, ignore_eos=True))
        running = asyncio.ensure_future(replica.generate(request))
        while not server.engine.held:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        server.asked.clear()
        await world.update()
        publishing = world.publish([replica], 1, on_inflight="keep", exclusive=False)
        while server.adapters() != ["nothing", "policy", "policy"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not {"/pause", "/update_weights", "/reset_prefix_cache"} & {*server.asked}, "it samples meanwhile"
        server.engine.holds = False
        assert (await running).spans == ((0, 0, 5),), "the version that it began with"
        await publishing
        await world.update()
        await world.publish([replica], 2)
        assert server.adapters() == ["nothing", "policy"]
        found = await replica.generate(GenerateRequest("s", PROBES[0], Sampling(max_tokens=4, ignore_eos=True)))
        assert found.spans == ((2, 0, 4),) and found.parameters == "policy"
        await replica.close()
        assert not server.loaded, "nothing is left at a server that keeps running"

    run(test)


@pytest.mark.parametrize("path", [LOAD, "/update_weights"])
def test_a_server_that_failed_half_of_an_update_answers_nothing(path):
    async def test():
        world = FactorsWorld("shm")
        replica = world.rollout("server")
        if path == LOAD:
            await world.publish([replica], 0)
            await world.update()
        else:
            await replica.capabilities()
        SERVERS[0].refused[path] = "no"
        with pytest.raises(SyncError, match=r"version \d is live nowhere"):
            await world.publish([replica], 1)
        assert not replica.base, "the next publish has the base too"
        with pytest.raises(ReplicaLost, match="the update to version 1 failed"):
            await replica.generate(GenerateRequest("r", PROBES[0], Sampling(max_tokens=4)))
        await replica.close()

    run(test)


def test_a_replica_that_lost_its_server_gets_base_and_factors_again_beside_one_that_has_them():
    async def test():
        world, notes = FactorsWorld("shm"), []
        made = [AdaptingServer(_fresh(True), _base_and_adapter(True) / "base") for _ in range(2)]
        SERVERS.extend(made)
        router = Router([lambda died, of=of: of.client() for of in made], restarts=2, note=notes.append)
        whole = await world.publish(router.replicas, 0)
        await world.update()
        made[1].refused[LOAD] = "no"
        report = await world.publish(router.replicas, 1)
        assert list(report.failed_replicas) == [1] and report.num_bytes < whole.num_bytes
        made[1].refused.clear()
        asked = [GenerateRequest(f"r{i}", PROBES[0], Sampling(max_tokens=4, ignore_eos=True)) for i in range(2)]
        assert {(await router.generate(request)).spans for request in asked} == {((1, 0, 4),)}
        while not router.replicas[1].supervisor.serves:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert made[1].adapters() == ["nothing"], "those of the lost connection have no folder any more"
        await world.update()
        report = await world.publish(router.replicas, 2)
        assert not report.failed_replicas and report.num_bytes == whole.num_bytes
        for replica in router.replicas:
            assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await router.close()

    run(test)


def test_sglang_is_started_for_the_policys_adapters_and_reads_a_base_without_factors():
    base = _base_and_adapter(True) / "base"
    context = RolloutContext(hf_config=_fresh(True).config, max_context_tokens=64, dtype=torch.float32, lora_rank=4)
    words = sglang.serve_command("py", sglang.Options(), replace(context, lora_versions=6), str(base), 1234)
    told = " ".join(words)
    assert "--enable-lora" in words and "--max-lora-rank 4 " in f"{told} " and "--max-loras-per-batch 7 " in f"{told} "
    assert "--lora-target-modules down_proj gate_proj k_proj o_proj q_proj up_proj v_proj" in told, "not the head"

    async def test():
        world = FactorsWorld("disk")
        replica = world.rollout("sglang")
        await world.publish([replica], 0)
        (server,) = SERVERS
        taken = {path: body for path, body in server.double.asked}
        folder = taken["/update_weights_from_disk"]["model_path"]
        assert not any("lora_" in name for name in server.double.state) and not os.path.exists(folder)  # noqa: ASYNC240
        await replica.generate(GenerateRequest("r", np.array([1, 2]), Sampling(max_tokens=2)))
        path, body = next((p, b) for p, b in reversed(server.double.asked) if p == "/generate")
        assert body["lora_path"] in server.loaded, "requests of the policy name its version"
        await replica.close()

    run(test)
