"""A plugin of vLLM for the tests: products with weights in blocks of 8 bits on any CPU. vLLM's own kernels for a CPU
need AMX tiles. Everything around the product is vLLM's: the model of a `quantization_config`, its parameters, the
reload of its layers.

This file runs in vLLM's environment, and is loaded in each of its processes by an entry point (`plugin_of`)."""

import zlib

import torch
from torch.nn.functional import pad

BLOCK, LARGEST = 128, 448.0


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The tokens' values in runs of 128 columns, each with a scale of its own, as vLLM's kernels for GPUs take them."""
    runs = pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = (runs.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-10)
    return ((runs / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., : x.shape[-1]]


def whole(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * spread


def product(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(rounded(x), whole(values, scales))


def register() -> None:
    import verl_weights
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.platforms import PlatformEnum

    class Emulated(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_weights(self, layer, x, bias=None, **kwargs):
            params = self._get_layer_params(layer)
            found = product(x, params.weight, params.block_scale)
            return (found if bias is None else found + bias).to(x.dtype)

        def apply_block_scaled_mm(self, A, B, As, Bs):
            raise NotImplementedError

    def held(self) -> dict[str, int]:
        """Return the crc32 of each parameter of a worker's model, by its name, for `/collective_rpc`."""
        found = self.get_model().named_parameters()
        return {name: zlib.crc32(p.data.contiguous().view(torch.uint8).numpy().data) for name, p in found}

    def experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *more, **named) -> None:
        output.zero_()
        for expert in topk_ids.unique().tolist():
            token, which = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = product(hidden_states[token], w1[expert], self.w1_scale[expert]).chunk(2, -1)
            inner = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype)
            found = product(inner, w2[expert], self.w2_scale[expert]) * topk_weights[token, which, None]
            output.index_add_(0, token, found.to(output.dtype))

    verl_weights.Extension.held = held
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
    cpu_moe.CPUExpertsFp8.apply = experts
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda *weights: weights  # as it is, not packed for AMX
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, Emulated)
