"""The cost of an update with a teacher, compared with GRPO's on the same rows: time in turn, memory by process.

python bench/distill.py [--rounds 5]
python bench/distill.py --vocab 2000 --rounds 1    a try of seconds: printed, not written
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.report import write_section
from bench.results import Spread, Table
from verl.algorithms.resolve import resolve
from verl.batch import Batch, pack
from verl.model_engine.lm_head import Teacher
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.linear_teacher import HeadWeights
from verl.types import Sample, Segment

HIDDEN, LAYERS, GROUPS, ANSWERS, PROMPT, TOKENS, TOP_K = 512, 8, 4, 4, 32, 48, 64
SIZES = {"151,936 tokens": 151_936, "32,000 tokens": 32_000}
ARMS = ("grpo", "gkd_topk", "gkd")
LIMITS = {("gkd_topk", "time"): 1.2, ("gkd_topk", "memory"): 1.15, ("gkd", "time"): 2.2}


def model(vocab: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 3 * HIDDEN, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config.from_dict({"vocab_size": vocab, **sizes, **heads}))


def rows(vocab: int) -> list[Sample]:
    rng, out = np.random.default_rng(0), []
    for g in range(GROUPS):
        prompt = Segment(ids=rng.integers(0, vocab, PROMPT), source="prompt")
        for i in range(ANSWERS):
            logprobs = np.full(TOKENS, -np.log(vocab), np.float32)
            drawn = Segment(ids=rng.integers(0, vocab, TOKENS), source="sampled", logprobs=logprobs, version=0)
            name = f"{g}/{i}"
            out.append(
                Sample(sample_id=name, trajectory_id=name, group_id=str(g), purpose="train", segments=(prompt, drawn))
            )
    return out


def arm_of(name: str, vocab: int) -> Callable[[], None]:
    """Return an update (passes and optimizer step) of a fresh student, with the teacher's outputs for its rows."""
    student = model(vocab)
    weight = student.lm_head.weight.detach().flip(0).clone()
    teacher = Teacher(HeadWeights(weight), 0.5, None) if name == "gkd" else None
    engine = TorchEngine(
        student,
        EngineSettings(optim=OptimSpec(lr=1e-5), dtype="float32", max_tokens_per_microbatch=4096, teacher=teacher),
    )
    batch, terms = pack(rows(vocab)), resolve(name, {"kl_loss_coef": 0.0} if name == "grpo" else {}).terms
    batch = said(batch, name, vocab)
    weights = {f"w/{t.name}": torch.full((batch.num_loss_tokens,), 1 / batch.num_loss_tokens) for t in terms}
    batch = batch.with_columns(weights)

    def update() -> None:
        engine.forward_backward(batch, terms, 0, ("logprobs", "entropy"))
        engine.optim_step()

    return update


def said(batch: Batch, name: str, vocab: int) -> Batch:
    """The columns that the loss reads."""
    n, rng = batch.num_loss_tokens, torch.Generator().manual_seed(1)
    if name == "grpo":
        return batch.with_columns({"advantages": torch.randn(n, generator=rng)})
    if name == "gkd":
        return batch.with_columns({"teacher_hidden": torch.randn(n, HIDDEN, generator=rng)})
    ids = torch.stack([torch.randperm(vocab, generator=rng)[:TOP_K] for _ in range(n)])
    logs = torch.randn(n, TOP_K + 1, generator=rng).log_softmax(-1)
    return batch.with_columns({"teacher_ids": ids, "teacher_topk": logs})


def peak_gb() -> float:
    """Return the peak memory of this program; `ru_maxrss` begins with the memory of the process that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def memory_gb(name: str, vocab: int) -> float:
    """The most that a process held in which this arm alone ran."""
    command = [sys.executable, __file__, "--arm", name, "--vocab", str(vocab)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_gb"])


def table(label: str, vocab: int, rounds: int) -> Table:
    arms, spent = {name: arm_of(name, vocab) for name in ARMS}, {name: list[float]() for name in ARMS}
    for number in range(rounds + 1):  # the first is dropped
        for name, update in arms.items():
            start = time.process_time()
            update()
            if number:
                spent[name].append(time.process_time() - start)
    arms.clear()
    peaks = {name: memory_gb(name, vocab) for name in ARMS}
    out = []
    for name in ARMS:
        ratio = sorted(own / grpo for own, grpo in zip(spent[name], spent["grpo"], strict=True))
        times, least, most = ratio[len(ratio) // 2], ratio[0], ratio[-1]
        asked = [f"{LIMITS[name, what]:g}" if (name, what) in LIMITS else "-" for what in ("time", "memory")]
        more = peaks[name] / peaks["grpo"]
        cpu = Spread.of(spent[name]).text(2)
        out.append(
            (
                name,
                cpu,
                f"{times:.2f} [{least:.2f}–{most:.2f}]",
                asked[0],
                f"{peaks[name]:.2f}",
                f"{more:.2f}",
                asked[1],
            )
        )
    head = ("", "core-s, median [quartiles]", "× GRPO [by round]", "at most", "peak GB", "× GRPO", "at most")
    return Table(f"vocabulary of {label}", head, tuple(out))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--vocab", type=int)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    if given.arm:
        update = arm_of(given.arm, given.vocab)
        update()
        update()
        print(json.dumps({"peak_gb": peak_gb()}))
        return 0
    sizes = SIZES if given.vocab is None else {f"{given.vocab:,} tokens": given.vocab}
    tables = [table(label, vocab, given.rounds) for label, vocab in sizes.items()]
    about = (
        f"Command: `python bench/distill.py`. A Qwen3 of {LAYERS} layers of {HIDDEN}, tied, float32, one thread; "
        f"{GROUPS} x {ANSWERS} answers of {TOKENS} tokens, one update (passes and optimizer step). CPU time, the arms "
        f"by turns, {given.rounds} rounds after one that is dropped; 1-minute load {os.getloadavg()[0]:.1f}. Memory: "
        f"the peak of a process with this arm alone, weights and libraries counted. gkd_topk: {TOP_K} tokens; gkd: a "
        "teacher of the student's width, whose head the student holds. The teacher's own forward pass is not in it."
    )
    texts = [made.markdown() for made in tables]
    print(*texts, sep="\n\n")
    if given.vocab is not None:
        return 0
    write_section("distill", "## Distillation", about, *texts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
