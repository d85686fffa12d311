"""Roles that have places of their own compute at the same time, and give what they give one after the other."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from test_several_teachers import one_turn
from test_virtual_ranks import config_of, samples

from verl.config.cluster import places_of
from verl.config.load import load_config
from verl.workers.model_workers import _then
from verl.workers.ray.cluster import RayCluster

COLUMNS = ("ref_logprobs", "teacher_logprobs", "old_logprobs", "advantages", "w/pg_loss")


def three(model, teacher):
    """Return a step that needs outputs of the reference, the teacher and the policy itself."""
    config = config_of("opd", model, teacher, 1, 64)
    config.algorithm.options.update({"kl_loss_coef": 0.1, "correction": "truncate", "correction_high": 2.0})
    return config


def apart(learner, *roles: str) -> None:
    for role in roles:
        learner.models[role]._place = role


def watched(learner, log: list[str]) -> None:
    for role, workers in learner.models.items():

        def infer(refs, outputs, role=role, first=workers.infer):
            log.append(f"ask {role}")
            return _then(first(refs, outputs), lambda found: (log.append(f"{role} answers"), found)[1])

        workers.infer = infer


def test_roles_of_one_place_take_turns(tiny_model, tiny_teacher):
    log: list[str] = []
    one_turn(three(tiny_model, tiny_teacher), samples(0), lambda learner: watched(learner, log))
    order = ["ref", "teacher", "actor"]
    assert log == [said for role in order for said in (f"ask {role}", f"{role} answers")]


def test_a_role_of_its_own_place_is_asked_before_the_first_has_answered(tiny_model, tiny_teacher):
    """The reference answers only after the teacher's call has begun; the policy, in the reference's place, waits for
    it."""
    log, asked = list[str](), threading.Event()

    def patch(learner) -> None:
        apart(learner, "teacher")
        watched(learner, log)
        ref, teacher = learner.models["ref"], learner.models["teacher"]
        of_ref, of_teacher = ref.infer, teacher.infer

        def late(refs, outputs) -> Future:
            found: Future = Future()

            def wait() -> None:
                if asked.wait(60):
                    _then(of_ref(refs, outputs), found.set_result)
                else:
                    found.set_exception(AssertionError("nobody else was asked meanwhile"))

            log.append("ask ref")
            threading.Thread(target=wait, daemon=True).start()
            return found

        def now(refs, outputs) -> Future:
            asked.set()
            return of_teacher(refs, outputs)

        ref.infer, teacher.infer = late, now

    one_turn(three(tiny_model, tiny_teacher), samples(0), patch)
    assert log.index("ask teacher") < log.index("ref answers") < log.index("ask actor")


@pytest.mark.parametrize("who", [("teacher",), ("teacher", "ref", "actor")])
def test_what_they_say_is_what_they_say_one_after_the_other(who, tiny_model, tiny_teacher):
    found = []
    for roles in ((), who):
        config, made = three(tiny_model, tiny_teacher), samples(0)
        step, refs, queue = one_turn(config, made, lambda learner, roles=roles: apart(learner, *roles))
        columns = queue.read(refs.of("train"), COLUMNS)
        numbers = {name: m.value for name, m in step.metrics.items() if not name.startswith(("timing", "perf"))}
        found.append(({name: columns[name].values for name in COLUMNS}, numbers))
    (one, said), (other, also) = found
    assert all(torch.equal(one[name], other[name]) for name in COLUMNS) and said.keys() == also.keys()
    assert said == pytest.approx(also, nan_ok=True)


def test_a_place_is_a_pool(tiny_model, tiny_teacher, arithmetic_data):
    given = [f"model.path={tiny_model}", f"data.train_files=[{arithmetic_data[0]}]", "algorithm.name=opd"]
    far = ["cluster.backend=ray", "cluster.roles.teacher=far", "cluster.pools={far: {ranks_per_node: 1}}"]
    pools, lives = places_of(load_config([*given, f"teacher.path={tiny_teacher}", *far]).config)
    assert {*pools} == {"main", "far"} and lives["teacher"] == "far" != lives["actor"]

    cluster = SimpleNamespace(pools=pools, roles=lives)
    assert RayCluster.place(cluster, "teacher") == "far" != RayCluster.place(cluster, "actor") == "main"

    def seen(learner) -> None:
        models = learner.models
        assert models["teacher"].places == models["ref"].places == models["actor"].places

    one_turn(three(tiny_model, tiny_teacher), samples(0), seen)
