"""verl: reinforcement-learning post-training for language models. An independent implementation.

The names below are loaded on first use, so that `import verl` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_API = (
    *("VerlTrainer", "VerlConfig", "GRPOTrainer"),
    *("DAPOTrainer", "PPOTrainer", "Trainer", "Policy", "RewardModel", "SingleController", "MultiController"),
)
_FACE = {**dict.fromkeys(_API, "verl.api"), "AgentLoopBase": "verl.agent_loop.base", "DataProto": "verl.protocol"}
_FACE |= {"AgentLoop": "verl.agent_loop.base"}
_FACE |= dict.fromkeys(("create_reference_model", "AutoModelForCausalLMWithValueHead"), "verl.given_models")
_NAMED = {"AgentLoop": "AgentLoopBase"}  # where the module has it under another name
__all__ = ["__version__", *_FACE]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), _NAMED.get(name, name))
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
