"""LoRA adapters in a real vLLM: each is what PEFT makes of it, over whatever base was published last."""

from __future__ import annotations

import asyncio
import copy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import peft
import pytest
import torch
from adapters import write_adapter
from real_server import PYTHON, context_of, module_at, own_server, saved, staged

from verl.model_engine.lora import read_lora
from verl.rollout import vllm
from verl.rollout.base import GenerateRequest, ServerPlace
from verl.types import Sampling
from verl.weight_sync.base import CheckedReader, SyncError, WeightSource, checksum
from verl.weight_sync.local import LocalOutlet
from verl.weight_sync.record import entry_of

IDS = np.arange(3, 43) % 60
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


class Weights:
    def __init__(self, module: Any, version: int) -> None:
        self.module, self.version = module, version


async def load(engine: Any, source: Weights, **options: Any) -> int:
    """Load weights of the policy, with their version as identity."""
    reader = staged(source)
    return await engine.load_weights(CheckedReader(replace(reader.source, identity=str(source.version))), **options)


async def publish(engine: Any, name: str, folder: Path, base: Path, **options: Any) -> int:
    """A version of a LoRA set on top of the engine's weights; its number is one above theirs."""
    parameters, factors = read_lora(name, folder, base)
    outlet, version = LocalOutlet(), engine.version + 1
    manifest = {n: replace(entry_of(t), checksum=checksum(t)) for n, t in factors.items()}
    source = WeightSource(version, outlet.transport, outlet.stage(version, {}, factors.items()), manifest)
    source = replace(source, parameters=replace(parameters, base=str(engine.version)))
    return await engine.load_weights(CheckedReader(source), **options)


