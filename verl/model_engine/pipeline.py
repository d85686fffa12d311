"""The model engine of one rank of a pipeline: the layers of a stage, sharded over the stage's ranks as usual.

A pass is one micro-batch; its states pass from stage to stage, and their gradients back, one forward and one backward
in turn (1F1B, 2006.09503). The last stage computes outputs and loss and sends them to all stages, so that the first
stage reports as in every layout.

Not torch.distributed.pipelining: its stages exchange tensors of one shape, so every micro-batch of a step would be
padded to the longest, and positions, segments and parents, which every stage needs and every rank has, would travel as
keyword arguments that it can only split along a batch dimension. Here a micro-batch keeps its own length, which both
ends know from the batch, and the result is that of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.batch import Batch, part_of
from verl.checkpoint.score import WEIGHT as SCORE_WEIGHT
from verl.errors import Refused
from verl.model_engine.base import StepOutput, WeightPart
from verl.model_engine.layout import Layout, layers_of_stages
from verl.model_engine.sharded import ShardedEngine, part_of_rank, patience
from verl.model_engine.snapshot import Snapshot
from verl.model_engine.torch_engine import Ready
from verl.nn.pipeline_parallel import Lane, cut, one_forward_one_backward, owners
from verl.objective import Term


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of the whole model: the stage that delivers it, and what it looks like."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype


class PipelinedEngine(ShardedEngine):
    """A `ShardedEngine` with the layers of one stage."""

    _of_a_pipeline = True

    def _place(self) -> None:
        count, self._stage = self.layout.pipeline, self.place.pipeline
        self._last_stage = count - 1
        if not self._packed:
            raise Refused(f"parallel.pipeline={count} wants model.engine_options.attention=auto")
        stages = layers_of_stages(self.model.config.get_text_config().num_hidden_layers, count)
        self._know_the_whole(owners(self.model, stages))
        cut(self.model, self.value_head, self._stage, stages)
        self._came: Tensor | None = None  # [T, H] from the stage before, during a pass
        self._column, ahead, back = (_column(self.layout, range(count)) for _ in range(3))
        self._ahead, self._back = Lane(ahead, 1), Lane(back, -1)
        self._ends = _column(self.layout, (0, self._last_stage)) if self._whole_tied else None
        super()._place()

    def _know_the_whole(self, owner: Mapping[str, int]) -> None:
        """Record the properties of the whole model, before the layers of other stages are cut."""
        self._whole_tied = dict(super().tied)
        self._whole_names = frozenset(super()._trained_names())
        self._delivery = [name for name, _ in super()._named_weights()]
        every = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        self._weights = {name: _Weight(owner[name], t.shape, t.dtype) for name, t in every.items()}
        size = torch.Size((1, self.model.config.get_text_config().hidden_size))
        self._weights[SCORE_WEIGHT] = _Weight(self._last_stage, size, torch.float32)

    # -- passes --------------------------------------------------------------------------------------------------------

    def _ready(self, batch: Batch, count: int, wanted: Sequence[str]) -> Iterator[Ready]:
        parts = self._passes(batch, count)
        read = super(ShardedEngine, self)._outputs
        flying: deque[tuple[Tensor | None, Tensor]] = deque()  # what came in and what went out of a forward pass
        for forward, i in one_forward_one_backward(self._stage, self.layout.pipeline, len(parts)):
            if forward:
                part = part_of(batch, parts[i])
                came, out = self._through(part, read, wanted)
                if self._is_last:
                    losses: list[Tensor] = []
                    yield parts[i], part, out, losses.append
                    (out,) = losses
                flying.append((came, out))
            else:
                self._meet_copies(i == len(parts) - 1)
                came, out = flying.popleft()
                d_out = None if self._is_last else self._back.receive(out.shape, out.dtype, out.device)
                torch.autograd.backward(out, d_out)
                if came is not None:
                    assert came.grad is not None
                    self._back.send(came.grad)

    def _through(self, batch: Batch, read: Callable[..., Any], *args: Any) -> tuple[Tensor | None, Any]:
        """Return the states received from the stage before [T, H], and the result of this stage: states [T, H], sent to
        the next one; on the last stage the result of `read`."""
        came = None
        if self._stage:
            tokens = batch.num_tokens if self.layout.sequence == 1 else self._exchange(batch).run
            shape = (tokens, self.model.config.get_text_config().hidden_size)
            came = self._ahead.receive(shape, self.master, self.device).requires_grad_(torch.is_grad_enabled())
        self._came = came
        out = self._root.run(read, batch, *args) if self._is_last else self._root.run(self._hidden_packed, batch)
        self._came = None
        if not self._is_last:
            assert out.dtype == self.master, f"states between stages are {out.dtype}"
            self._ahead.send(out)
        return came, out

    def _run(self, fn: Callable[..., dict[str, Tensor]], batch: Batch, *args: Any) -> dict[str, Tensor]:
        _, found = self._through(batch, fn, *args)
        return found if self._is_last else {}

    def _entry(self, ids: Tensor) -> dict[str, Tensor]:
        return super()._entry(ids) if self._came is None else {"inputs_embeds": self._came[None]}

    @property
    def _is_last(self) -> bool:
        return self._stage == self._last_stage

    # -- what the last stage found -------------------------------------------------------------------------------------

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int = 0, extra_outputs: Sequence[str] = ()
    ) -> StepOutput:
        before = self._apart()
        found = super().forward_backward(batch, terms, num_microbatches, extra_outputs)
        self._sum_of_both(before)
        metrics = [found.metrics]
        dist.broadcast_object_list(metrics, group=self._column, group_src=self._last_stage)
        return StepOutput(metrics[0], self._told(dict(found.columns)))

    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False) -> dict[str, Tensor]:
        return self._told(super().infer(batch, columns, average))

    def _policy_outputs(self, batch: Batch) -> dict[str, Tensor]:
        found = super()._policy_outputs(batch)
        logprobs = torch.empty(batch.num_loss_tokens, dtype=self.master, device=self.device)
        return self._told({"logprobs": logprobs.copy_(found["logprobs"]) if self._is_last else logprobs})

    def _told(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """On every stage what the last one has."""
        for lane in (self._ahead, self._back):
            lane.settle()
        for values in found.values():
            sent = values.to(self.device)
            dist.broadcast(sent, group=self._column, group_src=self._last_stage)
            values.copy_(sent)
        return found

    # -- weights that two stages hold ----------------------------------------------------------------------------------

    def _apart(self) -> Tensor | None:
        """Set aside what both ends have summed already."""
        if self._ends is None:
            return None
        shared = self.model.get_input_embeddings().weight
        before, shared.grad = shared.grad, None
        return before

    def _sum_of_both(self, before: Tensor | None) -> None:
        """The gradient of tied embeddings: of the tokens on the first stage, of the head on the last."""
        if self._ends is None:
            return
        shared = self.model.get_input_embeddings().weight
        grad = torch.zeros_like(shared) if shared.grad is None else shared.grad
        dist.all_reduce(part_of_rank(grad), group=self._ends)
        shared.grad = grad if before is None else before + grad

    def _counted(self) -> list[nn.Parameter]:
        twice = self.model.get_input_embeddings().weight if self._ends is not None and self._stage else None
        return [p for p in super()._counted() if p is not twice]

    # -- weights and state ---------------------------------------------------------------------------------------------

    def _named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield all weights on every stage, in one order; None for a weight that another stage delivers."""
        here: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if self.value_head is not None and self._is_last:
            here[SCORE_WEIGHT] = self.value_head.weight
        for name in self._delivery:
            yield name, here[name] if self._weights[name].stage == self._stage else None

    def _delivered(self, name: str, p: Tensor | None, *, host: bool = False) -> Tensor:
        """Return a whole tensor on all stages. host: take it from a snapshot in host memory; its ranks meet in a group
        of their own."""
        weight = self._weights[self._whole_tied.get(name, name)]
        if weight.stage == self._stage:
            assert p is not None, name
            whole = self._whole(p).to(weight.dtype).contiguous()
        else:
            whole = torch.empty(weight.shape, dtype=weight.dtype, device="cpu" if host else self.device)
        group = self._column
        if host:
            assert self._host is not None
            group = self._host[0][0].get_group("pipeline")
        dist.broadcast(whole, group=group, group_src=weight.stage)
        return whole

    def weight_parts(self) -> Iterator[WeightPart]:
        for name, tensor in self._named_weights():
            if tensor is not None:
                yield self._part(name, tensor)
            else:
                weight = self._weights[self._whole_tied.get(name, name)]
                whole = tuple(slice(0, size) for size in weight.shape)
                yield WeightPart(name, tuple(weight.shape), weight.dtype, None, whole)

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), whole=partial(self._delivered, host=True))

    @property
    def tied(self) -> dict[str, str]:
        return self._whole_tied

    def _trained_names(self) -> Set[str]:
        return self._whole_names


def _column(layout: Layout, stages: Sequence[int]) -> Any:
    """A new group of the ranks that stand where this one does, in these stages; None where it is in none of them. All
    ranks call this in the same order."""
    each, mine = layout.world_size // layout.pipeline, None
    for place in range(each):
        ranks = [stage * each + place for stage in stages]
        group = dist.new_group(ranks, timeout=patience())
        if dist.get_rank() in ranks:
            mine = group
    return mine
