"""The driver's typed hand on its workers: one method per thing that a role does. Every call is enqueued at the call,
shares its rows out over the ranks, and puts their answers together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verl.batch import Columns
from verl.driver.dispatch import Share, in_order, shares
from verl.model_engine.base import EngineCapabilities
from verl.model_engine.layout import Layout
from verl.objective import Term
from verl.types import Metrics, Ref, Refs, merge_metrics
from verl.weight_sync.base import Entry, Readers, Sent
from verl.workers.compute import Compute, Computed, OptimizerStep
from verl.workers.group import Broadcast, WorkerGroup
from verl.workers.host import Room
from verl.workers.role import AS_SAMPLED, RankStep, Role, UpdatePlan, View
from verl.workers.waits import result_of

A = TypeVar("A")
B = TypeVar("B")
START_TIMEOUT_S = 600.0  # to load a model and prove its forward pass


class ModelWorkers:
    """The ranks of one model, as `layout` arranges them: each data rank has rows of its own, and of the ranks that
    compute the same rows one answers. `capabilities` are the engine's; None: they are asked for · view: how it reads
    what it infers of · place: where they are (see `Cluster`)."""

    def __init__(
        self,
        group: WorkerGroup,
        capabilities: EngineCapabilities | None = None,
        layout: Layout | None = None,
        view: View = AS_SAMPLED,
        place: str = "here",
    ) -> None:
        self._group, self._view, self._place = group, view, place
        self._layout = layout or Layout(world_size=group.world_size)
        self._asked = None if capabilities else group.submit(Role.capabilities, Broadcast())
        self._can = capabilities

    @property
    def capabilities(self) -> EngineCapabilities:
        """Waits for workers that are being built; their failure is raised here."""
        if self._can is None:
            assert self._asked is not None
            late = f"{self._group.name}, whose model loads slowly or hangs, was not built"
            self._can = result_of(self._asked, late, START_TIMEOUT_S)[0]
        return self._can

    @property
    def places(self) -> frozenset[str]:
        """Workers that share one take turns."""
        return frozenset({self._place})

    @property
    def trains(self) -> bool:
        """It has an optimizer, and a state to save."""
        return self.capabilities.trains

    def infer(self, refs: Refs, outputs: Mapping[str, str]) -> Future[frozenset[str]]:
        """Compute model outputs of the rows and write them: {output: column}. The sample ids of those rows of which an
        output is not finite."""
        args = [(_rank_step(share), outputs, self._view) for share in self._share(refs)]
        return _then(self._submit(Role.infer, args), lambda found: frozenset[str]().union(*found))

    def merge(
        self, refs: Refs, outputs: Mapping[str, str], names: Sequence[str], shares: Sequence[float]
    ) -> Future[None]:
        """Of what several teachers say of each row, one column per output."""
        return _then(self._group.submit(Role.merge, Broadcast((refs, outputs, names, shares))), lambda _: None)

    def take_metrics(self) -> Future[Metrics]:
        """What the workers counted since they were asked last."""
        return _then(self._group.submit(Role.take_metrics, Broadcast()), merge_metrics)

    def blank(self, refs: Refs, outputs: Mapping[str, str]) -> Future[None]:
        """The columns of rows of which nobody can say anything."""
        return _then(self._group.submit(Role.blank, Broadcast((refs, outputs))), lambda _: None)

    def with_view(self, view: View) -> ModelWorkers:
        """The same workers, seen as a frozen model that reads so."""
        return ModelWorkers(self._group, replace(self.capabilities, trains=False), self._layout, view, self._place)

    def logprobs(self, refs: Refs) -> Future[list[np.ndarray]]:
        """Log-probs of the trainable tokens of each row, float32, for whoever has no column for them."""
        parts = self._share(refs)
        args = [(_rank_step(share),) for share in parts]
        return _then(self._submit(Role.logprobs, args), lambda found: in_order(list(zip(parts, found))))

    def update(
        self,
        steps: Sequence[OptimizerStep],
        terms: tuple[Term, ...],
        inputs: tuple[str, ...],
        recorded: tuple[str, ...] = (),
        prefix: str = "actor/",
    ) -> Future[Metrics]:
        """The optimizer steps of a turn, in order."""
        shared = [(step, self._share(step.refs)) for step in steps]
        args = []
        for rank in range(self._layout.data):
            mine = tuple(_rank_step(ranks[rank], step) for step, ranks in shared)
            args.append((UpdatePlan(mine, terms, inputs, recorded, prefix),))
        return _then(self._submit(Role.update, args), merge_metrics)

    def measure(self, step: OptimizerStep, terms: tuple[Term, ...], inputs: tuple[str, ...]) -> Future[Metrics]:
        """Loss and metrics of the terms on these rows, without a step."""
        args = [(_rank_step(share, step), terms, inputs) for share in self._share(step.refs)]
        return _then(self._submit(Role.measure, args), merge_metrics)

    def score(self, refs: Refs, coef: float, alone: bool) -> Future[list[tuple[float, dict[str, float]]]]:
        """(reward, components) of the rows with the reward model's score, in the order of the refs."""
        parts = self._share(refs)
        args = [(_rank_step(share), coef, alone) for share in parts]
        return _then(self._submit(Role.score, args), lambda found: in_order(list(zip(parts, found))))

    def score_rows(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Future[list[float]]:
        """The reward model's score of each (prompt ids, response ids), in this order."""
        parts = self._share(Refs(_ref(i, len(prompt), len(answer)) for i, (prompt, answer) in enumerate(rows)))
        args = [([rows[i] for i in share.rows or (0,)],) for share in parts]
        return _then(self._submit(Role.score_rows, args), lambda found: in_order(list(zip(parts, found))))

    def send_weights(self, version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Future[Sent]:
        found = self._group.submit(Role.send_weights, Broadcast((version, probes, copy)))
        return _then(found, lambda sent: next(s for s in sent if s is not None))

    def weights_manifest(self) -> Future[tuple[dict[str, Entry], str]]:
        found = self._group.submit(Role.weights_manifest, Broadcast())
        return _then(found, lambda told: next(one for one in told if one is not None))

    def stream_weights(self, version: int, probes: Sequence[np.ndarray], readers: Readers) -> Future[Sent]:
        """As `send_weights`, to readers that read while this goes on: nothing is kept of it."""
        found = self._group.submit(Role.stream_weights, Broadcast((version, probes, readers)))
        return _then(found, lambda sent: next(s for s in sent if s is not None))

    def lose_reader(self, turn: int, reader: int) -> Future[None]:
        """It reads no more of what is streamed; said at once, in the middle of a call too."""
        return _then(self._group.beside(Role.lose_reader, (turn, reader)), lambda _: None)

    def published(self, version: int) -> Future[None]:
        """The weights as they are now were this version, where a run is computed again: `send_weights` says it too."""
        return _then(self._group.submit(Role.published, Broadcast((version,))), lambda _: None)

    def release_weights(self, version: int) -> Future[None]:
        """All replicas have this version; said at once, in the middle of a call too."""
        return _then(self._group.beside(Role.release_weights, (version,)), lambda _: None)

    def save(self, path: Path) -> Future[None]:
        return _then(self._group.submit(Role.save, Broadcast((path,))), lambda _: None)

    def room(self) -> Future[list[Room]]:
        """Of every rank, for a snapshot."""
        return self._group.submit(Role.room, Broadcast())

    def snapshot(self) -> Future[None]:
        """Keep the state as of now, for `write`."""
        return _then(self._group.submit(Role.snapshot, Broadcast()), lambda _: None)

    def forget(self) -> Future[None]:
        """The snapshot, which was not written; in the middle of a call too."""
        return _then(self._group.beside(Role.forget), lambda _: None)

    def write(self, path: Path, hf_path: Path | None) -> Future[None]:
        """Begin to write the snapshot that is there, also in the middle of a call; no call is held up."""
        return _then(self._group.beside(Role.write, (path, hf_path)), lambda _: None)

    def written(self) -> Future[bool]:
        """Whether all ranks have written theirs; in the middle of a call too."""
        return _then(self._group.beside(Role.written), all)

    def load(self, path: Path) -> Future[None]:
        return _then(self._group.submit(Role.load, Broadcast((path,))), lambda _: None)

    def export(self, path: Path) -> Future[None]:
        return _then(self._group.submit(Role.export, Broadcast((path,))), lambda _: None)

    def close(self, timeout_s: float = 10.0) -> None:
        self._group.close(timeout_s)

    def _share(self, refs: Refs) -> list[Share]:
        can, ranks = self.capabilities, self._layout.data
        return shares(refs, ranks, max_tokens=can.max_tokens_per_microbatch, shares_prefix=can.shares_prefix)

    def _submit(self, method: Callable[..., A], args: Sequence[tuple[Any, ...]]) -> Future[list[A]]:
        """One set of arguments per data rank, given to all ranks that compute its rows; the answers of the primary
        ones."""
        layout = self._layout
        every = [args[layout.place(rank).data] for rank in range(layout.world_size)]
        return _then(self._group.submit(method, every), lambda found: [found[rank] for rank in layout.primaries])


class ComputeWorker:
    """The one worker of what needs no model."""

    def __init__(self, group: WorkerGroup) -> None:
        assert group.world_size == 1, "statistics of a whole step are computed in one place"
        self._group = group

    def compute(
        self, refs: Refs, fn: Callable[[Columns], Computed], inputs: Sequence[str], outputs: Sequence[str]
    ) -> Future[Metrics]:
        """Run `fn` over the columns of the whole step; it can be pickled."""
        return _then(self._group.submit(Compute.compute, [(refs, fn, inputs, outputs)]), lambda found: found[0])

    def weigh(self, steps: Sequence[OptimizerStep], terms: tuple[Term, ...], inputs: Sequence[str]) -> Future[None]:
        """Write the weights of every optimizer step as columns."""
        args = [(list(steps), terms, inputs)]
        return _then(self._group.submit(Compute.weigh, args), lambda found: found[0])

    def mismatch(self, refs: Refs, column: str) -> Future[Metrics]:
        return _then(self._group.submit(Compute.mismatch, [(refs, column)]), lambda found: found[0])

    def close(self, timeout_s: float = 10.0) -> None:
        self._group.close(timeout_s)


def _rank_step(share: Share, step: OptimizerStep | None = None) -> RankStep:
    """The share of one rank, of an optimizer step or of a pass without one."""
    if step is None:
        return RankStep(share.refs, share.num_microbatches, idle=share.idle)
    return RankStep(share.refs, share.num_microbatches, step.weights, step.recorded, step.first, share.idle)


def _ref(number: int, prompt: int, answer: int) -> Ref:
    """What shares out a row that is in no queue."""
    name = str(number)
    return Ref(
        sample_id=name,
        trajectory_id=name,
        group_id=name,
        purpose="train",
        prompt_tokens=prompt,
        total_tokens=prompt + answer,
        loss_tokens=answer,
        version_min=0,
        version_max=0,
        reward=0.0,
    )


def _then(future: Future[A], fn: Callable[[A], B]) -> Future[B]:
    """A future of `fn(result)`. Cancelled or failed as the first one; cancelling it cancels what has not begun."""
    out: Future[B] = Future()

    def done(found: Future[A]) -> None:
        if found.cancelled():
            out.cancel()
            out.set_running_or_notify_cancel()
        elif out.set_running_or_notify_cancel():
            try:
                out.set_result(fn(found.result()))
            except BaseException as e:
                out.set_exception(e)

    future.add_done_callback(done)
    out.add_done_callback(lambda f: future.cancel() if f.cancelled() else None)
    return out
