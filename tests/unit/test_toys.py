"""A new engine, queue, sync backend, algorithm or role is one file and one table row.

The toys are the examples of docs/design: each is on its page as a whole, is written to a file from there, gets its row,
and runs through the contract of its kind and a small real run. That nothing else of verl is touched is checked.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from contracts import test_queue_contract, test_rollout_contract, test_weight_sync_contract
from each import FULL_GRID
from serving import Running
from small_runs import metrics_of, small_args, small_run, tensors_of, trained

from verl.algorithms import presets, specs
from verl.config import backends
from verl.config.backends import Backend, NoOptions
from verl.config.load import load_config, validate
from verl.planner.plan import make_plan
from verl.track.samples import read_samples
from verl.weight_sync.base import SyncContext

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n# file: (\S+)\n(.*?)```", re.DOTALL)
MODELS = ("qwen3", "gpt2") if FULL_GRID else ("qwen3",)  # of the contract's: a toy leaves the model to transformers
TWO_STEPS = ("run.total_steps=2", "run.name=toy")


def toys_of(page: str) -> dict[str, str]:
    return dict(BLOCK.findall((ROOT / "docs" / "design" / page).read_text()))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """(page, file) -> the toy of that page as a module, from a file outside verl."""
    names = []

    def load(page: str, name: str) -> Any:
        (tmp_path / "toys").mkdir(exist_ok=True)
        (tmp_path / "toys" / f"{name}.py").write_text(toys_of(page)[f"{name}.py"])
        monkeypatch.syspath_prepend(tmp_path / "toys")
        names.append(name)
        return importlib.import_module(name)

    yield load
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Record what a test declares to change. At its end, nothing else differs in the modules and tables of verl."""
    tables: dict[str, Mapping[str, Any]] = {f"backends.{n}": t for n, t in backends.TABLES.items()}
    tables |= {"presets.PRESETS": presets.PRESETS}
    before = {name: dict(vars(module)) for name, module in sys.modules.items() if name.split(".")[0] == "verl"}
    rows = {name: dict(table) for name, table in tables.items()}
    allowed: set[str] = set()
    yield allowed
    found = {f"{name}[{key}]" for name, table in tables.items() for key in table.keys() - rows[name].keys()}
    assert all(table[key] is row for name, table in tables.items() for key, row in rows[name].items())
    for name, module in before.items():
        now = vars(sys.modules[name])
        found |= {f"{name}.{key}" for key in module if now.get(key) is not module[key] and not key.startswith("__")}
    assert found == allowed


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_model, arithmetic_data) -> Path:
    """The run that the toys are compared with: native rollout, torch engine, local sync."""
    root = tmp_path_factory.mktemp("plain")
    assert small_run(root, tiny_model, arithmetic_data[:1], *TWO_STEPS).steps == 2
    return root / "toy"


def values_of(row: Any, several: bool) -> tuple[Any, ...]:
    """The values of a row of `parametrize`, marked or not."""
    return row.values if isinstance(row, ParameterSet) else row if several else (row,)


