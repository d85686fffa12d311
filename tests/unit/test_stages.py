"""The layers of a pipeline's stages, and the order of their passes."""

from __future__ import annotations

from itertools import product

import pytest
from each import each

from verl.model_engine.layout import layers_of_stages
from verl.nn.pipeline_parallel import one_forward_one_backward


def test_stages_share_the_layers_with_the_ends_counted() -> None:
    assert layers_of_stages(24, 1) == [range(24)]
    assert layers_of_stages(2, 2) == [range(0, 1), range(1, 2)]
    assert [len(run) for run in layers_of_stages(28, 4)] == [7, 8, 7, 6]
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            runs = layers_of_stages(layers, stages)
            assert [i for run in runs for i in run] == [*range(layers)], "each once, in order"
            work = [len(run) for run in runs]
            assert min(work) >= 1
            work[0], work[-1] = work[0] + 1, work[-1] + 1
            assert max(work) - min(work) <= 1 or max(work) == 2, (layers, stages, work)
    with pytest.raises(ValueError, match="parallel.pipeline=3: 2 layers cannot be 3 stages; use at most 2"):
        layers_of_stages(2, 3)


@each("stages, count", product([1, 2, 3, 5], [0, 1, 2, 7]))
def test_one_forward_one_backward_ends_and_holds_no_more_than_it_must(stages: int, count: int) -> None:
    orders = [[*one_forward_one_backward(stage, stages, count)] for stage in range(stages)]
    for stage, order in enumerate(orders):
        assert [i for forward, i in order if forward] == [i for forward, i in order if not forward] == [*range(count)]
        held = most = 0
        for forward, _ in order:
            held += 1 if forward else -1
            most = max(most, held)
        assert most == min(count, stages - stage)
    at, done = [0] * stages, set()
    while any(at[s] < len(orders[s]) for s in range(stages)):  # each waits for its neighbours, and none for ever
        moved = False
        for s in range(stages):
            if at[s] < len(orders[s]):
                forward, i = orders[s][at[s]]
                ready = {True: s == 0 or (s - 1, True, i) in done, False: s == stages - 1 or (s + 1, False, i) in done}
                if ready[forward]:
                    done.add((s, forward, i))
                    at[s], moved = at[s] + 1, True
        assert moved, (at, orders)
