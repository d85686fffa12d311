"""A Hugging Face folder of a Qwen2 shape, written without torch: real headers, a sparse file for the numbers."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any


def qwen2_tensors(
    *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, tied: bool
) -> dict[str, list[int]]:
    head_dim = hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    tensors = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = [width, hidden]
            tensors[f"{at}self_attn.{name}_proj.bias"] = [width]
        tensors |= {
            f"{at}self_attn.o_proj.weight": [hidden, q],
            f"{at}mlp.gate_proj.weight": [ffn, hidden],
            f"{at}mlp.up_proj.weight": [ffn, hidden],
            f"{at}mlp.down_proj.weight": [hidden, ffn],
            f"{at}input_layernorm.weight": [hidden],
            f"{at}post_attention_layernorm.weight": [hidden],
        }
    return tensors if tied else tensors | {"lm_head.weight": [vocab, hidden]}


def write_safetensors(file: Path, tensors: dict[str, list[int]], dtype: str = "BF16") -> None:
    width = {"BF16": 2, "F32": 4, "F16": 2}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = width * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def write_model(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    ffn: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 1000,
    tied: bool = True,
    context: int = 32768,
    dtype: str = "BF16",
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = qwen2_tensors(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, vocab=vocab, tied=tied
    )
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
    else:
        files = [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
        weight_map = {name: files[k % shards] for k, name in enumerate(tensors)}
        for file in files:
            write_safetensors(folder / file, {n: s for n, s in tensors.items() if weight_map[n] == file}, dtype)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    described = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(described | (config or {})))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def write_qwen_half_billion(folder: Path) -> Path:
    """The shapes of Qwen2.5-0.5B: 494,032,768 parameters."""
    return write_model(folder, layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2, vocab=151936)


def write_rows(file: Path, count: int) -> Path:
    file.write_text("".join(json.dumps({"question": f"{k}?", "answer": f"#### {k}"}) + "\n" for k in range(count)))
    return file
