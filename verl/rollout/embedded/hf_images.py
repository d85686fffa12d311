"""Prompts with images in the hf engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from verl.batch import pack
from verl.models.families import family_of
from verl.models.pictures import Pictures
from verl.nn.vision import Vision
from verl.rollout.embedded.requests import ActiveRequest
from verl.types import Medium, Sample, Segment


def check_images(config: Any, pictures: Pictures, media: Sequence[Medium]) -> None:
    """Read the images of a prompt. Raise ValueError for one that cannot be read, or that has another number of tokens
    than its placeholders."""
    family = family_of(config)
    assert family is not None, "only a model that reads images takes some"
    found = pictures.of(m.reference for m in media)
    for m in media:
        if (tokens := family.tokens(config, found[m.reference].grid)) != m.tokens:
            raise ValueError(f"image {m.reference} has {tokens} tokens by its size, and {m.tokens} placeholders")


def image_prompts(
    vision: Vision, requests: Sequence[ActiveRequest], ids: Tensor, place: Tensor
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the inputs of the language model for left-padded prompts, ids [n, W] on its device, their positions
    [axes, n, W], and for each prompt [n] by how much the positions of its answer differ from the number of tokens
    before them. place [n, W] bool, on the host: where tokens are. An image of several prompts is encoded once."""
    rows = []
    for i, request in enumerate(requests):
        segment = Segment(ids=request.context(), source="prompt", media=request.given.media)
        name = str(i)
        rows.append(Sample(sample_id=name, trajectory_id=name, group_id=name, purpose="eval", segments=(segment,)))
    media, positions = vision.padded(vision.filled(pack(rows, share_prefix=False)), place)
    inputs = {"input_ids": ids} if media is None else vision.inputs(ids, media)
    shift = positions[..., -1].amax(0) + 1 - place.sum(-1)
    return inputs, positions.to(ids.device), shift.to(ids.device)
