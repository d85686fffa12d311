"""LoRA sets in a running server: its requests, what is refused, which replicas have them. tests/vllm/test_adapters.py
samples with a real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import write_adapter
from aiohttp import web
from aiohttp.test_utils import TestServer
from handmade_model import write_model
from safetensors.numpy import load_file, save_file
from served import Served, crashing, silent
from test_rollout_client import PROMPT, context_of, greedy, reader, reset

from verl.config.adapter import CONFIG, WEIGHTS, read_adapter
from verl.model_engine.lora import read_lora
from verl.rollout import adapters
from verl.rollout.adapters import write_nothing, write_set
from verl.rollout.api import Deadlines
from verl.rollout.base import Capabilities, GenerateRequest, ReplicaLost, ServerPlace
from verl.rollout.client import ServedEngine
from verl.rollout.http import ServerLate
from verl.rollout.router import Router
from verl.rollout.vllm import Options, expected
from verl.rollout.vllm_api import VllmApi
from verl.weight_sync.base import CheckedReader, SyncError, WeightSource, checksum
from verl.weight_sync.local import LocalOutlet
from verl.weight_sync.record import entry_of

NOTHING = "nothing"


def rank_of(folder: Path) -> int:
    return int(json.loads((folder / CONFIG).read_text())["r"])


LOAD, UNLOAD, GENERATE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/generate"


class Adapted(Served):
    """As vLLM: its answers to these are no JSON, and it reads a folder again when it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: dict[str, str] = {}

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes([web.post(LOAD, self._load), web.post(UNLOAD, self._unload)])
        return app

    async def _load(self, request: web.Request) -> web.Response:
        given = await request.json()
        if given["lora_name"] in self.folders:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        self.folders[given["lora_name"]] = given["lora_path"]
        return web.Response(text=f"Success: LoRA adapter '{given['lora_name']}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        del self.folders[(await request.json())["lora_name"]]
        return web.Response(text="Success")

    def drawn_by(self) -> list[str]:
        """The names that requests gave, probes left out."""
        asked = [body for path, body in self.asked if path == GENERATE]
        return [body["model"].rpartition("-")[2] for body in asked if body["token_ids"] == PROMPT.tolist()]

    @property
    def names(self) -> list[str]:
        """Return the names of the loaded ones, as they were given."""
        return [name.rpartition("-")[2] for name in self.folders]

    def folder(self, name: str) -> Path:
        (found,) = (Path(at) for there, at in self.folders.items() if there.rpartition("-")[2] == name)
        return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    return tmp_path / "base"


def engine_of(url: str, base: Path, rank: int = 6) -> ServedEngine:
    able = Capabilities(logprobs="processed", max_context_tokens=64, in_flight_update=True, lora_rank=rank)
    place = ServerPlace(model=str(base), log=base / "log", url=url)
    limits = Deadlines(start_s=5, request_s=20, control_s=10)
    return ServedEngine(context_of(place=place), replace(expected(), versions=None), VllmApi(), url, able, limits)


def weights(version: int = 0, identity: str = "W") -> CheckedReader:
    """Those of the policy."""
    return CheckedReader(replace(reader(version).source, identity=identity))


OUTLETS: list[LocalOutlet] = []  # an address is that of a living outlet


@pytest.fixture(autouse=True)
def outlets() -> Iterator[None]:
    yield
    OUTLETS.clear()


def version_of(folder: Path, base: Path, version: int, *, name: str = "a", of: str = "W") -> CheckedReader:
    """A version of a LoRA set on top of the weights `of`, as it is published."""
    parameters, factors = read_lora(name, folder, base)
    OUTLETS.append(outlet := LocalOutlet())
    manifest = {n: replace(entry_of(t), checksum=checksum(t)) for n, t in factors.items()}
    source = WeightSource(version, outlet.transport, outlet.stage(version, {}, factors.items()), manifest)
    return CheckedReader(replace(source, parameters=replace(parameters, base=of)))


def asks(name: str, parameters: str = "a", tokens: int = 2) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, greedy(tokens), parameters=parameters)


def with_server(body: Any, base: Path, rank: int = 6) -> None:
    async def run() -> None:
        double = Adapted()
        async with TestServer(double.app()) as server:
            engine = engine_of(str(server.make_url("")), base, rank)
            try:
                await engine.load_weights(weights())
                await asyncio.wait_for(body(engine, double), 30)
            finally:
                await engine.close()
            assert not double.folders, "a server that stays would look for what is gone"

    asyncio.run(run())


