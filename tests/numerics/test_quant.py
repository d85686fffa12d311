"""Quantised weights are those of bitsandbytes: codes, scales, values, and checkpoints both ways."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import pad

from verl.accel.cpu import nf4
from verl.accel.cpu.kernels import load_kernels
from verl.accel.cpu.nf4 import rows_linear
from verl.accel.plain import plain_quantised_linear
from verl.nn.quant import STATE, Int8, Nf4, code_values, quantise_weight, read_quantised

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def bitsandbytes(reference):
    """The package that `make reference-packages` installs, which computes what these tests compare with."""
    return reference("bitsandbytes")


def weights(dtype):
    """Ordinary, tiny, spiked and zero values; whole blocks, a part of a block, an odd number of values."""
    torch.manual_seed(0)
    yield torch.randn(256, 192).to(dtype)
    yield (torch.randn(96, 64) * 0.02).to(dtype)
    yield torch.randn(7, 45).to(dtype)
    yield torch.randn(7, 46).to(dtype)
    spiked = torch.randn(130, 128) * torch.logspace(-4, 2, 130)[:, None]
    spiked[3], spiked[5, 7] = 0.0, 300.0
    yield spiked.to(dtype)
    yield torch.linspace(-1, 1, 1601 * 1024).view(1601, 1024).to(dtype)  # more than is quantised together


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("double", [True, False])
def test_nf4_is_that_of_bitsandbytes(bitsandbytes, dtype, double):
    for weight in weights(dtype):
        codes, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
        ours = quantise_weight(weight, "nf4", double=double)
        assert isinstance(ours, Nf4)
        assert torch.equal(ours.codes, codes.flatten()) and torch.equal(ours.absmax, state.absmax)
        if double:
            assert torch.equal(ours.nested.absmax, state.state2.absmax) and ours.nested.offset == state.offset.item()
            assert torch.equal(ours.nested.values, state.state2.code)
        if weight.shape[1] % 2:  # bitsandbytes compiles its function for these, which takes a minute
            longer = quantise_weight(pad(weight.view(-1), (0, 1)), "nf4", double=double).dequantised()
            assert torch.equal(ours.dequantised().view(-1), longer[:-1])
            continue
        assert torch.equal(ours.dequantised(), bitsandbytes.functional.dequantize_4bit(codes, state))
        for other in FLOATS:
            state.dtype = other
            theirs = bitsandbytes.functional.dequantize_4bit(codes, state)
            assert theirs.dtype == other and torch.equal(ours.dequantised(other), theirs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_is_that_of_bitsandbytes(bitsandbytes, dtype):
    for weight in weights(dtype):
        param = bitsandbytes.nn.Int8Params(weight, requires_grad=False).to("cpu")
        ours = quantise_weight(weight, "int8")
        assert isinstance(ours, Int8)
        assert torch.equal(ours.codes, param.CB) and torch.equal(ours.absmax, param.SCB)
        theirs = bitsandbytes.functional.int8_vectorwise_dequant(param.CB, param.SCB)
        for other in FLOATS:
            assert torch.equal(ours.dequantised(other), theirs.to(other))


def quantised_layer(bitsandbytes, kind, weight, bias):
    """A layer of bitsandbytes that holds a quantised weight."""
    outputs, inputs = weight.shape
    if kind == "nf4":
        layer = bitsandbytes.nn.Linear4bit(inputs, outputs, compress_statistics=True, quant_type="nf4")
    else:
        layer = bitsandbytes.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False)
    layer.load_state_dict({"weight": weight, "bias": bias}, strict=False)
    return layer.to("cpu")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_checkpoints_are_those_of_bitsandbytes(bitsandbytes, kind, tmp_path):
    weight, bias = next(weights(torch.float32)), torch.randn(256)
    theirs = nn.ModuleDict({"proj": quantised_layer(bitsandbytes, kind, weight, bias)}).state_dict()
    ours = {f"proj.{name}": t for name, t in quantise_weight(weight, kind).tensors().items()}
    assert theirs.keys() - ours.keys() == {"proj.bias"} and ours.keys() <= theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    save_file(ours, tmp_path / "ours.safetensors")
    save_file(theirs, tmp_path / "theirs.safetensors")
    read = [load_file(tmp_path / f"{side}.safetensors") for side in ("ours", "theirs")]
    values = [read_quantised("proj", found.__getitem__, found).dequantised(torch.float32) for found in read]
    assert torch.equal(*values) and torch.equal(values[0], quantise_weight(weight, kind).dequantised(torch.float32))


def test_bitsandbytes_reads_what_is_written_here(bitsandbytes):
    weight = next(weights(torch.float32))
    ours = quantise_weight(weight, "nf4")
    found = {name.removeprefix("weight."): t for name, t in ours.tensors().items()}
    codes = found.pop("weight")
    param = bitsandbytes.nn.Params4bit.from_prequantized(codes, found, device="cpu")
    assert torch.equal(bitsandbytes.functional.dequantize_4bit(param.data, param.quant_state), ours.dequantised())


def test_codes_without_a_reference():
    """By hand, where bitsandbytes is not installed: levels, halves of a byte, the last block, scales."""
    weight = torch.zeros(1, 66)
    weight[0, :4], weight[0, 64:] = torch.tensor([-2.0, 2.0, 0.9, 0.1]), torch.tensor([0.5, -0.5])
    ours = quantise_weight(weight, "nf4", double=False)
    assert ours.absmax.tolist() == [2.0, 0.5] and ours.codes[:2].tolist() == [0x0F, 12 << 4 | 8]
    assert ours.codes[2:32].tolist() == [0x77] * 30 and ours.codes[32].item() == 0xF0
    values = ours.dequantised()
    assert values[0, 0] == -2 and values[0, 2] == 2 * torch.tensor(0.44070982933044434) and not values[0, 4:64].any()
    double = quantise_weight(torch.ones(4, 64 * 300), "nf4")
    assert double.nested is not None and double.nested.offset == 1 and not double.absmax.any()
    assert torch.equal(double.dequantised(), torch.ones(4, 64 * 300))
    assert len(code_values(signed=True)) == 256
    rows = quantise_weight(torch.tensor([[1.0, -0.5], [0.0, 0.0]]), "int8")
    assert rows.codes.tolist() == [[127, -64], [0, 0]] and rows.absmax.tolist() == [1.0, 0.0]


def test_other_weights_and_formats_are_refused():
    weight = torch.randn(4, 64)
    for kind in ("nf4", "int8"):
        for bad in (float("nan"), float("inf")):
            wrong = weight.clone()
            wrong[2, 3] = bad
            with pytest.raises(ValueError, match=r"q_proj has values that are not finite"):
                quantise_weight(wrong, kind, name="q_proj")
        with pytest.raises(ValueError, match="only floating-point"):
            quantise_weight(weight.int(), kind)
    with pytest.raises(ValueError, match="quantise it as nf4"):
        quantise_weight(torch.randn(2, 4, 64), "int8")

    def read(found):
        return read_quantised("proj", found.__getitem__, found)

    good = {f"proj.{name}": t for name, t in quantise_weight(weight, "nf4").tensors().items()}
    assert torch.equal(read(good).dequantised(), quantise_weight(weight, "nf4").dequantised())
    with pytest.raises(ValueError, match="not quantised by bitsandbytes"):
        read({"proj.weight": weight})
    with pytest.raises(ValueError, match="quantised as fp4: quantise the model as nf4"):
        read({"proj.weight": weight, "proj.weight.quant_state.bitsandbytes__fp4": weight})
    with pytest.raises(ValueError, match="a layout of old GPUs"):
        read({"proj.weight": weight, "proj.SCB": weight, "proj.weight_format": torch.tensor(2)})
    wrong = (
        ("blocksize", 128, "blocks of 128"),
        ("nested_blocksize", 64, "scales in blocks"),
        ("shape", [8, 64], "shape"),
    )
    for key, value, match in wrong:
        state = json.loads(bytes(good[f"proj.{STATE}"].tolist())) | {key: value}
        with pytest.raises(ValueError, match=match):
            read(good | {f"proj.{STATE}": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)})


@pytest.fixture
def kernels():
    found = load_kernels(torch.float32)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def test_compiled_rows_have_the_bits_of_the_codes_values(kernels):
    """dy = 1 in one row: the product is that row of the weight, which is dequantised in C."""
    for width, depth, double in ((70, 64, True), (37, 4224, True), (33, 48, False), (31, 66, True)):
        for kind in ("nf4", "int8"):
            weight = quantise_weight(torch.randn(width, depth), kind, double=double)
            rows = nf4.quantised_back(torch.eye(width), weight, kernels=kernels)
            assert torch.equal(rows, weight.dequantised(torch.float32))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_compiled_products_of_a_row_do_not_depend_on_the_others(kernels, kind):
    for depth in (192, 66):
        x, weight = torch.randn(61, depth), quantise_weight(torch.randn(50, depth), kind)
        whole = nf4.quantised_linear(x, weight, None, kernels=kernels)
        for n in (1, 2, 3, 4, 5, 6, 7, 13, 48, 49):
            assert torch.equal(nf4.quantised_linear(x[:n], weight, None, kernels=kernels), whole[:n]), n


BY_BYTES = """
import torch
from verl.accel.cpu import nf4
from verl.accel.cpu.kernels import load_kernels
from verl.nn.quant import quantise_weight
kernels = load_kernels(torch.float32)
assert kernels.panel_width == 16, kernels
torch.manual_seed(0)
for width, depth, double in ((37, 192, True), (20, 4224, True), (33, 64, False)):
    weight, x = quantise_weight(torch.randn(width, depth), "nf4", double=double), torch.randn(49, depth)
    values = weight.dequantised(torch.float32)
    assert torch.equal(nf4.quantised_back(torch.eye(width), weight, kernels=kernels), values)
    whole = nf4.quantised_linear(x, weight, None, kernels=kernels)
    torch.testing.assert_close(whole.double(), x.double() @ values.double().T, atol=1e-5 * depth**0.5, rtol=1e-6)
    for n in (1, 2, 3, 4, 5, 6, 7, 13, 48):
        assert torch.equal(nf4.quantised_linear(x[:n], weight, None, kernels=kernels), whole[:n]), n
