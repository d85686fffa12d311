"""Terms that need more than the log-probs of a pass, on Megatron's ranks: ratios of whole sequences, two passes,
rejected tokens, a critic, and teachers. What one process finds is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, differences, one_process, together
from forked import run
from megatron_engines import LAYOUTS, built, folder, gradients, on_rank, teacher
from test_roles import CASES, same_turn, saved_model

from verl.batch import Batch, select_rows
from verl.model_engine.megatron import row_lengths

TIED, BIASES = "qwen3, tied", "llama, biases"
TURNS = [
    ("two passes", ("TP x DP", "PP x DP")),
    ("ratios of whole sequences", ("TP x DP", "TP x PP")),
    ("rejected tokens count", ("DP",)),
    ("a critic", ("PP x DP",)),
]
TEACHING = [  # the layout, what is computed, the model, a shared prompt, a rank without rows
    ("DP", "gkd", TIED, True, False),
    ("PP x DP", "gkd", BIASES, True, False),
    ("PP", "gkd_topk", TIED, False, False),
    ("DP", "gkd_topk", BIASES, True, True),
    ("PP x DP", "teacher", TIED, True, False),
    ("TP", "gkd_topk", BIASES, True, False),
    ("TP", "teacher", TIED, False, False),
]


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("case, layouts", TURNS)
def test_a_turn_of_the_driver_is_that_of_one_rank(case, layouts, four_heads, monkeypatch):
    """Four optimizer steps over rows of unlike lengths: gradients, and the metrics of all of them."""
    assert case in CASES
    whole = {"model.engine_options": {"distributed_optimizer": False}}  # else a data rank has the sum of a part alone
    given = {"dtype": "float32", "rtol": 1e-5, "engine_name": "megatron", "gradients": gradients}
    given["engine_options"] = whole
    same_turn(case, {name: LAYOUTS[name] for name in layouts}, four_heads, monkeypatch, **given)


@pytest.mark.parametrize("layout, role, model, shared, idle", TEACHING)
def test_what_a_teacher_returns_and_what_a_student_learns_are_those_of_one_process(layout, role, model, shared, idle):
    at = LAYOUTS[layout]
    case = Case(at, role, shared, idle, model)
    expected = one_process(case)
    assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
    folder(model), teacher()  # before the ranks are forked
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank)))
    assert not (wrong := differences(found, expected)), wrong


def test_a_pass_that_only_another_rank_has_is_of_the_shortest_row_and_adds_nothing():
    case = Case(LAYOUTS["one"])
    folder(case.model)

    def on(_: int) -> tuple[bool, list[int], list[int]]:
        e = built(case.model, case.role, case.layout)
        _, whole, terms = case.batch()
        batch = select_rows(whole, (-row_lengths(whole)).argsort())  # the longest first
        e.forward_backward(batch, terms)
        before = gradients(e)
        e.updates.zero_grad()
        cuts, padded, widths = e.passes.cuts, e.passes._padded, list[int]()

        def more(*given: Any) -> list[np.ndarray]:
            return [*cuts(*given), np.zeros(0, np.int64)]

        def seen(part: Batch) -> Any:
            ids, *rest = padded(part)
            widths.append(ids.numel())
            return ids, *rest

        e.passes.cuts, e.passes._padded = more, seen
        e.forward_backward(batch, terms)
        after = gradients(e)
        return all(torch.equal(after[n], g) for n, g in before.items()), widths, row_lengths(batch).tolist()

    ((same, widths, lengths),) = run(1, on)
    assert same and widths[-1] == lengths[-1] < lengths[0]
