"""Training on one machine: light optimizers, measured beside their limits.

    python bench/lora.py [part ...] [--size 100M] [--threads 1] [--record]

Each part is a function that returns its rows; each number is printed beside its limit. optimizers: bytes of states per
value of the matrices of layers, read from real states after a step; and an update of 8 x 8 x 128 tokens (forward,
backward, optimizer) against the same update with AdamW, in CPU time, which depends little on other processes. nf4:
products of decode steps with weights in NF4 against the float32 panels of the native engine. sets: rollouts with
LoRA sets by the native engine. publish: until the factors of a new version are live. update: an update of 8 x 2 x 128
tokens with LoRA against one of all weights, in CPU time. step: GRPO steps with LoRA beside TRL with PEFT, in each
dtype of this machine, of the quickstart's workload (with its model, whatever --size is). learn: the quickstart's
steps until LoRA has the accuracy that training of all weights ends with, as a multiple of its steps. memory-grpo,
memory-ppo: the peak of a process that trains on a base in NF4 of 1.5B parameters (half an hour or more each;
lora_memory.py).
--record writes bench/records/lora/ and this bench's part of bench/RESULTS.md from all records.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench import lora_memory
from bench.lora_beside_trl import RANKS, equal_rewards, measured_steps, ratio, seconds
from bench.lora_learn import learned, noise_of, steps_to
from bench.parts import PartsBench, Row
from verl.accel.operations import Use
from verl.accel.table import choose
from verl.algorithms.losses import nll
from verl.batch import pack
from verl.model_engine.base import OneRank
from verl.model_engine.lora import is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.model_engine.optimizers import make_optimizer, role_of
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.quant import quantise_weight
from verl.objective import Term
from verl.parameter_set import POLICY_SET, Delivery, ParameterSet
from verl.rollout.base import GenerateRequest, RolloutContext
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import engine as native_engine
from verl.rollout.native.options import Options as RolloutOptions
from verl.rollout.native.runner import NativeRunner
from verl.serve import FolderWeights
from verl.types import Sample, Sampling, Segment
from verl.weight_sync.base import SyncReport
from verl.weight_sync.local import LocalCheckpointEngine
from verl.weight_sync.sender import WeightSender
from verl.wire import AS_HELD
from verl.workers.role_publishing import RolePublishing

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "records" / "lora"
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 512},
    "quickstart": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 32},
    "10M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 32_000},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32_000},
}
STATE_LIMITS = {"adamw": 8.0, "adamw_8bit": 2.3, "adam_mini": 4.2, "muon": 4.2, "apollo_mini": 0.2}
STEP_LIMITS = {"muon": 1.5}
STEP_LIMIT = 1.15
REPEATS = 3
"""Steps of each optimizer, after one that is dropped; the median counts."""


# -- optimizers --------------------------------------------------------------------------------------------------------


def optimizers(size: str) -> Iterator[Row]:
    """Yield the state bytes per value of each optimizer, and its update's CPU time as a multiple of AdamW's."""
    rows, tokens = (8, 128) if size != "tiny" else (1, 16)
    config = _qwen3(size)
    torch.manual_seed(0)
    engine = TorchEngine(
        Qwen3ForCausalLM(config), EngineSettings(optim=OptimSpec(lr=1e-6), max_tokens_per_microbatch=2048)
    )
    batch = _batch(8 * rows, tokens, config.vocab_size)
    passes_s = _cpu_seconds(lambda: engine.forward_backward(batch, [Term(name="nll", fn=nll)]))
    model, seconds = engine.model, dict[str, float]()
    embeddings = [model.get_input_embeddings().weight]
    matrices = [p for name, p in model.named_parameters() if role_of(name, p, embeddings) == "matrix"]
    for name in OPTIMIZERS:
        optimizer = make_optimizer(model, OptimSpec(lr=1e-6, name=name), config)
        optimizer.step()
        seconds[name] = statistics.median(_cpu_seconds(optimizer.step) for _ in range(REPEATS))
        held = sum(t.nbytes for p in matrices for t in optimizer.state[p].values() if t.ndim)
        values = sum(p.numel() for p in matrices)
        yield Row(f"{name}: bytes of states per value of a matrix", held / values, STATE_LIMITS.get(name))
    total = sum(p.numel() for p in model.parameters())
    for name, step_s in seconds.items():
        yield Row(f"{name}: its step alone, CPU ns per parameter", 1e9 * step_s / total)
    for name in [name for name in OPTIMIZERS if name != "adamw"]:
        ratio = (passes_s + seconds[name]) / (passes_s + seconds["adamw"])
        yield Row(f"{name}: an update against AdamW's", ratio, STEP_LIMITS.get(name, STEP_LIMIT))


def _qwen3(size: str) -> Qwen3Config:
    heads = {"num_attention_heads": SIZES[size]["hidden_size"] // 64, "head_dim": 64, "num_key_value_heads": 1}
    return Qwen3Config.from_dict({**SIZES[size], **heads, "tie_word_embeddings": True})


def _batch(rows: int, tokens: int, vocab: int) -> Any:
    """Return random rows of one prompt token and `tokens` sampled ones, with the weights of a mean."""
    drawn, samples = np.random.default_rng(0), []
    for i in range(rows):
        ids = drawn.integers(4, vocab, tokens + 1)
        sampled = Segment(ids=ids[1:], source="sampled", logprobs=np.zeros(tokens, np.float32), version=0)
        segments, name = (Segment(ids=ids[:1], source="prompt"), sampled), str(i)
        samples.append(Sample(sample_id=name, trajectory_id=name, group_id=name, purpose="train", segments=segments))
    weight = torch.full((rows * tokens,), 1.0 / (rows * tokens), dtype=torch.float64)
    return pack(samples, share_prefix=False).with_columns({"w/nll": weight})


def _cpu_seconds(call: Callable[[], Any]) -> float:
    before_s = time.process_time()
    call()
    return time.process_time() - before_s


# -- the quantised base ------------------------------------------------------------------------------------------------


def nf4(size: str) -> Iterator[Row]:
    """Yield how many times faster a product with NF4 is than with float32 panels, for the rows of decode steps. The
    weights are larger than any cache; the least CPU time of several turns counts, the two in turn."""
    depth, wide = (1536, 60) if size != "tiny" else (64, 1)
    use = Use(torch.device("cpu"), torch.float32)
    panels, quantised = choose("linear", use), choose("quantised_linear", use)
    assert panels is not None and quantised is not None
    weight = quantise_weight(torch.randn(wide * depth, depth) * depth**-0.5, "nf4")
    exact = panels.call().make(weight.dequantised(torch.float32), None)
    least = 3.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2.0
    for rows in (1, 2, 4, 16):
        x = torch.randn(rows, depth)
        pairs = [
            (_cpu_seconds(partial(exact, x)), _cpu_seconds(partial(quantised.call, x, weight, None)))
            for _ in range(4 * REPEATS)
        ]
        ratio = min(a for a, _ in pairs) / min(b for _, b in pairs)
        what = f"{quantised.kernel.name} with NF4 against {panels.kernel.name} with float32, {rows} rows: times faster"
        yield Row(what, ratio, least if rows < 16 else 1.0, at_least=True)


# -- training of LoRA --------------------------------------------------------------------------------------------------


def update(size: str) -> Iterator[Row]:
    """Yield the CPU time of an update (forward, backward, AdamW) with LoRA in all linear layers as a multiple of that
    of all weights; the least of several turns counts, all in turn."""
    rows, tokens = (16, 128) if size != "tiny" else (1, 16)
    config = _qwen3(size)
    batch = _batch(rows, tokens, config.vocab_size)
    engines = dict[int, TorchEngine]()
    for rank in (0, *RANKS):
        torch.manual_seed(0)
        lora = LoraSpec(rank=rank) if rank else None
        settings = EngineSettings(optim=OptimSpec(lr=1e-6), max_tokens_per_microbatch=4096, lora=lora)
        engines[rank] = TorchEngine(Qwen3ForCausalLM(config), settings)
    least = dict.fromkeys(engines, math.inf)
    for turn in range(REPEATS + 1):
        for rank, engine in engines.items():
            took_s = _cpu_seconds(partial(_update, engine, batch))
            least[rank] = min(least[rank], took_s if turn else math.inf)  # the first makes the optimizer's states
    for rank in RANKS:
        yield Row(f"an update with LoRA of rank {rank} against all weights", least[rank] / least[0], 0.75)


def _update(engine: TorchEngine, batch: Any) -> None:
    engine.forward_backward(batch, [Term(name="nll", fn=nll)])
    engine.optim_step()


def step(size: str) -> Iterator[Row]:
    """Yield how many times longer a GRPO step with LoRA takes in TRL with PEFT, and the seconds of both. The limit is
    on durations, by which TRL's settings are chosen: one thread alone takes less CPU time than two on one core."""
    for dtype, rank, found in measured_steps():
        of = f"{dtype}, rank {rank}"
        yield Row(f"{of}: duration of TRL's step against verl's", ratio(found, "wall_s"), 3.0, at_least=True)
        yield Row(f"{of}: CPU time of TRL's step against verl's", ratio(found, "cpu_s"))
        yield Row(f"{of}: verl's step, CPU s", seconds(found, "verl", "cpu_s"))
        yield Row(f"{of}: TRL's step, CPU s", seconds(found, "TRL", "cpu_s"))
        yield Row(f"{of}: groups with equal rewards, which have no backward pass in verl", equal_rewards(found))


