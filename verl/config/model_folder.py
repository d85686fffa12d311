"""Check that a Hugging Face folder is consistent, from its headers and small files, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.model_files import (
    EMBEDDING,
    FURTHER,
    HEAD,
    TensorHeader,
    chat_template_of,
    declared_tie,
    embedding_rows,
    find_model_folder,
    json_object,
    read_model_config,
    read_weight_headers,
    text_config,
)
from verl.errors import Refused

COMPARED_BYTES = 1 << 24
"""The number of bytes that are read at a time to compare two tensors."""


def check_folder(folder: Path, tokenizer_folder: Path | None = None, template: str | None = None) -> None:
    """Raise ValueError for a folder in which the tie or the tokenizer does not match the weights.

    template: another chat template than that of the folder
    """
    check_tie(folder)
    where = tokenizer_folder or folder
    if (file := where / "tokenizer.json").is_file():
        config = read_model_config(folder)
        vocab = text_config(config).get("vocab_size")
        tokens, special = _vocabulary(json_object(file, file.read_bytes()))
        if isinstance(vocab, int):
            written = chat_template_of(where) if template is None else template
            refuse_other_vocabulary(folder, embedding_rows(config, vocab), tokens, special, written)


def check_tie(folder: Path) -> None:
    if declared_tie(read_model_config(folder)):
        refuse_other_head(folder, read_weight_headers(folder))


def refuse_other_head(folder: Path, tensors: Mapping[str, TensorHeader]) -> None:
    """Raise ValueError if the folder has a head that differs from the embedding to which the configuration ties it: the
    head would not be loaded."""
    heads = [name for name in tensors if name.endswith(HEAD)]
    for head in heads:
        body = [name for name in tensors if EMBEDDING.search(name) and tensors[name].shape == tensors[head].shape]
        if not any(_equal(tensors[head], tensors[name]) for name in body):
            raise Refused(
                f"model.path={folder}: config.json ties the output layer to the embedding (tie_word_embeddings), and"
                f" the weights hold another {head}, which would not be loaded; set tie_word_embeddings to false in"
                " config.json if that one is the model's, or take it out of the weights"
            )


def _equal(a: TensorHeader, b: TensorHeader) -> bool:
    """Return True if two tensors of one shape have equal values. Only these two tensors are read."""
    if a.quantised != b.quantised:
        return False
    with a.file.open("rb") as first, b.file.open("rb") as second:
        first.seek(a.begin)
        second.seek(b.begin)
        for start in range(0, a.numel, COMPARED_BYTES // 8):
            count = min(COMPARED_BYTES // 8, a.numel - start)
            read = [(s.read(count * t.num_bytes // t.numel), t.dtype) for s, t in ((first, a), (second, b))]
            parts = [_numbers(data, "" if a.dtype == b.dtype else dtype) for data, dtype in read]
            if not np.array_equal(parts[0], parts[1]):
                return False
    return True


def _numbers(data: bytes, dtype: str) -> Any:
    """Return the values as floats; as bytes if numpy has no such dtype."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}.get(dtype, "u1"))


def _vocabulary(tokenizer: Mapping[str, Any]) -> tuple[dict[str, int], dict[int, str]]:
    """Return (id of each token, text of the special ones by id) of a tokenizer.json."""
    vocab = tokenizer.get("model", {}).get("vocab") or {}
    tokens = dict(vocab) if isinstance(vocab, dict) else {str(entry[0]): i for i, entry in enumerate(vocab)}
    added = tokenizer.get("added_tokens") or ()
    tokens |= {token["content"]: token["id"] for token in added}
    return tokens, {token["id"]: token["content"] for token in added if token.get("special")}


def refuse_other_vocabulary(
    folder: Path, rows: int, tokens: Mapping[str, int], special: Mapping[int, str], template: str
) -> None:
    """Raise ValueError for a token without a row in the embedding. Special tokens for other models of a family (a
    placeholder for images) are accepted if the chat template does not write them."""
    beyond = [(i, text) for text, i in tokens.items() if i >= rows and (i not in special or special[i] in template)]
    if beyond:
        last, text = max(beyond)
        raise Refused(
            f"model.path={folder}: the tokenizer has {len(beyond)} tokens that the model has no embedding for ({rows} "
            f"rows; the last is {text!r}, id {last}); take both from the same model, or set model.tokenizer_path"
        )


def folder_lines(folder: Path) -> Iterator[str]:
    """Yield notes about a tokenizer's folder: which one of two chat templates is used."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if not file.is_file() or not config.is_file():
        return
    other = json_object(config, config.read_bytes()).get("chat_template")
    if isinstance(other, list):
        other = next((one.get("template") for one in other if one.get("name") == "default"), None)
    if isinstance(other, str) and other.strip() != file.read_text(encoding="utf-8", errors="replace").strip():
        yield (
            f"{folder}: {file.name} and the chat_template of {config.name} are different templates; the first is used "
            "(model.chat_template=FILE for another)"
        )


def rope_note(path: str, longest: int | None) -> str | None:
    """Return a note if transformers chooses the model's RoPE by the longest row of a pass (nn/rope.py), else None."""
    config = text_config(read_model_config(find_model_folder(path)))
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [of for of in given.values() if isinstance(of, dict)] or [given]
    kinds = [str(of.get("rope_type", of.get("type", ""))) for of in each]
    found = next((kind for kind in kinds if kind == "longrope" or "dynamic" in kind), None)
    rows = "the model's positions" if longest is None else f"the longest row of this run, {longest} tokens"
    return found and f"model: {found} RoPE is fixed for all rows as {rows}, has it"


def further_note(path: str) -> str | None:
    """Return a note if a folder has layers that predict further tokens, else None."""
    count = sum(name.startswith(FURTHER) for name in read_weight_headers(find_model_folder(path)))
    kept = "are kept as they are in every checkpoint and export, and neither trained nor used in rollouts"
    return f"model: {count} tensors {FURTHER}*, which predict further tokens, {kept}" if count else None
