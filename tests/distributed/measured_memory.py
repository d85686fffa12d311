"""The training of small and large models on a few ranks, with the most bytes that a rank holds in a phase of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from forked import run, tensor_bytes
from test_loading import peak_bytes
from test_split import prepared
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.batch import Batch, select_rows, unshare
from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.dispatch import shares
from verl.model_engine import rank_engine, torch_engine
from verl.model_engine.base import EngineContext
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import trained_by
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.nn.quant import Kind
from verl.planner.memory import fullest_moment, role_items
from verl.types import Refs, Sample, Segment, ref_of

SIZES: Mapping[str, Mapping[str, int]] = {
    "10M": dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=8, vocab_size=8000),
    "100M": dict(hidden_size=640, intermediate_size=2560, num_hidden_layers=14, vocab_size=16000),
    "deep": dict(hidden_size=192, intermediate_size=768, num_hidden_layers=20, vocab_size=5000),
    "wide": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=3, vocab_size=24000),
    "many words": dict(hidden_size=320, intermediate_size=640, num_hidden_layers=4, vocab_size=60000),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, vocab_size=151936),
}
"""Qwen3 with 8 heads and 4 key heads; 1.5B is the shape of Qwen2.5-1.5B."""
LAYOUTS = {
    "one": Layout(),
    "FSDP": Layout(world_size=2),
    "TP": Layout(world_size=2, tensor=2),
    "FSDP, four": Layout(world_size=4),
    "HSDP": Layout(world_size=4, replicate=2),
    "FSDP x TP": Layout(world_size=4, tensor=2),
    "FSDP x PP": Layout(world_size=4, pipeline=2),
}
HELD = ("weights", "gradient buffer", "optimizer states")
PHASES = ("update", "infer", "publish")
LORA_ALPHA = 16.0
GROUPS, ANSWERS = 4, 4


@dataclass(frozen=True, slots=True)
class Measured:
    """A step of a model on ranks."""

    model: str
    trains: str
    """full, LoRA, or LoRA on a base in nf4 or int8."""
    layout: str
    how: str
    """packed: rows behind each other · shared prefix: a prompt once for its answers · checkpointing: packed, and layers
    are computed again in the backward pass."""
    prompt: int = 8
    answer: int = 56
    rank: int = 8
    """Of LoRA."""

    @property
    def budget(self) -> int:
        """The tokens of a pass: those of one group."""
        shared = self.how == "shared prefix"
        return self.prompt * (1 if shared else ANSWERS) + self.answer * ANSWERS


def write_model(folder: Path, name: str) -> Path:
    """Write a model of this size with random weights in bfloat16. Return its folder, which is written once."""
    if (folder / "config.json").is_file():
        return folder
    kinds: tuple[Any, Any] = (Qwen2Config, Qwen2ForCausalLM) if name == "1.5B" else (Qwen3Config, Qwen3ForCausalLM)
    of: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    if name == "1.5B":
        of = {"num_attention_heads": 12, "num_key_value_heads": 2}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = kinds[0](**SIZES[name], **of, max_position_embeddings=1024, tie_word_embeddings=True)
        kinds[1](config).save_pretrained(folder, max_shard_size="500MB")
    finally:
        torch.set_default_dtype(before)
    return folder


def rows_of(case: Measured) -> list[Sample]:
    """Return groups of answers of equal lengths."""
    random, out = np.random.default_rng(0), list[Sample]()
    for group in range(GROUPS):
        prompt = Segment(ids=random.integers(1, 500, case.prompt), source="prompt", logprobs=None, version=0)
        for i in range(ANSWERS):
            logprobs = random.normal(-2, 0.6, case.answer).astype(np.float32)
            ids = random.integers(1, 500, case.answer)
            answer = Segment(ids=ids, source="sampled", logprobs=logprobs, version=0)
            out.append(
                Sample(
                    sample_id=f"{group}/{i}#0",
                    trajectory_id=f"{group}/{i}",
                    group_id=str(group),
                    purpose="train",
                    segments=(prompt, answer),
                    temperature=1.0,
                    reward=float(random.normal()),
                    components={"a": 0.5, "b": 0.1},
                    outcome="ok",
                )
            )
    return out


def config_of(case: Measured, folder: Path) -> Config:
    """Return the configuration that the plan reads."""
    values: dict[str, Any] = {
        "model.path": str(folder),
        "model.dtype": "float32",
        "model.device": "cpu",
        "model.gradient_checkpointing": "full" if case.how == "checkpointing" else "none",
        "step.max_tokens_per_microbatch": case.budget,
    }
    if case.trains != "full":
        values["model.lora"] = {"rank": case.rank, "alpha": LORA_ALPHA}
        values["model.quantization"] = case.trains if case.trains in ("nf4", "int8") else "none"
    return changed(Config(), values)


def measured_bytes(case: Measured, folder: Path) -> tuple[int, list[dict[str, int]]]:
    """Return the passes of a rank in a step, and for each stage the most bytes of a rank by phase."""
    config, layout, rows = config_of(case, folder), LAYOUTS[case.layout], rows_of(case)
    shared = case.how == "shared prefix"
    batch, terms = prepared(rows, "grpo")
    batch = batch if shared else unshare(batch)
    parts = shares(Refs(map(ref_of, rows)), layout.data, max_tokens=case.budget, shares_prefix=shared)

    def held(rank: int) -> tuple[int, dict[str, int]]:
        mine = parts[layout.place(rank).data]
        own_rows, count = select_rows(batch, np.array(mine.rows, np.int64)), mine.num_microbatches
        own = tensor_bytes()
        e = _engine(case, config, folder, layout)
        phases = _phases(e, own_rows, terms, count)
        phases["update"]()  # which makes the optimizer's states
        found = {}
        for phase, fn in phases.items():
            before = tensor_bytes() - own
            found[phase] = before + peak_bytes(fn, folder)[0]
        return len(e.passes.cuts(own_rows, count)) if layout.pipeline > 1 else GROUPS // layout.data, found

    ranks = run(layout.world_size, held, timeout_s=1200)
    every = [
        [found for rank, (_, found) in enumerate(ranks) if layout.place(rank).pipeline == s]
        for s in range(layout.pipeline)
    ]
    return ranks[0][0], [{phase: max(found[phase] for found in stage) for phase in PHASES} for stage in every]


def planned_bytes(case: Measured, folder: Path, passes: int) -> list[dict[str, int]]:
    """Return the planned bytes of a rank by phase, for each stage. passes: those of a step."""
    config, layout, out = config_of(case, folder), LAYOUTS[case.layout], list[dict[str, int]]()
    for stage in range(layout.pipeline):
        sizes = role_items(config, "actor", layout, tokens=case.budget, stage=stage, passes=passes)
        items = {f"actor {name}": size for name, size in sizes.items()}
        # the proof of a version is a pass, as `infer` is
        moments = {phase: fullest_moment(items, "actor", phase) for phase in PHASES}
        moments["publish"] = ["actor largest whole weight"]
        held = [f"actor {part}" for part in HELD]
        out.append({p: sum(items.get(name, 0) for name in (*held, *names)) for p, names in moments.items()})
    return out


def _engine(case: Measured, config: Config, folder: Path, layout: Layout) -> Any:
    context = EngineContext(
        folder=folder,
        optim=OptimSpec(lr=1e-4),
        dtype="float32",
        max_tokens_per_microbatch=case.budget,
        gradient_checkpointing=config.model.gradient_checkpointing,
        layout=layout,
        lora=trained_by(config.model.lora),
        quantisation=cast(Kind, case.trains) if case.trains in ("nf4", "int8") else None,
    )
    builder = torch_engine.build if layout.world_size == 1 else rank_engine.build
    return builder(Options(), context)


def _phases(e: Any, batch: Batch, terms: Any, count: int) -> dict[str, Callable[[], object]]:
    """Return the work of a rank in each phase."""

    def update() -> None:
        e.forward_backward(batch, terms, count)
        e.optim_step()

    return {
        "update": update,
        "infer": lambda: e.infer(batch, ("logprobs",)),
        "publish": lambda: [name for name, _ in e.weights()],
    }


def most_bytes(stages: Sequence[Mapping[str, int]]) -> int:
    """Return the largest bytes over stages and phases."""
    return max(size for stage in stages for size in stage.values())
