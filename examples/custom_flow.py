"""A dataflow of your own from Roles and Refs: best-of-n distillation (rejection sampling) in 40 lines.

Sample n answers per problem, keep the right ones, train on them by maximum likelihood. No loop of the framework is
used: only a rollout engine, a queue, a role and a term. Run: python examples/custom_flow.py MODEL_FOLDER [rounds]
"""

import asyncio
import itertools
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from verl.algorithms.losses import nll
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.objective import Term
from verl.recipes import arithmetic as task
from verl.rollout.base import GenerateRequest, RolloutContext
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Sample, Sampling, Segment, as_ids, derive_seed
from verl.weight_sync.local import LocalCheckpointEngine, LocalOutlet
from verl.weight_sync.sender import WeightSender
from verl.workers.compute import Compute
from verl.workers.inproc import InprocGroup
from verl.workers.model_workers import ComputeWorker, ModelWorkers, OptimizerStep
from verl.workers.role import Role


async def main(model_path: str, rounds: int = 4, problems_per_round: int = 64, n: int = 8) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    policy = TorchEngine(load_causal_lm(Path(model_path)), EngineSettings(optim=OptimSpec(lr=1e-4), dtype="float32"))
    context = RolloutContext(
        hf_config=policy.model.config,
        max_context_tokens=64,
        dtype=torch.float32,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    rollout = build(Options(), context)
    queue, sync = MemoryQueue(), LocalCheckpointEngine(probes=(), tolerance=1e-3)
    role = Role("actor", queue, policy, sender=WeightSender(LocalOutlet()))
    actor = ModelWorkers(InprocGroup("actor", [role]), policy.capabilities)
    compute = ComputeWorker(InprocGroup("compute", [Compute(queue)]))
    terms = (Term(name="nll", fn=nll, aggregate="token-mean"),)
    problems, shares = task.problems(0, held=False), []
    for version in range(rounds):
        await sync.publish(actor, [rollout], version=version, exclusive=True, on_inflight=["wait"], timeout_s=60)
        drawn = list(itertools.islice(problems, problems_per_round))
        prompts = [as_ids(tokenizer(f"<|user|>{task.prompt(p)}<|end|><|assistant|>")["input_ids"]) for p in drawn]
        seats = [(g, i) for g in range(len(drawn)) for i in range(n)]
        found = await asyncio.gather(
            *(
                rollout.generate(
                    GenerateRequest(
                        f"{g}/{i}",
                        prompts[g],
                        Sampling(max_tokens=48, seed=derive_seed(version, g, i)),
                        prefix_key=str(g),
                    )
                )
                for g, i in seats
            )
        )
        right = [
            task.compute_score("", tokenizer.decode(c.ids, skip_special_tokens=True), str(task.answer(drawn[g])))
            for (g, _), c in zip(seats, found)
        ]
        samples = [
            Sample(
                sample_id=f"{version}/{g}/{i}",
                trajectory_id=f"{version}/{g}/{i}",
                group_id=f"{version}/{g}",
                purpose="train",
                reward=1.0,
                segments=(
                    Segment(ids=prompts[g], source="prompt"),
                    Segment(ids=c.ids, source="sampled", logprobs=c.logprobs, version=version),
                ),
            )
            for (g, i), c, ok in zip(seats, found, right)
            if ok
        ]
        shares.append(sum(right) / len(right))
        print(f"round {version}: {shares[-1]:.3f} of {len(right)} answers right", flush=True)
        if samples:
            refs = await queue.put(samples)
            steps = [OptimizerStep(refs)]
            await asyncio.wrap_future(compute.weigh(steps, terms, ()))
            await asyncio.wrap_future(actor.update(steps, terms, ()))
            queue.drop(refs)
    await rollout.close()
    actor.close()
    compute.close()
    return shares


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python examples/custom_flow.py MODEL_FOLDER [rounds]")
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
