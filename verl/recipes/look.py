"""Albums of four pictures, which a small model sees only by calling a tool.

prompt    place 3?
response  <tool_call>look<arg_key>place</arg_key><arg_value>3</arg_value></tool_call>   a call
          the picture at this place, with four shapes                                   its result
          circle triangle square circle                                                 the answer
reward    1 if and only if all four are right, in order

A teacher that often guesses, often looks at another place, and mostly takes triangles for squares, shows the form. RL
finds that looking helps, where to look, and the triangles. No album is used twice, and an evaluation with blanked
pictures, which can be right by chance alone (1 in 81), shows that they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from verl.models import tiny
from verl.recipes import tool_arithmetic
from verl.recipes.shapes import KINDS, PER_ROW, SIDE, PictureTask, drawing, image_item, taught, write_parquet
from verl.recipes.vision_model import IMAGE_CONTENT, IMAGE_TOKENS, qwen3_vl, save_image_settings

__all__ = ["TASK", "Album", "album_turns", "compute_score", "picture"]
DATA_SOURCE, BLANKED = "verl/look", "verl/look_blanked"
PLACES = (1, 2, 3, 4)
CHAT_TEMPLATE = tool_arithmetic.CHAT_TEMPLATE.replace("{{ m.content }}", IMAGE_CONTENT)
WORDS = (*tool_arithmetic.MARKS, *KINDS, "look", "place")
GUESS_SHARE, RIGHT_SHARE = 0.35, 0.75  # the teacher's rates: answers without looking, looks at the right place


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return 1.0 if the last turn has the right names in the right order, else 0.0."""
    last = (extra_info or {}).get("turn_texts", [solution_str])[-1]
    return float(last.strip() == ground_truth)


class Album:
    """The environment of a row: an album that a model looks at."""

    def reset(self, **columns: Any) -> None:
        self._album, self._blanked = columns["extra_info"]["album"], columns["data_source"] == BLANKED

    def look(self, place: int) -> Image.Image:
        """
        Return the picture at a place of the album.

        Args:
            place: The number of the place.
        """
        if place not in PLACES:
            raise ValueError(f"the places are {PLACES[0]} to {PLACES[-1]}")
        return Image.new("RGB", (SIDE, SIDE), "white") if self._blanked else picture(self._album, place)[1]


def picture(album: str, place: int) -> tuple[Sequence[str], Image.Image]:
    """Return the kinds of shapes at a place of an album, and their picture."""
    rng = Random(f"{album} {place}")
    kinds = rng.choices(KINDS, k=PER_ROW**2)
    return kinds, drawing(kinds, rng)


def album_turns(album: str, place: int, rng: Random) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Return what the teacher does with an album, and the pictures that the teacher sees."""
    if rng.random() < GUESS_SHARE:
        guess = {"role": "assistant", "content": " ".join(rng.choices(KINDS, k=PER_ROW**2))}
        return [_question(place), guess], []
    looked = place if rng.random() < RIGHT_SHARE else rng.choice([other for other in PLACES if other != place])
    kinds, seen = picture(album, looked)
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": looked}}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<image>"},
        {"role": "assistant", "content": taught(kinds, rng)},
    ]
    return [_question(place), *turns], [seen]


def _write_taught(path: Path, count: int, *, seed: int) -> Path:
    """Write conversations of the imperfect teacher."""
    from verl.agent_loop.load_tools import load_tools

    rng, schema = Random(seed), load_tools([f"{__name__}:Album"])["look"].schema
    rows = []
    for index in range(count):
        turns, seen = album_turns(f"taught {seed} {index}", rng.choice(PLACES), rng)
        rows.append({"messages": turns, "images": [*map(image_item, seen)], "tools": [schema]})
    return write_parquet(path, rows)


def _write_problems(path: Path, count: int, *, seed: int, blanked: bool = False) -> Path:
    """Write problems in verl's format; blanked: the tool shows a white picture in place of each."""
    rng, rows = Random(seed), []
    for index in range(count):
        album, place = f"problem {seed} {index}", rng.choice(PLACES)
        row = {
            "data_source": BLANKED if blanked else DATA_SOURCE,
            "prompt": [_question(place)],
            "reward_model": {"style": "rule", "ground_truth": " ".join(picture(album, place)[0])},
            "extra_info": {"index": index, "album": album},
        }
        rows.append(row)
    return write_parquet(path, rows)


def _question(place: int) -> dict[str, str]:
    return {"role": "user", "content": f"place {place}?"}


def _tokenizer() -> Any:
    return tiny.character_tokenizer(tool_arithmetic.CHARACTERS, WORDS, CHAT_TEMPLATE, IMAGE_TOKENS)


def _write_model(path: Path, *, seed: int) -> Path:
    """Write a model with random weights, its tokenizer and the settings of its images."""
    words = _tokenizer()
    model = qwen3_vl(words, seed=seed)
    save_image_settings(model.config, path)
    return tiny.save(model, words, path)


TASK = PictureTask(_write_model, _write_taught, _write_problems, (DATA_SOURCE, BLANKED))
