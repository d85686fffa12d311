"""The whole native engine with pages through the Triton kernels, in Triton's interpreter, against transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from each import matrix
from interpreted import Launches, fix_bf16_products, interpreted_ops
from on_device import DEVICE, close_to
from rollouts import draws_of, finish, native_core
from test_rollout_numerics import CONFIGS, SIZES, engine, logprobs_of, reference
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.cuda import attention, blocks, decode, prompts, skinny
from verl.accel.cuda.rows import KERNELS
from verl.accel.linear import Plain, SingleProducts
from verl.accel.operations import Use
from verl.accel.table import OPERATIONS, decode_launches
from verl.nn.fp8 import as_computed
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import DecodeRows, EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import paged
from verl.rollout.native.engine import slower_notes
from verl.rollout.native.fused import decode_hidden
from verl.rollout.native.model import Model
from verl.rollout.native.ops import DecodeOps, choose_block_linear, choose_decode_ops, choose_ops
from verl.rollout.native.sets import NO_SET, LiveSets
from verl.rollout.native.weights import Storage, weights_of
from verl.types import Sampling
from verl.weight_sync.wire_format import wire_tensors
from verl.wire import FP8_CAPABILITY, WireFormat

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
FAMILIES = ("qwen3", "qwen2", "llama mqa", "mistral narrow window", "gemma2", "gemma3", "qwen3 moe")
PAGE = 16


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", PAGE)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))
    fix_bf16_products(monkeypatch)


def fused(config: Any, module: Any, **options: Any) -> EngineCore:
    kernels = {"paged": True, "decode_ops": interpreted_ops()}
    core = engine(config, module, rows=5, compiled=False, layout="plain", **kernels, **options)
    assert core.runner._paged is not None and core.runner._paged._ops is not None
    return core


def answers(core: EngineCore, sampling: Sampling, lengths: tuple[int, ...] = (31, 5, 1)) -> dict[str, tuple[Any, Any]]:
    """Prompts of these lengths and their completions. Three rows decode in a bucket of four, then of two and one."""
    prompts = {str(i): np.random.default_rng(i).integers(0, 67, n) for i, n in enumerate(lengths)}
    tokens = {str(i): sampling.max_tokens - 2 * i for i in range(len(lengths))}
    asked = (
        ActiveRequest(GenerateRequest(i, prompts[i], Sampling(max_tokens=n, temperature=sampling.temperature, seed=3)))
        for i, n in tokens.items()
    )
    return {i: (prompts[i], completion) for i, completion in finish(core, asked).items()}


def exact(module: Any, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs by transformers in float64."""
    module.set_experts_implementation("eager")  # its grouped product knows no float64
    logits = module.double()(torch.from_numpy(np.concatenate([prompt, ids]))[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()


@pytest.mark.on_device
@matrix("name", FAMILIES, quick=("qwen3", "gemma2"))
def test_every_family_equals_transformers(name: str) -> None:
    """Over the end of a page (16 and 32 tokens), within and beyond a window of 24."""
    module = reference(CONFIGS[name])
    for prompt, completion in answers(fused(CONFIGS[name], module), Sampling(max_tokens=6, temperature=0.7)).values():
        np.testing.assert_allclose(
            completion.logprobs, exact(module, prompt, completion.ids, 0.7), atol=close_to(1e-6), rtol=5e-7
        )


@pytest.mark.on_device
@matrix("name", ["mistral narrow window", "gemma2", "qwen3"])
def test_prompts_in_several_passes_equal_transformers(name: str) -> None:
    """Windows, capped scores, and passes of 16 tokens, of which the second one has a past."""
    module = reference(CONFIGS[name])
    core, used = fused(CONFIGS[name], module, max_prefill_tokens=16, prompts=((), ())), []  # on a GPU too
    kernel = prompts.attend_prompts
    core.runner.model.prompt_attention = lambda *args, **read: used.append(len(args[3])) or kernel(*args, **read)
    for prompt, completion in answers(core, Sampling(max_tokens=5, temperature=0.7)).values():
        np.testing.assert_allclose(
            completion.logprobs, exact(module, prompt, completion.ids, 0.7), atol=close_to(1e-6), rtol=5e-7
        )
    assert used and max(used) == 3, "several prompts are one call"


def in_8_bits(module: Any, form: WireFormat) -> Any:
    """The weights of a module as they are sent in blocks of 8 bits; the module gets the dequantised ones."""
    sent = [pair for name, t in module.state_dict().items() for pair in wire_tensors(form, name, t)]
    for name, parameter in module.named_parameters():
        parameter.data = as_computed(name, parameter, torch.float32, fp8=True)
    return SimpleNamespace(version=0, passes=False, seconds={}, tensors=lambda: iter(sent))


WIDE = {**SIZES, "hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 4, "num_key_value_heads": 1}


@pytest.mark.on_device
@matrix("name", ["blocks", "qwen2", "gemma2", "qwen3 moe"])
def test_weights_in_8_bits_equal_transformers(name: str) -> None:
    """Fused projections that are no multiple of a block, and (blocks) heads of 160, whose RoPE pairs are in two."""
    if reason := decode.missing(DEVICE, {}, FP8_CAPABILITY):
        pytest.skip(reason)
    config = CONFIGS.get(name) or Qwen3Config(**WIDE, head_dim=160, tie_word_embeddings=False)
    module = reference(config)
    source = in_8_bits(module, WireFormat("float32", fp8=True))
    kernels = {"paged": True, "decode_ops": interpreted_ops(), "block_linear": blocks.block_product}
    core = native_core(config, source, rows=5, compiled=False, layout="plain", fp8=True, **kernels)
    assert sum(t.dtype == torch.float8_e4m3fn for t in core.runner.model.live.tensors) == 4 * config.num_hidden_layers
    for prompt, completion in answers(core, Sampling(max_tokens=6, temperature=0.7)).values():
        np.testing.assert_allclose(
            completion.logprobs, exact(module, prompt, completion.ids, 0.7), atol=close_to(2e-6), rtol=2e-6
        )


def test_a_version_in_8_bits_replaces_another_one_in_its_memory() -> None:
    """Values, scales and norms are written where graphs read them."""
    config = CONFIGS["qwen3 moe"]
    modules = [reference(config) for _ in range(2)]
    for parameter in modules[1].parameters():
        parameter.data = 3 * torch.randn_like(parameter)
    form = WireFormat("float32", fp8=True)
    first, second = (in_8_bits(module, form) for module in modules)
    kernels = {"paged": True, "decode_ops": interpreted_ops(), "block_linear": blocks.block_product}
    core, fresh = (
        native_core(config, one, rows=5, compiled=False, layout="plain", fp8=True, **kernels) for one in (first, second)
    )
    before = [t.data_ptr() for t in core.runner.model.live.tensors]
    core.load(second)
    assert before == [t.data_ptr() for t in core.runner.model.live.tensors]
    sampling = Sampling(max_tokens=5, temperature=0.7)
    for (_, ours), (_, theirs) in zip(answers(core, sampling).values(), answers(fresh, sampling).values(), strict=True):
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


@pytest.mark.parametrize("spoilt,match", [("values", "weights in blocks of FP8 were expected"), ("scales", "missing")])
def test_a_version_in_8_bits_is_whole(spoilt: str, match: str) -> None:
    source = in_8_bits(reference(CONFIGS["qwen3"]), WireFormat("float32", fp8=True))
    name = "model.layers.0.self_attn.q_proj.weight"
    sent = dict(source.tensors())
    if spoilt == "values":
        sent[name] = sent[name].bfloat16()
    else:
        del sent[f"{name}_scale_inv"]
    source.tensors = sent.items
    kernels = {"paged": True, "decode_ops": interpreted_ops(), "block_linear": blocks.block_product}
    with pytest.raises(ValueError, match=match):
        native_core(CONFIGS["qwen3"], source, rows=5, compiled=False, layout="plain", fp8=True, **kernels)


@pytest.mark.slow
def test_a_row_in_several_parts_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts of 64 keys, and three."""
    monkeypatch.setattr(attention, "KEYS_PER_SPLIT", 64)
    module = reference(CONFIGS["qwen3"])
    core = fused(CONFIGS["qwen3"], module, max_context_tokens=512, max_prefill_tokens=512)
    for prompt, completion in answers(core, Sampling(max_tokens=6, temperature=0.0), (300, 254)).values():
        np.testing.assert_allclose(completion.logprobs, exact(module, prompt, completion.ids, 1.0), atol=close_to(1e-6))


@pytest.mark.on_device
def test_rows_with_top_k_are_part_of_the_step() -> None:
    """Beside a row without it, with the draws of the host."""
    module, rng = reference(CONFIGS["qwen3"]), np.random.default_rng(0)
    prompts, drawn = [rng.integers(0, 67, 9) for _ in range(2)], []
    plain = engine(CONFIGS["qwen3"], module, rows=5, compiled=False, layout="plain")
    for core in (fused(CONFIGS["qwen3"], module), plain):
        settings = (Sampling(max_tokens=4, seed=i, temperature=1.5, top_k=3 * i, top_p=1 - 0.2 * i) for i in range(2))
        asked = (GenerateRequest(str(i), prompts[i], s) for i, s in enumerate(settings))
        drawn.append(finish(core, map(ActiveRequest, asked)))
    for name, one in drawn[1].items():
        assert drawn[0][name].ids.tolist() == one.ids.tolist()
        np.testing.assert_allclose(drawn[0][name].logprobs, one.logprobs, atol=2e-6)


@matrix("name", ["qwen3", "gemma2"])
def test_bfloat16_is_as_far_from_float32_as_the_plain_path(name: str) -> None:
    """Norms are rounded at the same places, so bf16 through the kernels is not a coarser bf16."""
    module, rounded = (reference(CONFIGS[name], torch.bfloat16) for _ in range(2))
    plain = engine(CONFIGS[name], rounded, rows=5, dtype=torch.bfloat16, emulate_bf16=False, compiled=False,
                   layout="plain", paged=name != "gemma2")  # fmt: skip
    core = fused(CONFIGS[name], rounded, dtype=torch.bfloat16, emulate_bf16=False)
    errors = []
    for one in (core, plain):
        found = answers(one, Sampling(max_tokens=6, temperature=1.0)).values()
        off = [completion.logprobs - logprobs_of(module, prompt, completion.ids, 1.0) for prompt, completion in found]
        errors.append(float(np.sqrt(np.mean(np.concatenate(off) ** 2))))
    assert errors[0] < 1.3 * errors[1], errors


SPLIT = SingleProducts(skinny.Measured(None).make, keeps=True)
"""Products with a depth that is split at every number of rows up to 16."""


def recorded_step(
    name: str, rows: int, max_context_tokens: int, patch: pytest.MonkeyPatch, products: SingleProducts | None = None
) -> list[str]:
    """The launches of one decode step of `rows` rows at position 40. products: None: those of torch"""
    if products is not None:
        patch.setattr("rollouts.products_of", lambda layout: products)
    core = fused(CONFIGS[name], reference(CONFIGS[name]), max_context_tokens=max_context_tokens)
    step = core.runner._paged
    kv = torch.zeros(len(CONFIGS[name].to_dict().get("layer_types") or (0, 0)), 2, step._model.shape.kv_heads, 40,
                     step._model.shape.head_dim)  # fmt: skip
    step.cache.fill(0, rows, kv)
    step.cache.extend(np.full(rows, 40), step._transfers[0].table)
    step._model.rotary.reserve(max_context_tokens)
    step._inputs[3] = 40
    with torch.inference_mode(), Launches(patch) as launches:
        step._sample(paged.StepShape(rows, step.cache.table.shape[1], 0, False))
    return launches.names


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma2", "gemma3", "mistral window"])
@pytest.mark.parametrize("max_context_tokens", [256, 512])
def test_a_layer_is_ten_launches_at_most(name: str, max_context_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one part per row (256 tokens) nine, since nothing is merged."""
    names = recorded_step(name, 1, max_context_tokens, monkeypatch)
    layers = CONFIGS[name].num_hidden_layers
    merged = max_context_tokens > 256
    assert names.count("_attend_part") == names.count("_rotate_and_store") == names.count("_gated") == layers
    assert names.count("_merge_parts") == merged * layers and names.count("_add_norm") == 2 * layers + 1
    assert sum(n in ("mm", "addmm", "addmm_") for n in names) == 4 * layers + 1
    once = {"index_select", "mul_", "div_", "tanh_", "_truncate", "_draw_uniforms", "_reduce_block", "_draw"}
    assert len([n for n in names if n not in once]) == (9 + merged) * layers + 2, names
    monkeypatch.setattr("verl.accel.cuda.rows.missing", lambda device, sizes, least=None: None)
    use = Use(torch.device("cuda"), torch.float32)
    assert decode_launches(use, split=False) == (10, 12) and decode_launches(use) == (10 + 4, 12 + 1), "sums of parts"
    assert sum(n in once for n in names) <= 10  # embedding and its scale, tokens, cap, draw


def test_a_layer_of_split_products_is_fourteen_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of ten is that of plain products: each that is split has a sum of its parts."""
    for name, value in {"LEAST_DEPTH": 16, "BLOCK_BYTES": 64, "COLUMNS": 16}.items():
        monkeypatch.setattr(skinny, name, value)
    plain, split = ([*recorded_step("qwen3", 1, 512, monkeypatch, layout)] for layout in (None, SPLIT))
    layers = CONFIGS["qwen3"].num_hidden_layers
    assert split.count("_sum_parts") == split.count("_product_part") == 4 * layers + 1 and "mm" not in split
    assert len(split) == len(plain) + 4 * layers + 1


class Declared(TorchDispatchMode):
    """Adds up what products of torch and operations of the table have to move, and computes nothing: on `meta`."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self.bytes, self._positions = 0.0, positions
        self._rows = {row.operation: row for row in KERNELS}

    def ops(self) -> DecodeOps:
        """The operations of a decode step, with results of the right size."""
        results = {
            "page_attention": lambda q, *rest: q,
            "page_prompt_attention": lambda q, *rest: q,
            "rotate_and_store": lambda qkv, norm, turns, at, table, keys, *rest: qkv.new_empty(
                len(qkv), qkv.shape[1] // keys.shape[3] - 2 * keys.shape[2], keys.shape[3]
            ),
            "add_norm": lambda residual, *rest: residual,
            "gated": lambda both, activation: both[:, : both.shape[1] // 2].contiguous(),
            "truncate": lambda logits, *rest: logits,
            "uniforms": lambda streams, positions: streams.double(),
            "sample": lambda logits, *rest: logits.new_empty(2, len(logits)),
            "expert_products": lambda x, weights, order, *rest: x.new_empty(len(order), weights.shape[1]),
            "expert_sum": lambda each, share: each.new_empty(len(share), each.shape[1]),
        }

        return DecodeOps(**{name: self.counted(name, result) for name, result in results.items()})

    def counted(self, name: str, result: Any) -> Any:
        """The operation, with a result of the right size."""

        def call(*args: Any, **named: Any) -> Any:
            args = tuple(self._positions if i == 4 and name == "page_attention" else a for i, a in enumerate(args))
            if name not in ("expert_products", "page_prompt_attention"):  # only the device knows their numbers of rows
                self.bytes += self._rows[name].traffic * OPERATIONS[name].cost(*args, **named).bytes
            return result(*args)

        return call

    def block_linear(self) -> Any:
        return self.counted("block_linear", lambda x, values, *rest: x.new_empty(len(x), len(values)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name.removeprefix("aten::") in ("mm", "addmm", "index_select"):
            read = args[1:] if "mm" in str(function) else (result,)  # an embedding reads its rows
            self.bytes += result.nbytes + sum(a.nbytes for a in read if isinstance(a, torch.Tensor))
            self.bytes += args[0].nbytes if function._schema.name == "aten::mm" else 0
        return result


class SplitBytes(Plain):
    """A product that is split as on an H100, where it may be: its parts are written and read in float32."""

    declared: Declared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        depth, width = self.transposed.shape
        parts = skinny.depth_parts_of(width, depth, 132)
        if parts > 1 and len(x) <= skinny.ROWS:
            self.declared.bytes += 2 * 4 * parts * len(x) * width
        return super().__call__(x)


@pytest.mark.parametrize("kind", ["plain", "fp8", "split"])
@pytest.mark.parametrize("rows,tokens", [(1, 512), (16, 1024), (16, 512), (16, 128), (64, 1024), (256, 512)])
def test_a_step_moves_little_beside_weights_and_kv(rows: int, tokens: int, kind: str, monkeypatch: Any) -> None:
    """A decode step of Qwen3-0.6B in bf16, by what its operations declare. In 8 bits the weights of layers are half,
    with scales and their rows 0.5% more. Products that are split add their parts, most for 16 rows: with few keys they
    are above the limit of the others."""
    fp8 = kind == "fp8"
    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(**sizes, head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True)
    meta, dtype = torch.device("meta"), torch.bfloat16
    at = torch.zeros(rows, dtype=torch.int64, device=meta)
    declared = Declared(torch.full((rows,), tokens - 1))
    monkeypatch.setattr(SplitBytes, "declared", declared, raising=False)
    layout = SingleProducts(SplitBytes if kind == "split" else Plain, keeps=True)
    products = {"products": layout, "block_linear": declared.block_linear() if fp8 else None}
    ops = choose_ops(torch.device("cpu"), dtype, compiled=False, **products)
    model = Model(config, 4096, meta)
    model.weights = weights_of(Storage(model.shape, dtype, dtype, meta, blocks=fp8), ops)
    model.rotary.reserve(4096)
    pool = torch.empty(28, 2, 1 + rows * tokens // 256, 256, 8, 128, dtype=dtype, device=meta)
    with declared:
        table = torch.zeros(rows, tokens // 256, dtype=torch.int32, device=meta)
        hidden = decode_hidden(declared.ops(), model, pool, table, at, at)
        ops_of = declared.ops()
        logits = ops_of.truncate(model.live.logits(hidden), at.double(), at, at.double(), at.double())
        ops_of.sample(logits, at.double(), ops_of.uniforms(at, at))
    weights = sum(tensor.nbytes for tensor in model.live.tensors)
    kv = 2 * 28 * 8 * 128 * 2 * rows * tokens
    layers = 28 * (4096 * 1024 + 1024 * 2048 + 3 * 1024 * 3072)
    assert (weights > 1.19e9 or fp8) and declared.bytes > weights + kv
    assert not fp8 or 2 * 151936 * 1024 + layers < weights < 2 * 151936 * 1024 + 1.005 * layers
    short = kind == "split" and rows > 1 and tokens < 1024
    assert declared.bytes < (1.21 if short else 1.15) * (weights + kv), declared.bytes / (weights + kv)


def launched_on_meta(
    name: str, ops: DecodeOps | None, patch: pytest.MonkeyPatch, block_linear: Any = None
) -> list[torch.Tensor]:
    """Return the transfers to the host in two steps, of which the second takes the tokens of the first. On the device
    `meta` there is nothing to read: a copy to the host, the value of a tensor, or a shape that depends on values raises
    an error."""
    meta, dtype, sent = torch.device("meta"), torch.bfloat16, list[torch.Tensor]()
    products = {"products": SingleProducts(Plain, keeps=True), "block_linear": block_linear}
    plain = choose_ops(torch.device("cpu"), dtype, compiled=False, **products)
    model = Model(CONFIGS[name], 256, meta)
    model.weights = weights_of(Storage(model.shape, dtype, dtype, meta, blocks=block_linear is not None), plain)
    cache = paged.PageCache(model.shape, dtype, meta, 3, 256, 3 * 256)
    s = model.shape
    cache.fill(0, 3, torch.empty(s.layers, 2, s.kv_heads, 20, s.head_dim, dtype=dtype, device=meta))
    sets = LiveSets(model.shape, plain.products, dtype, dtype, meta, stacks=True)
    step = paged.PagedDecode(model, cache, dtype, 3, 256, ops, sets)
    patch.setattr(paged.Transfers, "receive", lambda host, both: sent.append(both))
    drawn = draws_of(np.full(3, 0.5), 1.0, [0, 0, 5 if ops else 0])
    tokens, none = np.zeros(3, np.int64), np.full(3, NO_SET)
    step.launch(DecodeRows(tokens, np.full(3, 20), None, drawn), none)
    step.launch(DecodeRows(tokens, np.array([21, -1, 21]), np.array([0, 1, -1]), drawn), none)
    return sent


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is copied to the host are the ids and log-probs, after the step."""
    sent = launched_on_meta(name, Declared(torch.full((4,), 20)).ops(), monkeypatch)
    assert [(both.shape, both.device.type) for both in sent] == [((2, 3), "meta")] * 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3 moe"])
def test_a_step_of_weights_in_8_bits_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = Declared(torch.full((4,), 20))
    assert len(launched_on_meta(name, declared.ops(), monkeypatch, declared.block_linear())) == 2


def test_a_step_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels, experts read on the host how many rows each of them got."""
    with pytest.raises((RuntimeError, NotImplementedError), match="bincount"):
        launched_on_meta("qwen3 moe", None, monkeypatch)
    assert len(launched_on_meta("qwen3", None, monkeypatch)) == 2


def test_what_the_kernels_lack_has_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda, cpu, sizes = torch.device("cuda"), torch.device("cpu"), {"head_dim": 128, "hidden": 4096, "page": 256}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert decode.missing(cpu, sizes) is None
    assert "compute capability 7.5, below 8.0" in str(choose_decode_ops(Use(cuda, torch.bfloat16, sizes)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert isinstance(choose_decode_ops(Use(cuda, torch.bfloat16, sizes)), DecodeOps)
    for changed, reason in (
        ({"head_dim": 512}, "head_dim=512: the kernels compute even sizes up to 256"),
        ({"hidden": 20000}, "hidden_size=20000"),
        ({"page": 24}, "pages of 24 tokens"),
    ):
        assert reason in str(choose_decode_ops(Use(cuda, torch.bfloat16, {**sizes, **changed})))
    assert "compute capability 8.0, below 8.9" in str(choose_block_linear(Use(cuda, torch.bfloat16)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose_block_linear(Use(cuda, torch.bfloat16)) is blocks.block_product
    assert "no product with such weights in torch.float32" in str(choose_block_linear(Use(cuda, torch.float32)))
    assert "no kernel of page_attention" in str(choose_decode_ops(Use(cuda, torch.float64, sizes)))
    assert "no kernel of page_attention" in str(choose_decode_ops(Use(cpu, torch.float32, sizes)))
    monkeypatch.setattr(decode.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert f"{tmp_path}/Python.h is missing" in str(choose_decode_ops(Use(cuda, torch.bfloat16, sizes)))
    for given in (str(tmp_path / "gcc"), ""):
        monkeypatch.setenv("CC", given)
        assert f"CC={given} is not a program" in str(choose_decode_ops(Use(cuda, torch.bfloat16, sizes)))
    monkeypatch.delenv("CC")
    monkeypatch.setattr(decode.shutil, "which", lambda name: None)
    assert "no C compiler" in str(choose_decode_ops(Use(cuda, torch.bfloat16, sizes)))
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    reason = choose_decode_ops(Use(cuda, torch.bfloat16, sizes))
    assert isinstance(reason, str) and "Triton is not installed" in reason
    assert slower_notes({"compiled kernels": None, "the decode kernels": reason}) == (
        f"rollout: slower without the decode kernels ({reason})",
    )
