"""Command lines of verl's public scripts, as tests/data keeps them: keys and values, with paths replaced."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DATA = Path(__file__).parent / "data"
ACTOR = "actor_rollout_ref.actor."
SHORT = {
    "A": ACTOR,
    "X": f"{ACTOR}megatron.",
    "O": f"{ACTOR}megatron.override_transformer_config.",
    "P": f"{ACTOR}fsdp_config.",
    "F": "actor_rollout_ref.ref.",
    "R": "actor_rollout_ref.rollout.",
    "V": "actor_rollout_ref.rollout.val_kwargs.",
    "M": "actor_rollout_ref.model.",
    "D": "data.",
    "T": "trainer.",
    "G": "algorithm.",
    "C": "critic.",
    "W": "reward.",
}
"""The meaning of a letter before the first dot of a key in verl_lines.txt."""


@dataclass(frozen=True, slots=True)
class Line:
    """One invocation. reason: words of the line that refuses it; "" where it is taken."""

    name: str
    args: tuple[str, ...]
    reason: str

    @property
    def kind(self) -> Literal["rl", "sft"]:
        return "sft" if re.search(r"sft|engine_all", self.name) else "rl"

    def with_paths(self, paths: Mapping[str, object]) -> list[str]:
        """Return the arguments with a path in the place of each placeholder in capitals."""
        words = "|".join(paths)
        return [re.sub(rf"\b({words})\b", lambda m: str(paths[m[1]]), arg) for arg in self.args]


def public_lines() -> list[Line]:
    """Return the lines of both files. A block of the second may be given by its differences from another one (`like
    NAME`)."""
    found: dict[str, Line] = {}
    for file in ("verl_scripts.txt", "verl_lines.txt"):
        for block in (DATA / file).read_text().split("\n\n")[1:]:
            head, _, text = block.partition("\n")
            name, _, reason = head.removeprefix("# ").partition(" refused: ")
            name, _, like = name.partition(" like ")
            assert name not in found, name
            args = {_key(arg): arg for arg in (found[like].args if like else ())}
            for arg in shlex.split(text):
                if arg.startswith("-") and "=" not in arg:
                    del args[_expanded(arg.removeprefix("-"))]
                else:
                    args[_key(_expanded(arg))] = _expanded(arg)
            found[name] = Line(name, tuple(args.values()), reason)
    return [*found.values()]


def _expanded(arg: str) -> str:
    mark, letter, rest = re.match(r"([+-]*)(?:([A-Z])\.)?(.*)", arg, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{mark}{SHORT[letter] if letter else ''}{rest}"


def _key(arg: str) -> str:
    return arg.lstrip("+").partition("=")[0]


GRADER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    score = sum(map(ord, solution_str)) % 7 / 7
    return {"score": score, "acc": score, "accuracy_reward": score, "format_reward": len(solution_str) % 3}


char_count_reward_function = compute_score_gsm8k = my_reward_function = compute_score
"""
DATASET = """
from verl.utils.dataset.rl_dataset import RLHFDataset


class CustomRLHFDataset(RLHFDataset):
    def _build_messages(self, example):
        return [{**message} for message in super()._build_messages(example)]
"""
TOOLS = '''
from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)
'''
LOOPS = "".join(
    f"- {{name: {name}, _target_: verl.agent_loop.single_turn.SingleTurnLoop}}\n"
    for name in ("multi_traj_test_agent", "tau2_agent")
)
MULTITURN = """
defaults: [ppo_trainer, _self_]
hydra: {searchpath: [x]}
data: {max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 256, return_raw_chat: True}
actor_rollout_ref: {hybrid_engine: True, rollout: {name: sglang, multi_turn: {enable: True, max_assistant_turns: 5}}}
"""


def write_seeing(folder: Path) -> Path:
    """A tiny model that reads images, of a context for the lengths of the scripts."""
    from vision import chat_folder, model  # transformers, for the tests that read such a line alone

    return chat_folder(folder, "qwen2_5_vl", model("qwen2_5_vl", max_position_embeddings=32768))


def write_places(folder: Path) -> dict[str, Path]:
    """Files of code and configuration for the words of the lines that stand for them."""
    sources = {"GRADER": GRADER, "DATASET": DATASET, "TOOLS": TOOLS}
    made = {name: folder / f"{name.lower()}.py" for name in sources}
    for name, path in made.items():
        path.write_text(sources[name])
    made |= {"LOOPS": folder / "loops.yaml", "CONFIGS": folder}
    made["LOOPS"].write_text(LOOPS)
    for name in ("gsm8k_multiturn_grpo", "search_multiturn_grpo"):
        (folder / f"{name}.yaml").write_text(MULTITURN)
    (folder / "grpo_baseline.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    return made
