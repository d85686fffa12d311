"""Guarantees of the design for a running process: no tensor in the driver, all arguments can be sent to another
process, few frames from the command to the loss."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import matrix
from small_runs import metrics_of, small_args, small_run

from verl import cli
from verl.driver import launch
from verl.driver.run import Run
from verl.model_engine import passes
from verl.rollout.embedded.front import EmbeddedEngine
from verl.transfer_queue.memory import MemoryQueue
from verl.workers import inproc
from verl.workers.inproc import InprocGroup
from verl.workers.model_workers import ModelWorkers

HOUSE = Path(cli.__file__).parent
ELSEWHERE = (InprocGroup, MemoryQueue, EmbeddedEngine)
"""The classes that stand in for another process: workers, the queue, replicas."""
SKIPPED = (types.ModuleType, threading.Thread, type, types.FrameType, types.CodeType)


def held_by(root: object, elsewhere: tuple[type, ...] = ELSEWHERE) -> Iterator[tuple[object, str]]:
    """Everything reachable from `root` in the driver, with a path to it."""
    seen: set[int] = set()
    todo: list[tuple[object, str]] = [(root, type(root).__name__)]
    while todo:
        at, path = todo.pop()
        if id(at) in seen or isinstance(at, (*SKIPPED, *elsewhere)):
            continue
        seen.add(id(at))
        yield at, path
        if isinstance(at, types.FunctionType):  # its globals are its module's, not its own
            inside: list[object] = [*(at.__closure__ or ()), *(at.__defaults__ or ()), at.__kwdefaults__]
        else:
            inside = gc.get_referents(at)
        todo += [(x, f"{path} > {type(x).__name__}") for x in inside]


@matrix("more", [(), ("algorithm.name=ppo", "cluster.virtual_ranks=2"), ("pipeline.staleness=1",)])
def test_nothing_reachable_from_the_driver_is_a_tensor(more, tmp_path, tiny_model, arithmetic_data, monkeypatch):
    runs: list[Run] = []
    looked: list[int] = []
    assemble = launch.assemble

    async def remembered(*args: Any, **kwargs: Any) -> Run:
        runs.append(await assemble(*args, **{**kwargs, "on_step": look}))
        return runs[0]

    def look(step: int, values: Any) -> None:
        found = [path for x, path in held_by(runs[0]) if isinstance(x, torch.Tensor)]
        assert not found, found[:3]
        looked.append(step)

    monkeypatch.setattr(launch, "assemble", remembered)
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *more)
    assert looked == [1, 2, 3]


def test_the_walk_sees_what_is_hidden():
    class Holder:
        def __init__(self, x: object) -> None:
            self.x = x

    tensor = torch.zeros(2)
    hidden = [Holder(tensor), {"a": [lambda: tensor]}, (Holder([tensor]).x,), Future()]
    hidden[3].set_result({"weights": tensor})
    for one in hidden:
        assert any(isinstance(x, torch.Tensor) for x, _ in held_by(one)), one
    assert not any(isinstance(x, torch.Tensor) for x, _ in held_by({"a": np.zeros(3), "f": held_by}))


@pytest.mark.slow
def test_one_process_imports_nothing_of_many(tmp_path, tiny_model, arithmetic_data):
    """Nor what only several ranks of a model need, nor the translator of verl's keys."""
    many = ("ray", "verl.model_engine.sharded", "verl.model_engine.pipeline", "verl.workers.spmd", "verl.workers.ray")
    many += ("verl.config.compat",)
    args = small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=1")
    code = f"import sys; from verl.cli import main; assert main({['train', *args]!r}) == 0; "
    code += f"print('found', [name for name in {many!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "found []", done.stdout + done.stderr


