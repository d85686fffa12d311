"""The checks of requests and scores against an engine's vocabulary and context, before they run."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np

from verl.models.families import family_of
from verl.rollout.base import GenerateRequest, Media, RolloutContext, check_request, checked_ids
from verl.rollout.embedded.core import Runner
from verl.rollout.embedded.images import ImageReader, RequestImages
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.embedded.sampler import never_sampled
from verl.types import as_ids


class InputChecks:
    """The checks against the vocabulary, the context and the images of a runner."""

    def __init__(self, runner: Runner, context: RolloutContext) -> None:
        self._runner, self._decodes = runner, context.decode is not None
        self.images, self._banned = ImageReader(context), never_sampled(context)
        family = family_of(context.hf_config)
        self._unsampled = family.unsampled_rows if family else 0
        self._in_vocabulary = b""  # the bytes of the ids that were checked last

    def request(self, request: GenerateRequest, running: Container[str]) -> ActiveRequest:
        """Return the request with its ids as int64 and its images. Raise ValueError for one that cannot run."""
        request = replace(request, prompt_ids=self._ids(request.id, request.prompt_ids))
        room = self._runner.max_context_tokens
        check_request(request, running, max_context_tokens=room, decodes=self._decodes)
        if (banned := request.sampling.banned) not in ((), self._banned):
            raise ValueError(f"{request.id}: banned={banned}: this model can ban the ids {self._banned}, or none")
        return ActiveRequest(request, images=self.images.of(request.id, request.prompt_ids, request.media))

    def scored(
        self, ids: np.ndarray, temperature: float, top: int, media: Media
    ) -> tuple[np.ndarray, RequestImages | None]:
        """Return the ids [t] int64 of a sequence to score, and its images. Raise ValueError if it is too long or has
        other ids than those of the vocabulary, for a negative temperature, for a `top` above the vocabulary, and for
        images that do not fit the ids."""
        ids = self._ids("score", ids)
        if len(ids) > self._runner.max_context_tokens:
            raise ValueError(f"score: {len(ids)} tokens exceed max_context_tokens={self._runner.max_context_tokens}")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: must be >= 0 (0 is greedy, scored at temperature 1)")
        if not 0 <= top <= self._runner.vocab_size:
            raise ValueError(f"{top} likeliest tokens: the vocabulary has {self._runner.vocab_size}")
        return ids, self.images.of("score", ids, media)

    def _ids(self, what: str, ids: np.ndarray) -> np.ndarray:
        ids = as_ids(ids)
        if (content := ids.tobytes()) != self._in_vocabulary or ids.ndim != 1:  # a group has one prompt
            ids = checked_ids(what, ids, self._runner.vocab_size + self._unsampled)
            self._in_vocabulary = content
        return ids
