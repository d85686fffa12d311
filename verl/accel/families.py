"""The families of models that are trained by operations of our own. No torch."""

FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The model types with norms, gates and rotations by the table: families with modules that are known to be these
operations."""

DELTA_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""The model types with gated delta nets, which compute packed rows (nn/delta_net.py)."""

ROUTED_TYPES = ("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text")
"""The model types with routers that take the routes of a rollout (nn/router_replay.py)."""

STATE_LAYERS = frozenset(("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent"))
"""The kinds of layers (`layer_types`) that keep a state along a row."""


def unpacked_states(kind: str) -> str:
    """Return why packed rows are refused for a model of this type, which keeps states."""
    return (
        f"(model_type {kind}) has layers that keep a state along a row, and from packed rows a state would pass on to "
        f"the next row; states are computed for packed rows of {', '.join(DELTA_TYPES)}: set "
        "model.engine_options.attention=padded (and model.engine_options.share_prefix=false)"
    )
