"""The check of what loops return: a trajectory is made of the recorded tokens, never of a loop's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl.agent_loop.base import AgentLoopOutput, LoopOutput, ServerManager, outputs_of
from verl.driver.routes import with_routes
from verl.recorded import RecordedCall
from verl.rollout.base import Completion
from verl.types import TEMPLATE, Medium, Segment, StopReason, as_ids


@dataclass(frozen=True, slots=True)
class CheckedOutput:
    """The output of a loop as a trajectory. The ids are those that the loop returned; everything else is from the
    record.

    branches: the rows after the first
    discarded: the number of sampled tokens that are trained in no row
    paid: for each turn, a view [1] of the place of its reward in its side channel; [0] if none of its tokens is trained
    or the algorithm reads no rewards of turns
    """

    segments: tuple[Segment, ...]
    stop_reason: StopReason
    branches: tuple[tuple[Segment, ...], ...] = ()
    discarded: int = 0
    paid: tuple[np.ndarray, ...] = ()

    def pay(self, rewards: Sequence[float]) -> str:
        """Add the reward function's values to the turns' rewards from their tools. Return an error text if there is not
        one value per turn."""
        if len(rewards) != len(self.paid):
            each = "give one for each of extra_info['turn_texts']"
            return f"turn_rewards has {len(rewards)} values, and the model played {len(self.paid)} turns: {each}"
        for place, reward in zip(self.paid, rewards):
            place += reward
        return ""


def check_output(output: LoopOutput, manager: ServerManager, max_tokens: int) -> CheckedOutput:
    """Return the trajectory of a loop's output, with each branch cut where the budget of `max_tokens` after the first
    prompt ends. Raise ValueError if a mask=1 token was not sampled by the server manager after exactly the tokens that
    precede it."""
    record = manager.record
    if isinstance(output, AgentLoopOutput) and _is_untouched(output, manager, max_tokens):
        call, turns = record[0], [manager.turn_side(0)]
        prompt = Segment(ids=call.prompt_ids, source="prompt", media=call.media)
        reason = manager.ended_by or call.completion.stop_reason
        n = len(call.completion.ids)
        paid = _place_rewards(manager, turns, [np.ones(n, np.bool_)])
        made = with_routes((prompt, *_sampled(call.completion, turns[0], 0, n)), record)
        return CheckedOutput(made, reason, paid=paid)
    outputs = outputs_of(output)
    turns = [manager.turn_side(k) for k in range(len(record))]
    trained = [np.zeros(len(call.completion.ids), np.bool_) for call in record]
    rows = []
    for k, one in enumerate(outputs):
        try:
            row, reason, cut = _row(one, manager, max_tokens, trained, turns)
        except ValueError as e:
            raise ValueError(f"branch {k + 1} of {len(outputs)}: {e}" if len(outputs) > 1 else str(e)) from None
        rows.append(row)
    reason = manager.ended_by or ("context_full" if cut else reason)
    paid = _place_rewards(manager, turns, trained)
    return CheckedOutput(rows[0], reason, tuple(rows[1:]), sum(int((~own).sum()) for own in trained), paid)


def _place_rewards(
    manager: ServerManager, turns: Sequence[Mapping[str, np.ndarray]], trained: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Place each turn's reward at the last of its tokens that is trained, wherever the loop cut the turn, and return
    views of these places. The segments hold views too."""
    if not manager.credits_turns:  # the turns have no rewards
        return (np.zeros(0, np.float32),) * len(trained)
    places = []
    for k, own in enumerate(trained):
        end = int(np.flatnonzero(own)[-1]) + 1 if own.any() else 0
        place = turns[k]["turn_reward"][:end][-1:]
        place += manager.turn_reward(k)
        places.append(place)
    return tuple(places)


def _row(
    output: AgentLoopOutput,
    manager: ServerManager,
    max_tokens: int,
    trained: Sequence[np.ndarray],
    turns: Sequence[Mapping[str, np.ndarray]],
) -> tuple[tuple[Segment, ...], StopReason, bool]:
    """Return (segments, the reason why the last call of the row ended, True if the budget cut the row). `trained` marks
    for each call [t] bool the tokens that are part of an earlier row; the tokens of this row are marked too."""
    prompt_ids, ids = as_ids(output.prompt_ids), as_ids(output.response_ids)
    mask = np.asarray(output.response_mask, bool)
    if len(ids) != len(mask):
        raise ValueError(f"response_mask has {len(mask)} values for {len(ids)} response_ids")
    first = len(manager.record[0].prompt_ids) if manager.record else len(prompt_ids)
    room = max(0, first + max_tokens - manager.taken - len(prompt_ids))
    media = _media_of(output, manager, trained)
    room -= sum(len(prompt_ids) + room - m.start for m in media if m.start < len(prompt_ids) + room < m.end)
    cut = len(ids) > room
    ids, mask = ids[:room], mask[:room]
    written = np.ones(len(ids), bool) if output.written is None else np.asarray(output.written, bool)[:room]
    if len(written) != len(ids):
        raise ValueError(f"written has {len(written)} values for {len(ids)} response_ids")
    owner = np.where(mask, _owners(prompt_ids, ids, media, manager.record, trained), -1)
    if len(invented := np.flatnonzero(mask & (owner < 0))):
        raise ValueError(
            f"{len(invented)} tokens with mask 1, the first at response position {invented[0]}, were not sampled by "
            "the model after what precedes them: the loop changed or invented them, or it rewrote what came before; "
            "give them mask 0"
        )
    segments = [Segment(ids=prompt_ids, source="prompt")]
    reason: StopReason = "error"
    for a, b in _runs(owner):
        if owner[a] < 0:
            for c, d in _runs(written[a:b]):
                version = -1 if written[a + c] else TEMPLATE
                segments.append(Segment(ids=ids[a + c : a + d], source="env", version=version))
            continue
        call, known = manager.record[owner[a]], trained[owner[a]]
        start = len(call.prompt_ids) - len(prompt_ids)
        for c, d in _runs(known[a - start : b - start]):
            if known[a - start + c]:
                segments.append(Segment(ids=ids[a + c : a + d], source="env"))
            else:
                segments.extend(_sampled(call.completion, turns[owner[a]], a - start + c, a - start + d))
        known[a - start : b - start] = True
        reason = call.completion.stop_reason if b - start == len(call.completion.ids) else "stop"  # cut by the loop
    return with_routes(_with_media(segments, media), manager.record), reason, cut


