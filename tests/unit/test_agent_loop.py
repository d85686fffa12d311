"""Agent loops: what is trained on is what was sampled, whatever the loop returns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from each import check_each, each
from fakes import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, ServerManager, sampling_params_of
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.driver.checked import check_output
from verl.recorded import RecordedCall
from verl.rollout.base import Completion
from verl.types import Medium, Sampling

SAMPLING = Sampling(max_tokens=50, temperature=0.8, stop=("</answer>",), stop_token_ids=(7,))
PROMPT = [1, 2, 3]


def completion(
    ids: Sequence[int], *, spans: Sequence[tuple[int, int, int]] = (), reason: Any = "eos", base: float = -1.0
) -> Completion:
    """Log-probs base - 0.01 x position: each token of each call has its own."""
    n = len(ids)
    logprobs = (base - 0.01 * np.arange(n)).astype(np.float32)
    return Completion("r", np.array(ids, np.int64), logprobs, tuple(spans) or ((0, 0, n),), reason)


def manager(*calls: tuple[Sequence[int], Completion]) -> ServerManager:
    made = ServerManager(FakeEngine(), SAMPLING, seed_parts=("s",))
    made.record = [RecordedCall(np.array(p, np.int64), c, c.ids.tolist()) for p, c in calls]
    return made


def output(
    response: Sequence[int], mask: Sequence[int], prompt: Sequence[int] = PROMPT, **more: Any
) -> AgentLoopOutput:
    return AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask, **more)


def shape(segments: Any) -> list[tuple[str, list[int], int]]:
    return [(s.source, s.ids.tolist(), s.version) for s in segments]


class Scripted(FakeEngine):
    """Answers in the order of the calls with the given ids."""

    def __init__(self, *answers: Sequence[int], reason: str = "eos"):
        super().__init__()
        self._answers = list(answers)
        self._reason = reason

    async def generate(self, request):
        sampling = request.sampling
        self.requests.append((request.id, list(request.prompt_ids), sampling))
        return completion(
            self._answers.pop(0)[: sampling.max_tokens], reason=self._reason, base=-float(len(self.requests))
        )


# -- one call, returned as it came -------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_an_untouched_answer_is_found_without_a_search(full: bool, monkeypatch: pytest.MonkeyPatch):
    """The same trajectory as the search finds."""
    made = manager((PROMPT, completion([4, 5, 6, 9], spans=((3, 0, 1), (4, 1, 4)), reason="length")))
    made.ended_by = "context_full" if full else None
    loops = [
        output([4, 5, 6, 9], [1, 1, 1, 1]),
        output([4, 5, 6], [1, 1, 1]),
        output([4, 5, 6, 9], [1, 1, 0, 1]),
        output([], []),
        output([4, 5, 6, 9], [1, 1, 1, 1], prompt=np.array(PROMPT)),
        output(np.array([4, 5, 6, 9]), [True] * 4),
    ]
    for limit in (50, 4, 3):
        fast = [check_output(loop, made, limit) for loop in loops]
        with monkeypatch.context() as patch:
            patch.setattr("verl.driver.checked._is_untouched", lambda *_: False)
            searched = [check_output(loop, made, limit) for loop in loops]
        for one, other in zip(fast, searched, strict=True):
            assert one.stop_reason == other.stop_reason and shape(one.segments) == shape(other.segments)
            for mine, theirs in zip(one.segments, other.segments, strict=True):
                np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)


@pytest.mark.parametrize("loop", [output([4, 5, 7, 9], [1] * 4), output([4, 5, 6, 9], [1] * 4, prompt=[1, 2, 8])])
def test_a_touched_answer_is_refused_all_the_same(loop: AgentLoopOutput):
    with pytest.raises(ValueError, match="were not sampled by the"):
        check_output(loop, manager((PROMPT, completion([4, 5, 6, 9]))), 50)


# -- single turn -------------------------------------------------------------------------------------------------------


def test_a_subclass_has_to_say_itself_that_it_ends_when_cancelled():
    class Mine(SingleTurnLoop):
        pass

    class Sure(SingleTurnLoop):
        ends_when_cancelled = True

    assert (SingleTurnLoop.ends_when_cancelled, Mine.ends_when_cancelled, Sure.ends_when_cancelled) == (
        True,
        False,
        True,
    )


def test_single_turn_is_one_prompt_and_one_answer():
    async def main():
        engine = Scripted([5, 6, 7])
        server = ServerManager(engine, SAMPLING, seed_parts=("s",), prefix_key="g1")
        out = await SingleTurnLoop(None, server, None).run(
            sampling_params_of(SAMPLING),
            prompt_ids=np.array(PROMPT),
            request_id="g1/train0.0",
            raw_prompt=[],
            anything="else",
        )
        assert engine.requests[0][:2] == ("g1/train0.0", PROMPT)
        assert (out.response_ids, out.response_mask, out.num_turns) == ([5, 6, 7], [1, 1, 1], 2)
        found = check_output(out, server, SAMPLING.max_tokens)
        assert shape(found.segments) == [("prompt", PROMPT, -1), ("sampled", [5, 6, 7], 0)]
        assert found.stop_reason == "eos"
        np.testing.assert_array_equal(found.segments[1].logprobs, completion([5, 6, 7]).logprobs)

    asyncio.run(main())


def test_a_loop_without_run_is_ours_to_fix():
    with pytest.raises(AssertionError, match="AgentLoopBase does not define run"):
        asyncio.run(AgentLoopBase(None, manager(), None).run({}))


# -- several turns -----------------------------------------------------------------------------------------------------


class ToolLoop(AgentLoopBase):
    """Samples a turn, appends the answer of the tool, and samples again."""

    tool = (30, 31)

    async def run(self, sampling_params, **kwargs):
        context, response, mask = list(kwargs["prompt_ids"]), [], []
        for turn in range(kwargs.get("turns", 3)):
            if turn:
                response += self.tool
                mask += [0] * len(self.tool)
            out = await self.server_manager.generate(
                "r", prompt_ids=context + response, sampling_params=sampling_params
            )
            response += out.token_ids
            mask += [1] * len(out.token_ids)
            if out.stop_reason in ("length", "context_full"):
                break
        return AgentLoopOutput(prompt_ids=context, response_ids=response, response_mask=mask, num_turns=turn + 1)


def test_tool_tokens_are_env_and_sampled_ones_keep_their_own_log_probs():
    async def main():
        server = ServerManager(Scripted([5], [6, 6], [7]), SAMPLING, seed_parts=("s",))
        out = await ToolLoop(None, server, None).run({}, prompt_ids=PROMPT)
        found = check_output(out, server, 50)
        assert shape(found.segments) == [
            ("prompt", PROMPT, -1),
            ("sampled", [5], 0),
            ("env", [30, 31], -1),
            ("sampled", [6, 6], 0),
            ("env", [30, 31], -1),
            ("sampled", [7], 0),
        ]
        assert [s.logprobs.tolist() for s in found.segments if s.source == "sampled"] == [
            completion([5], base=-1).logprobs.tolist(),
            completion([6, 6], base=-2).logprobs.tolist(),
            completion([7], base=-3).logprobs.tolist(),
        ]
        assert all(s.logprobs is None for s in found.segments if s.source != "sampled")

    asyncio.run(main())


def test_a_completion_of_several_versions_is_one_segment_per_version():
    record = manager((PROMPT, completion([5, 6, 7, 8, 9], spans=((3, 0, 2), (4, 2, 4), (6, 4, 5)))))
    found = check_output(output([5, 6, 7, 8, 9], [1] * 5), record, 50)
    assert shape(found.segments[1:]) == [("sampled", [5, 6], 3), ("sampled", [7, 8], 4), ("sampled", [9], 6)]
    assert (
        np.concatenate([s.logprobs for s in found.segments[1:]]).tolist()
        == record.record[0].completion.logprobs.tolist()
    )


def test_media_and_side_channels_follow_the_tokens() -> None:
    """An untouched answer, and one that was cut, masked in part and continued: each token keeps its own values."""
    routed = {"experts": np.arange(10).reshape(5, 2)}
    first = replace(completion([5, 6, 7, 8, 9], spans=((3, 0, 2), (4, 2, 5))), side=routed)
    second = replace(completion([11]), side={"experts": np.array([[70, 71]])})
    for calls, loop, expected in (
        ([(PROMPT, first)], output([5, 6, 7, 8, 9], [1] * 5), [[0, 2], [4, 6, 8]]),
        (
            [(PROMPT, first), ([*PROMPT, 5, 6, 7, 30], second)],
            output([5, 6, 7, 30, 11], [1, 0, 1, 0, 1]),
            [[0], None, [4], None, [70]],
        ),
    ):
        made = manager(*calls)
        made.media = (Medium("ab12", 0, 1), Medium("cd34", 1, 1))
        made.record = [replace(call, media=made.media) for call in made.record]
        prompt, *rest = check_output(loop, made, 50).segments
        assert prompt.media == made.media and not any(s.media for s in rest)
        assert [s.side["experts"][:, 0].tolist() if s.side else None for s in rest] == expected


def test_the_engine_is_told_adapter_media_and_prefix_key() -> None:
    class Listening(Scripted):
        async def generate(self, request):
            self.inputs = request.prefix_key, request.parameters, request.media
            return await super().generate(request)

    engine = Listening([5])
    given = {"prefix_key": "g", "parameters": "math", "media": (Medium("ab12", 0, 1),)}
    server = ServerManager(engine, SAMPLING, seed_parts=("s",), **given)
    asyncio.run(server.generate("r", prompt_ids=PROMPT, sampling_params={}))
    assert engine.inputs == ("g", "math", given["media"])


@each(
    "kept, spans", [(4, [([5, 6], 3), ([7, 8], 4)]), (3, [([5, 6], 3), ([7], 4)]), (2, [([5, 6], 3)]), (1, [([5], 3)])]
)
def test_a_response_cut_by_the_loop_is_cut_in_every_channel(kept, spans):
    record = manager((PROMPT, completion([5, 6, 7, 8, 9], spans=((3, 0, 2), (4, 2, 5)))))
    found = check_output(output([5, 6, 7, 8, 9][:kept], [1] * kept), record, 50)
    assert [(s.ids.tolist(), s.version) for s in found.segments[1:]] == spans
    assert found.stop_reason == "stop", "the end of the completion is not in it"


def test_a_cut_completion_may_be_followed_by_the_tool_or_by_the_next_completion():
    first, second = completion([5, 6, 7], base=-1), completion([8, 9], base=-2)
    record = manager((PROMPT, first), ([*PROMPT, 5, 6], second))
    found = check_output(output([5, 6, 8, 9], [1, 1, 1, 1]), record, 50)
    assert shape(found.segments[1:]) == [("sampled", [5, 6], 0), ("sampled", [8, 9], 0)]
    assert found.segments[2].logprobs.tolist() == second.logprobs.tolist()
    record = manager((PROMPT, first), ([*PROMPT, 5, 6, 30], second))
    assert shape(check_output(output([5, 6, 30, 8, 9], [1, 1, 0, 1, 1]), record, 50).segments[1:]) == [
        ("sampled", [5, 6], 0),
        ("env", [30], -1),
        ("sampled", [8, 9], 0),
    ]


@pytest.mark.parametrize("kept", [0, 1])
def test_of_two_answers_to_one_question_the_one_that_was_returned_counts(kept):
    """Best of two: [5] is a beginning of [5, 6, 7], the loop may return either; a greedy match takes the wrong one."""
    answers = [completion([5], base=-1, reason="length"), completion([5, 6, 7], base=-2)]
    record = manager((PROMPT, answers[0]), (PROMPT, answers[1]))
    ids = answers[kept].ids.tolist()
    found = check_output(output(ids, [1] * len(ids)), record, 50)
    assert shape(found.segments[1:]) == [("sampled", ids, 0)]
    if kept == 1:
        assert found.segments[1].logprobs.tolist() == answers[1].logprobs.tolist() and found.stop_reason == "eos"


def test_the_same_words_after_another_prompt_are_not_taken_for_these():
    """A turn that was thrown away sampled the same token from another context: its log-prob is not this one's."""
    record = manager((PROMPT, completion([5], base=-9)), ([*PROMPT, 40], completion([5], base=-1)))
    found = check_output(output([40, 5], [0, 1]), record, 50)
    assert found.segments[2].logprobs.tolist() == [-1]


