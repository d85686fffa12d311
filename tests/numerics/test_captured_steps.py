"""Decode steps as graphs, with a double of torch's CUDA graphs that records what a step computes and computes it again:
how many are captured, and that a replay is the step. And all that a step transfers, on a device that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from each import FULL_GRID
from interpreted import interpreted_ops
from rollouts import draws_of
from test_cuda_decode import Declared
from test_mixed_steps import PLAIN
from test_no_waits import NoReads
from test_rollout_numerics import CONFIGS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.linear import Plain, SingleProducts
from verl.accel.transfer import to_device
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.rollout.embedded.core import DecodeRows
from verl.rollout.native import paged
from verl.rollout.native.model import Model
from verl.rollout.native.ops import DecodeOps, choose_ops
from verl.rollout.native.prefill import Job
from verl.rollout.native.sets import NO_SET, LiveSets
from verl.rollout.native.weights import Storage, weights_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
CPU, META = torch.device("cpu"), torch.device("meta")
PAGE, ROWS, TOKENS = 16, 3, 20  # tokens: those that each row has before the first step
MIXED, IDLE = (4, 16), (4, 8)
PAIRS = [(1, 0, False), (3, 0, True), (1, 4, True), (3, 4, False), (1, 9, False), (3, 9, True)]
"""Steps of (rows, prompt tokens, with a LoRA set) with each pair of two of these values."""
READS = {"_local_scalar_dense", "bincount", "nonzero"}
METHODS_THAT_READ = ("tolist", "numpy", "cpu", "__bool__", "__array__")
"""Of a tensor: on a CPU they are no operations of torch."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", PAGE)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))