def _media_of(
    output: AgentLoopOutput, manager: ServerManager, trained: Sequence[np.ndarray] = ()
) -> tuple[Medium, ...]:
    """Return the images of a row: the loop's own, those of the longest call with which it begins, or of the task. If
    such calls differ in images alone, they are those with which most tokens of the row were sampled, and the fewest of
    them trained in an earlier row. trained: as in `_row`; a record of one call needs none"""
    if output.media is not None:
        return tuple(output.media)
    if all(call.media == manager.media for call in manager.record):
        return manager.media
    prompt, ids = as_ids(output.prompt_ids), as_ids(output.response_ids)
    whole, record = np.concatenate([prompt, ids]), manager.record
    fitting = [call for call in record if np.array_equal(whole[: len(call.prompt_ids)], call.prompt_ids)]
    longest = max((len(call.prompt_ids) for call in fitting), default=0)
    found = [*dict.fromkeys(call.media for call in fitting if len(call.prompt_ids) == longest)]
    if len(found) < 2:
        return found[0] if found else manager.media

    def sampled_and_new(media: tuple[Medium, ...]) -> tuple[int, int]:
        owner = np.where(np.asarray(output.response_mask, bool), _owners(prompt, ids, media, record, trained), -1)
        old = 0
        for a, b in _runs(owner):
            start = len(record[owner[a]].prompt_ids) - len(prompt)
            old += int(trained[owner[a]][a - start : b - start].sum()) if owner[a] >= 0 else 0
        return int((owner >= 0).sum()), -old

    return max(found, key=sampled_and_new)


def _with_media(segments: Sequence[Segment], media: Sequence[Medium]) -> tuple[Segment, ...]:
    """Return the segments of a row with the media at these places in the row. Media behind its end were cut off. Raise
    ValueError for one that is not whole in a segment of a prompt or an environment."""
    if not media:
        return tuple(segments)
    placed, start = [], 0
    for segment in segments:
        end = start + len(segment.ids)
        own = tuple(m._replace(start=m.start - start) for m in media if start <= m.start < end)
        placed.append(replace(segment, media=own) if own else segment)
        start = end
    return tuple(placed)


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, end) of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)] if len(values) else [0]
    return list(zip(edges, edges[1:]))


def _is_untouched(output: AgentLoopOutput, manager: ServerManager, max_tokens: int) -> bool:
    """Return True if the loop returned its only call unchanged, so that no search is needed."""
    ids, mask, prompt_ids = output.response_ids, output.response_mask, output.prompt_ids
    if not (isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask) <= max_tokens and all(mask)):
        return False
    if len(manager.record) != 1:
        return False
    call = manager.record[0]
    same_prompt = prompt_ids is call.prompt_ids or np.array_equal(prompt_ids, call.prompt_ids)
    return ids == call.token_ids and same_prompt and _media_of(output, manager) == call.media


def _owners(
    prompt: np.ndarray,
    ids: np.ndarray,
    media: Sequence[Medium],
    record: Sequence[RecordedCall],
    trained: Sequence[np.ndarray],
) -> np.ndarray:
    """Return [R] the call that sampled each response token, or -1. A call's tokens are placed where its prompt ends, if
    the preceding tokens and images are equal to it. The loop may have cut or dropped them. If two calls fit one place,
    the longer match is kept; of equal matches that end the row, the call with fewer trained tokens, because each of
    several equal samples may be a branch."""
    whole = np.concatenate([prompt, ids])
    owner = np.full(len(ids), -1, np.int64)
    agreed: dict[int, tuple[int, int]] = {}
    for k, call in enumerate(record):
        at = len(call.prompt_ids) - len(prompt)
        if at < 0 or not np.array_equal(whole[: len(call.prompt_ids)], call.prompt_ids):
            continue
        if tuple(m for m in media if m.start < len(call.prompt_ids)) != call.media:
            continue
        sampled = call.completion.ids[: len(ids) - at]
        differs = np.flatnonzero(ids[at : at + len(sampled)] != sampled)
        n = int(differs[0]) if len(differs) else len(sampled)
        known = int(trained[k][:n].sum()) if n == len(call.completion.ids) == len(ids) - at else n
        if (found := (n, -known)) > agreed.get(at, (0, 0)):
            agreed[at] = found
            owner[at : at + n] = k
    return owner


def _sampled(c: Completion, turn: Mapping[str, np.ndarray], first: int, end: int) -> list[Segment]:
    """Return tokens first:end of a completion, one segment per weight version, with the side channels of call and
    turn."""
    segments = []
    for version, start, stop in c.spans:
        a, b = max(start, first), min(stop, end)
        if a < b:
            side = {name: channel[a:b] for name, channel in (*c.side.items(), *turn.items())}
            logprobs = c.logprobs[a:b]
            segments.append(Segment(ids=c.ids[a:b], source="sampled", logprobs=logprobs, version=version, side=side))
    return segments
