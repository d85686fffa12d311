"""Batches with images for a model: the content of the images, and the positions of all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch
from verl.errors import Refused
from verl.media_tokens import MediaTokens, Picture
from verl.models.families import FAMILIES, ImageFamily, family_of, positions_from
from verl.types import Medium


def with_pictures(batch: Batch, pictures: Mapping[str, Picture], config: Any) -> Batch:
    """Return the batch with the content of its media, and with the positions [axes, T] of the model's family, or [T] of
    one axis. Raise
    ValueError for media of a model that reads none, and for an image with another number of tokens than its
    placeholders."""
    family = family_of(config)
    if batch.media is None:
        return batch if family is None else replace(batch, positions=on_axes(batch.positions, family.axes))
    if family is None:
        known = ", ".join(FAMILIES)
        raise Refused(f"model_type {config.model_type!r} has no row for images; those with one are {known}")
    media = batch.media.with_pictures(pictures)
    positions = batch.positions
    if family.positions is not None:
        places = {
            n: found
            for n, p in media.pictures.items()
            if (found := family.places(config, p.grid, p.clip, sound=p.sound))
        }
        positions = _positions(batch, media, places, family.axes)
    return replace(batch, media=_features(batch, media, family, config), positions=positions)


def _features(batch: Batch, media: MediaTokens, family: ImageFamily, config: Any) -> MediaTokens:
    """Return the media with their features alone: other tokens of an image are text. Raise ValueError for an image with
    another number of features than tokens for them."""
    medium, starts = media.medium.numpy(), ((media.medium >= 0) & (media.feature == 0)).numpy()
    here = (medium >= 0) & np.isin(batch.ids.numpy(), family.replaced_ids(config))
    number = np.cumsum(starts) - 1  # of each token's image among all places of images
    found = np.bincount(number[here], minlength=int(starts.sum()))
    seen = [media.pictures[name] for name in media.references]
    counts = [family.features(config, picture.grid, sound=picture.sound) for picture in seen]
    for name, tokens in zip(medium[starts], found):
        if tokens != counts[name]:
            reference = media.references[name]
            raise ValueError(f"image {reference} has {counts[name]} features by its size, and {tokens} tokens for them")
    first = np.cumsum(found) - found
    feature = np.where(here, np.cumsum(here) - 1 - first[number], 0)
    return replace(media, medium=torch.from_numpy(np.where(here, medium, -1)), feature=torch.from_numpy(feature))


def on_axes(positions: Tensor, axes: int) -> Tensor:
    """Return the positions of text, [..., T], on all axes, [axes, ..., T]; of one axis as they are."""
    return positions.expand(axes, *positions.shape) if axes > 1 else positions


def _positions(batch: Batch, media: MediaTokens, places: Mapping[str, tuple[np.ndarray, int]], axes: int) -> Tensor:
    """Return the positions [axes, T] of all tokens. Text counts on from where the parent of its segment ends; an image
    has its own positions from there."""
    medium, feature = media.medium.numpy(), media.feature.numpy()
    out = np.zeros((axes, batch.num_tokens), np.int64)
    after = np.zeros(len(batch.parent), np.int64)  # the position of the token after each segment
    for s, parent in enumerate(batch.parent):
        start, end = int(batch.seg_start[s]), int(batch.seg_start[s + 1])
        now = int(after[parent]) if parent >= 0 else 0
        kind = medium[start:end]
        begins = (np.diff(kind, prepend=-2) != 0) | ((kind >= 0) & (feature[start:end] == 0))
        edges = [*np.flatnonzero(begins).tolist(), end - start]
        own = [Medium(media.references[kind[a]], a, b - a) for a, b in zip(edges, edges[1:]) if kind[a] >= 0]
        out[:, start:end], after[s] = positions_from(now, end - start, own, places, axes)
    return torch.from_numpy(out)


def layer_embeddings(language: Any, ids: Tensor, here: Tensor | None = None) -> dict[str, Tensor]:
    """Return the embeddings of token ids [R, W] that each layer of a language model has of its own, if it has any: with
    other embeddings than those of the ids as its input it cannot find them. here [R, W]: where features are, which
    have those of padding; None: nowhere"""
    if not vars(language.config).get("hidden_size_per_layer_input"):
        return {}
    text = ids if here is None else ids.masked_fill(here, language.config.pad_token_id)
    return {"per_layer_inputs": language.get_per_layer_inputs(text)}


def mutual_masks(text_config: Any, embeddings: Tensor, images: Tensor, real: Tensor | None = None) -> dict[str, Any]:
    """Return the masks of the kinds of layers for rows of embeddings [R, W, H] in which the tokens of an image attend
    to each other. images [R, W]: the number of each token's image within its row, -1 of text · real [R, W]: 0 at
    padding; None: there is none."""
    if text_config.model_type == "gemma4_text":  # in layers with a sliding window alone
        from transformers.models.gemma4.modeling_gemma4 import create_masks_for_vision_model
    else:
        from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    given: dict[str, Any] = {"attention_mask": real, "past_key_values": None, "position_ids": None}
    return create_masks_for_vision_model(text_config, embeddings, **given, block_sequence_ids=images)
