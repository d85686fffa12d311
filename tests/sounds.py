"""Tiny models that read sounds, and rows with sounds, for tests."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from vision import END, IMAGE, START, TEMPLATE, TEXT, VIDEO, drawn, image_tokenizer, sample_ids

from verl.media_tokens import Picture
from verl.types import Medium, Sample, Segment

VOCAB, SOUND, SOUND_START, SOUND_END = 72, 64, 65, 66
"""The size of the vocabulary, and the special tokens of sounds."""
MELS = 8
KINDS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
FRAMES = {KINDS[0]: {"bell": 21, "word": 8, "song": 37}, KINDS[1]: {"bell": 21, "word": 8, "song": 137}}
"""The frames of each sound: that of the bell has an odd number of halves, the song several parts."""
FEATURES = {KINDS[0]: {"bell": 5, "word": 2, "song": 9}, KINDS[1]: {"bell": 3, "word": 1, "song": 18}}
GRID = (1, 4, 6)
"""The patches of an image: six tokens."""
_TEXT = TEXT | {"vocab_size": VOCAB}
_TOWER: dict[str, Any] = dict(
    depth=2,
    num_heads=2,
    patch_size=2,
    temporal_patch_size=1,
    hidden_size=16,
    intermediate_size=24,
    out_hidden_size=32,
    initializer_range=0.2,
)
_VISION = _TOWER | {"window_size": 8, "fullatt_block_indexes": [1]}
_DEEPSTACK = _TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_AUDIO: dict[str, Any] = dict(
    num_mel_bins=MELS,
    d_model=16,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=24,
    n_window=4,
    output_dim=32,
    max_source_positions=32,
    initializer_range=0.2,
)
IDS: dict[str, int] = dict(
    image_token_index=IMAGE,
    video_token_index=VIDEO,
    audio_token_index=SOUND,
    vision_start_token_id=START,
    vision_end_token_id=END,
    audio_start_token_id=SOUND_START,
    audio_end_token_id=SOUND_END,
)


_EXPERTS: dict[str, Any] = dict(
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    rope_parameters=_TEXT["rope_parameters"] | {"mrope_interleaved": True},
)


def thinker_config(kind: str = KINDS[0], **text: Any) -> Any:
    """Return the configuration of a tiny thinker. text: further keys of its language model"""
    if kind == KINDS[0]:
        parts = {"text_config": _TEXT | text, "vision_config": _VISION, "audio_config": _AUDIO}
        return transformers.Qwen2_5OmniThinkerConfig(**parts, **IDS, tie_word_embeddings=False)
    audio = _AUDIO | {"n_window": 50, "downsample_hidden_size": 6}
    parts = {"text_config": _TEXT | _EXPERTS | text, "vision_config": _DEEPSTACK, "audio_config": audio}
    ids = {name.replace("_token_index", "_token_id"): i for name, i in IDS.items()}
    return transformers.Qwen3OmniMoeThinkerConfig(**parts, **ids)


def thinker(kind: str = KINDS[0], **text: Any) -> Any:
    """Return a tiny thinker with random weights, of which biases and norms have an effect."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForImageTextToText.from_config(thinker_config(kind, **text)).float()
        for name, parameter in made.named_parameters():
            if "bias" in name or "norm" in name or "ln_" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return made


@cache
def pictures(kind: str) -> dict[str, Picture]:
    """Return an image and sounds with random content."""
    rng = torch.Generator().manual_seed(0)
    found = {"cat": Picture(patches=torch.randn(GRID[1] * GRID[2], 12, generator=rng), grid=GRID)}
    for name, frames in FRAMES[kind].items():
        content = torch.randn(MELS, frames, generator=rng)
        found[name] = Picture(patches=content, grid=(frames, 1, 1), sound=True)
    return found


def seen(kind: str, text: list[int], *names: str, source: Any = "prompt") -> Segment:
    """Return a segment of text with these images and sounds after its first token."""
    ids, media = text[:1], list[Medium]()
    for name in names:
        begin, token, tokens, end = START, IMAGE, GRID[1] * GRID[2] // 4, END
        if name != "cat":
            begin, token, tokens, end = SOUND_START, SOUND, FEATURES[kind][name], SOUND_END
        media.append(Medium(name, len(ids) + 1, tokens))
        ids = [*ids, begin, *[token] * tokens, end]
    return Segment(ids=np.array([*ids, *text[1:]]), source=source, media=tuple(media))


def rows(kind: str) -> list[Sample]:
    """Return rows with sounds and an image, several turns, and a placeholder that the policy sampled."""
    one, two = seen(kind, [1, 2, 3], "bell"), seen(kind, [4, 5], "song", "cat", "bell")
    later = seen(kind, [9, 10], "word", source="env")
    given = [
        ("a", (one, drawn(12, 13))),
        ("a", (one, drawn(14, SOUND, 15))),
        ("a", (one, drawn(17), later, drawn(18, 19))),
        ("b", (two, drawn(20, 21))),
        ("b", (two, drawn(22, SOUND, IMAGE))),
        ("c", (seen(kind, [6, 7]), drawn(24, SOUND))),
    ]
    names = [{"sample_id": str(i), "trajectory_id": str(i), "group_id": group} for i, (group, _) in enumerate(given)]
    return [Sample(**name, purpose="train", segments=row) for name, (_, row) in zip(names, given)]


