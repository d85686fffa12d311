"""The features of images and sounds: what a tower is given, and which of its results belong to which image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.media_tokens import Picture
from verl.models.families import Content, ImageFamily


def encode_pictures(
    base: Any, family: ImageFamily, config: Any, pictures: Sequence[Picture], device: torch.device
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the features [n, H] of each image or sound, and those that layers of the decoder add, of all images
    [N, H]. base: the model without its head."""
    if family.crossed:
        return _crossed_states(base, config, pictures, device), []
    if not (sounds := [picture for picture in pictures if picture.sound]):
        return _encode_images(base, family, config, pictures, device)
    images = [picture for picture in pictures if not picture.sound]
    seen, deeper = _encode_images(base, family, config, images, device) if images else ((), [])
    assert family.sounds is not None
    parts = [[sound] for sound in sounds] if family.sounds.alone else [sounds]
    read = [features for part in parts for features in _encode_sounds(base, family, config, part, device)]
    found = iter(seen), iter(read)
    features = tuple(next(found[picture.sound]) for picture in pictures)
    layers = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    return features, [_beside_sounds(deeper[k : k + 1], pictures, features) for k in range(layers)]


def _beside_sounds(states: Sequence[Tensor], pictures: Sequence[Picture], features: Sequence[Tensor]) -> Tensor:
    """Return what a layer adds for all pictures [N, H], 0 for sounds. states: that of the images; () if there are
    none"""
    images = [own for picture, own in zip(pictures, features) if not picture.sound]
    of = iter(states[0].split([len(own) for own in images]) if images else ())
    return torch.cat([own.new_zeros(own.shape) if p.sound else next(of) for p, own in zip(pictures, features)])


def _encode_sounds(
    base: Any, family: ImageFamily, config: Any, sounds: Sequence[Picture], device: torch.device
) -> tuple[Tensor, ...]:
    """Return the features [n, H] of each sound."""
    frames = torch.tensor([sound.grid[0] for sound in sounds])
    longest = int(frames.max())
    padded = torch.stack([F.pad(sound.patches, (0, longest - sound.grid[0])) for sound in sounds])
    mask = torch.arange(longest) < frames[:, None]
    given = {"input_features": padded.to(device), "feature_attention_mask": mask.to(device)}
    out = base.get_audio_features(**given, return_dict=True)
    return out.last_hidden_state.split([family.features(config, sound.grid, sound=True) for sound in sounds])


