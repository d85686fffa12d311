"""The Triton kernels compile for GPUs, on a machine without one, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
SCRIPT = Path(__file__).parents[1] / "compiled_kernels.py"
LEAST_SHARED_BYTES = 101376  # of a block, on the cards of capability 8.0 and above that have the least


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability,dtype,dim,count",
    [(90, "bfloat16", 128, (43, 24)), (89, "float16", 64, (43, 24)), (80, "float32", 256, (37, 22))],
)
def test_every_kernel_fits_a_card(
    capability: int, dtype: str, dim: int, count: tuple[int, int], tmp_path: Path
) -> None:
    """No register is spilled, small cards have the shared memory, and operands of products are copied ahead of use. The
    code is that of a run, which says to Triton whether it fuses products and sums: without it there would be a warning.
    Weights in blocks of 8 bits need 8.9 and half precision, and prompts spill a few bytes there; NF4 needs half
    precision."""
    world = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    world.pop("TRITON_DEFAULT_FP_FUSION", None)  # this process has imported the kernels, which set it
    command = [sys.executable, str(SCRIPT), str(capability), dtype, str(dim)]
    done = subprocess.run(command, env=world, capture_output=True, text=True, timeout=280)  # twenty CPU seconds
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FP_FUSION" not in done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = [launch["kernel"] for launch in launches]
    assert (len(kernels), len(set(kernels))) == count
    copied = {
        "_attend_part",
        "_block_product",
        "_expert_products",
        "_exact_product",
        "_attend_prompts",
        "_product_part",
        "_nf4_product",
    }
    for launch in launches:
        small = capability == 89 and launch["kernel"] == "_attend_prompts"
        assert (launch["stack"] == 0 or small) and launch["shared"] <= LEAST_SHARED_BYTES, launch
        assert (launch["kernel"] in copied) == (launch["copies_ahead"] > 0), launch