def learn(size: str) -> Iterator[Row]:
    """Yield how many steps LoRA takes to the accuracy with which the run of all weights ends, as a multiple of that
    run's steps, and that accuracy. Both are measured on 256 problems: what is less than their difference's standard
    error below counts as reached."""
    runs = learned()
    _, whole = next(runs)
    goal = whole[max(whole)]
    yield Row("accuracy before RL", whole[min(whole)])
    yield Row(f"accuracy after {max(whole)} steps of all weights", goal, 0.85, at_least=True)
    for (way, found), most in zip(runs, (1.3, 1.6), strict=True):
        yield Row(
            f"{way}: steps to that accuracy against all weights",
            steps_to(goal - noise_of(goal), found) / max(whole),
            most,
        )
        yield Row(f"{way}: accuracy after {max(found)} steps", found[max(found)])


# -- adapters in the rollout -------------------------------------------------------------------------------------------


def sets(size: str) -> Iterator[Row]:
    """Yield what LoRA sets of rank 32 on all linear layers cost a rollout of the native engine in float32: 8 groups of
    8 answers, all without a set, all with one, and each group with another of 8. The least CPU time of several turns
    counts, the three in turn."""
    names, tokens = [f"set{i}" for i in range(8)], 64 if size != "tiny" else 8
    config = _qwen3(size)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    context = RolloutContext(hf_config=config, max_context_tokens=256, dtype=torch.float32)
    runner = NativeRunner(RolloutOptions(prefix_cache_tokens=0), context, lanes=torch.get_num_threads())
    core = EngineCore(runner, (), None)
    core.load(FolderWeights(model))
    adding = [_add_set(core, model, name, 32) for name in names]
    ways = {"none": [POLICY_SET.id], "one": names[:1], "eight": names}
    least = dict.fromkeys(ways, math.inf)
    for _ in range(REPEATS):
        for way, of in ways.items():
            _ask(core, of, tokens, config.vocab_size)
            least[way] = min(least[way], _cpu_seconds(partial(_finish, core)))
    yield Row("rollout with a LoRA set of rank 32 against without", least["one"] / least["none"], 1.15)
    yield Row("rollout with 8 LoRA sets in a batch against one", least["eight"] / least["one"], 1.3)
    yield Row("CPU ms until the factors of a set are live", 1e3 * min(adding))


