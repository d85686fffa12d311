"""Images, videos and sounds as models read them: processed as the model's folder describes, and kept beside the model
within a number of bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.errors import Refused
from verl.media_tokens import Picture
from verl.medium import media_hash
from verl.models.clips import ClipHead, is_clip, unpacked
from verl.models.encode import picture_of
from verl.models.families import ImageFamily
from verl.models.image_files import decoded_image, image_processor
from verl.models.kept import KEPT_BYTES, KeptByBytes
from verl.models.sound_reader import SoundReader, sound_reader
from verl.models.sounds import is_sound
from verl.models.videos import VideoReader, video_reader
from verl.transfer_queue.base import MediaStore

BLANK_SIDE = 64
"""The pixels of a side of a blank image: no processor scales it to many patches."""


class Pictures:
    """The processed images, videos and sounds of a model, by reference. Each is decoded and processed when it is first
    read; those that were read last are kept. Any thread may call.

    folder: the model · store: the content of the images · max_bytes: the size of those that are kept"""

    def __init__(self, folder: Path, store: MediaStore, max_bytes: int = KEPT_BYTES) -> None:
        self._folder, self._store = folder, store
        self._processor: Any = None
        self._model: tuple[ImageFamily, Any]  # of the processor
        self._videos: VideoReader | None = None
        self._sounds: SoundReader | None = None
        self._blank: Picture | None = None
        self._kept = KeptByBytes[Picture](max_bytes, lambda picture: picture.patches.nbytes, least=1)
        self._held = dict[object, Mapping[str, Picture]]()
        self._lock, self._reading = threading.Lock(), threading.Lock()  # of what is kept; of the processors

    @property
    def kept_bytes(self) -> int:
        return self._kept.nbytes

    def of(self, references: Iterable[str]) -> dict[str, Picture]:
        names, held = [*references], {name: p for read in [*self._held.values()] for name, p in read.items()}
        if held.keys() >= {*names}:
            return {name: held[name] for name in names}
        return {name: self._one(name) for name in names}

    def _one(self, name: str) -> Picture:
        """Return an image. One that is kept does not wait for others, which another thread reads meanwhile."""
        if (kept := self._found(name)) is not None:
            return kept
        with self._reading:
            if (kept := self._found(name)) is not None:
                return kept
            return self._keep(name, self._store.get(name))

    def _keep(self, name: str, content: bytes) -> Picture:
        read = self._read(name, content)
        with self._lock:
            return self._kept.of(name, lambda: read)

    def begin_step(self) -> None:
        """Begin a step: `read_ahead` leaves in memory what is read from now on."""
        with self._lock:
            self._kept.mark()

    def read_ahead(self, content: bytes) -> bool:
        """Process media before they are asked for. Return False, without doing so, if there is no space for them beside
        those that were read since `begin_step`. Raise Refused as `of` does."""
        name = media_hash(content)
        with self._reading:
            if self._found(name) is not None:
                return True
            with self._lock:
                if not self._kept.has_space():
                    return False
            self._keep(name, content)
            return True

    def _found(self, name: str) -> Picture | None:
        with self._lock:
            return self._kept.get(name)

    @contextlib.contextmanager
    def holding(self, read: Mapping[str, Picture]) -> Iterator[None]:
        """Keep these while the block runs, whatever their size is: `of` returns them at once, also while another thread
        reads others."""
        block = object()
        self._held[block] = read
        try:
            yield
        finally:
            del self._held[block]

    def blank(self) -> Picture:
        """Return a small white image."""
        from PIL import Image

        with self._reading:
            if self._blank is None:
                self._blank = self._processed(Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), "white"), "a white image")
            return self._blank

    def _read(self, reference: str, content: bytes) -> Picture:
        if is_clip(content):
            return self._read_video(content, f"video {reference}")
        if is_sound(content):
            return self._read_sound(content, f"sound {reference}")
        where = f"image {reference}"
        return self._processed(decoded_image(content, where), where)

    def _read_video(self, content: bytes, where: str) -> Picture:
        if self._videos is None:
            self._videos = video_reader(self._folder, self._config())
            if self._videos is None:
                raise Refused(f"{where}: no video is read for the model in {self._folder}")
        return video_picture(self._videos, content, where)

    def _read_sound(self, content: bytes, where: str) -> Picture:
        if self._sounds is None:
            self._sounds = sound_reader(self._folder, self._config())
            if self._sounds is None:
                raise Refused(f"{where}: no sound is read for the model in {self._folder}")
        values = torch.from_numpy(self._sounds.spectrogram(content, where))
        return Picture(patches=values, grid=(values.shape[1], 1, 1), sound=True)

    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._folder, local_files_only=True)

    def _processed(self, image: Any, where: str) -> Picture:
        if self._processor is None:
            self._processor, self._model = image_processor(self._folder)
        return processed(self._processor, image, where, *self._model)


def shared_pictures(folder: Path, store: MediaStore) -> Pictures:
    """Return what reads the media of a store for the model in a folder. All engines of this process that have both
    share it, so that a policy, its reference and its rollout process an image once."""
    return store.readers.setdefault(str(folder.resolve()), Pictures(folder, store))


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