def logprobs(module: Any, ids: np.ndarray) -> np.ndarray:
    """[t-1] of ids[1:]."""
    with torch.no_grad():
        found = module(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def merged(module: Any, folder: Path | None) -> Any:
    return (
        module if folder is None else peft.PeftModel.from_pretrained(copy.deepcopy(module), folder).merge_and_unload()
    )


@pytest.mark.full("unit/test_rollout_adapters.py, with a double")
def test_adapters_come_and_go_over_weights_that_are_published(suite: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        engine = own_server(suite, tmp_path, max_lora_rank=6, max_loras=2)
        assert (await engine.capabilities()).lora_rank == 6
        base = tmp_path / "model"
        folders: dict[str, Path | None] = {"policy": None}

        async def check(module: Any) -> None:
            """The base and every adapter, all at once in one batch."""
            asked = [(name, i) for i in range(3) for name in folders]
            found = await asyncio.gather(
                *(
                    engine.generate(GenerateRequest(f"{name}-{i}", IDS[i:], GREEDY, parameters=name))
                    for name, i in asked
                )
            )
            for (name, i), one in zip(asked, found):
                whole = np.concatenate([IDS[i:], one.ids])
                of = merged(module, folders[name])
                assert np.abs(logprobs(of, whole)[-8:] - one.logprobs).max() < 1e-4, name
                assert one.parameters == name
                assert [v for v, _, _ in one.spans] == [engine.version + (name != "policy")]
                assert np.abs(await engine.score(whole, parameters=name) - logprobs(of, whole)).max() < 1e-4, name

        try:
            for seed in (0, 1):
                module = suite.reference(seed=seed)
                await load(engine, Weights(module, seed))
                await check(module)
            for name, more in (("a", {"seed": 1}), ("b", {"seed": 2, "r": 6, "lora_alpha": 3})):
                folders[name] = write_adapter(tmp_path / name, base, **more)
                given = shutil.copytree(folders[name], tmp_path / "given")
                await publish(engine, name, given, base)
                shutil.rmtree(given)  # vLLM would end where it reads it again
            await check(module)
            await check(module)  # from prefixes that are there
            module = suite.reference(seed=2)
            await load(engine, Weights(module, 2), on_inflight="wait")
            for name in ("a", "b"):
                await publish(engine, name, folders[name], base)
            await check(module)
            write_adapter(tmp_path / "a", base, seed=9)
            running = asyncio.ensure_future(
                engine.generate(GenerateRequest("long", IDS, Sampling(max_tokens=300), parameters="a"))
            )
            while not engine.calls.pending:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await publish(engine, "a", folders["a"], base, on_inflight="abort")
            assert (await running).stop_reason == "abort"
            await check(module)  # no prefix of the one before
            engine.connection.process.stop()  # type: ignore[union-attr]
            await load(engine, Weights(module, 3))
            for name in ("a", "b"):
                await publish(engine, name, folders[name], base)
            await check(module)
            await engine.drop_set("b")
            del folders["b"]
            with pytest.raises(ValueError, match=r"no LoRA set 'b' is live on these weights \(there are: a\)"):
                await engine.generate(GenerateRequest("x", IDS, GREEDY, parameters="b"))
            await check(module)
            large = write_adapter(tmp_path / "large", base, r=7)
            with pytest.raises(ValueError, match="rank 7 is above the engine's 6; set rollout.engine_options.max_lora"):
                await publish(engine, "large", large, base)
            other = write_adapter(tmp_path / "other", base, without=("o_proj.lora_B.weight", "q_proj.lora_B.weight"))
            with pytest.raises(ValueError, match="model.path=.*other"):
                await publish(engine, "other", other, base)
            await check(module)
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.full("contracts/test_policy_factors.py, with a double; test_runs.py")
def test_factors_of_a_policy_act_by_version_and_faults_of_them_are_caught(suite: ModuleType, tmp_path: Path) -> None:
    module_at("test_weight_sync_contract.py", "test_weight_sync_contract")
    of = module_at("test_policy_factors.py", "test_policy_factors")
    of._fresh = lambda tied: suite.reference()  # type: ignore[attr-defined]

    async def run() -> None:
        place = ServerPlace(model=str(saved(suite, tmp_path / "model")), log=tmp_path / "vllm.log", python=PYTHON)
        engine = vllm.build(vllm.Options(threads=1, max_loras=2), context_of(suite, place, lora_rank=4))
        world, replica, version, drawn = of.FactorsWorld("shm"), of.Changed(engine, lambda source: source), 0, []

        async def publish() -> Any:
            nonlocal version
            version += 1
            await world.update()
            return await world.publish([replica], version, exclusive=False, on_inflight="keep", timeout_s=300)

        async def answer(name: str) -> Any:
            """An answer; its log-probs are those of scores, which use no prefix of earlier requests."""
            found = await engine.generate(GenerateRequest(f"{name}-{version}", IDS, GREEDY))
            assert found.spans == ((version, 0, len(found.ids)),)
            scored = await engine.score(np.concatenate([IDS, found.ids]))
            assert np.abs(scored[-len(found.ids) :] - found.logprobs).max() < 1e-4
            return found

        try:
            await engine.capabilities()  # it has started
            whole = await publish()
            for _ in range(2):
                report = await publish()
                assert report.num_bytes == of.bytes_of(world, factors=True) < whole.num_bytes / 4
                first, again = await answer("first"), await answer("again")
                assert (first.cached_tokens, again.cached_tokens) == (0, 32), "a prefix is one of this version"
                drawn.append(first.logprobs)
            assert np.abs(drawn[0] - drawn[1]).max() > 0.01
            for name, change in of.FAULTS.items():
                replica.change = of.Stale() if name == "stale" else change
                if name == "stale":
                    await publish()
                with pytest.raises(SyncError, match="belongs to the weights another|log-probs of the canary differ"):
                    await publish()
                    await publish()
                replica.change = lambda source: source
                await publish()
                print(name, "is caught")
            engine.connection.process.stop()  # type: ignore[union-attr]
            assert not engine.base
            assert (await publish()).num_bytes == whole.num_bytes
            await answer("restarted")
        finally:
            await engine.close()
            for made in sys.modules["test_weight_sync_contract"].WORLDS:
                made.group.close()
                made.work.close()

    asyncio.run(run())
