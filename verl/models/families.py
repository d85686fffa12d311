"""Model families that read images and sounds, one row for each: the number and positions of an image's tokens, the part
of the model that reads them. A family without a row is refused. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from verl.errors import Refused
from verl.models.clips import CLIPS, Clip, clip_places
from verl.models.sounds import SoundRules, halved_thrice, halved_twice
from verl.models.tiles import (
    filled_grid,
    grid_of_canvas,
    grid_of_marked_tiles,
    grid_of_sized_tiles,
    grid_of_tiles,
    marked_tiles,
    one_tile,
    one_tile_without_crops,
    pooled_patches,
    square_tile,
    tiles_alone,
    unpadded_tiles,
)
from verl.types import Grid, Medium

Part = Literal["vision", "projector", "audio", "language"]
"""The parts of a model that reads images. Only one that reads sounds has the part `audio`."""
Mutual = Literal["", "all", "windows"]
"""The layers in which the tokens of an image attend to each other: none, all, or those with a sliding window."""
Content = Literal[
    "patches", "placed patches", "pixels", "tiles", "tiles in rows", "tiles on a canvas", "tiles of a size"
]
"""The form of an image as a tower reads it: patches [P, D] with their grid, or with the place of each, pixels of any
size, tiles of one size (of the image in its own size, where the features depend on it)."""
_MANY = re.compile(r"(vision|visual|image|video|audio|speech|vq|vit|thinker)_?(tower_)?config|visual|mm_vision_tower")
"""Keys of config.json that describe an encoder of what is not text."""


_PLACEHOLDERS = (
    *("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index"),
    *("audio_token_id", "audio_start_token_id", "audio_end_token_id"),
)
"""The names that configurations have for the ids of placeholders and of the marks around them."""


LATE_IMAGE = (
    "an image behind a token that is trained: in a model with cross-attention, tokens before the first image read all "
    "images of a row, so an answer would depend on images that were not there. Fix: all images in front of what is "
    "trained"
)


def _placeholder_ids(config: Any) -> tuple[int, ...]:
    """Return the ids of placeholders in a configuration, as far as they are in the vocabulary."""
    ids = {getattr(config, name, None) for name in _PLACEHOLDERS}
    return tuple(sorted(i for i in ids if i is not None and 0 <= i < config.get_text_config().vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFamily:
    """The facts of a model family that reads images."""

    axes: int = 1
    """The number of positions of each token."""
    content: Content
    """The form of an image as the tower reads it."""
    layout: Callable[[Any, Grid], Sequence[int | str]]
    """(config, grid) -> what replaces the token that the chat template writes for an image, in order: numbers of
    features of the image, and the text before, between and after them."""
    positions: Callable[[Any, Grid], tuple[np.ndarray, int]] | None = None
    """(config, grid) -> the positions [axes, tokens] of an image's tokens, of which the first is 0, and the position
    of the token after them. None: an image's tokens are counted as text is."""
    mutual: Mutual = ""
    """The layers in which the tokens of an image attend to each other, not only to those before them."""
    crossed: bool = False
    """Layers of cross-attention read the images; the token of an image is text. They are computed for padded rows."""
    unsampled_rows: int = 0
    """The number of rows of the embedding that are for ids without a logit, after those of the vocabulary."""
    processing: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """(config) -> settings of the image processor that its file does not have."""
    banned: Callable[[Any], tuple[int, ...]] = _placeholder_ids
    """(config) -> the ids of placeholders and of the marks around them, which a policy must not sample."""
    marks: tuple[str, ...] = ()
    """Further tokens that a policy must not sample, of the layout; a tokenizer must have them."""
    optional_marks: re.Pattern[str] | None = None
    """The same, for tokens that only some tokenizers have: others spell them as text."""
    placeholder: Callable[[Any], int] = lambda config: int(config.image_token_id)
    """config -> the token that the chat template writes once for each image."""
    around: str = ""
    """The text that is written before and after that token, which the tokenizer may join with the prompt's own."""
    grid_of: Callable[[Any, Any, int, int], Grid | None]
    """(image processor, config, height, width) -> the grid of an image of this size in pixels, without its content;
    None if it is known only once the image is processed. Raise ValueError for a size that the processor refuses."""
    language: str
    """The language model, below the base model."""
    tower: str
    """The vision tower, below the base model."""
    projector: tuple[str, ...]
    """The modules that map the tower's features to the width of the language model, below the base model; they may be
    within the tower. The first one is always there."""
    pooled: int = 1
    """The number of features of the tower that are averaged to one, in front of the projector."""
    torchvision: bool = False
    """The image processor of transformers needs torchvision, so that of `models/navit.py` replaces it."""
    bare: tuple[str, ...] = ()
    """Parameters of the projector that are in no module, below the base model."""
    sounds: SoundRules | None = None
    """How the family reads sounds; None: it reads none."""
    unused: tuple[str, ...] = ()
    """Modules that read what rows do not have (sounds), below the base model. They are kept as they are."""

    def attends(self, text: Mapping[str, Any]) -> Mutual:
        """Return the layers in which the tokens of an image attend to each other. text: the configuration of the
        language model"""
        own = self.mutual != "windows" or text.get("use_bidirectional_attention") == "vision"
        return self.mutual if own else ""

    def feature_ids(self, config: Any) -> tuple[int, ...]:
        """Return the ids of the tokens that features replace, within the tokens of an image; others there are text."""
        return (int(config.image_token_id),)

    def features(self, config: Any, grid: Grid, *, sound: bool = False) -> int:
        """Return the number of an image's or a sound's features. grid: of a sound its frames, and 1"""
        if sound:
            assert self.sounds is not None, "a family that reads no sounds has no row with one"
            return self.sounds.features(config, grid[0])
        return sum(part for part in self.layout(config, grid) if isinstance(part, int))

    def replaced_ids(self, config: Any) -> tuple[int, ...]:
        """Return the ids of the tokens that features replace, within the tokens of an image, a video or a sound."""
        videos = (int(config.video_token_id),) if config.model_type in CLIPS else ()
        return (*self.feature_ids(config), *videos, *((int(config.audio_token_id),) if self.sounds else ()))

    def places(
        self, config: Any, grid: Grid, clip: Clip | None, *, sound: bool = False
    ) -> tuple[np.ndarray, int] | None:
        """Return the positions [axes, tokens] of an image's tokens, of which the first is 0, and the position of the
        token after them; None if they are counted as text is. clip: of a video; None: it is an image, or a sound,
        whose tokens have a position of time each, as text has"""
        if sound and self.axes > 1:
            count = self.features(config, grid, sound=True)
            return np.broadcast_to(np.arange(count), (self.axes, count)), count
        if clip is not None:
            return clip_places(_merged(config, grid), clip)
        return None if self.positions is None else self.positions(config, grid)

    def part_of(self, name: str) -> Part:
        """Return the part of the model to which the parameter with this name belongs."""
        name = _below_base(name)
        if self.sounds is not None and name.startswith(f"{self.sounds.tower}."):
            return "audio"
        if name in self.bare or name.startswith(tuple(f"{module}." for module in self.projector)):
            return "projector"
        return "vision" if name.startswith(tuple(f"{module}." for module in (self.tower, *self.unused))) else "language"

    def in_model(self, name: str) -> str:
        """Return the name in the model of a weight or layer of a folder, which may be that of an older version."""
        own = _below_base(name)
        if self.part_of(name) != "language":
            return f"model.{own}"
        inner = own.removeprefix(f"{self.language}.").removeprefix("model.")
        return inner if inner.startswith("lm_head") else f"model.{self.language}.{inner}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the model."""
        return tuple(part for part in get_args(Part) if part != "audio" or self.sounds is not None)

    @property
    def encoder(self) -> tuple[str, ...]:
        """The modules that encode images and sounds, below the base model, none of which is within another one."""
        outside = (module for module in self.projector if not module.startswith(f"{self.tower}."))
        return (self.tower, *outside, *((self.sounds.tower,) if self.sounds else ()))