def test_a_loop_may_take_back_tokens_by_mask_zero():
    record = manager((PROMPT, completion([5, 6, 7, 8])))
    found = check_output(output([5, 6, 7, 8], [1, 0, 0, 1]), record, 50)
    assert shape(found.segments[1:]) == [("sampled", [5], 0), ("env", [6, 7], -1), ("sampled", [8], 0)]
    assert found.segments[3].logprobs.tolist() == record.record[0].completion.logprobs[3:].tolist()


@each(
    "response, mask, says",
    [
        ([5, 6, 7, 9], [1, 1, 1, 1], "1 tokens with mask 1, the first at response position 3"),
        ([4, 5, 6, 7], [1, 1, 1, 1], "4 tokens with mask 1, the first at response position 0"),
        ([30, 5, 6, 7], [0, 1, 1, 1], "3 tokens with mask 1, the first at response position 1"),
        ([5, 6, 8], [1, 1, 1], "1 tokens with mask 1, the first at response position 2"),
        ([7, 6, 5], [1, 1, 1], "3 tokens"),
    ],
)
def test_an_invented_token_is_refused(response, mask, says):
    with pytest.raises(ValueError, match=says):
        check_output(output(response, mask), manager((PROMPT, completion([5, 6, 7]))), 50)


def test_a_rewritten_history_is_refused():
    """Sampled after other tokens than the ones that would be trained on: token 5 forgotten, or changed in place."""
    for seen in ([6, 30], [9, 6, 30]):
        record = manager((PROMPT, completion([5, 6])), ([*PROMPT, *seen], completion([8])))
        with pytest.raises(
            ValueError, match=r"1 tokens with mask 1, the first at response position 3.*or it rewrote what came before"
        ):
            check_output(output([5, 6, 30, 8], [1, 1, 0, 1]), record, 50)
    with pytest.raises(ValueError, match="first at response position 0"):
        check_output(output([5, 6], [1, 1], prompt=[1, 2]), manager((PROMPT, completion([5, 6]))), 50)


