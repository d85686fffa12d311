"""The native rollout engine."""

from verl.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
