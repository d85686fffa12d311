"""Guesses of what a row says next, from texts that already exist: its own, its siblings' and earlier answers to its prompt.

The engine computes the guessed tokens together with the row's last one, and keeps those that its own draws confirm. A draw
is a function of (seed, position, logits) alone, so guessing changes no token: only how many of them a step yields.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from verl.rollout.native.request import Rows

MATCH_TOKENS = 3  # that must agree before what followed them is a guess
KEPT_ANSWERS = 8  # per prompt, newest first: a group's siblings, and the last epoch's
KEPT_TOKENS = 2**20  # of all answers
PATIENCE = 0.2  # confirmed share of a row's guesses below which it is asked rarely
REST_STEPS = 8


class Drafter:
    def __init__(self, max_tokens: int, max_rows: int) -> None:
        self.max_tokens = max_tokens
        self.drafted = self.accepted = 0
        self._share = np.ones(max_rows)  # of a row's guesses that were confirmed, the recent ones more
        self._rest = np.zeros(max_rows, np.int64)  # steps before the row is asked again
        self._answers: OrderedDict[bytes, list[np.ndarray]] = OrderedDict()  # by the bytes of the prompt
        self._tokens = 0

    def propose(self, rows: Rows, spare: int) -> list[np.ndarray] | None:
        """Guesses for each of rows 0..n-1, `spare` tokens in all at most; None if there are none."""
        each = min(self.max_tokens, spare // rows.n)
        if each < 1:
            return None
        guesses = [self._guess(rows, row, each) for row in range(rows.n)]
        return guesses if any(map(len, guesses)) else None

    def learn(self, row: int, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self._share[row] = 0.7 * self._share[row] + 0.3 * accepted / drafted
            self._rest[row] = REST_STEPS if self._share[row] < PATIENCE else 0

    def stats(self) -> dict[str, int]:
        return {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}

    def moved(self, sources: np.ndarray, holes: np.ndarray, kept: int) -> None:
        """Rows `sources` became rows `holes`; from `kept` on are new ones."""
        self._share[holes], self._rest[holes] = self._share[sources], self._rest[sources]
        self._share[kept:], self._rest[kept:] = 1.0, 0

    def keep(self, prompt_ids: np.ndarray, answer: np.ndarray) -> None:
        if len(answer) <= MATCH_TOKENS:
            return
        key = prompt_ids.tobytes()
        answers = self._answers.setdefault(key, [])
        self._answers.move_to_end(key)
        answers.insert(0, answer)
        self._tokens += len(answer)
        if len(answers) > KEPT_ANSWERS:
            self._tokens -= len(answers.pop())
        while self._tokens > KEPT_TOKENS:
            self._tokens -= sum(map(len, self._answers.popitem(last=False)[1]))

    def _guess(self, rows: Rows, row: int, tokens: int) -> np.ndarray:
        # a draw confirms a guess only where it may still add a token after it
        tokens = min(tokens, int(rows.limit[row] - rows.count[row]) - 1)
        if tokens < 1 or self._rest[row] > 0:
            self._rest[row] -= 1
            return np.zeros(0, np.int64)
        own = rows.context(row)
        prompt = rows.requests[row].prompt_ids
        siblings = (
            rows.answer(i) for i in range(rows.n) if i != row and np.array_equal(rows.requests[i].prompt_ids, prompt)
        )
        for text in (own, *siblings, *self._answers.get(prompt.tobytes(), ())):
            guess = following(text, own[-MATCH_TOKENS:], tokens)
            if len(guess):
                return guess
        return np.zeros(0, np.int64)


def following(text: np.ndarray, tail: np.ndarray, tokens: int) -> np.ndarray:
    """What came after the last place in `text` [T] where `tail` [m] stands and something follows; up to `tokens` ids."""
    starts = len(text) - len(tail)  # the last possible start has nothing after it
    if starts < 1:
        return text[:0]
    agrees = np.ones(starts, bool)
    for i, token in enumerate(tail):
        agrees &= text[i : i + starts] == token
    found = np.flatnonzero(agrees)
    if not len(found):
        return text[:0]
    start = int(found[-1]) + len(tail)
    return text[start : start + tokens]