def test_requests_name_their_set_and_those_of_the_policy_get_the_adapter_of_zeros(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        assert double.names == [NOTHING]
        assert await engine.load_weights(version_of(folder, base, 3)) == 3
        for name in ("policy", "a"):
            found = await engine.generate(asks(f"r{name}", name))
            assert (found.parameters, found.spans) == (name, ((0 if name == "policy" else 3, 0, 2),))
            await engine.score(PROMPT, parameters=name)
        assert double.drawn_by() == [NOTHING, NOTHING, "a", "a"] and engine.version == 0
        kept = double.folder("a")
        parts, written = read_adapter(kept, base), load_file(kept / WEIGHTS)
        given, sent = read_adapter(folder, base), load_file(folder / WEIGHTS)
        assert parts.keys() == given.keys() and len(parts) == 2
        for weight, part in parts.items():
            assert part.scale == given[weight].scale == 2.0
            assert np.array_equal(written[part.a], sent[given[weight].a])
            assert np.array_equal(written[part.b], sent[given[weight].b])
        write_adapter(folder, base, "q_proj", r=2)
        await engine.load_weights(version_of(folder, base, 4))
        assert rank_of(double.folder("a")) == 2 and not (kept / CONFIG).exists()
        assert (await engine.generate(asks("s"))).spans == ((4, 0, 2),)
        await engine.drop_set("a")
        await engine.drop_set("a")
        assert double.names == [NOTHING]
        with pytest.raises(ValueError, match=r"r: no LoRA set 'a' is live on these weights \(there are: none\)"):
            await engine.generate(asks("r"))

    with_server(body, base)


def test_factors_of_several_ranks_and_scales_are_written_as_one_set_of_the_same_product(
    base: Path, tmp_path: Path
) -> None:
    patterns = {"rank_pattern": {"layers.0.self_attn.q_proj": 4}, "alpha_pattern": {"layers.1.self_attn.q_proj": 20}}
    folder = write_adapter(tmp_path / "a", base, "q_proj", **patterns, r=4)
    first = load_file(folder / WEIGHTS)
    short = {
        k: v[:2] if "layers.0" in k and "lora_A" in k else v[:, :2] if "layers.0" in k else v for k, v in first.items()
    }
    save_file({k: np.ascontiguousarray(v) for k, v in short.items()}, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    config["rank_pattern"] = {"layers.0.self_attn.q_proj": 2}
    (folder / CONFIG).write_text(json.dumps(config))
    given = read_adapter(folder, base)
    parameters, factors = read_lora("a", folder, base)
    (into := tmp_path / "b").mkdir()
    write_set(into, parameters, factors.items(), str(base))
    parts, written = read_adapter(into, base), load_file(into / WEIGHTS)
    assert {part.scale for part in given.values()} == {4.0, 5.0} and {part.scale for part in parts.values()} == {5.0}
    for weight, part in given.items():
        wanted = part.scale * short[part.b] @ short[part.a]
        found = parts[weight].scale * written[parts[weight].b] @ written[parts[weight].a]
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_set_that_does_not_fit_is_refused_before_the_server_sees_it(base: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", hidden=128)
    good, large = (write_adapter(tmp_path / n, base, "q_proj", r=r) for n, r in (("a", 4), ("l", 7)))
    with pytest.raises(ValueError, match=f"model.path={tmp_path / 'o'}"):
        read_lora("a", write_adapter(tmp_path / "o", tmp_path / "other"), base)
    with pytest.raises(ValueError, match="'policy' is the name of the policy's own weights"):
        read_lora("policy", good, base)

    async def body(engine: ServedEngine, double: Adapted) -> None:
        double.asked.clear()
        with pytest.raises(
            ValueError, match="rank 7 is above the engine's 6; set rollout.engine_options.max_lora_rank to at"
        ):
            await engine.load_weights(version_of(large, base, 1))
        given = version_of(good, base, 1).source
        targets = ("model.layers.0.mlp.experts.down_proj",)
        experts = CheckedReader(replace(given, parameters=replace(given.parameters, targets=targets)))
        with pytest.raises(ValueError, match="LoRA set 'a': it has factors of experts, which this rollout engine does"):
            await engine.load_weights(experts)
        with pytest.raises(
            ValueError, match="LoRA set 'a' belongs to the weights X, and the engine has W; publish it again"
        ):
            await engine.load_weights(version_of(good, base, 1, of="X"))
        changed = version_of(good, base, 1)
        next(iter(dict(OUTLETS[-1].tensors()).values())).mul_(2.0)
        with pytest.raises(SyncError, match="changed between its manifest and its delivery"):
            await engine.load_weights(changed)
        assert not double.asked and double.names == [NOTHING]

        async def refused(request: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "no"}}, status=404)

        double.faults[LOAD] = refused
        with pytest.raises(ValueError, match=r"does not take this adapter .*; start it with --enable-lora"):
            await engine.load_weights(version_of(good, base, 1))
        with pytest.raises(ValueError, match="no LoRA set 'a' is live"):
            await engine.score(PROMPT, parameters="a")
        engine.adapters._unused.clear()
        await engine.load_weights(reader(1))
        del double.faults[LOAD]
        with pytest.raises(ValueError, match="the weights under it have no identity here"):
            await engine.load_weights(version_of(good, base, 1))

    with_server(body, base)


def test_an_engine_that_takes_none_says_so(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        with pytest.raises(ValueError, match="LoRA set 'a': this rollout engine loads no adapters"):
            await engine.load_weights(version_of(folder, base, 1))
        with pytest.raises(ValueError, match="adapter='a', but this rollout engine loads no adapters; leave it out"):
            await engine.generate(asks("r"))
        await engine.generate(asks("r", "policy"))
        assert double.drawn_by() == ["policy"] and not double.folders

    with_server(body, base, rank=0)


async def begun(double: Adapted, running: Any) -> asyncio.Future[Any]:
    """The request, once the server has it."""
    task = asyncio.ensure_future(running)
    while not double.running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return task


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_running_request_ends_under_the_version_that_it_began_with(base: Path, tmp_path: Path, mode: Any) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        await engine.load_weights(version_of(folder, base, 1))
        running = await begun(double, engine.generate(asks("r", tokens=40)))
        await engine.load_weights(version_of(folder, base, 2), on_inflight=mode)
        assert double.names.count("a") == (2 if mode == "keep" else 1), "it is read as long as it is used"
        assert (await engine.generate(asks("s"))).spans == ((2, 0, 2),)
        done = await running
        assert done.stop_reason == ("length" if mode == "keep" else "abort")
        assert all(version == 1 for version, _, _ in done.spans) and (len(done.ids) == 40) == (mode == "keep")
        await engine.load_weights(version_of(folder, base, 3))
        assert double.names.count("a") == 1

    with_server(body, base)


def test_new_weights_end_all_sets_after_their_requests(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        await engine.load_weights(version_of(folder, base, 1))
        running = await begun(double, engine.generate(asks("r", tokens=40)))
        await engine.load_weights(weights(1, "V"), on_inflight="keep")
        assert running.done() and running.result().spans == ((1, 0, 40),), "before the weights under it changed"
        assert double.names == [NOTHING]
        with pytest.raises(ValueError, match="no LoRA set 'a' is live on these weights"):
            await engine.generate(asks("s"))
        await engine.load_weights(version_of(folder, base, 2, of="V"))
        assert (await engine.generate(asks("s"))).spans == ((2, 0, 2),)
        running = await begun(double, engine.generate(asks("t", tokens=40)))
        await engine.pause("keep")
        await engine.load_weights(weights(2, "U"), on_inflight="keep")
        assert (await running).stop_reason == "abort", "it could not finish"
        await engine.resume()
        await engine.load_weights(version_of(folder, base, 3, of="U"))
        running = await begun(double, engine.generate(asks("u", tokens=40)))
        double.going.clear()
        engine.gate.asleep.add("kv")
        await engine.load_weights(weights(3, "T"), on_inflight="keep")
        assert (await running).stop_reason == "abort", "nor in a server that sleeps"

    with_server(body, base)


def test_an_update_waits_for_no_request_that_waits_for_it_after_its_connection_broke(
    base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        await engine.load_weights(version_of(folder, base, 1))
        probed, updated = asyncio.Event(), asyncio.Event()

        async def breaks(request: web.Request) -> None:
            if (await request.json())["token_ids"] == PROMPT.tolist():
                return reset(request)
            probed.set()
            await updated.wait()

        double.faults[GENERATE] = breaks
        running = asyncio.ensure_future(engine.generate(asks("r")))
        await probed.wait()
        assert await asyncio.wait_for(engine.load_weights(weights(1, "V"), on_inflight="keep"), 10) == 1
        del double.faults[GENERATE]
        updated.set()
        with pytest.raises(ValueError, match="no LoRA set 'a' is live on these weights"):
            await running

    with_server(body, base)


@contextlib.asynccontextmanager
async def two_replicas(base: Path) -> AsyncIterator[tuple[Router, list[Adapted], list[Any]]]:
    """-> with weights; and what starts replicas that join."""
    doubles = [Adapted() for _ in range(3)]
    servers = [TestServer(double.app()) for double in doubles]
    for server in servers:
        await server.start_server()
    starts = [lambda died, s=server: engine_of(str(s.make_url("")), base) for server in servers]
    router = Router(starts[:2], restarts=1, note=lambda text: None)
    try:
        for one in router.replicas:
            await one.load_weights(weights(1))
        router.published({})
        yield router, doubles, starts
    finally:
        await router.close()
        for server in servers:
            await server.close()


async def publish(router: Router, folder: Path, base: Path, version: int, of: str = "W") -> None:
    """Publish a set that all replicas verify."""
    for one in router.replicas:
        await one.load_weights(version_of(folder, base, version, of=of))
        one.mark_verified()
    router.set_published("a")


async def some(router: Router, count: int = 6) -> list[Any]:
    return await asyncio.gather(*(router.generate(asks(f"r{i}")) for i in range(count)))


def test_requests_go_to_replicas_that_have_the_set_on_their_weights(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def run() -> None:
        async with two_replicas(base) as (router, doubles, starts):
            assert (await router.capabilities()).lora_rank == 6
            with pytest.raises(ValueError, match=r"no replica has a LoRA set 'a' \(published are: none\); publish it"):
                await router.generate(asks("r"))
            await publish(router, folder, base, 1)
            assert {one.spans for one in await some(router)} == {((1, 0, 2),)}
            assert all(set(double.drawn_by()) == {"a"} for double in doubles[:2])
            await router.join(starts[2])
            await router.replicas[2].load_weights(weights(1))
            router.published({})
            await some(router)
            assert not doubles[2].drawn_by(), "it has not got the set"
            await publish(router, folder, base, 2)
            await some(router)
            assert set(doubles[2].drawn_by()) == {"a"}
            doubles[0].faults[LOAD] = crashing(400, "no room")
            with pytest.raises(ValueError, match="does not take this adapter"):
                await router.replicas[0].load_weights(version_of(folder, base, 3))
            await router.replicas[0].drop_set("a")
            seen = len(doubles[0].drawn_by())
            await some(router)
            assert len(doubles[0].drawn_by()) == seen and router.replicas[0].ready, "the policy goes on there"
            await router.drop_set("a")
            assert not any("a" in double.names for double in doubles[1:])
            with pytest.raises(ValueError, match="no replica has a LoRA set 'a'"):
                await router.score(PROMPT, parameters="a")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_request_waits_while_its_set_is_published_on_new_weights(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def run() -> None:
        async with two_replicas(base) as (router, _, _):
            await publish(router, folder, base, 1)
            for one in router.replicas:
                await one.load_weights(weights(2, "V"))
            router.published({})
            asked = asyncio.ensure_future(router.generate(asks("r")))
            await asyncio.sleep(0.05)
            assert not asked.done()
            await publish(router, folder, base, 2, of="V")
            assert (await asked).spans == ((2, 0, 2),)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_sets_that_are_published_together_are_verified_each_by_its_own_canary(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def run() -> None:
        async with two_replicas(base) as (router, _, _):
            one, other = router.replicas
            await asyncio.wait_for(one.load_weights(version_of(folder, base, 1)), 10)
            second = asyncio.ensure_future(one.load_weights(version_of(folder, base, 5, name="b")))
            await asyncio.sleep(0.05)
            router.published({})  # that of the policy, known late
            assert not one.sets
            one.mark_verified()
            assert one.sets == {"a": 1}
            assert await second == 5 and one.sets == {"a": 1}
            one.mark_verified()
            assert one.sets == {"a": 1, "b": 5}
            await other.load_weights(version_of(folder, base, 1))
            waiting = asyncio.ensure_future(other.load_weights(version_of(folder, base, 5, name="b")))
            await asyncio.sleep(0.05)
            other.lose(SyncError("its canary failed"))
            with pytest.raises(ReplicaLost):
                await waiting

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_set_is_dropped_also_where_a_replica_is_lost_and_without_any_the_cause_is_named(
    base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def run() -> None:
        async with two_replicas(base) as (router, doubles, _):
            await publish(router, folder, base, 1)
            one, other = router.replicas

            async def lost(name: str) -> None:
                raise ReplicaLost("it ended meanwhile")

            one.engine.drop_set = lost  # type: ignore[method-assign]
            await router.drop_set("a")
            assert "a" not in doubles[1].names
            router.set_published("a")
            for replica in (one, other):
                replica.lose(ReplicaLost("its host is gone"))
            with pytest.raises(ReplicaLost, match="no rollout replica serves: its host is gone"):
                await router.generate(asks("r"))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_no_answer_of_an_unverified_version_counts(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def run() -> None:
        async with two_replicas(base) as (router, _, _):
            await publish(router, folder, base, 1)
            one = router.replicas[0]
            await one.load_weights(version_of(folder, base, 2))
            held = [asyncio.ensure_future(one.generate(asks(f"r{i}"))) for i in range(2)]
            free = await one.generate(asks("p", "policy"))
            await asyncio.sleep(0.05)
            assert free.spans == ((1, 0, 2),) and not any(task.done() for task in held)
            one.mark_verified()
            assert [(await task).spans for task in held] == [((2, 0, 2),)] * 2
            await one.load_weights(version_of(folder, base, 3))
            held = [asyncio.ensure_future(one.generate(asks(f"s{i}"))) for i in range(2)]
            await asyncio.sleep(0.05)
            await one.drop_set("a")
            for task in held:
                with pytest.raises(ValueError, match="LoRA set 'a' was refused as it failed its canary"):
                    await task
            assert one.ready and "a" not in one.sets

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_version_that_may_have_been_loaded_is_dropped_at_the_end(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        engine.connection.limits = replace(engine.connection.limits, control_s=0.1)

        async def late(request: web.Request) -> web.Response:
            given = await request.json()
            double.folders[given["lora_name"]] = given["lora_path"]
            await asyncio.sleep(0.5)
            return web.Response()

        double.faults[LOAD] = late
        with pytest.raises(ServerLate):
            await engine.load_weights(version_of(folder, base, 1))
        assert "a" in double.names and double.folder("a").is_dir(), "it would look for its folder"

    with_server(body, base)


def test_two_runs_at_one_server_do_not_take_each_others_sets(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def run() -> None:
        double = Adapted()
        async with TestServer(double.app()) as server:
            one, other = engine_of(str(server.make_url("")), base), engine_of(str(server.make_url("")), base)
            for engine in (one, other):
                await engine.capabilities()
                engine.connection.version, engine.connection.identity = 0, "W"
                await engine.load_weights(version_of(folder, base, 1))
            assert sorted(double.names) == ["a", "a", NOTHING, NOTHING]
            await other.close()
            assert sorted(double.names) == ["a", NOTHING] and all(
                there.startswith(one.connection.tag) for there in double.folders
            )
            double.faults[UNLOAD] = silent
            await asyncio.wait_for(one.close(), 20)  # a server that does not answer costs a short while in all

    monkeypatch.setattr(adapters, "DROPS_S", 0.2)
    asyncio.run(asyncio.wait_for(run(), 60))


def test_weights_are_put_away_with_the_adapters_and_not_dropped(base: Path) -> None:
    async def body(engine: ServedEngine, double: Adapted) -> None:
        engine.connection.able = replace(engine.connection.able, sleep_levels=(1,))
        await engine.sleep(2)
        await engine.wake()
        assert double.paths[-3:] == ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]

    with_server(body, base)


def test_a_model_without_these_projections_is_refused_before_anything_starts(base: Path) -> None:
    save_file({"transformer.h.0.attn.c_attn.weight": np.zeros((4, 2), np.float32)}, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"none of q_proj, o_proj, down_proj; leave .*max_lora_rank out"):
        engine_of("http://127.0.0.1:1", base)


def test_the_adapter_of_zeros_adds_zeros(base: Path, tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    write_nothing(tmp_path / "n", base)
    parts = read_adapter(tmp_path / "n", base).values()
    found = load_file(tmp_path / "n" / "adapter_model.safetensors")
    assert len(parts) == 2 and rank_of(tmp_path / "n") == 1, "a weight of each layer"
    assert not any(np.any(found[part.b] @ found[part.a]) for part in parts)


def test_ranks_that_vllm_has_room_for(base: Path) -> None:
    from test_rollout_vllm import flags

    found = flags(Options(max_lora_rank=20, max_loras=3), str(base))
    assert found["--lora-target-modules"] == "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj", "not the head"
    assert flags(Options(max_lora_rank=8), str(base), lora_rank=20)["--max-lora-rank"] == "32", "of the policy"
    assert (found["--max-lora-rank"], found["--max-loras"]) == ("32", "4") and "--enable-lora" in found
    assert "--max-lora-rank" not in flags(Options())
    many = flags(Options(max_loras=3), str(base), lora_rank=8, lora_versions=6)
    assert many["--max-loras"] == "7", "versions with running requests, and the adapter of zeros"
    with pytest.raises(ValueError, match="max_lora_rank=600: vLLM takes at most 512"):
        flags(Options(max_lora_rank=600))
