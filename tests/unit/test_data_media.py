"""Rows with images, videos or sounds under any of their usual names are refused; rows without stay."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config.compat.table import key_rows
from verl.data.media import is_media_column, refuse_media

PNG = b"\x89PNG\r\n"
EMPTY = (None, "", [], {}, "[]", " ", {"bytes": None, "path": None}, [None], [{"bytes": None, "path": ""}], False)
COLUMNS = (
    *("image", "images", "img", "imgs", "Image", "image_path", "image_paths", "imagePath", "image-url", "image_urls"),
    *("image_file", "image_bytes", "image_base64", "picture", "photo", "video", "videos", "video_path", "video_url"),
    *("audio", "audios", "audio_path", "audio_file", "multi_modal_data", "multimodal_inputs", "mm_data"),
    *("image_1", "image2", "pixel_values", "pixel_values_videos", "input_features", "image_grid_thw"),
)
TEXT_COLUMNS = ("prompt", "images_count", "image_caption", "imagine", "video_title", "description", "extra_info", "id")


def says(row: dict[str, Any], text: str = "What is x?") -> str:
    try:
        refuse_media(row, ({"role": "user", "content": text},), "f:1")
    except ValueError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("column", COLUMNS)
def test_a_media_column_is_refused_by_its_name(column: str) -> None:
    values = ("a.png", ["a.png"], {"bytes": PNG, "path": None}, [{"bytes": PNG}], {"image": ["a.png"]}, PNG)
    assert all(column in says({column: value}) and "Fix" in says({column: value}) for value in values)
    assert not any(says({column: value}) for value in EMPTY)


def test_text_columns_stay() -> None:
    assert not any(is_media_column(name) for name in TEXT_COLUMNS)
    assert not says({"source": "page.png", "code": b"\x00", "tag": {"path": "x"}})
    assert not says({"prompt": "x", "answer": "4"}, "Write <img src=a.png> and <image> in HTML")


def test_a_medium_under_another_name_is_refused() -> None:
    for value in ({"bytes": PNG, "path": None}, {"bytes": None, "path": "a.png"}, [{"bytes": PNG, "path": None}], PNG):
        assert "'scan'" in says({"scan": value})
    for column in ("screenshot", "frames", "figure", "media", "file_name", "input_image", "image_id", "speech"):
        assert repr(column) in says({column: "a.png"}) and repr(column) in says({column: ["a.png"]}), column
        assert not says({column: "Berlin"}) and not says({column: 3}), column
    for column in ("num_images", "image_id", "has_image"):
        assert repr(column) in says({column: 2}, "<image>What is x?"), column
    assert not says({"file": "a.py", "media": "news", "has_image": False, "num_images": 0}, "An SVG has <image> in it")
    assert "'image_path'" in says({"metadata": {"image_path": "a"}}, "<image>What is x?")
    for mark in ("<image>", "<IMAGE>", "<video>", "<audio>", "<image 1>", "<image_2>", "<|image_pad|>", "[IMG]"):
        for row in ({"scan": "a.PNG"}, {"scan": ["a.mp4"]}, {"images": []}, {"extra_info": {"image": "1"}}):
            assert repr(mark) in says(row, f"{mark}What is x?"), (mark, row)


def test_verls_keys_of_media_name_columns_that_are_looked_at() -> None:
    for kind in ("image", "video", "audio"):
        row = key_rows()[f"data.{kind}_key"]
        assert row.action == "refused" and {kind, f"{kind}s"} <= set(row.harmless)
        assert all(name == "null" or is_media_column(name) for name in row.harmless)