def test_mask_and_ids_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="response_mask has 2 values for 3 response_ids"):
        check_output(output([5, 6, 7], [1, 1]), manager((PROMPT, completion([5, 6, 7]))), 50)


def test_an_output_without_sampled_tokens_has_none():
    assert check_output(output([], []), manager(), 50).stop_reason == "error"
    found = check_output(output([30], [0]), manager(), 50)
    assert shape(found.segments[1:]) == [("env", [30], -1)] and found.stop_reason == "error"


def test_in_a_long_loop_every_token_finds_its_own_call():
    """2000 completions of one token each, of three kinds, a tool token between."""
    calls, response, mask = [], [], []
    for i in range(2000):
        calls.append(([*PROMPT, *response], completion([5 + i % 3], base=-float(i))))
        response += [5 + i % 3, 30]
        mask += [1, 0]
    found = check_output(output(response, mask), manager(*calls), 10_000)
    sampled = [s for s in found.segments if s.source == "sampled"]
    assert [s.logprobs[0] for s in sampled] == [-float(i) for i in range(2000)]


# -- the budget --------------------------------------------------------------------------------------------------------


def test_no_call_goes_beyond_the_budget_of_the_trajectory():
    """12 tokens: 5, a tool's 2, then 5 are left; then a tool's 2, and no room."""

    async def main():
        engine = Scripted([5] * 5, [6] * 9, [7] * 9)
        sampling = Sampling(max_tokens=12)
        server = ServerManager(engine, sampling, seed_parts=("s",))
        out = await ToolLoop(None, server, None).run({}, prompt_ids=PROMPT)
        assert [s.max_tokens for _, _, s in engine.requests] == [12, 5]
        assert len(PROMPT) + 12 >= max(len(p) + s.max_tokens for _, p, s in engine.requests)
        found = check_output(out, server, sampling.max_tokens)
        assert found.stop_reason == "context_full" and sum(len(s.ids) for s in found.segments[1:]) == 12
        assert len(out.response_ids) == 14, "the tool's last words had no room"

    asyncio.run(main())