def in_another_process(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@matrix(
    "more",
    [(), ("algorithm.name=vapo", "cluster.virtual_ranks=2"), ("algorithm.name=kl_cov", "step.updates_per_step=2")],
)
def test_everything_that_crosses_submit_can_be_pickled(more, tmp_path, tiny_model, arithmetic_data, monkeypatch):
    """Calls, arguments and results go through pickle, and the run is the same."""
    small_run(tmp_path / "plain", tiny_model, arithmetic_data, *more)
    submit, end, crossed = InprocGroup.submit, inproc._Call.end, set()

    def sent(self: InprocGroup, method: Any, args: Any) -> Future[Any]:
        crossed.add(method.__qualname__)
        return submit(self, in_another_process(method), in_another_process(args))

    def answered(self: Any, rank: int, value: Any = None, error: BaseException | None = None) -> None:
        end(self, rank, in_another_process(value), error)

    monkeypatch.setattr(InprocGroup, "submit", sent)
    monkeypatch.setattr(inproc._Call, "end", answered)
    small_run(tmp_path / "pickled", tiny_model, arithmetic_data, *more)
    assert {
        "Role.update",
        "Role.send_weights",
        "Role.save",
        "Role.export",
        "Compute.compute",
        "Compute.weigh",
    } < crossed
    one, two = metrics_of(tmp_path / "plain" / "r"), metrics_of(tmp_path / "pickled" / "r")
    for step in one:
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean"):
            assert one[step].get(name) == two[step].get(name), (step, name)


def frames_of_verl() -> list[str]:
    """Functions of verl on this thread's stack, outermost first, without what carries a call to a worker."""
    frame, out = sys._getframe(1), []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(HOUSE) and file.name != "inproc.py":
            out.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return out[::-1]


def awaiting_frames() -> list[str]:
    """Functions of verl that wait for the loop: in the task that runs the verb, and not on this thread's stack."""
    chains = []
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        at, chain = task.get_coro(), []
        while isinstance(at, types.CoroutineType):
            chain.append(at.cr_code)
            at = at.cr_await
        chains.append([code for code in chain if Path(code.co_filename).is_relative_to(HOUSE)])
    (verb,) = (chain for chain in chains if any(Path(code.co_filename).name == "launch.py" for code in chain))
    return [code.co_qualname for code in verb]


def test_from_the_command_to_the_loss_are_at_most_twelve_frames(tmp_path, tiny_model, arithmetic_data, monkeypatch):
    """All functions from `cli.main` to the line where the loss is computed: the command, the run and its start, the
    loop, the step, the call to the workers; then the role, the engine, the reduction. A function that waits for a task
    counts, too."""
    driver: list[list[str]] = []
    worker: list[list[str]] = []
    update, evaluate = ModelWorkers.update, passes.reduce_terms

    def watched_update(self: ModelWorkers, *args: Any, **kwargs: Any) -> Any:
        loop = frames_of_verl()
        at = loop.index("train")  # the first function of the loop's task
        driver.append([*loop[:at], *awaiting_frames(), *loop[at:], "ModelWorkers.update"])
        return update(self, *args, **kwargs)

    def watched_evaluate(*args: Any) -> Any:
        worker.append([*frames_of_verl(), "reduce_terms"])
        return evaluate(*args)

    monkeypatch.setattr(ModelWorkers, "update", watched_update)
    monkeypatch.setattr(passes, "reduce_terms", watched_evaluate)
    assert cli.main(["train", *small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=1")]) == 0
    path = driver[0] + worker[0]
    assert len(path) <= 12, path
    assert path[0] == "main" and path[-1] == "reduce_terms", path
    assert {"train_verb", "run_rl", "_train", "train", "experience_and_update", "Role.update"} < {*path}, path


OF_MEDIA = [HOUSE / name for name in ("nn/vision.py", "nn/kept_features.py", "media_tokens.py", "medium.py")]
OF_MEDIA += [HOUSE / "rollout" / name for name in ("embedded/images.py", "embedded/features.py", "native/tower.py")]
OF_MEDIA += [HOUSE / name for name in ("driver/task_media.py", "driver/media_ahead.py", "transfer_queue/media.py")]
OF_MEDIA += [HOUSE / "chat" / "images.py", *(HOUSE / "models").glob("*.py")]
CHECKS = {"ImageReader", "ImageStoringEngine", "ToolImages", "FolderMedia", "MemoryMedia", "TaskMedia", "MediaAhead"}
CHECKS |= {"family_of", "_name", "owner_of_group", "images_held", "packed", "place_media"}
CHECKS |= {"Pictures", "KeptByBytes"}  # the begin of a step


def test_a_step_on_text_runs_no_code_of_media(tmp_path, tiny_model, arithmetic_data):
    """But for checks that there is none: a few calls for each group and request, none for a token or a pass. It is a
    process of its own, since a profiler and the frames of torch.compile do not go together."""
    given = small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2")
    script = Path(__file__).parents[1] / "counted_calls.py"
    command = [sys.executable, str(script), json.dumps([str(file) for file in OF_MEDIA]), *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    calls = json.loads(ended.stdout.splitlines()[-1])
    of_answers = {name for name, count in calls.items() if count > 8}
    assert {name.partition(".")[0] for name in calls} <= CHECKS and max(calls.values()) <= 3 * 16, calls
    assert "ImageReader.of" in of_answers and not [name for name in of_answers if "Picture" in name], calls
