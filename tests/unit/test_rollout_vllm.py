"""How vLLM is started and what is refused before, without a vLLM."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from each import each
from families import QWEN3_MOE
from safetensors.torch import load_file
from small_runs import small_args
from test_rollout_client import context_of
from torch.storage import TypedStorage
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from vision import model, pictures

from bench import environments
from verl.checkpoint.safetensors_file import host_bytes
from verl.config.backends import engine_name
from verl.config.load import load_config
from verl.config.validate import validate
from verl.errors import Refused
from verl.nn.fp8 import quantise
from verl.rollout.base import RolloutContext, ServerPlace
from verl.rollout.embedded.images import RequestImages
from verl.rollout.vllm import PLUGIN, Options, build, environment, memory, require_vllm, serve_command
from verl.rollout.vllm_api import VllmApi
from verl.rollout.vllm_images import vllm_features
from verl.rollout.weight_format import format_of_server
from verl.rollout.wire import version_of
from verl.types import Medium
from verl.weight_sync import shm
from verl.weight_sync.base import checksum, saved_parts
from verl.weight_sync.record import entry_of
from verl.weight_sync.wire_format import wire_tensors

CONFIG = Qwen3Config(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 160, "num_hidden_layers": 2, "num_experts_per_tok": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
BLOCKS = Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, moe_intermediate_size=128, tie_word_embeddings=True)
GPT_OSS = GptOssConfig(**SIZES, **HEADS, num_local_experts=2, intermediate_size=128)
MIXTRAL = MixtralConfig(**SIZES, **HEADS, num_local_experts=2, intermediate_size=96)
LATENT = DeepseekV3Config(
    **SIZES, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=96, first_k_dense_replace=2
)
FOREIGN = copy.deepcopy(CONFIG)
FOREIGN.architectures = ["OfNoKnownPackage"]


def context(**given: Any) -> RolloutContext:
    return context_of(**{"hf_config": CONFIG, "max_context_tokens": 200, **given})


def flags(options: Options, model: str = "/m", **given: Any) -> dict[str, str]:
    words = serve_command("py", options, context(**given), model, 1234)
    assert words[:5] == ["py", "-m", "vllm.entrypoints.cli.main", "serve", model]
    found: dict[str, str] = {}
    for word in words[5:]:
        if word.startswith("--"):
            last = word
            found[last] = ""
        else:
            found[last] = f"{found[last]} {word}".strip()
    return found


def test_the_line_that_starts_it_on_a_cpu() -> None:
    assert flags(Options()) == {
        **{"--served-model-name": "policy", "--host": "127.0.0.1", "--port": "1234", "--dtype": "float32"},
        **{"--max-model-len": "201", "--max-num-seqs": "256", "--tensor-parallel-size": "1", "--load-format": "dummy"},
        **{"--generation-config": "vllm", "--logprobs-mode": "processed_logprobs", "--skip-tokenizer-init": ""},
        **{"--enable-scale-out": "", "--enable-prompt-tokens-details": "", "--enforce-eager": "", "--block-size": "32"},
        **{"--weight-transfer-config": '{"backend": "verl"}', "--worker-extension-cls": "verl_weights.Extension"},
        # a prefill that is split kills the engine where requests have seeds
        **{"--no-enable-chunked-prefill": "", "--max-num-batched-tokens": "4096"},
    }
    assert flags(Options(), float32_head=True)["--hf-overrides"] == '{"head_dtype": "float32"}'
    in_blocks = {"fp8": True, "dtype": torch.bfloat16, "hf_config": BLOCKS}
    overrides = json.loads(flags(Options(), float32_head=True, **in_blocks)["--hf-overrides"])
    kept = overrides["quantization_config"].pop("modules_to_not_convert")
    assert {"lm_head", "model.embed_tokens"} < {*kept} and all(name.endswith(".mlp.gate") for name in kept[2:])
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert overrides == {"head_dtype": "float32", "quantization_config": described}
    assert environment({}, Options(), context(**in_blocks))["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    ours = {"VLLM_USE_DEEP_GEMM_E8M0": "1"}
    assert environment(ours, Options(), context(**in_blocks))["VLLM_USE_DEEP_GEMM_E8M0"] == "1"
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in environment({}, Options(), context())
    long = flags(Options(), max_context_tokens=9000, hf_config=Qwen3Config(max_position_embeddings=9000))
    assert (long["--max-model-len"], long["--max-num-batched-tokens"]) == ("9000", "9000")


def test_a_server_gets_images_processed_and_does_not_normalise_them_again() -> None:
    reads = model("qwen2_5_vl").config
    found, text = flags(Options(), hf_config=reads), flags(Options())
    assert {*found} - {*text} == {"--no-mm-device-do-normalize", "--mm-processor-cache-gb", "--skip-mm-profiling"}
    assert {*text} - {*found} == {"--skip-tokenizer-init"}
    with pytest.raises(ValueError, match="args.mm_device_do_normalize=True: vLLM would normalise the patches"):
        flags(Options(args={"mm_device_do_normalize": True}), hf_config=reads)
    cat, medium = pictures()["cat"], Medium("cat", 2, 6)
    images = RequestImages((medium,), {"cat": cat}, np.zeros((3, 9)), {"cat": np.ones(6, bool)})
    given = vllm_features(images, torch.bfloat16)
    assert given["mm_hashes"] == {"image": ["cat"]}
    assert given["mm_placeholders"] == {"image": [{"offset": 2, "length": 6}]}
    (item,) = given["kwargs_data"]["image"]
    sent = msgspec.msgpack.decode(base64.b64decode(item))
    dtype, shape, patches = sent["pixel_values"]["data"]
    assert (dtype, shape, patches.code) == ("bfloat16", [24, 12], 3)
    assert patches.data == host_bytes(cat.patches.bfloat16())
    assert np.frombuffer(sent["image_grid_thw"]["data"][2].data, np.int64).tolist() == [1, 4, 6]

    async def answer(path: str, body: Any) -> Any:
        sizes = {key: getattr(CONFIG, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
        return {"results": [{"model": "/m", "normalises": True, **sizes}]}

    assert asyncio.run(VllmApi().unlike(answer, "/m", CONFIG)) == "", "a model of text"
    with pytest.raises(ValueError, match="normalises the patches .*; start it with --no-mm-device-do-normalize"):
        asyncio.run(VllmApi(media=True).unlike(answer, "/m", CONFIG))


def test_the_line_that_starts_it_on_a_gpu() -> None:
    found = flags(Options(gpu_memory_utilization=0.4, tensor_parallel_size=2), device="cuda", dtype=torch.bfloat16)
    on_cpu_only = {"--no-enable-chunked-prefill", "--max-num-batched-tokens", "--block-size", "--enforce-eager"}
    assert not on_cpu_only & set(found)
    assert found["--gpu-memory-utilization"] == "0.4" and found["--dtype"] == "bfloat16"
    assert found["--enable-sleep-mode"] == "" and found["--tensor-parallel-size"] == "2"
    env = environment({}, Options(), context(device="cuda"))
    assert not [name for name in env if name.startswith(("VLLM_CPU", "OMP"))]
    assert "--enforce-eager" in flags(Options(enforce_eager=True), device="cuda")


def test_more_arguments_and_those_that_are_taken() -> None:
    more = {"max-logprobs": 5, "trust_remote_code": True, "hf-overrides": {"a": 1}, "seed": 3, "enable-lora": False}
    found = flags(Options(args=more, max_num_seqs=8, block_size=16, load_format="auto"))
    assert found["--max-logprobs"] == "5" and found["--trust-remote-code"] == "" and found["--seed"] == "3"
    assert json.loads(found["--hf-overrides"]) == {"a": 1} and "--enable-lora" not in found
    assert (found["--max-num-seqs"], found["--block-size"], found["--load-format"]) == ("8", "16", "auto")
    with pytest.raises(ValueError, match=r"args\.--max_model_len=9: verl sets --max-model-len itself; leave it out"):
        flags(Options(args={"--max_model_len": 9}))
    chunked = Options(args={"enable_chunked_prefill": True})
    with pytest.raises(
        ValueError, match="args.enable_chunked_prefill=True: on a CPU a seeded request whose prefill is"
    ):
        flags(chunked)
    assert "--enable-chunked-prefill" in flags(chunked, device="cuda")


def test_its_environment() -> None:
    ours = {"PATH": "/bin", "PYTHONPATH": "/verl", "PYTHONHOME": "/h", "VIRTUAL_ENV": "/v", "OMP_NUM_THREADS": "7"}
    env = environment(ours, Options(threads=3), context())
    assert {
        "PATH": "/bin",
        "PYTHONPATH": str(PLUGIN),
        "OMP_NUM_THREADS": "3",
        "VLLM_SERVER_DEV_MODE": "1",
    }.items() <= env.items()
    assert "PYTHONHOME" not in env and "VIRTUAL_ENV" not in env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert [p.name for p in PLUGIN.glob("*.py")] == ["verl_weights.py"], "the whole folder is on vLLM's path"


def test_its_memory() -> None:
    def of(options: Options, **given: int) -> int:
        known = {"max_concurrent_sequences": 256, "max_context_tokens": 2048, "kv_bytes_per_token": 4096}
        return memory(options, **(known | given))["KV cache"] >> 30

    assert of(Options()) == 2 and of(Options(max_num_seqs=32)) == 1 and of(Options(), kv_bytes_per_token=1 << 20) == 4
    assert of(Options(kv_cache_gib=7)) == 7


def test_the_lines_of_the_page_for_a_cpu_make_an_environment_that_is_taken(tmp_path: Path) -> None:
    """Those between pip's, in an environment where pip has put the wheel, as `make vllm-env` names it."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    pinned, torch_pin = environments.VLLM, f"torch=={torch.__version__.partition('+')[0]}"
    assert f"bin/pip install --no-deps {pinned}\n" in page and f'"{torch_pin}"' in page
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=120)
    packages = next((tmp_path / "lib").glob("python3*/site-packages"))
    named, _, version = pinned.partition("==")
    (wheel := packages / f"{named.replace('-', '_')}-{version}.dist-info").mkdir()
    asked = [*environments.NOT_WITH_VLLM, "numpy", "torch-like>=2", "ray>=2; extra == 'ray'"]
    about = "".join(f"Requires-Dist: {one}\n" for one in asked)
    (wheel / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {named}\nVersion: {version}\n{about}")
    program = page.partition("<<'END'\n")[2].partition("END\n")[0]
    python = str(tmp_path / "bin" / "python")
    subprocess.run([python, "-"], input=program, text=True, cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "needs.txt").read_text().splitlines() == ["numpy", "torch-like>=2", torch_pin]
    require_vllm(python)


class Vllm(ModuleType):
    """Whatever is imported of it is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": lambda cls, of: object, "register_engine": lambda *given: None})


def plugin_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the plugin's file, without a vLLM."""
    layers, loader = "vllm.model_executor.layers.vocab_parallel_embedding", "vllm.model_executor.model_loader.reload"
    for name in ("base", "factory"):
        of = f"vllm.distributed.weight_transfer.{name}"
        monkeypatch.setitem(sys.modules, of, Vllm(of))
    for of in (layers, loader):
        monkeypatch.setitem(sys.modules, of, Vllm(of))
    plugin: dict[str, Any] = {"__name__": "verl_weights_here"}
    exec(compile((PLUGIN / "verl_weights.py").read_text(), "verl_weights", "exec", dont_inherit=True), plugin)
    return plugin


def test_the_plugin_reads_experts_one_by_one_from_the_tensor_that_they_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names of a folder that transformers has saved, bit for bit, and of the same memory."""
    plugin = plugin_of(monkeypatch)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(QWEN3_MOE))
    model.save_pretrained(tmp_path / "model")
    held = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    shapes = {name: entry_of(tensor) for name, tensor in held.items()}
    monkeypatch.setattr(shm, "SHM", tmp_path)
    path = shm.ShmOutlet("verl-weights-1-plugin").stage(3, shapes, held.items())
    sums = {name: checksum(tensor) for name, tensor in held.items()}
    update = plugin["SegmentUpdate"](path, 3, None, sums, json.loads(json.dumps(saved_parts(model, shapes))))
    segment = plugin["SharedSegment"](path)
    found, saved = dict(segment.tensors(update)), load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == saved.keys() and any(".experts.3.up_proj" in name for name in found)
    assert all(torch.equal(found[name], saved[name]) and found[name].is_contiguous() for name in saved)

    # sync.engine=ipc: the same from a GPU, which each process finds by its name
    memory, handle = device_memory(path)
    seen, asked, settled = ["GPU-b", "GPU-a"], [], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=seen[index]))
    monkeypatch.setattr(torch.cuda, "synchronize", settled.append)
    plugin["rebuild_cuda_tensor"] = lambda *given: asked.append(given) or memory
    update.passes = True
    found = dict(plugin["SharedSegment"](path).tensors(update))
    memory.zero_()  # written again
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    shared = (b"allocation", 4096, 512, False, b"counter", 3, b"event", True)
    assert asked == [(torch.Tensor, memory.shape, (1,), 0, TypedStorage, torch.uint8, 1, *shared)] and len(settled) == 1
    seen.remove("GPU-a")
    plugin["_opened"].cache_clear()
    with pytest.raises(RuntimeError, match="lie on GPU GPU-a, and this process sees GPU-b: set sync.engine=shm"):
        next(plugin["SharedSegment"](path).tensors(update))


def test_the_plugin_reads_blocks_by_the_names_of_a_quantised_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts one by one, each with its scales: the bytes that quantising the tensors of a saved folder gives."""
    plugin = plugin_of(monkeypatch)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(BLOCKS))
    model.save_pretrained(tmp_path / "model")
    form = format_of_server(copy.deepcopy(BLOCKS), torch.bfloat16, fp8=True)
    held = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
    sent = {n: t for name, tensor in held.items() for n, t in wire_tensors(form, name, tensor)}
    shapes = {name: entry_of(tensor) for name, tensor in sent.items()}
    monkeypatch.setattr(shm, "SHM", tmp_path)
    path = shm.ShmOutlet("verl-weights-1-plugin").stage(3, shapes, sent.items())
    sums = {name: checksum(tensor) for name, tensor in sent.items()}
    update = plugin["SegmentUpdate"](path, 3, None, sums, json.loads(json.dumps(saved_parts(model, shapes))))
    found = dict(plugin["SharedSegment"](path).tensors(update))
    expected = dict[str, torch.Tensor]()
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            expected[name], expected[f"{name}_scale_inv"] = quantise(tensor)
        else:
            expected[name] = tensor if name.endswith(("norm.weight", "gate.weight")) else tensor.bfloat16()
    assert found.keys() == expected.keys() and "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv" in found
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        assert host_bytes(found[name].contiguous()) == host_bytes(tensor), name