def test_what_an_environment_adds_to_the_prompt_leaves_less_room_for_the_answer():
    """12 tokens, of which 4 stand in the first prompt: 8 are left for what is sampled and for what tools write."""
    record = manager((PROMPT, completion([5])))
    record.sampling = replace(record.sampling, max_tokens=12)
    made = ServerManager(FakeEngine(), record.sampling, seed_parts=("s",))
    made.take(4)
    made.record = record.record
    found = check_output(output([5, *range(30, 50)], [1] + [0] * 20), made, 12)
    assert sum(len(s.ids) for s in found.segments[1:]) == 8 and found.stop_reason == "context_full"
    whole = check_output(output([5, *range(30, 37)], [1] + [0] * 7), made, 12)
    assert sum(len(s.ids) for s in whole.segments[1:]) == 8 and whole.stop_reason == "eos"


def test_a_call_without_room_samples_nothing_and_says_so():
    async def main():
        engine = Scripted([5] * 4)
        server = ServerManager(engine, Sampling(max_tokens=4), seed_parts=("s",))
        await server.generate("r", prompt_ids=PROMPT, sampling_params={})
        got = await server.generate("r", prompt_ids=[*PROMPT, 5, 5, 5, 5], sampling_params={})
        assert (got.token_ids, got.stop_reason, server.ended_by) == ([], "context_full", "context_full")
        assert engine.calls == 1 and len(server.record) == 1

    asyncio.run(main())


def test_a_tool_that_says_too_much_is_cut_and_the_trajectory_is_marked():
    record = manager((PROMPT, completion([5])))
    found = check_output(output([5, *range(30, 90)], [1] + [0] * 60), record, 10)
    assert shape(found.segments[1:]) == [("sampled", [5], 0), ("env", list(range(30, 39)), -1)]
    assert found.stop_reason == "context_full"


