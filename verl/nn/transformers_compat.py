"""The differences between the releases of transformers that verl's workers run with: 5.23 to 5.24, and 5.9, which is
that of VeOmni. Other modules have no branch for a release."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any


def loading_report(missing: Set[str], unexpected: Set[str]) -> Any:
    """Return transformers' report of a folder with these weights missing and these left over."""
    from transformers.utils.loading_report import LoadStateDictInfo

    if "skipped_pp_keys" in LoadStateDictInfo.__dataclass_fields__:
        return LoadStateDictInfo({*missing}, {*unexpected}, set(), [], {}, set())
    return LoadStateDictInfo({*missing}, {*unexpected}, set(), [], {})  # type: ignore[call-arg]


def enable_checkpointing(model: Any, arguments: Mapping[str, Any]) -> None:
    """Let the layers of a model compute again in the backward pass. arguments: those of torch's `checkpoint`"""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({**arguments})
