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
@pytest.mark.parametrize("capability,dtype,dim", [(90, "bfloat16", 128), (80, "float32", 256)])
def test_every_kernel_fits_a_card(capability: int, dtype: str, dim: int, tmp_path: Path) -> None:
    """No register is spilled, small cards have the shared memory, and operands of products are copied ahead of use."""
    world = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(SCRIPT), str(capability), dtype, str(dim)]
    done = subprocess.run(command, env=world, capture_output=True, text=True, timeout=280)  # twenty CPU seconds
    assert done.returncode == 0, done.stderr[-2000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = [launch["kernel"] for launch in launches]
    assert len(kernels) == 31 and len(set(kernels)) == 18
    copied = {"_attend_part", "_expert_products", "_exact_product", "_attend_prompts", "_product_part"}
    for launch in launches:
        assert launch["stack"] == 0 and launch["shared"] <= LEAST_SHARED_BYTES, launch
        assert (launch["kernel"] in copied) == (launch["copies_ahead"] > 0), launch