# -- sampling parameters and seeds -------------------------------------------------------------------------------------


def asked(params: dict[str, Any], sampling: Sampling = SAMPLING) -> Sampling:
    async def main():
        engine = Scripted([5])
        server = ServerManager(engine, sampling, seed_parts=("s",))
        await server.generate("r", prompt_ids=PROMPT, sampling_params=params)
        return engine.requests[0][2]

    return asyncio.run(main())


def test_what_a_loop_may_ask_for():
    assert asked({}).max_tokens == 50 and asked({}).stop == ("</answer>",)
    assert asked({"max_tokens": 9}).max_tokens == 9
    assert asked({"max_new_tokens": 9}).max_tokens == 9
    assert asked({"max_tokens": 500}).max_tokens == 50, "never more than the run's"
    assert asked({"stop": "</tool>"}).stop == ("</tool>",), "one string is one stop, not seven"
    assert asked({"stop": ["a", "b"], "stop_token_ids": [3]}).stop_token_ids == (3,)
    everything = asked({"max_tokens": None, "stop": None, "stop_token_ids": None, "temperature": None})
    assert (everything.max_tokens, everything.stop, everything.stop_token_ids) == (50, ("</answer>",), (7,))


def test_what_verl_hands_to_its_loops_is_accepted():
    given = sampling_params_of(SAMPLING)
    assert given == {
        "max_tokens": 50,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    assert asked(given).temperature == 0.8
    truncated = Sampling(max_tokens=5, temperature=0.5, top_p=0.9, top_k=20)
    assert asked(sampling_params_of(truncated), truncated).top_k == 20
    assert asked({"temperature": 0.8, "top_k": 0, "min_p": 0.0, "ignore_eos": False, "n": 1, "logprobs": 5}).top_k == 0


REFUSED_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.9}, r"cannot change temperature of a sample \(0.8 -> 0.9\); set rollout.temperature"),
    ({"temperature": 0}, "cannot change temperature"),
    ({"top_p": 0.5}, r"cannot change top_p of a sample \(1.0 -> 0.5\)"),
    ({"top_k": 5}, "cannot change top_k"),
    ({"min_p": 0.1}, "cannot change min_p"),
    ({"ignore_eos": True}, "cannot change ignore_eos"),
    ({"repetition_penalty": 1.1}, "repetition_penalty=1.1 is not supported"),
    ({"n": 4}, "n=4 is not supported"),
    ({"max_token": 4}, r"\['max_token'\] are unknown; known: \[.*'max_tokens'"),
    ({"max_tokens": 0}, "max_tokens=0"),
]


def test_what_a_loop_may_not_ask_for():
    """The trainer applies the run's distribution: another one would be trained on wrongly, and in silence."""

    def check(case):
        with pytest.raises(ValueError, match=case[1]):
            asked(case[0])

    check_each(REFUSED_PARAMS, check)


def test_images_are_refused_by_a_model_without_eyes():
    async def main():
        with pytest.raises(ValueError, match="image_data: this model takes no images; leave them out"):
            await manager().generate("r", prompt_ids=PROMPT, sampling_params={}, image_data=["a.png"])

    asyncio.run(main())


def test_seeds_differ_by_turn_attempt_index_and_among_calls_made_at_once():
    async def main() -> list[int]:
        engine = FakeEngine(delay_s=lambda seed: 0.001)
        for index in range(2):
            for attempt in range(2):
                server = ServerManager(engine, SAMPLING, seed_parts=(1, "train", 0, 0, "task", index, attempt))
                for _ in range(2):
                    await server.generate("r", prompt_ids=PROMPT, sampling_params={})
                await asyncio.gather(
                    *(server.generate(f"branch{b}", prompt_ids=PROMPT, sampling_params={}) for b in range(3))
                )
        return [s.seed for _, _, s in engine.requests]

    seeds = asyncio.run(main())
    assert len(seeds) == 20 == len(set(seeds))
    assert asyncio.run(main()) == seeds, "and they are a function of the place alone"


# -- branches ----------------------------------------------------------------------------------------------------------

FIRST, SECOND = completion([5, 6, 9], base=-1.0), completion([7, 8, 9], base=-2.0)


