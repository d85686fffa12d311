"""The adapters of frozen roles that are LoRA sets on the policy's frozen base, in place of models of their own."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

from verl.config.adapter import base_of, factors_alone, is_adapter, linear_layers
from verl.config.experts import fused_experts
from verl.config.model_files import find_model_folder, json_object
from verl.config.schema import Config

REWARD_MODEL = "reward_model"
_NO_DIFFERENCE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Keys of config.json that change no result here: the precision of a model is a setting of the run."""


def adapters_on_base(config: Config) -> dict[str, Path]:
    """Return the folder of each teacher and reward model that is an adapter of the policy's model: of the same weights,
    with factors alone (a reward model's has its head too), and without a pool that `cluster.roles` names."""
    given = config.teacher.folders() | ({} if config.reward.model is None else {REWARD_MODEL: config.reward.model})
    folders = {role: Path(path).expanduser() for role, path in given.items() if role not in config.cluster.roles}
    return {role: path for role, path in folders.items() if is_adapter(path) and _fits(config, role, path)}


def _fits(config: Config, role: str, adapter: Path) -> bool:
    """Return True if an adapter can be a set on the policy's base: with factors of what LoRA can train here, as an
    untied head is not. Reasons against it are reported by other checks."""
    try:
        policy = find_model_folder(config.model.path)
        parts = factors_alone(adapter, policy, head=role == REWARD_MODEL)
        able = {*linear_layers(policy), *fused_experts(policy)}
        if not {name.removesuffix(".weight") for name in parts} <= able:
            return False
        return same_model(find_model_folder(base_of(str(adapter), str(policy))), policy)
    except ValueError:
        return False


def same_model(one: Path, other: Path) -> bool:
    """Return True if two folders have the same model: they are one folder, or their files of weights have equal bytes,
    and their settings (RoPE, for example) are equal."""
    if one.samefile(other):
        return True
    if _settings(one) != _settings(other):
        return False
    first, second = ({p.name: p for p in folder.glob("*.safetensors")} for folder in (one, other))
    sizes = [{name: p.stat().st_size for name, p in files.items()} for files in (first, second)]
    if not first or sizes[0] != sizes[1]:
        return False
    return all(filecmp.cmp(p, second[name], shallow=False) for name, p in first.items())


def _settings(folder: Path) -> Any:
    """Return what config.json sets; None without one."""

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: kept(one) for key, one in value.items() if key not in _NO_DIFFERENCE}

    file = folder / "config.json"
    return kept(json_object(file, file.read_bytes())) if file.is_file() else None
