"""The router before 1 to 64 replicas: what it adds to an answer, and whether anything is lost while they die; and
rollout over HTTP against the same engine in this process.

    python bench/router.py [--deaths SECONDS] [--answers N]

The replicas of the first two tables are doubles: engines that take a known time and nothing of the CPU, so that what is
measured is the router. Every answer is a function of its request, so that a lost, doubled or exchanged one is seen. A
death ends all requests of a replica at a random moment; its engine starts anew and serves after the next publish. The
third table is `verl serve` in a process of its own, a tiny model, and the client that a run uses. Writes its part of
bench/RESULTS.md (bench/sections/router.md).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch
import uvloop

from bench.report import write_section
from bench.results import Spread, Table
from verl.rollout.base import BaseEngine, Capabilities, Completion, GenerateRequest, ReplicaLost, RolloutEngine
from verl.rollout.router import Router
from verl.types import Sampling

TAKES_S = (0.005, 0.05)  # an answer of a double
IN_FLIGHT = 8  # requests per replica
PROMPT = np.arange(4)


class Double(BaseEngine):
    """An engine with slow answers that are a function of the request. died: called when it dies."""

    def __init__(self, died: Callable[[BaseException], None], rng: random.Random) -> None:
        self.died, self.rng, self.version = died, rng, -1
        self.running: dict[str, asyncio.Future[None]] = {}
        self.dead = False

    async def generate(self, request: GenerateRequest) -> Completion:
        request_id, prompt, sampling = request.id, request.prompt_ids, request.sampling
        if self.dead:
            raise ReplicaLost("a death")
        loop = asyncio.get_running_loop()
        done = self.running[request_id] = loop.create_future()
        timer = loop.call_later(self.rng.uniform(*TAKES_S), lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()
            del self.running[request_id]
        ids = np.array([sampling.seed, len(prompt)], np.int64)
        return Completion(request_id, ids, np.zeros(2, np.float32), ((self.version, 0, 2),), "length")

    def die(self) -> None:
        self.dead, why = True, ReplicaLost("a death")
        for done in self.running.values():
            if not done.done():
                done.set_exception(why)
        self.died(why)

    async def load_weights(self, source: Any, *, on_inflight: str) -> int:
        if self.dead:
            raise ReplicaLost("a death")
        self.version = source.version
        return self.version

    async def capabilities(self) -> Capabilities:
        return Capabilities(logprobs="processed", max_context_tokens=64)

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class Weights:
    """A `WeightReader` without tensors."""

    version: int
    passes: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> tuple[()]:
        return ()


@dataclass(slots=True)
class World:
    """live: the version that every replica in service has."""

    router: Router
    version: int = 0
    live: int = 0

    async def publish(self) -> None:
        """As the checkpoint engine and the publisher do."""
        self.version += 1
        found = await asyncio.gather(
            *(one.load_weights(Weights(self.version), on_inflight="keep") for one in self.router.replicas),
            return_exceptions=True,
        )
        self.router.published({i: str(e) for i, e in enumerate(found) if isinstance(e, BaseException)})
        self.live = self.version

    @property
    def doubles(self) -> list[Double]:
        return [one.engine for one in self.router.replicas]  # type: ignore[misc]


async def world(replicas: int, restarts: int = 0) -> World:
    rng = random.Random(replicas)

    def start(died: Callable[[BaseException], None]) -> RolloutEngine:
        return cast(RolloutEngine, Double(died, rng))  # the verbs that a router calls here

    starts = [start] * replicas
    made = World(Router(starts, restarts=restarts, note=lambda text: None))
    await made.publish()
    return made


async def seconds_of(ask: Callable[[int], Any], count: int, at_once: int) -> list[float]:
    """Return the seconds of each answer, with so many requests at once."""
    spent, left = [0.0] * count, iter(range(count))

    async def caller() -> None:
        for i in left:
            start = time.perf_counter()
            await ask(i)
            spent[i] = time.perf_counter() - start

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return spent


async def added(replicas: int, answers: int) -> tuple[str, ...]:
    """Return a row: the time that the router adds to the median and to the 99th percentile, compared with requests to
    its doubles in turn."""
    made = await world(replicas)
    doubles, at_once = made.doubles, IN_FLIGHT * replicas

    def sampling(i: int) -> Sampling:
        return Sampling(max_tokens=2, seed=i)

    found: dict[str, list[list[float]]] = {"direct": [], "routed": []}
    for _ in range(5):  # in turn, so that the load of the machine is alike
        found["direct"].append(
            await seconds_of(
                lambda i: doubles[i % replicas].generate(GenerateRequest(str(i), PROMPT, sampling(i))), answers, at_once
            )
        )
        found["routed"].append(
            await seconds_of(
                lambda i: made.router.generate(GenerateRequest(str(i), PROMPT, sampling(i), prefix_key=str(i // 8))),
                answers,
                at_once,
            )
        )
    cells = []
    for share in (50, 99):
        at = {name: [statistics.quantiles(one, n=100)[share - 1] for one in runs] for name, runs in found.items()}
        both = zip(at["routed"], at["direct"], strict=True)
        cells.append(Spread.of([1000 * (routed - direct) for routed, direct in both]).text(2))
    return (str(replicas), f"{at_once:,}", *cells)


async def deaths(replicas: int, limit_s: float) -> tuple[str, ...]:
    """A row: answers while replicas die at random, one about every tenth of a second, and a publish every half one."""
    made, rng = await world(replicas, restarts=1_000_000), random.Random(7)
    asked, came, wrong, end_s, killed = 0, Counter[str](), 0, time.monotonic() + limit_s, 0

    async def caller() -> None:
        nonlocal asked, wrong
        while time.monotonic() < end_s:
            asked += 1
            name, seed, live = f"r{asked}", asked, made.live
            done = await made.router.generate(
                GenerateRequest(name, PROMPT, Sampling(max_tokens=2, seed=seed), prefix_key=str(seed // 8))
            )
            came[name] += 1
            stale = any(version < live for version, _, _ in done.spans)
            wrong += done.request_id != name or done.ids.tolist() != [seed, len(PROMPT)] or stale

    async def killer() -> None:
        nonlocal killed
        while time.monotonic() < end_s:
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            alive = [one.engine for one in made.router.replicas if one.ready]
            if len(alive) > 1:  # without one that serves a run ends, as it should
                killed += 1
                rng.choice(alive).die()  # type: ignore[attr-defined]

    async def publisher() -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(0.5)
            await made.publish()

    await asyncio.wait_for(
        asyncio.gather(killer(), publisher(), *(caller() for _ in range(IN_FLIGHT * replicas))), limit_s + 60
    )
    lost, doubled = asked - len(came), sum(n - 1 for n in came.values())
    return (str(replicas), f"{limit_s:.0f}", f"{asked:,}", f"{killed:,}", str(lost), str(doubled), str(wrong))


def over_http(rounds: int) -> tuple[tuple[str, ...], ...]:
    """Rows: tokens per second of 64 answers at once, in this process and through `verl serve`."""
    from rollouts import source_of
    from serving import CONTROLLED, KEY, model, server_process, tokenizer

    from verl.rollout import server_url
    from verl.rollout.base import RolloutContext, ServerPlace
    from verl.rollout.native import engine as native
    from verl.rollout.native.options import Options
    from verl.weight_sync import shm
    from verl.weight_sync.base import CheckedReader, WeightSource
    from verl.weight_sync.record import entry_of

    module, room = model(), 256
    prompts = np.random.default_rng(0).integers(0, 300, (64, 16))
    rates: dict[str, list[float]] = {"in process": [], "over HTTP": []}

    def context(**given: Any) -> RolloutContext:
        return RolloutContext(hf_config=module.config, max_context_tokens=room, dtype=torch.float32, **given)

    async def rate(engine: Any) -> float:
        start = time.perf_counter()
        asked = (
            engine.generate(GenerateRequest(str(i), ids, Sampling(max_tokens=200, seed=i, ignore_eos=True)))
            for i, ids in enumerate(prompts)
        )
        return sum(len(one.ids) for one in await asyncio.gather(*asked)) / (time.perf_counter() - start)

    async def run(url: str, name: str) -> None:
        held = {n: t for n, t in module.state_dict().items()}
        shapes = {n: entry_of(t) for n, t in held.items()}
        address = shm.ShmOutlet(name).stage(0, shapes, held.items())
        reader = CheckedReader(WeightSource(0, shm.ShmOutlet.transport, address, shapes))
        place = ServerPlace(model="", log=Path(os.devnull), url=url)
        served = server_url.build(server_url.Options(api_key=KEY), context(place=place))
        here = native.build(Options(), context())
        await here.load_weights(source_of(module))
        await served.load_weights(reader)
        for number in range(1 + rounds):  # the first one warms both
            for what, engine in (("in process", here), ("over HTTP", served)):
                value = await rate(engine)
                if number:
                    rates[what].append(value)
        await here.close()
        await served.close()

    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        name = f"{shm.PREFIX}-{os.getpid()}-bench"
        args = (*CONTROLLED, f"serve.max_context_tokens={room}")
        with server_process(Path(folder), Path(folder) / "serve.log", *args) as (_, url):
            uvloop.run(run(url, name))  # as a run has it
        shm.remove(name)
    ratio = Spread.of([h / p for h, p in zip(rates["over HTTP"], rates["in process"], strict=True)])
    rows = [(what, Spread.of(values).text(0)) for what, values in rates.items()]
    return (*rows, ("ratio", ratio.text(2)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--deaths", type=float, default=60.0, help="seconds, for each number of replicas")
    parser.add_argument("--answers", type=int, default=4000, help="per round")
    parser.add_argument("--replicas", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=5, help="of rollout over HTTP; 0 leaves it out")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = [int(size) for size in given.replicas.split(",")]
    head = ("replicas", "requests in flight", "added at the median, ms [quartiles]", "at the 99th percentile, ms")
    tables = [
        Table("what the router adds", head, tuple(asyncio.run(added(size, given.answers)) for size in sizes)),
        Table(
            "random deaths",
            ("replicas", "s", "requests", "deaths", "lost", "doubled", "wrong"),
            tuple(asyncio.run(deaths(size, given.deaths)) for size in sizes if size > 1),
        ),
    ]
    if given.rounds:
        title = "64 answers at once of a tiny model"
        tables.append(Table(title, ("", "tokens/s [quartiles]"), over_http(given.rounds)))
    about = (
        f"Command: `python bench/router.py`. {os.cpu_count()} cores, 1-minute load {os.getloadavg()[0]:.1f}; torch "
        f"{torch.__version__}. Replicas of the first two tables are doubles in this process whose answers take "
        f"{1000 * TAKES_S[0]:.0f} to {1000 * TAKES_S[1]:.0f} ms. Added: answers through the router against the same "
        "doubles asked in turn, in alternating runs."
    )
    texts = [table.markdown() for table in tables]
    print(*texts, sep="\n\n")
    write_section("router", "## Router", about, *texts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
