"""One vLLM for the tests of this folder, which `make test` leaves out: `make test-vllm` makes its environment first."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from real_server import OUTLET, PYTHON, Running, context_of, contract_of_servers, load, saved, wait_until_up

from verl.rollout import vllm
from verl.rollout.base import ServerPlace
from verl.rollout.client import ServedEngine
from verl.weight_sync.shm import SHM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm" in str(item.path):
            item.add_marker(pytest.mark.timeout(900))
            if not PYTHON:
                item.add_marker(pytest.mark.skip(reason="VLLM_PYTHON is not set: make test-vllm"))


@pytest.fixture(scope="session")
def suite() -> ModuleType:
    return contract_of_servers()


@pytest.fixture(scope="session")
def running(suite: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("vllm")
    place = ServerPlace(model=str(saved(suite, folder / "model")), log=folder / "vllm.log", python=PYTHON)
    process, url = vllm._launch(PYTHON, vllm.Options(threads=1), context_of(suite, place), place)
    yield Running(process, url, folder / "model")
    print(process.tail(40))
    process.stop()


@pytest.fixture(scope="session")
def contract(suite: ModuleType, running: Running) -> ModuleType:
    """The suite with its engines at the shared server."""

    def build(kind: str, model: str = "qwen3", *, max_prefill_tokens: int = 0, **given: Any) -> ServedEngine:
        place = ServerPlace(model=str(running.model), log=running.process.log, url=running.url)
        return vllm.build(vllm.Options(start_timeout_s=300), context_of(suite, place, model, **given))

    async def counted(engine: ServedEngine, source: Any, **options: Any) -> int:
        version = await load(engine, source, **options)
        running.begin(engine)  # its start drew some tokens, too
        return version

    suite.build, suite.stats_of, suite.load = build, running.stats_of, counted  # type: ignore[attr-defined]
    for seed in range(3):  # made now, and not while a request runs that a test wants to meet
        suite.reference(seed=seed)
    wait_until_up(running)
    return suite


@pytest.fixture(scope="session", autouse=True)
def swept() -> Iterator[None]:
    yield
    for path in SHM.glob(f"{OUTLET}-*"):
        path.unlink(missing_ok=True)
