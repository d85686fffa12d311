"""Describe the type of a row's value for error messages, and hash its content."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from verl.errors import Refused


def object_in(value: Any, where: str, column: str) -> dict[str, Any]:
    if value is None or type(value) is dict:
        return dict(value or {})
    if not isinstance(value, Mapping):
        raise Refused(f"{where}: {column!r} must be an object, got {kind_of(value)}")
    return dict(value or {})


def refuse_surrogates(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise Refused(f"{where}: half of a surrogate pair at character {exc.start + 1} (a cut emoji)") from exc


def content_hash(value: Any, num_bytes: int) -> str:
    """Return a hash of a value of JSON types and bytes. It does not depend on the order of keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_encode_bytes)
    return hashlib.blake2b(canonical.encode("ascii"), digest_size=num_bytes).hexdigest()


def _encode_bytes(value: Any) -> dict[str, str]:
    assert isinstance(value, bytes), f"rows hold JSON types and bytes, got {type(value).__name__}"
    return {"\0bytes": base64.b64encode(value).decode("ascii")}  # no column is called this


def names_of(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


def kind_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    names: dict[type, str] = {type(None): "null", bool: "a boolean", str: "text", list: "a list", bytes: "bytes"}
    return names.get(type(value), f"a {type(value).__name__}")
