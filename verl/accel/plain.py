"""The operations in torch alone, on every device: the rows that are chosen where no better kernel exists."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.accel import trained
from verl.accel.delta import plain_delta_step
from verl.accel.linear import Plain, SingleProducts
from verl.accel.operations import Call, Kernel, Use
from verl.accel.uniforms import plain_uniforms
from verl.nn.quant import QuantisedTensor

PLAIN = "torch"
"""The name of these rows in the table."""
WEIGHT_ROWS = 8192  # rows of a weight that are converted at once
BLOCK = 256  # tokens per block of the two-level inverse CDF: cumsum is scalar on CPU, a block sum is vectorised


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)


def plain_gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def plain_sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Draw ids from logits [n, V] with temperature [n] (0 is greedy) and uniform [n]; return float64 [2, n]: ids and
    log-probs. The host decides nothing, so that a CUDA graph can contain it."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = temperature == 0
    probs = torch.softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    ids = torch.where(greedy, logits.argmax(dim=-1), inverse_cdf(probs, uniform))
    return torch.stack((ids.double(), probs.gather(1, ids[:, None]).squeeze(1).log_().double()))


def plain_truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Write -inf into logits [n, V] for the ids that top-k, then top-p of the rest, then min-p of all drop, each at the
    temperature [n]; top_k [n] of 0, top_p of 1, min_p of 0 and a temperature of 0 drop none. Of equal logits those with
    lower ids are kept. Return the logits."""
    greedy = temperature == 0
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x / torch.where(greedy, 1.0, temperature).to(x.dtype)[:, None]
    ordered, order = x.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(x.shape[1], device=x.device)
    keep = rank < torch.where(top_k > 0, top_k, x.shape[1])[:, None]
    probs = torch.softmax(ordered.masked_fill_(~keep, -torch.inf), dim=-1).double()
    before = probs.cumsum(-1) - probs  # probability of the ids ranked above
    # top_p = 1 keeps all: a float64 sum may round above 1 before the last id
    keep &= before < torch.where(top_p < 1, top_p, torch.inf)[:, None]
    keep = torch.zeros_like(keep).scatter_(1, order, keep)
    keep &= x >= x.amax(dim=-1, keepdim=True) + min_p.to(x.dtype).log()[:, None]  # log 0 = -inf: off
    return logits.masked_fill_(~keep & ~greedy[:, None], -torch.inf)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return for probs [n, V] and uniform [n] float64 the first id [n] with a cumulative probability above the uniform.
    It has positive probability. Targets are strictly below the total, so the index is never past the end."""
    n, vocab = probs.shape
    if vocab <= 2 * BLOCK:
        return _first_above(probs.cumsum(-1, dtype=torch.float64), uniform, scale=True)[0]
    if vocab % BLOCK:
        probs = F.pad(probs, (0, BLOCK - vocab % BLOCK))
    blocks = probs.view(n, -1, BLOCK)  # [n, B, BLOCK]
    mass = blocks.sum(-1).cumsum(-1, dtype=torch.float64)  # [n, B]
    block, target = _first_above(mass, uniform, scale=True)
    below = mass.gather(1, (block - 1).clamp_(min=0)[:, None]).squeeze(1)
    residual = target - torch.where(block > 0, below, 0.0)
    inside = blocks[torch.arange(n, device=probs.device), block].cumsum(-1, dtype=torch.float64)  # [n, BLOCK]
    return (block * BLOCK + _first_above(inside, residual, scale=False)[0]).clamp_(max=vocab - 1)


def _first_above(cdf: Tensor, target: Tensor, *, scale: bool) -> tuple[Tensor, Tensor]:
    """Return the first index [n] at which cdf [n, m] float64 is above target [n] (with `scale` a share of the total),
    and the target that was used [n]."""
    total = cdf[:, -1]
    target = torch.minimum(target * total if scale else target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target[:, None], right=True).squeeze(1)
    return index.clamp_(max=cdf.shape[1] - 1), target  # NaN gives the last index; the caller detects it by its log-prob


def plain_float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [n, K] times weight [N, K] transposed, multiplied and returned in float32 at least. The weight is
    converted block by block."""
    exact = torch.promote_types(x.dtype, torch.float32)
    x = x.to(exact)
    return torch.cat([x @ part.to(exact).T for part in weight.split(WEIGHT_ROWS)], dim=1)


