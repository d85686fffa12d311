"""The model engine of one rank of a pipeline: the layers of a stage, sharded over the stage's ranks as usual.

A pass is one micro-batch; its states pass from stage to stage, and their gradients back, one forward and one backward
in turn (1F1B, 2006.09503). The last stage computes outputs and loss and sends them to all stages, so that the first
stage reports as in every layout.

torch.distributed.pipelining is not used: its stages exchange tensors of one shape, so every micro-batch of a step would
be padded to the longest, and positions, segments and parents, which every stage needs and every rank has, would be
keyword arguments that it can only split along a batch dimension. Here a micro-batch keeps its own length, which both
ends know from the batch, and the result is that of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.batch import Batch, part_of
from verl.checkpoint.score import ADAPTER_SCORE
from verl.checkpoint.score import WEIGHT as SCORE_WEIGHT
from verl.errors import Refused
from verl.media_tokens import MediaTokens
from verl.model_engine.base import StepOutput, WeightPart
from verl.model_engine.hf_parts import Index
from verl.model_engine.layout import Layout, layers_of_stages
from verl.model_engine.meshes import patience
from verl.model_engine.passes import Ready
from verl.model_engine.sharded import ShardedEngine, ShardedModel, ShardedPasses, part_of_rank
from verl.nn.deterministic import setting_restored
from verl.nn.pipeline_parallel import Lane, cut, one_forward_one_backward, owners
from verl.objective import Term


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of the whole model: the stage that delivers it, its shape and dtype."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype


class StageModel(ShardedModel):
    """A `ShardedModel` with the layers of one stage, and the names of the whole model."""

    _of_a_pipeline = True

    def _place(self) -> None:
        count, self.stage = self.layout.pipeline, self.place.pipeline
        self.last_stage = count - 1
        if not self.settings.packed:
            raise Refused(f"parallel.pipeline={count} wants model.engine_options.attention=auto")
        stages = layers_of_stages(self.model.config.get_text_config().num_hidden_layers, count)
        self._know_the_whole(owners(self.model, stages))
        cut(self.model, self.value_head, self.stage, stages)
        self.column = column_of(self.layout, range(count))
        trained_twice = self._whole_tied and self.lora is None
        self.ends = column_of(self.layout, (0, self.last_stage)) if trained_twice else None
        super()._place()

    def _know_the_whole(self, owner: Mapping[str, int]) -> None:
        """Record the properties of the whole model, before the layers of other stages are cut."""
        self._whole_tied = dict(super().tied)
        self._whole_names = frozenset(super().trained_names())
        self._delivery = [name for name, _ in super().named_weights()]
        every = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        self._weights = {name: _Weight(owner[name], t.shape, t.dtype) for name, t in every.items()}
        self._weights[SCORE_WEIGHT] = _Weight(self.last_stage, torch.Size((1, self.hidden_size)), torch.float32)
        if self.lora is not None:  # as they are exported
            self._weights |= dict(self.lora.tensors(self._weights)) | {ADAPTER_SCORE: self._weights[SCORE_WEIGHT]}

    @property
    def is_last(self) -> bool:
        """True for the stage with the heads."""
        return self.stage == self.last_stage

    def _counted(self) -> list[nn.Parameter]:
        twice = self.model.get_input_embeddings().weight if self.ends is not None and self.stage else None
        return [p for p in super()._counted() if p is not twice]

    def trained_names(self) -> Set[str]:
        return self._whole_names

    def named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield all weights on every stage, in one order; None for a weight that another stage delivers."""
        here: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if self.value_head is not None and self.is_last:
            here[SCORE_WEIGHT] = self.value_head.weight
        for name in self._delivery:
            yield name, here[name] if self._weights[name].stage == self.stage else None

    def delivered(self, name: str, p: Tensor | None, on_host: Any = None) -> Tensor:
        """Return a whole tensor on all stages. on_host: the mesh of a snapshot in host memory; the tensor is sent in
        its groups."""
        weight = self._weights[self._whole_tied.get(name, name)]
        if weight.stage == self.stage:
            assert p is not None, name
            whole = self.whole(p).to(weight.dtype).contiguous()
        else:
            device = self.device if on_host is None else "cpu"
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        group = self.column if on_host is None else on_host.get_group("pipeline")
        dist.broadcast(whole, group=group, group_src=weight.stage)
        return whole

    def whole_factor(self, name: str) -> Tensor:
        here = self._weights[name].stage == self.stage
        return self.delivered(name, self.model.get_parameter(name) if here else None)

    def _part(self, name: str, tensor: Tensor | None, read: Callable[[str, Tensor, Index], Tensor]) -> WeightPart:
        if tensor is not None:
            return super()._part(name, tensor, read)
        weight = self._weights[self._whole_tied.get(name, name)]
        return WeightPart(name, tuple(weight.shape), weight.dtype, None, tuple(slice(0, n) for n in weight.shape))

    @property
    def tied(self) -> dict[str, str]:
        return self._whole_tied


