"""verl on one accelerator against what the device can do, and a whole GRPO step beside TRL's.

    python bench/gpu.py [--shapes 0.6B,4B] [--only limits,decode,prefill,update,step] [--device cuda]

Random weights of Qwen3's shapes, bf16. Writes its part of bench/RESULTS.md (bench/sections/gpu.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.breakdown import NLL, sample_of
from bench.environments import Unavailable, ensure, run_logged
from bench.laptop import TRL, arm_env
from bench.report import assemble
from bench.results import NOT_RUN, Table
from bench.workloads import WORKLOADS, make_inputs
from verl.batch import pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.rollout.base import GenerateRequest, RolloutContext
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.serve import FolderWeights
from verl.types import Sample, Sampling

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("decode", "prefill", "update", "step")
ROWS = (1, 16, 64, 256)
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    vocab: int = 151_936


SHAPES = {
    "0.6B": Shape(1024, 28, 16, 8, 3072),
    "4B": Shape(2560, 36, 32, 8, 9728),
    "tiny": Shape(64, 2, 4, 2, 96, head_dim=16, vocab=512),  # for the test of this file
}


def config_of(shape: Shape) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )


class Bench:
    """One shape on one device. `scale` divides every size: the test's way through the same code."""

    def __init__(self, name: str, device: str, scale: int = 1) -> None:
        from transformers import AutoModelForCausalLM

        self.shape, self.device, self.scale = SHAPES[name], torch.device(device), scale
        self.config = config_of(self.shape)
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        self.params = sum(p.numel() for p in self.model.parameters())
        self.gflops, self.gb_per_s = self._matmul_rate(), self._bandwidth()

    def decode(self) -> list[tuple[str, ...]]:
        """Tokens per second between the 32nd and the 288th token, against reading weights and KV once per step."""
        out: list[tuple[str, ...]] = []
        prompt, few, many = 128 // self.scale, 32 // self.scale, 288 // self.scale
        for rows in (max(1, r // self.scale) for r in ROWS):
            took = {n: self._generate(rows, prompt, n) for n in (few, many)}
            rate = rows * (many - few) / (took[many] - took[few])
            kv = 2 * 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * (prompt + (few + many) / 2)
            limit = rows * self.gb_per_s * 1e9 / (2 * self.params + rows * kv)
            out.append((f"decode, {rows} sequences, tokens/s", f"{rate:,.0f}", f"{limit:,.0f}", f"{rate / limit:.0%}"))
        return out

    def prefill(self) -> list[tuple[str, ...]]:
        tokens = 16 * 1024 // self.scale
        rate = tokens / self._generate(16, tokens // 16, 1)
        limit = self.gflops * 1e9 / (2 * self.params)
        return [("prefill of 16 prompts of 1,024, tokens/s", f"{rate:,.0f}", f"{limit:,.0f}", f"{rate / limit:.0%}")]

    def update(self) -> list[tuple[str, ...]]:
        """Forward, backward and optimizer over 32 sequences of 1,024 tokens, checkpointing off."""
        length = 1024 // self.scale
        engine = TorchEngine(
            self.model,
            EngineSettings(optim=OptimSpec(lr=1e-6), dtype="bfloat16", device=str(self.device), emulate_bf16=False),
        )
        rng = np.random.default_rng(0)

        def sample(i: int) -> Sample:
            ids = rng.integers(0, self.shape.vocab, length)
            return sample_of(i, i, ids[: length // 4], ids[length // 4 :])

        batch = pack([sample(i) for i in range(32 // min(self.scale, 8))], share_prefix=True)
        batch = batch.with_columns({"w/loss": torch.ones(batch.num_loss_tokens)})

        def step() -> None:
            engine.forward_backward(batch, (NLL,))
            engine.optim_step()

        took = self._timed(step)
        rate = batch.num_tokens / took
        flops = 6 * self.params + 6 * self.shape.layers * self.shape.heads * self.shape.head_dim * length
        limit = self.gflops * 1e9 / flops
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else float("nan")
        return [
            ("update, tokens/s", f"{rate:,.0f}", f"{limit:,.0f}", f"{rate / limit:.0%}"),
            ("update, peak GB", f"{peak:.1f}", "", ""),
        ]

    def _generate(self, rows: int, prompt_tokens: int, tokens: int) -> float:
        """Median seconds from the first call to the last completion; the prompts differ each time."""

        async def run() -> float:
            context = RolloutContext(
                hf_config=self.config,
                max_context_tokens=prompt_tokens + tokens,
                dtype=torch.bfloat16,
                device=self.device,
                max_concurrent_sequences=rows,
            )
            engine = build(Options(prefix_cache_tokens=0), context)
            await engine.load_weights(FolderWeights(self.model))
            rng, walls = np.random.default_rng(0), []
            for repeat in range(REPEATS + 1):
                prompts = [rng.integers(0, self.shape.vocab, prompt_tokens) for _ in range(rows)]
                began = time.perf_counter()
                await asyncio.gather(
                    *(
                        engine.generate(
                            GenerateRequest(f"{repeat}/{i}", p, Sampling(max_tokens=tokens, seed=i, ignore_eos=True))
                        )
                        for i, p in enumerate(prompts)
                    )
                )
                walls.append(time.perf_counter() - began)
            await engine.close()
            return statistics.median(walls[1:])

        return asyncio.run(run())

    def _timed(self, work: Callable[[], object]) -> float:
        walls = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            walls.append(time.perf_counter() - began)
        return statistics.median(walls[1:])

    def _matmul_rate(self) -> float:
        """GFLOP/s of a large bf16 product."""
        n = 8192 // self.scale
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return 2 * n**3 / self._timed(lambda: a @ b) / 1e9

    def _bandwidth(self) -> float:
        """GB/s of a copy, read and write counted."""
        source = torch.empty((4 << 30) // self.scale // 64, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._timed(lambda: target.copy_(source)) / 1e9


def step(device: str) -> list[tuple[str, ...]]:
    """A whole GRPO step of verl and of TRL: 8 x 8 answers of forced lengths, 100M parameters."""
    folder, steps = ROOT / "runs" / "bench", 4
    inputs, work = make_inputs(folder, "ragged-100M", steps + 1), WORKLOADS["ragged-100M"]
    programs = {
        "verl": [sys.executable, str(ROOT / "bench" / "verl_arm.py")],
        "TRL": [str(ensure(TRL, folder / "logs" / "install_trl.log")), str(ROOT / "bench" / "peers" / "trl_grpo.py")],
    }
    walls = {}
    for name, program in programs.items():
        arm = folder / "arms" / f"gpu-{name}"
        arm.mkdir(parents=True, exist_ok=True)
        spec = {
            "model": str(inputs.model),
            "rows": str(inputs.rows),
            "lengths": str(inputs.lengths),
            "threads": 8,
            "lr": 1e-6,
            "dtype": "bfloat16",
            "prompts_per_step": work.prompts_per_step,
            "samples_per_prompt": work.samples_per_prompt,
            "device": device,
            "max_response_tokens": work.response_tokens[2],
            "steps": steps,
            "folder": str(arm),
            "micro_batches": 1,
            "reward": str(ROOT / "bench" / "peers" / "checksum.py"),
            "overrides": [f"data.max_prompt_tokens={work.prompt_tokens[1]}"],
        }
        (arm / "spec.json").write_text(json.dumps(spec))
        run_logged(
            [*program, str(arm / "spec.json"), str(arm / "result.json")],
            folder / "logs" / "gpu.log",
            timeout_s=600.0,
            env=arm_env(8),
        )
        found = json.loads((arm / "result.json").read_text())["steps"]
        walls[name] = statistics.median(s["wall_s"] for s in found[1:])
    return [
        (
            "GRPO step of 100M parameters, s (beside TRL's)",
            f"{walls['verl']:.2f}",
            f"{walls['TRL']:.2f}",
            f"{walls['TRL'] / walls['verl']:.1f}×",
        )
    ]


def table(title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(title, ("", "verl", "limit", "of the limit"), tuple(rows))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="0.6B,4B")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args(argv)
    section = ROOT / "bench" / "sections" / "gpu.md"
    head = ["## One GPU", "Command: `python bench/gpu.py`. bf16, random weights of Qwen3's shapes, medians of 5."]
    if asked.device == "cuda" and not torch.cuda.is_available():
        rows = [
            (f"Qwen3-{name}: {part}", NOT_RUN, "", "")
            for name in asked.shapes.split(",")
            for part in asked.only.split(",")
        ]
        section.write_text(
            "\n\n".join(
                [
                    *head,
                    "This machine has no GPU: the CUDA path was tested on a CPU with plain operations in place "
                    "of its attention kernels, and never ran.",
                    table("CUDA", rows).markdown(),
                ]
            )
            + "\n"
        )
        assemble(ROOT / "bench")
        print("no CUDA device: nothing was run, and the section says so")
        return 0
    tables = []
    for name in asked.shapes.split(","):
        bench = Bench(name, asked.device)
        rows = [("matmul, GFLOP/s", "", f"{bench.gflops:,.0f}", ""), ("memory, GB/s", "", f"{bench.gb_per_s:,.0f}", "")]
        for part in (p for p in asked.only.split(",") if p != "step"):
            rows += getattr(bench, part)()
        tables.append(table(f"Qwen3-{name}", rows))
    if "step" in asked.only.split(","):
        try:
            tables.append(table("A step", step(asked.device)))
        except Unavailable as e:
            head.append(f"The step beside TRL's: {NOT_RUN}: {e}")
    section.write_text("\n\n".join([*head, *(t.markdown() for t in tables)]) + "\n")
    assemble(ROOT / "bench")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