def _below_base(name: str) -> str:
    """Return the name of a weight below the base model. A folder of a thinker alone may name the thinker too."""
    return name.removeprefix("thinker.").removeprefix("model.")


def _merged(config: Any, grid: Grid) -> Grid:
    """Return the grid of an image's tokens, each of which has the content of several patches."""
    size, (frames, rows, columns) = config.vision_config.spatial_merge_size, grid
    return frames, rows // size, columns // size


def _merged_tokens(config: Any, grid: Grid) -> int:
    return int(np.prod(_merged(config, grid)))


def _grid_positions(config: Any, grid: Grid) -> tuple[np.ndarray, int]:
    """Return the frame, row and column of each token. The text goes on after the larger side of the image."""
    merged = _merged(config, grid)
    return np.indices(merged).reshape(3, -1), max(merged[1:])


def _patches_alone(config: Any, grid: Grid) -> Sequence[int]:
    return [_merged_tokens(config, grid)]


def _resized_grid(processor: Any, config: Any, height: int, width: int) -> Grid | None:
    """Return the rows and columns of patches after the processor has changed the size of the image."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if not processor.do_resize:
        return None
    patch, size = processor.patch_size, processor.size
    sides = smart_resize(height, width, patch * processor.merge_size, size["shortest_edge"], size["longest_edge"])
    return 1, sides[0] // patch, sides[1] // patch


def _padded_grid(processor: Any, config: Any, height: int, width: int) -> Grid:
    """Return the rows and columns of patches after the processor has scaled and padded the image."""
    _, sides = processor.sides(height, width)
    rows, columns = (side // processor.settings["patch_size"] for side in sides)
    return 1, rows, columns


def _in_rows(config: Any, grid: Grid) -> Sequence[int | str]:
    """Each row of an image ends with a token that is text."""
    size, (_, rows, columns) = getattr(config, "spatial_merge_size", 1), grid
    row: list[int | str] = [columns // size, "[IMG_BREAK]"]
    return [*row * (rows // size - 1), row[0], "[IMG_END]"]


def _grid_in_rows(processor: Any, config: Any, height: int, width: int) -> Grid:
    """Return the rows and columns of patches of an image that is scaled down to the longest side, and to whole
    tokens."""
    longest, merge = processor.size["longest_edge"], getattr(config, "spatial_merge_size", 1)
    side = config.vision_config.patch_size * merge
    ratio = max(height / longest, width / longest)
    sides = (height, width) if ratio <= 1 else (int(height / ratio), int(width / ratio))
    if 0 in sides:
        raise ValueError(f"scaled down to {longest} pixels, it has a side without any")
    rows, columns = (((pixels - 1) // side + 1) * merge for pixels in sides)
    return 1, rows, columns


def _patch_of_tokens(config: Any) -> Mapping[str, Any]:
    """Images are scaled to whole tokens, which are the patches of the image processor."""
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    return {"patch_size": {"height": side, "width": side}}


_QWEN = ImageFamily(
    axes=3,
    content="patches",
    layout=_patches_alone,
    positions=_grid_positions,
    grid_of=_resized_grid,
    language="language_model",
    tower="visual",
    projector=("visual.merger", "visual.deepstack_merger_list"),
)
_TOWER: dict[str, Any] = dict(language="language_model", tower="vision_tower", projector=("multi_modal_projector",))
_PIXTRAL = ImageFamily(
    content="pixels",
    layout=_in_rows,
    marks=("[IMG_BREAK]", "[IMG_END]"),
    grid_of=_grid_in_rows,
    processing=_patch_of_tokens,
    **_TOWER,
)
_TILES_IN_ROWS = ImageFamily(
    content="tiles in rows",
    layout=marked_tiles,
    marks=("<fake_token_around_image>",),
    optional_marks=re.compile(r"<row_\d+_col_\d+>|<global-img>"),
    grid_of=grid_of_marked_tiles,
    processing=lambda config: {"return_row_col_info": True},
    language="text_model",
    tower="vision_model",
    projector=("connector",),
)
FAMILIES: Mapping[str, ImageFamily] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_omni_moe_thinker": replace(
        _QWEN,
        projector=("visual.merger", "visual.merger_list"),
        sounds=SoundRules(tower="audio_tower", features=halved_thrice, padded=False, alone=True),
    ),
    "qwen2_5_omni_thinker": replace(_QWEN, sounds=SoundRules(tower="audio_tower", features=halved_twice, padded=True)),
    "llava with pixtral": _PIXTRAL,
    "llava with clip_vision_model": ImageFamily(content="tiles", layout=square_tile, grid_of=one_tile, **_TOWER),
    "kimi_k25": ImageFamily(
        content="patches",
        layout=lambda config, grid: [int(np.prod(grid)) // int(np.prod(config.vision_config.merge_kernel_size))],
        optional_marks=re.compile(r"<\|media_(begin|content|end)\|>"),
        grid_of=_padded_grid,
        torchvision=True,
        language="language_model",
        tower="vision_tower",
        projector=("mm_projector",),
    ),
    "llava_next": ImageFamily(
        content="tiles of a size", layout=unpadded_tiles, grid_of=grid_of_sized_tiles, bare=("image_newline",), **_TOWER
    ),
    "mistral3": _PIXTRAL,
    "gemma3": ImageFamily(
        content="tiles",
        layout=lambda config, grid: ["<start_of_image>", grid[0] * config.mm_tokens_per_image, "<end_of_image>"],
        mutual="all",
        placeholder=lambda config: int(config.boi_token_index),
        around="\n\n",
        marks=("<start_of_image>", "<end_of_image>"),
        grid_of=one_tile_without_crops,
        processing=lambda config: {"do_convert_rgb": True},
        pooled=16,
        **_TOWER,
    ),
    "gemma4": ImageFamily(
        content="placed patches",
        layout=lambda config, grid: ["<|image>", pooled_patches(config, grid), "<image|>"],
        mutual="windows",
        marks=("<|image>", "<image|>"),
        grid_of=filled_grid,
        pooled=9,
        language="language_model",
        tower="vision_tower",
        projector=("embed_vision",),
        unused=("audio_tower", "embed_audio"),
    ),
    "internvl": ImageFamily(
        content="tiles",
        layout=tiles_alone,
        marks=("<img>", "</img>"),
        grid_of=grid_of_tiles,
        processing=lambda config: {"crop_to_patches": True},
        **_TOWER,
    ),
    "mllama": ImageFamily(
        content="tiles on a canvas",
        layout=lambda config, grid: [1],
        crossed=True,
        unsampled_rows=8,
        grid_of=grid_of_canvas,
        language="language_model",
        tower="vision_model",
        projector=("multi_modal_projector",),
    ),
    "idefics3": _TILES_IN_ROWS,
    "smolvlm": _TILES_IN_ROWS,
}
"""The families by the `model_type` of config.json; "A with B": with a tower of model type B."""


_TALKS = "the part that talks (talker, token2wav) is not trained. Fix: its thinker, which transformers saves alone by "
UNREAD: Mapping[str, str] = {
    "llava_onevision": "the features of an image depend on whether its prompt has another one",
    "kimi_vl": "its code is that of its folder (trust_remote_code), and what that does with images is not known",
    "qwen2_5_omni": f"{_TALKS}Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(FOLDER).save_pretrained(OUT)",
    "qwen3_omni_moe": f"{_TALKS}Qwen3OmniMoeThinkerForConditionalGeneration, in the same way",
}
"""Why further families have no row."""


def family_of(config: Any) -> ImageFamily | None:
    """Return the row of a model's configuration; None: the model reads text alone, as far as verl knows."""
    return FAMILIES.get(_name(config.model_type, getattr(getattr(config, "vision_config", None), "model_type", None)))


