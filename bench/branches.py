"""The update of trajectories that branched: what it costs beside linear rows of as many tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from bench.breakdown import NLL
from bench.results import Spread, Table
from verl.batch import Batch, pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.types import Sample, Segment

TRAJECTORIES, TURNS, VOCAB = 8, 8, 128
PROMPT, SAID, RESULT, SUMMARY = 64, 32, 64, 48  # tokens
AT_MOST = 1.1
Rows = Sequence[Sequence[Segment]]


def drawn(rng: np.random.Generator, tokens: int) -> Segment:
    logprobs = np.zeros(tokens, np.float32)
    return Segment(ids=rng.integers(1, VOCAB, tokens), source="sampled", logprobs=logprobs, version=0)


def shown(rng: np.random.Generator, tokens: int) -> Segment:
    return Segment(ids=rng.integers(1, VOCAB, tokens), source="env")


def context(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segment without its trained tokens, as context."""
    return [replace(s, source="env", logprobs=None) if s.source == "sampled" else s for s in segments]


def parts(seed: int) -> tuple[Segment, list[list[Segment]], list[Segment]]:
    """Return prompt, turns with the answers of their tools, and a summary: as it was sampled, and as it is shown."""
    rng = np.random.default_rng(seed)
    turns = [[drawn(rng, SAID), shown(rng, RESULT)] for _ in range(TURNS)]
    return (
        Segment(ids=rng.integers(1, VOCAB, PROMPT), source="prompt"),
        turns,
        [drawn(rng, SUMMARY), shown(rng, SUMMARY)],
    )


def flat(turns: Sequence[Sequence[Segment]]) -> list[Segment]:
    return [segment for turn in turns for segment in turn]


def linear(seed: int) -> Rows:
    prompt, turns, summary = parts(seed)
    return [[prompt, *flat(turns[: TURNS // 2]), *summary, *flat(turns[TURNS // 2 :])]]


def compacted(seed: int) -> Rows:
    """In the middle the model sums up; from there it sees the prompt and its summary."""
    prompt, turns, (written, read) = parts(seed)
    return [[prompt, *flat(turns[: TURNS // 2]), written], [prompt, read, *flat(turns[TURNS // 2 :])]]


def every_turn(seed: int) -> Rows:
    """A row a turn, of which it trains what no row before it trains."""
    (whole,) = linear(seed)
    ends = [k for k, segment in enumerate(whole) if segment.source == "sampled"]
    return [[*context(whole[:k]), whole[k]] for k in ends[:-1]] + [[*context(whole[: ends[-1]]), *whole[ends[-1] :]]]


def batch_of(made: Sequence[Rows], *, share_prefix: bool) -> Batch:
    samples = [
        Sample(sample_id=f"{t}#{k}", trajectory_id=str(t), group_id=str(t // 8), purpose="train", segments=tuple(row))
        for t, rows in enumerate(made)
        for k, row in enumerate(rows)
    ]
    batch = pack(samples, share_prefix=share_prefix)
    return batch.with_columns({"w/loss": torch.full((batch.num_loss_tokens,), 1e-4)})


def batches() -> Iterator[tuple[str, Batch]]:
    """The first is what the others are measured by."""
    kinds = {"linear": linear, "one compaction": compacted, "a branch every turn": every_turn}
    for name, rows_of in kinds.items():
        yield name, batch_of([rows_of(t) for t in range(TRAJECTORIES)], share_prefix=True)
    apart = [every_turn(t) for t in range(TRAJECTORIES)]
    yield "a branch every turn, prefixes not shared", batch_of(apart, share_prefix=False)


def table(runs: int) -> Table:
    from verl.models import tiny
    from verl.recipes.tool_arithmetic import CHARACTERS

    model = tiny.qwen3(tiny.character_tokenizer(CHARACTERS))
    engine = TorchEngine(
        model, EngineSettings(optim=OptimSpec(lr=1e-6), dtype="float32", max_tokens_per_microbatch=16384)
    )
    found = dict(batches())
    took: dict[str, list[float]] = {name: [] for name in found}
    for number in range(runs + 1):  # the first is not counted
        for name, batch in found.items():
            began = time.process_time()
            engine.forward_backward(batch, (NLL,))
            engine.optim_step()
            if number:
                took[name].append(time.process_time() - began)
    base = next(iter(took))
    rows = []
    for name, batch in found.items():
        ratio = Spread.of([a / b for a, b in zip(took[name], took[base])])
        rows.append((name, f"{batch.num_tokens:,}", Spread.of(took[name]).text(2), ratio.text(2)))
    note = (
        f"The quickstart's model, float32; {TRAJECTORIES} trajectories of {TURNS} turns ({SAID} tokens, then {RESULT} "
        f"of a tool) after {PROMPT} of a prompt, and {SUMMARY} of a summary, sampled and shown; {runs} updates each, "
        f"in turn. Wanted of one compaction: at most {AT_MOST:g} times a linear row of as many tokens."
    )
    head = ("", "tokens computed", "CPU time of an update, s", "× linear, by round")
    return Table("the update of a trajectory that branched", head, tuple(rows), (note,))
