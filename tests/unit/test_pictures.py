"""Files of images: what is read, and what is refused."""

from __future__ import annotations

import io
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vision import encoded, image_folder, image_tokenizer, png, png_header

from verl.models.expand import expander
from verl.models.image_files import MAX_PIXELS, decoded_image, image_processor, image_size
from verl.models.image_headers import plain_sides
from verl.models.pictures import Pictures, processed
from verl.transfer_queue.media import MemoryMedia

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8))
ANIMATED = encoded(NOISE, "GIF", save_all=True, append_images=[NOISE.rotate(90)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("vl"), "qwen2_vl")


@pytest.mark.parametrize(
    "content, line",
    [
        (b"", "x: 0 bytes are no image that can be read"),
        (b"<svg/>", "no image that can be read .PNG, JPEG, WEBP, GIF, BMP, TIFF."),
        (png(12, 8)[:-40], "x: a damaged PNG image: image file is truncated"),
        (png(12, 8)[:20], "no image that can be read"),
        (ANIMATED, "x: an image of 2 frames; take one of them"),
        (png_header(30_000), "x: .*900000000 pixels"),
        (png_header(9_000), f"x: 9000 x 9000 pixels, more than {MAX_PIXELS}; scale it down"),
        (encoded(Image.new("I;16", (5, 4))), "x: pixels of the kind 'I;16': .* 8 bits per channel"),
        (encoded(Image.new("F", (5, 4)), "TIFF"), "x: pixels of the kind 'F'"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:30],
)
def test_files_that_are_refused(content: bytes, line: str) -> None:
    for read in (decoded_image, lambda content, where: image_size(io.BytesIO(content), where)):
        with pytest.raises(ValueError, match=line):
            read(content, "x")


def test_every_kind_of_pixel_becomes_red_green_and_blue() -> None:
    lossless = {kind: np.asarray(decoded_image(encoded(NOISE, kind), "x")) for kind in ("PNG", "BMP", "TIFF")}
    assert all(np.array_equal(found, np.asarray(NOISE)) for found in lossless.values())
    for mode in ("1", "L", "P", "CMYK"):
        kind = "TIFF" if mode == "CMYK" else "PNG"
        found = decoded_image(encoded(Image.new(mode, (5, 4)), kind), "x")
        assert (found.mode, found.size) == ("RGB", (5, 4)), mode
    clear = Image.new("RGBA", (5, 4), (9, 9, 9, 0))
    assert np.asarray(decoded_image(encoded(clear), "x")).min() == 255, "white where it is transparent"
    turned = Image.new("RGB", (5, 4))
    turned.getexif()[0x0112] = 6
    assert decoded_image(encoded(turned, "JPEG", exif=turned.getexif()), "x").size == (4, 5), "upright"


def turned(kind: str, orientation: int, *, last: bool = False) -> bytes:
    """Return an image of 5 x 4 pixels with an EXIF orientation. last: behind the pixels."""
    image = Image.new("RGB", (5, 4))
    image.getexif()[0x0112] = orientation
    content = encoded(image, kind, exif=image.getexif())
    if last:
        data = b"eXIf" + image.getexif().tobytes()
        chunk = (len(data) - 4).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")
        content = (plain := encoded(Image.new("RGB", (5, 4))))[:-12] + chunk + plain[-12:]
    return content


def test_a_header_gives_the_size_of_the_upright_image(monkeypatch: Any) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"):
        files = [encoded(Image.new("RGB", (5, 4)), kind)]
        files += [turned(kind, n) for n in range(1, 9)] if kind in ("PNG", "JPEG", "WEBP", "TIFF") else []
        files += [turned(kind, 6, last=True)] if kind == "PNG" else []
        for content in files:
            whole = decoded_image(content, "x")
            assert image_size(io.BytesIO(content), "x") == (whole.height, whole.width), kind
    assert image_size(io.BytesIO(turned("PNG", 6, last=True)), "x") == (5, 4)
    monkeypatch.setattr("verl.models.image_files.decoded_image", None)
    for content in (png(12, 8), encoded(NOISE, "JPEG"), encoded(NOISE, "WEBP")):
        assert image_size(io.BytesIO(content), "x") == (8, 12), "without decoding it"


def test_what_a_header_says_at_once_is_what_pillow_says(monkeypatch: Any) -> None:
    """Of whole files, and of files with another byte or without the end: either the same size, or Pillow decides."""
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16")
    files = [
        encoded(NOISE.convert("RGB").resize((5, 4)).convert(mode)) for mode in modes if mode not in ("CMYK", "I;16")
    ]
    files += [encoded(NOISE.convert(mode).resize((5, 4)), "JPEG") for mode in ("L", "RGB", "CMYK")]
    files += [
        encoded(NOISE, "PNG", dpi=(72, 72)),
        encoded(NOISE, "PNG", optimize=True),
        encoded(NOISE, "JPEG", progressive=True),
    ]
    files += [turned("PNG", 6), turned("JPEG", 6), turned("PNG", 6, last=True), encoded(Image.new("I;16", (5, 4)))]
    files += [encoded(NOISE, "PNG", save_all=True, append_images=[NOISE.rotate(90)]), encoded(NOISE, "WEBP")]
    at_once, drawn = 0, np.random.default_rng(0)
    for content in files:
        changed = [content, content[:-1], content[:-12], content[: len(content) // 2], content + bytes(9)]
        ends = (min(len(content), 90), content.rfind(b"\xff\xda") + 14 if content.startswith(b"\xff\xd8") else 0)
        for place in (int(place) for end in ends if end > 0 for place in drawn.integers(0, end, 60)):
            changed.append(content[:place] + bytes([int(drawn.integers(256))]) + content[place + 1 :])
        for one in changed:
            sides = plain_sides(io.BytesIO(one), MAX_PIXELS)
            if sides is not None:
                at_once += 1
                with monkeypatch.context() as patched:
                    patched.setattr("verl.models.image_files.plain_sides", lambda *_: None)
                    assert image_size(io.BytesIO(one), "x") == sides, one[:64]
    assert at_once > 200
    assert all(
        plain_sides(io.BytesIO(encoded(NOISE, kind)), MAX_PIXELS) == NOISE.size[::-1] for kind in ("PNG", "JPEG")
    )
    assert plain_sides(io.BytesIO(encoded(NOISE)), NOISE.width * NOISE.height - 1) is None, "too large"


@pytest.mark.parametrize("size", [(4, 4), (12, 8), (37, 5), (90, 200)])
def test_the_size_alone_gives_the_grid_and_the_tokens_of_an_image(folder: Path, size: tuple[int, int]) -> None:
    processor, (family, config) = image_processor(folder)
    picture = processed(processor, decoded_image(png(*size), "x"), "x", family, config)
    assert family.grid_of(processor, config, *size[::-1]) == picture.grid
    ids, start, tokens = expander(family, config, image_tokenizer()).of(picture.grid)
    assert ids.tolist() == [family.placeholder(config)] * tokens and start == 0
    assert tokens == family.features(config, picture.grid) == picture.grid[1] * picture.grid[2] // 4


def test_images_are_processed_once_and_kept_within_a_number_of_bytes(folder: Path, monkeypatch: Any) -> None:
    store, read = MemoryMedia(), list[str]()
    a, b, c = (store.put(png(12, 8, seed), "test") for seed in range(3))
    get = store.get
    monkeypatch.setattr(store, "get", lambda name: read.append(name) or get(name))
    each = 4 * 6 * 12 * 4
    pictures = Pictures(folder, store, max_bytes=2 * each)
    found = pictures.of([a, b, a])
    assert read == [a, b] and pictures.kept_bytes == 2 * each and found[a].grid == (1, 4, 6)
    again = pictures.of([c, a])
    assert read == [a, b, c] and pictures.kept_bytes == 2 * each and again[a] is found[a]
    assert torch.equal(pictures.of([b])[b].patches, found[b].patches) and read == [a, b, c, b], "it was read first"
    own = image_processor(folder)[0](
        images=[Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8))]
    )
    np.testing.assert_array_equal(found[a].patches, own["pixel_values"])
    one = Pictures(folder, store, max_bytes=1)
    assert len({id(p) for p in one.of([a, b]).values()}) == 2 and one.kept_bytes == each, "the last one is kept"


def test_images_that_are_read_ahead_are_there_and_push_out_none_of_the_step(folder: Path, monkeypatch: Any) -> None:
    store, read, real = MemoryMedia(), list[str](), Pictures._read
    contents = [png(12, 8, seed) for seed in range(5)]
    a, b, c, d, e = (store.put(content, "test") for content in contents)
    monkeypatch.setattr(Pictures, "_read", lambda self, *given: read.append(given[0]) or real(self, *given))
    pictures = Pictures(folder, store, max_bytes=3 * 4 * 6 * 12 * 4)
    before = pictures.of([a, b])
    pictures.begin_step()
    own = pictures.of([b, c])
    assert pictures.read_ahead(contents[2]) and read == [a, b, c], "one that is kept is not read again"
    assert pictures.read_ahead(contents[3]) and read == [a, b, c, d], "in the place of the image of an earlier step"
    assert not pictures.read_ahead(contents[4]) and read == [a, b, c, d], "three of the step are kept: no space"
    assert pictures.of([b, c, d]) | own == pictures.of([b, c, d]) and own[b] is before[b] and read == [a, b, c, d]
    pictures.begin_step()
    assert pictures.of([d]) and pictures.read_ahead(contents[4]) and read == [a, b, c, d, e], "another step began"
    with pytest.raises(ValueError, match="damaged PNG"):
        pictures.read_ahead(contents[0][:-40])


def test_an_image_that_is_kept_does_not_wait_for_another_that_is_read(folder: Path, monkeypatch: Any) -> None:
    store, begun, free = MemoryMedia(), threading.Event(), threading.Event()
    a, b = (store.put(png(12, 8, seed), "test") for seed in range(2))
    get = store.get
    pictures = Pictures(folder, store)
    kept = pictures.of([a])[a]
    monkeypatch.setattr(store, "get", lambda name: begun.set() or (free.wait(30) and get(name)))
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(pictures.of, [b])
        assert begun.wait(30)
        try:
            assert threads.submit(pictures.of, [a]).result(20)[a] is kept
        finally:
            free.set()
        assert slow.result(30)[b].grid == kept.grid


def test_sizes_that_a_processor_refuses_and_folders_without_one(folder: Path, tmp_path: Path) -> None:
    store = MemoryMedia()
    long = store.put(png(801, 4), "test")
    with pytest.raises(ValueError, match=f"image {long}: 801 x 4 pixels: absolute aspect ratio"):
        Pictures(folder, store).of([long])
    with pytest.raises(ValueError, match="no preprocessor_config.json, nor processor_config.json with"):
        image_processor(tmp_path)
