"""The inputs of a language model for batches with images: text embeddings, with the features of the vision tower in
place of the embeddings of placeholders.

The place of a feature is that of `MediaTokens`. Token ids are never compared with those of placeholders: a placeholder
that the policy sampled is text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.accel.transfer import to_device
from verl.batch import Batch
from verl.errors import Refused
from verl.media_tokens import MediaTokens, Picture
from verl.models.crossed import CrossedImage, crossed_rows
from verl.models.encode import encode_pictures
from verl.models.families import LATE_IMAGE, ImageFamily
from verl.models.multimodal import layer_embeddings, mutual_masks, on_axes, with_pictures
from verl.models.pictures import Pictures
from verl.nn.kept_features import KeptFeatures


class Vision:
    """The vision part of a model, and the language model behind it. pictures: the content of the images of batches;
    None: batches have their content · keeps: features are kept across passes if no weight that makes them is
    trained."""

    def __init__(
        self, model: Any, family: ImageFamily, pictures: Pictures | None = None, *, keeps: bool = False
    ) -> None:
        self._base, self._family, self._config, self._pictures = model.base_model, family, model.config, pictures
        self.mutual = family.attends(vars(model.config.get_text_config()))
        self.crossed, self.one_axis = family.crossed, family.axes == 1
        self.language: Any = self._base.get_submodule(family.language)
        named = self._base.named_parameters()
        fixed = not any(p.requires_grad for name, p in named if family.part_of(name) != "language")
        self._kept = KeptFeatures(self._alone) if keeps and fixed else None

    def filled(self, batch: Batch) -> Batch:
        """Return the batch of one pass with the content of its media, and positions [axes, T], or [T] of one axis."""
        if batch.media is None:
            one_axis = batch.positions.dim() == 1
            return replace(batch, positions=on_axes(batch.positions, self._family.axes)) if one_axis else batch
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

    def padded(self, flat: Batch, place: Tensor) -> tuple[MediaTokens | None, Tensor]:
        """Return the media and the positions of padded rows, [axes, R, W], or [R, W] of one axis. flat: the batch with
        one segment per row; place [R, W]: True where a token is, False at padding."""
        positions = torch.zeros((*flat.positions.shape[:-1], *place.shape), dtype=torch.int64)
        positions[..., place] = flat.positions
        if flat.media is None:
            return None, positions
        if self.crossed:
            _refuse_late(flat)
        medium, feature = torch.full(place.shape, -1), torch.zeros(place.shape, dtype=torch.int64)
        medium[place], feature[place] = flat.media.medium, flat.media.feature
        return replace(flat.media, medium=medium, feature=feature), positions

    def inputs(self, ids: Tensor, media: MediaTokens) -> dict[str, Tensor | list[Tensor]]:
        """Return the inputs of the language model for token ids [B, W] with the media of these tokens. Each image is
        encoded once, and gets the sum of the gradients of all its tokens."""
        device = ids.device
        if self.crossed:
            return self._crossed(ids, media)
        features, deeper = self._encoded({name: media.pictures[name] for name in media.references}, device)
        index = to_device(self._features(media).view(ids.shape), device)
        here = index >= 0
        index = index[here]
        embeddings = self.language.get_input_embeddings()(ids)
        seen = torch.cat(features).index_select(0, index).to(embeddings.dtype)
        found: dict[str, Tensor | list[Tensor]] = {"inputs_embeds": embeddings.masked_scatter(here[..., None], seen)}
        found |= layer_embeddings(self.language, ids, here)
        if deeper:
            found["visual_pos_masks"] = here
            found["deepstack_visual_embeds"] = [states.index_select(0, index) for states in deeper]
        return found

    def together(self, media: MediaTokens | None, rows: int) -> list[tuple[Tensor, MediaTokens | None]]:
        """Return the numbers of the padded rows that the language model computes in one call, and their media: layers
        of cross-attention are left out for rows without images, which are apart."""
        if media is None or not self.crossed:
            return [(torch.arange(rows), media)]
        seen = (media.medium >= 0).any(1)
        own, text = torch.nonzero(seen)[:, 0], torch.nonzero(~seen)[:, 0]
        found = [(own, replace(media, medium=media.medium[own], feature=media.feature[own])), (text, None)]
        return [(which, part) for which, part in found if len(which)]

    def _crossed(self, ids: Tensor, media: MediaTokens) -> dict[str, Tensor | list[Tensor]]:
        """Return the inputs of layers of cross-attention for rows with images."""
        pictures = {name: media.pictures[name] for name in media.references}
        features, _ = self._encoded(pictures, ids.device)
        most, rows = self._config.vision_config.max_num_tiles, list[list[CrossedImage]]()
        tiles = [len(picture.patches) for picture in pictures.values()]
        for row in media.medium:
            places = torch.nonzero(row >= 0)[:, 0].tolist()
            of = [(at, int(row[at])) for at in places]
            rows.append([CrossedImage(at, features[k], len(features[k]) // most * tiles[k]) for at, k in of])
        states, readers = crossed_rows(rows, ids.shape[1])
        return {"input_ids": ids, "cross_attention_states": states, **readers.given()}

    def _encoded(self, pictures: Mapping[str, Picture], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        if self._kept is not None:
            return self._kept.of(pictures, device)
        features, deeper = encode_pictures(self._base, self._family, self._config, [*pictures.values()], device)
        return [*features], deeper

    def _alone(self, picture: Picture) -> tuple[Tensor, tuple[Tensor, ...]]:
        device = next(self._base.parameters()).device
        (features,), deeper = encode_pictures(self._base, self._family, self._config, [picture], device)
        return features, tuple(deeper)

    def _features(self, media: MediaTokens) -> Tensor:
        """Return for each token the index of its feature among those of all media, in order; -1: it is text."""
        first = torch.from_numpy(np.cumsum([0, *self._counts(media)]))
        return torch.where(media.medium >= 0, first[media.medium.clamp(min=0)] + media.feature, -1)

    def _counts(self, media: MediaTokens) -> list[int]:
        seen = [media.pictures[name] for name in media.references]
        return [self._family.features(self._config, picture.grid, sound=picture.sound) for picture in seen]

    def ahead(self, media: MediaTokens | None) -> np.ndarray | None:
        """Return how many tokens after itself each token of a pack attends to: those of its image; None: no token
        does."""
        if media is None or not self.mutual:
            return None
        after = torch.tensor(self._counts(media))[media.medium.clamp(min=0)] - 1 - media.feature
        return torch.where(media.medium >= 0, after, 0).numpy()

    def masks(self, given: Mapping[str, Any], media: MediaTokens | None) -> dict[str, Any]:
        """Return the attention masks of padded rows with these inputs of the language model, where transformers needs
        them: the tokens of an image attend to each other."""
        if media is None or not self.mutual:
            return {}
        embeddings: Tensor = given["inputs_embeds"]
        starts = (media.medium >= 0) & (media.feature == 0)
        images = to_device(torch.where(media.medium >= 0, starts.cumsum(-1) - 1, -1), embeddings.device)
        return {"attention_mask": mutual_masks(self._config.get_text_config(), embeddings, images)}


def _refuse_late(flat: Batch) -> None:
    """Raise Refused for an image behind a trained token. flat: one segment per row"""
    assert flat.media is not None
    for r, (start, end) in enumerate(zip(flat.seg_start, flat.seg_start[1:])):
        images = torch.nonzero(flat.media.medium[start:end] >= 0)[:, 0]
        trained = flat.target_from[int(flat.row_start[r]) : int(flat.row_start[r + 1])]
        if len(images) and len(trained) and int(images[-1] + start) > int(trained.min()):
            raise Refused(LATE_IMAGE)
