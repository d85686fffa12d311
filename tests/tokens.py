"""A tokenizer of whole texts for tests, made from nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from verl.models.tiny import SPECIAL_TOKENS, with_chat


def bpe_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Byte-level BPE trained on `texts`, with chat markers and template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return with_chat(core)
