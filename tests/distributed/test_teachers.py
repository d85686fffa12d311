"""What a teacher says, and what a student learns from it, is the same over the ranks of a layout as in one process."""

import pytest
from cases import OUTPUTS, TAUGHT, Case, differences, on_rank, one_process, together
from forked import run

from verl.model_engine.layout import Layout

LAYOUTS = {
    "FSDP": Layout(world_size=2),
    "SP": Layout(world_size=2, sequence=2),
    "PP": Layout(world_size=2, pipeline=2),
    "SP x PP": Layout(world_size=4, sequence=2, pipeline=2),
}


@pytest.mark.parametrize("role", ["teacher", *TAUGHT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_what_one_process_gives(layout, role):
    case = Case(LAYOUTS[layout], role, model="llama, biases", idle=layout == "FSDP")
    expected = one_process(case)
    assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
    if role == "teacher":
        assert expected.keys() == {*OUTPUTS["teacher"]}
    found = together(case, run(case.layout.world_size, lambda rank: on_rank(case, rank)))
    wrong = differences(found, expected)
    assert not wrong, wrong