def failures_of(module: Any, given: dict[str, Callable[[], Any]]) -> list[str]:
    """Run every contract test that asks for one of `given`, in each of its other parameters (the first of them, but in
    the full grid: ours run them all); what failed."""
    failed = []
    count = 0
    for name, test in inspect.getmembers(module, inspect.isfunction):
        wanted = set(inspect.signature(test).parameters)
        if not name.startswith("test_") or not wanted & given.keys():
            continue
        axes: list[list[dict[str, Any]]] = []
        for mark in (m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"):
            keys = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
            rows = [dict(zip(keys, values_of(v, len(keys) > 1), strict=True)) for v in mark.args[1]]
            free = [{k: v for k, v in row.items() if k not in given} for row in rows]
            free = [row for row in free if row.get("model", MODELS[0]) in MODELS]
            axes.append([row for i, row in enumerate(free) if row not in free[:i]])
        ways = itertools.product(*axes) if FULL_GRID else [[axis[0] for axis in axes]]
        for chosen in ways:
            arguments = {k: v for row in chosen for k, v in row.items()}
            count += 1
            with pytest.MonkeyPatch.context() as patch:
                fixtures = {"monkeypatch": lambda patch=patch: patch} | given
                try:
                    test(**{name: arguments[name] if name in arguments else fixtures[name]() for name in wanted})
                except (Exception, pytest.fail.Exception) as e:  # collected: one list instead of a pytest case per row
                    failed.append(f"{name}({arguments}): {type(e).__name__}: {str(e)[:300]}")
    assert count > 5, "the contract was found"
    return failed


# -- a key of the configuration ----------------------------------------------------------------------------------------

TWO_KEYS = """class RunConfig:
    pace: PositiveInt = adjustable(3)  # Toy steps per minute.
    mood: Annotated[str, one_of("calm|wild")] = "calm"  # Of a toy.
"""
WITH_TWO_KEYS = """
import importlib.util, pathlib, sys
folder, added = sys.argv[1:]
spec = importlib.util.find_spec("verl.config.schema")
text = pathlib.Path(spec.origin).read_text()
assert text.count("class RunConfig:\\n") == 1
path = pathlib.Path(folder, "schema.py")
path.write_text(text.replace("class RunConfig:\\n", added))
spec = importlib.util.spec_from_file_location("verl.config.schema", path)
schema = sys.modules["verl.config.schema"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(schema)
from verl.cli import main
from verl.config.load import dump_config, load_config, read_config
from verl.driver.identity import may_change
given = load_config(["model.path=/m", "run.pace=5"])
assert (given.config.run.pace, given.config.run.mood) == (5, "calm")
(path.parent / "config.yaml").write_text(dump_config(given))
assert read_config(path.parent / "config.yaml").run.pace == 5
assert may_change("run.pace") and not may_change("run.mood")
for argument in ("run.pace=0", "run.mood=cal", "run.pce=3"):
    try:
        load_config(["model.path=/m", argument])
    except ValueError as error:
        print(error)
main(["show", "config", "run.pace", "run.mood"])
main(["completion", "fish"])
"""


def test_a_central_key_is_its_field_and_its_reader(tmp_path):
    """Two fields are added to the text of schema.py. Reading with bounds and words, help, completion, the file of the
    run and the question whether a resumed run may change them follow from the fields alone."""
    command = [sys.executable, "-c", WITH_TWO_KEYS, str(tmp_path), TWO_KEYS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "run.pace=0 (command line): must be >= 1"
    assert "cal is unknown; did you mean calm? There are: calm, wild" in lines[1] and "mean run.pace" in lines[2]
    assert "run.pace=3" in lines[3] and "(int) Toy steps per minute." in lines[3]
    assert "run.mood=calm" in lines[4] and "(calm | wild) Of a toy." in lines[4]
    assert "run.pace=" in found.stdout.partition("(calm | wild)")[2], "completed"


# -- a rollout engine --------------------------------------------------------------------------------------------------


NEEDS_KV = ("test_update_in_flight_has_exact_spans",)  # it computes tokens after an update from the KV of older weights


@pytest.mark.slow
def test_a_rollout_engine_passes_the_contract(toy, monkeypatch):
    """As the hf engine does, which caches no prefixes either."""
    module = toy("add_an_engine.md", "toy_rollout")

    def build(kind: str, model: str = "qwen3", **given: Any) -> Any:
        given.pop("max_prefill_tokens", None)
        defaults = {"max_context_tokens": 512, "dtype": torch.float32}
        config = test_rollout_contract.reference(model).config
        return module.build(
            module.Options(), test_rollout_contract.RolloutContext(hf_config=config, **defaults | given)
        )

    monkeypatch.setattr(test_rollout_contract, "build", build)
    monkeypatch.setattr(test_rollout_contract, "DRAWS", 1000)
    monkeypatch.setattr(test_rollout_contract, "ADAPTING", ())
    for name in NEEDS_KV:
        monkeypatch.delattr(test_rollout_contract, name)
    assert not failures_of(test_rollout_contract, {"kind": lambda: "hf"})


@pytest.mark.slow
def test_a_rollout_engine_is_one_file_and_one_row(
    toy, touched, monkeypatch, tmp_path, tiny_model, arithmetic_data, plain
):
    toy("add_an_engine.md", "toy_rollout")
    chosen = (*TWO_STEPS, "rollout.engine=toy", "rollout.engine_options.max_rows=16")
    with pytest.raises(ValueError, match="rollout.engine=toy: unknown"):
        load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *chosen))
    row = Backend(build="toy_rollout:build", options="toy_rollout:Options")
    monkeypatch.setitem(backends.ROLLOUT, "toy", row)  # type: ignore[arg-type]
    touched.add("backends.rollout[toy]")
    config = load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *chosen)).config
    validate(config)
    assert make_plan(config)
    with pytest.raises(ValueError, match=r"rollout.engine_options.max_row=8: unknown; did you mean .*max_rows"):
        load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *chosen, "rollout.engine_options.max_row=8"))
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *chosen).steps == 2
    found = metrics_of(tmp_path / "toy")
    assert all(found[s]["mismatch/max_abs_dlogp"] < 1e-4 and found[s]["actor/grad_norm"] > 0 for s in (1, 2))
    ours, native = ({r.sample_id: r for r in read_samples(run, 1)} for run in (tmp_path / "toy", plain))
    assert ours.keys() == native.keys() and all(
        np.array_equal(ours[i].response_ids, native[i].response_ids) for i in ours
    )


