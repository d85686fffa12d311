"""The functions of kernels.c, compiled once per machine with its C compiler and kept in ~/.cache/verl."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
INCLUDED = tuple(SOURCE.with_name(f"{n}.c") for n in ("nf4", "crc", "scan", "delta", "segments", "low_rank", "tiles"))
TILE, BLOCK, PARTS = 64, 256, 3  # as in kernels.c
DEEP, TALL = 32, 16  # as in tiles.c
COMPILE_TIMEOUT_S = 120.0
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
NATIVE = ("-march=native", "-mcpu=native")  # x86 compilers know the first, ARM ones the second
OPENMP = ("-fopenmp", "-fopenmp-simd")  # Apple's clang has no runtime: one thread
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Address:
    """The argument type for the memory of a tensor or an array; None is a null pointer."""

    @classmethod
    def from_param(cls, value: Tensor | np.ndarray | None) -> c_void_p | None:
        if value is None:
            return None
        return c_void_p(value.data_ptr() if isinstance(value, Tensor) else value.ctypes.data)


class LayerPointers(ctypes.Structure):
    """The parameters of one layer as a C struct: float32 norms [hidden], panels and biases of products, and the norm of
    queries and keys [heads + kv_heads, D]."""

    TENSORS = (
        *("norm", "qkv", "qkv_bias", "qk_norm", "out", "out_bias", "out_norm"),
        *("mlp_norm", "up", "up_bias", "down", "down_bias", "mlp_out_norm"),
    )
    _fields_ = (*((name, c_void_p) for name in TENSORS), ("window", c_long), ("rope", c_long))


class Stack(ctypes.Structure):
    """The layers of a model as a C struct, which does not own their tensors. `kind` is a value of ACTIVATIONS; `cap` is
    0 for no cap."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerPointers)),
        *((name, c_long) for name in ("count", "hidden", "ffn", "heads", "kv_heads", "dim", "kind")),
        *((name, c_float) for name in ("eps", "scale", "cap")),
    )


