"""Ranks of models over Ray by another interpreter than Ray's (`model.python`): what they compute is what this process
computes."""

from __future__ import annotations

import sys
import sysconfig
import venv
from dataclasses import replace

import child_engine
import pytest
from cases import Case, differences, model, share
from child_engine import EngineRank
from test_child_engine import UPDATES, WAIT_S, tensors

from tests.worker_contract import build, interpreter, nothing
from verl.config.backends import MODEL
from verl.model_engine.base import EngineContext
from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec
from verl.types import merge_metrics
from verl.workers.group import Broadcast, WorkerDied
from verl.workers.pools import Pool
from verl.workers.ray.cluster import RayCluster


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """An environment with a module that is only there. It finds the packages of this one, but not the project."""
    folder = tmp_path_factory.mktemp("an environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next((folder / "lib").glob("python3*/site-packages"))
    (packages / "those_of_the_other.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (packages / "only_there.py").write_text("")
    return str(folder / "bin" / "python")


def test_an_interpreter_that_a_node_does_not_have_ends_the_start(ray_session, tmp_path):
    given = {"layout": Layout(world_size=1), "set_up": nothing, "python": "/no/such/python", "start_timeout_s": 8.0}
    cluster = RayCluster({"main": Pool()}, {"actor": "main"}, **given)
    try:
        group = cluster.start("actor", build, (tmp_path,))
        line = r"rank 0 of actor \(process \? on \?\) has not started within cluster.start_timeout_s=8: is model.python"
        with pytest.raises(WorkerDied, match=line):
            group.submit(interpreter, Broadcast()).result(WAIT_S)
    finally:
        cluster.close()


def test_two_ranks_of_another_interpreter_train_as_one_process(ray_session, other, tmp_path):
    """Loss and gradients of each update. A role without a model keeps the interpreter of Ray."""
    layout = Layout(world_size=2, tensor=2)
    case, folder = Case(layout), tmp_path / "model"
    model(case.model).save_pretrained(folder)
    context = EngineContext(
        folder=folder, optim=OptimSpec(lr=1e-2, eps=1e-5), dtype="float32", max_tokens_per_microbatch=60
    )
    _, batch, terms = case.batch()
    (one,) = child_engine.build(MODEL["torch"].build, context, ranks=[None])
    roles = {"actor": "main", "compute": "main"}
    cluster = RayCluster({"main": Pool(ranks_per_node=2)}, roles, layout=layout, set_up=nothing, python=other)
    try:
        given = (MODEL["sharded"].build, replace(context, layout=layout))
        group = cluster.start("actor", child_engine.build, given, world_size=2)
        beside = cluster.start("compute", build, (tmp_path,))
        assert beside.submit(interpreter, Broadcast()).result(WAIT_S) == [(sys.executable, False)]
        assert group.submit(interpreter, Broadcast()).result(WAIT_S) == [(other, True)] * 2
        for number in range(UPDATES):
            metrics, gradients = one.update(batch, terms, 0)
            parts = [share(case, rank)[1:] for rank in range(2)]
            found = group.submit(EngineRank.update, [(part, terms, count) for part, count in parts]).result(WAIT_S)
            assert not differences(tensors(found[1][1]), tensors(gradients), rtol=1e-4 if number else 1e-5)
            theirs = merge_metrics([found[rank][0] for rank in layout.primaries])
            for term in terms:
                assert theirs[term.name].total == pytest.approx(metrics[term.name].total, rel=1e-5)
    finally:
        cluster.close()
