"""Models and tokenizers made from scratch: for the quickstart and the tests. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<pad>", "<|user|>", "<|assistant|>", "<|end|>")


def character_tokenizer(
    characters: Sequence[str], words: Sequence[str] = (), template: str = CHAT_TEMPLATE, marks: Sequence[str] = ()
) -> Any:
    """Return a PreTrainedTokenizerFast with one token per character and per word, chat markers, and further special
    tokens."""
    from tokenizers import Tokenizer, decoders, models

    special = [*SPECIAL_TOKENS, *marks]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*special, *characters]))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.add_special_tokens(special)
    core.add_tokens(list(words))
    core.decoder = decoders.Fuse()
    return with_chat(core, template)


def with_chat(core: Any, template: str = CHAT_TEMPLATE) -> Any:
    """Return a `tokenizers.Tokenizer` with the markers and the template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def qwen3(
    tokenizer: Any,
    *,
    hidden: int = 192,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 512,
    seed: int = 0,
    max_positions: int = 512,
    tied: bool = True,
    vocab_size: int | None = None,
) -> Any:
    """Return a Qwen3-architecture causal LM with random weights; 1.63M parameters by default, with 32 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size or -(-len(tokenizer) // 32) * 32,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=ffn,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save(model: Any, tokenizer: Any, path: Path) -> Path:
    """Write a complete Hugging Face folder."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
