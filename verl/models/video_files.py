"""Files of videos: checked, measured and decoded by PyAV (the extra `video`)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from verl.errors import Refused
from verl.models.image_files import MAX_PIXELS

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif"
"""The formats that are opened: those that name no other files, as playlists do."""
MAX_BYTES = 1 << 28
"""The most bytes of a video: each is in memory as long as its rows are."""
MAX_FRAMES = 1 << 20
"""The most frames of a file."""
LATE_S = 0.25
"""The seconds that may be missing at the end of a file against its header."""


class VideoFacts(NamedTuple):
    """The facts in the packets of a video's file. height, width: of the upright frames, in pixels."""

    frames: int
    fps: float
    height: int
    width: int


def video_facts(stream: BinaryIO, where: str) -> VideoFacts:
    """Return the facts of a video's file, of which only the first two frames are decoded. Raise Refused, with `where`,
    for a file without a video, of one frame, of another format, not complete, too large, or with frames of unequal
    lengths."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    if size > MAX_BYTES:
        raise Refused(f"{where}: {size} bytes, more than {MAX_BYTES}; cut the video, or scale it down")
    av = _library(where)
    try:
        with _opened(stream, where) as container:
            moments, fps, announced = _moments(container, where)
            unit = float(container.streams.video[0].time_base)
        stream.seek(0)
        with _opened(stream, where) as container:
            begin = [*islice(container.decode(video=0), 2)]
    except av.FFmpegError as e:
        raise Refused(f"{where}: a damaged video: {e.strerror}") from e
    if not begin:
        raise Refused(f"{where}: a damaged video: no frame can be decoded")
    if announced > len(moments):
        raise Refused(f"{where}: a damaged video: {len(moments)} of its {announced} frames are in the file")
    first = begin[0]
    if [one.pts for one in begin] != moments[:2].tolist():
        raise Refused(
            f"{where}: a damaged video, or H.264 in avi: its first frames are not at their times; use mp4 (ffmpeg)"
        )
    _refuse_uneven((moments - moments[0]) * unit, fps, where)
    if first.width * first.height > MAX_PIXELS:
        raise Refused(f"{where}: {first.width} x {first.height} pixels, more than {MAX_PIXELS}; scale it down")
    height, width = _upright(first, where).shape[:2]
    return VideoFacts(len(moments), fps, height, width)


def decoded_frames(content: bytes, indices: Sequence[int], where: str) -> Iterator[np.ndarray]:
    """Yield the upright frames [height, width, 3] uint8 with these indices, which do not decrease. Raise Refused, with
    `where`, for a file of which one cannot be decoded."""
    av = _library(where)
    wanted, at, index = list(indices), 0, 0
    try:
        with _opened(io.BytesIO(content), where) as container:
            moments, _, _ = _moments(container, where)
        with _opened(io.BytesIO(content), where) as container:
            for frame in container.decode(video=0):
                # decoders drop frames without a word: a frame's index is that of its time among those of the packets
                while frame.pts is not None and index < len(moments) and moments[index] < frame.pts:
                    index += 1
                if index == len(moments) or moments[index] != frame.pts or (at < len(wanted) and wanted[at] < index):
                    break
                if at < len(wanted) and wanted[at] == index:
                    image = _upright(frame, where)
                while at < len(wanted) and wanted[at] == index:
                    at += 1
                    yield image
                if at == len(wanted):
                    return
                index += 1
    except av.FFmpegError as e:
        raise Refused(f"{where}: a damaged video: frame {wanted[at]}: {e.strerror}") from e
    raise Refused(f"{where}: a damaged video: frame {wanted[at]} cannot be decoded")


def _library(where: str) -> Any:
    try:
        import av
    except ImportError as e:
        raise Refused(f"{where}: videos are read by PyAV. Fix: pip install '.[video]' in verl's folder") from e
    return av


def _opened(stream: BinaryIO, where: str) -> Any:
    """Return the container of a file that has a video."""
    import av

    try:
        container = av.open(stream, options={"format_whitelist": FORMATS}, metadata_errors="replace")
    except av.FFmpegError as e:
        size = stream.seek(0, io.SEEK_END)
        raise Refused(f"{where}: {size} bytes are no video that can be read: {e.strerror}") from e
    if not container.streams.video:
        kinds = sorted({one.type for one in container.streams})
        container.close()
        raise Refused(f"{where}: no video in the file, only {', '.join(kinds) or 'nothing'}")
    return container


def _moments(container: Any, where: str) -> tuple[np.ndarray, float, int]:
    """Return the times of the frames of a file in units of its `time_base`, sorted, the frames of a second, and the
    number of frames that its header announces, or 0."""
    stream, found, first, last = container.streams.video[0], list[int](), math.inf, -math.inf
    for packet in container.demux():
        if not packet.size or packet.is_discard:
            continue
        at = packet.pts if packet.pts is not None else packet.dts
        if packet.stream.index == stream.index:
            found.append(packet.pts)  # that of its frame, which dts is not
        if at is not None:
            first = min(first, at * float(packet.time_base))
            last = max(last, (at + (packet.duration or 0)) * float(packet.time_base))
        if len(found) > MAX_FRAMES:
            raise Refused(f"{where}: more than {MAX_FRAMES} frames; cut the video")
    if not found:
        raise Refused(f"{where}: a video without frames")
    if len(found) == 1:
        raise Refused(f"{where}: a video of one frame; give it as an image")
    if None in found or not stream.average_rate:
        raise Refused(f"{where}: a video whose frames have no times; convert it to mp4")
    fps, wanted = float(stream.average_rate), (container.duration or 0) / 1e6
    if last - first < wanted - max(LATE_S, 2 / fps):
        shown = f"its header announces {wanted:.2f} s, and {last - first:.2f} s are in the file"
        raise Refused(f"{where}: a damaged video: {shown}")
    return np.sort(np.array(found, np.int64)), fps, int(stream.frames)


def _refuse_uneven(times: np.ndarray, fps: float, where: str) -> None:
    """Raise Refused for a video in which a frame is more than one frame away from its time at the average rate: frames
    are sampled, and their times are given to the model, by that rate."""
    off = np.abs(times * fps - np.arange(len(times)))
    if (worst := int(off.argmax())) and off[worst] > 1.0:
        shown = (
            f"frame {worst} is at {times[worst]:.2f} s, and at {fps:g} frames a second it would be at {worst / fps:.2f}"
        )
        raise Refused(f"{where}: frames of unequal lengths ({shown}); convert it to a constant rate (ffmpeg -r)")


def _upright(frame: Any, where: str) -> np.ndarray:
    """Return the pixels [height, width, 3] of a frame, turned as the file has it."""
    if frame.rotation % 90:
        raise Refused(f"{where}: turned by {frame.rotation} degrees; turn it by a multiple of 90")
    pixels: np.ndarray = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, frame.rotation // 90)
