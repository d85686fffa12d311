"""Runs that an older version began: `config.yaml`, and the identity in the checkpoint of the second step, as verl wrote
them at c26aef9 for `verl train`, `verl sft`, and `verl train` on Ray. Their inputs were in /inputs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verl.config.moved import MOVED
from verl.config.tree import leaf_of
from verl.driver.identity import Identity

OLDER = Path(__file__).parent / "data" / "runs_of_c26aef9"
COMMON = (
    *("run.total_steps=2", "run.threads=1", "model.dtype=float32", "optim.lr=1e-3", "track.sinks=[jsonl]"),
    *("run.save_every_steps=1", "run.keep_last_checkpoints=9", "run.name=r"),
)
RL = (
    *(*COMMON, "data.max_prompt_tokens=16", "step.prompts_per_step=4", "step.samples_per_prompt=4"),
    *("step.max_tokens_per_microbatch=512", "rollout.max_response_tokens=12", "reward.num_workers=1"),
    "reward.path=/inputs/grade.py:short",
)
RAY = (
    *("cluster.backend=ray", "cluster.ranks_per_node=2", "cluster.pools.main.cpus_per_rank=0.5"),
    "cluster.pools.main.env={KEEP: 1}",
)
COMMANDS = {
    "train": ("train", RL),
    "sft": ("sft", (*COMMON, "data.max_tokens_per_row=64", "run.eval_every_steps=1", "step.prompts_per_step=3")),
    "ray": ("train", (*RL, *RAY)),
}
"""The command lines of the older runs, by present keys."""


def older(name: str) -> Identity:
    return msgspec.json.decode((OLDER / name / "identity.json").read_bytes(), type=Identity)


def as_recorded_then(name: str, own: Identity) -> Identity:
    """The identity of a run of today, as the older version would have recorded it: its keys, and the older run's values
    of those that have moved."""
    was = older(name)
    targets = {found[0].key for move in MOVED.values() if (found := leaf_of(move.key))}
    values = {key: text for key, text in own.values.items() if key in was.values and key not in targets}
    contents = {key: text.split()[-1] if key in targets else text for key, text in own.contents.items()}
    return Identity(was.values | values, contents, own.defaults)
