"""Every row of the table of operations against float64, on random inputs: a new kernel is tested by its row alone.

A case gives the inputs of an operation; its reference is torch's row in float64, or a function here where there is
none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import decode_references as references
import head_references as head
import pytest
import torch
from each import check_each
from torch import Tensor

from verl.accel import costs, plain
from verl.accel.cuda.decode import missing
from verl.accel.operations import COMPILED, Kernel, Use
from verl.accel.table import KERNELS, OPERATIONS, choose, kernels_of, lines_of
from verl.nn.quant import QuantisedTensor, quantise_weight
from verl.wire import FP8_CAPABILITY

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Inputs by random numbers and a size, and what the operation is of them in float64."""

    inputs: Callable[[torch.Generator, int, torch.dtype], Inputs]
    reference: Callable[..., Any] | None = None
    sizes: tuple[int, ...] = (0, 1, 2, 3)
    """Numbers of cases: sizes are drawn from them."""
    changed: tuple[int, ...] = ()
    """The arguments that are changed too."""
    gradient: bool = False


def number(rng: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=rng))


def norm_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    shape = number(rng, 1, 400), (8, 12, 67, 192)[size % 4]
    weight = torch.randn(shape[1], generator=rng, dtype=torch.float64)
    return ((3 * torch.randn(shape, generator=rng)).to(dtype), weight.to(_at_least_float32(dtype)), 1e-5), {}


def gate_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    both = 10 * torch.randn(number(rng, 1, 400), 2 * (1, 12, 67, 192)[size % 4], generator=rng)
    return (both.to(dtype), ("silu", "gelu_tanh")[size % 2]), {}


def swiglu_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    shape = (1, number(rng, 1, 900), (5, 48, 67, 192)[size % 4])
    return tuple(torch.randn(shape, generator=rng).to(dtype) for _ in range(2)), {}


def rotation_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    tokens, dim = number(rng, 1, 90), (2, 8, 24, 128)[size % 4]
    angles = torch.rand(tokens, 1, dim // 2, generator=rng, dtype=torch.float64).repeat(1, 1, 2)
    x = torch.randn(tokens, number(rng, 1, 5), dim, generator=rng)
    return (x.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)), {}


def segment_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """Segments of a prompt: one token, one without a query, some with a past, and one of more than a block."""
    args, rest = references.prompt_attention_inputs(rng, size, dtype)
    return args, {"scale": rest["scale"], "window": rest["window"]}


def sample_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    vocab = (2, 300, 513, 5000)[size % 4]
    logits = (4 * torch.randn(64, vocab, generator=rng)).to(dtype)
    choices = torch.tensor([0.0, 0.6, 1.0, 1.7])
    temperature = choices[torch.randint(0, 4, (64,), generator=rng)]
    return (logits, temperature, torch.rand(64, generator=rng, dtype=torch.float64)), {}


def truncate_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    logits = (4 * torch.randn(3, (2, 30, 75, 300)[size % 4], generator=rng)).to(dtype)
    which = torch.randint(0, 3, (4, 3), generator=rng)
    columns = ((0.0, 0.6, 1.0), (0, 2, 9), (1.0, 0.95, 0.4), (0.0, 0.0, 0.2))
    temperature, k, p, m = (torch.tensor(values)[at] for values, at in zip(columns, which, strict=True))
    return (logits, temperature.double(), k, p.double(), m.double()), {}


def uniforms_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    n = (1, 7, 128, 300)[size % 4]
    ends = torch.iinfo(torch.int64)
    streams = torch.randint(ends.min, ends.max, (n,), generator=rng)
    return (streams, torch.randint(0, 10**6, (n,), generator=rng)), {}