def test_a_token_of_two_branches_is_trained_in_the_first():
    """One branch is a sub-agent's view; another continues from the whole history, which it got as its prompt."""
    after = [*PROMPT, 5, 6, 9, 30]
    made = manager((PROMPT, FIRST), (after, SECOND))
    whole = output([5, 6, 9, 30, 7, 8, 9], [1, 1, 1, 0, 1, 1, 1])
    for branches in (
        [output([5, 6, 9], [1, 1, 1]), whole],
        [output([5, 6, 9], [1, 1, 1]), output([7, 8, 9], [1, 1, 1], prompt=after)],
    ):
        found = check_output(branches, made, 50)
        assert shape(found.segments[1:]) == [("sampled", [5, 6, 9], 0)] and found.discarded == 0
        (second,) = found.branches
        assert [i for s in second for i in s.ids.tolist()] == [*after, 7, 8, 9]
        assert shape([s for s in second if s.source == "sampled"]) == [("sampled", [7, 8, 9], 0)]
        np.testing.assert_array_equal(second[-1].logprobs, SECOND.logprobs)
    half = check_output([output([5, 6], [1, 1]), output([5, 6, 9], [1, 1, 1])], made, 50)
    assert shape(half.branches[0][1:]) == [("env", [5, 6], -1), ("sampled", [9], 0)] and half.discarded == 3
    late = check_output([output([5, 6, 9], [0, 0, 0]), output([5, 6, 9], [1, 1, 1])], made, 50)
    assert shape(late.segments[1:]) == [("env", [5, 6, 9], -1)] and shape(late.branches[0][1:]) == [
        ("sampled", [5, 6, 9], 0)
    ]


def test_equal_samples_of_one_prompt_are_trained_each_in_a_branch_of_its_own():
    """A vote: the tokens are the same, their log-probs and credits are those of each call."""
    calls = [completion([5, 6, 9], base=-float(k + 1)) for k in range(3)]
    made = manager(*((PROMPT, call) for call in calls))
    made.credits_turns = True
    for k in range(3):
        made.credit(float(k + 1), turn=k)
    found = check_output([output([5, 6, 9], [1, 1, 1])] * 3, made, 50)
    rows = (found.segments, *found.branches)
    assert [shape(row[1:]) for row in rows] == [[("sampled", [5, 6, 9], 0)]] * 3 and found.discarded == 0
    for row, call, reward in zip(rows, calls, (1.0, 2.0, 3.0)):
        np.testing.assert_array_equal(row[1].logprobs, call.logprobs)
        assert row[1].side["turn_reward"].tolist() == [0, 0, reward]
    more = check_output([output([5, 6], [1, 1]), *[output([5, 6, 9], [1, 1, 1])] * 3], made, 50)
    assert [shape(row[1:]) for row in more.branches[:2]] == [[("sampled", [5, 6, 9], 0)]] * 2
    assert shape(more.branches[2][1:]) == [("env", [5, 6], -1), ("sampled", [9], 0)] and more.discarded == 0


def test_a_compacted_history_is_a_branch_and_what_no_branch_uses_is_counted():
    """The loop dropped its first answer, and generated again after a summary that it wrote itself."""
    made = manager((PROMPT, FIRST), ([1, 40, 41], SECOND))
    found = check_output([output([7, 8, 9], [1, 1, 1], prompt=[1, 40, 41])], made, 50)
    assert shape(found.segments) == [("prompt", [1, 40, 41], -1), ("sampled", [7, 8, 9], 0)] and found.discarded == 3
    both = check_output([output([5, 6, 9], [1] * 3), output([7, 8, 9], [1] * 3, prompt=[1, 40, 41])], made, 50)
    assert both.discarded == 0 and len(both.branches) == 1


