"""Images and videos as models read them: processed as the model's folder describes, and kept beside the model within a
number of bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.errors import Refused
from verl.media_tokens import Picture
from verl.models.clips import ClipHead, is_clip, unpacked
from verl.models.encode import picture_of
from verl.models.families import ImageFamily
from verl.models.image_files import decoded_image, image_processor
from verl.models.kept import KEPT_BYTES, KeptByBytes
from verl.models.videos import VideoReader, video_reader
from verl.transfer_queue.base import MediaStore

BLANK_SIDE = 64
"""The pixels of a side of a blank image: no processor scales it to many patches."""


class Pictures:
    """The processed images and videos of a model, by reference. Each is decoded and processed when it is first read;
    those that were read last are kept. Any thread may call.

    folder: the model · store: the content of the images · max_bytes: the size of those that are kept"""

    def __init__(self, folder: Path, store: MediaStore, max_bytes: int = KEPT_BYTES) -> None:
        self._folder, self._store = folder, store
        self._processor: Any = None
        self._model: tuple[ImageFamily, Any]  # of the processor
        self._videos: VideoReader | None = None
        self._blank: Picture | None = None
        self._kept = KeptByBytes[Picture](max_bytes, lambda picture: picture.patches.nbytes, least=1)
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        return self._kept.nbytes

    def of(self, references: Iterable[str]) -> dict[str, Picture]:
        with self._lock:
            return {name: self._kept.of(name, partial(self._read, name)) for name in references}

    def blank(self) -> Picture:
        """Return a small white image."""
        from PIL import Image

        with self._lock:
            if self._blank is None:
                self._blank = self._processed(Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), "white"), "a white image")
            return self._blank

    def _read(self, reference: str) -> Picture:
        content = self._store.get(reference)
        if is_clip(content):
            return self._read_video(content, f"video {reference}")
        where = f"image {reference}"
        return self._processed(decoded_image(content, where), where)

    def _read_video(self, content: bytes, where: str) -> Picture:
        if self._videos is None:
            from transformers import AutoConfig

            self._videos = video_reader(self._folder, AutoConfig.from_pretrained(self._folder, local_files_only=True))
            if self._videos is None:
                raise Refused(f"{where}: no video is read for the model in {self._folder}")
        return video_picture(self._videos, content, where)

    def _processed(self, image: Any, where: str) -> Picture:
        if self._processor is None:
            self._processor, self._model = image_processor(self._folder)
        return processed(self._processor, image, where, *self._model)


def processed(processor: Any, image: Any, where: str, family: ImageFamily, config: Any) -> Picture:
    """Return a decoded image as a model reads it. Raise Refused, with `where`, for a size that the processor
    refuses."""
    try:
        found = processor(images=[image], return_tensors="pt")
    except ValueError as e:  # sides that differ too much
        raise Refused(f"{where}: {image.width} x {image.height} pixels: {e}") from e
    return picture_of(found, family, config)


def video_picture(reader: VideoReader, content: bytes, where: str) -> Picture:
    """Return a video as a model reads it, from its content in a store. Raise Refused, with `where`, for one that cannot
    be decoded."""
    head, rest = unpacked(content)
    given, side = reader.settings, reader.settings["patch_size"]
    size = head.grid[1] * side, head.grid[2] * side
    frames = torch.stack([_scaled(frame, size) for frame in reader.frames(head, rest, where)])
    if pad := -len(frames) % given["temporal_patch_size"]:
        frames = torch.cat([frames, frames[-1:].expand(pad, -1, -1, -1)])
    # as transformers: one scale and shift for both steps
    mean, std = (torch.tensor(given[key]) * (1.0 / given["rescale_factor"]) for key in ("image_mean", "image_std"))
    frames = (frames.float() - mean[:, None, None]) / std[:, None, None]
    return Picture(patches=_patches(frames, given, head), grid=head.grid, clip=head.clip)


def _scaled(frame: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Return a frame [3, height, width] uint8 in this size, as torchvision scales it."""
    pixels = torch.from_numpy(frame.copy()).permute(2, 0, 1).contiguous()
    return F.interpolate(pixels[None], size=size, mode="bicubic", align_corners=False, antialias=True)[0]


def _patches(frames: Tensor, given: Mapping[str, Any], head: ClipHead) -> Tensor:
    """Return the patches [P, D] of frames [n, 3, height, width]: those of one token are neighbours."""
    side, per, merge = (given[key] for key in ("patch_size", "temporal_patch_size", "merge_size"))
    count, rows, columns = head.grid
    cut = frames.view(count, per, 3, rows // merge, merge, side, columns // merge, merge, side)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * rows * columns, 3 * per * side * side)