def own_inputs(kind: str, module: Any, sample: Sample) -> dict[str, Any]:
    """Return the inputs of transformers for a row. It finds media by token id, so they get ids here that the row does
    not have, and a sampled placeholder is text."""
    ids, at = sample_ids(sample), 0
    spare = sorted({*range(3, 60)} - {*ids.tolist()})[:2]
    module.config.image_token_id, module.config.audio_token_id = spare
    for s in sample.segments:
        for m in s.media:
            ids[at + m.start : at + m.end] = spare[m.reference != "cat"]
        at += len(s.ids)
    whole = torch.from_numpy(ids)[None]
    given: dict[str, Any] = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
    content = [pictures(kind)[name] for name in sample.media]
    if images := [one for one in content if not one.sound]:
        given["pixel_values"] = torch.cat([one.patches for one in images])
        given["image_grid_thw"] = torch.tensor([one.grid for one in images])
    if sounds := [one for one in content if one.sound]:
        padded, mask = torch.zeros(len(sounds), MELS, 150), torch.zeros(len(sounds), 150, dtype=torch.int64)
        for k, one in enumerate(sounds):
            padded[k, :, : one.grid[0]], mask[k, : one.grid[0]] = one.patches, 1
        given |= {"input_features": padded, "feature_attention_mask": mask}
    return given


def _one_by_one(encode: Any, sounds: Tensor, mask: Tensor, *given: Any, **more: Any) -> Any:
    """Return the features of sounds that are encoded one by one. encode: the function of transformers"""
    parts = [encode(s[None, :, : int(m.sum())], m[None, : int(m.sum())], *given, **more) for s, m in zip(sounds, mask)]
    parts[0].last_hidden_state = torch.cat([part.last_hidden_state for part in parts])
    return parts[0]


def own_logprobs(kind: str, module: Any, sample: Sample, banned: Sequence[int] = ()) -> Tensor:
    """Return the log-probs of a row's sampled tokens by the forward pass of transformers, where the banned ids have
    probability 0. Each sound is encoded by itself, as in a row that has no other one."""
    if "get_audio_features" not in vars(module.base_model):
        module.base_model.get_audio_features = partial(_one_by_one, module.base_model.get_audio_features)
    logits = module(**own_inputs(kind, module, sample), use_cache=False).logits[0]
    logits = logits.index_fill(-1, torch.tensor(banned, dtype=torch.int64), -torch.inf).log_softmax(-1)
    sampled, at = list[int](), 0
    for s in sample.segments:
        sampled += range(at, at + len(s.ids)) if s.source == "sampled" else ()
        at += len(s.ids)
    own: Tensor = logits[torch.tensor(sampled) - 1, torch.from_numpy(sample_ids(sample))[sampled]]
    return own


RATE = 16_000
SETTINGS: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": MELS,
    "chunk_length": 1,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
    "return_attention_mask": True,
}
"""The settings of the processor of sounds: they are of one second at most."""
_MARKS = {"<|AUDIO|>": SOUND, "<|audio_bos|>": SOUND_START, "<|audio_eos|>": SOUND_END}
SOUND_TEMPLATE = TEMPLATE.replace(
    "{% elif part['type'] == 'video' %}",
    "{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% elif part['type'] == 'video' %}",
)


def sound_tokenizer() -> Any:
    """Return a tokenizer of characters, with the special tokens of images and sounds."""
    return image_tokenizer(_MARKS, SOUND_TEMPLATE)


def sound_folder(folder: Path, kind: str = KINDS[0]) -> Path:
    """Write a tiny thinker with its tokenizer and the settings of its processors."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = sound_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    made = thinker(kind, **ends)
    for config in (made.config, made.generation_config):
        for name, value in ends.items():
            setattr(config, name, value)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 16, "longest_edge": 4096}}
    Qwen2VLImageProcessorPil(**sizes, patch_size=2, temporal_patch_size=1, merge_size=2).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SETTINGS))
    return folder


def noise(samples: int, seed: int = 0) -> np.ndarray:
    """Return random samples [n] float32, each a whole number of steps of 16 bits."""
    steps = np.random.default_rng(seed).integers(-(2**13), 2**13, samples)
    return (steps / 2**15).astype(np.float32)


def wav(channels: np.ndarray, rate: int = RATE, width: int = 2) -> bytes:
    """Return a WAV file of whole numbers of `width` bytes. channels: [n], or [channels, n], between -1 and 1"""
    values = np.atleast_2d(channels).T.astype(np.float64)
    stored = np.round(values * 2 ** (8 * width - 1)).astype("<i8")
    data = stored + 128 if width == 1 else stored
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(values.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.ascontiguousarray(data).view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return out.getvalue()