class StagePasses(ShardedPasses):
    """The passes of a stage. All stages return the results of the last one."""

    local: StageModel

    def __init__(self, local: StageModel) -> None:
        super().__init__(local)
        self._came: Tensor | None = None  # [T, H] from the stage before, during a pass
        ahead, back = (column_of(local.layout, range(local.layout.pipeline)) for _ in range(2))
        self._ahead, self._back = Lane(ahead, 1), Lane(back, -1)

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int, extra_outputs: Sequence[str]
    ) -> StepOutput:
        before = self._apart()
        found = super().forward_backward(batch, terms, num_microbatches, extra_outputs)
        self._sum_of_both(before)
        metrics = [found.metrics]
        dist.broadcast_object_list(metrics, group=self.local.column, group_src=self.local.last_stage)
        return StepOutput(metrics[0], self._on_all_stages(dict(found.columns)))

    def infer(self, batch: Batch, columns: Sequence[str]) -> dict[str, Tensor]:
        return self._on_all_stages(super().infer(batch, columns))

    def policy_outputs(self, batch: Batch) -> dict[str, Tensor]:
        found = super().policy_outputs(batch)
        logprobs = torch.empty(batch.num_loss_tokens, dtype=self._precision.master, device=self.local.device)
        return self._on_all_stages({"logprobs": logprobs.copy_(found["logprobs"]) if self.local.is_last else logprobs})

    def _on_all_stages(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the results of the last stage to all stages, in place, and return them."""
        for lane in (self._ahead, self._back):
            lane.settle()
        for values in found.values():
            sent = values.to(self.local.device)
            dist.broadcast(sent, group=self.local.column, group_src=self.local.last_stage)
            values.copy_(sent)
        return found

    def _ready(self, batch: Batch, terms: Sequence[Term], count: int, wanted: Sequence[str]) -> Iterator[Ready]:
        parts = self.cuts(batch, count)
        read = super(ShardedPasses, self)._outputs
        flying: deque[tuple[Tensor | None, Tensor]] = deque()  # received and sent states of forward passes
        for forward, i in one_forward_one_backward(self.local.stage, self._layout.pipeline, len(parts)):
            if forward:
                part = part_of(batch, parts[i])
                came, out = self._through(part, read, wanted)
                if self.local.is_last:
                    losses: list[Tensor] = []
                    yield parts[i], part, out, losses.append
                    (out,) = losses
                flying.append((came, out))
            else:
                self._meet_copies(i == len(parts) - 1)
                came, out = flying.popleft()
                d_out = None if self.local.is_last else self._back.receive(out.shape, out.dtype, out.device)
                if out.requires_grad:  # a first stage may have no factor of LoRA
                    with setting_restored():
                        torch.autograd.backward(out, d_out)
                if came is not None:
                    assert came.grad is not None
                    self._back.send(came.grad)

    def _through(self, batch: Batch, read: Callable[..., Any], *args: Any) -> tuple[Tensor | None, Any]:
        """Run this stage. Return the states [T, H] received from the stage before (None on the first), and the result:
        states [T, H], which are sent to the next stage; on the last stage the result of `read`."""
        came, local = None, self.local
        kind = self.compute if self._copy is not None else self._precision.master
        if local.stage:
            tokens = batch.num_tokens if self._layout.tokens == 1 else self._exchange(batch).run
            came = self._ahead.receive((tokens, local.hidden_size), kind, local.device)
            came.requires_grad_(torch.is_grad_enabled())
        self._came = came
        out = local.root.run(read, batch, *args) if local.is_last else local.root.run(self._hidden_packed, batch)
        self._came = None
        if not local.is_last:
            assert out.dtype == kind, f"states between stages are {out.dtype}"
            self._ahead.send(out)
        return came, out

    def _run(self, fn: Callable[..., dict[str, Tensor]], batch: Batch, *args: Any) -> dict[str, Tensor]:
        _, found = self._through(batch, fn, *args)
        return found if self.local.is_last else {}

    def _entry(self, ids: Tensor, media: MediaTokens | None = None) -> dict[str, Any]:
        return super()._entry(ids, media) if self._came is None else {"inputs_embeds": self._came[None]}

    # -- weights that two stages hold ----------------------------------------------------------------------------------

    def _apart(self) -> Tensor | None:
        """Remove the gradient of tied embeddings, already summed over both ends, and return it, so that the next passes
        begin at 0. None without tied embeddings on two stages."""
        if self.local.ends is None:
            return None
        shared = self.local.model.get_input_embeddings().weight
        before: Tensor | None = shared.grad
        shared.grad = None
        return before

    def _sum_of_both(self, before: Tensor | None) -> None:
        """Sum the gradient of tied embeddings over the first stage (input tokens) and the last stage (output head)."""
        if self.local.ends is None:
            return
        shared = self.local.model.get_input_embeddings().weight
        grad = torch.zeros_like(shared) if shared.grad is None else shared.grad
        dist.all_reduce(part_of_rank(grad), group=self.local.ends)
        shared.grad = grad if before is None else before + grad


class PipelinedEngine(ShardedEngine):
    """A `TorchEngine` on many ranks, each with the layers of one stage; the arguments are those of `ShardedModel`."""

    _parts = StageModel, StagePasses


def column_of(layout: Layout, stages: Sequence[int]) -> Any:
    """Create the process groups that connect the ranks at one place of these stages, and return this rank's; None if it
    is in none of them. All ranks call this in the same order."""
    each, mine = layout.world_size // layout.pipeline, None
    for place in range(each):
        ranks = [stage * each + place for stage in stages]
        group = dist.new_group(ranks, timeout=patience())
        if dist.get_rank() in ranks:
            mine = group
    return mine
