"""Layers that are compiled: the loss and gradients of those that are not, few graphs, and no silent fallback."""

from __future__ import annotations

import copy
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_attention import make, rows, run
from test_engine import NLL, batch_of, samples

from verl.batch import pack
from verl.model_engine.faults import torch_faults
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn import compiled

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
"""With and without norms of queries and keys, biases, windows."""
COPY: dict[str, Any] = {"dtype": "bfloat16", "emulate_bf16": False, "copies_weights": True}


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


def engine(model: Any, **options: Any) -> TorchEngine:
    options = {"dtype": "float32", "optim": OptimSpec(lr=1e-2), "compile": True, **options}
    return TorchEngine(copy.deepcopy(model), EngineSettings(**options))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("verl.")]


def close(found: Any, expected: Any) -> None:
    """Compare log-probs, and gradients to 1e-5 of their largest value, as the gate of layouts does: on some CPUs either
    is 4e-6 from that of float64."""
    (logprobs, grads), (exact, of_eager) = found, expected
    torch.testing.assert_close(logprobs, exact, rtol=1e-6, atol=1e-5)
    assert grads.keys() == of_eager.keys()
    for name, g in of_eager.items():
        torch.testing.assert_close(grads[name], g, rtol=1e-5, atol=1e-5 * float(g.abs().max()) + 1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_are_those_of_layers_that_are_not_compiled(name: str) -> None:
    model, batch = make(name), pack(rows())
    close(run(model, batch, dtype="float32", compile=True), run(model, batch, dtype="float32"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_code_computes_the_same(checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    model, batch, how = make("qwen3"), pack(rows()), {"dtype": "float32", "gradient_checkpointing": checkpointing}
    close(run(model, batch, compile=True, **how), run(model, batch, **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        pytest.param({}, 4, id="float32"),
        pytest.param(COPY, 6, id="copy"),
        pytest.param({"lora": LoraSpec(rank=2)}, 4, id="lora"),
        pytest.param({**COPY, "lora": LoraSpec(rank=2)}, 6, id="copy_lora"),
    ],
)
def test_a_run_of_ragged_batches_compiles_four_graphs_beyond_the_first_of_each_part(
    options: dict[str, Any], graphs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The check at start, inference and training, with batches of other sizes after each optimizer step."""
    ours, eager = engine(make("qwen3"), **options), engine(make("qwen3"), compile=False, **options)
    layers = ours.passes.compiled
    assert layers is not None and ours.check_packing(share_prefix=True) < 1e-4
    every = [*samples()]
    before = ours.infer(pack(every), ("logprobs",))["logprobs"]
    for chosen in (every[:1], every[1:], every * 2):
        ours.forward_backward(batch_of(chosen), NLL)
        ours.optim_step()
        ours.infer(pack(chosen), ("logprobs",))
    assert layers.graphs == graphs <= 2 + compiled.RECOMPILES and not layers.stopped and not said(caplog)
    weights = dict(ours.local.trained().named_parameters())
    with torch.no_grad():
        for name, p in eager.local.trained().named_parameters():
            p.copy_(weights[name])
    found, expected = (e.infer(pack(every), ("logprobs",))["logprobs"] for e in (ours, eager))
    atol = 3e-2 if "dtype" in options else 1e-5
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)  # by the weights of now, in the same graphs
    assert float((found - before).abs().max()) > 5 * atol


def test_the_models_own_log_probs_are_computed_without_compiled_layers() -> None:
    ours, eager = engine(make("qwen3")), engine(make("qwen3"), compile=False)
    probe = [np.arange(5)]
    assert np.array_equal(ours.own_logprobs(probe, "float32")[0], eager.own_logprobs(probe, "float32")[0])
    assert ours.passes.compiled is not None and ours.passes.compiled.graphs == 0
    ours.infer(pack(rows()), ("logprobs",))
    assert ours.passes.compiled.graphs == 2


def fails(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("cause", ["backend", "limit", "disabled"])
def test_layers_that_are_not_compiled_any_more_are_named_once_and_compute_the_same(
    cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if cause == "backend":
        monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: fails)
    elif cause == "limit":
        monkeypatch.setattr(compiled, "RECOMPILES", -1)
    else:
        monkeypatch.setattr(torch, "compile", lambda part, **_: part)
    model, batch = make("llama"), pack(rows())
    close(run(model, batch, dtype="float32", compile=True), run(model, batch, dtype="float32"))
    (line,) = said(caplog)
    causes = {"backend": "no compiler here", "limit": "graphs were compiled", "disabled": "torch.compile did nothing"}
    assert "not compiled from now on" in line and causes[cause] in line


def test_another_family_is_refused_before_the_start_and_named_by_an_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine(make("gemma2"), optim=None)
    assert "Gemma2ForCausalLM is not compiled" in caplog.text
    kind = SimpleNamespace(model_type="gemma", folder="x")
    monkeypatch.setattr("verl.model_engine.faults.describe_model", lambda path: kind)
    options = SimpleNamespace(compile=True, attention="padded")
    monkeypatch.setattr("verl.model_engine.faults.options_of", lambda config, section: options)
    config: Any = SimpleNamespace(model=SimpleNamespace(path="x"))
    padded, family = torch_faults(config, {}, {})
    assert "only packed rows are compiled" in padded and "model.path=x is a gemma; compiled are llama" in family
    options.compile = False
    assert not [*torch_faults(config, {}, {})]