@each(
    "config, said",
    [
        (CONFIG, r"q_proj.weight|k_proj.weight \[64, 64\]: a server appends another projection, and no block of 128"),
        (QWEN3_MOE, "a server appends another projection, and no block of 128 rows ends there; set rollout.engine=nat"),
        (
            MIXTRAL,
            r"experts.0.w1.weight \[96, 160\]: a server appends another projection, and no block of 128 rows ends",
        ),
        (LATENT, r"q_a_proj.weight \[96, 160\]: a server appends another projection"),
        (GPT_OSS, r"experts.gate_up_proj \[\d+, \d+, \d+\]: experts that are saved as one tensor have no blocks"),
        (FOREIGN, "its class is not part of transformers"),
    ],
)
def test_a_model_whose_blocks_servers_do_not_read_is_refused(config: Any, said: str) -> None:
    with pytest.raises(Refused, match=f"rollout.dtype=fp8 with a server: .*{said}"):
        flags(Options(), fp8=True, hf_config=config)


def device_memory(path: str) -> tuple[torch.Tensor, bytes]:
    """The content of that segment, moved to a GPU with a handle in the segment."""
    stream = shm.ShmStream(Path(path))
    parts, first = stream.index
    memory = stream.memory[first:].clone()
    handle = msgspec.msgpack.encode(["GPU-a", memory.numel(), b"allocation", 4096, 512, b"counter", 3, b"event", True])
    stream.memory[first:] = 0
    stream.describe(stream.version, msgspec.msgpack.encode(parts), first, handle)
    return memory, handle