def attention_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    heads, kv_heads = ((4, 4), (4, 2), (6, 1), (8, 2))[size % 4]
    dim, positions = (12, 32, 64, 136)[size % 4], torch.tensor([0, 7, 63, 64, 150])
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, generator=rng)
    keys, values = torch.randn(2, 5, kv_heads, 160, dim, generator=rng).to(dtype).unbind()
    norm = torch.randn(heads + kv_heads, dim, generator=rng) if size % 2 else None
    turns = torch.polar(torch.ones(160, dim // 2), torch.randn(160, dim // 2, generator=rng))
    rest = {
        "heads": heads,
        "eps": 1e-6,
        "scale": dim**-0.5,
        "window": (0, 20)[size // 2 % 2],
        "cap": (0.0, 30.0)[size % 2],
    }
    return (qkv.to(dtype), norm, turns, positions, keys, values), rest


def attention(
    qkv: Tensor, norm: Tensor | None, turns: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
    *, heads: int, eps: float, scale: float, window: int, cap: float,
) -> Tensor:  # fmt: skip
    """One row after the other; writes into keys and values."""
    n, kv_heads, _, dim = keys.shape
    out = []
    for r, at in enumerate(positions.tolist()):
        row = qkv[r].view(-1, dim)
        qk, v = row[: heads + kv_heads], row[heads + kv_heads :]
        if norm is not None:
            qk = torch.nn.functional.rms_norm(qk, (dim,), None, eps) * norm
        qk = torch.view_as_real(torch.view_as_complex(qk.reshape(-1, dim // 2, 2).contiguous()) * turns[at]).flatten(1)
        keys[r, :, at], values[r, :, at] = qk[heads:], v
        lo = max(0, at + 1 - window) if window else 0
        k, v = (t[r, :, lo : at + 1].repeat_interleave(heads // kv_heads, dim=0) for t in (keys, values))
        scores = torch.einsum("hd,htd->ht", qk[:heads], k) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        out.append(torch.einsum("ht,htd->hd", torch.softmax(scores, dim=-1), v).flatten())
    return torch.stack(out)


def delta_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """Rows of one and of several heads per key head, with widths that fill registers and that do not."""
    sizes = ((1, 1, 1, 8, 8), (5, 2, 4, 8, 6), (3, 2, 2, 32, 48), (33, 1, 3, 13, 7))
    (n, key_heads, heads, inner, width), exact = sizes[size % 4], _at_least_float32(dtype)
    channels = 2 * key_heads * inner + heads * width

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=rng).to(of)

    weights = random(4, channels), random(heads, of=exact), random(heads, of=exact), random(width)
    rows = random(n, 3, channels), random(n, heads, inner, width, of=exact)
    return (random(n, channels + heads * width + 2 * heads), *weights, *rows), {"key_heads": key_heads, "eps": 1e-6}


def linear_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    rows, width, out = ((1, 48, 96), (7, 192, 384), (256, 64, 67), (33, 513, 31))[size % 4]
    weight, x = torch.randn(out, width, generator=rng).to(dtype), torch.randn(rows, width, generator=rng).to(dtype)
    return (x, weight, torch.randn(out, generator=rng).to(dtype) if size % 2 else None), {}


def float32_linear_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    return linear_inputs(rng, size, dtype)[0][:2], {}


def wide_product_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """The strides of both products of a head: of its logits, and of its gradient."""
    x, weight, _ = linear_inputs(rng, size, dtype)[0]
    return (x, weight.T) if size % 2 else (x.T.contiguous().T, weight.T.contiguous()), {}


def quantised_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """NF4 with and without double quantisation, int8; whole blocks, and rows that end within one."""
    sizes = (
        (1, 64, 70),
        (300, 64, 96),
        (4, 320, 37),
        (13, 48, 33),
        (3, 4224, 9),
        (2, 192, 129),
        (7, 66, 31),
        (97, 128, 67),
    )
    rows, depth, width = sizes[size % 8]
    weight = torch.randn(width, depth, generator=rng) * depth**-0.5
    quantised = quantise_weight(weight, "int8") if size in (2, 6) else quantise_weight(weight, "nf4", double=size != 5)
    return (torch.randn(rows, depth, generator=rng).to(dtype), quantised, None), {}


def quantised_linear_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    x, weight, _ = quantised_inputs(rng, size, dtype)[0]
    return (x, weight, torch.randn(weight.shape[0], generator=rng).to(dtype) if size % 2 else None), {}


def quantised_back_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    x, weight, _ = quantised_inputs(rng, size, dtype)[0]
    return (torch.randn(len(x), weight.shape[0], generator=rng).to(dtype), weight), {}


def times_quantised(x: Tensor, weight: QuantisedTensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight.dequantised(torch.float32).double(), bias)


def low_rank_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """Whole blocks of rows and a rest, sizes in whole blocks and not, ranks below a vector and above several."""
    rows, into, out, rank = ((1, 48, 16, 1), (77, 24, 40, 8), (200, 8, 64, 65), (33, 20, 12, 19))[size % 4]
    shapes = ((rows, into), (rows, out), (rank, into), (out, rank))
    return (*(torch.randn(*shape, generator=rng).div_(shape[0] ** 0.5).to(dtype) for shape in shapes), 0.5), {}


CASES: Mapping[str, Case] = {
    "rms_norm": Case(norm_inputs),
    "gated": Case(gate_inputs),
    "sample": Case(sample_inputs),
    "truncate": Case(truncate_inputs, changed=(0,)),
    "uniforms": Case(uniforms_inputs),
    "slot_attention": Case(attention_inputs, attention, changed=(4, 5)),
    "delta_step": Case(delta_inputs, changed=(5, 6)),
    "linear": Case(linear_inputs, lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)),
    "page_attention": Case(references.page_attention_inputs, references.page_attention),
    "prompt_attention": Case(references.prompt_attention_inputs, references.prompt_attention),
    "page_prompt_attention": Case(references.page_prompt_attention_inputs, references.page_prompt_attention),
    "rotate_and_store": Case(references.rotate_and_store_inputs, references.rotate_and_store, changed=(5, 6)),
    "add_norm": Case(references.add_norm_inputs, references.add_norm, changed=(0,)),
    "block_linear": Case(references.block_linear_inputs, references.block_linear),
    "expert_products": Case(references.expert_products_inputs, references.expert_products),
    "expert_sum": Case(references.expert_sum_inputs, references.expert_sum),
    "logit_sums": Case(head.logit_sums_inputs, head.logit_sums),
    "logit_gradients": Case(head.logit_gradients_inputs, head.logit_gradients, changed=(0,)),
    "wide_product": Case(wide_product_inputs, torch.matmul),
    "float32_linear": Case(float32_linear_inputs, lambda x, weight: x @ weight.T),
    "quantised_linear": Case(quantised_linear_inputs, times_quantised),
    "quantised_back": Case(quantised_back_inputs, lambda dy, weight: dy @ weight.dequantised(torch.float32).double()),
    "exact_linear": Case(linear_inputs, lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)),
    "trained_attention": Case(segment_inputs, references.prompt_attention, gradient=True),
    "trained_rms_norm": Case(norm_inputs, gradient=True),
    "trained_swiglu": Case(swiglu_inputs, gradient=True),
    "trained_rotation": Case(rotation_inputs, gradient=True),
    "low_rank_gradients": Case(low_rank_inputs),
}
ON = {kind: torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()}


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def moved(value: Any, to: Any) -> Any:
    """A tensor in float64; or on a device, with the tensors of a quantised weight."""
    if is_dataclass(value) and not isinstance(value, type) and isinstance(to, torch.device):
        return replace(value, **{field.name: moved(getattr(value, field.name), to) for field in fields(value)})
    if not isinstance(value, Tensor):
        return value
    if to == torch.float64 and value.is_complex():
        return value.to(torch.complex128)
    return value.to(to) if isinstance(to, torch.device) or value.is_floating_point() else value


def as_function(operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`linear` and `exact_linear` give a layout; its function is the product."""
    if operation not in ("linear", "exact_linear"):
        return call
    return lambda x, weight, bias: call().make(weight, bias)(x)


def compare(ours: Tensor, theirs: Tensor, error: float) -> None:
    torch.testing.assert_close(ours.double().cpu(), theirs.double(), atol=error, rtol=error)


def inputs_of(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int) -> Inputs:
    """The inputs of a case that a kernel takes: without a cap where it computes none."""
    args, rest = CASES[kernel.operation].inputs(torch.Generator().manual_seed(size), size, dtype)
    if "cap" in rest and isinstance(kernel.load(Use(device, dtype, {"capped": 1})), str):
        del rest["cap"]
    return args, rest


def on_device(given: Inputs, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Copies of inputs on a device, for a kernel that may change them."""
    args, rest = given
    mine = [moved(x, device).clone() if isinstance(x, Tensor) else moved(x, device) for x in args]
    return mine, {name: moved(x, device) for name, x in rest.items()}


def check_row(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int) -> None:
    case = CASES[kernel.operation]
    found = kernel.load(Use(device, dtype))
    assert not isinstance(found, str), f"{kernel.operation} by {kernel.name}: {found}"
    reference = case.reference or choose(kernel.operation, Use(torch.device("cpu"), torch.float64)).call  # type: ignore[union-attr]
    call = as_function(kernel.operation, found)
    args, rest = inputs_of(kernel, device, dtype, size)
    if torch.float8_e4m3fn in {x.dtype for x in args if isinstance(x, Tensor)} and missing(device, {}, FP8_CAPABILITY):
        return None  # a card that has the kernel, and no such numbers
    exact = [moved(x, torch.float64) for x in args]
    mine, read = on_device((args, rest), device)
    if case.gradient:
        return check_gradient(kernel, partial(call, **read), partial(reference, **rest), mine, exact, dtype)
    with torch.inference_mode():
        ours, theirs = call(*mine, **read), reference(*exact, **rest)
    if kernel.operation == "sample":
        return check_draw(ours, theirs, exact, kernel.tolerance[dtype])
    compare(ours, theirs, kernel.tolerance[dtype])
    for i in case.changed:
        compare(mine[i], exact[i], kernel.tolerance[dtype])


LEAVES_OF_TWO = ("trained_rms_norm", "trained_swiglu")
LEAVES = {"trained_rotation": 1, "trained_attention": 3}
"""The first arguments that have a gradient; 2 of `LEAVES_OF_TWO`."""


def check_gradient(
    kernel: Kernel, call: Any, reference: Any, mine: list[Any], exact: list[Any], dtype: torch.dtype
) -> None:
    """Values, and gradients of the arguments that have one, for an upstream gradient of numbers."""
    results = []
    for function, args in ((call, mine), (reference, exact)):
        leaves = [x for x in args[: LEAVES.get(kernel.operation, 2)] if isinstance(x, Tensor)]
        for leaf in leaves:
            leaf.requires_grad_()
        out = function(*args)
        if kernel.operation in LEAVES_OF_TWO:  # nn/recompute.py computes it again from these
            saved = out.grad_fn.saved_tensors[:2]
            assert all(torch.equal(x, y) for x, y in zip(saved, args, strict=False))
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(out))])
    for number_of, (ours, theirs) in enumerate(zip(*results, strict=True)):
        summed = number_of == 2 and kernel.operation == "trained_rms_norm"  # over rows
        compare(ours, theirs, kernel.tolerance[dtype] * (40 if summed else 4))


TRAINED_IN_BFLOAT16 = [
    k for k in KERNELS if k.name == COMPILED and k.operation in LEAVES_OF_TWO and torch.bfloat16 in k.tolerance
]


@pytest.mark.parametrize("kernel", TRAINED_IN_BFLOAT16, ids=lambda k: k.operation)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_bfloat16_of_compiled_training_is_rounded_without_bias(kernel: Kernel, scale: float) -> None:
    """Results and gradients are as near float64 as torch's are, and their errors have no common direction: truncation
    in place of rounding to nearest shrinks all of them by some thousandths, which is within every tolerance."""
    use, rng = Use(torch.device("cpu"), torch.bfloat16), torch.Generator().manual_seed(0)
    compiled, torchs = kernel.load(use), choose(kernel.operation, use, without=(COMPILED,))
    if isinstance(compiled, str):
        pytest.skip(compiled)
    assert torchs is not None
    first, second, upstream = (torch.randn(8192, 48, generator=rng).bfloat16() for _ in range(3))
    weight = 0.5 + torch.rand(48, generator=rng)
    given = ((scale * first).bfloat16(), weight, 1e-6) if "norm" in kernel.operation else (scale * first, second)
    results = []
    for call, dtype in ((compiled, None), (torchs.call, None), (torchs.call, torch.float64)):
        args = [x.to(dtype or x.dtype).requires_grad_() if isinstance(x, Tensor) else x for x in given]
        leaves = [x for x in args if isinstance(x, Tensor)]
        out = call(*(x.clone() if isinstance(x, Tensor) else x for x in args))
        results.append([x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, upstream.to(out)))])
    for ours, theirs, exact in zip(*results, strict=True):
        assert (ours - exact).norm() <= 1.03 * (theirs - exact).norm() + 1e-6 * exact.norm()
        assert abs(float(((ours - exact) * exact).sum() / (exact * exact).sum())) < 3e-4


def check_draw(ours: Tensor, theirs: Tensor, exact: list[Tensor], error: float) -> None:
    """A uniform may fall within the rounding of a boundary of two ids."""
    same = (ours[0].cpu() == theirs[0]).double().mean()
    assert same > 0.95
    scaled = exact[0] / torch.where(exact[1] == 0, 1.0, exact[1])[:, None]
    compare(ours[1], torch.log_softmax(scaled, -1).gather(1, ours[0].cpu().long()[:, None])[:, 0], error)


@pytest.mark.on_device
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.operation}-{k.name}")
def test_every_row_is_its_operation(kernel: Kernel) -> None:
    devices = [ON[kind] for kind in kernel.devices or ("cpu",) if kind in ON]
    every = [(device, dtype) for device in devices for dtype in kernel.tolerance]
    if not every:
        pytest.skip(f"{kernel.name} runs on {', '.join(kernel.devices)}, which is not here")
    here = [(d, t) for d, t in every if not isinstance(kernel.load(Use(d, t)), str)]
    if not here:
        pytest.skip(str(kernel.load(Use(*every[0]))))
    check_each([(d, t, n) for d, t in here for n in range(8)], lambda of: check_row(kernel, *of))


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    parts = [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else parts
    return [tensor for part in parts for tensor in tensors_of(part)]


def test_a_kernel_is_given_nothing_that_lies_on_another_device() -> None:
    """A kernel of a GPU fails at a pointer of the host: of a scale, of a sink, within a quantised weight."""
    meta = torch.device("meta")

    def check(kernel: Kernel) -> None:
        for dtype, size in [(dtype, size) for dtype in kernel.tolerance for size in range(8)]:
            given = on_device(inputs_of(kernel, torch.device("cpu"), dtype, size), meta)
            found = tensors_of(given)
            assert found and {tensor.device.type for tensor in found} == {"meta"}

    check_each([k for k in KERNELS if k.devices == ("cuda",)], check, lambda k: f"{k.operation}-{k.name}")


def test_torchs_flash_kernel_takes_every_case() -> None:
    """On the device `meta` it has the shape of its result, and of gradients."""
    meta, ran = torch.device("meta"), 0
    for kernel in (k for k in KERNELS if "meta" in k.devices):
        for size in range(8):
            call = kernel.load(Use(meta, torch.bfloat16))
            assert not isinstance(call, str)
            args, rest = on_device(inputs_of(kernel, meta, torch.bfloat16, size), meta)
            assert call(*args, **rest).shape == args[0].shape
            ran += 1
    assert ran == 2 * 8, "of training and of prompts"


def test_the_compiled_rows_run_where_there_is_a_compiler() -> None:
    rows = [k for k in KERNELS if k.name == COMPILED]
    assert len(rows) >= 7
    for kernel in rows:
        assert callable(kernel.load(Use(torch.device("cpu"), torch.float32)))


def test_every_operation_has_a_case_and_a_cost() -> None:
    assert CASES.keys() == OPERATIONS.keys() == {k.operation for k in KERNELS}
    for name, case in CASES.items():
        args, rest = case.inputs(torch.Generator().manual_seed(0), 1, torch.float32)
        cost = OPERATIONS[name].cost(*args, **rest)
        read = sum(x.nbytes for x in args if isinstance(x, Tensor))
        assert 0 < cost.bytes < 3 * read and cost.flops > 0, name
        half = OPERATIONS[name].cost(*(moved(x, torch.bfloat16) if i < 2 else x for i, x in enumerate(args)), **rest)
        assert half.bytes < cost.bytes or name == "uniforms", name  # which has integers alone
        assert half.flops == cost.flops, name


def test_costs_are_of_what_is_read_and_written() -> None:
    x, weight = torch.empty(3, 8, device="meta"), torch.empty(5, 8, device="meta")
    assert (cost := costs.linear_cost(x, weight)).bytes == 4 * (3 * 8 + 5 * 8 + 3 * 5) and cost.flops == 2 * 3 * 8 * 5
    assert costs.rms_norm_cost(x, weight[0], 1e-6).bytes == 4 * (2 * 3 * 8 + 8)
    qkv, keys = torch.empty(2, 4 * 6), torch.empty(2, 1, 100, 6)
    given = qkv, None, torch.empty(100, 3), torch.tensor([9, 19]), keys, keys
    cost = costs.slot_attention_cost(*given, heads=2, eps=1e-6, scale=1.0)
    narrow = costs.slot_attention_cost(*given, heads=2, eps=1e-6, scale=1.0, window=5)
    assert cost.bytes - narrow.bytes == 2 * (30 - 10) * 6 * 4


def test_the_first_row_that_loads_is_chosen_and_the_reasons_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use = Use(torch.device("cpu"), torch.float32)
    assert choose("rms_norm", use).kernel.name == COMPILED  # type: ignore[union-attr]
    assert choose("rms_norm", use, without=(COMPILED,)).call is plain.plain_rms_norm  # type: ignore[union-attr]
    assert choose("rms_norm", Use(torch.device("meta"), torch.bfloat16)).kernel.name == "torch"  # type: ignore[union-attr]
    assert choose("slot_attention", Use(torch.device("cpu"), torch.float64)) is None
    monkeypatch.setattr("verl.accel.cpu.rows.load_kernels", lambda dtype: "no C compiler here")
    fallen = choose("rms_norm", use)
    assert fallen is not None and fallen.kernel.name == "torch"
    assert dict(fallen.passed_over) == {COMPILED: "no C compiler here"}
    lines = lines_of(torch.device("cpu"), torch.float32)
    assert f"rms_norm: torch (not {COMPILED}: no C compiler here)" in lines
    none = next(line for line in lines if line.startswith("slot_attention: none"))
    assert "no C compiler here" in none
    with pytest.raises(KeyError, match="no operation rms"):
        kernels_of("rms", use)