def _add_set(core: EngineCore, model: Qwen3ForCausalLM, name: str, rank: int) -> float:
    """Make a set of factors of all linear layers live, and return the CPU seconds of that."""
    every = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    one = ParameterSet(id=name, kind="lora", base="bench", rank=rank, targets=tuple(every))
    shapes = [((rank, layer.in_features), (layer.out_features, rank)) for layer in every.values()]
    of_targets = zip(map(one.factors, every), shapes, strict=True)
    tensors = {n: torch.full(shape, 0.01) for both in of_targets for n, shape in zip(*both, strict=True)}
    assert isinstance(core.runner, NativeRunner)
    core.sets[name] = 0
    return _cpu_seconds(partial(core.runner.add_set, one, tensors))


def _ask(core: EngineCore, sets: Sequence[str], tokens: int, vocab: int) -> None:
    """Add 8 groups of 8 requests with prompts of 48 tokens; the groups have these sets in turn."""
    drawn = np.random.default_rng(0)
    for group in range(8):
        prompt, of = drawn.integers(4, vocab, 48), sets[group % len(sets)]
        for i in range(8):
            sampling = Sampling(max_tokens=tokens, seed=8 * group + i, ignore_eos=True)
            core.add(ActiveRequest(GenerateRequest(f"{group}.{i}", prompt, sampling, parameters=of)))


def _finish(core: EngineCore) -> None:
    while core.busy:
        core.step()


# -- a publish of factors ----------------------------------------------------------------------------------------------