"""


def test_products_with_avx2_alone_have_the_values_of_the_codes():
    """On a machine with AVX-512: compiled without it, as most machines do."""
    if shutil.which("gcc") is None or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("gcc and a CPU with AVX-512")
    env = os.environ | {"CC": "gcc -mno-avx512f"}
    done = subprocess.run([sys.executable, "-c", BY_BYTES], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_compiled_products_go_into_columns_with_bias_residual_and_the_order_of_rope(kernels):
    x, bias, weight = torch.randn(5, 64), torch.randn(24), quantise_weight(torch.randn(24, 64), "nf4")
    plain = x @ weight.dequantised(torch.float32).T
    order = torch.arange(24).view(3, 2, 4).transpose(1, 2).flatten()  # heads of 8, whose halves become neighbours
    whole = torch.randn(5, 40)
    expected = whole.clone()
    expected[:, 10:34] += plain[:, order] + bias
    for product in (partial(nf4.quantised_linear, kernels=kernels), plain_quantised_linear):
        found = whole.clone()
        product(x, weight, bias, found[:, 10:34], pairs=4, add=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        product(x, weight, bias, found[:, 10:34], pairs=4)
        torch.testing.assert_close(found[:, 10:34], plain[:, order] + bias, atol=1e-5, rtol=1e-5)


def test_products_with_float32_weights_in_rows(kernels):
    """The bits of a row of a result do not depend on the others."""
    for depth in (192, 66):
        x, weight, bias, before = (torch.randn(*shape) for shape in ((61, depth), (50, depth), (50,), (61, 50)))
        whole = rows_linear(x, weight, bias, before.clone(), kernels=kernels, add=True)
        torch.testing.assert_close(whole, before + x @ weight.T + bias, atol=1e-4, rtol=1e-5)
        exact = rows_linear(x, weight, None, torch.empty(61, 50), kernels=kernels, add=False)
        for n in (1, 2, 5, 48, 49):
            assert torch.equal(
                rows_linear(x[:n], weight, None, torch.empty(n, 50), kernels=kernels, add=False), exact[:n]
            )


def test_tiles_are_the_rows(monkeypatch):
    monkeypatch.setattr("verl.nn.quant.AT_ONCE", 1 << 12)
    for depth in (48, 64, 320):
        for kind in ("nf4", "int8"):
            weight = quantise_weight(torch.randn(300, depth), kind)
            tiles = [*weight.tiles(torch.bfloat16)]
            assert len(tiles) > 1 and torch.equal(torch.cat(tiles), weight.dequantised(torch.bfloat16))
