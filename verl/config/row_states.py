"""The states that layers of a model keep of a row in place of keys and values, by its config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.accel.families import DELTA_TYPES, STATE_LAYERS

INTERVAL = 4  # of layers of attention among delta nets, where config.json does not say it


@dataclass(frozen=True, slots=True)
class RowStates:
    """The layers that keep a state of a row, and its size over all of them."""

    layers: int = 0
    float32_values: int = 0
    """Values of the state of the delta rule, which are float32 in every dtype."""
    values: int = 0
    """Values in the dtype of the rollout: the last tokens that convolutions read."""


def row_states(config: Mapping[str, Any], layers: int) -> RowStates:
    """Return the states that a language model keeps of a row. config: the part of config.json about it"""
    delta, kinds = config.get("model_type") in DELTA_TYPES, config.get("layer_types")
    if kinds is None and delta:
        every = config.get("full_attention_interval", INTERVAL)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    count = sum(kind in STATE_LAYERS for kind in kinds or ())
    if not delta:
        return RowStates(count)
    sizes = {"num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128, "num_key_heads": 16}
    heads, key, value, key_heads = (int(config.get(f"linear_{name}", usual)) for name, usual in sizes.items())
    channels = 2 * key_heads * key + heads * value
    window = int(config.get("linear_conv_kernel_dim", 4)) - 1
    return RowStates(count, count * heads * key * value, count * window * channels)