# -- a rollout engine behind a server ---------------------------------------------------------------------------------

TOY_SERVER = '''
"""A server with an API of its own, as far as its requests differ from those of `verl serve`."""

from dataclasses import dataclass, replace

from verl.rollout.api import Deadlines, Expected
from verl.rollout.base import capabilities_of
from verl.rollout.client import ServedEngine
from verl.rollout.traits import VERL_SERVE
from verl.rollout.vllm_api import VerlApi

TRAITS = replace(VERL_SERVE, resumable_stream=False)
asked = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    api_key: str | None = None
    politeness: int = 1


class ToyApi(VerlApi):
    def __init__(self, politeness):
        self.traits, self._politeness = TRAITS, politeness

    def body(self, model, name, prompt, sampling, room):
        asked.append(self._politeness)
        return super().body(model, name, prompt, sampling, room)


def build(options, context):
    able = capabilities_of(TRAITS, max_context_tokens=context.max_context_tokens)
    api, at = ToyApi(options.politeness), context.place.url
    return ServedEngine(context, Expected(name="the toy"), api, at, able, Deadlines(), options.api_key)
'''


def test_an_engine_behind_a_server_is_one_file_and_one_row(
    touched, monkeypatch, tmp_path, tiny_model, arithmetic_data, plain
):
    """Its traits are in its own file. It trains what the native engine trains, over HTTP and shared memory."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "toy_server.py").write_text(TOY_SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_server", raising=False)
    names = {name: f"toy_server:{part}" for name, part in (("build", "build"), ("options", "Options"))}
    monkeypatch.setitem(backends.ROLLOUT, "toy", Backend(**names, traits="toy_server:TRAITS"))  # type: ignore[arg-type]
    touched.add("backends.rollout[toy]")
    args = small_args(tmp_path, tiny_model, arithmetic_data[:1], *TWO_STEPS, "rollout.engine=toy")
    with pytest.raises(ValueError, match=r"set rollout.url=http://"):
        validate(load_config(args).config)
    served = Running(AutoModelForCausalLM.from_pretrained(tiny_model))
    try:
        chosen = ("rollout.engine=toy", f"rollout.url={served.url}", "rollout.engine_options.politeness=3")
        assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *TWO_STEPS, *chosen).steps == 2
    finally:
        served.stop()
    assert set(importlib.import_module("toy_server").asked) == {3}
    assert trained(tmp_path / "toy") == trained(plain)
    ours, native = tensors_of(tmp_path / "toy", 2), tensors_of(plain, 2)
    assert all(torch.allclose(ours[n].double(), native[n].double(), atol=1e-5) for n in native)


# -- a model engine ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_engine_is_one_file_and_one_row(
    toy, touched, monkeypatch, tmp_path, tiny_model, arithmetic_data, plain
):
    toy("add_an_engine.md", "toy_model")
    row = Backend(build="toy_model:build", options="toy_model:Options")
    monkeypatch.setitem(backends.MODEL, "toy", row)  # type: ignore[arg-type]
    touched.add("backends.model[toy]")
    chosen = ("model.engine=toy", "algorithm.kl_loss_coef=0.1", "run.name=toy")
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *chosen, "run.total_steps=1").steps == 1
    ours, other = metrics_of(tmp_path / "toy")[1], metrics_of(plain)[1]
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "mismatch/k3"):
        assert ours[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *chosen, "run.total_steps=2")  # continues from the checkpoint
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *chosen, "run.total_steps=2", "run.name=straight")
    assert trained(tmp_path / "toy") == trained(tmp_path / "straight")
    cut, straight = (tensors_of(tmp_path / name, 2) for name in ("toy", "straight"))
    assert cut.keys() == straight.keys() and all(torch.equal(cut[n], straight[n]) for n in cut)
    first = tensors_of(tmp_path / "toy", 1)
    assert any(not torch.equal(first[n], cut[n]) for n in cut if n != "step"), "it trains"


# -- a sync backend ----------------------------------------------------------------------------------------------------

IN_ONE_PROCESS = ("test_exclusive_nothing_is_copied_and_a_step_that_overtakes_is_caught",)


def test_a_sync_backend_passes_the_contract(toy, monkeypatch):
    """All but what only a transport without a copy promises."""
    module = toy("add_a_sync_backend.md", "toy_sync")
    made = (lambda **context: module.build(NoOptions(), SyncContext(**context)), module.FolderOutlet)
    monkeypatch.setitem(test_weight_sync_contract.BACKENDS, "toy", made)
    for name in IN_ONE_PROCESS:
        monkeypatch.delattr(test_weight_sync_contract, name)
    assert not failures_of(test_weight_sync_contract, {"backend": lambda: "toy"})


def test_a_sync_backend_is_one_file_and_one_row(
    toy, touched, monkeypatch, tmp_path, tiny_model, arithmetic_data, plain
):
    toy("add_a_sync_backend.md", "toy_sync")
    monkeypatch.setitem(backends.SYNC, "toy", Backend(build="toy_sync:build"))  # type: ignore[arg-type]
    touched.add("backends.sync[toy]")
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *TWO_STEPS, "sync.engine=toy").steps == 2
    ours, local = tensors_of(tmp_path / "toy", 2), tensors_of(plain, 2)
    assert all(torch.equal(ours[n], local[n]) for n in local), "the transport changes nothing"


# -- a queue -----------------------------------------------------------------------------------------------------------


def test_a_queue_passes_the_contract(toy):
    module = toy("add_a_queue.md", "toy_queue")
    assert not failures_of(test_queue_contract, {"queue": module.SqliteQueue, "make": lambda: module.SqliteQueue})


def test_a_queue_is_one_file_and_one_row(toy, touched, monkeypatch, tmp_path, tiny_model, arithmetic_data, plain):
    toy("add_a_queue.md", "toy_queue")
    monkeypatch.setitem(backends.QUEUE, "toy", Backend(build="toy_queue:build"))  # type: ignore[arg-type]
    touched.add("backends.queue[toy]")
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *TWO_STEPS, "queue.engine=toy").steps == 2
    ours, memory = tensors_of(tmp_path / "toy", 2), tensors_of(plain, 2)
    assert all(torch.equal(ours[n], memory[n]) for n in memory), "where samples lie changes nothing"


# -- an algorithm ------------------------------------------------------------------------------------------------------


def test_an_algorithm_is_one_file_and_one_entry(toy, touched, monkeypatch, tmp_path, tiny_model, arithmetic_data):
    module = toy("add_an_algorithm.md", "toy_algorithm")
    same = toys_of("add_an_algorithm.md")["toy_algorithm.py"].strip()
    assert same in (ROOT / "tests" / "unit" / "test_new_algorithm.py").read_text(), "which tests more of this toy"
    monkeypatch.setitem(presets.PRESETS, "toy", module.PRESET)
    touched.add("presets.PRESETS[toy]")
    chosen = ("algorithm.name=toy", "algorithm.kl_loss_coef=0.5", "algorithm.options.leak=0.2")
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *TWO_STEPS, *chosen).steps == 2
    found = metrics_of(tmp_path / "toy")[2]
    assert found["actor/grad_norm"] > 0 and "actor/kl_loss" in found


# -- a role ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_role_is_one_row_of_needs(toy, touched, monkeypatch, tmp_path, tiny_model, arithmetic_data):
    """The mentor has the start model's shape and other weights; the policy moves towards it."""
    from verl.models import tiny
    from verl.recipes import arithmetic

    module = toy("add_a_role.md", "toy_mentor")
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    other = tiny.qwen3(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, seed=5)
    folder = tiny.save(other, tokenizer, tmp_path / "mentor_model")
    monkeypatch.setattr(specs, "NEEDS", (*specs.NEEDS, module.NEED))
    monkeypatch.setitem(presets.PRESETS, "toy", module.PRESET)
    touched |= {"verl.algorithms.specs.NEEDS", "presets.PRESETS[toy]"}
    chosen = ("algorithm.name=toy", f"algorithm.options.mentor={folder}", "run.total_steps=12", "run.name=toy")
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *chosen).steps == 12
    found = metrics_of(tmp_path / "toy")
    assert all(found[s]["timing_s/mentor"] > 0 for s in found if s)
    distance = [found[s]["mentor/kl"] for s in sorted(found) if s]
    assert np.mean(distance[-3:]) < 0.9 * np.mean(distance[:3]), distance