def fake_python(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@each(
    "body, said",
    [
        ("echo 0.31.2", r"vLLM 0.31.2 is there, this adapter was made for >=0.32,<0.34: pip install vllm==0.32.0"),
        ("echo 0.34.0", "vLLM 0.34.0 is there"),
        (
            "echo PackageNotFoundError: vllm; exit 1",
            r"no vLLM there \(PackageNotFoundError: vllm\): pip install.*docs/engines.md.*make vllm-env",
        ),
        ("echo 0.32.1", ""),
        ("echo 0.32.0+cpu", ""),
        ("echo 0.33.0", ""),
    ],
)
def test_an_environment_without_the_engine(tmp_path: Path, body: str, said: str) -> None:
    python = fake_python(tmp_path, body)
    if not said:
        require_vllm(python)
        return
    with pytest.raises(ValueError, match=said) as caught:
        require_vllm(python)
    assert f"rollout.python={python}" in str(caught.value) and "\n" not in str(caught.value)
    place = ServerPlace(model="/m", log=tmp_path / "log", python=python)
    with pytest.raises(ValueError, match=said):
        build(Options(), context(place=place))


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be started"):
        require_vllm(str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"run\.deterministic=true.*native"):
        build(Options(), context(place=ServerPlace(model="/m", log=tmp_path / "l", python="x"), deterministic=True))


def test_a_replica_that_is_started_again_asks_the_installation_nothing(tmp_path: Path) -> None:
    """A wait for that in the event loop would delay the requests of the other replicas."""
    python = fake_python(tmp_path, f"echo asked >> {tmp_path}/asked; echo 0.32.0")
    for _ in range(2):
        require_vllm(python)
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_versions_are_compared_as_numbers() -> None:
    assert version_of("0.32.0+cpu") == (0, 32, 0) and version_of("0.9") < (0, 32) and version_of("dev") == ()


# ---- the configuration -----------------------------------------------------------------------------------------------


def config_of(tmp_path: Path, tiny_model: Path, data: Any, *more: str) -> Any:
    return load_config(small_args(tmp_path, tiny_model, data, *more)).config


def test_weights_go_to_a_server_through_shared_memory(tmp_path: Path, tiny_model: Path, arithmetic_data: Any) -> None:
    local = config_of(tmp_path, tiny_model, arithmetic_data)
    served = config_of(tmp_path, tiny_model, arithmetic_data, "rollout.engine=vllm", f"rollout.python={sys.executable}")
    assert (engine_name(local, "sync"), engine_name(served, "sync")) == ("local", "shm")
    assert served.rollout.engine_options["gpu_memory_utilization"] == 0.5


@each(
    "more, said",
    [
        (["rollout.engine=vllm", "rollout.python=/nowhere/python"], "rollout.python=/nowhere/python: no such file"),
        (["rollout.engine=vllm"], "vllm is not installed beside verl; set rollout.python=ENVIRONMENT/bin/python"),
        (["rollout.python=/bin/sh"], "rollout.python=/bin/sh with rollout.engine=native, which runs in this process"),
        (["rollout.url=http://127.0.0.1:1"], "rollout.url=http://127.0.0.1:1 with rollout.engine=native"),
        (["rollout.engine=server"], "one that runs already: set rollout.url=http://127.0.0.1:PORT"),
        (["rollout.engine=vllm", "rollout.url=http://127.0.0.1:1", "rollout.python=/bin/sh"], "leave one out"),
        (["rollout.engine=vllm", "rollout.url=127.0.0.1:1"], "expected http://HOST:PORT"),
        (["rollout.engine=vllm", "rollout.url=http://10.1.2.3:80"], "through the memory of one machine"),
        (["rollout.engine=vllm", "rollout.url='http://localhost:1,http://localhost:2'"], "set rollout.replicas=2"),
        (["rollout.engine=vllm", "rollout.python=/bin/sh", "sync.engine=disk"], "set sync.engine=shm, or leave it out"),
        (["rollout.engine=vllm", "rollout.python=/bin/sh", "run.deterministic=true"], "run.deterministic=true with"),
        (["rollout.engine=hf", "model.head_dtype=float32"], "head_dtype=float32 with rollout.engine=hf"),
        (["rollout.engine=trtllm", "rollout.python=/bin/sh", "model.head_dtype=float32"], "set rollout.engine=native"),
        (["rollout.engine=vllm", "rollout.url=http://127.0.0.1:1", "model.head_dtype=float32"], "is not started here"),
        (["rollout.engine=vllm", "rollout.engine_options.tensor_paralel_size=2"], "did you mean tensor_parallel_size"),
        (["rollout.engine=vllm", "rollout.engine_options.gpu_memory_utilization=2"], "gpu_memory_utilization=2"),
    ],
)
def test_what_the_configuration_refuses(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any, more: list[str], said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        validate(config_of(tmp_path, tiny_model, arithmetic_data, *more))
    assert said in str(caught.value)
