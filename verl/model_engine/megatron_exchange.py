"""The exchange between pipeline stages that have several chunks of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

Shape = list[int]
Sent = list[tuple[Any, Tensor]]
"""Shapes that were sent, and may not have been received yet: (the request, the shape)."""


@contextmanager
def exchange_of_chunks(config: Any) -> Iterator[dict[str, Any]]:
    """Return a context with the arguments by which Megatron's schedule exchanges the states and gradients of chunks.
    config: Megatron's.

    Of two stages each is before and after the other one. Megatron's own exchange of shapes sends that of a gradient
    first and receives that of a state first, so passes of unlike widths would be received with each other's shapes.
    Here shapes are sent in the order of the tensors, and none is waited for that the other stage receives later."""
    from megatron.core import parallel_state as ranks
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    made: Any = P2PCommunicator(ranks.get_pipeline_model_parallel_group(), config)
    sent = Sent()
    made._communicate_shapes = partial(_exchange_shapes, made, sent)
    yield {"p2p_communicator": made, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
    for request, _ in sent:
        request.wait()


def _exchange_shapes(
    stages: Any,
    sent: Sent,
    tensor_send_next: Tensor | None,
    tensor_send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[Shape, Shape]:
    """Return the shapes of the tensors that come from the stage before and after this one; zeros if none comes."""
    from megatron.core.pipeline_parallel.p2p_communication import _p2p_ops

    device = torch.cuda.current_device()
    given = {"send_prev": tensor_send_prev, "send_next": tensor_send_next}
    shapes = {way: torch.tensor(t.shape, device=device) for way, t in given.items() if t is not None}
    ways = {"recv_prev": recv_prev, "recv_next": recv_next}
    came = {way: torch.zeros(3, dtype=torch.int64, device=device) for way, wanted in ways.items() if wanted}
    pending = _p2p_ops(
        **{f"tensor_{way}": (shapes | came).get(way) for way in (*given, *ways)},
        group=stages.pp_group,
        prev_pipeline_rank=stages.prev_rank,
        next_pipeline_rank=stages.next_rank,
    )
    sent.extend((pending[way], shape) for way, shape in shapes.items())
    for way in came:
        pending[way].wait()
    before, after = (came[way].tolist() if way in came else [0, 0, 0] for way in ways)
    return before, after
