"""`verl serve` with images in requests: the answers of transformers, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rollouts import context_of
from serving import serving
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision import IMAGE, chat_folder, png

from verl.driver.setup import decoder
from verl.models import pictures
from verl.models.expand import banned_tokens
from verl.models.pictures import Pictures
from verl.rollout import hf
from verl.rollout.native import engine as native
from verl.rollout.native.options import Options
from verl.rollout.server import images as server_images
from verl.rollout.server.images import chat_images
from verl.serve import FolderWeights
from verl.transfer_queue.media import MemoryMedia

CAT, DOG = png(12, 8, 1), png(8, 8, 2)
CHAT = "/v1/chat/completions"


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def asked(*parts: str | bytes, **more: Any) -> dict[str, Any]:
    """Return a request with an image in the place of each content."""
    seen = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": seen}], "temperature": 0, "max_tokens": 5, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl")


async def sent(client: Any, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.json()


def greedy(folder: Path, images: list[bytes], parts: list[str | bytes], tmp_path: Path) -> tuple[list[int], list[int]]:
    """Return the prompt and the likeliest answer by transformers, without the ids that are never sampled."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    shown = [{"type": "image"} if isinstance(p, bytes) else {"type": "text", "text": p} for p in parts]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": shown}], add_generation_prompt=True, return_dict=False
    )
    files = [tmp_path / f"{k}.png" for k in range(len(images))]
    for file, content in zip(files, images):
        file.write_bytes(content)
    seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[*map(Image.open, files)], return_tensors="pt")
    sizes = iter((seen["image_grid_thw"].prod(-1) // 4).tolist())
    ids = [i for token in prompt for i in ([token] * next(sizes) if token == IMAGE else [token])]
    start = len(ids)
    for _ in range(5):
        given = torch.tensor([ids])
        kinds = (torch.arange(len(ids)) < start) & (given == IMAGE)
        with torch.no_grad():
            logits = model(input_ids=given, mm_token_type_ids=kinds.long(), **seen).logits[0, -1]
        logits[list(banned_tokens(model.config, tokenizer))] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return ids[:start], ids[start:]


@pytest.mark.parametrize("made", [native, hf], ids=["native", "hf"])
def test_images_of_requests_have_the_answers_of_transformers(made: Any, folder: Path, tmp_path: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    store, images, banned = MemoryMedia(), chat_images(folder, tokenizer), banned_tokens(model.config, tokenizer)
    assert images is not None
    context = context_of(
        model.config,
        8,
        max_context_tokens=64,
        eos_token_ids=(tokenizer.eos_token_id,),
        decode=decoder(tokenizer),
        pictures=Pictures(folder, store),
    )
    damaged = asked(CAT[:-30], "what?")
    parts: list[str | bytes] = ["a ", CAT, "or", DOG, "?"]

    async def run() -> None:
        engine = made.build(Options(), context, lanes=1) if made is native else made.build(hf.Options(), context)
        await engine.load_weights(FolderWeights(model))
        options = {"max_context_tokens": 64, "images": images, "media": store, "banned": banned}
        options["pictures"] = context.pictures
        async with serving(engine, tokenizer, **options) as (client, _):
            _, body = await sent(client, CHAT, asked(*parts, n=2, return_token_ids=True))
            prompt, answer = greedy(folder, [CAT, DOG], parts, tmp_path)
            assert body["prompt_token_ids"] == prompt
            assert [choice["token_ids"] for choice in body["choices"]] == [answer] * 2
            _, counted = await sent(client, "/tokenize", {"messages": asked(*parts)["messages"]})
            assert counted["tokens"] == prompt and len(store) == 0, "nothing is kept"
            _, typed = await sent(client, CHAT, asked("<|image_pad|>", return_token_ids=True))
            assert IMAGE not in typed["prompt_token_ids"], "a placeholder that a text spells out is text"
            for request, why in (
                (damaged, "damaged|not complete|truncated"),
                (asked(b"no image"), "messages.0.: image 1: 8 bytes are no image that can be read"),
                (
                    asked(CAT) | {"messages": [{"role": "user", "content": [_part("https://x.org/a.png")]}]},
                    "a data URL",
                ),
                (asked(CAT) | {"messages": [{"role": "user", "content": [_part("/etc/passwd")]}]}, "a data URL"),
                (asked(CAT) | {"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, "video"),
                (asked(*[CAT] * 12), "tokens; the context of 64 leaves no room"),
            ):
                status, refused = await sent(client, CHAT, request)
                assert status == 400 and re.search(why, refused["error"]["message"]), refused
            assert len(store) == 0

    asyncio.run(run())


def test_health_answers_while_an_image_is_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets the image at once, also if it is too large to be kept beside another one."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    store, images, decode = MemoryMedia(), chat_images(folder, tokenizer), pictures.decoded_image
    assert images is not None
    began, go_on, names = threading.Event(), threading.Event(), list[str]()

    def slow(content: bytes, where: str) -> Any:
        names.append(threading.current_thread().name)
        began.set()
        assert go_on.wait(10), "the event loop waits for it"
        return decode(content, where)

    monkeypatch.setattr(pictures, "decoded_image", slow)
    made = Pictures(folder, store, max_bytes=0)
    ends = (tokenizer.eos_token_id,)
    context = context_of(
        model.config, 8, max_context_tokens=64, eos_token_ids=ends, decode=decoder(tokenizer), pictures=made
    )

    async def run() -> None:
        engine = native.build(Options(), context, lanes=1)
        await engine.load_weights(FolderWeights(model))
        options = {"max_context_tokens": 64, "images": images, "media": store, "pictures": made}
        async with serving(engine, tokenizer, **options) as (client, _):
            chats = [asyncio.ensure_future(sent(client, CHAT, asked(content, "what?"))) for content in (CAT, DOG)]
            assert await asyncio.to_thread(began.wait, 10)
            async with asyncio.timeout(5), client.get("/health") as answer:
                assert answer.status == 200
            go_on.set()
            assert [status for status, _ in await asyncio.gather(*chats)] == [200, 200]
            assert len(names) == 2 and all(name.startswith("serve-large") for name in names)
            monkeypatch.setattr(server_images, "MOST_PIXELS", 12 * 8 + 8 * 8 - 1)
            status, refused = await sent(client, CHAT, asked(CAT, DOG, "what?"))
            assert status == 400 and "image 2: 160 pixels with those before" in refused["error"]["message"]

    asyncio.run(run())


def _part(link: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": link}}
