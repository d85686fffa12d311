"""The families of models whose norms, gates and rotations are trained by operations of the table. No torch."""

FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Their model types: families whose modules are known to be these operations."""