def _encode_images(
    base: Any, family: ImageFamily, config: Any, pictures: Sequence[Picture], device: torch.device
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    counts = [family.features(config, picture.grid) for picture in pictures]
    twice = 2 if counts == [1] else 1  # Mistral3 of transformers fails if there is one feature
    given = _GIVEN[family.content]([*pictures] * twice, config, device)
    if family.content == "patches":  # the tower of Kimi does not convert them
        given["pixel_values"] = given["pixel_values"].to(next(base.get_submodule(family.tower).parameters()).dtype)
    out = base.get_image_features(**given, return_dict=True)
    features = _joined(out.pooler_output).split(counts * twice)[: len(counts)]
    deeper = [_joined(states)[: sum(counts)] for states in vars(out).get("deepstack_features") or ()]
    return features, deeper


def _crossed_states(base: Any, config: Any, pictures: Sequence[Picture], device: torch.device) -> tuple[Tensor, ...]:
    """Return the states [n, H] of each image that layers of cross-attention read, those of tiles without content
    included."""
    vision = config.vision_config
    most, counts = vision.max_num_tiles, [len(picture.patches) for picture in pictures]
    tiles = [F.pad(picture.patches, (0, 0) * 3 + (0, most - n)) for picture, n in zip(pictures, counts)]
    kinds = [vision.supported_aspect_ratios.index([*picture.grid[1:]]) + 1 for picture in pictures]
    out = base.vision_model(
        pixel_values=torch.stack(tiles)[:, None].to(device),
        aspect_ratio_ids=torch.tensor(kinds, device=device)[:, None],
        aspect_ratio_mask=(torch.arange(most) < torch.tensor(counts)[:, None]).long()[:, None].to(device),
    ).last_hidden_state
    return base.multi_modal_projector(out).flatten(1, 3).unbind()


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the features of all images, or of all tiles, as [N, H]."""
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in features])


def _patches(pictures: Sequence[Picture], config: Any, device: torch.device) -> dict[str, Tensor]:
    grid = torch.tensor([picture.grid for picture in pictures], device=device)
    return {"pixel_values": _content(pictures, device), "image_grid_thw": grid}


def _placed_patches(pictures: Sequence[Picture], config: Any, device: torch.device) -> dict[str, Tensor]:
    """Images have as many patches as the largest of them; those behind an image's own have no place."""
    most, places = max(len(picture.patches) for picture in pictures), list[Tensor]()
    for picture in pictures:
        _, rows, columns = picture.grid
        y, x = torch.arange(rows * columns).div(columns, rounding_mode="floor"), torch.arange(rows * columns) % columns
        places.append(F.pad(torch.stack([x, y], 1), (0, 0, 0, most - rows * columns), value=-1))
    content = [F.pad(picture.patches, (0, 0, 0, most - len(picture.patches))) for picture in pictures]
    return {"pixel_values": torch.stack(content).to(device), "image_position_ids": torch.stack(places).to(device)}


def _pixels(pictures: Sequence[Picture], config: Any, device: torch.device) -> dict[str, Tensor]:
    """Images of unequal size are padded at the right and below; the tower reads each within its own size."""
    height, width = (max(picture.patches.shape[side] for picture in pictures) for side in (-2, -1))
    padded = [F.pad(p.patches, (0, width - p.patches.shape[-1], 0, height - p.patches.shape[-2])) for p in pictures]
    sizes = torch.tensor([picture.patches.shape[-2:] for picture in pictures], device=device)
    return {"pixel_values": torch.cat(padded).to(device), "image_sizes": sizes}


def _tiles(pictures: Sequence[Picture], config: Any, device: torch.device) -> dict[str, Tensor]:
    return {"pixel_values": _content(pictures, device)}


def _sized_tiles(pictures: Sequence[Picture], config: Any, device: torch.device) -> dict[str, Tensor]:
    sizes = torch.tensor([picture.grid[1:] for picture in pictures])
    return {"pixel_values": _content(pictures, device), "image_sizes": sizes}


def _tiles_in_rows(pictures: Sequence[Picture], config: Any, device: torch.device) -> dict[str, Tensor]:
    """Tiles are given as the images of one row."""
    return {"pixel_values": _content(pictures, device)[None]}


def _content(pictures: Sequence[Picture], device: torch.device) -> Tensor:
    return torch.cat([picture.patches for picture in pictures]).to(device)


_GIVEN: Mapping[Content, Callable[[Sequence[Picture], Any, torch.device], dict[str, Tensor]]] = {
    "patches": _patches,
    "placed patches": _placed_patches,
    "pixels": _pixels,
    "tiles": _tiles,
    "tiles in rows": _tiles_in_rows,
    "tiles of a size": _sized_tiles,
}


def picture_of(found: Mapping[str, Any], family: ImageFamily, config: Any) -> Picture:
    """Return one image from the result of an image processor for it alone."""
    content: Tensor = found["pixel_values"]
    if family.content == "patches":
        (grid,) = found["image_grid_thw"].tolist()
        return Picture(patches=content, grid=tuple(grid))
    if family.content == "placed patches":
        (patches,), (places,) = content, found["image_position_ids"]
        columns, rows = (places.amax(0) + 1).tolist()
        return Picture(patches=patches[: rows * columns].clone(), grid=(1, rows, columns))
    if family.content == "tiles":
        return Picture(patches=content, grid=(len(content), 1, 1))
    if family.content == "tiles on a canvas":
        ((kind,),), ((tiles,),) = found["aspect_ratio_ids"].tolist(), content
        rows, columns = config.vision_config.supported_aspect_ratios[kind - 1]
        return Picture(patches=tiles[: rows * columns].clone(), grid=(rows * columns, rows, columns))
    if family.content == "tiles in rows":
        ((rows,),), ((columns,),), (tiles,) = found["rows"], found["cols"], content
        return Picture(patches=tiles, grid=(len(tiles), int(rows), int(columns)))
    ((height, width),), side = found["image_sizes"].tolist(), config.vision_config.patch_size
    if family.content == "tiles of a size":
        return Picture(patches=content[0], grid=(len(content[0]), height, width))
    return Picture(patches=content[..., :height, :width], grid=(1, height // side, width // side))
