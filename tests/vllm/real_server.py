"""Engines over a real vLLM, and the contract of rollout engines for them."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import torch
from transformers import Qwen2Config, Qwen3Config

from verl.rollout import vllm
from verl.rollout.base import RolloutContext, ServerPlace
from verl.rollout.client import ServedEngine
from verl.weight_sync.base import CheckedReader, Entry, WeightSource, checksum, dtype_name
from verl.weight_sync.shm import ShmOutlet

PYTHON = os.environ.get("VLLM_PYTHON", "")
OUTLET = f"verl-weights-{os.getpid()}-tests"


def module_at(file: str, name: str) -> ModuleType:
    """A contract of its own, to be changed, of that file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "contracts" / file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def contract_of_servers() -> ModuleType:
    """Return the contract of rollout engines, with models of head sizes that vLLM's CPU kernels can compute."""
    found = module_at("test_rollout_contract.py", "contract_of_servers")
    # eight layers: a request of some hundred tokens still runs when something is done to it
    sizes = {**found.SIZES, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes["num_hidden_layers"] = 8
    found.CONFIGS["qwen3"] = lambda: Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True)
    found.CONFIGS["qwen2"] = lambda: Qwen2Config(**sizes, tie_word_embeddings=False)
    # by min-p first, then by top-p of what is left: with both, another set is kept
    found.TRUNCATIONS = [t for t in found.TRUNCATIONS if not {"top_p", "min_p"} <= t.keys()]
    return found


class Running:
    """The server that most tests share."""

    def __init__(self, process: Any, url: str, model: Path) -> None:
        self.process, self.url, self.model = process, url, model
        self._began: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def counters(self) -> dict[str, int]:
        found = {"generation_tokens_total": 0, "num_requests_running": 0, "num_requests_waiting": 0}
        with urlopen(f"{self.url}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                name = line.partition("{")[0].removeprefix("vllm:")
                if line.startswith("vllm:") and name in found:
                    found[name] += int(float(line.rpartition(" ")[2]))
        return found

    def begin(self, engine: Any) -> None:
        """Its tokens are counted from the first weights on."""
        self._began.setdefault(engine, self.counters()["generation_tokens_total"])

    def stats_of(self, engine: Any) -> dict[str, int]:
        now = self.counters()
        return {
            "sampled_tokens": now["generation_tokens_total"] - self._began[engine],
            "resident": now["num_requests_running"],
            "waiting": now["num_requests_waiting"],
        }


def saved(suite: ModuleType, folder: Path, model: str = "qwen3") -> Path:
    suite.reference(model).save_pretrained(folder)
    return folder


def context_of(suite: ModuleType, place: ServerPlace, model: str = "qwen3", **given: Any) -> RolloutContext:
    known = {"max_context_tokens": 512, "dtype": torch.float32, "max_concurrent_sequences": 64, **given}
    return RolloutContext(hf_config=suite.reference(model).config, place=place, **known)


def own_server(suite: ModuleType, folder: Path, model: str = "qwen3", **options: Any) -> ServedEngine:
    """An engine with a server that a test may break."""
    place = ServerPlace(model=str(saved(suite, folder / "model", model)), log=folder / "vllm.log", python=PYTHON)
    return vllm.build(vllm.Options(threads=1, **options), context_of(suite, place, model))


def wait_until_up(running: Running) -> None:
    """A server at a URL is refused where it does not run yet."""
    until_s = time.monotonic() + 600
    while True:
        assert running.process.exit_code is None, running.process.tail(40)
        assert time.monotonic() < until_s, running.process.tail(40)
        try:
            urlopen(f"{running.url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.3)


def staged(source: Any, *, without: str = "", shape_of: str = "") -> CheckedReader:
    """Weights as the trainer's end of the shared memory holds them. without: a tensor that is not there · shape_of: one
    that has another shape than the model's."""
    held: dict[str, torch.Tensor] = {}
    tied = getattr(source.module, "_tied_weights_keys", None) or ()
    config = source.module.config
    for name, tensor in source.module.state_dict().items():
        if name in tied and config.tie_word_embeddings:
            continue
        held[name] = tensor.detach()
    if shape_of:
        held[shape_of] = held[shape_of][:3]
    manifest = {n: Entry(tuple(t.shape), dtype_name(t), checksum=checksum(t)) for n, t in held.items()}
    there = {name: entry for name, entry in manifest.items() if name != without}
    address = ShmOutlet(OUTLET).stage(source.version, there, ((name, held[name]) for name in there))
    return CheckedReader(WeightSource(source.version, ShmOutlet.transport, address, manifest))


async def load(engine: Any, source: Any, **options: Any) -> int:
    return await engine.load_weights(staged(source), **options)
