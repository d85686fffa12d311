"""The memory of a tower that reads images: what a pass keeps of each token of an image for its gradient, and what is
kept of images between passes. From the headers of the model's tensors. No torch."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from verl.config.devices import on_cuda
from verl.config.model_files import LAYER, find_model_folder, read_model_config, read_weight_headers, text_config
from verl.config.schema import Config
from verl.model_engine.lora_spec import trained_by
from verl.models.families import FAMILIES, name_of
from verl.models.kept import KEPT_BYTES
from verl.planner.rows import count_rows, may_have_images

ROTATED = 9
"""Values that a layer keeps per patch for rotated positions, in widths of the tower: q and k, in parts."""


class TowerFacts(NamedTuple):
    """The values (numbers) of a tower per token of an image: patches · kept: what all layers keep for the gradient ·
    layer: what the widest layer computes · pixels: the content of the patches · hidden: the features."""

    patches: int
    kept: int
    layer: int
    pixels: int
    hidden: int


def tower_facts(path: str) -> TowerFacts | None:
    """Return the facts of the tower of a model; None if it reads text alone, or reads images by cross-attention, of
    which each is one token.

    A layer keeps the inputs and results of each of its matrices, which is rather too much: q, k and v have one input.
    It also keeps the values of rotated positions, where it has no table of positions."""
    folder = find_model_folder(path)
    config = read_model_config(folder)
    family = FAMILIES.get(name_of(config))
    if family is None or family.crossed:
        return None
    layers, inputs, width, pixels, rotated = Counter[str](), set[int](), 0, 0, True
    for name, tensor in read_weight_headers(folder).items():
        part, shape = family.part_of(name), tensor.shape
        if part == "vision" and f".{family.tower}." in f".{name}":
            if layer := LAYER.match(name):
                layers[layer[0]] += sum(shape) if len(shape) == 2 else 0
            elif "position_embedding" in name:
                rotated = False
            elif ".patch_" in name and "pos_emb" not in name and len(shape) > 1:
                width, pixels = shape[0], tensor.numel // shape[0]
        elif part == "projector" and len(shape) == 2:
            inputs.add(shape[1])
    hidden = int(text_config(config)["hidden_size"])
    given = max((n for n in inputs - {hidden} or inputs if width and n % width == 0), default=width)
    patches = max(1, given // max(1, width)) * family.pooled
    sizes = [size + ROTATED * width * rotated for size in layers.values()]
    return TowerFacts(patches, patches * sum(sizes), patches * max(sizes, default=0), patches * pixels, hidden)


def image_tokens(config: Config, tokens: int) -> int:
    """Return the most tokens of images among so many of a pass, if rows are as long as they may be; 0 if the rows have
    no images."""
    if not may_have_images(tuple(config.data.train_files), config.data.dataset_class is not None):
        return 0
    prompt = config.data.max_prompt_tokens
    return -(-tokens * prompt // (prompt + config.rollout.max_response_tokens))


def tower_bytes(config: Config, path: str, tokens: int, *, dtype_bytes: int) -> tuple[int, int]:
    """Return the bytes that the tower of a model keeps for the gradient in a pass of so many tokens, and those of its
    widest layer."""
    if (tower := tower_facts(path)) is None:
        return 0, 0
    seen = image_tokens(config, tokens)
    return seen * (dtype_bytes * tower.kept + 4 * tower.pixels), seen * dtype_bytes * tower.layer


def kept_images(config: Config) -> dict[str, int]:
    """Return the bytes of processed images, and of their features in a rollout engine, that a process keeps: those of
    all rows, within the budget of each."""
    tower = tower_facts(config.model.path)
    if tower is None or not (each := image_tokens(config, config.data.max_prompt_tokens)):
        return {}
    rows = None if config.data.dataset_class else count_rows(config.data.train_files)
    tokens = KEPT_BYTES if rows is None else rows * each
    on_host = 0 if on_cuda(config) else 1  # where it is a device's memory that is planned, pixels are not in it
    return {
        "processed images": min(KEPT_BYTES, 4 * tower.pixels * tokens) * on_host,
        "image features": min(KEPT_BYTES, 4 * tower.hidden * tokens),
    }


def trains_tower(config: Config) -> bool:
    """Return True if gradients go through the policy's tower."""
    return trained_by(config.model.lora) is None and not {"vision", "projector"} <= {*config.model.freeze}
