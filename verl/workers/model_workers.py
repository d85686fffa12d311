"""The driver's typed interface to its workers, with one method for each operation of a role. Every method enqueues its
call at once, divides the rows among the ranks, and combines their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verl.batch import Columns
from verl.driver.dispatch import Share, in_order, shares
from verl.errors import Refused
from verl.model_engine.base import EngineCapabilities
from verl.model_engine.layout import Layout
from verl.objective import Term
from verl.parameter_set import POLICY_SET, Delivery
from verl.types import Metrics, Ref, Refs, Segment, merge_metrics
from verl.weight_sync.base import Entry, Outlet, Readers, Sent
from verl.wire import AS_HELD
from verl.workers.compute import Compute, Computed, OptimizerStep
from verl.workers.group import Broadcast, WorkerGroup
from verl.workers.host import RankMemory
from verl.workers.rank_batch import RankStep
from verl.workers.role import AS_SAMPLED, Role, RoleSpec, UpdatePlan, View
from verl.workers.siblings import SiblingGroup
from verl.workers.waits import result_of

A = TypeVar("A")
B = TypeVar("B")
START_TIMEOUT_S = 600.0  # the time to load a model and to prove its forward pass


class ModelWorkers:
    """The ranks of one model, as `layout` arranges them. Each data rank has its own rows; of the ranks that compute the
    same rows, one returns the result.

    capabilities: those of the engine; None: the workers are queried for them
    view: how the model reads the rows of `infer`
    wire_format: the format of the weights that are sent from now on
    place: the name of the place of the workers (`Cluster.place`)
    parameters: the id of the parameter set that `send_weights` publishes
    delivery: how a policy with LoRA factors is sent from now on
    """

    def __init__(
        self,
        group: WorkerGroup,
        capabilities: EngineCapabilities | None = None,
        layout: Layout | None = None,
        view: View = AS_SAMPLED,
        place: str = "here",
        parameters: str = POLICY_SET.id,
    ) -> None:
        self._group, self._view, self._place, self.parameters = group, view, place, parameters
        self._layout = layout or Layout(world_size=group.world_size)
        self._pending_capabilities = None if capabilities else group.submit(Role.capabilities, Broadcast())
        self._can = capabilities
        self.wire_format = AS_HELD
        self.delivery: Delivery = "merged"

    @property
    def capabilities(self) -> EngineCapabilities:
        """Wait for workers that are being built, and return the engine's capabilities. A failure to build is raised
        here."""
        if self._can is None:
            assert self._pending_capabilities is not None
            late = f"{self._group.name}, whose model loads slowly or hangs, was not built"
            self._can = result_of(self._pending_capabilities, late, START_TIMEOUT_S)[0]
        return self._can

    @property
    def places(self) -> frozenset[str]:
        """The places of the workers. Workers that share a place take turns."""
        return frozenset({self._place})

    @property
    def trains(self) -> bool:
        """True if the model has an optimizer, and a state to save."""
        return self.capabilities.trains

    def infer(self, refs: Refs, outputs: Mapping[str, str]) -> Future[frozenset[str]]:
        """Compute model outputs of the rows and write them as columns, {output: column}. Return the sample ids of the
        rows with an output that is not finite."""
        args = [(_rank_step(share), outputs, self._view) for share in self._share(refs)]
        return _then(self._submit(Role.infer, args), lambda found: frozenset[str]().union(*found))

    def merge(
        self, refs: Refs, outputs: Mapping[str, str], names: Sequence[str], shares: Sequence[float]
    ) -> Future[None]:
        """Merge the outputs of several teachers for each row into one column per output."""
        return _then(self._group.submit(Role.merge, Broadcast((refs, outputs, names, shares))), lambda _: None)

    def take_metrics(self) -> Future[Metrics]:
        """Return the metrics that the workers counted since the last call."""
        return _then(self._group.submit(Role.take_metrics, Broadcast()), merge_metrics)

    def blank(self, refs: Refs, outputs: Mapping[str, str]) -> Future[None]:
        """Write columns without numbers for rows that no model can compute."""
        return _then(self._group.submit(Role.blank, Broadcast((refs, outputs))), lambda _: None)

    def with_view(self, view: View) -> ModelWorkers:
        """Return the same workers as a frozen model that reads its rows with this view."""
        return ModelWorkers(self._group, replace(self.capabilities, trains=False), self._layout, view, self._place)

    def open_sibling(self, spec: RoleSpec) -> WorkerGroup:
        """Open a second role in these workers, on the frozen base of their model, and return its group."""
        opening = self._group.submit(Role.open_sibling, Broadcast((spec,)))
        result_of(opening, f"{spec.name}, on the base of {self._group.name}, was not built", START_TIMEOUT_S)
        return SiblingGroup(self._group, spec.name)

    def logprobs(self, refs: Refs) -> Future[list[np.ndarray]]:
        """Return the log-probs of the trainable tokens of each row, float32, without writing a column."""
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
        """Make the optimizer steps of a turn, in order."""
        shared = [(step, self._share(step.refs)) for step in steps]
        args = []
        for rank in range(self._layout.data):
            mine = tuple(_rank_step(ranks[rank], step) for step, ranks in shared)
            args.append((UpdatePlan(mine, terms, inputs, recorded, prefix),))
        return _then(self._submit(Role.update, args), merge_metrics)

    def measure(self, step: OptimizerStep, terms: tuple[Term, ...], inputs: tuple[str, ...]) -> Future[Metrics]:
        """Return loss and metrics of the terms on these rows, without an optimizer step."""
        args = [(_rank_step(share, step), terms, inputs) for share in self._share(step.refs)]
        return _then(self._submit(Role.measure, args), merge_metrics)

    def score(self, refs: Refs, coef: float, alone: bool) -> Future[list[tuple[float, dict[str, float]]]]:
        """Return (reward, components) of the rows with the reward model's score, in the order of the refs."""
        parts = self._share(refs)
        args = [(_rank_step(share), coef, alone) for share in parts]
        return _then(self._submit(Role.score, args), lambda found: in_order(list(zip(parts, found))))

    def score_rows(self, rows: Sequence[tuple[Segment, ...]]) -> Future[list[float]]:
        """Return the reward model's score of each row, in this order."""
        sizes = [(len(prompt.ids), sum(len(s.ids) for s in rest)) for prompt, *rest in rows]
        parts = self._share(Refs(_ref(i, *size) for i, size in enumerate(sizes)))
        args = [([rows[i] for i in share.rows or (0,)],) for share in parts]
        return _then(self._submit(Role.score_rows, args), lambda found: in_order(list(zip(parts, found))))

    def open_set(self, name: str, folder: Path, base: Path, outlet: Outlet) -> Future[None]:
        """Read a LoRA adapter as a parameter set on top of the model's weights, to be published with `of_set`.
        Refused on several ranks, also those that share the tokens, matrices or layers of the same rows."""
        if (ranks := self._group.world_size) > 1:
            raise Refused(f"LoRA set {name!r}: it is published by a model on one rank; this one has {ranks}")
        return _then(self._group.submit(Role.open_set, Broadcast((name, folder, base, outlet))), lambda _: None)

    def close_set(self, name: str) -> Future[None]:
        return _then(self._group.submit(Role.close_set, Broadcast((name,))), lambda _: None)

    def of_set(self, name: str) -> ModelWorkers:
        """Return the same workers as the publisher of another of their parameter sets, in the dtype that they have it
        in."""
        return ModelWorkers(self._group, self._can, self._layout, self._view, self._place, name)

    def send_weights(self, version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Future[Sent]:
        """Stage the present weights of the set for the replicas, in `wire_format`."""
        args = (version, probes, copy, self.wire_format, self.parameters, self.delivery)
        found = self._group.submit(Role.send_weights, Broadcast(args))
        return _then(found, lambda sent: next(s for s in sent if s is not None))

    def weights_manifest(self) -> Future[tuple[dict[str, Entry], str]]:
        """Return the manifest that all versions of a stream have, and the address at which they are read."""
        found = self._group.submit(Role.weights_manifest, Broadcast((self.wire_format,)))
        return _then(found, lambda every: next(one for one in every if one is not None))

    def stream_weights(self, version: int, probes: Sequence[np.ndarray], readers: Readers) -> Future[Sent]:
        """Send the weights as `send_weights` does, to readers that read during the call. No copy is kept."""
        found = self._group.submit(Role.stream_weights, Broadcast((version, probes, readers, self.wire_format)))
        return _then(found, lambda sent: next(s for s in sent if s is not None))

    def lose_reader(self, turn: int, reader: int) -> Future[None]:
        """Report that this reader of a stream has stopped. The workers are informed at once, also during a call."""
        return _then(self._group.call_at_once(Role.lose_reader, (turn, reader)), lambda _: None)

    def published(self, version: int) -> Future[None]:
        """Declare the present weights to be this version, for runs that are replayed. `send_weights` includes this
        call."""
        return _then(self._group.submit(Role.published, Broadcast((version,))), lambda _: None)

    def release_weights(self, version: int) -> Future[None]:
        """Report that all replicas have this version. The workers are informed at once, also during a call."""
        return _then(self._group.call_at_once(Role.release_weights, (version, self.parameters)), lambda _: None)

    def save(self, path: Path) -> Future[None]:
        return _then(self._group.submit(Role.save, Broadcast((path,))), lambda _: None)

    def room(self) -> Future[list[RankMemory]]:
        """Return the free memory of every rank for a snapshot."""
        return self._group.submit(Role.room, Broadcast())

    def snapshot(self) -> Future[None]:
        """Copy the present state, for `write`."""
        return _then(self._group.submit(Role.snapshot, Broadcast()), lambda _: None)

    def forget(self) -> Future[None]:
        """Delete a snapshot that was not written, also during a call."""
        return _then(self._group.call_at_once(Role.forget), lambda _: None)

    def write(self, path: Path, hf_path: Path | None) -> Future[None]:
        """Start to write the snapshot, also during a call. It delays no call."""
        return _then(self._group.call_at_once(Role.write, (path, hf_path)), lambda _: None)

    def written(self) -> Future[bool]:
        """Return True once all ranks have written their snapshots. Works during a call too."""
        return _then(self._group.call_at_once(Role.written), all)

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
        """Call the method with one set of arguments per data rank, which all ranks of that data rank get, and return
        the answers of the primary ranks."""
        layout = self._layout
        every = [args[layout.place(rank).data] for rank in range(layout.world_size)]
        return _then(self._group.submit(method, every), lambda found: [found[rank] for rank in layout.primaries])


class ComputeWorker:
    """The driver's typed interface to the worker that computes without a model."""

    def __init__(self, group: WorkerGroup) -> None:
        assert group.world_size == 1, "statistics of a whole step are computed in one place"
        self._group = group

    def compute(
        self, refs: Refs, fn: Callable[[Columns], Computed], inputs: Sequence[str], outputs: Sequence[str]
    ) -> Future[Metrics]:
        """Run `fn`, which can be pickled, over the columns of the whole step."""
        return _then(self._group.submit(Compute.compute, [(refs, fn, inputs, outputs)]), lambda found: found[0])

    def weigh(self, steps: Sequence[OptimizerStep], terms: tuple[Term, ...], inputs: Sequence[str]) -> Future[None]:
        """Write the weights of every optimizer step as columns."""
        args = [(list(steps), terms, inputs)]
        return _then(self._group.submit(Compute.weigh, args), lambda found: found[0])

    def mismatch(self, refs: Refs, column: str) -> Future[Metrics]:
        """Compare the trainer's log-probs of sampled tokens, in `column`, with the sampler's."""
        return _then(self._group.submit(Compute.mismatch, [(refs, column)]), lambda found: found[0])

    def close(self, timeout_s: float = 10.0) -> None:
        self._group.close(timeout_s)


def _rank_step(share: Share, step: OptimizerStep | None = None) -> RankStep:
    """Return one rank's share of an optimizer step, or of a pass without one."""
    if step is None:
        return RankStep(share.refs, share.num_microbatches, idle=share.idle)
    return RankStep(share.refs, share.num_microbatches, step.weights, step.recorded, step.first, share.idle)


def _ref(number: int, prompt: int, answer: int) -> Ref:
    """Return a placeholder ref for a row that is in no queue, so that it can be divided among the ranks like others."""
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
    """Return a future of `fn(result)`. It is cancelled or fails as `future` does. Cancelling it cancels a call that has
    not begun."""
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