def test_a_turn_s_reward_stands_at_its_last_trained_token_once():
    after = [*PROMPT, 5, 6, 9, 30]

    def credited(branches: list[AgentLoopOutput], states: Sequence[Any] = (None, None), on: bool = True) -> Any:
        made = ServerManager(FakeEngine(), SAMPLING, seed_parts=("s",), credits_turns=on)
        made.record = manager((PROMPT, FIRST), (after, SECOND)).record
        made.credit(0.5, turn=0, state=states[0])
        made.credit(0.25, turn=0)
        made.credit(2.0, state=states[1])
        found = check_output(branches, made, 50)
        rows = (found.segments, *found.branches)
        return [[(s.ids.tolist(), s.side) for s in row if s.source == "sampled"] for row in rows]

    def said(rows: Any, name: str) -> Any:
        return [[side[name].tolist() for _, side in row] for row in rows]

    whole = output([5, 6, 9, 30, 7, 8, 9], [1, 1, 1, 0, 1, 1, 1])
    rows = credited([whole])
    assert said(rows, "turn") == [[[0, 0, 0], [1, 1, 1]]]
    assert said(rows, "turn_reward") == [[[0, 0, 0.75], [0, 0, 2]]]
    states = said(rows, "turn_state")[0]
    assert states[0] == [states[0][0]] * 3 and states[0][0] != states[1][0]
    # Two branches; a turn that was cut; one that continues in the second branch.
    assert said(credited([output([5, 6, 9], [1, 1, 1]), whole]), "turn_reward") == [[[0, 0, 0.75]], [[0, 0, 2]]]
    assert said(credited([output([5, 6, 30], [1, 1, 0])]), "turn_reward") == [[[0, 0.75]]]
    halves = credited([output([5, 6], [1, 1]), output([5, 6, 9], [1, 1, 1])])
    assert said(halves, "turn_reward") == [[[0, 0]], [[0.75]]]
    # The state is given by the loop, or is the text that the model saw: here the same after another history.
    named = said(credited([whole], states=("x", "x")), "turn_state")[0]
    assert named[0][0] == named[1][0] != states[0][0]
    other = ServerManager(FakeEngine(), SAMPLING, seed_parts=("s",), credits_turns=True)
    other.record = manager((PROMPT, SECOND), ([*PROMPT, 7, 8, 9, 30], FIRST)).record
    assert [other.turn_side(k)["turn_state"][0] for k in (0, 1)] == [states[0][0], states[1][0]]
    # A history that was rendered again is compared as a whole.
    anew = ServerManager(FakeEngine(), SAMPLING, seed_parts=("s",), credits_turns=True)
    anew.record = manager((PROMPT, FIRST), ([*PROMPT, 5, 30], SECOND)).record
    again = ServerManager(FakeEngine(), SAMPLING, seed_parts=("s",), credits_turns=True)
    again.record = manager((PROMPT, FIRST), ([*PROMPT, 5, 31], SECOND)).record
    assert anew.turn_side(1)["turn_state"][0] != again.turn_side(1)["turn_state"][0]
    assert all(not side for row in credited([whole], on=False) for _, side in row), "nothing where nobody reads it"
    for reward, turn, wrong in ((float("nan"), 0, "finite"), (1.0, 7, "turn=7")):
        with pytest.raises(ValueError, match=wrong):
            other.credit(reward, turn=turn)


def test_what_a_reward_function_says_of_turns_adds_up_with_what_tools_said():
    after = [*PROMPT, 5, 6, 9, 30]

    def paid(branches: list[AgentLoopOutput], rewards: Sequence[float], on: bool = True) -> Any:
        made = ServerManager(FakeEngine(), SAMPLING, seed_parts=("s",), credits_turns=on)
        made.record = manager((PROMPT, FIRST), (after, SECOND), (PROMPT, SECOND)).record
        made.credit(0.5, turn=0)
        found = check_output(branches, made, 50)
        assert found.pay(rewards) == ""
        rows = (found.segments, *found.branches)
        return [[s.side["turn_reward"].tolist() for s in row if s.source == "sampled"] for row in rows if on]

    whole = output([5, 6, 9, 30, 7, 8, 9], [1, 1, 1, 0, 1, 1, 1])
    assert paid([whole], [0.25, -2, 9]) == [[[0, 0, 0.75], [0, 0, -2]]], "no row uses the third turn"
    assert paid([output([5, 6], [1, 1]), output([5, 6, 9], [1, 1, 1])], [1, 2, 3]) == [[[0, 0]], [[1.5]]]
    assert paid([whole], [1, 2, 3], on=False) == []
    one = ServerManager(FakeEngine(), SAMPLING, seed_parts=("s",), credits_turns=True)
    one.record = manager((PROMPT, FIRST)).record
    untouched = check_output(AgentLoopOutput(PROMPT, [5, 6, 9], [1, 1, 1]), one, 50)
    assert untouched.pay([4.0]) == "" and untouched.segments[1].side["turn_reward"].tolist() == [0, 0, 4]
    assert untouched.pay([4.0, 1.0]).startswith("turn_rewards has 2 values, and the model played 1 turns: give one")
    assert untouched.segments[1].side["turn_reward"].tolist() == [0, 0, 4], "a wrong list pays nobody"


BAD_BRANCHES: list[tuple[Any, str]] = [
    ([], "a list of nothing"),
    ([output([5], [1]), "done"], "AgentLoopOutput, str"),
    ([output([5], [1], reward_score=1.0), output([5, 6], [1, 1], reward_score=0.0)], "set it on the last branch"),
    ([output([5], [1]), output([30], [1])], "branch 2 of 2: 1 tokens with mask 1"),
]


