"""A run on a GPU says which operations are computed without a kernel, and why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybrid import model
from test_attention import make
from test_rollout_numerics import CONFIGS
from transformers import Qwen3Config

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.cuda import decode, segments
from verl.accel.operations import Use
from verl.driver.assemble import say_notes
from verl.model_engine import passes
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.kernel_notes import training_notes
from verl.rollout.native.architecture import shape_of
from verl.rollout.native.paged import why_slots

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FUSED = ["trained_rms_norm", "trained_swiglu", "trained_rotation"]
HEAD = ["logit_sums", "logit_gradients"]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of capability 9.0, on which Triton can compile."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decode, "_cannot_build", lambda: None)


def lines(config: Any, dtype: torch.dtype = torch.bfloat16, *, quantised: bool = False) -> dict[str, str]:
    """The reasons of a model on a card, by operation."""
    found = training_notes(CUDA, dtype, config, packed=True, quantised=quantised)
    head = "training: slower without a kernel of "
    assert all(line.startswith(head) for line in found)
    return {name: reason.rstrip(")") for name, _, reason in (line[len(head) :].partition(" (") for line in found)}


def test_with_every_kernel_nothing_is_said() -> None:
    assert lines(CONFIGS["qwen3 bias"], quantised=True) == {}
    on_cpu = training_notes(CPU, torch.float32, CONFIGS["gemma2"], packed=True, quantised=True)
    assert on_cpu == (), "other kernels are used there"


def test_without_triton_each_operation_that_wants_it_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    found = lines(CONFIGS["qwen3 bias"], quantised=True)
    assert [*found] == [*FUSED, *HEAD, "quantised_linear", "quantised_back"]
    assert all("Triton: Triton is not installed" in reason for reason in found.values())


def test_below_ampere_attention_has_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    found = lines(CONFIGS["qwen3 bias"])
    assert [*found] == [*FUSED, "trained_attention", *HEAD]
    assert "torch's flash kernel: the card has compute capability 7.5, below 8.0" in found["trained_attention"]


@pytest.mark.parametrize(
    "config,reason",
    [
        (Qwen3Config(head_dim=512), "head_dim=512: flash kernels compute up to 256"),
        (CONFIGS["gemma2"], "attn_logit_softcapping="),
        (SimpleNamespace(**{**CONFIGS["qwen3"].to_dict(), "qk_head_dim": 192, "v_head_dim": 128}), "192 numbers per"),
    ],
)
def test_attention_in_blocks_has_its_reason(config: Any, reason: str) -> None:
    assert reason in lines(config)["trained_attention"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_size_of_heads_without_a_gradient_has_its_reason(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flash kernels compute it forward, also as prompts, and refuse its backward pass on these cards."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(segments, "flash_attn", lambda name: print)
    for dim in (192, 200, 224, 232, 256):
        use = Use(CUDA, torch.bfloat16, {"head_dim": dim})
        refused = dim in (200, 224) and capability in ((8, 6), (8, 9), (12, 0))
        assert ("trained_attention" in lines(Qwen3Config(head_dim=dim))) == refused
        for load in (segments.load_torch, segments.load_flash_attn):
            found = load(use)
            assert isinstance(found, str) == refused, (dim, found)
            assert not refused or f"no gradient of it on compute capability {capability[0]}.{capability[1]}" in found
        assert callable(segments.load_torch_prompts(use)) and callable(segments.load_flash_attn_prompts(use))


def test_float32_has_no_attention_in_one_call() -> None:
    assert lines(CONFIGS["qwen3 bias"], torch.float32) == {"trained_attention": "cuda has no kernel of it in float32"}


def test_a_family_without_fused_modules_is_named() -> None:
    found = lines(CONFIGS["gemma2"])
    assert [*found] == [*FUSED, "trained_attention"]
    assert found["trained_swiglu"].startswith("model_type gemma2: llama, ")


def test_the_lines_reach_the_start_of_a_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a model's engine, on a device that is taken for a card, to what the driver prints."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(passes, "training_notes", lambda device, *use, **of: training_notes(CUDA, *use, **of))
    capabilities = TorchEngine(make("qwen3")).capabilities
    assert len(capabilities.notes) == 6
    trained, said = SimpleNamespace(trains=True, capabilities=capabilities), []
    frozen = SimpleNamespace(trains=False, capabilities=replace(capabilities, notes=("of a frozen model",)))
    say_notes(SimpleNamespace(models={"actor": trained, "ref": frozen, "critic": trained}), said.append)  # type: ignore[arg-type]
    assert said == [*capabilities.notes]


def test_delta_nets_and_routes_have_a_reason_to_be_without_pages() -> None:
    delta, plain = (shape_of(config, 64) for config in (model("qwen3_next").config, CONFIGS["qwen3"]))
    assert "delta nets" in str(why_slots(CUDA, delta, routes=False))
    assert why_slots(CUDA, plain, routes=True) == "replay_routes=true: it records experts"
    assert why_slots(CUDA, plain, routes=False) is None and why_slots(CPU, delta, routes=True) is None
