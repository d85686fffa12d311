"""Tiny random models that read images, and rows with images of unequal size, for tests."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl.media_tokens import Picture
from verl.types import Medium, Sample, Segment

VOCAB, START, END, IMAGE, VIDEO = 64, 58, 59, 60, 61
"""The size of the vocabulary and its special tokens."""
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
    initializer_range=0.2,
)
_TOWER: dict[str, Any] = dict(depth=2, num_heads=2, patch_size=2, temporal_patch_size=1, initializer_range=0.2)
_IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_KINDS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, {}, {"embed_dim": 16, "hidden_size": 32}),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {"head_dim": 16},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
}
KINDS = tuple(_KINDS)
GRIDS = {"cat": (1, 4, 6), "dog": (1, 2, 8), "fox": (1, 6, 4)}
"""The rows and columns of patches of each image: four patches are one token."""


def model(kind: str, *, tower: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """Return a model with random weights. tower, more: further keys of its vision and of its text configuration."""
    config, make, text, vision = _KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(
            config(text_config=TEXT | text | more, vision_config=_TOWER | vision | dict(tower or {}), **_IDS)
        ).float()


def pictures() -> dict[str, Picture]:
    rng = torch.Generator().manual_seed(0)
    return {n: Picture(patches=torch.randn(g[1] * g[2], 12, generator=rng), grid=g) for n, g in GRIDS.items()}


def seen(text: list[int], *names: str, source: Any = "prompt") -> Segment:
    """Return a segment of text with these images after its first token."""
    ids, media = text[:1], list[Medium]()
    for name in names:
        tokens = GRIDS[name][1] * GRIDS[name][2] // 4
        media.append(Medium(name, len(ids) + 1, tokens))
        ids = [*ids, START, *[IMAGE] * tokens, END]
    return Segment(ids=np.array([*ids, *text[1:]]), source=source, media=tuple(media))


def drawn(*ids: int) -> Segment:
    return Segment(ids=np.array(ids), source="sampled", logprobs=np.zeros(len(ids), np.float32), version=0)


def rows() -> list[Sample]:
    """Return rows with 0, 1, 2 and 3 images, several turns, and a placeholder that the policy sampled."""
    one, three, text = seen([1, 2, 3], "cat"), seen([4, 5], "fox", "cat", "dog"), seen([6, 7, 8])
    later = seen([9, 10, 11], "dog", source="env")
    given = [
        ("a", (one, drawn(12, 13))),
        ("a", (one, drawn(14, IMAGE, 15, 16))),
        ("a", (one, drawn(17), later, drawn(18, 19))),
        ("b", (three, drawn(20, 21, 22))),
        ("b", (three, drawn(20, 23))),
        ("c", (text, drawn(24, IMAGE, IMAGE))),
        ("c", (text, drawn(START, 25))),
    ]
    names = [{"sample_id": str(i), "trajectory_id": str(i), "group_id": group} for i, (group, _) in enumerate(given)]
    return [Sample(**name, purpose="train", segments=row) for name, (_, row) in zip(names, given)]


def own_logprobs(model: Any, sample: Sample, content: dict[str, Picture], banned: Sequence[int] = ()) -> Tensor:
    """Return the log-probs of a row's sampled tokens by the forward pass of transformers, where the banned ids have
    probability 0. It finds images by token id, so images get an id here that the row does not have, and a sampled
    placeholder is text."""
    ids, kind, sampled, at = sample_ids(sample), np.zeros(sample.total_tokens, np.int64), [], 0
    spare = model.config.image_token_id = min({*range(VOCAB)} - {*ids.tolist()})
    for s in sample.segments:
        for m in s.media:
            ids[at + m.start : at + m.end], kind[at + m.start : at + m.end] = spare, 1
        sampled += range(at, at + len(s.ids)) if s.source == "sampled" else ()
        at += len(s.ids)
    given: dict[str, Any] = {"input_ids": torch.from_numpy(ids)[None], "use_cache": False}
    if sample.media:
        given["pixel_values"] = torch.cat([content[name].patches for name in sample.media])
        given["image_grid_thw"] = torch.tensor([content[name].grid for name in sample.media])
        given["mm_token_type_ids"] = torch.from_numpy(kind)[None]
    logits = model(**given).logits[0]
    logits = logits.index_fill(-1, torch.tensor(banned, dtype=torch.int64), -torch.inf).log_softmax(-1)
    own: Tensor = logits[torch.tensor(sampled) - 1, torch.from_numpy(sample_ids(sample))[sampled]]
    return own


def stored(row: Sample, names: Mapping[str, str]) -> Sample:
    """Return the row with the references of its images in a store."""
    return replace(
        row,
        segments=tuple(
            replace(s, media=tuple(m._replace(reference=names[m.reference]) for m in s.media)) for s in row.segments
        ),
    )


def stored_images(store: Any) -> dict[str, str]:
    """Put an image of each size into a store of media. Return the references by the names in `rows`."""
    contents = {name: png(grid[2] * 2, grid[1] * 2, seed) for seed, (name, grid) in enumerate(GRIDS.items())}
    return {name: store.put(content, "test") for name, content in contents.items()}


def sample_ids(sample: Sample) -> np.ndarray:
    return np.concatenate([s.ids for s in sample.segments])


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return the bytes of an image with random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encoded(Image.fromarray(pixels))


def encoded(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def png_header(side: int) -> bytes:
    """Return a PNG file whose header gives it `side` x `side` pixels, with the content of fewer: of large images only
    the header is read."""
    small = encoded(Image.new("1", (8, 8)))
    header = b"IHDR" + struct.pack(">II", side, side) + small[24:29]
    return small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]


def image_folder(folder: Path, kind: str, **given: Any) -> Path:
    """Write a model and the settings of its image processor, which keeps sides that are multiples of 4 pixels. given:
    arguments of `model`."""
    return _saved(model(kind, **given), folder)


def _saved(made: Any, folder: Path) -> Path:
    made.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 16, "longest_edge": 4096}}
    Qwen2VLImageProcessorPil(**sizes, patch_size=2, temporal_patch_size=1, merge_size=2).save_pretrained(folder)
    return folder


TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that writes a placeholder for each image and video, as Qwen's."""


def image_tokenizer(more: Mapping[str, int] | None = None, template: str = TEMPLATE) -> Any:
    """Return a tokenizer of characters, with the special tokens of images that the models have. more: further special
    tokens"""
    from tokenizers import Tokenizer, decoders, models

    from verl.models import tiny

    characters = "abcdefghijklmnopqrstuvwxyz0123456789 <>|_?.,=+:!\n"
    vocab = {token: i for i, token in enumerate([*tiny.SPECIAL_TOKENS, *characters])}
    assert len(vocab) <= START
    seen = {"<|vision_start|>": START, "<|vision_end|>": END, "<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO}
    seen |= more or {}
    core = Tokenizer(models.BPE(vocab=vocab | seen, merges=[]))
    core.add_special_tokens([*tiny.SPECIAL_TOKENS, *seen])
    core.decoder = decoders.Fuse()
    return tiny.with_chat(core, template)


def chat_folder(folder: Path, kind: str, made: Any = None) -> Path:
    """Write a model that reads images with the settings of its image processor and its tokenizer. made: a model of
    another family with the content of Qwen's."""
    tokenizer = image_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    if made is None:
        made = model(kind, **ends)
    for config in (made.config, made.config.get_text_config(), made.generation_config):
        for name, value in ends.items():
            setattr(config, name, value)
    tokenizer.save_pretrained(folder)
    return _saved(made, folder)