class Codes(ctypes.Structure):
    """A weight [width, depth] in NF4 or int8, or of float32 in rows, as a C struct, which does not own its tensors."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "nested", "values")),
        ("offset", c_float),
        *((name, c_long) for name in ("width", "depth", "bits")),
    )


class LowRankPointers(ctypes.Structure):
    """The factors of a LoRA set in the products of one layer as a C struct: for each product panels of A, and of B of
    each of its projections. Null pointers: no factors."""

    PRODUCTS = ("qkv", "out", "up", "down")
    _fields_ = (*((name, c_void_p * (1 + PARTS)) for name in PRODUCTS),)


class SetRowsPointers(ctypes.Structure):
    """Rows of a call that have a LoRA set, as a C struct, which does not own its tensors."""

    _fields_ = (
        ("layers", ctypes.POINTER(LowRankPointers)),
        *((name, c_long) for name in ("first", "end", "rank")),
        ("scale", c_float),
    )


TYPED = {  # one function per dtype
    "rms_norm": (Address,) * 3 + (c_long,) * 2 + (c_float, c_long),
    "rms_norm_wide": (Address,) * 3 + (c_long,) * 2 + (c_float, c_long),
    "rms_norm_exact": (Address,) * 3 + (c_long,) * 2 + (c_float, c_long),
    "rms_norm_backward": (Address,) * 5 + (c_long,) * 2 + (c_float, c_long),
    "swiglu": (Address,) * 3 + (c_long,) * 2,
    "swiglu_backward": (Address,) * 5 + (c_long,) * 2,
    "gated": (Address,) * 2 + (c_long,) * 4,
    "attend": (Address,) * 9 + (c_long,) * 6 + (c_float,) * 3,
    "sample": (Address,) * 6 + (c_long,) * 2,
}
PRODUCTS = {  # one function per dtype that the CPU multiplies
    "linear": (Address,) * 5 + (c_long,) * 5,
    "pack": (Address,) * 2 + (c_long,) * 5,
    "layers": (
        *(ctypes.POINTER(Stack), *(Address,) * 4, c_long, Address, *(c_long,) * 2, Address, Address, c_long),
        *(ctypes.POINTER(SetRowsPointers), c_long, Address, Address, c_long),
    ),
}
BFLOAT16 = {"linear_wide": PRODUCTS["linear"], "repack": PRODUCTS["pack"]}
FLOAT32 = {
    "nf4_linear": (Address, ctypes.POINTER(Codes), *(Address,) * 3, *(c_long,) * 5),
    "nf4_rows": (ctypes.POINTER(Codes), Address, *(c_long,) * 3),
    "large_pages": (Address, c_long),
    "delta_step": (*(Address,) * 9, *(c_long,) * 6, c_float, c_long),
    "fold_crc": (Address, c_long, Address),
    "scan": (Address, c_long, *(Address,) * 3),
    "pack_each": (Address, c_long),
    "sums_of": (Address, c_long, Address),
    "rotation": (Address,) * 4 + (c_long,) * 5,
    "segments": (Address,) * 8 + (c_long,) * 6 + (c_float, c_long),
    "segments_backward": (Address,) * 12 + (c_long,) * 6 + (c_float, c_long),
    "low_rank_gradients": (Address,) * 6 + (c_long,) * 4 + (c_float, c_long),
}


class Segments(NamedTuple):
    """The segments of packed rows for attention: the queries of one are the last of its keys."""

    starts: Tensor
    """int32 [segments + 1], the first query of each."""
    key_starts: Tensor
    """int32 [segments + 1], the first key of each."""
    rows: Tensor | None
    """int64 [keys], the rows of k and v that are keys; None: all in order."""
    scale: float
    window: int

    @property
    def bounds(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.starts, self.key_starts, self.rows


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of kernels.c for one dtype, on contiguous tensors. They use as many threads as torch has in the
    calling thread, and release the GIL."""

    dtype: torch.dtype
    panel_width: int
    folds_crc: bool
    multiplies: bool
    """There are matrix products in this dtype: `pack`, `linear` and `layers`."""
    functions: Mapping[str, Callable[..., Any]]

    def new_panels(self, rows: int, depth: int) -> Tensor:
        """Allocate panels for a weight [rows, depth], which `pack` fills: [panels, depth, panel width] in float32,
        [panels, depth / 2, panel width, 2] in bfloat16. Padding is 0."""
        panels, width, halves = -(-rows // self.panel_width), self.panel_width, self.dtype == torch.bfloat16
        shape = (panels, -(-depth // DEEP) * DEEP // 2, width, 2) if halves else (panels, depth, width)
        out = torch.empty(shape, dtype=self.dtype)
        self.functions["large_pages"](out, out.nbytes)
        out[rows // width :] = 0.0
        if halves and depth % DEEP:
            out[:, depth // 2 :] = 0.0
        return out

    def pack(self, weight: Tensor, panels: Tensor, first: int = 0, pairs: int = 0) -> None:
        """Write weight [N, K], float32 or in the dtype of the panels, as rows first .. first + N of them. pairs:
        reorder D/2 pairs of heads so that the two halves are neighbours, as RoPE pairs them; 0: keep the order of
        rows."""
        assert weight.is_contiguous() and weight.dtype in (torch.float32, self.dtype) and weight.device.type == "cpu"
        assert panels.dtype == self.dtype and first + len(weight) <= len(panels) * self.panel_width
        rows, depth = weight.shape
        assert panels[0].numel() // self.panel_width == (
            depth if self.dtype == torch.float32 else -(-depth // DEEP) * DEEP
        )
        assert not pairs or rows % (2 * pairs) == 0
        pack = self.functions["pack" if weight.dtype == torch.float32 else "repack"]
        pack(weight, panels, first, rows, depth, pairs, torch.get_num_threads())

    def pack_each(self, weights: Sequence[tuple[Tensor, Tensor, int, int]]) -> None:
        """Do what `pack` does for each (weight, panels, first, pairs) of float32, in one call and one thread."""
        assert self.dtype == torch.float32
        given = np.empty((len(weights), 6), np.int64)
        for row, (weight, panels, first, pairs) in zip(given, weights, strict=True):
            rows, depth = weight.shape
            assert weight.is_contiguous() and weight.dtype == panels.dtype == self.dtype and weight.device.type == "cpu"
            assert first + rows <= len(panels) * self.panel_width and panels[0].numel() == depth * self.panel_width
            assert not pairs or rows % (2 * pairs) == 0
            row[:] = weight.data_ptr(), panels.data_ptr(), first, rows, depth, pairs
        self.functions["pack_each"](given, len(given))

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> Tensor:
        """Write x [T, K] W^T + b into out [T, N], which may be float32 whatever the dtype of x is, or with `add` add it
        to out. Return out."""
        assert x.is_contiguous() and out.is_contiguous() and x.dtype == panels.dtype == self.dtype
        assert out.dtype in (self.dtype, torch.float32) and (bias is None or bias.dtype == self.dtype)
        linear = self.functions["linear" if out.dtype == self.dtype else "linear_wide"]
        linear(x, panels, bias, out, self.padding(*x.shape), *x.shape, out.shape[1], add, torch.get_num_threads())
        return out

    def padding(self, n: int, *depths: int) -> Tensor | None:
        """Allocate the memory in which products in bfloat16 of up to n rows of these depths have the rows of x that are
        not in whole tiles; None in float32."""
        if self.dtype == torch.float32:
            return None
        rows = -(-n // TALL) * TALL  # those of a depth of whole tiles are read where they are, but for the last
        values = ((rows if depth % DEEP else TALL) * -(-depth // DEEP) * DEEP for depth in depths)
        return torch.empty(max(values), dtype=self.dtype)

    def crc32(self, view: memoryview) -> int:
        """Return zlib's crc32 of bytes."""
        state, whole = np.zeros(1, np.uint32), len(view) // 16 * 16 if self.folds_crc and len(view) >= 64 else 0
        if whole:
            self.functions["fold_crc"](np.frombuffer(view, np.uint8), whole, state)
        return zlib.crc32(view[whole:], int(state[0]))

    def crcs(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the crc32 of contiguous tensors in host memory, where these kernels compute one (`folds_crc`)."""
        assert self.folds_crc and all(t.is_contiguous() for t in tensors)
        given, sums = np.array([(t.data_ptr(), t.nbytes) for t in tensors], np.int64), np.empty(len(tensors), np.uint32)
        self.functions["sums_of"](given, len(tensors), sums)
        return sums.tolist()

    def scan(
        self, tensors: Sequence[Tensor], count: int, *, ends: bool = True, checked: Sequence[bool] = ()
    ) -> tuple[Tensor | None, list[Tensor], list[int]]:
        """Return of float32 and bfloat16 tensors that are not empty the least and the largest value [n, 2], both NaN if
        one is NaN, and up to `count` values of each, evenly spread, all float64; and the crc32 of each that is checked,
        0 for others. Each is read once. ends: read them whole, for the first two and the last. checked: as `crcs`."""
        steps = [max(1, t.numel() // count) for t in tensors]
        counts = [min(count, -(-t.numel() // step)) for t, step in zip(tensors, steps, strict=True)]
        assert all(t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
        assert not any(checked) or (ends and self.folds_crc)
        given = np.array(
            [
                (t.data_ptr(), t.numel(), step, taken, t.dtype == torch.bfloat16, check)
                for t, step, taken, check in zip(tensors, steps, counts, checked or [False] * len(steps), strict=True)
            ],
            np.int64,
        )
        found = torch.empty(len(counts), 2, dtype=torch.float64) if ends else None
        values = torch.empty(sum(counts), dtype=torch.float64)
        sums = np.empty(len(counts), np.uint32)
        self.functions["scan"](given, len(counts), found, values, sums)
        return found, list(values.split(counts)), sums.tolist()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, exact: bool = False) -> Tensor:
        """Return x [n, width], which may be float32, normed by its root mean square and multiplied by weight [width]
        float32, in the dtype of these kernels, or with `exact` in float32."""
        assert x.is_contiguous() and weight.dtype == torch.float32 and x.dtype in (self.dtype, torch.float32)
        assert not exact or x.dtype == self.dtype
        out = torch.empty_like(x, dtype=torch.float32 if exact else self.dtype)
        name = "rms_norm_exact" if exact else "rms_norm" if x.dtype == self.dtype else "rms_norm_wide"
        self.functions[name](x, weight, out, *x.shape, eps, torch.get_num_threads())
        return out

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, dy: Tensor, eps: float, *, frozen: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the exact `rms_norm`, dx [n, width] and dweight [width] float64 (frozen: None), for x
        [n, width], and dy [n, width] and weight [width], both float32."""
        assert x.dtype == self.dtype and dy.dtype == weight.dtype == torch.float32
        dx, threads = torch.empty_like(x), torch.get_num_threads()
        sums = None if frozen else torch.zeros(threads, len(weight), dtype=torch.float64)
        self.functions["rms_norm_backward"](x, weight, dy, dx, sums, *x.shape, eps, threads)
        return dx, None if sums is None else sums.sum(0)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up of tensors of one shape."""
        assert gate.dtype == up.dtype == self.dtype
        out = torch.empty_like(gate)
        self.functions["swiglu"](gate, up, out, gate.numel(), torch.get_num_threads())
        return out

    def swiglu_backward(self, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients (dgate, dup) of `swiglu`."""
        assert gate.dtype == up.dtype == dy.dtype == self.dtype
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        self.functions["swiglu_backward"](gate, up, dy, dgate, dup, gate.numel(), torch.get_num_threads())
        return dgate, dup

    def rotation(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
        """Return x [T, h, D] cos + rotate_half(x) sin for cos and sin [T, 1, D], float32. back: the gradient of x,
        given that of the result as x."""
        assert (
            all(t.is_contiguous() and t.dtype == torch.float32 for t in (x, cos, sin))
            and cos.numel() == len(x) * x.shape[2]
        )
        out = torch.empty_like(x)
        self.functions["rotation"](x, cos, sin, out, *x.shape, back, torch.get_num_threads())
        return out

    def attend_segments(self, q: Tensor, k: Tensor, v: Tensor, of: Segments) -> Tensor:
        """Return the attention [T, H, D] of q [T, H, D] over k and v [U, K, D], all float32."""
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (q, k, v)) and v.shape == k.shape
        out, (room, *sizes) = torch.empty_like(q), self._room(q, k, of)
        self.functions["segments"](q, k, v, *of.bounds, out, room, *sizes, of.window, of.scale, torch.get_num_threads())
        return out

    def attend_segments_backward(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, of: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of `attend_segments`, given that of its result."""
        assert d_out.is_contiguous() and d_out.dtype == torch.float32 and d_out.shape == q.shape
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        room, *sizes = self._room(q, k, of)
        parts = np.empty(2 * len(of.starts) - 1, np.int64)
        tensors = (q, k, v, *of.bounds, d_out, d_q, d_k, d_v, room, parts)
        self.functions["segments_backward"](*tensors, *sizes, of.window, of.scale, torch.get_num_threads())
        return d_q, d_k, d_v

    def segment_parts(self, of: Segments) -> list[int]:
        """Return the first segment of each part of a forest; gradients of parts are summed at the same time."""
        (starts, key_starts, index), room = of.bounds, np.empty(2 * len(of.starts) - 1, np.int64)
        found = self.functions["segment_parts"](key_starts, index, room, len(starts) - 1)
        return room[:found].tolist()

    def _room(self, q: Tensor, k: Tensor, of: Segments) -> tuple[Tensor, int, int, int, int, int]:
        """Return the memory for the scores of a segment in each thread, its floats of one thread, and sizes."""
        starts, key_starts, index = of.bounds
        assert starts.dtype == key_starts.dtype == torch.int32 and int(starts[-1]) == len(q)
        if index is None:
            assert int(key_starts[-1]) <= len(k)
        else:
            assert index.dtype == torch.int64 and len(index) == int(key_starts[-1])
        longest = [int(ends.diff().max()) if len(ends) > 1 else 0 for ends in (starts, key_starts)]
        (heads, dim), kv_heads = q.shape[1:], k.shape[1]
        floats = int(self.functions["segment_room"](*longest, dim))
        room = torch.empty(torch.get_num_threads() * floats, dtype=torch.float32)
        return room, floats, len(starts) - 1, heads, kv_heads, dim

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up [n, ffn] for gate_up [n, 2 ffn]."""
        n, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(n, width)
        self.functions["gated"](gate_up, out, n, width, ACTIVATIONS[activation], torch.get_num_threads())
        return out

    def attend(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        turns: Tensor | None,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        heads: int,
        eps: float,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
    ) -> Tensor:
        """Compute attention of n rows, each over its own keys and values [n, K, capacity, D], and return [n, H D]. The
        key and value of a row are stored at its position. qkv [n, (H + 2K) D], qk_norm float32 [H + K, D], turns
        complex64 [positions, D/2], positions [n]."""
        n, (kv_heads, capacity, dim) = len(qkv), keys.shape[1:]
        out = qkv.new_empty(n, heads * dim)
        scratch = torch.empty(_scratch_floats(heads, kv_heads, dim, capacity), dtype=torch.float32)
        tensors = (qkv, qk_norm, turns, positions, None, keys, values, out, scratch)
        self.functions["attend"](*tensors, n, heads, kv_heads, dim, capacity, window, eps, scale, cap)
        return out

    def delta_step(
        self,
        given: Tensor,
        taps: Tensor,
        decays: Tensor,
        steps: Tensor,
        norm: Tensor,
        windows: Tensor,
        states: Tensor,
        *,
        key_heads: int,
        eps: float,
    ) -> Tensor:
        """Do what `plain_delta_step` does, in one pass over the states."""
        n, heads, inner, width = states.shape
        out, mixed = given.new_empty(n, heads * width), given.new_empty(n, windows.shape[2])
        tensors = (given, taps, decays, steps, norm, windows, states)
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
        sizes = (n, key_heads, heads, inner, width, windows.shape[1])
        self.functions["delta_step"](*tensors, out, mixed, *sizes, eps, torch.get_num_threads())
        return out

    def layers(
        self,
        stack: Stack,
        x: Tensor,
        positions: Tensor,
        slots: Tensor | None,
        turns: Tensor,
        kv: Tensor,
        lo: int = 0,
        sets: Sequence[SetRowsPointers] = (),
    ) -> Tensor:
        """Compute the layers on x [n, hidden] float32, in place, and return it. turns complex64 [kinds, positions,
        D/2]; kv [layers, 2, slots, K, capacity, D], in which row i uses slot lo + i, or lo + slots[i]. sets: the rows
        that have factors, which are added to their products. Otherwise as in `attend`."""
        assert x.is_contiguous() and kv.is_contiguous() and x.dtype == torch.float32 and kv.dtype == self.dtype
        n, heads, kv_heads, dim, capacity = len(x), stack.heads, stack.kv_heads, stack.dim, kv.shape[4]
        row = torch.empty(_scratch_floats(heads, kv_heads, dim, capacity), dtype=torch.float32)
        widest = max(2 * (heads + kv_heads) * dim, 3 * stack.ffn)
        scratch = torch.empty(n * (stack.hidden + widest), dtype=self.dtype)
        cache = (turns, turns.shape[1], kv[:, :, lo:], kv.shape[2], capacity)
        most = max(((one.end - one.first) * (PARTS + 1) * one.rank for one in sets), default=0)
        low = torch.empty(most, dtype=self.dtype)
        padded = self.padding(n, stack.hidden, heads * dim, stack.ffn, *(one.rank for one in sets))
        rows = (SetRowsPointers * len(sets))(*sets), len(sets), low, padded
        self.functions["layers"](stack, x, positions, slots, *cache, row, scratch, n, *rows, torch.get_num_threads())
        return x

    def sample(self, logits: Tensor, temperature: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw from logits [n, V] with temperature [n] float32 (0 is greedy) and uniform [n] float64; return ids [n]
        and their log-probs [n]."""
        n, vocab = logits.shape
        ids, logprobs, masses = np.empty(n, np.int64), np.empty(n, np.float32), np.empty(-(-vocab // BLOCK), np.float32)
        drawn = np.ascontiguousarray(temperature), np.ascontiguousarray(uniform)
        self.functions["sample"](logits, *drawn, ids, logprobs, masses, n, vocab)
        return ids, logprobs


def _scratch_floats(heads: int, kv_heads: int, dim: int, tokens: int) -> int:
    """Return the number of floats that `attend` needs for rows of up to `tokens` tokens: the row, mixed values, a tile,
    scores."""
    group = heads // kv_heads
    return (heads + 2 * kv_heads) * dim + group * dim + TILE * dim + group * tokens


@functools.cache
def load_kernels(dtype: torch.dtype) -> Kernels | str:
    """Load the kernels of this machine for a dtype, or return the reason why there are none. The first call on a
    machine compiles them."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"no compiled kernels for {dtype}"
    try:
        library = ctypes.CDLL(str(_library()))
    except (OSError, subprocess.SubprocessError) as e:
        return f"kernels.c could not be compiled: {e}"
    library.panel_width.restype = library.folds_crc.restype = library.has_tiles.restype = c_long
    functions: dict[str, Callable[..., Any]] = {}
    multiplies = dtype == torch.float32 or bool(library.has_tiles())
    typed = TYPED | (PRODUCTS if multiplies else {})
    if multiplies and dtype == torch.bfloat16:
        typed |= BFLOAT16
    for name, arguments in (FLOAT32 | typed).items():
        symbol = name if name in FLOAT32 else f"{name}_{str(dtype).removeprefix('torch.')}"
        functions[name] = getattr(library, symbol)
        functions[name].argtypes, functions[name].restype = arguments, None  # type: ignore[attr-defined]
    functions["segment_room"] = library.segment_room
    functions["segment_parts"], functions["low_rank_room"] = library.segment_parts, library.low_rank_room
    for name in ("segment_room", "low_rank_room"):
        functions[name].argtypes, functions[name].restype = (c_long,) * 3, c_long  # type: ignore[attr-defined]
    library.segment_parts.argtypes, library.segment_parts.restype = (*(Address,) * 3, c_long), c_long  # type: ignore[assignment]
    return Kernels(dtype, library.panel_width(), bool(library.folds_crc()), multiplies, functions)


def _library() -> Path:
    """Return the path of the shared library for this source, compiler and CPU; compile it if it does not exist.
    Processes that start together may both compile it."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise OSError("no C compiler (cc, gcc or clang) on this machine")
    parts = (
        SOURCE.read_bytes(),
        *(path.read_bytes() for path in INCLUDED),
        compiler.encode(),
        repr((FLAGS, NATIVE, OPENMP)).encode(),
        _cpu().encode(),
    )
    path = Path.home() / ".cache" / "verl" / f"kernels-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built, failures = Path(folder) / "kernels.so", []
        for native, openmp in ((n, o) for n in NATIVE for o in OPENMP):
            command = [*compiler.split(), *FLAGS, native, openmp, "-o", str(built), str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
            if done.returncode == 0:
                os.replace(built, path)
                return path
            failures.append(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    raise OSError("; ".join(failures))


def _cpu() -> str:
    """Return the facts of the CPU that -march=native depends on; a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    found = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return platform.machine() + "".join(found)
