"""A model that reads images, made from scratch, with the chat template and the settings that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The further special tokens of models that read images."""
IMAGE_CONTENT = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
)
"""The part of a chat template that writes the content of a message `m`, a text or parts."""
IMAGE_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}" + IMAGE_CONTENT + "<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that reads content parts, and writes an image as Qwen's templates do."""


def qwen3_vl(
    tokenizer: Any,
    *,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tower_hidden: int = 64,
    tower_layers: int = 2,
    patch: int = 14,
    seed: int = 0,
    max_positions: int = 512,
    vocab_size: int | None = None,
) -> Any:
    """Return a Qwen3-VL model with random weights, for a tokenizer that has `IMAGE_TOKENS`; 0.46M parameters by
    default. Two by two patches are one token."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    size, ids = hidden // heads, dict(zip(("start", "end", "image", "video"), _ids(tokenizer, IMAGE_TOKENS)))
    side = size // 8  # of the pairs of a head, half are turned by the frame and a quarter by the row and the column
    text = {
        "vocab_size": vocab_size or -(-len(tokenizer) // 32) * 32,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": max_positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [size // 2 - 2 * side, side, side],
        },
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    tower = {
        "depth": tower_layers,
        "hidden_size": tower_hidden,
        "intermediate_size": 2 * tower_hidden,
        "num_heads": 4,
        "patch_size": patch,
        "temporal_patch_size": 1,
        "out_hidden_size": hidden,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        vision_start_token_id=ids["start"],
        vision_end_token_id=ids["end"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config)


def _ids(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    return list(map(tokenizer.convert_tokens_to_ids, tokens))


def save_image_settings(config: Any, path: Path, *, min_pixels: int = 256, max_pixels: int = 1 << 20) -> None:
    """Write preprocessor_config.json: how images are processed for a model of this configuration."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tower, sizes = config.vision_config, {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    Qwen2VLImageProcessorPil(
        size=sizes,
        patch_size=tower.patch_size,
        temporal_patch_size=tower.temporal_patch_size,
        merge_size=tower.spatial_merge_size,
    ).save_pretrained(path)
