"""The plan of a tower that reads images: what its pass keeps for the gradient, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vision import KINDS as QWEN
from vision import model
from vision_families import IMAGE, pictures, random_model

from verl.media_tokens import Picture
from verl.models.encode import encode_pictures
from verl.models.families import family_of
from verl.planner.towers import tower_facts

WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4}
LAYERS = 4
# kind -> (settings of the tower, the grid of an image, the shape of its content, its tokens)
CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, ...], int]] = {
    "qwen2_vl": ({"depth": LAYERS, "embed_dim": 96, "num_heads": 4, "mlp_ratio": 4}, (1, 24, 40), (960, 12), 240),
    "qwen2_5_vl": (
        {"depth": LAYERS, "hidden_size": 96, "intermediate_size": 256, "num_heads": 4, "window_size": 16},
        (1, 24, 40),
        (960, 12),
        240,
    ),
    "qwen3_vl": (
        {"depth": LAYERS, "hidden_size": 96, "intermediate_size": 256, "num_heads": 4},
        (1, 24, 40),
        (960, 12),
        240,
    ),
    "pixtral": ({**WIDE, "num_hidden_layers": LAYERS, "image_size": 96}, (1, 24, 40), (1, 3, 48, 80), 960),
    "gemma3": ({**WIDE, "num_hidden_layers": LAYERS, "image_size": 64}, (1, 1, 1), (1, 3, 64, 64), 64),
    "smolvlm": ({**WIDE, "num_hidden_layers": LAYERS, "image_size": 64}, (1, 0, 0), (1, 3, 64, 64), 256),
}


def kept_bytes(made: Any, picture: Picture) -> int:
    """Return the bytes that the encoding of an image keeps for its gradient."""
    own = {p.untyped_storage().data_ptr() for p in made.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    family = family_of(made.config)
    assert family is not None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features, _ = encode_pictures(made.model, family, made.config, [picture], torch.device("cpu"))
        sum(f.sum() for f in features)
    return sum(kept.values())


@pytest.mark.parametrize("kind", CASES)
def test_a_pass_keeps_what_is_planned(kind: str, tmp_path: Path) -> None:
    tower, grid, shape, tokens = CASES[kind]
    if kind in QWEN:
        made = model(kind, tower=tower)
    else:
        ids = {"image_token_index": IMAGE} if kind == "pixtral" else {"image_token_id": IMAGE}
        made = random_model(kind, ids, tower=tower)
    made.save_pretrained(tmp_path)
    facts = tower_facts(str(tmp_path))
    assert facts is not None
    planned = tokens * 4 * (facts.kept + facts.pixels)
    measured = kept_bytes(made, Picture(patches=torch.randn(shape), grid=grid))
    assert 1.0 <= planned / measured < 1.3


@pytest.mark.parametrize("kind", ["kimi_k25", "internvl", "llava", "qwen3_5", "idefics3", "mistral3"])
def test_the_content_of_a_token_is_that_of_its_patches(kind: str, tmp_path: Path) -> None:
    ids = {"image_token_index": IMAGE} if kind in ("llava", "mistral3") else {"image_token_id": IMAGE}
    made = random_model(kind, ids)
    made.save_pretrained(tmp_path)
    facts, family, picture = tower_facts(str(tmp_path)), family_of(made.config), pictures(kind)["cat"]
    assert facts is not None and family is not None
    features, _ = encode_pictures(made.model, family, made.config, [picture], torch.device("cpu"))
    assert facts.pixels * sum(map(len, features)) == picture.patches.numel()
