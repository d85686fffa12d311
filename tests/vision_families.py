"""Tiny random models of further families that read images, their images, and rows with them, for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from vision import END, IMAGE, START, VIDEO, VOCAB, drawn, sample_ids

from verl.media_tokens import Picture
from verl.models.families import family_of
from verl.types import Grid, Medium, Sample, Segment

_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=128,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_TOWER: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family's tiny model."""

    config: str
    text: dict[str, Any]
    tower: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    grids: dict[str, Grid]
    pixels: Callable[[Grid], tuple[int, ...]]
    """The shape of an image's content, by its grid."""
    native: bool = True


_SIZES: dict[str, Grid] = {"cat": (1, 2, 6), "dog": (1, 2, 2), "fox": (1, 6, 4)}
_TILES: dict[str, Grid] = {"cat": (2, 1, 1), "dog": (1, 1, 1), "fox": (3, 1, 1)}
_ONE_TILE: dict[str, Grid] = {"cat": (1, 1, 1), "dog": (1, 1, 1), "fox": (1, 1, 1)}
SOUNDS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}
"""A tower that reads sounds, which no row has."""
PINPOINTS = [[8, 16], [16, 8], [16, 16]]
"""The sizes in pixels of the tiles of LLaVA-NeXT together, of 8 x 8 each."""
_PATCHES: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_DELTA_NETS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
    },
}
_SMOLVLM = Kind(
    config="SmolVLMConfig",
    text={"model_type": "llama"},
    tower={"patch_size": 2, "image_size": 8},
    more={"image_token_id": IMAGE, "scale_factor": 2},
    grids={"cat": (3, 1, 2), "dog": (1, 0, 0), "fox": (5, 2, 2)},
    pixels=lambda grid: (grid[0], 3, 8, 8),
)
KINDS: dict[str, Kind] = {
    "pixtral": Kind(
        config="LlavaConfig",
        text={"model_type": "mistral", "sliding_window": None},
        tower={"model_type": "pixtral", "patch_size": 2, "image_size": 16},
        more={"image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        grids=_SIZES,
        pixels=lambda grid: (1, 3, grid[1] * 2, grid[2] * 2),
    ),
    "mistral3": Kind(
        config="Mistral3Config",
        text={"model_type": "mistral", "sliding_window": None},
        tower={"model_type": "pixtral", "patch_size": 2, "image_size": 16},
        more={"image_token_index": IMAGE, "tie_word_embeddings": False},
        grids=_SIZES,
        pixels=lambda grid: (1, 3, grid[1] * 2, grid[2] * 2),
    ),
    "gemma3": Kind(
        config="Gemma3Config",
        text={
            "model_type": "gemma3_text",
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        tower={"model_type": "siglip_vision_model", "patch_size": 2, "image_size": 8, "vision_use_head": False},
        more={"image_token_id": IMAGE, "mm_tokens_per_image": 4},
        grids=_ONE_TILE,
        pixels=lambda grid: (grid[0], 3, 8, 8),
        native=False,
    ),
    "llava": Kind(
        config="LlavaConfig",
        text={"model_type": "llama"},
        tower={"model_type": "clip_vision_model", "patch_size": 4, "image_size": 8},
        more={"image_token_index": IMAGE},
        grids=_ONE_TILE,
        pixels=lambda grid: (grid[0], 3, 8, 8),
    ),
    "kimi_k25": Kind(
        config="Kimi_K25Config",
        text={
            "model_type": "deepseek_v3",
            "num_key_value_heads": 2,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        tower={"patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4},
        more={"image_token_id": IMAGE, "video_token_id": VIDEO, "projection_hidden_size": 16},
        grids={"cat": (1, 4, 6), "dog": (1, 2, 2), "fox": (1, 6, 4)},
        pixels=lambda grid: (grid[1] * grid[2], 3, 2, 2),
        native=False,
    ),
    "llava_next": Kind(
        config="LlavaNextConfig",
        text={"model_type": "llama"},
        tower={"model_type": "clip_vision_model", "patch_size": 4, "image_size": 8},
        more={"image_token_index": IMAGE, "image_grid_pinpoints": PINPOINTS},
        grids={"cat": (3, 10, 24), "dog": (3, 20, 9), "fox": (5, 30, 28)},
        pixels=lambda grid: (grid[0], 3, 8, 8),
    ),
    "mllama": Kind(
        config="MllamaConfig",
        text={
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        tower={
            "patch_size": 4,
            "image_size": 8,
            "num_global_layers": 1,
            "attention_heads": 2,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 32,
        },
        more={"image_token_index": IMAGE},
        grids={"cat": (2, 1, 2), "dog": (1, 1, 1), "fox": (3, 3, 1)},
        pixels=lambda grid: (grid[0], 3, 8, 8),
        native=False,
    ),
    "smolvlm": _SMOLVLM,
    "idefics3": replace(_SMOLVLM, config="Idefics3Config"),
    "qwen3_vl_moe": Kind(
        config="Qwen3VLMoeConfig",
        text={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
        },
        tower=_PATCHES | {"deepstack_visual_indexes": [0]},
        more={"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START},
        grids={"cat": (1, 4, 6), "dog": (1, 2, 2), "fox": (1, 6, 4)},
        pixels=lambda grid: (grid[1] * grid[2], 12),
    ),
    "qwen3_5": Kind(
        config="Qwen3_5Config",
        text=_DELTA_NETS,
        tower=_PATCHES,
        more={"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START},
        grids={"cat": (1, 4, 6), "dog": (1, 2, 2), "fox": (1, 6, 4)},
        pixels=lambda grid: (grid[1] * grid[2], 12),
    ),
    "qwen3_5_moe": Kind(
        config="Qwen3_5MoeConfig",
        text=_DELTA_NETS
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        tower=_PATCHES,
        more={"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START},
        grids={"cat": (1, 4, 6), "dog": (1, 2, 2), "fox": (1, 6, 4)},
        pixels=lambda grid: (grid[1] * grid[2], 12),
    ),
    "gemma4": Kind(
        config="Gemma4Config",
        text={
            "num_hidden_layers": 5,  # what a layer of either type computes is read by a later one with its own keys
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
            "num_kv_shared_layers": 2,
            "sliding_window": 6,
            "global_head_dim": 24,
            "use_bidirectional_attention": "vision",
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
            "final_logit_softcapping": 3.0,
            "max_position_embeddings": 512,
        },
        tower={
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "position_embedding_size": 160,
            "use_clipped_linears": True,
        },
        more={"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 40, "boi_token_id": START}
        | {"eoi_token_id": END, "boa_token_id": 41, "eoa_token_index": 42, "audio_config": SOUNDS},
        grids={"cat": (1, 4, 6), "dog": (1, 2, 2), "fox": (1, 6, 4)},
        pixels=lambda grid: (grid[1] * grid[2], 12),
        native=False,
    ),
    "internvl": Kind(
        config="InternVLConfig",
        text={"model_type": "qwen2"},
        tower={"model_type": "internvl_vision", "patch_size": [2, 2], "image_size": [8, 8]},
        more={"image_token_id": IMAGE, "image_seq_length": 4},
        grids=_TILES,
        pixels=lambda grid: (grid[0], 3, 8, 8),
    ),
}

CLOSE = {"gemma4": 4e-5}
"""Weights that move by half a rounding of float32 move the log-probs of this tiny model by 1.2e-5, and those of the
others by 3e-6 at most: CPUs that sum in other orders differ by as much."""


def model(kind: str) -> Any:
    """Return a model of the kind with its random weights. It is the caller's own: what one test adds to it, such as
    factors without values, is in no other test's model."""
    return copy.deepcopy(_first(kind))


@cache
def _first(kind: str) -> Any:
    return random_model(kind, {})


def random_model(kind: str, ids: Mapping[str, int], tower: Mapping[str, Any] | None = None, **text: Any) -> Any:
    """Return a model with random weights, of which biases and norms have an effect. ids: of its placeholders · tower,
    text: further keys of its vision and text configuration."""
    k = KINDS[kind]
    own = any(key.startswith("image_token") for key in ids)
    more = {key: value for key, value in k.more.items() if not (own and key.startswith("image_token"))}
    seen = _TOWER | k.tower | dict(tower or {})
    described = {"text_config": _TEXT | k.text | text, "vision_config": seen, **more, **ids}
    config = getattr(transformers, k.config)(**described)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForImageTextToText.from_config(config).float()
        for name, parameter in made.named_parameters():
            if "projection_weight" in name or "gate" in name.rpartition(".")[2]:  # zeros at the beginning
                parameter.data.normal_(std=0.2)
            elif "bias" in name or "norm" in name or "lambda" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        for buffer in made.buffers():  # the limits of inputs and outputs, without one at the beginning
            if buffer.is_floating_point() and buffer.isinf().any():
                buffer.clamp_(-3.0, 3.0)
    return made


@cache
def pictures(kind: str) -> dict[str, Picture]:
    rng, k = torch.Generator().manual_seed(0), KINDS[kind]
    return {n: Picture(patches=torch.randn(k.pixels(g), generator=rng), grid=g) for n, g in k.grids.items()}


class Content:
    """The images of a kind, as an engine reads them."""

    def __init__(self, kind: str) -> None:
        self._of = pictures(kind)

    def of(self, names: Iterable[str]) -> dict[str, Picture]:
        return {name: self._of[name] for name in names}


def seen(kind: str, text: list[int], *names: str, source: Any = "prompt") -> Segment:
    """Return a segment of text with these images after its first token. Within an image, START is text."""
    config = _first(kind).config
    family = family_of(config)
    assert family is not None
    ids, media = text[:1], list[Medium]()
    for name in names:
        parts = family.layout(config, KINDS[kind].grids[name])
        tokens = [i for p in parts for i in ([IMAGE] * p if isinstance(p, int) else [START])]
        own = np.flatnonzero(np.array(tokens) == IMAGE)  # marks before and after them are text
        media.append(Medium(name, len(ids) + 1 + int(own[0]), int(own[-1] - own[0]) + 1))
        ids = [*ids, START, *tokens, END]
    return Segment(ids=np.array([*ids, *text[1:]]), source=source, media=tuple(media))


def crossed(kind: str) -> bool:
    family = family_of(_first(kind).config)
    return family is not None and family.crossed


@cache
def rows(kind: str) -> list[Sample]:
    """Return rows with 0, 1, 2 and 3 images, several turns, and a placeholder that the policy sampled."""
    one, three = seen(kind, [1, 2, 3], "cat"), seen(kind, [4, 5], "fox", "cat", "dog")
    late = () if crossed(kind) else ("dog",)
    text, later = seen(kind, [6, 7, 8]), seen(kind, [9, 10, 11], *late, source="env")
    given = [
        ("a", (one, drawn(12, 13))),
        ("a", (one, drawn(14, IMAGE, 15))),
        ("a", (one, drawn(17), later, drawn(18, 19))),
        ("b", (three, drawn(20, 21))),
        ("b", (three, drawn(20, 23))),
        ("c", (text, drawn(24, IMAGE))),
    ]
    names = [{"sample_id": str(i), "trajectory_id": str(i), "group_id": group} for i, (group, _) in enumerate(given)]
    return [Sample(**name, purpose="train", segments=row) for name, (_, row) in zip(names, given)]


def own_logprobs(kind: str, module: Any, sample: Sample) -> Tensor:
    """Return the log-probs of a row's sampled tokens by the forward pass of transformers. It finds images by token id,
    so images get an id here that the row does not have, and a sampled placeholder is text."""
    ids, is_image, sampled, at = sample_ids(sample), np.zeros(sample.total_tokens, np.int64), list[int](), 0
    family, config, content = family_of(module.config), module.config, pictures(kind)
    assert family is not None
    spare, other, *_ = sorted({*range(3, VOCAB)} - {*ids.tolist()})
    config.image_token_id = spare
    if kind in ("kimi_k25", "gemma4"):  # they have other embeddings for the ids of placeholders
        config.video_token_id = config.audio_token_id = other
    for s in sample.segments:
        for m in s.media:
            places = at + m.start + np.flatnonzero(s.ids[m.start : m.end] == IMAGE)
            assert len(places) == family.features(config, content[m.reference].grid)
            ids[places] = spare
            is_image[at + m.start : at + m.end] = 1
        sampled += range(at, at + len(s.ids)) if s.source == "sampled" else ()
        at += len(s.ids)
    given: dict[str, Any] = {"input_ids": torch.from_numpy(ids)[None], "use_cache": False}
    if sample.media:
        given |= _content([content[name] for name in sample.media], family.content)
        if family.crossed:
            given["cross_attention_mask"] = _crossed(ids.tolist(), spare, given.pop("num_tiles"))
            given["input_ids"] = torch.from_numpy(sample_ids(sample))[None]  # the token of an image is text
        mutual = {"all": "token_type_ids", "windows": "mm_token_type_ids"}
        if kinds := mutual.get(family.mutual) or ("mm_token_type_ids" if family.axes > 1 else None):
            given[kinds] = torch.from_numpy(is_image)[None]
    logits = module(**given).logits[0].log_softmax(-1)
    own: Tensor = logits[torch.tensor(sampled) - 1, torch.from_numpy(sample_ids(sample))[sampled]]
    return own


def _crossed(ids: list[int], image: int, tiles: list[int]) -> Tensor:
    """Return the mask of cross-attention [1, T, images, 4], as the processor of Mllama makes it."""
    from transformers.models.mllama import processing_mllama as own

    places = own.get_cross_attention_token_mask(ids, image)
    return torch.from_numpy(own.convert_sparse_cross_attention_mask_to_dense([places], [tiles], 4, len(ids)))


def _canvas(images: list[Picture]) -> dict[str, Any]:
    from transformers.models.mllama import image_processing_pil_mllama as own

    tiles, num_tiles = own.pack_images([[image.patches.numpy() for image in images]], 4)
    sides = [[image.grid[1:] for image in images]]
    return {
        "pixel_values": torch.from_numpy(tiles),
        "aspect_ratio_ids": torch.from_numpy(own.convert_aspect_ratios_to_ids_np(sides, 4)),
        "aspect_ratio_mask": torch.from_numpy(own.build_aspect_ratio_mask_np(sides, 4)),
        "num_tiles": num_tiles[0],
    }


def _placed(images: list[Picture]) -> dict[str, Any]:
    """Each image has as many patches as a processor makes at most, 24, of which the last have no place."""
    patches = np.zeros((len(images), 24, images[0].patches.shape[1]), np.float32)
    places = np.full((len(images), 24, 2), -1)
    for image, into, place in zip(images, patches, places):
        into[: len(image.patches)] = image.patches.numpy()
        x, y = np.meshgrid(np.arange(image.grid[2]), np.arange(image.grid[1]))
        place[: len(image.patches)] = np.stack([x, y], -1).reshape(-1, 2)
    return {"pixel_values": torch.from_numpy(patches), "image_position_ids": torch.from_numpy(places)}


def _content(images: list[Picture], form: str) -> dict[str, Any]:
    """Return images as the processors of transformers do."""
    if form == "tiles on a canvas":
        return _canvas(images)
    if form == "placed patches":
        return _placed(images)
    if form != "pixels":
        content = torch.cat([image.patches for image in images])
        if form == "patches":
            return {"pixel_values": content, "image_grid_thw": torch.tensor([image.grid for image in images])}
        if form == "tiles of a size":
            return {"pixel_values": content, "image_sizes": torch.tensor([image.grid[1:] for image in images])}
        return {"pixel_values": content[None] if form == "tiles in rows" else content}
    sizes = [image.patches.shape[-2:] for image in images]
    canvas = torch.zeros(len(images), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for image, room in zip(images, canvas):
        room[:, : image.patches.shape[-2], : image.patches.shape[-1]] = image.patches[0]
    return {"pixel_values": canvas, "image_sizes": torch.tensor([[h, w] for h, w in sizes])}


def published(name: str) -> str:
    """Return the name of a weight in Moonshot's folders. transformers reads these, and saves others."""
    name = name.replace("language_model.model.blocks", "language_model.model.layers")
    name = name.replace("vision_tower.encoder.patch_embed", "vision_tower.patch_embed")
    return name.removeprefix("model.") if "pre_norm" in name else name
