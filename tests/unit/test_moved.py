"""Moved keys: the error names the new one; files and identities of older runs (older.py) are read by present keys."""

import pytest
from handmade_model import write_model, write_rows
from older import COMMANDS, OLDER, older

from verl.cli import main
from verl.config.load import load_config, read_config
from verl.config.moved import MOVED, moved_values
from verl.config.tree import leaf_of
from verl.driver.identity import Identity, compare, identity_of


@pytest.mark.parametrize("key", MOVED)
def test_an_old_key_is_refused_with_the_new_one(key, tmp_path, capsys):
    section, _, name = key.partition(".")
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: /m}}\n{section}:\n  {name}: 7\n")
    ways = {f"{key}=7": "7", f"{section}={{{name}: 7}}": "7", f"recipe={tmp_path}/recipe.yaml": "VALUE"}
    for argument, value in ways.items():
        with pytest.raises(ValueError) as caught:
            load_config(["model.path=/m", argument])
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"unknown key '{key}'"), line
        assert line.endswith(f": it has moved: write {MOVED[key].written.format(value=value)}"), line
    assert main(["show", "config", key]) == 2
    assert f"{key} is no key: it has moved: write {MOVED[key].key}" in capsys.readouterr().err


def test_the_table_leads_from_keys_that_are_gone_to_keys_that_exist():
    for key, move in MOVED.items():
        assert leaf_of(key) is None and leaf_of(move.key) is not None, key


def test_old_values_become_those_that_are_computed_with():
    cases = [
        # the command, the older values, the present ones
        ("sft", {"supervised.rows_per_step": 3, "step.prompts_per_step": 64}, {"step.prompts_per_step": 3}),
        ("train", {"supervised.rows_per_step": 3, "step.prompts_per_step": 64}, {"step.prompts_per_step": 64}),
        ("dpo", {"supervised.eval_rows": 256, "data.max_eval_rows": None}, {"data.max_eval_rows": None}),
        ("rm", {"supervised.eval_rows": 256, "data.max_eval_rows": 300}, {"data.max_eval_rows": 300}),
        ("rm", {"supervised.eval_rows": 0, "data.max_eval_rows": None}, {"data.max_eval_rows": None}),
        ("sft", {"supervised.eval_rows": 4, "data.max_eval_rows": None}, {"data.max_eval_rows": 4}),
        ("sft", {"supervised.eval_rows": 4, "data.max_eval_rows": 2}, {"data.max_eval_rows": 2}),
        ("train", {"reward.name": "short", "reward.path": "a.py"}, {"reward.path": "a.py:short"}),
        ("train", {"reward.name": "compute_score", "reward.path": "a.py"}, {"reward.path": "a.py"}),
        ("train", {"cluster.env": {}, "cluster.resource": "", "cluster.pools": {}}, {"cluster.pools": {}}),
        (
            "train",
            {"cluster.pools": {"a": {"nodes": 2}}, "cluster.gpus_per_rank": 0.5, "cluster.env": {"A": 1}},
            {"cluster.pools": {"a": {"nodes": 2}, "main": {"gpus_per_rank": 0.5, "env": {"A": 1}}}},
        ),
        ("train", {"reward.name": "short", "reward.path": None}, {"reward.path": None}),
        ("serve", {"serve.grace_s": 3.0, "run.grace_s": 25.0}, {"run.grace_s": 3.0}),
        ("train", {"serve.grace_s": 3.0, "run.grace_s": 25.0}, {"run.grace_s": 25.0}),
        ("eval", {"supervised.eval_rows": 4}, {}),
    ]
    for command, was, now in cases:
        assert moved_values(was, command) == now, (command, was)


def test_the_file_of_an_older_run_is_read():
    train, sft = read_config(OLDER / "train" / "config.yaml"), read_config(OLDER / "sft" / "config.yaml", "sft")
    assert (train.step.prompts_per_step, train.data.max_eval_rows) == (4, None)
    assert (sft.step.prompts_per_step, sft.data.max_eval_rows) == (3, 4)


PLACES = {"run.root_dir", "data.cache_dir"}


@pytest.fixture
def begun_today(tmp_path, monkeypatch):
    """(name of an older run, more arguments) -> the identity of the same run, if it began today."""
    write_model(tmp_path / "model", context=512)
    write_rows(tmp_path / "rows.jsonl", 4)
    (tmp_path / "grade.py").write_text("def short(*a, **k):\n    return 1.0\n")

    def identity(name: str, *more: str) -> Identity:
        command, args = COMMANDS[name]
        rows, args = tmp_path / "rows.jsonl", [a.replace("/inputs", str(tmp_path)) for a in (*args, *more)]
        files = [f"model.path={tmp_path}/model", f"data.train_files=[{rows}]", f"data.eval_files=[{rows}]"]
        own = [*files, f"data.cache_dir={tmp_path}"]
        now, was = identity_of(load_config([*own, *args]), command), older(name)
        assert now.contents.keys() == was.contents.keys()
        files_of_then = {key: " ".join([*text.split()[:-1], was.contents[key]]) for key, text in now.contents.items()}
        return Identity(now.values, files_of_then, now.defaults)

    return identity


def test_an_older_run_is_compared_by_the_present_keys(begun_today):
    cases = [
        # the older run, more arguments of today, the keys that make it another run
        ("train", [], []),
        ("train", ["step.prompts_per_step=8"], ["step.prompts_per_step"]),
        ("train", ["reward.path=/inputs/grade.py:other"], ["reward.path"]),
        ("train", ["reward.path=/inputs/grade.py"], ["reward.path"]),
        ("ray", [], []),
        ("sft", ["data.max_eval_rows=4"], []),
        ("sft", [], ["data.max_eval_rows"]),
        ("sft", ["data.max_eval_rows=4", "step.prompts_per_step=64"], ["step.prompts_per_step"]),
    ]
    for name, more, others in cases:
        found, changed = compare(older(name), begun_today(name, *more))
        assert [line.partition(":")[0] for line in found] == others, (name, more)
        assert changed.keys() == PLACES, (name, more, changed)
