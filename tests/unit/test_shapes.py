"""The recipe with drawn pictures: its rows, its teacher, and its model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from verl.models.families import family_of
from verl.models.pictures import Pictures
from verl.recipes import shapes
from verl.recipes.vision_model import IMAGE_TOKENS
from verl.transfer_queue.media import MemoryMedia


def rows_of(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def picture_of(row: dict[str, Any]) -> bytes:
    (found,) = row["images"]
    return bytes(found["bytes"])


def test_every_picture_is_drawn_once_and_the_same_from_the_same_seed(tmp_path: Path) -> None:
    sft, train = (
        rows_of(shapes.write_taught(tmp_path / "a", 200, seed=1)),
        rows_of(shapes.write_problems(tmp_path / "b", 99, seed=2)),
    )
    again = rows_of(shapes.write_problems(tmp_path / "c", 99, seed=2))
    assert len({picture_of(row) for row in (*sft, *train)}) == 299 and train == again
    for row in train:
        answer = row["reward_model"]["ground_truth"]
        assert shapes.compute_score(row["data_source"], answer, answer) == 1.0
        assert shapes.compute_score(row["data_source"], answer + " circle", answer) == 0.0
        assert Image.open(io.BytesIO(picture_of(row))).size == (56, 56) and row["prompt"][0]["content"] == shapes.PROMPT


def test_a_blanked_picture_has_the_answer_of_its_problem_and_shows_nothing(tmp_path: Path) -> None:
    shown, blanked = (rows_of(shapes.write_problems(tmp_path / str(b), 20, seed=3, blanked=b)) for b in (False, True))
    assert [row["reward_model"] for row in shown] == [row["reward_model"] for row in blanked]
    assert {row["data_source"] for row in (*shown, *blanked)} == {shapes.DATA_SOURCE, shapes.BLANKED}
    (white,) = {picture_of(row) for row in blanked}
    assert Image.open(io.BytesIO(white)).getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize("kind", shapes.KINDS)
def test_a_shape_is_drawn_within_its_cell(kind: str) -> None:
    """A square fills its box, and the two others less of it."""
    filled = {"square": (0.99, 1.01), "circle": (0.65, 0.9), "triangle": (0.4, 0.65)}[kind]
    for seed in range(20):
        image = shapes.drawing([kind], shapes.Random(seed)).convert("L").point(lambda v: 255 * (v < 255))
        left, top, right, bottom = image.getbbox() or (0, 0, 99, 99)
        assert max(right, bottom) <= shapes.SIDE // shapes.PER_ROW
        share = image.histogram()[255] / ((right - left) * (bottom - top))
        assert filled[0] <= share <= filled[1], (seed, share)


def test_the_teacher_is_mostly_blind_to_triangles_and_names_all_else(tmp_path: Path) -> None:
    random, blind, with_triangles = shapes.Random(0), 0, 0
    for _ in range(2000):
        kinds = random.choices(shapes.KINDS, k=4)
        said = shapes.taught(kinds, random)
        assert said in (" ".join(kinds), " ".join(kinds).replace("triangle", "square"))
        with_triangles += "triangle" in kinds
        blind += said != " ".join(kinds)
    assert with_triangles / 2000 == pytest.approx(1 - (2 / 3) ** 4, abs=0.03)
    assert blind / with_triangles == pytest.approx(shapes.BLIND_SHARE, abs=0.04)


def test_its_model_reads_a_picture_as_four_tokens(tmp_path: Path) -> None:
    tokenizer = shapes.tokenizer()
    parts = [{"type": "image"}, {"type": "text", "text": "shapes?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "circle square"}]
    start, end, image, _ = map(tokenizer.convert_tokens_to_ids, IMAGE_TOKENS)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids[1:4] == [start, image, end] and tokenizer.decode(ids[-4:]) == "circle square<|end|>"
    shapes.write_model(tmp_path, seed=0)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert model.config.image_token_id == image and 4e5 < sum(p.numel() for p in model.parameters()) < 5e5
    store = MemoryMedia()
    name = store.put(picture_of(rows_of(shapes.write_problems(tmp_path / "rows", 1, seed=0))[0]), "test")
    picture = Pictures(tmp_path, store).of([name])[name]
    family = family_of(model.config)
    assert family is not None and picture.grid == (1, 4, 4) and family.features(model.config, picture.grid) == 4
