"""Facts of devices that a test replaces: results must not depend on them."""

from dataclasses import replace
from types import ModuleType

import pytest

from verl.accel.devices import device_facts
from verl.nn import linear_logprob


def use_facts(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **sizes: int) -> None:
    """Let `module` compute by these sizes on every device."""
    facts = replace(device_facts("cpu"), **sizes)
    monkeypatch.setattr(module, "device_facts", lambda kind: facts)


def use_chunks(monkeypatch: pytest.MonkeyPatch, *, least_rows: int, at_once: int) -> None:
    """Let log-probs be computed in chunks of so many rows at least, and so many bytes."""
    use_facts(monkeypatch, linear_logprob, logit_chunk_rows=least_rows, logit_chunk_bytes=at_once)
