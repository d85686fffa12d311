"""The contract of rollout engines over our own server: the client of `rollout.engine=server`, HTTP, `verl serve`'s
application, the native engine. The same functions as for the engines in this process; what is not run reaches into the
embedded engine (failures of its runner, its threads), or asks for what a server refuses (scores at a temperature)."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from serving import Running

from verl.rollout import server_url
from verl.rollout.base import RolloutContext, ServerPlace
from verl.rollout.client import ServedEngine
from verl.weight_sync import shm
from verl.weight_sync.base import CheckedReader, WeightSource, checksum
from verl.weight_sync.record import entry_of

SUITE = Path(__file__).parent / "test_rollout_contract.py"
OUTLET = f"{shm.PREFIX}-{os.getpid()}-contract"
PLAIN = (
    *("test_logprobs_are_those_of_the_temperature", "test_greedy_equals_hf_generate"),
    *("test_samples_follow_the_distribution", "test_samples_of_one_prompt_differ"),
    *("test_a_seed_gives_its_tokens_whatever_the_batch", "test_eos_stop_ids_and_limits"),
    *("test_a_response_of_only_eos", "test_stop_strings_across_token_boundaries"),
    *("test_the_context_can_be_filled_to_its_last_token", "test_abort_returns_partial_tokens"),
    *("test_no_stale_prefix_after_an_update", "test_weights_are_a_snapshot"),
    *("test_what_cannot_finish_is_not_waited_for", "test_cancelled_callers_free_their_rows"),
    *("test_an_answer_does_not_wait_for_the_longer_ones", "test_a_cancelled_wait_is_given_up"),
    *("test_user_faults", "test_one_engine_over_several_event_loops", "test_truncation_and_its_logprobs"),
)


class Counted(Running):
    """began: what was sampled before the weights that it has."""

    began = 0

    def stats_of(self, engine: Any) -> dict[str, int]:
        found = self.engine.stats()
        return {**found, "sampled_tokens": found["sampled_tokens"] - self.began}


@pytest.fixture(scope="module")
def contract() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("contract_of_our_server", SUITE)
    assert spec is not None and spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = suite
    spec.loader.exec_module(suite)
    running = Counted(suite.reference())
    atexit.register(shm.remove, OUTLET)

    def build(kind: str, model: str = "qwen3", *, max_prefill_tokens: int = 0, **given: Any) -> ServedEngine:
        place = ServerPlace(model="none", log=Path(os.devnull), url=running.url)
        known = {"max_context_tokens": 512, "dtype": torch.float32, **given}
        return server_url.build(
            server_url.Options(), RolloutContext(hf_config=suite.reference(model).config, place=place, **known)
        )

    async def load(engine: ServedEngine, source: Any, **options: Any) -> int:
        held = {name: tensor.detach() for name, tensor in source.tensors() if isinstance(tensor, torch.Tensor)}
        if source.module.config.tie_word_embeddings:
            held.pop("lm_head.weight")
        shapes = {name: entry_of(tensor) for name, tensor in held.items()}
        address = shm.ShmOutlet(OUTLET).stage(source.version, shapes, held.items())
        sums = {name: checksum(tensor) for name, tensor in held.items()}
        manifest = {name: type(e)(e.shape, e.dtype, checksum=sums[name]) for name, e in shapes.items()}
        reader = CheckedReader(WeightSource(source.version, shm.ShmOutlet.transport, address, manifest))
        version = await engine.load_weights(reader, **options)
        running.began = running.engine.stats()["sampled_tokens"]
        return version

    suite.DRAWS = 1000  # that the settings came is to be seen; the draws are the native engine's
    suite.build, suite.stats_of, suite.load = build, running.stats_of, load  # type: ignore[attr-defined]
    yield suite
    running.stop()


@pytest.mark.parametrize("name", PLAIN)
def test_contract(contract: ModuleType, name: str) -> None:
    test = vars(contract)[name]
    if "model" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        test("server", "qwen3")
    else:
        test("server")


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause(contract: ModuleType, mode: str) -> None:
    contract.test_pause("server", mode)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_update_that_waits_or_aborts(contract: ModuleType, mode: str) -> None:
    contract.test_update_that_waits_or_aborts("server", mode)


@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_lose_and_double_nothing(contract: ModuleType, seed: int) -> None:
    contract.test_random_schedules_lose_and_double_nothing("server", seed)
