"""LoRA adapters in a server that runs: what it is asked, what is refused, who has them after a restart. The draws are
a real vLLM's affair (tests/vllm/test_adapters.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
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
from test_rollout_client import PROMPT, context_of, greedy, reader

from verl.config.adapter import CONFIG, rank_of, read_adapter
from verl.parameter_set import POLICY_SET
from verl.rollout import adapters
from verl.rollout.adapters import write_nothing
from verl.rollout.api import Deadlines
from verl.rollout.base import Capabilities, GenerateRequest, ServerPlace
from verl.rollout.client import ServedEngine
from verl.rollout.http import ServerLate
from verl.rollout.router import Router
from verl.rollout.vllm import Options, expected
from verl.rollout.vllm_api import VllmApi

NOTHING = "nothing"
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
        """Of those that are there, as they were given."""
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


def with_server(body: Any, base: Path, rank: int = 6) -> None:
    async def run() -> None:
        double = Adapted()
        async with TestServer(double.app()) as server:
            engine = engine_of(str(server.make_url("")), base, rank)
            try:
                await engine.load_weights(reader())
                await asyncio.wait_for(body(engine, double), 30)
            finally:
                await engine.close()
            assert not double.folders, "a server that stays would look for what is gone"

    asyncio.run(run())


def test_requests_name_their_adapter_and_without_one_that_of_zeros(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        assert double.names == [NOTHING]
        await engine.load_adapter("a", str(folder))
        for file in folder.iterdir():  # it reads the folder again when it likes: a copy
            file.unlink()
        for adapter in (POLICY_SET.id, "a"):
            await engine.generate(GenerateRequest(f"r{adapter}", PROMPT, greedy(2), parameters=adapter))
            await engine.score(PROMPT, parameters=adapter)
        assert double.drawn_by() == [NOTHING, NOTHING, "a", "a"]
        kept = double.folder("a")
        assert rank_of(kept) == 4
        write_adapter(folder, base, "q_proj", r=2)
        await engine.load_adapter("a", str(folder))
        assert rank_of(double.folder("a")) == 2 and not (kept / CONFIG).exists()
        await engine.drop_adapter("a")
        assert double.names == [NOTHING]
        with pytest.raises(ValueError, match=r"r: no adapter 'a' was loaded \(there are: none\); load_adapter first"):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(2), parameters="a"))
        with pytest.raises(ValueError, match="drop_adapter: no adapter 'a' was loaded"):
            await engine.drop_adapter("a")

    with_server(body, base)


def test_what_is_no_adapter_for_it_is_refused_before_it_is_asked(base: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", hidden=128)
    large, foreign = (
        write_adapter(tmp_path / "l", base, "q_proj", r=7),
        write_adapter(tmp_path / "o", tmp_path / "other"),
    )

    async def body(engine: ServedEngine, double: Adapted) -> None:
        double.asked.clear()
        for name, folder, said in (
            ("a", large, "rank 7 is above the engine's 6; set rollout.engine_options.max_lora_rank to at least 7"),
            ("a", foreign, f"model.path={foreign}"),
            ("policy", foreign, "load_adapter: 'policy' is the model's own name"),
        ):
            with pytest.raises(ValueError, match=said):
                await engine.load_adapter(name, str(folder))
        assert not double.asked and double.names == [NOTHING]

        async def refused(request: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "no"}}, status=404)

        double.faults[LOAD] = refused
        with pytest.raises(ValueError, match=r"does not take this adapter .*; start it with --enable-lora"):
            await engine.load_adapter("a", str(write_adapter(tmp_path / "a", base, "q_proj")))
        with pytest.raises(ValueError, match="no adapter 'a' was loaded"):
            await engine.score(PROMPT, parameters="a")

    with_server(body, base)


def test_an_engine_that_takes_none_says_so(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj")

    async def body(engine: ServedEngine, double: Adapted) -> None:
        for asked in (
            engine.load_adapter("a", str(folder)),
            engine.generate(GenerateRequest("r", PROMPT, greedy(2), parameters="a")),
        ):
            with pytest.raises(
                ValueError, match="adapter='a', but this rollout engine loads no adapters; leave it out"
            ):
                await asked
        await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))
        assert double.drawn_by() == ["policy"] and not double.folders

    with_server(body, base, rank=0)


def test_none_is_replaced_under_a_request_that_it_draws(base: Path, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", base, "q_proj"))

    async def body(engine: ServedEngine, double: Adapted) -> None:
        await engine.load_adapter("a", folder)
        running = asyncio.ensure_future(engine.generate(GenerateRequest("r", PROMPT, greedy(40), parameters="a")))
        while not double.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for asked in (engine.load_adapter("a", folder), engine.drop_adapter("a")):
            with pytest.raises(ValueError, match="1 requests of 'a' run; wait for them, or abort them"):
                await asked
        await engine.load_adapter("b", folder)
        await running
        goes = asyncio.Event()

        async def held(request: web.Request) -> None:
            await goes.wait()

        double.faults[LOAD] = held
        loading = asyncio.ensure_future(engine.load_adapter("a", folder))
        seen = len(double.paths)
        while len(double.paths) == seen:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for asked in (
            engine.generate(GenerateRequest("r", PROMPT, greedy(2), parameters="a")),
            engine.score(PROMPT, parameters="a"),
        ):
            with pytest.raises(ValueError, match="'a' is being loaded or dropped; wait for that"):
                await asked
        for asked in (engine.load_adapter("a", folder), engine.drop_adapter("a")):
            with pytest.raises(ValueError, match="'a' is being loaded or dropped"):
                await asked
        goes.set()
        await loading
        await engine.generate(GenerateRequest("r", PROMPT, greedy(2), parameters="a"))

    with_server(body, base)


def test_replicas_that_come_later_have_the_adapters_of_the_others_before_they_serve(base: Path, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", base, "q_proj"))

    async def run() -> None:
        doubles = [Adapted() for _ in range(3)]
        servers = [TestServer(double.app()) for double in doubles]
        for server in servers:
            await server.start_server()
        starts = [lambda died, s=server: engine_of(str(s.make_url("")), base) for server in servers]
        router = Router(starts[:2], restarts=1, note=lambda text: None)
        try:
            assert (await router.capabilities()).lora_rank == 6

            async def publish(version: int) -> None:
                for one in router.replicas:
                    await one.load_weights(reader(version))
                router.published({})

            await publish(1)
            await router.load_adapter("a", folder)
            assert all("a" in double.names for double in doubles[:2])
            await router.join(starts[2])
            assert "a" not in doubles[2].names
            await publish(2)
            assert "a" in doubles[2].names
            loads = [double.paths.count(LOAD) for double in doubles]
            await publish(3)
            assert loads == [double.paths.count(LOAD) for double in doubles] == [2, 2, 2], "once each, and the zeros"
            asked = (router.generate(GenerateRequest(f"r{i}", PROMPT, greedy(2), parameters="a")) for i in range(6))
            await asyncio.gather(*asked)
            assert [set(double.drawn_by()) for double in doubles] == [{"a"}] * 3
            await router.drop_adapter("a")
            assert not any("a" in double.names for double in doubles)
        finally:
            await router.close()
            for server in servers:
                await server.close()

    asyncio.run(run())


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
            await one.load_weights(reader(1))
        router.published({})
        yield router, doubles, starts
    finally:
        await router.close()
        for server in servers:
            await server.close()


async def ranks(router: Router, doubles: list[Adapted]) -> list[int]:
    """Of the adapter "a" that the replicas draw with."""
    await asyncio.gather(
        *(router.generate(GenerateRequest(f"r{i}", PROMPT, greedy(2), parameters="a")) for i in range(6))
    )
    found = []
    for double in doubles:
        asked = [body["model"] for path, body in double.asked if path == GENERATE and body["token_ids"] == [*PROMPT]]
        found.append(rank_of(Path(double.folders[asked[-1]])))
    return found


@pytest.mark.parametrize("before", [2, None])
def test_one_that_not_all_replicas_take_is_drawn_with_by_none(base: Path, tmp_path: Path, before: int | None) -> None:
    async def run() -> None:
        async with two_replicas(base) as (router, doubles, _):
            if before is not None:
                await router.load_adapter("a", str(write_adapter(tmp_path / "a", base, "q_proj", r=before)))
            folder = str(write_adapter(tmp_path / "b", base, "q_proj", r=5))
            doubles[1].faults[LOAD] = crashing(400, "no room")
            with pytest.raises(ValueError, match="does not take this adapter"):
                await router.load_adapter("a", folder)
            del doubles[1].faults[LOAD]
            if before is not None:
                assert await ranks(router, doubles[:2]) == [before] * 2
            else:
                assert [double.names for double in doubles[:2]] == [[NOTHING]] * 2
                with pytest.raises(ValueError, match="no adapter 'a' was loaded"):
                    await router.generate(GenerateRequest("r", PROMPT, greedy(2), parameters="a"))
            await router.load_adapter("a", folder)
            assert await ranks(router, doubles[:2]) == [5, 5]
            assert all(double.names.count("a") == 1 for double in doubles[:2]), "no earlier one is left there"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_one_that_joins_has_what_was_loaded_whatever_became_of_the_folder(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, "q_proj", r=3)

    async def run() -> None:
        async with two_replicas(base) as (router, doubles, starts):
            await router.load_adapter("a", str(folder))
            write_adapter(folder, base, "q_proj", r=6)
            await router.join(starts[2])
            loading = asyncio.ensure_future(router.load_adapter("b", str(folder)))
            for one in router.replicas:
                await one.load_weights(reader(2))
            await loading
            router.published({})
            assert await ranks(router, doubles) == [3, 3, 3]
            await asyncio.gather(
                *(router.generate(GenerateRequest(f"b{i}", PROMPT, greedy(2), parameters="b")) for i in range(6))
            )
            assert all(rank_of(double.folder("b")) == 6 for double in doubles), "it came between all of that"
            with pytest.raises(ValueError, match=r"it has no adapter_config.json; give the folder of a LoRA adapter"):
                await router.load_adapter("c", str(tmp_path))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_one_whose_load_is_given_up_is_loaded_to_the_end(base: Path, tmp_path: Path) -> None:
    """By its caller, when some replicas have it."""
    folder = str(write_adapter(tmp_path / "a", base, "q_proj", r=3))

    async def run() -> None:
        async with two_replicas(base) as (router, doubles, _):
            goes, asked = asyncio.Event(), asyncio.Event()

            async def held(request: web.Request) -> None:
                asked.set()
                await goes.wait()

            doubles[1].faults[LOAD] = held
            loading = asyncio.ensure_future(router.load_adapter("a", folder))
            await asked.wait()
            loading.cancel()
            await asyncio.wait({loading})
            with pytest.raises(ValueError, match="'a' is being loaded or dropped"):
                await router.generate(GenerateRequest("r", PROMPT, greedy(2), parameters="a"))
            goes.set()
            while router._changes:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert await ranks(router, doubles[:2]) == [3, 3]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_one_that_was_dropped_is_nowhere_also_where_it_came_meanwhile(base: Path, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", base, "q_proj", r=3))

    async def run() -> None:
        async with two_replicas(base) as (router, doubles, starts):
            await router.load_adapter("a", folder)
            await router.join(starts[2])
            await router.replicas[2].load_weights(reader(1))  # its canary is still to come
            await router.drop_adapter("a")
            router.published({})
            for i in range(4):
                with pytest.raises(ValueError, match=r"no adapter 'a' was loaded \(there are: none\)"):
                    await router.generate(GenerateRequest(f"r{i}", PROMPT, greedy(2), parameters="a"))
            for one in router.replicas:
                await one.load_weights(reader(2))
            assert [double.names for double in doubles] == [[NOTHING]] * 3

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_may_have_come_although_nobody_said_so_goes_at_the_end(base: Path, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", base, "q_proj"))

    async def body(engine: ServedEngine, double: Adapted) -> None:
        engine.connection.limits = replace(engine.connection.limits, control_s=0.1)

        async def late(request: web.Request) -> web.Response:
            given = await request.json()
            double.folders[given["lora_name"]] = given["lora_path"]
            await asyncio.sleep(0.5)
            return web.Response()

        double.faults[LOAD] = late
        with pytest.raises(ServerLate):
            await engine.load_adapter("a", folder)
        assert "a" in double.names and double.folder("a").is_dir(), "it would look for its folder"

    with_server(body, base)


def test_none_is_replaced_under_a_score(base: Path, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", base, "q_proj"))

    async def run() -> None:
        async with two_replicas(base) as (router, doubles, _):
            await router.load_adapter("a", folder)
            goes, asked = asyncio.Event(), asyncio.Event()

            async def held(request: web.Request) -> None:
                asked.set()
                await goes.wait()

            for double in doubles:
                double.faults[GENERATE] = held
            scoring = [asyncio.ensure_future(one.score(PROMPT, parameters="a")) for one in (router, router.replicas[0])]
            await asked.wait()
            await asyncio.sleep(0.05)
            engine = router.replicas[0].engine
            for one in (router, engine):
                with pytest.raises(ValueError, match="requests of 'a' run; wait for them, or abort them"):
                    await one.load_adapter("a", folder)
                with pytest.raises(ValueError, match="requests of 'a' run; wait for them, or abort them"):
                    await one.drop_adapter("a")
            goes.set()
            await asyncio.gather(*scoring)
            await router.drop_adapter("a")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_two_runs_at_one_server_do_not_take_each_others_adapters(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_adapter(tmp_path / "a", base, "q_proj"))

    async def run() -> None:
        double = Adapted()
        async with TestServer(double.app()) as server:
            one, other = engine_of(str(server.make_url("")), base), engine_of(str(server.make_url("")), base)
            for engine in (one, other):
                await engine.capabilities()
                await engine.load_adapter("a", folder)
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


def test_ranks_that_vllm_has_room_for() -> None:
    from test_rollout_vllm import flags

    found = flags(Options(max_lora_rank=20, max_loras=3))
    assert (found["--max-lora-rank"], found["--max-loras"]) == ("32", "4") and "--enable-lora" in found
    assert "--max-lora-rank" not in flags(Options())
    with pytest.raises(ValueError, match="max_lora_rank=600: vLLM takes at most 512"):
        flags(Options(max_lora_rank=600))
