"""Loading tokenizers and rendering prompts: what works, and the text of each refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_chat import QUICKSTART, conversation, tokenizer_of
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from verl.chat.load import load_tokenizer, require_chat_template
from verl.chat.template import Renderer, RenderError, render_prompt
from verl.driver.setup import decoder


def test_render_prompt_is_the_text_tokenised_once() -> None:
    tokenizer, messages = tokenizer_of("chatml"), conversation("Hi", "A", "More", system="S")
    ids = render_prompt(tokenizer, messages, template_kwargs={})
    text = Renderer(tokenizer).text(messages, prompt=True)
    assert ids.dtype == np.int64 and ids.ndim == 1
    assert text.endswith("<|im_start|>assistant\n") and tokenizer.decode(ids) == text
    assert not Renderer(tokenizer).text(messages, prompt=False).endswith("assistant\n")


def test_decoding_directly_is_decoding_with_the_tokenizer() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    pieces = WordPiece({"[UNK]": 0, "a": 1, "b": 2, "!": 3, "n't": 4}, unk_token="[UNK]")
    for kind, clean in ((PreTrainedTokenizerFast, False), (PreTrainedTokenizerFast, True), (Shouting, False)):
        tokenizer = kind(tokenizer_object=Tokenizer(pieces), unk_token="[UNK]", clean_up_tokenization_spaces=clean)
        ids = [1, 4, 0, 2, 3]
        expected = {
            (PreTrainedTokenizerFast, False): "a n't b !",
            (PreTrainedTokenizerFast, True): "an't b!",
            (Shouting, False): "A N'T B !",
        }
        assert decoder(tokenizer)(ids) == tokenizer.decode(ids, skip_special_tokens=True) == expected[kind, clean]
    chat = tokenizer_of("chatml")
    ids = render_prompt(chat, conversation("Hi"), template_kwargs={}).tolist()
    assert decoder(chat)(ids) == chat.decode(ids, skip_special_tokens=True) != chat.decode(ids)


def test_a_tokenizer_that_returns_a_plain_list_is_fine() -> None:
    class Plain:
        def apply_chat_template(self, messages: Any, **kwargs: Any) -> list[int] | str:
            return [1, 2, len(messages)] if kwargs["tokenize"] else "Hi"

    tokenizer: Any = Plain()
    assert render_prompt(tokenizer, conversation("Hi"), template_kwargs={}).tolist() == [1, 2, 1]


def test_template_errors_name_the_cause() -> None:
    with pytest.raises(RenderError, match=r"roles \[system, user\].*System role not supported"):
        render_prompt(tokenizer_of("gemma"), conversation("Hi", system="S"), template_kwargs={})
    with pytest.raises(RenderError, match="can only concatenate str"):
        render_prompt(tokenizer_of("chatml"), [{"role": "user", "content": [{"type": "text"}]}], template_kwargs={})
    with pytest.raises(RenderError, match="no messages"):
        render_prompt(tokenizer_of("chatml"), [], template_kwargs={})
    with pytest.raises(ValueError, match=r"template_kwargs=\['tokenize'\]"):
        render_prompt(tokenizer_of("chatml"), conversation("Hi"), template_kwargs={"tokenize": False})


def test_load_tokenizer(tmp_path: Path) -> None:
    tokenizer_of("chatml").save_pretrained(tmp_path / "ok")
    loaded = load_tokenizer(tmp_path / "ok")
    require_chat_template(loaded, tmp_path)
    expected = render_prompt(tokenizer_of("chatml"), conversation("Hi"), template_kwargs={})
    assert np.array_equal(render_prompt(loaded, conversation("Hi"), template_kwargs={}), expected)

    (tmp_path / "mine.jinja").write_text(QUICKSTART)
    other = load_tokenizer(tmp_path / "ok", chat_template_file=str(tmp_path / "mine.jinja"))
    assert Renderer(other).text(conversation("Hi"), prompt=True) == "<|user|>Hi<|end|><|assistant|>"
    with pytest.raises(ValueError, match=r"model\.chat_template='.*none\.jinja' cannot be read"):
        load_tokenizer(tmp_path / "ok", chat_template_file=str(tmp_path / "none.jinja"))


def test_load_tokenizer_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a folder. Fix: .*hf download"):
        load_tokenizer(tmp_path / "nope")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no tokenizer that can be loaded .tokenizer files there: none"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text('{"broken": ')
    with pytest.raises(ValueError, match=r"files there: tokenizer\.json; JSONDecodeError"):
        load_tokenizer(tmp_path / "bad")
    tokenizer_of("chatml").save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "bare" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "bare" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has no chat template.*model\.chat_template=FILE"):
        require_chat_template(load_tokenizer(tmp_path / "bare"), tmp_path / "bare")


def test_importing_the_room_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, verl.chat, verl.data, verl.data.source, verl.data.formats;"
        "print([m for m in ('torch', 'transformers', 'pyarrow', 's3fs') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
