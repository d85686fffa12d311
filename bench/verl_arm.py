"""The same run in verl: `verl train recipe=quickstart` as it ships, with its logs, samples and verified weight syncs.

python bench/verl_arm.py SPEC.json RESULT.json
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.meter import Meter

from verl.driver.step import Step
from verl.track.metrics import TimeLedger


class TwoClockLedger(TimeLedger):
    """verl's time ledger with a second one beside it, which books CPU seconds of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._cpu = TimeLedger(clock=time.process_time)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name), self._cpu.phase(name):
            yield

    def stop(self) -> None:
        super().stop()
        self._cpu.stop()

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **{f"bench_cpu_s/{name}": s for name, s in self._cpu.seconds().items()}}


def step_of(index: int) -> Step:
    return Step(index, TwoClockLedger())


COMPUTES = (
    *("reward_model", "reference", "teacher", "old_logprobs", "values"),
    *("advantages", "update_critic", "update", "publish"),
)
"""Phases in which a model or the algorithm's arithmetic works. What is left without them and the engine is the
driver, the queue, reward dispatch and logging."""


def main(spec: dict[str, Any], result: Path) -> None:
    meter = Meter()
    import torch
    import transformers

    import verl
    import verl.driver.run
    from verl.config.load import load_config
    from verl.driver.launch import run_rl
    from verl.rollout.embedded.core import EngineCore

    verl.driver.run.Step = step_of  # type: ignore[assignment, misc]
    peak, engine, ended_s = [0], EngineMeter(), [time.perf_counter()]
    engine.watch(EngineCore)
    if spec.get("lengths"):
        force_lengths(json.loads(Path(spec["lengths"]).read_text()))
    if spec.get("count_bytes"):
        count_bytes(peak)
    rows_per_step = spec["prompts_per_step"] * spec["samples_per_prompt"]

    def on_step(number: int, values: Mapping[str, float]) -> None:
        engine_s, prefill_tokens = engine.reset()
        elsewhere_s = engine_s + sum(values.get(f"timing_s/{phase}", 0.0) for phase in COMPUTES)
        prompt_tokens = values["prompt_length/mean"] * rows_per_step
        meter.step(
            rollout_s=values["timing_s/rollout"],
            update_s=values["timing_s/update"],
            engine_s=engine_s,
            prefill_tokens=prefill_tokens,
            driver_s=time.perf_counter() - ended_s[0] - elsewhere_s,
            rollout_cpu_s=values["bench_cpu_s/rollout"],
            update_cpu_s=values["bench_cpu_s/update"],
            prompt_tokens=prompt_tokens,
            response_tokens=values["perf/total_num_tokens"] - prompt_tokens,
            longest_response_tokens=values["response_length/max"],
            peak_tensor_mb=peak[0] / 1e6,
            equal_rewards_share=values["groups/zero_variance_share"],
            **_phases(values, "timing_s/", "phase_s"),
            **_phases(values, "bench_cpu_s/", "phase_cpu_s"),
            **_phases(values, "agent/", "agent"),
        )
        ended_s[0] = time.perf_counter()  # what is left holds the logging of a step, too

    run_rl(load_config(overrides(spec)), on_step=on_step, quiet=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "verl": verl.__version__}
    meter.write(result, versions=versions, drop_last_steps=1)  # the last step holds the checkpoint


class EngineMeter:
    """Seconds that the rollout engine worked, and prompt tokens that it computed, since the last reset."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._prefilled = 0
        self._core: Any = None

    def watch(self, core: Any) -> None:
        run = core.run

        def timed(engine: Any, *args: Any) -> Any:
            self._core, began = engine, time.perf_counter()
            try:
                return run(engine, *args)
            finally:
                self._seconds += time.perf_counter() - began

        core.run = timed

    def reset(self) -> tuple[float, int]:
        prefilled = self._core.stats()["prefill_tokens"]
        found = self._seconds, prefilled - self._prefilled
        self._seconds, self._prefilled = 0.0, prefilled
        return found


def force_lengths(lengths: list[list[int]]) -> None:
    """Make the n-th call of the engine sample the workload's number of tokens, equal in every arm."""
    from verl.rollout.base import Completion, GenerateRequest
    from verl.rollout.embedded.front import EmbeddedEngine

    left = itertools.chain(itertools.chain.from_iterable(lengths), itertools.cycle(lengths[-1]))
    generate = EmbeddedEngine.generate

    async def forced(self: EmbeddedEngine, request: GenerateRequest) -> Completion:
        sampling = replace(request.sampling, max_tokens=next(left), ignore_eos=True)
        return await generate(self, replace(request, sampling=sampling))

    EmbeddedEngine.generate = forced  # type: ignore[method-assign]


def count_bytes(peak: list[int]) -> None:
    """The most tensor bytes of an update without its optimizer, as `trl_grpo.py` counts them."""
    from peers.peak_bytes import PeakBytes

    from verl.model_engine.torch_engine import TorchEngine

    forward_backward = TorchEngine.forward_backward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with PeakBytes() as found:
            out = forward_backward(self, *args, **kwargs)
        peak[0] = found.most
        return out

    TorchEngine.forward_backward = counted  # type: ignore[method-assign]


def _phases(values: Mapping[str, float], prefix: str, name: str) -> dict[str, float]:
    return {f"{name}/{key.removeprefix(prefix)}": value for key, value in values.items() if key.startswith(prefix)}


def overrides(spec: Mapping[str, Any]) -> list[str]:
    """One step more than the peers: the last is dropped. The rows are taken in the order of the file, as they do."""
    rank = spec.get("lora_rank")
    return [
        *([f"model.lora.rank={rank}", f"model.lora.alpha={2 * rank}"] if rank else ()),
        f"recipe={spec.get('recipe', 'quickstart')}",
        f"model.path={spec['model']}",
        f"model.dtype={spec['dtype']}",
        f"model.device={spec.get('device', 'cpu')}",
        f"data.train_files=[{spec['rows']}]",
        "data.shuffle=false",
        f"reward.path={spec.get('reward', 'verl.recipes.arithmetic')}",
        f"step.prompts_per_step={spec['prompts_per_step']}",
        f"step.samples_per_prompt={spec['samples_per_prompt']}",
        f"rollout.max_response_tokens={spec['max_response_tokens']}",
        f"optim.lr={spec['lr']}",
        f"run.root_dir={spec['folder']}",
        "run.name=verl",
        "run.resume=never",
        f"run.total_steps={spec['steps'] + 1}",
        f"run.threads={spec['threads']}",
        "run.eval_every_steps=0",
        "run.eval_before=false",
        "run.eval_after=false",
        *spec.get("overrides", ()),
    ]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
