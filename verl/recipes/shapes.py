"""Drawn pictures of four shapes, which a small model that reads images names in reading order.

picture   a circle, a triangle, a square and a circle, of drawn sizes, places and colours
prompt    <image>shapes?
response  circle triangle square circle
reward    1 if and only if all four are right, in order

A teacher that mostly takes triangles for squares shows the form; RL finds the triangles. No picture is used twice, and
an evaluation with blanked pictures, which can be right by chance alone (1 in 81), shows that the picture is read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from verl.models import tiny
from verl.recipes.vision_model import IMAGE_CHAT_TEMPLATE, IMAGE_TOKENS, qwen3_vl, save_image_settings

KINDS = ("circle", "square", "triangle")
COLOURS = ("red", "green", "blue", "black")
WORDS, CHARACTERS = KINDS, "shape? "
PROMPT = "<image>shapes?"
DATA_SOURCE, BLANKED = "verl/shapes", "verl/shapes_blanked"
SIDE, PER_ROW = 56, 2  # pixels of a picture, cells in a row of it
BLIND_SHARE = 0.65  # of the pictures in which the teacher takes each triangle for a square


@dataclass(frozen=True, slots=True)
class PictureTask:
    """A task with drawn pictures: functions that write its files."""

    write_model: Callable[..., Path]  # (folder, seed=S): a model with random weights
    write_taught: Callable[..., Path]  # (file, count, seed=S): conversations of an imperfect teacher
    write_problems: Callable[..., Path]  # (file, count, seed=S, blanked=False)
    sources: tuple[str, str]  # The `data_source` of its problems, and of those with blanked pictures.


def drawing(kinds: Sequence[str], rng: Random) -> Image.Image:
    """Return a picture with a shape of each of these kinds in its cells, in reading order."""
    image, cell = Image.new("RGB", (SIDE, SIDE), "white"), SIDE / PER_ROW
    draw = ImageDraw.Draw(image)
    for i, kind in enumerate(kinds):
        size = rng.uniform(0.55, 0.85) * cell
        left, top = ((n * cell + rng.uniform(1, cell - size - 1)) for n in (i % PER_ROW, i // PER_ROW))
        right, bottom, colour = left + size, top + size, rng.choice(COLOURS)
        if kind == "circle":
            draw.ellipse((left, top, right, bottom), fill=colour)
        elif kind == "square":
            draw.rectangle((left, top, right, bottom), fill=colour)
        else:
            draw.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=colour)
    return image


def image_item(image: Image.Image) -> dict[str, Any]:
    """Return a picture as an item of the column `images`."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"bytes": out.getvalue()}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return 1.0 for the right names in the right order, else 0.0."""
    return float(solution_str.strip() == ground_truth)


def taught(kinds: Sequence[str], rng: Random) -> str:
    """Return the teacher's answer."""
    blind = rng.random() < BLIND_SHARE
    return " ".join("square" if blind and kind == "triangle" else kind for kind in kinds)


def write_taught(path: Path, count: int, *, seed: int) -> Path:
    """Write conversations of the imperfect teacher."""
    rng, rows = Random(seed), []
    for _ in range(count):
        kinds = rng.choices(KINDS, k=PER_ROW**2)
        reply = {"role": "assistant", "content": taught(kinds, rng)}
        rows.append({"messages": [_question(), reply], "images": [image_item(drawing(kinds, rng))]})
    return write_parquet(path, rows)


def write_problems(path: Path, count: int, *, seed: int, blanked: bool = False) -> Path:
    """Write problems in verl's format; blanked: with a white picture in place of each."""
    rng, white = Random(seed), Image.new("RGB", (SIDE, SIDE), "white")
    rows = []
    for index in range(count):
        kinds = rng.choices(KINDS, k=PER_ROW**2)
        picture = drawing(kinds, rng)
        row = {
            "data_source": BLANKED if blanked else DATA_SOURCE,
            "prompt": [_question()],
            "images": [image_item(white if blanked else picture)],
            "reward_model": {"style": "rule", "ground_truth": " ".join(kinds)},
            "extra_info": {"index": index},
        }
        rows.append(row)
    return write_parquet(path, rows)


def _question() -> dict[str, str]:
    return {"role": "user", "content": PROMPT}


def tokenizer() -> Any:
    return tiny.character_tokenizer(CHARACTERS, WORDS, IMAGE_CHAT_TEMPLATE, IMAGE_TOKENS)


def write_model(path: Path, *, seed: int) -> Path:
    """Write a model with random weights, its tokenizer and the settings of its images."""
    words = tokenizer()
    model = qwen3_vl(words, seed=seed)
    save_image_settings(model.config, path)
    return tiny.save(model, words, path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


TASK = PictureTask(write_model, write_taught, write_problems, (DATA_SOURCE, BLANKED))
