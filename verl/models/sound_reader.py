"""Sounds for a model: the settings of its processor, the tokens in the place of a sound, and its spectrogram."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verl.errors import Refused
from verl.models.expand import Expansion
from verl.models.families import family_of
from verl.models.image_files import SETTINGS
from verl.models.sound_files import decoded_sound, sound_samples
from verl.models.sounds import SoundHead, SoundRules, unpacked_sound

FILES = ("processor_config.json", SETTINGS)
"""The files that may have the settings of sounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundReader:
    """Reads sounds for one model. extractor: makes log-mel spectrograms, of transformers · config: of the model"""

    rules: SoundRules
    extractor: Any
    config: Any

    @property
    def rate(self) -> int:
        """The samples of a second that the model reads."""
        return int(self.extractor.sampling_rate)

    def of_file(self, stream: BinaryIO, where: str) -> tuple[SoundHead, Expansion]:
        """Return what is decided about the sound in a file, and the tokens in the place of its placeholder. Raise
        Refused, with `where`, for one that cannot be read, and that is too long or too short for the model."""
        samples, most = sound_samples(stream, self.rate, where), self.extractor.n_samples
        if self.rules.padded and samples > most:
            shown = f"{samples / self.rate:.1f} s, and the processor of this model would cut it off at"
            raise Refused(f"{where}: {shown} {most / self.rate:g} s (chunk_length); cut it yourself")
        tokens = self.rules.features(self.config, self._frames(samples))
        if tokens < 1:
            raise Refused(f"{where}: a sound of {samples} samples at {self.rate} a second is too short for one token")
        ids = np.full(tokens, int(self.config.audio_token_id), np.int64)
        return SoundHead(samples), Expansion(ids, 0, tokens)

    def _frames(self, samples: int) -> int:
        """Return the number of frames of the spectrogram of a sound."""
        hop = int(self.extractor.hop_length)
        return -(-samples // hop) if self.rules.padded else samples // hop

    def spectrogram(self, content: bytes, where: str) -> np.ndarray:
        """Return the log-mel spectrogram [mels, frames] float32 of a sound, from its content in a store, as the
        processor of transformers computes it. Raise Refused, with `where`, if it is another one than when its row was
        read."""
        head, file = unpacked_sound(content)
        samples = decoded_sound(file, self.rate, where)
        if len(samples) != head.samples:
            raise Refused(f"{where}: {len(samples)} samples, and it had {head.samples} when its row was read")
        found = self.extractor(
            [samples],
            sampling_rate=self.rate,
            padding="max_length" if self.rules.padded else "longest",
            truncation=self.rules.padded,
            return_attention_mask=True,
            return_tensors="np",
        )
        frames, (mask,) = self._frames(head.samples), found["attention_mask"]
        assert mask[:frames].all() and not mask[frames:].any(), "the frames of a sound are the first ones"
        values: np.ndarray = found["input_features"][0, :, :frames]
        return np.ascontiguousarray(values, np.float32)


def sound_reader(folder: Path, config: Any) -> SoundReader | None:
    """Return the reader of sounds for the model in a folder with this configuration; None if it reads none. Raise
    Refused for settings of its processor that are not computed here."""
    family = family_of(config)
    if family is None or family.sounds is None:
        return None
    from transformers import WhisperFeatureExtractor

    if not any((folder / name).is_file() for name in FILES):
        raise Refused(f"{folder}: no {SETTINGS}, which describes how sounds are processed; copy it from the model")
    extractor: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
    for key, wanted in (("dither", 0.0), ("padding_side", "right")):
        if (given := getattr(extractor, key)) != wanted:
            raise Refused(f"{folder}: {key}={given!r} of its processor, and sounds are read with {key}={wanted!r} only")
    if (mels := config.audio_config.num_mel_bins) != extractor.feature_size:
        why = f"feature_size={extractor.feature_size} of its processor, and its audio tower reads {mels} (num_mel_bins)"
        raise Refused(f"{folder}: {why}; make them equal")
    return SoundReader(rules=family.sounds, extractor=extractor, config=config)
