"""The device on which tests compare: that of VERL_TEST_DEVICE, else a CPU. `make test-gpu` sets it to cuda, for the
tests that are marked `on_device`; all helpers that build an engine or a run take it from here."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("VERL_TEST_DEVICE", "cpu"))
ON_CPU = DEVICE.type == "cpu"
RUN = {} if ON_CPU else {"model.device": DEVICE.type, "run.deterministic": "true"}
"""Overrides of a run on the device. Runs that are compared bitwise have to be deterministic; on a CPU all are."""


def close_to(error: float) -> float:
    """Return the tolerance for float32: that of a CPU, and five times as much for a GPU, since its products add up by
    tiles."""
    return error if ON_CPU else 5 * error


def missing_device() -> str | None:
    """Return why the device cannot be used, or None."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        return f"VERL_TEST_DEVICE={DEVICE}: this torch ({torch.__version__}) sees no GPU; nothing was tested"
    return None
