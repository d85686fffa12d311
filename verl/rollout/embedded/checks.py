"""The checks of requests and scores against an engine's vocabulary and context, before they run."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np

from verl.rollout.base import GenerateRequest, check_request, checked_ids
from verl.rollout.embedded.core import ReadsImages, Runner
from verl.types import Segment, as_ids


def reads_images(runner: Runner) -> bool:
    """Return True if prompts of the runner may have images."""
    return isinstance(runner, ReadsImages) and runner.reads_images


class InputChecks:
    """The checks against the vocabulary and the context of a runner. With `decodes` the engine can match stop
    strings."""

    def __init__(self, runner: Runner, *, decodes: bool) -> None:
        self._runner, self._decodes = runner, decodes
        self._in_vocabulary = b""  # the bytes of the ids that were checked last

    def request(self, request: GenerateRequest, running: Container[str]) -> GenerateRequest:
        """Return the request with its ids as int64. Raise ValueError for one that cannot run."""
        request = replace(request, prompt_ids=self._ids(request.id, request.prompt_ids))
        room = self._runner.max_context_tokens
        check_request(request, running, max_context_tokens=room, decodes=self._decodes)
        if request.media and isinstance(self._runner, ReadsImages):
            Segment(ids=request.prompt_ids, source="prompt", media=request.media)  # it checks the places
            self._runner.read_images(request.media)
        return request

    def scored(self, ids: np.ndarray, temperature: float, top: int) -> np.ndarray:
        """Return the ids [t] int64 of a sequence to score. Raise ValueError if it is too long or has other ids than
        those of the vocabulary, for a negative temperature, and for a `top` above the vocabulary."""
        ids = self._ids("score", ids)
        if len(ids) > self._runner.max_context_tokens:
            raise ValueError(f"score: {len(ids)} tokens exceed max_context_tokens={self._runner.max_context_tokens}")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: must be >= 0 (0 is greedy, scored at temperature 1)")
        if not 0 <= top <= self._runner.vocab_size:
            raise ValueError(f"{top} likeliest tokens: the vocabulary has {self._runner.vocab_size}")
        return ids

    def _ids(self, what: str, ids: np.ndarray) -> np.ndarray:
        ids = as_ids(ids)
        if (content := ids.tobytes()) != self._in_vocabulary or ids.ndim != 1:  # a group has one prompt
            ids = checked_ids(what, ids, self._runner.vocab_size)
            self._in_vocabulary = content
        return ids