def plain_wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [m, k] b [k, n], multiplied and returned in float32 at least."""
    exact = torch.promote_types(a.dtype, torch.float32)
    return a.to(exact) @ b.to(exact)


def plain_quantised_linear(
    x: Tensor,
    weight: QuantisedTensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    pairs: int = 0,
    add: bool = False,
) -> Tensor:
    """Return x [n, K] times a quantised weight [N, K] transposed, plus bias [N]; the weight is dequantised tile by
    tile.

    out: the result is written there, or with `add` added to it; it may be columns of a larger tensor · pairs: the
    halves of heads of that many pairs of rows of W are put side by side, as RoPE pairs them; 0: in their order"""
    product = torch.cat([x @ tile.T for tile in weight.tiles(x.dtype)], dim=1)
    return placed(product, bias, out, pairs=pairs, add=add)


def placed(product: Tensor, bias: Tensor | None, out: Tensor | None, *, pairs: int, add: bool) -> Tensor:
    """Return a product [n, N] plus bias, as `plain_quantised_linear` places it."""
    if pairs:
        product = product.unflatten(1, (-1, 2, pairs)).transpose(2, 3).flatten(1)
    product = product if bias is None else product.add_(bias)
    if out is None:
        return product
    return out.add_(product) if add else out.copy_(product)


def plain_quantised_back(dy: Tensor, weight: QuantisedTensor) -> Tensor:
    """Return dy [n, N] times a quantised weight [N, K], which is dequantised tile by tile."""
    out, first = dy.new_zeros(len(dy), weight.shape[1], dtype=torch.promote_types(dy.dtype, torch.float32)), 0
    for tile in weight.tiles(dy.dtype):
        out += dy[:, first : first + len(tile)] @ tile
        first += len(tile)
    return out.to(dy.dtype)


def _row(operation: str, call: Call, float32: float, bfloat16: float, traffic: float) -> Kernel:
    def load(use: Use) -> Call:
        return call

    tolerance = {torch.float64: 1e-12, torch.float32: float32, torch.bfloat16: bfloat16, torch.float16: bfloat16}
    return Kernel(operation, PLAIN, load, tolerance, traffic=traffic)


def _products() -> SingleProducts:
    return SingleProducts(Plain, keeps=True)


KERNELS = (
    _row("rms_norm", plain_rms_norm, 2e-6, 2e-2, traffic=3),
    _row("gated", plain_gated, 2e-5, 2e-2, traffic=2),
    _row("sample", plain_sample, 3e-5, 3e-5, traffic=6),
    _row("truncate", plain_truncate, 0.0, 0.0, traffic=40),
    _row("delta_step", plain_delta_step, 5e-6, 4e-2, traffic=8),
    _row("uniforms", plain_uniforms, 0.0, 0.0, traffic=12),
    _row("linear", _products, 2e-4, 4e-2, traffic=1),
    _row("quantised_linear", plain_quantised_linear, 1e-5, 4e-2, traffic=17),
    _row("quantised_back", plain_quantised_back, 2e-5, 4e-2, traffic=17),
    _row("float32_linear", plain_float32_linear, 2e-4, 2e-4, traffic=6),
    _row("wide_product", plain_wide_product, 2e-4, 2e-4, traffic=6),
    _row("trained_attention", trained.trained_attention, 2e-6, 2e-2, traffic=8),
    _row("trained_rms_norm", trained.trained_rms_norm, 2e-6, 2e-2, traffic=3),
    _row("trained_swiglu", trained.trained_swiglu, 2e-6, 2e-2, traffic=2),
    _row("trained_rotation", trained.trained_rotation, 2e-6, 2e-2, traffic=3),
    _row("low_rank_gradients", trained.low_rank_gradients, 2e-4, 4e-2, traffic=2),
)