def family_name(described: Mapping[str, Any]) -> str | None:
    """Return the name of the row of a config.json; None: the model reads text alone. Raise Refused for a model that
    reads more than text and has no row."""
    name = name_of(described)
    if name in FAMILIES:
        return name
    if more := sorted(key for key, value in described.items() if _MANY.fullmatch(key) and value):
        why = f": {UNREAD[name]}" if name in UNREAD else ""
        raise Refused(
            f"a model of type {name!r} reads more than text ({', '.join(more)}), and verl knows no row for it{why}; "
            f"those with one are {', '.join(FAMILIES)}"
        )
    return None


def name_of(described: Mapping[str, Any]) -> str:
    """Return the name that the row of a config.json has, if there is one."""
    tower = described.get("vision_config")
    given = tower.get("model_type", "clip_vision_model") if isinstance(tower, Mapping) else None
    return _name(described.get("model_type"), given)


def _name(kind: Any, tower: Any) -> str:
    return f"{kind} with {tower}" if kind == "llava" else str(kind)


def banned_ids(config: Any) -> tuple[int, ...]:
    """Return the ids that a policy of this configuration must not sample; () if it reads text alone."""
    family = family_of(config)
    return () if family is None else family.banned(config)


def positions_from(
    now: int, tokens: int, media: Sequence[Medium], own: Mapping[str, tuple[np.ndarray, int]], axes: int
) -> tuple[np.ndarray, int]:
    """Return the positions [axes, tokens] of a run of tokens of which the first has position `now`, and the position of
    the token after them. Text counts on, and an image has its own positions from there. own: by reference, the result
    of `ImageFamily.positions`. Raise ValueError for an image with another number of tokens than its placeholders."""
    out, at = np.empty((axes, tokens), np.int64), 0
    for m in media:
        out[:, at : m.start] = now + np.arange(m.start - at)
        now += m.start - at
        places, length = own[m.reference]
        if places.shape[1] != m.tokens:
            raise ValueError(
                f"image {m.reference} has {places.shape[1]} tokens by its size, and {m.tokens} placeholders"
            )
        out[:, m.start : m.end] = now + places
        now, at = now + length, m.end
    out[:, at:] = now + np.arange(tokens - at)
    return out, now + tokens - at


def auto_class(config: Any) -> Any:
    """Return the class of transformers that builds and loads the model of a configuration. Raise Refused for a model
    that reads more than text and has no row: its other inputs would be left out."""
    import transformers

    if family_of(config) is None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        known = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        family_name({"image_config": known, **config.to_dict()})
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText
