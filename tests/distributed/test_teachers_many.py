"""The outputs of a teacher, and the gradients of a student, are the same over the ranks of a layout as in one
process."""

import asyncio
import os
from dataclasses import replace

import pytest
import torch
from cases import OUTPUTS, TAUGHT, Case, differences, engine, on_rank, one_process, share, together
from fakes import put
from forked import run
from test_virtual_ranks import config_of, samples

from verl.batch import loss_index
from verl.config.tree import changed
from verl.driver.assemble import offline_learner
from verl.driver.step import Step, experience_and_update
from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec

FULL = bool(os.environ.get("FULL_GRID"))
LAYOUTS = {"FSDP": Layout(world_size=2), "SP x PP": Layout(world_size=4, sequence=2, pipeline=2)}
if FULL:
    LAYOUTS |= {"SP": Layout(world_size=2, sequence=2), "PP": Layout(world_size=2, pipeline=2)}


LAYOUTS |= {"TP": Layout(world_size=2, tensor=2), "TP x DP": Layout(world_size=4, tensor=2)}
CASES = [
    (layout, role) for layout in LAYOUTS for role in ("teacher", *TAUGHT) if ("TP" in layout, role) != (True, "gkd")
]
if not FULL:
    CASES.remove(("SP x PP", "gkd_topk")), CASES.remove(("FSDP", "gkd"))
    CASES.remove(("TP x DP", "teacher")), CASES.remove(("TP", "gkd_topk"))


@pytest.mark.parametrize("layout,role", CASES)
def test_every_layout_gives_what_one_process_gives(layout, role):
    case = Case(LAYOUTS[layout], role, model="llama, biases", idle=layout == "FSDP")
    expected = one_process(case)
    assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
    if role == "teacher":
        assert expected.keys() == {*OUTPUTS["teacher"]}
    found = together(case, run(case.layout.world_size, lambda rank: on_rank(case, rank)))
    wrong = differences(found, expected)
    assert not wrong, wrong


@pytest.mark.parametrize("layout, kept", [("FSDP", 0.5), ("SP x PP", 2.0), *([("FSDP", 2.0)] if FULL else [])])
def test_the_average_of_the_weights_is_that_of_one_process(layout, kept):
    """Two optimizer steps, then the outputs of the average, or of the copy of the first publish, and after it those of
    the policy."""
    case = Case(LAYOUTS[layout], "actor", model="llama, biases")
    spec = OptimSpec(lr=1e-1, eps=1.0, average=kept)  # eps: Adam makes nothing of the order of sums

    def says(e, batch, count: int):
        terms = case.batch()[2]
        for version in (2, 3):
            e.forward_backward(batch, terms, count)
            e.optim_step()
            e.published(version)
        return [e.infer(batch, ("logprobs",), average)["logprobs"] for average in (False, True, False)]

    def on(rank: int):
        rows, batch, count = share(case, rank)
        return rows, says(engine(case.model, case.role, case.layout, optim=spec), batch, count)

    batch = case.batch()[1]
    now, average, again = says(engine(case.model, case.role, None, optim=spec), batch, 0)
    assert torch.equal(now, again) and float((now - average).abs().max()) > 1e-3
    for rows, found in run(case.layout.world_size, on):
        at = loss_index(batch, rows)
        for theirs, ours in zip(found, (now, average, now), strict=True):
            torch.testing.assert_close(theirs[: len(at)], ours[at], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not FULL, reason="minutes: make test-all; test_several_teachers has deaths")
def test_the_others_teach_on_when_one_of_them_is_killed(ray_session, tmp_path, tiny_model, tiny_teacher, capsys):
    config = config_of("opd", tiny_model, tiny_teacher, 1, 64)
    config = changed(config, {"teacher.path": None, "teacher.paths": {"a": str(tiny_teacher), "b": str(tiny_model)}})
    config = changed(config, {"cluster.backend": "ray", "cluster.pools": {"main": {"cpus_per_rank": 3.0}}})
    config = changed(config, {"pipeline.max_invalid_share": 0.6})
    config = changed(config, {"step.updates_per_step": 1, "step.epochs_per_step": 1})
    learner = offline_learner(config, 2, tmp_path / "crash")
    try:
        for number, dead in ((0, False), (1, True)):
            if dead:
                members = learner.models["teacher"]._members
                for actor in members["b"]._group._actors:
                    ray_session.kill(actor, no_restart=True)
            named = {"g0": "a", "g1": "b", "g2": "a", "g3": "b"}
            made = [
                replace(s, sample_id=f"{number}/{s.sample_id}", trajectory_id=f"{number}/{s.trajectory_id}")
                for s in samples(0)
            ]
            refs = put(learner.queue, [replace(s, teacher=named[s.group_id]) for s in made])
            step = Step(number)
            asyncio.run(experience_and_update(learner, step, refs))
            gone = {r.sample_id for r in step.trained if r.outcome != "ok"}
            assert {r.sample_id for r in refs if r.teacher == "b" and dead} <= gone
            assert len(gone) == (9 if dead else 1), "one answer has no valid reward"
            assert step.metrics["teacher/invalid"].value == (0.5 if dead else 0.0)
            assert step.metrics["actor/grad_norm"].value > 0
    finally:
        learner.close()
    assert "its samples are Invalid from now on" in capsys.readouterr().out
