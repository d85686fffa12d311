"""Text without a token is counted per file: reported if there is any, refused above one in a hundred characters."""

import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokens import bpe_tokenizer
from transformers import PreTrainedTokenizerFast

from verl.config.schema import DataConfig
from verl.data import source
from verl.data.lost import Coverage
from verl.data.preference import load_pairs
from verl.data.source import load_conversations, load_tasks
from verl.models import tiny


def words(known, **special):
    core = Tokenizer(models.WordLevel(vocab={w: k for k, w in enumerate(("<unk>", *known))}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def lower_case():
    core = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate("abcé ")}, merges=[]))
    core.normalizer, core.decoder = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def half_an_alphabet():
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c != "©"]  # the second byte of é
    core = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_what_is_lost_of_a_text():
    characters, whole = tiny.character_tokenizer("0123456789+= "), bpe_tokenizer(["a b"], vocab_size=300)
    cases = [
        (characters, "1 + 1 = ", ""),
        (characters, "1 times 1 = ", "eimst"),
        (characters, "1\t+1", " "),
        (whole, "é 數 🙂 \n\t \ufffd <|end|> e\u0301", ""),
        (words(["so", "it", "is"]), "so it is", ""),
        (words(["so", "it", "is"]), "so it was", " asw"),
        (words(["so", "it", "is"], unk_token="<unk>"), "so was it", " asw"),
        (lower_case(), "A cab", ""),
        (lower_case(), "Cafe\u0301 ba", "f"),
        (half_an_alphabet(), "a é b", "é"),
    ]
    found = [(text, got, lost) for tokenizer, text, lost in cases if (got := Coverage(tokenizer).lost(text)) != lost]
    assert not found


def rows(path, bad):
    """100 rows of 10 characters; `bad` of them with one letter that the tokenizer lacks, in prompt or answer."""
    made = []
    for k in range(100):
        answer = {"role": "assistant", "content": "11é11" if k < bad else "11111"}
        turns = [{"role": "user", "content": "22222"}, answer]
        prompt = turns[0]["content"] + answer["content"]
        made.append({"messages": turns, "prompt": prompt, "ground_truth": "1"})
    path.write_text("\n".join(map(json.dumps, made)))
    return str(path)


def config(tmp_path, **given):
    return DataConfig(cache_dir=str(tmp_path / "cache"), max_tokens_per_row=4096, **{"num_workers": 0, **given})


def test_a_little_is_said_for_its_file_and_much_is_refused(tmp_path, caplog):
    tokenizer, cfg = tiny.character_tokenizer("0123456789+= "), config(tmp_path)
    clean, few, many = (rows(tmp_path / f"{bad}.jsonl", bad) for bad in (0, 10, 11))
    with caplog.at_level(logging.WARNING):
        load_tasks([clean], tokenizer, cfg)
        assert not caplog.records
        for attempt in range(2):  # computed, and from the cache
            caplog.clear()
            assert load_tasks([clean, few], tokenizer, cfg).report.from_cache == bool(attempt)
            (said,) = [r.getMessage() for r in caplog.records]
            assert few in said and "10 of 1000 characters (1.00%)" in said and "'é' of '2222211é11'" in said
            assert clean not in said and f"{few}:1)" in said
    for load in (load_tasks, load_conversations):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"11\.jsonl: 11 of 1000 characters \(1\.10%\).*Fix: ") as caught:
                load([clean, many], tokenizer, cfg)
            assert "\n" not in str(caught.value)


def test_answers_of_pairs_count(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3333"}))
    with pytest.raises(ValueError, match=r"pairs\.jsonl: 4 of 9 characters"):
        load_pairs([str(file)], tiny.character_tokenizer("012+= "), config(tmp_path))


@pytest.mark.slow
def test_workers_count_alike(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(source, "IN_PROCESS_ROWS", 10)
    monkeypatch.setattr(source, "CHUNK_ROWS", 7)
    cfg = config(tmp_path, num_workers=2)
    with caplog.at_level(logging.WARNING):
        load_tasks([rows(tmp_path / "9.jsonl", 9)], tiny.character_tokenizer("0123456789+= "), cfg)
    (said,) = [r.getMessage() for r in caplog.records]
    assert "9 of 1000 characters (0.90%)" in said and "9.jsonl:1)" in said
