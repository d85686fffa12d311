"""Images that layers of cross-attention read: which tokens of a row read which image, as in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossedImage:
    """An image of a row."""

    at: int
    """The index of its token."""
    states: Tensor
    """[n, H], those of tiles without content last."""
    used: int
    """The number of states of tiles with content."""


@dataclass(frozen=True, slots=True)
class CrossedRows:
    """The states that each of W tokens of R rows reads by cross-attention."""

    mask: Tensor
    """[R, 1, W, N], added to the scores of N states: 0, or the smallest number."""
    reads: Tensor
    """[R, 1, W, 1]: 1 for a token that reads an image, 0 for one before all images."""

    def given(self) -> dict[str, Tensor]:
        """Return the arguments of the language model."""
        return {"cross_attention_mask": self.mask, "full_text_row_masked_out_mask": self.reads}

    def last(self) -> CrossedRows:
        """Return those of the last token, which all tokens after it have."""
        return CrossedRows(self.mask[:, :, -1:].clone(), self.reads[:, :, -1:].clone())

    def rows(self, index: Tensor) -> CrossedRows:
        return CrossedRows(self.mask[index], self.reads[index])


def read_images(places: Sequence[int], tokens: int) -> np.ndarray:
    """Return [tokens, images] bool: the images that each token of a row reads. An image is read from its token to the
    next image; of images side by side all are read until the image after them. places: their tokens, ascending"""
    found = np.zeros((tokens, len(places)), bool)
    last = tokens
    for k, (start, end) in reversed([*enumerate(zip(places, [*places[1:], tokens]))]):
        last = last if start == end - 1 else end
        found[start:last, k] = True
    return found


def crossed_rows(rows: Sequence[Sequence[CrossedImage]], tokens: int) -> tuple[Tensor, CrossedRows]:
    """Return the states [R, N, H] of rows of `tokens` tokens with these images, at least one each, and who reads them.
    A token before all images of its row attends to all their states there, as in transformers; the layers add no MLP
    to it."""
    count, first = max(map(len, rows)), rows[0][0].states
    blank, n = torch.zeros_like(first), len(first)
    states = torch.stack([torch.cat([*(i.states for i in row), *[blank] * (count - len(row))]) for row in rows])
    mask = first.new_full((len(rows), 1, tokens, count * n), torch.finfo(first.dtype).min)
    reads = first.new_zeros((len(rows), 1, tokens, 1))
    number = torch.arange(n)
    for r, row in enumerate(rows):
        seen = torch.from_numpy(read_images([image.at for image in row], tokens))
        used = number < torch.tensor([image.used for image in row])[:, None]
        none = ~seen.any(1)
        opened = (seen[:, :, None] & used) | none[:, None, None]
        own = mask[r, 0, :, : len(row) * n]
        own.masked_fill_(opened.flatten(1).to(first.device), 0)
        reads[r, 0, :, 0] = (~none).to(first.device)
    return states, CrossedRows(mask, reads)
