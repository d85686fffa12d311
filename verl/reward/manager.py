"""Run reward managers of verl: classes with `async run_single(data) -> {"reward_score", "reward_extra_info"}`.

    pool = RewardPool(manager_spec("my_manager.py", "MyManager", tokenizer_path="Qwen/Qwen3-0.6B"))

Each worker builds the class once, on the event loop of its calls. The class gets one sample at a time as a
`DataProtoView`, which has DataProto's names with numpy arrays instead of tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.reward.compute import compute_score as default_compute_score
from verl.reward.pool import grader_spec
from verl.sandbox.messages import CallableSpec
from verl.sandbox.worker import Unloadable, load_module

Grader = Callable[..., Awaitable[dict[str, Any]]]


@dataclass
class DataProtoItem:
    """One row of a `DataProtoView`: `.batch[name]` are arrays without a batch dimension, `.non_tensor_batch[name]`
    objects."""

    batch: dict[str, np.ndarray]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProtoView:
    """One unpadded sample under DataProto's names: `len(data) == 1`, `data[0]`, and `[1, ...]` arrays in `.batch`."""

    def __init__(self, prompt_ids: np.ndarray, response_ids: np.ndarray, fields: Mapping[str, Any]) -> None:
        prompts, responses = np.asarray(prompt_ids, np.int64), np.asarray(response_ids, np.int64)
        ids = np.concatenate([prompts, responses])
        batch = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(ids)),
            "response_mask": np.ones_like(responses),
        }
        self._item = DataProtoItem(batch, dict(fields))
        self.batch = {name: value[None] for name, value in batch.items()}
        self.non_tensor_batch = {name: np.empty(1, dtype=object) for name in fields}
        for name, value in fields.items():
            self.non_tensor_batch[name][0] = value
        self.meta_info: dict[str, Any] = {}

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice) and len(range(1)[index]) == 1:
            return self
        if index not in (0, -1):
            raise IndexError(f"index {index}: this view holds one sample")
        return self._item


def manager_spec(
    path: str, name: str, *, tokenizer_path: str | None = None, reward_kwargs: Mapping[str, Any] | None = None
) -> CallableSpec:
    """Return the pool's spec of the manager class `name` of a file or module.

    tokenizer_path: a folder or hub id of the tokenizer that the class gets (None without one)
    reward_kwargs: the value of `config.reward.reward_kwargs` for the class
    """
    kwargs = {"path": path, "name": name, "tokenizer_path": tokenizer_path, "reward_kwargs": dict(reward_kwargs or {})}
    return grader_spec("verl.reward.manager", "make_grader", kwargs, factory=True, with_ids=True)


async def make_grader(path: str, name: str, tokenizer_path: str | None, reward_kwargs: Mapping[str, Any]) -> Grader:
    """Build the manager and return it as a reward function. It is a coroutine so that an event loop runs in the
    constructor."""
    module = load_module(path, "reward")
    manager_class: Any = getattr(module, name, None)
    if not inspect.isclass(manager_class) or not callable(getattr(manager_class, "run_single", None)):
        raise Unloadable(f"{module.__file__} has no class {name!r} with a method run_single(data)")
    manager: Any = manager_class(**_constructor_arguments(manager_class, tokenizer_path, reward_kwargs))

    async def grade(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, prompt_ids: Any, response_ids: Any
    ) -> dict[str, Any]:
        if prompt_ids is None or response_ids is None:
            raise ValueError("a reward manager needs prompt_ids and response_ids in the RewardRequest")
        truth = {"ground_truth": ground_truth}
        fields = {"data_source": data_source, "reward_model": truth, "extra_info": dict(extra_info)}
        result = await manager.run_single(DataProtoView(prompt_ids, response_ids, fields))
        if not isinstance(result, Mapping) or "reward_score" not in result:
            raise ValueError(f'{name}.run_single returned a {type(result).__name__} without "reward_score"')
        return {**result.get("reward_extra_info", {}), "score": result["reward_score"]}

    return grade


def _constructor_arguments(
    manager_class: type, tokenizer_path: str | None, reward_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for the manager's constructor: those of verl's managers that it names, or all if it has
    **kwargs."""
    from omegaconf import OmegaConf

    tokenizer = None
    if tokenizer_path is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    known = {
        "config": OmegaConf.create({"reward": {"reward_kwargs": dict(reward_kwargs)}}),
        "tokenizer": tokenizer,
        "compute_score": default_compute_score,
        "reward_router_address": None,
        "reward_model_tokenizer": None,
    }
    taken = inspect.signature(manager_class).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        return known
    return {p.name: known[p.name] for p in taken if p.name in known}