class Recorder(TorchDispatchMode):
    """Records the operations of torch and the launches of Triton within the block, to run them again on the same
    memory. An operation that reads a number on the host is an error, as in the capture of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self._within, self._patch = False, pytest.MonkeyPatch()

    def __enter__(self) -> Any:
        from triton.runtime.interpreter import GridExecutor

        self._launch = launch = GridExecutor.__call__

        def recorded(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.calls.append(lambda: launch(executor, *args, **kwargs))
            self._within = True  # the interpreter copies arguments
            try:
                launch(executor, *args, **kwargs)
            finally:
                self._within = False

        GridExecutor.__call__ = recorded
        for name in METHODS_THAT_READ:
            self._patch.setattr(torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        from triton.runtime.interpreter import GridExecutor

        GridExecutor.__call__ = self._launch
        self._patch.undo()
        super().__exit__(*error)

    def _refusing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method of a tensor, for the interpreter alone."""

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._within, f"the host reads a number during a capture, by {name}"
            return method(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self._within:
            return out
        name = function._schema.name.removeprefix("aten::")
        assert name not in READS, f"the host reads a number during a capture, by {name}"
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t.untyped_storage().data_ptr() not in given for t in made]

        def again() -> None:
            found = [t for t in tree_leaves(function(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            for into, new, mine in zip(made, found, fresh, strict=True):
                if mine:
                    into.copy_(new)

        if function._schema.is_mutable or any(fresh):
            self.calls.append(again)
        return out


class Graphs:
    """The double of torch.cuda for the steps of a test, and what it captured and replayed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.captured: list[Any] = []
        self.pools: list[Any] = []
        self.replays = 0
        graphs, stream = self, SimpleNamespace(wait_stream=lambda other: None)

        class Graph:
            def __init__(self) -> None:
                self.own = object()

            def pool(self) -> Any:
                return self.own

            def replay(self) -> None:
                graphs.replays += 1
                for call in self.calls:
                    call()

        @contextmanager
        def capture(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
            assert capture_error_mode == "thread_local", "another thread may allocate meanwhile"
            graph.own = pool or graph.own
            graphs.captured.append(graph)
            graphs.pools.append(pool)
            with Recorder() as recorder:
                yield
            graph.calls = recorder.calls

        @contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            yield

        for name, double in {
            "CUDAGraph": Graph,
            "graph": capture,
            "stream": on_stream,
            "current_stream": lambda device: stream,
        }.items():
            patch.setattr(torch.cuda, name, double)
        self.stream = stream


class Stepping:
    """Steps over pages of a tiny model with random weights and a LoRA set, with prompts and banned ids."""

    def __init__(self, name: str, device: torch.device, ops: DecodeOps | None, graphs: Graphs | None = None) -> None:
        config, dtype = CONFIGS[name], torch.float32 if device == CPU else torch.bfloat16
        products = SingleProducts(Plain, keeps=True)
        plain = choose_ops(CPU, dtype, compiled=False, products=products)
        self.model = model = Model(config, 256, device)
        model.weights = weights_of(Storage(model.shape, dtype, dtype, device), plain)
        self.shape = s = model.shape
        torch.manual_seed(0)
        for tensor in model.live.tensors:
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
        self.sets = LiveSets(s, products, dtype, dtype, device, stacks=True)
        target, rank = "model.layers.0.self_attn.q_proj", 2
        one = ParameterSet(id=POLICY_SET.id, kind="lora", base="x", rank=rank, targets=(target,))
        sizes = (rank, s.hidden), (s.heads * s.head_dim, rank)
        factors = {name: torch.randn(size).to(device) for name, size in zip(one.factors(target), sizes, strict=True)}
        self.sets.add(one, factors, None)
        cache = paged.PageCache(s, dtype, device, ROWS, 256, ROWS * 256)
        cache.fill(0, ROWS, torch.randn(s.layers, 2, s.kv_heads, TOKENS, s.head_dim, dtype=dtype).to(device))
        banned = torch.tensor([1, 5], device=device)
        self.step = paged.PagedDecode(model, cache, dtype, ROWS, 256, ops, self.sets, (MIXED, IDLE), banned)
        self.cuts = ops is not None  # otherwise a step with top-k is not captured
        if graphs is not None:
            self.step._captures, self.step._stream = True, graphs.stream

    def job(self, ids: int, *, adapted: bool = False) -> Job:
        """A prompt of `ids` tokens, of which 5 are known."""
        s, name = self.shape, POLICY_SET.id if adapted else "another"
        prompt = np.random.default_rng(ids).integers(0, s.vocab, ids)
        kv = torch.zeros(s.layers, 2, s.kv_heads, ids, s.head_dim, dtype=self.step.cache.pool.dtype)
        kv[:, :, :, :5] = torch.randn(kv[:, :, :, :5].shape, generator=torch.Generator().manual_seed(1))
        kv = to_device(kv, self.model.device)
        return Job((name, (), False, prompt.tobytes()), prompt, kv, 5, 0, False, None, None, None)

    def launch(
        self, rows: int, beside: int, *, adapted: bool, at: int = TOKENS, ids: int = 40
    ) -> tuple[Any, Job | None]:
        """Run a step of `rows` rows at position `at`, with `beside` tokens of a prompt of `ids` tokens, of which 5 are
        known. adapted: the first row and the prompt have a LoRA set."""
        numbers, job = np.full(rows, NO_SET), None
        if adapted:
            numbers[0] = 0
        if beside:
            job = self.job(ids, adapted=adapted)
            self.step.prompts.plan([(job, beside)])
        drawn = draws_of(np.array([0.25, 0.5, 0.875])[:rows], 1.0, [0, 3, 5][:rows] if self.cuts else 0)
        drawn = replace(drawn, banned=np.arange(rows) % 2 == 0)
        tokens = np.arange(rows, dtype=np.int64) + 7
        read = self.step.launch(DecodeRows(tokens, np.full(rows, at), None, drawn), numbers)
        self.step.prompts.plan(())
        return read, job


@pytest.mark.parametrize("fused", [True, False])
def test_a_graph_for_each_shape_of_a_step_and_no_further_one(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, prompt tokens and LoRA sets. Later steps of the same shapes have the results of direct calls."""
    graphs = Graphs(monkeypatch)
    ops = interpreted_ops() if fused else None
    captured, direct = Stepping("qwen3", CPU, ops, graphs), Stepping("qwen3", CPU, ops)
    shapes = PAIRS if fused and not FULL_GRID else [*product((1, 3), (0, 4, 9) if fused else (0,), (False, True))]
    for round in range(2):
        for i, (rows, beside, adapted) in enumerate(shapes):
            given = {"adapted": adapted, "at": TOKENS + round, "ids": 40 + i + 100 * round}
            (ours, job), (theirs, expected) = (one.launch(rows, beside, **given) for one in (captured, direct))
            for x, y in zip(ours(), theirs(), strict=True):
                np.testing.assert_array_equal(x, y)
            assert (job is None) == (expected is None) == (not beside)
            assert job is None or (job.done == 5 + beside and torch.equal(job.kv, expected.kv))
            assert torch.equal(captured.step.cache.pool, direct.step.cache.pool), (rows, beside, adapted)
        assert len(graphs.captured) == len(shapes), "one for each shape, in the first round alone"
        assert graphs.replays == (round + 1) * len(shapes)
    assert graphs.pools == [None] + [graphs.captured[0].own] * (len(shapes) - 1), (
        "all graphs share the first one's memory"
    )
    captured.step.forget()
    captured.launch(1, 0, adapted=False)
    assert len(graphs.captured) == len(shapes) + 1 and graphs.pools[-1] is None


def test_rows_between_two_buckets_have_the_graph_of_the_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """And 2 or 3 prompt tokens that of 4."""
    graphs = Graphs(monkeypatch)
    monkeypatch.setattr(paged, "BUCKETS", (1, 4))
    stepping = Stepping("qwen3", CPU, interpreted_ops(), graphs)
    for rows, beside in ((2, 0), (3, 0), (3, 2), (2, 3)):
        stepping.launch(rows, beside, adapted=False)
    assert [(step.rows, step.beside) for step in stepping.step._graphs] == [(3, 0), (3, 4)]


@pytest.mark.parametrize("name,ops", [("qwen3 moe", None), ("qwen3", PLAIN)])
def test_a_step_that_reads_a_number_cannot_be_captured(
    name: str, ops: DecodeOps | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double notices it as a card does: by an operation, or a method that is none on a CPU."""
    stepping = Stepping(name, CPU, ops, Graphs(monkeypatch))
    with pytest.raises(AssertionError, match="the host reads a number"):
        stepping.launch(2, 0, adapted=False)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3 moe"])
@pytest.mark.parametrize("adapted", [False, True])
def test_prompts_sets_and_banned_ids_wait_for_nothing(
    name: str, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device `meta` there is nothing to read: a step with all of them ends there, and only ids and log-probs are
    sent. The prompt's known tokens are written into its pages, and the new ones read from them; another prompt ends."""
    sent = list[torch.Tensor]()
    monkeypatch.setattr(paged.Transfers, "receive", lambda host, both: sent.append(both))
    used = dict[str, int]()
    for method in ("read", "write"):
        plain = getattr(paged.PageCache, method)
        monkeypatch.setattr(paged.PageCache, method, lambda *args, plain=plain, method=method: (
            used.__setitem__(method, used.get(method, 0) + 1), plain(*args))[1])  # fmt: skip
    stepping = Stepping(name, META, Declared(torch.full((4,), 20)).ops())
    with NoReads() as mode:
        for ids, beside in ((40, 9), (9, 4)):
            _, job = stepping.launch(ROWS, beside, adapted=adapted, ids=ids)
            assert job is not None and job.done == 5 + beside and (job.entry is not None) == (ids == 9)
    assert used == {"read": 2, "write": 2} and mode.calls["index_copy_"] >= 4
    assert [(both.shape, both.device.type) for both in sent] == [((2, ROWS), "meta")] * 2
