"""A teacher in a place of its own scores the groups of later steps while the policy learns: by the order of calls, the
same rows with the same columns, through a resume and a failure."""

import threading

import numpy as np
import pytest
from small_runs import metrics_of, small_args, trained

from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.track.samples import read_samples
from verl.workers.inproc import InprocCluster
from verl.workers.role import Role

STEPS, GROUPS = 4, 2


def run(root, model, teacher, data, *more: str):
    """The metrics of each step."""
    given = ("algorithm.name=opd", f"teacher.path={teacher}", "pipeline.staleness=1", "optim.lr=1e-12")
    given += (f"run.total_steps={STEPS}", f"step.prompts_per_step={GROUPS}", "step.samples_per_prompt=2")
    given += ("algorithm.kl_loss_coef=null", "algorithm.aggregation=null", "health.zero_variance_warn=1")
    run_rl(load_config(small_args(root, model, data[:1], *given, *more)), quiet=True)
    return metrics_of(root / "r")


@pytest.fixture
def apart(monkeypatch):
    """The teacher has a place of its own."""
    monkeypatch.setattr(InprocCluster, "place", lambda self, name: name if name == "teacher" else "here")


def is_teacher(outputs) -> bool:
    """Return true if a model that writes these columns is the teacher."""
    return any(column.startswith("teacher") for column in outputs.values())


class Scored:
    """The groups that the teacher has got so far, for which the policy waits before it trains."""

    def __init__(self, monkeypatch) -> None:
        self.groups, self.changed = list[str](), threading.Condition()
        infer, update, scored = Role.infer, Role.update, self

        def asked(self, step, outputs, *view):
            if is_teacher(outputs):
                with scored.changed:
                    scored.groups += [r.group_id for r in step.refs]
                    scored.changed.notify_all()
            return infer(self, step, outputs, *view)

        def learns(self, plan):
            with scored.changed:
                before = {r.group_id for step in plan.steps for r in step.refs}
                scored.trained |= before
                if len(scored.trained) < STEPS * GROUPS:
                    later = scored.changed.wait_for(lambda: {*scored.groups} - scored.trained, 60)
                    assert later, "nobody is scored while the policy learns"
            return update(self, plan)

        self.trained: set[str] = set()
        monkeypatch.setattr(Role, "infer", asked)
        monkeypatch.setattr(Role, "update", learns)


def rows_of(root) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(ids, advantages) of every row of a run, which the teacher's log-probs are in."""
    return {
        r.sample_id: (r.response_ids, r.tokens["advantages"])
        for s in range(1, STEPS + 1)
        for r in read_samples(root / "r", s)
    }


def test_later_groups_are_scored_while_the_policy_learns(
    apart, monkeypatch, tmp_path, tiny_model, tiny_teacher, arithmetic_data
):
    scored = Scored(monkeypatch)
    found = run(tmp_path, tiny_model, tiny_teacher, arithmetic_data)
    assert len(scored.groups) == 2 * STEPS * GROUPS and len({*scored.groups}) == STEPS * GROUPS, "each row once"
    assert any(found[s]["teacher/ahead"] > 0 for s in range(1, STEPS + 1))
    assert all(found[s]["teacher/invalid"] == 0 for s in range(1, STEPS + 1))


def test_what_is_trained_is_what_is_trained_without(
    apart, monkeypatch, tmp_path, tiny_model, tiny_teacher, arithmetic_data
):
    """The policy does not change: all versions sample the same answers."""
    given = (tiny_model, tiny_teacher, arithmetic_data)
    ahead = run(tmp_path / "ahead", *given)
    monkeypatch.undo()
    plain = run(tmp_path / "plain", *given)
    assert any("teacher/ahead" in m for m in ahead.values()) and not any("teacher/ahead" in m for m in plain.values())
    one, other = rows_of(tmp_path / "ahead"), rows_of(tmp_path / "plain")
    assert one.keys() == other.keys() and len(one) == 2 * STEPS * GROUPS
    for name, (ids, advantages) in one.items():
        assert np.array_equal(ids, other[name][0])
        np.testing.assert_allclose(advantages, other[name][1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_groups_in_flight_are_scored_again_after_a_resume(apart, tmp_path, tiny_model, tiny_teacher, arithmetic_data):
    given = (tmp_path, tiny_model, tiny_teacher, arithmetic_data, "run.save_every_steps=1")
    run(*given, "run.total_steps=2")
    found, ids = run(*given), [i for step in trained(tmp_path / "r").values() for i in step]
    assert len(ids) == len({*ids}) == 2 * STEPS * GROUPS, "no row is lost or doubled"
    assert any(found[s]["teacher/ahead"] > 0 for s in (3, 4)) and all(m["teacher/invalid"] == 0 for m in found.values())


def test_not_in_a_deterministic_run(apart, tmp_path, tiny_model, tiny_teacher, arithmetic_data):
    """The packing of rows would depend on the times at which groups end."""
    found = run(tmp_path, tiny_model, tiny_teacher, arithmetic_data, "run.deterministic=true", "run.total_steps=1")
    assert "teacher/ahead" not in found[1] and "teacher/kl" in found[1]


def test_a_teacher_that_fails_before_its_step_ends_the_run_with_its_cause(
    apart, monkeypatch, tmp_path, tiny_model, tiny_teacher, arithmetic_data
):
    infer, asked = Role.infer, list[str]()

    def fails(self, step, outputs, *view):
        if is_teacher(outputs):
            asked.append("teacher")
            if len(asked) == 1:
                raise RuntimeError("the teacher fell over")
        return infer(self, step, outputs, *view)

    monkeypatch.setattr(Role, "infer", fails)
    with pytest.raises(RuntimeError, match="the teacher fell over"):
        run(tmp_path, tiny_model, tiny_teacher, arithmetic_data)
    assert asked == ["teacher"], "it is asked for nothing more"
