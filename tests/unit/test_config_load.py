"""Composition: layers, origins, types, interpolation, recipes, and the file in the run directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.load import Resolved, dump_config, load_config, read_config, recipe_names
from verl.config.tree import build, leaf_of, leaves, values_of

MODEL = "model.path=/models/m"


def origin_of(*args: str, key: str) -> str:
    return load_config([MODEL, *args]).origins[key]


def test_no_torch_no_transformers() -> None:
    code = (
        "import verl.config.load, verl.config.plan, verl.config.dialect; import sys;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules and 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tree_stays_small_and_documented() -> None:
    assert len(leaves()) <= 150
    assert leaves()["run.resume"].doc.startswith("auto: continue")
    assert leaves()["run.total_steps"].type_name == "int or null"
    assert leaves()["track.sinks"].type_name == "list of str"


def test_defaults_are_those_of_the_schema() -> None:
    resolved = load_config([MODEL])
    assert resolved.config == build({"model.path": "/models/m"})
    assert set(resolved.origins) == set(leaves())
    assert {o for k, o in resolved.origins.items() if k != "model.path"} == {"default"}


# -- layers ------------------------------------------------------------------------------------------------------------


def test_command_line_over_recipe_over_its_base_over_default(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "step: {prompts_per_step: 8, samples_per_prompt: 2}\nrun: {seed: 3}\nreward: {kwargs: {a: 1, b: {x: 1}}}\n"
    )
    (tmp_path / "top.yaml").write_text("recipe: base.yaml\nstep.samples_per_prompt: 4\nreward: {kwargs: {b: {y: 2}}}\n")
    top = tmp_path / "top.yaml"
    resolved = load_config([f"recipe={top}", MODEL, "step.samples_per_prompt=16", "reward.kwargs.c=3"])
    c = resolved.config
    assert (c.step.prompts_per_step, c.step.samples_per_prompt, c.run.seed, c.step.updates_per_step) == (8, 16, 3, 1)
    assert c.reward.kwargs == {"a": 1, "b": {"x": 1, "y": 2}, "c": 3}
    assert resolved.origins["step.prompts_per_step"] == "recipe base.yaml"
    assert resolved.origins["step.samples_per_prompt"] == "command line"
    assert resolved.origins["step.updates_per_step"] == "default"
    assert resolved.origins["reward.kwargs"] == f"recipe base.yaml, recipe {top}, command line"


def test_packaged_recipes_compose() -> None:
    assert "gsm8k_grpo" in recipe_names()
    for name in recipe_names():
        load_config([f"recipe={name}", MODEL])
    c = load_config(["recipe=gsm8k_grpo", MODEL])
    assert c.config.step.samples_per_prompt == 8
    assert c.origins["step.samples_per_prompt"] == "recipe gsm8k_grpo"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("step: {prompt_per_step: 8}", "unknown key 'step.prompt_per_step' .*did you mean step.prompts_per_step"),
        ("data: {train_batch_size: 8}", "verl's name, only on the command line; here it is step.prompts_per_step"),
        ("step: 8", "unknown key 'step' .*a section"),
        ("nonsense: {a: 1}", "unknown key 'nonsense.a'"),
        ("run: {seed: x}", "run.seed='x' .recipe .*: expected int"),
        ("- a", "mapping of sections"),
        ("a: [", "not YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}", "not YAML: .*duplicate"),
        ("recipe: r.yaml", "its own base"),
        ("recipe: nope", "no such recipe"),
    ],
)
def test_faulty_recipes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason) as caught:
        load_config(["recipe=r.yaml", MODEL])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["recipe=gsm8k_gpro"], "did you mean gsm8k_grpo"),
        (["recipe=/no/x.yaml"], "no such file"),
        (["recipe="], "names no recipe"),
        (["recipe=gsm8k_grpo", "recipe=quickstart"], "one recipe only"),
    ],
)
def test_recipes_that_are_not_there(args: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_config([*args, MODEL])


# -- types -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("run.seed=2.0", "run.seed", 2),
        ("run.total_steps=1e3", "run.total_steps", 1000),
        ("optim.lr=1", "optim.lr", 1.0),
        ("run.total_steps=null", "run.total_steps", None),
        ("run.name=007", "run.name", "007"),
        ("run.name=1e3", "run.name", "1e3"),
        ("track.sinks=console", "track.sinks", ["console"]),
        ("data.train_files=[a,b]", "data.train_files", ["a", "b"]),
        ("optim.betas=[0,0.5]", "optim.betas", [0.0, 0.5]),
        ("data.shuffle=False", "data.shuffle", False),
        ("+run.seed=5", "run.seed", 5),
        ("run.name='a b'", "run.name", "a b"),
        ("model.template_kwargs.a.b=1", "model.template_kwargs", {"a": {"b": 1}}),
        ("rollout.engine_options={a: 1, b: [x]}", "rollout.engine_options", {"a": 1, "b": ["x"]}),
        ("reward.path='~/r.py'", "reward.path", str(Path("~/r.py").expanduser())),
    ],
)
def test_values_enter_as_their_type(argument: str, key: str, value: object) -> None:
    found = values_of(load_config([MODEL, argument]).config)[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("run.seed=1.5", "expected int"),
        ("run.seed=abc", "expected int"),
        ("run.seed=true", "expected int"),
        ("run.seed=null", "expected int"),
        ("run.seed='3'", "expected int"),
        ("data.shuffle=1", "expected bool"),
        ("data.shuffle=yes", "expected bool"),
        ("optim.lr=fast", "expected float"),
        ("optim.lr=nan", "expected float"),
        ("run.name=[a]", "expected str"),
        ("run.name=true", "expected str"),
        ("algorithm.name=null", "expected str"),
        ("optim.betas=0.9", "expected list of float"),
        ("optim.betas=[0.9,x]", "expected float"),
        ("reward.kwargs=3", "expected mapping"),
        ("run.threads=many", "expected int"),
    ],
)
def test_wrong_types_say_key_value_and_type(argument: str, expected: str) -> None:
    key, _, value = argument.partition("=")
    with pytest.raises(ValueError) as caught:
        load_config([MODEL, argument])
    assert str(caught.value) == f"{key}={value.strip(chr(39))} (command line): {expected}"


def test_a_wrong_type_of_verls_key_names_that_key() -> None:
    with pytest.raises(
        ValueError, match=r"step.samples_per_prompt=x \(verl key actor_rollout_ref.rollout.n=x\): expected int"
    ):
        load_config([MODEL, "actor_rollout_ref.rollout.n=x"])


def test_model_path_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^model.path is missing: model.path=FOLDER"):
        load_config([])


def test_a_hub_id_is_its_folder_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert load_config(["model.path=Org/Name"]).config.model.path == "Org/Name"
    snapshot = tmp_path / "models--Org--Name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--Org--Name" / "refs").mkdir()
    (tmp_path / "models--Org--Name" / "refs" / "main").write_text("abc\n")
    resolved = load_config(["model.path=Org/Name"])
    assert resolved.config.model.path == str(snapshot)
    assert resolved.origins["model.path"] == "command line: Org/Name"


# -- interpolation -----------------------------------------------------------------------------------------------------


def test_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    args = [
        "run.seed=7",
        "run.name=s${run.seed}",
        "data.seed=${run.seed}",
        "run.root_dir=${oc.env:WHERE}/r",
        "reward.kwargs={a: '${run.name}'}",
    ]
    resolved = load_config([MODEL, *args])
    c = resolved.config
    assert (c.run.name, c.data.seed, c.run.root_dir, c.reward.kwargs) == ("s7", 7, "/data/r", {"a": "s7"})
    assert resolved.origins["data.seed"] == "command line: ${run.seed}"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("run.name=${run.name}", "refers to itself"),
        ("run.name=${run.nmae}", "not found"),
        ("run.seed=${run.name}", "expected int"),
        ("run.root_dir=${oc.env:NOT_SET_HERE}", "NOT_SET_HERE"),
        ("run.name=${run.name", "quote the value"),
    ],
)
def test_faulty_interpolation(argument: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_config([MODEL, argument])


# -- config.yaml -------------------------------------------------------------------------------------------------------


def test_dump_names_origins_and_reads_back(tmp_path: Path) -> None:
    args = [
        "recipe=gsm8k_grpo",
        MODEL,
        "actor_rollout_ref.rollout.n=4",
        "run.name='x: #y'",
        "rollout.stop=['a # b',\"it's\"]",
        "reward.kwargs={s: '1e-6', f: 1e-6, n: null, t: 'true'}",
        "optim.eps=1e-12",
        "data.system_prompt='two\nlines: é'",
    ]
    resolved = load_config(args)
    text = dump_config(resolved)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert read_config(file) == resolved.config
    assert len([line for line in text.splitlines() if line.startswith("  ")]) == len(leaves())
    lines = [re.split(r" +# ", line) for line in text.splitlines()]
    assert ["  samples_per_prompt: 4", "verl key actor_rollout_ref.rollout.n=4"] in lines
    assert ["  prompts_per_step: 64", "recipe gsm8k_grpo"] in lines and ["  clip_low: null", "default"] in lines


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=9),
)


@settings(max_examples=40, deadline=None)
@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.dictionaries(st.text("ab-_. ", max_size=4), SCALARS, max_size=3),
)
def test_any_text_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, kwargs: dict[str, object]
) -> None:
    config = build(
        {"model.path": "m", "data.system_prompt": text, "rollout.stop": [text, "x"], "reward.kwargs": kwargs}
    )
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_text(dump_config(Resolved(config, dict.fromkeys(leaves(), "command line"))), encoding="utf-8")
    assert read_config(file) == config


def test_reading_is_as_strict_as_loading(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"run": {"sed": 1}}))
    with pytest.raises(ValueError, match=r"did you mean run\.seed"):
        read_config(file)
    file.write_text(yaml.safe_dump({"run": {"seed": "one"}}))
    with pytest.raises(ValueError, match=r"run.seed='one' .*: expected int"):
        read_config(file)


def test_every_leaf_can_be_set_from_the_command_line() -> None:
    samples = {
        "int": "3",
        "float": "0.5",
        "bool": "true",
        "str": "x",
        "mapping": "{a: 1}",
        "list of str": "[x]",
        "list of float": "[0.1]",
        "list of int": "[1]",
    }
    args = [f"{key}={samples[leaf.type_name.removesuffix(' or null')]}" for key, leaf in leaves().items()]
    resolved = load_config(args)
    assert set(resolved.origins.values()) == {"command line"}
    assert all(leaf_of(key) for key in resolved.origins)


def test_another_algorithm_than_the_recipes_is_the_preset_itself() -> None:
    same = load_config(["recipe=gsm8k_grpo", "model.path=m", "algorithm.name=grpo"]).config.algorithm
    assert same.aggregation == "token-mean" and same.kl_loss_coef == 0.0
    other = load_config(
        ["recipe=gsm8k_grpo", "model.path=m", "algorithm.name=gspo", "algorithm.clip_low=0.1"]
    ).config.algorithm
    assert (other.name, other.aggregation, other.kl_loss_coef, other.clip_low) == ("gspo", None, None, 0.1)