def publish(size: str) -> Iterator[Row]:
    """Yield what a publish of the policy's factors of rank 32 on all linear layers costs, inside one process, from the
    trainer's call until the native engine samples with them: checksums of all tensors on both sides, as in the first
    versions, or of every 16th, as later. The canary, two forward passes of a probe of 128 tokens, is measured apart.
    The least CPU time of several versions counts."""
    torch.manual_seed(0)
    settings = EngineSettings(optim=OptimSpec(lr=1e-6), dtype="float32", lora=LoraSpec(rank=32))
    engine, tokens = TorchEngine(Qwen3ForCausalLM(_qwen3(size)), settings), 128 if size != "tiny" else 16
    factors = [p for name, p in engine.model.named_parameters() if is_factor(name)]
    probe = np.random.default_rng(0).integers(4, engine.model.config.vocab_size, tokens)
    with torch.no_grad():
        for p in factors:
            p.normal_(std=0.01)
    live_ms = dict[str, float]()
    for checks, verify_first in (("every 16th tensor", 1), ("all tensors", 99)):
        live_s, _, sent_bytes = asyncio.run(_publishes(engine, (), verify_first))
        live_ms[checks] = 1e3 * live_s
        yield Row(f"CPU ms of a publish, {checks} with checksums", live_ms[checks], 10.0)
    whole_s, difference, _ = asyncio.run(_publishes(engine, (probe,), 99))
    yield Row("CPU ms of its canary, on both sides", 1e3 * whole_s - live_ms["all tensors"])
    yield Row("log-probs of the canary, trainer against rollout, nats", difference, 1e-5)
    yield Row("bytes of a publish against those of the factors", sent_bytes / sum(p.nbytes for p in factors), 1.01)


async def _publishes(engine: TorchEngine, probes: Sequence[np.ndarray], verify_first: int) -> tuple[float, float, int]:
    """Publish several versions to a native engine after its base. Return the least CPU seconds of one, the largest
    mean |dlogp| of the canary, and the bytes of one."""
    context = RolloutContext(hf_config=engine.model.config, max_context_tokens=256, dtype=torch.float32)
    rollout = native_engine.build(RolloutOptions(), context, lanes=torch.get_num_threads())
    sync = LocalCheckpointEngine(probes=probes)
    role = RolePublishing("actor", engine, WeightSender(sync.outlet(), verify_first=verify_first), OneRank())
    delivery: Delivery = "base and factors"

    def done(call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call())
        return future

    def send(version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Future[Any]:
        return done(lambda: role.send(version, probes, copy, AS_HELD, POLICY_SET.id, delivery))

    trainer: Any = SimpleNamespace(
        send_weights=send, release_weights=lambda version: done(lambda: role.release(version, POLICY_SET.id))
    )
    reports, spent_s = list[SyncReport](), list[float]()
    factors = [p for name, p in engine.model.named_parameters() if is_factor(name)]
    for version in range(3 + 20 * REPEATS):
        with torch.no_grad():
            for p in factors:
                p.mul_(1.0 + 1e-6 * version)
        before_s = time.process_time()
        pending = sync.publish(
            trainer, [rollout], version=version, exclusive=True, on_inflight=["wait"], timeout_s=600.0
        )
        reports.append(await pending)
        spent_s.append(time.process_time() - before_s)
        delivery = "factors"
    await rollout.close()
    largest = max(report.canary_mean_abs for report in reports)
    return min(spent_s[3:]), largest, reports[-1].num_bytes


# -- memory ------------------------------------------------------------------------------------------------------------


MEMORY_LIMITS_GIB: Mapping[str, float] = {"grpo": 4.0, "ppo": 4.6}


def memory(algorithm: str, size: str) -> Iterator[Row]:
    """Yield the peak memory of a process that trains LoRA of rank 32 on a base in NF4 for one step of 8 prompts with 8
    answers of 128 tokens: by GRPO, or by PPO with a critic and a reference. The model has the shape of Qwen2.5-1.5B,
    whatever the size of the other parts is."""
    shape, tokens = ("tiny", 8) if size == "tiny" else ("1.5B", 128)
    home = ROOT / "runs" / "bench" / "lora" / shape
    base = lora_memory.write_base(home / "base", lora_memory.SHAPES[shape])
    arguments = lora_memory.run_arguments(base, home, algorithm, tokens, torch.get_num_threads())
    name = f"{algorithm} on NF4, {shape}: peak GiB of the process"
    yield Row(name, lora_memory.peak_gib(arguments), MEMORY_LIMITS_GIB[algorithm])


PARTS: Mapping[str, Callable[[str], Iterator[Row]]] = {
    "optimizers": optimizers,
    "nf4": nf4,
    "sets": sets,
    "publish": publish,
    "update": update,
    "step": step,
    "learn": learn,
    **{f"memory-{algorithm}": partial(memory, algorithm) for algorithm in MEMORY_LIMITS_GIB},
}
"""The parts by name. Each is given the size of the model."""


BENCH = PartsBench(
    name="lora",
    heading="Training on one machine",
    sizes=[*SIZES],
    size="100M",
    models={
        **dict.fromkeys(("step", "learn"), "the quickstart's 1.6M parameters"),
        **dict.fromkeys(("memory-grpo", "memory-ppo"), "1.5B parameters"),
    },
)

if __name__ == "__main__":
    sys.exit(BENCH.run(sys.argv[1:], __doc__, PARTS))
