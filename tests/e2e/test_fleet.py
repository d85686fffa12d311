"""Servers that join and leave a running run, by the command: it trains as an undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import Process
from serving import texts_of, tokenizer
from small_runs import metrics_of, same_tensors, small_run, tensors_of, trained
from transformers import AutoConfig, AutoModelForCausalLM

from verl.cli import main
from verl.driver import run as runs
from verl.rollout import vllm
from verl.rollout.api import Expected
from verl.rollout.base import RolloutContext
from verl.rollout.native import engine as native
from verl.rollout.native.options import Options
from verl.rollout.server.app import make_app, run_app
from verl.rollout.server.options import ServeConfig
from verl.rollout.server.service import Service
from verl.serve import FolderWeights, bound
from verl.track.events import read_events


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """`verl serve` of this folder in a thread, with an event loop of its own: its URL."""
    config, up = AutoConfig.from_pretrained(folder), threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
        context = RolloutContext(hf_config=config, max_context_tokens=64, dtype=torch.float32)
        engine = native.build(Options(), context, lanes=1)
        await engine.load_weights(FolderWeights(AutoModelForCausalLM.from_pretrained(folder), 0))
        options = ServeConfig(port=0, control=True)
        sizes = {"vocab_size": config.vocab_size, "max_context_tokens": 64}
        service = Service(engine=engine, texts=texts_of(tokenizer()), options=options, **sizes)
        with bound(options) as sock:
            found["url"] = f"http://127.0.0.1:{sock.getsockname()[1]}"
            found["loop"].call_later(0.1, up.set)
            await run_app(make_app(service), sock, found["stop"])
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert up.wait(60)
    yield found["url"]
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join(30)


def drawn_at(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if "generated_tokens_total" in line.split()[0])


@pytest.mark.slow
def test_servers_join_and_leave_a_run(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    there = tmp_path / "there" / "r"
    leaving: list[asyncio.Task[int]] = []
    at_join = [0]
    finish = runs.Run.finish

    def command(*args: str) -> int:
        return main(["replicas", str(there), *args])

    async def finished(self: Any, step: Any, refs: Any) -> None:
        await finish(self, step, refs)
        if step.number == 2:
            assert await asyncio.to_thread(command, "add", urls[2]) == 0
            assert self.fleet.lines()[2] == f"2 waits for a publish {urls[2]}"
            at_join[0] = drawn_at(urls[2])
            for wrong in (("add", urls[2]), ("add", "http://127.0.0.1:9"), ("add", "x"), ("add",), ("remove", "7")):
                assert await asyncio.to_thread(command, *wrong) == 2
        if step.number == 4:  # while the next one is rolled out
            leaving.append(asyncio.create_task(asyncio.to_thread(command, "remove", "0")))
        if step.number == 5:
            assert await leaving[0] == 0 and next(line.split()[1] for line in self.fleet.lines()) == "left"

    small_run(tmp_path / "here", tiny_model, arithmetic_data, "run.total_steps=6")
    with served(tiny_model) as a, served(tiny_model) as b, served(tiny_model) as c:
        urls = (a, b, c)
        monkeypatch.setattr(runs.Run, "finish", finished)
        two = ("rollout.engine=server", f'rollout.url="{a},{b}"', "rollout.replicas=2", "run.total_steps=6")
        small_run(tmp_path / "there", tiny_model, arithmetic_data, *two)
        assert drawn_at(c) > at_join[0], "it was asked"
    said = capfd.readouterr().err
    assert "it is a replica of this run already" in said and "no healthy server there" in said
    assert "its servers are started by others: give the URL of one" in said
    assert "expected http://HOST:PORT" in said and "replica 7: none has this number" in said
    assert command("list") == 2 and "no run goes on there" in capfd.readouterr().err
    here = tmp_path / "here" / "r"
    assert trained(here) == trained(there), "each sample once, the same draws"
    same_tensors(tensors_of(here, 6), tensors_of(there, 6))
    events = [(e.kind, e.data["replica"]) for e in read_events(there, ("joined", "left"))]
    assert events == [("joined", 2), ("left", 0)]
    counts = [metrics_of(there)[i]["sync/replicas"] for i in range(1, 7)]
    assert counts[:4] == [2, 2, 3, 3] and counts[5] == 2, counts
    assert not (there / "replicas").exists() and os.access(there, os.R_OK)


@pytest.mark.full("servers join and leave a run")
def test_a_server_that_the_run_starts_joins_it(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """As those that it started at its beginning: by rollout.python, with a log of its own."""
    there, finish, logs = tmp_path / "there" / "r", runs.Run.finish, list[str]()

    async def finished(self: Any, step: Any, refs: Any) -> None:
        await finish(self, step, refs)
        if step.number == 1:
            assert await asyncio.to_thread(main, ["replicas", str(there), "add"]) == 0
            assert self.fleet.lines() == ["0 serves", "1 waits for a publish"]
            assert await asyncio.to_thread(main, ["replicas", str(there), "add", "http://127.0.0.1:9"]) == 2
        elif step.number == 2:
            await self.fleet.remove(0)

    small_run(tmp_path / "here", tiny_model, arithmetic_data, "run.total_steps=4")
    with served(tiny_model) as a, served(tiny_model) as b:

        def launch(python: str, options: Any, context: Any, place: Any) -> tuple[Any, str]:
            logs.append(place.log.name)
            return Process(), (a, b)[len(logs) - 1]

        monkeypatch.setattr(vllm, "_launch", launch)
        monkeypatch.setattr(vllm, "require_vllm", lambda python: None)
        monkeypatch.setattr(vllm, "expected", lambda: Expected(name="vLLM"))
        monkeypatch.setattr(runs.Run, "finish", finished)
        args = ("rollout.engine=vllm", f"rollout.python={sys.executable}", "run.total_steps=4")
        small_run(tmp_path / "there", tiny_model, arithmetic_data, *args)
        assert drawn_at(b) > 0, "it was asked"
    assert logs == ["rollout_0.log", "rollout_1.log"]
    assert "replicas add http://127.0.0.1:9: its servers are started by this run: leave the URL out" in (
        capfd.readouterr().err
    )
    here = tmp_path / "here" / "r"
    assert trained(here) == trained(there)
    same_tensors(tensors_of(here, 4), tensors_of(there, 4))
    events = [(e.kind, e.data["replica"]) for e in read_events(there, ("joined", "left"))]
    assert events == [("joined", 1), ("left", 0)]


def test_a_run_without_servers_says_that_none_joins(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = runs.Run.finish

    async def finished(self: Any, step: Any, refs: Any) -> None:
        await finish(self, step, refs)
        assert self.fleet.lines() == ["0 serves"]
        for url in ("http://127.0.0.1:8000", ""):
            with pytest.raises(ValueError, match="the engine of this run is in its own process, and none joins"):
                await self.fleet.add(url)
        with pytest.raises(ValueError, match="replica 0 is the only one"):
            await self.fleet.remove(0)

    monkeypatch.setattr(runs.Run, "finish", finished)
    small_run(tmp_path, tiny_model, arithmetic_data, "run.total_steps=1")
    assert main(["replicas", str(tmp_path / "none"), "list"]) == 2
