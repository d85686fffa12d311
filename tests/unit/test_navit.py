"""The image processor of Kimi K2.5: its patches are, bit for bit, those of the processor of transformers."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import image_processing_backends as backends
from transformers.image_utils import SizeDict
from vision import png

from verl.errors import Refused
from verl.models.image_files import decoded_image
from verl.models.navit import DEFAULTS, NavitProcessor

SIZES = [(1, 1), (13, 9), (28, 28), (57, 30), (300, 41), (640, 480), (15, 900)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"size": {"max_height": 6, "max_width": 6}},
    {"max_patches": 40, "merge_size": 3, "patch_size": 5, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
]


def resized(image: torch.Tensor, size: Any, interpolation: Any, antialias: bool) -> torch.Tensor:
    """The function of torchvision for pixels of 8 bits on a CPU."""
    assert image.dtype == torch.uint8 and interpolation == "bicubic" and antialias
    if [*image.shape[-2:]] == [*size]:
        return image
    return F.interpolate(image, size=[*size], mode="bicubic", align_corners=False, antialias=True)


def normalized(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    return image.sub(torch.as_tensor(mean).view(-1, 1, 1)).div_(torch.as_tensor(std).view(-1, 1, 1))


def padded(image: torch.Tensor, sides: Any, fill: Any = 0, padding_mode: str = "constant") -> torch.Tensor:
    left, top, right, bottom = sides
    return F.pad(image, (left, right, top, bottom), value=fill)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the class of transformers, with four functions in the place of torchvision."""
    functional: Any = types.ModuleType("torchvision.transforms.v2.functional")
    functional.InterpolationMode = types.SimpleNamespace(BICUBIC="bicubic", BILINEAR="bilinear", LANCZOS="lanczos")
    functional.resize, functional.normalize, functional.pad = resized, normalized, padded
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = functional  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setattr(backends, "tvF", functional, raising=False)
    monkeypatch.setattr(backends, "pil_torch_interpolation_mapping", {3: "bicubic"}, raising=False)
    name = "transformers.models.kimi_k25.image_processing_kimi_k25"
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name).Kimi_K25ImageProcessor


@pytest.mark.parametrize("settings", SETTINGS)
def test_patches_are_those_of_transformers(own: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(settings))
    processor, made = NavitProcessor(tmp_path / "a.json"), object.__new__(own)
    s = {**DEFAULTS, **settings}
    for size in SIZES:
        image = decoded_image(png(*size), "x")
        pixels = torch.tensor([*image.tobytes()], dtype=torch.uint8).view(image.height, image.width, 3).permute(2, 0, 1)
        wanted = made._preprocess(
            images=[pixels.contiguous()],
            do_resize=True,
            size=SizeDict(**s["size"]),
            resample=3,
            do_rescale=True,
            do_normalize=True,
            disable_grouping=False,
            return_tensors="pt",
            **{key: tuple(s[key]) if "image" in key else s[key] for key in DEFAULTS if key != "size"},
        )
        found = processor(images=[image], return_tensors="pt")
        assert torch.equal(found["image_grid_thw"], wanted["image_grid_thw"]), size
        assert torch.equal(found["pixel_values"], wanted["pixel_values"]), size


def test_settings_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"do_normalize": false}')
    with pytest.raises(Refused, match="a.json: do_normalize=False, and images are read with do_normalize=True only"):
        NavitProcessor(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"size": {"max_height": 4, "max_width": 5}}')
    with pytest.raises(Refused, match="a.json: size=.*'max_width': 5.*one limit of both sides only"):
        NavitProcessor(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"media_proc_cfg": {"fixed_output_tokens": 9}}')
    with pytest.raises(Refused, match="a.json: fixed_output_tokens=9"):
        NavitProcessor(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError):
        NavitProcessor(tmp_path / "a.json")(images=[Image.new("RGB", (4, 4))] * 2, return_tensors="pt")


def test_published_folders_have_other_names_of_the_same_settings(tmp_path: Path) -> None:
    own = {"in_patch_limit": 40, "patch_limit_on_one_side": 6, "merge_kernel_size": 3, "patch_size": 5}
    (tmp_path / "a.json").write_text(json.dumps({"media_proc_cfg": {**own, "fixed_output_tokens": None}}))
    (tmp_path / "b.json").write_text(json.dumps({"image_processor": {"media_proc_cfg": own}}))
    wanted = {"max_patches": 40, "size": {"max_height": 6, "max_width": 6}, "merge_size": 3, "patch_size": 5}
    for name in ("a.json", "b.json"):
        assert NavitProcessor(tmp_path / name).settings == {**DEFAULTS, **wanted}
