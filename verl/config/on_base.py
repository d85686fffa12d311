"""The adapters of frozen roles that are LoRA sets on the policy's frozen base, in place of models of their own."""

from __future__ import annotations

import filecmp
from pathlib import Path

from verl.config.adapter import base_of, factors_alone, is_adapter
from verl.config.model_files import find_model_folder
from verl.config.schema import Config

REWARD_MODEL = "reward_model"


def adapters_on_base(config: Config) -> dict[str, Path]:
    """Return the folder of each teacher and reward model that is an adapter of the policy's model: of the same weights,
    with factors alone (a reward model's has its head too), and without a pool that `cluster.roles` names."""
    given = config.teacher.folders() | ({} if config.reward.model is None else {REWARD_MODEL: config.reward.model})
    folders = {role: Path(path).expanduser() for role, path in given.items() if role not in config.cluster.roles}
    return {role: path for role, path in folders.items() if is_adapter(path) and _fits(config, role, path)}


def _fits(config: Config, role: str, adapter: Path) -> bool:
    """Return True if an adapter can be a set on the policy's base. Reasons against it are reported by other checks."""
    try:
        policy = find_model_folder(config.model.path)
        factors_alone(adapter, policy, head=role == REWARD_MODEL)
        return same_weights(find_model_folder(base_of(str(adapter), str(policy))), policy)
    except ValueError:
        return False


def same_weights(one: Path, other: Path) -> bool:
    """Return True if two folders have the same weights: the same folder, or files of weights with equal bytes."""
    if one.samefile(other):
        return True
    first, second = ({p.name: p for p in folder.glob("*.safetensors")} for folder in (one, other))
    sizes = [{name: p.stat().st_size for name, p in files.items()} for files in (first, second)]
    if not first or sizes[0] != sizes[1]:
        return False
    return all(filecmp.cmp(p, second[name], shallow=False) for name, p in first.items())
