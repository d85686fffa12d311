"""The inputs of a language model for batches with images: text embeddings, with the features of the vision tower in
place of the embeddings of placeholders.

The place of a feature is that of `MediaTokens`. Token ids are never compared with those of placeholders: a placeholder
that the policy sampled is text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.media_tokens import MediaTokens
from verl.models.families import ImageFamily
from verl.models.multimodal import with_pictures
from verl.models.pictures import Pictures


class Vision:
    """The vision part of a model, and the language model behind it. pictures: the content of the images of batches;
    None: batches have their content."""

    def __init__(self, model: Any, family: ImageFamily, pictures: Pictures | None = None) -> None:
        self._base, self._axes, self._config, self._pictures = model.base_model, family.axes, model.config, pictures
        self.language: Any = self._base.get_submodule(family.language)

    def filled(self, batch: Batch) -> Batch:
        """Return the batch of one pass with the content of its media, and positions [axes, T]."""
        if batch.media is None:
            one_axis = batch.positions.dim() == 1
            return replace(batch, positions=self.positions(batch.positions)) if one_axis else batch
        if batch.media.pictures:
            return batch
        if self._pictures is None:
            raise ValueError(f"a batch has {len(batch.media.references)} media, and this engine has no store of them")
        return with_pictures(batch, self._pictures.of(batch.media.references), self._config)

    def unread(self, tokens: int) -> MediaTokens:
        """Return the media of this many tokens of text, with an image that none of them reads: the tower runs, and all
        its weights get a gradient of 0."""
        if self._pictures is None:
            raise ValueError("other ranks have images in this pass, and this engine has no store of them")
        none = torch.full((tokens,), -1)
        blank = {"": self._pictures.blank()}
        return MediaTokens(references=("",), medium=none, feature=torch.zeros_like(none), pictures=blank)

    def positions(self, positions: Tensor) -> Tensor:
        """Return the positions of tokens on all axes, [axes, ..., T], from those of text, [..., T]."""
        return positions.expand(self._axes, *positions.shape)

    def padded(self, flat: Batch, place: Tensor) -> tuple[MediaTokens | None, Tensor]:
        """Return the media and the positions [axes, R, W] of padded rows. flat: the batch with one segment per row;
        place [R, W]: True where a token is, False at padding."""
        positions = torch.zeros((self._axes, *place.shape), dtype=torch.int64)
        positions[:, place] = flat.positions
        if flat.media is None:
            return None, positions
        medium, feature = torch.full(place.shape, -1), torch.zeros(place.shape, dtype=torch.int64)
        medium[place], feature[place] = flat.media.medium, flat.media.feature
        return replace(flat.media, medium=medium, feature=feature), positions

    def inputs(self, ids: Tensor, media: MediaTokens) -> dict[str, Tensor | list[Tensor]]:
        """Return the inputs of the language model for token ids [B, W] with the media of these tokens. Each image is
        encoded once, and gets the sum of the gradients of all its tokens."""
        device = ids.device
        features, deeper = self._encode(media, device)
        medium, feature = (x.view(ids.shape).to(device) for x in (media.medium, media.feature))
        here = medium >= 0
        lengths = torch.tensor([len(f) for f in features], device=device)
        first = lengths.cumsum(0) - lengths
        index = (first[medium.clamp(min=0)] + feature)[here]
        embeddings = self.language.get_input_embeddings()(ids)
        seen = torch.cat(features).index_select(0, index).to(embeddings.dtype)
        found: dict[str, Tensor | list[Tensor]] = {"inputs_embeds": embeddings.masked_scatter(here[..., None], seen)}
        if deeper:
            found["visual_pos_masks"] = here
            found["deepstack_visual_embeds"] = [states.index_select(0, index) for states in deeper]
        return found

    def _encode(self, media: MediaTokens, device: torch.device) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the features [n, H] of each image, and those that layers of the decoder add, of all images [N, H]."""
        pictures = [media.pictures[name] for name in media.references]
        patches = torch.cat([picture.patches for picture in pictures]).to(device)
        grid = torch.tensor([picture.grid for picture in pictures], device=device)
        out = self._base.get_image_features(patches, grid, return_dict=True)
        deeper = [torch.cat(states) for states in vars(out).get("deepstack_features") or ()]
        return out.pooler_output, deeper
