"""Tiny tokenizers, image processors and folders of the families whose images are tokens with marks, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from vision_families import PINPOINTS, random_model

from verl.models.tiny import SPECIAL_TOKENS

SQUARE = {"height": 8, "width": 8}
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The processor of a family. image: the token of a feature, the first id of the model · written: the token that
    the chat template writes · begin: the token with which it begins · tokens: further special tokens, with their ids
    in the order given"""

    image: str
    written: str = ""
    tokens: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    processor: str
    images: str
    settings: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)
    metaspace: bool = False
    begin: str = ""
    marks: int
    """The number of tokens that a policy must not sample."""


_ROWS = Kind(
    image="[IMG]",
    tokens=["[IMG_BREAK]", "[IMG_END]"],
    processor="PixtralProcessor",
    images="PixtralImageProcessorPil",
    settings={"size": {"longest_edge": 12}},
    more={"patch_size": 2},
    marks=3,
)
_TILED = Kind(
    image="<image>",
    tokens=["<fake_token_around_image>", "<global-img>", *TILES],
    processor="Idefics3Processor",
    images="Idefics3ImageProcessorPil",
    settings={"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}},
    more={"image_seq_len": 4},
    marks=12,
)
KINDS: dict[str, Kind] = {
    "pixtral": _ROWS,
    "mistral3": Kind(**{**vars(_ROWS), "more": {"patch_size": 2, "spatial_merge_size": 2}}),
    "idefics3": _TILED,
    "smolvlm": Kind(**{**vars(_TILED), "processor": "SmolVLMProcessor", "images": "SmolVLMImageProcessorPil"}),
    "llava": Kind(
        image="<image>",
        processor="LlavaProcessor",
        images="CLIPImageProcessorPil",
        settings={"size": {"shortest_edge": 8}, "crop_size": SQUARE},
        more={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        metaspace=True,
        marks=1,
    ),
    "kimi_k25": Kind(
        image="<|media_pad|>",
        tokens=["<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"],
        processor="Kimi_K25Processor",
        images="",
        settings={"size": {"max_height": 6, "max_width": 6}, "max_patches": 24, "patch_size": 2},
        marks=5,
    ),
    "llava_next": Kind(
        image="<image>",
        processor="LlavaNextProcessor",
        images="LlavaNextImageProcessorPil",
        settings={"size": {"shortest_edge": 8}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS},
        more={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        marks=1,
    ),
    "mllama": Kind(
        image="<|image|>",
        begin="<|begin_of_text|>",
        processor="MllamaProcessor",
        images="MllamaImageProcessorPil",
        settings={"size": SQUARE, "max_image_tiles": 4},
        marks=0,
    ),
    "internvl": Kind(
        image="<IMG_CONTEXT>",
        tokens=["<img>", "</img>"],
        names={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor="InternVLProcessor",
        images="GotOcr2ImageProcessorPil",
        settings={"size": SQUARE},
        more={"image_seq_length": 4},
        marks=3,
    ),
    "gemma3": Kind(
        image="<image_soft_token>",
        written="<start_of_image>",
        tokens=["<start_of_image>", "<end_of_image>"],
        names={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        processor="Gemma3Processor",
        images="Gemma3ImageProcessorPil",
        settings={"size": SQUARE},
        more={"image_seq_length": 4},
        marks=3,
    ),
}
NAMES = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
KINDS["gemma4"] = Kind(
    image="<|image|>",
    tokens=["<|video|>", *[token for token in NAMES.values() if token != "<|image|>"]],
    names=NAMES,
    processor="Gemma4Processor",
    images="Gemma4ImageProcessorPil",
    settings={"max_soft_tokens": 70, "patch_size": 2, "pooling_kernel_size": 2},
    marks=7,
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MERGES = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("a", "b"), (" ", "a"), ("r", "o"), ("_", "1"), (">", "\n")]


def tokenizer_of(kind: str, *, without: str = "") -> Any:
    """Return a tokenizer with merges, among them those of line ends. without: a special token that it lacks."""
    k = KINDS[kind]
    mark, characters = ("▁", []) if k.metaspace else ("Ġ", pre_tokenizers.ByteLevel.alphabet())
    spelled = {" ": mark, "\n": "\n" if k.metaspace else "Ċ"}
    plain = [*map(chr, range(33, 127)), *spelled.values()] if k.metaspace else sorted(characters)
    pairs = [tuple("".join(spelled.get(c, c) for c in part) for part in pair) for pair in MERGES]
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*plain, *map("".join, pairs)]))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    if k.metaspace:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    begin = (k.begin,) if k.begin else ()
    given = [token for token in (*SPECIAL_TOKENS, *begin, k.image, *k.tokens) if token != without]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in given])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|end|>",
        bos_token=k.begin or None,
        extra_special_tokens={} if without else dict(k.names),
    )
    made.chat_template = k.begin + TEMPLATE.replace("IMAGE", k.written or k.image)
    return made


def folder_of(kind: str, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    """Write a model's configuration with the ids of a tokenizer, and the settings of its image processor."""
    config = built(kind, tokenizer).config
    config.save_pretrained(folder)
    _save_settings(kind, folder, **settings)
    return config


def marked_folder(kind: str, folder: Path) -> Path:
    """Write a whole model with its tokenizer and the settings of its image processor."""
    tokenizer = tokenizer_of(kind)
    built(kind, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _save_settings(kind, folder)
    return folder


def _save_settings(kind: str, folder: Path, **settings: Any) -> None:
    k = KINDS[kind]
    if k.images:
        getattr(transformers, k.images)(**k.settings, **settings).save_pretrained(folder)
    else:  # its class needs torchvision
        (folder / "preprocessor_config.json").write_text(json.dumps(dict(k.settings)))


def built(kind: str, tokenizer: Any) -> Any:
    """Return a model with random weights and the vocabulary of a tokenizer."""
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(KINDS[kind].image)}
    if kind == "gemma3":
        ids |= {"boi_token_index": tokenizer.boi_token_id, "eoi_token_index": tokenizer.eoi_token_id}
    if kind == "gemma4":
        named = {name.replace("_token", "_token_id"): tokenizer.convert_tokens_to_ids(t) for name, t in NAMES.items()}
        named["eoa_token_index"] = named.pop("eoa_token_id")
        ids |= named
        ids["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video|>")
    if kind == "kimi_k25":
        ids["video_token_id"] = tokenizer.convert_tokens_to_ids(KINDS[kind].tokens[0])
    ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    outside = kind == "mllama"  # no policy can sample its token of images
    ends |= {"vocab_size_per_layer_input": len(tokenizer)} if kind == "gemma4" else {}
    return random_model(kind, ids, vocab_size=len(tokenizer) - outside, **ends)
