"""Files of sounds: checked, measured and decoded to one channel at the rate of a model. WAV needs no library; other
formats and rates need PyAV (the extra `video`)."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from verl.errors import Refused

FORMATS = "wav,mp3,flac,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac"
"""The formats that PyAV opens: those that name no other files, as playlists do."""
MAX_BYTES = 1 << 28
"""The most bytes of a sound: each is in memory as long as its rows are."""
LATE_S = 0.25
"""The seconds that may be missing at the end of a file against its header."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_KNOWN = {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}
"""The formats of the samples of a WAV file that are read here, with their bits."""


class Wav(NamedTuple):
    """The header of a WAV file. begin, size: of its samples, in bytes"""

    form: int
    bits: int
    channels: int
    rate: int
    begin: int
    size: int

    @property
    def samples(self) -> int:
        return self.size // (self.channels * self.bits // 8)

    @property
    def known(self) -> bool:
        """True if its samples are read here."""
        return (self.form, self.bits) in _KNOWN


def sound_samples(stream: BinaryIO, rate: int, where: str) -> int:
    """Return the number of samples that `decoded_sound` makes of a file, of a WAV file at this rate by its header.
    Raise Refused as that function does."""
    header = wav_header(stream, where)
    if header is not None and header.rate == rate and header.known and header.form == _PCM and header.samples:
        return header.samples
    stream.seek(0)
    return len(decoded_sound(stream.read(MAX_BYTES + 1), rate, where))


def decoded_sound(content: bytes, rate: int, where: str) -> np.ndarray:
    """Return the samples [n] float32 of a sound's file, the mean of its channels, at this rate. Raise Refused, with
    `where`, for a file that is damaged, empty, of another format, or too large, or if the library for it is missing."""
    if len(content) > MAX_BYTES:
        raise Refused(f"{where}: more than {MAX_BYTES} bytes; cut the sound")
    header = wav_header(io.BytesIO(content), where)
    if header is not None and header.rate == rate and header.known:
        channels = _samples_of(content, header)
    else:
        channels = _decoded_by_library(content, rate, where)
    if not channels.size:
        raise Refused(f"{where}: a sound without samples")
    if not np.isfinite(channels).all():
        raise Refused(f"{where}: a damaged sound: values that are no finite numbers")
    mean: np.ndarray = channels[0] if len(channels) == 1 else channels.mean(0, dtype=np.float32)
    return np.ascontiguousarray(mean)


def wav_header(stream: BinaryIO, where: str) -> Wav | None:
    """Return the header of a WAV file; None for a file of another format. Raise Refused for one that is damaged or not
    complete."""
    end = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    begin, form = stream.read(12), None
    if begin[:4] != b"RIFF" or begin[8:] != b"WAVE":
        return None
    while len(head := stream.read(8)) == 8:
        name, size = struct.unpack("<4sI", head)
        at = stream.tell()
        if name == b"fmt " and size >= 16 and at + size <= end:
            described = stream.read(size)
            form = struct.unpack_from("<HHIIHH", described)
            if form[0] == _EXTENSIBLE and size >= 26:
                form = (struct.unpack_from("<H", described, 24)[0], *form[1:])
        elif name == b"data" and form is not None:
            kind, channels, rate, _, block, bits = form
            found = Wav(kind, bits, channels, rate, at, size)
            if not channels or not rate or (found.known and (block != channels * bits // 8 or size % block)):
                break
            if size > end - at:
                raise Refused(f"{where}: a damaged sound: {size} bytes are announced, and {end - at} are there")
            return found
        stream.seek(at + size + size % 2)
    raise Refused(f"{where}: a damaged WAV file: no samples after a description of them")


def wav_file(samples: np.ndarray, rate: int) -> bytes:
    """Return a WAV file with these samples [n] of one channel, as float32."""
    data = samples.astype("<f4").tobytes()
    described = struct.pack("<HHIIHH", _FLOAT, 1, rate, rate * 4, 4, 32)
    chunks = b"".join(name + struct.pack("<I", len(of)) + of for name, of in ((b"fmt ", described), (b"data", data)))
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _samples_of(content: bytes, header: Wav) -> np.ndarray:
    """Return the samples [channels, n] of a WAV file, between -1 and 1."""
    count = header.samples * header.channels
    values: np.ndarray
    if header.form == _FLOAT:
        values = np.frombuffer(content, f"<f{header.bits // 8}", count, header.begin).astype(np.float32)
    elif header.bits == 24:
        parts = np.frombuffer(content, np.uint8, 3 * count, header.begin).reshape(-1, 3)
        whole = np.zeros((count, 4), np.uint8)
        whole[:, 1:] = parts  # the sign is that of the last byte
        values = (whole.view("<i4")[:, 0].astype(np.float64) / 2**31).astype(np.float32)
    elif header.bits == 8:
        values = (np.frombuffer(content, np.uint8, count, header.begin).astype(np.float32) - 128) / 128
    else:
        stored = np.frombuffer(content, f"<i{header.bits // 8}", count, header.begin)
        values = (stored.astype(np.float64) / 2 ** (header.bits - 1)).astype(np.float32)
    return values.reshape(-1, header.channels).T


def _decoded_by_library(content: bytes, rate: int, where: str) -> np.ndarray:
    """Return the samples [channels, n] of a file at this rate, by PyAV."""
    try:
        import av
    except ImportError as e:
        fix = f"give WAV at {rate} samples a second, or pip install '.[video]' in verl's folder"
        raise Refused(f"{where}: sounds of other formats and rates are read by PyAV. Fix: {fix}") from e
    try:
        container: Any = av.open(io.BytesIO(content), options={"format_whitelist": FORMATS}, metadata_errors="replace")
    except av.FFmpegError as e:
        raise Refused(f"{where}: {len(content)} bytes are no sound that can be read: {e.strerror}") from e
    with container:
        if not container.streams.audio:
            kinds = sorted({one.type for one in container.streams})
            raise Refused(f"{where}: no sound in the file, only {', '.join(kinds) or 'nothing'}")
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout.name, rate=rate)
        announced_s = float(stream.duration * stream.time_base) if stream.duration else 0.0
        try:
            parts = [frame.to_ndarray() for frame in _resampled(container, resampler)]
        except av.FFmpegError as e:
            raise Refused(f"{where}: a damaged sound: {e.strerror}") from e
    found = np.concatenate(parts, axis=1) if parts else np.zeros((1, 0), np.float32)
    if found.shape[1] / rate < announced_s - LATE_S:
        shown = f"its header announces {announced_s:.2f} s, and {found.shape[1] / rate:.2f} s are in the file"
        raise Refused(f"{where}: a damaged sound: {shown}")
    return found


def _resampled(container: Any, resampler: Any) -> Iterator[Any]:
    for frame in container.decode(audio=0):
        frame.pts = None  # samples follow each other, whatever their times are
        yield from resampler.resample(frame)
    yield from resampler.resample(None)
