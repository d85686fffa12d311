"""Images and other inputs that are not text: where the content of a task's images is, and the tokens in their
place. Standard library only."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

Grid = tuple[int, int, int]
"""The frames, rows and columns of an image's patches."""


def media_hash(content: bytes) -> str:
    """Return the reference of this content: 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Medium(NamedTuple):
    """An image or another input that is not text: its features replace the embeddings of tokens of a segment."""

    reference: str
    """The hash of its content."""
    start: int
    """The first of its placeholder tokens, counted from the segment's first token."""
    tokens: int
    """The number of its placeholder tokens."""

    @property
    def end(self) -> int:
        return self.start + self.tokens


class TaskImage(NamedTuple):
    """An image or a video of a task's prompt: the file with its content, which is read when the task is admitted."""

    path: str
    num_bytes: int
    """The size of the file when the rows were read."""
    changed_ns: int
    """The time of its last change then."""
    start: int
    """The first of its tokens in the prompt."""
    tokens: int
    head: bytes = b""
    """The beginning of a video's content in a store, in front of its file; b"" of an image."""
    frames: tuple[tuple[str, int, int], ...] = ()
    """The path, size and time of each file, if a video is a list of images; `path` is the first of them."""

    @property
    def files(self) -> tuple[tuple[str, int, int], ...]:
        """The path, size and time of each file with its content, in order."""
        return self.frames or ((self.path, self.num_bytes, self.changed_ns),)
