"""The format in which weights are sent: what engines read, and what a tensor becomes."""

from __future__ import annotations

import copy
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import QWEN3_MOE
from torch import nn
from transformers import DeepseekV3Config, FalconMambaConfig, Qwen3Config

from verl.checkpoint.block_fp8 import scale_parts
from verl.checkpoint.safetensors_file import host_bytes
from verl.driver.publisher import Publisher
from verl.model_engine.base import whole_part
from verl.parameter_set import ParameterSet
from verl.rollout.base import IN_PROCESS, Capabilities, capabilities_of
from verl.rollout.weight_format import format_of_module, format_of_server
from verl.weight_sync.base import Entry, checksum
from verl.weight_sync.local import LocalOutlet
from verl.weight_sync.sender import WeightSender
from verl.weight_sync.wire_format import converted
from verl.wire import AS_HELD, FP8, WireFormat

BF16, F32, BLOCKS = WireFormat("bfloat16"), WireFormat("float32"), WireFormat("bfloat16", fp8=True)


@pytest.mark.parametrize(
    ("formats", "widest"),
    [
        ([BF16], BF16),
        ([BF16, F32], F32),
        ([BF16, WireFormat("float16")], F32),
        ([BF16, AS_HELD], AS_HELD),
        ([WireFormat("bfloat16", {"a": "float32"}), BF16], WireFormat("bfloat16", {"a": "float32"})),
        ([WireFormat("bfloat16", {"a": "float32"}), F32], F32),
        ([WireFormat("float32", {"a": "bfloat16"}), BF16], WireFormat("float32", {"a": "bfloat16"})),
        ([BLOCKS, replace(BLOCKS, fp8_inputs=True)], replace(BLOCKS, fp8_inputs=True)),
    ],
)
def test_the_widest_of_several_formats_loses_nothing(formats: list[WireFormat], widest: WireFormat) -> None:
    assert WireFormat.widest(formats) == WireFormat.widest(formats[::-1]) == widest


def test_only_floating_tensors_are_converted_and_none_is_widened() -> None:
    master, ids = torch.randn(5), torch.arange(5)
    form = WireFormat("bfloat16", {"gate": "float32"})
    assert torch.equal(converted(form, "w", master), master.bfloat16())
    assert converted(form, "gate", master).dtype == torch.float32
    assert converted(form, "gate", master.double()).dtype == torch.float32, "as an engine in float32 rounds it"
    assert converted(F32, "w", master.bfloat16()).dtype == torch.bfloat16, "the replica widens it without loss"
    assert torch.equal(converted(BF16, "ids", ids), ids) and converted(AS_HELD, "w", master).dtype == torch.float32


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def test_scales_of_codes_are_never_rounded_and_all_replicas_read_codes_or_none() -> None:
    form, names = WireFormat("bfloat16", codes=True), ("weight.absmax", "weight.nested_absmax", "SCB")
    kept = [converted(form, f"model.layers.0.mlp.up_proj.{name}", torch.randn(3)) for name in names]
    assert all(t.dtype == torch.float32 for t in kept)
    assert converted(form, "model.norm.weight", torch.randn(3)).dtype == torch.bfloat16
    assert WireFormat.widest([form, form]).codes and not WireFormat.widest([form, WireFormat("bfloat16")]).codes


def test_an_engine_of_transformers_reads_buffers_in_their_own_dtype() -> None:
    assert format_of_module(Buffered(), torch.bfloat16) == WireFormat("bfloat16", {"scale": "float32"})


def test_tensors_that_servers_may_keep_in_float32_are_sent_so() -> None:
    found = format_of_server(QWEN3_MOE, torch.bfloat16)
    gates, norm = [n for n in found.exceptions if n.endswith("mlp.gate.weight")], "model.norm.weight"
    assert found.dtype_of(norm) == "float32" and gates and {*found.exceptions.values()} == {"float32"}
    assert {found.dtype_of(f"model.layers.0.{n}") for n in ("mlp.experts.down_proj", "self_attn.q_proj.weight")} == {
        "bfloat16"
    }
    assert format_of_server(QWEN3_MOE, torch.float32) == F32
    in_blocks = format_of_server(QWEN3_MOE, torch.bfloat16, fp8=True)
    assert in_blocks == replace(found, fp8=True, fp8_inputs=True)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 32}
    more = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1}
    declared = format_of_server(DeepseekV3Config(**sizes, **more, **heads), torch.bfloat16)
    assert declared.dtype_of("model.layers.0.mlp.gate.e_score_correction_bias") == "float32"
    foreign = copy.deepcopy(QWEN3_MOE)
    foreign.architectures = ["OfNoKnownPackage"]
    assert format_of_server(foreign, torch.bfloat16) == AS_HELD


