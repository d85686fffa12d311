"""Thumbnails of the media of recorded samples: images, the first frames of videos, and words for sounds."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from verl.bounds import counted
from verl.models.clips import is_clip, unpacked
from verl.models.image_files import decoded_image
from verl.models.kept import KeptByBytes
from verl.models.sounds import is_sound
from verl.models.video_files import decoded_frames
from verl.track.log import Note
from verl.track.packed import unpacked_segments
from verl.track.samples import MEDIA_FOLDER
from verl.transfer_queue.media import FolderMedia
from verl.types import Medium

SIDE = 144
"""The longer side of a thumbnail, in pixels."""
MOST = 8
"""The most thumbnails of a prompt, and of an answer."""
KEPT_BYTES = 16 << 20
_DAMAGE = (msgspec.MsgspecError, ValueError, KeyError, SyntaxError)  # the last two: of a damaged type of numpy


class Thumbnails:
    """The media of a run's recorded rows as a page shows them. A medium that cannot be read is a line to `note`, and
    words on the page."""

    def __init__(self, run_dir: Path, note: Note) -> None:
        self._store, self._note = FolderMedia(run_dir / MEDIA_FOLDER), note
        self._kept = KeptByBytes[dict[str, Any]](KEPT_BYTES, lambda made: len(made.get("image", "")) + 100)

    def of_row(self, segments: bytes, where: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return `of` for the media of a row's prompt, and for those after it. segments: as they are recorded, b"" if
        they are not · where: the row, for a note"""
        if not segments:
            return [], []
        try:
            prompt, *rest = unpacked_segments(segments)[1]
        except _DAMAGE as e:
            self._note(f"{where}: its segments are damaged: {e}; its media are left out")
            return [{"text": "unreadable"}], []
        return self.of(prompt.media), self.of([medium for segment in rest for medium in segment.media])

    def of(self, media: Sequence[Medium]) -> list[dict[str, Any]]:
        """Return {text} of each of the first media, with {image}, a data URL, of those that have pixels; at the end,
        how many others there are."""
        shown = [self._kept.of(f"{m.reference} {m.tokens}", partial(self._made, m)) for m in media[:MOST]]
        return shown if len(media) <= MOST else [*shown, {"text": f"and {len(media) - MOST} more"}]

    def _made(self, medium: Medium) -> dict[str, Any]:
        tokens = counted(medium.tokens, "token")
        try:
            if not self._store.path(medium.reference).is_file():  # as of an evaluation
                return {"text": f"not recorded, {tokens}"}
            return _described(self._store.get(medium.reference), medium.reference, tokens)
        except (OSError, ValueError) as e:  # damaged, in the store or before
            self._note(f"{e}; it is left out")
            return {"text": f"unreadable, {tokens}"}


def _described(content: bytes, reference: str, tokens: str) -> dict[str, Any]:
    """Return the thumbnail of a medium with its text."""
    where = f"media {reference}"
    if is_sound(content):
        return {"text": f"sound, {tokens}"}
    if not is_clip(content):
        image = decoded_image(content, where)
        return {"text": f"{image.width} x {image.height}, {tokens}", "image": _data_url(image)}
    head, rest = unpacked(content)
    if head.sizes:  # a list of images
        image = decoded_image(rest[: head.sizes[0]], where)
    else:
        from PIL import Image

        image = Image.fromarray(next(iter(decoded_frames(rest, head.frames[:1], where))))
    return {"text": f"video of {len(head.frames)} frames, {tokens}", "image": _data_url(image)}


def _data_url(image: Any) -> str:
    """Return a small JPEG of an RGB image."""
    image.thumbnail((SIDE, SIDE))
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(encoded.getvalue()).decode()}"
