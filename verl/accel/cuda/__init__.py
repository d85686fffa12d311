"""Kernels for CUDA, most of them by Triton. Importing one sets how Triton compiles it."""

import os

# Triton reads it whenever it compiles a kernel. Unset, Triton 3.9 warns, and 3.10 will no longer fuse products and
# sums: other bits, and more instructions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
