"""The contract of rollout engines (tests/contracts), over a real vLLM: the same functions. What is not run, and why:

- truncation with min-p beside top-p: vLLM drops by min-p first, so another set is kept (training has neither);
- scores at a temperature: refused (test_traps.py);
- spans of an update in flight, weights that do not fit, sleep: vLLM does something else, see test_traps.py;
- tests that reach into the embedded engine (failures of its runner, its threads).
"""

from __future__ import annotations

from types import ModuleType

import pytest

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


@pytest.mark.parametrize("name", PLAIN)
def test_contract(contract: ModuleType, name: str) -> None:
    test = vars(contract)[name]
    if "model" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        test("vllm", "qwen3")
    else:
        test("vllm")


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause(contract: ModuleType, mode: str) -> None:
    contract.test_pause("vllm", mode)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_update_that_waits_or_aborts(contract: ModuleType, mode: str) -> None:
    contract.test_update_that_waits_or_aborts("vllm", mode)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full("seed 0")) for n in (1, 2, 3))])
def test_random_schedules_lose_and_double_nothing(contract: ModuleType, seed: int) -> None:
    contract.test_random_schedules_lose_and_double_nothing("vllm", seed)
