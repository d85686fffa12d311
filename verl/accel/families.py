"""The families of models with norms, gates and rotations that are trained by operations of the table. No torch."""

FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Their model types: families with modules that are known to be these operations."""
