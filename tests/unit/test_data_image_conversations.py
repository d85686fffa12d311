"""Conversations and pairs with images: the tokens that are trained, the places of images, truncation, bad rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from image_tokenizers import KINDS as MARKED
from image_tokenizers import marked_folder, tokenizer_of
from vision import END, IMAGE, START, TEMPLATE, chat_folder, image_tokenizer, png

from verl.chat import Rendered
from verl.config.schema import DataConfig
from verl.data.preference import load_pairs
from verl.data.source import load_conversations, load_tasks
from verl.errors import Refused

FILES = {"cat.png": png(12, 8, 1), "dog.png": png(8, 8, 2)}  # six tokens, and four
CAT, DOG = (f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in FILES.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("vl"), "qwen2_5_vl")


@pytest.fixture
def tokenizer() -> Any:
    return image_tokenizer()


@pytest.fixture
def load(model: Path, tokenizer: Any, tmp_path: Path) -> Any:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)

    def read(*rows: dict[str, Any], by: Any = load_conversations, folder: Path | None = model, **keys: Any) -> Any:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cfg = DataConfig(**{"cache_dir": str(tmp_path / "cache"), "max_tokens_per_row": 64, **keys})
        return by([str(file)], tokenizer, cfg, model=folder)

    return read


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def talk(*texts: str, **columns: Any) -> dict[str, Any]:
    return {"messages": [turn(("user", "assistant")[k % 2], text) for k, text in enumerate(texts)], **columns}


def shown(row: Rendered, tokenizer: Any) -> str:
    """Return the row with its trained tokens in braces, and the number of tokens of each image in its place."""
    out, trained = "", False
    images = {image.start: image.tokens for image in row.images}
    inside = {at for start, tokens in images.items() for at in range(start, start + tokens)}
    assert all(row.ids[at] == IMAGE for at in inside) and all(not at or row.ids[at - 1] == START for at in images)
    for at, token in enumerate(row.ids.tolist()):
        if row.mask[at] != trained:
            out, trained = out + "{}"[trained], bool(row.mask[at])
        if at in inside:
            out += f"[{images[at]}]" if at in images else ""
        else:
            out += "" if token in (START, END) else tokenizer.decode([token])
    return out + "}" * trained


def test_answers_are_trained_and_images_are_context(load: Any, tokenizer: Any) -> None:
    pair = ["cat.png", "dog.png"]
    inline = [turn("user", [{"type": "image", "image": "dog.png"}, {"type": "text", "text": "x"}])]
    cases = [
        (talk("<image>what?", "a cat", images=["cat.png"]), "<|user|>[6]what?<|end|><|assistant|>{a cat<|end|>}"),
        (
            talk("<image>a", "b", "c<image>", "d", images=pair),
            "<|user|>[6]a<|end|><|assistant|>{b<|end|>}<|user|>c[4]<|end|><|assistant|>{d<|end|>}",
        ),
        (talk("a", "b", image=DOG), "<|user|>[4]a<|end|><|assistant|>{b<|end|>}"),
        ({"messages": [*inline, turn("assistant", "y")]}, "<|user|>[4]x<|end|><|assistant|>{y<|end|>}"),
        (
            {"prompt": [turn("user", "<image>q")], "response": "r", "images": [CAT]},
            "<|user|>[6]q<|end|><|assistant|>{r<|end|>}",
        ),
        (
            {"messages": [*talk("a", "b")["messages"], *inline, turn("assistant", "y", weight=0)]},
            "<|user|>a<|end|><|assistant|>{b<|end|>}",
        ),
        (talk("a", "b"), "<|user|>a<|end|><|assistant|>{b<|end|>}"),
    ]
    for given, expected in cases:
        for table in (load(given), load(given)):
            assert shown(table[0], tokenizer) == expected
            assert table.has_images == ("[" in expected)
        assert table.report.from_cache
    typed = load(talk("<image><|image_pad|>", "is <|image_pad|> one?", images=["dog.png"]))[0]
    assert (typed.ids == IMAGE).sum() == 4 and "{is <|image_pad|> one?<|end|>}" in shown(typed, tokenizer)


def test_each_turn_of_a_template_that_rewrites_its_history_has_the_images_before_it(load: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if loop.last and messages|length > 2 %}!{% endif %}"
    )
    table = load(talk("<image>a", "b", "<image>c", "d", images=["cat.png", "dog.png"]))
    assert [[image.tokens for image in table[k].images] for k in range(len(table))] == [[6], [6, 4]]


def test_truncation_keeps_images_whole(load: Any, tokenizer: Any) -> None:
    given = talk("<image>a", "bbbb", "<image>c", "d", images=["cat.png", "dog.png"])
    (whole,) = load(given)
    first, second = whole.images
    for limit in range(4, len(whole.ids)):
        for side in ("left", "right"):
            cut = limit if side == "right" else len(whole.ids) - limit
            through = any(i.start < cut < i.start + i.tokens for i in (first, second))
            try:
                table = load(given, truncation=side, max_tokens_per_row=limit)
            except Refused as e:
                line = str(e)
                assert (
                    "jsonl:1: the row has" in line and "it would cut through an image" in line
                    if through
                    else ("no assistant token is left" in line)
                )
            else:
                assert not through and table.report.rows_truncated == 1
                kept = [
                    i for i in (first, second) if (i.start + i.tokens <= cut if side == "right" else i.start >= cut)
                ]
                assert [i.tokens for i in table[0].images] == [i.tokens for i in kept]
                shown(table[0], tokenizer)


def test_pairs_share_the_images_of_their_prompt(load: Any, tokenizer: Any) -> None:
    prompt = [turn("user", "<image>q"), turn("assistant", "r"), turn("user", "<image>")]
    given = {"prompt": prompt, "chosen": "good", "rejected": "bad", "images": ["cat.png", "dog.png"]}
    table = load(given, by=load_pairs)
    pair = table[0]
    before = "<|user|>[6]q<|end|><|assistant|>r<|end|><|user|>[4]<|end|><|assistant|>"
    assert [shown(r, tokenizer) for r in (pair.chosen, pair.rejected)] == [
        before + "{good<|end|>}",
        before + "{bad<|end|>}",
    ]
    other = load(given | {"images": ["cat.png", "cat.png"]}, by=load_pairs)
    assert table.has_images and table.key != other.key


IN_ANSWER = [turn("user", "q"), turn("assistant", [{"type": "image", "image": "cat.png"}])]


@pytest.mark.parametrize(
    "given, by, line",
    [
        ({"messages": IN_ANSWER}, load_conversations, "an image in a turn of the assistant that is trained"),
        (
            {"prompt": "q", "chosen": "<image>", "rejected": "b", "images": [CAT]},
            load_pairs,
            "jsonl:1: an image in an answer. Fix: images in the prompt",
        ),
        (
            {"prompt": "<image>q", "chosen": "a", "rejected": "b", "images": [CAT, CAT]},
            load_pairs,
            "jsonl:1: the messages have places for 1 images, and there are 2",
        ),
        (talk("<image>a", "b", images=["gone.png"]), load_conversations, "jsonl:1: image 1: no file .*gone.png"),
        (talk("a", "b", videos=["gone.mp4"]), load_conversations, "jsonl:1: video 1: no file .*gone.mp4"),
        ({"text": "a", "images": ["cat.png"]}, load_conversations, "jsonl:1: 'images' holds 1 item"),
        ({"chosen": "ab", "rejected": "ac", "images": ["cat.png"]}, load_pairs, "jsonl:1: 'images' holds 1 item"),
    ],
)
def test_bad_rows_are_refused(given: dict[str, Any], by: Any, line: str, load: Any) -> None:
    with pytest.raises(Refused, match=line):
        load(given, by=by)


@pytest.mark.parametrize(
    "given, by",
    [
        (talk("<image>a", "b", images=[CAT]), load_conversations),
        ({"prompt": "<image>q", "chosen": "a", "rejected": "b", "images": [CAT]}, load_pairs),
    ],
)
def test_a_model_of_text_refuses_them(given: dict[str, Any], by: Any, load: Any) -> None:
    with pytest.raises(Refused, match="'images' holds 1 item.*prompts are rendered as text only"):
        load(given, by=by, folder=None)


@pytest.mark.parametrize("kind", sorted({*MARKED} - {"mllama"}))  # which refuses an image behind an answer
def test_answers_of_every_family_follow_the_tokens_of_its_prompts(kind: str, tmp_path: Path) -> None:
    """Marks around images and their rows are context, and no token of an answer is one."""
    tokenizer, folder = tokenizer_of(kind), marked_folder(kind, tmp_path / "model")
    (tmp_path / "cat.png").write_bytes(png(12, 8, 1))
    (tmp_path / "fox.png").write_bytes(png(16, 8, 2))
    turns = talk("a <image>b", "c", "<image>\nd e", "f", images=["cat.png", "fox.png"])
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), max_tokens_per_row=4096, max_prompt_tokens=4096)

    def read(name: str, row: dict[str, Any], by: Any) -> Any:
        (tmp_path / name).write_text(json.dumps(row))
        return by([str(tmp_path / name)], tokenizer, cfg, model=folder)

    prompt = {"prompt": turns["messages"][:3], "images": turns["images"], "ground_truth": ""}
    (task,) = read("p.jsonl", prompt, load_tasks)
    table = read("c.jsonl", turns, load_conversations)
    last = table[len(table) - 1]
    assert last.ids[: len(task.prompt_ids)].tolist() == task.prompt_ids.tolist() and last.images == task.images
    assert last.mask[len(task.prompt_ids)] and tokenizer.decode(last.ids[last.mask]).count("f") == 1
    assert all(not last.mask[: image.start + image.tokens + 1][image.start - 1 :].any() for image in last.images)