def test_constants_of_recurrent_layers_are_sent_in_float32_whatever_their_shape() -> None:
    """The decay of a Mamba layer is a matrix, which servers keep in float32 and exponentiate."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 32, "state_size": 4}
    found = format_of_server(FalconMambaConfig(**sizes), torch.bfloat16)
    wide = ("A_log", "D", "dt_proj.bias", "conv1d.bias")
    assert {found.dtype_of(f"backbone.layers.0.mixer.{name}") for name in wide} == {"float32"}
    assert {found.dtype_of(f"backbone.layers.0.mixer.{n}.weight") for n in ("in_proj", "conv1d")} == {"bfloat16"}


SERVERS = {
    "by our name": ("model.layers.0.self_attn.q_proj.weight", ["model.layers.0.self_attn.q_proj.weight"]),
    "joined": (
        "model.layers.1.self_attn.qkv_proj.weight",
        [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkvo"],
    ),
    "stacked": (
        "model.layers.0.mlp.experts.w13_weight",
        [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")],
    ),
}


@pytest.mark.parametrize("case", SERVERS)
def test_what_a_server_reports_to_keep_in_float32_is_sent_so(case: str) -> None:
    reported, ours = SERVERS[case]
    plain = format_of_server(QWEN3_MOE, torch.bfloat16)
    found = format_of_server(QWEN3_MOE, torch.bfloat16, {reported})
    assert {*found.exceptions} - {*plain.exceptions} == {*ours}


def test_a_dense_model_travels_in_half_of_the_bytes_to_a_server_but_for_its_vectors() -> None:
    config = Qwen3Config(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=1000)
    found = format_of_server(config, torch.bfloat16)
    assert all(name.endswith("norm.weight") for name in found.exceptions)


def test_scales_are_cut_at_whole_blocks_alone() -> None:
    """Of a tensor that a folder holds as two."""
    parts = [("a.x_proj.weight", (256, 300), 0), ("a.y_proj.weight", (100, 300), 256)]
    names = [("a.x_proj.weight_scale_inv", (2, 3), 0), ("a.y_proj.weight_scale_inv", (1, 3), 2)]
    assert scale_parts((356, 300), parts) == names
    assert scale_parts((356, 300), [(name, (178, 300), 178 * i) for i, (name, _, _) in enumerate(parts)]) == []


def test_factors_of_an_adapter_are_not_quantised() -> None:
    """A server with blocks of 8 bits has its adapters in bfloat16."""
    factor = torch.zeros(4, 256)
    engine: Any = SimpleNamespace(tied={}, weight_parts=lambda: [whole_part("q_proj.lora_A.weight", factor)])
    parameters = ParameterSet(id="a", kind="lora", base="b", rank=4, scale=1.0, targets=("q_proj",))
    sender = WeightSender(LocalOutlet(), dtype=FP8).for_set(LocalOutlet(), parameters, engine)
    sender.set_format(BLOCKS)
    assert sender.manifest(engine) == {"q_proj.lora_A.weight": Entry((4, 256), "bfloat16")}


def test_a_publish_is_sent_in_the_format_of_all_replicas_that_have_joined() -> None:
    class Trainer:
        wire_format = AS_HELD

    def able(form: WireFormat) -> Capabilities:
        return capabilities_of(IN_PROCESS, max_context_tokens=8, weights=form)

    trainer: Any = Trainer()
    given: dict[str, Any] = {"waits": None, "timeout_s": 60.0, "note": print, "published": None, "engine": None}
    given["lora"] = None
    made = Publisher(trainer=trainer, replicas=(), exclusive=True, partial_rollout=False, **given)
    made.join(able(BF16))
    assert trainer.wire_format == BF16
    made.join(able(BF16))
    made.join(able(F32))
    assert trainer.wire_format == F32


def test_a_checksum_leaves_the_storage_of_a_tensor_as_it_is():
    """An offloaded engine moves its tensors away after a publish: their storages change their size."""
    for tensor in (torch.randn(8, 4), torch.randn(8, 4).t(), torch.randn(6, dtype=torch.bfloat16), torch.empty(0)):
        expected = zlib.crc32(tensor.clone().contiguous().view(torch.uint8).numpy().tobytes())
        assert checksum(tensor) == expected and tensor.untyped_storage().resizable()
        assert bytes(host_bytes(tensor)) == tensor.clone().contiguous().view(torch.uint8).numpy().tobytes()