@each("branches, said", BAD_BRANCHES)
def test_branches_that_cannot_be_trained_are_refused(branches, said):
    with pytest.raises(ValueError, match=said):
        check_output(branches, manager((PROMPT, FIRST)), 50)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_sampled_token_of_any_branches_is_trained_exactly_once(data):
    """Random trees of calls; each branch is the path to one of them, some cut short."""
    calls, paths = [], []
    for k in range(data.draw(st.integers(1, 5))):
        grown = data.draw(st.sampled_from([(PROMPT, []), *paths]))
        prompt = [*grown[0], *data.draw(st.lists(st.integers(30, 33), max_size=2))] if grown[1] else list(PROMPT)
        ids = data.draw(st.lists(st.integers(4, 6), min_size=1, max_size=4))
        calls.append((prompt, completion(ids, base=-float(k + 1))))
        paths.append(([*prompt, *ids], [*grown[1], k]))
    made = manager(*calls)
    chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=6))
    outputs = []
    for whole, _ in chosen:
        response = whole[len(PROMPT) :]
        outputs.append(output(response, [int(i < 30) for i in response]))
    found = check_output(outputs, made, 100)
    rows = (found.segments, *found.branches)
    assert [[i for s in row for i in s.ids.tolist()] for row in rows] == [whole for whole, _ in chosen]
    trained = [(len(before), i, round(float(p), 4)) for row in rows for before, i, p in _tokens(row)]
    assert len(set(trained)) == len(trained)
    assert len(trained) + found.discarded == sum(len(c.ids) for _, c in calls)


def _tokens(row: Any) -> list[tuple[list[int], int, float]]:
    out, before = [], []
    for s in row:
        for i, token in enumerate(s.ids.tolist()):
            if s.source == "sampled":
                out.append((list(before), token, s.logprobs[i]))
            before.append(token)
    return out


def test_calls_beyond_the_turns_sample_nothing():
    async def main():
        engine = Scripted([5], [6], [7])
        server = ServerManager(engine, SAMPLING, seed_parts=("s",), max_turns=2)
        for prompt in (PROMPT, [*PROMPT, 5]):
            await server.generate("r", prompt_ids=prompt, sampling_params={})
        got = await server.generate("r", prompt_ids=[*PROMPT, 5, 6], sampling_params={})
        assert (got.token_ids, got.stop_reason, engine.calls) == ([], "max_turns", 2)
        found = check_output(output([5, 6], [1, 1]), server, 50)
        assert found.stop_reason == "max_turns"

    asyncio.run(main())


class Renders(AgentLoopBase):
    """As verl's newest loops begin: from the row's messages."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = await self.apply_chat_template(kwargs["raw_prompt"], tools=kwargs.get("tools"))
        out = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
        return AgentLoopOutput(ids, out.token_ids, [1] * len(out.token_ids))


def test_a_loop_renders_messages_as_its_rows_are_rendered() -> None:
    from verl.chat import render_prompt
    from verl.chat.template import audit_template
    from verl.config.schema import Config
    from verl.models import tiny

    tokenizer, config = tiny.character_tokenizer("0123456789+=abc\n"), Config()
    loop = Renders(config, manager(), tokenizer)
    ask: list[dict[str, Any]] = [{"role": "user", "content": "1+1="}]
    ids = asyncio.run(loop.apply_chat_template(ask))
    assert ids == render_prompt(tokenizer, ask, {}, audit=audit_template(tokenizer, {})).tolist()
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
    assert asyncio.run(loop.apply_chat_template(np.array(parts))) == ids
    assert asyncio.run(loop.apply_chat_template(ask, remove_system_prompt=True)) == ids, "it writes none by itself"
    tokenizer.chat_template = "{% if messages[0].role != 'system' %}<|assistant|>abc<|end|>{% endif %}" + str(
        tokenizer.chat_template
    )
    whole = asyncio.run(Renders(config, manager(), tokenizer).apply_chat_template(ask))
    bare = asyncio.run(Renders(config, manager(), tokenizer).apply_chat_template(ask, remove_system_prompt=True))
    assert bare == ids and len(whole) == len(ids) + 5
    for media in ({"images": [1]}, {"videos": [1]}, {"audios": [1]}):
        with pytest.raises(ValueError, match="takes no images, videos or sounds"):
            asyncio.run(loop.apply_chat_template(ask, **media))
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="message of 'system'"):
        asyncio.run(loop.apply_chat_template([{"role": "system", "content": "abc"}, *ask]))
    assert asyncio.run(loop.process_vision_info(ask)) == {}
    with pytest.raises(ValueError, match="takes no images, videos or sounds"):
        asyncio.run(loop.process_vision_info([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]))
