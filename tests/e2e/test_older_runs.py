"""A run that was begun with keys that have moved continues with those of today, and is bitwise the run that was not
interrupted."""

import json
from pathlib import Path

import pytest
import torch
from older import COMMANDS, OLDER, as_recorded_then
from small_runs import metrics_of, tensors_of

from verl.config.load import load_config
from verl.driver import run_dir
from verl.driver.identity import identity_of
from verl.driver.launch import run_rl, run_supervised
from verl.driver.replay import replay
from verl.driver.state import read_state

GRADER = (
    "def short(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0 / (1 + len(solution_str))\n"
)
MORE = {"train": (), "sft": ("data.max_eval_rows=4",)}
ROLE = {"train": "actor", "sft": "trainer"}
PER_STEP = {"train": ("actor/pg_loss", "critic/score/mean"), "sft": ("train/loss", "val/loss")}


@pytest.fixture
def inputs(tmp_path, tiny_model, arithmetic_data) -> dict[str, Path]:
    """The files of the older runs, by their names in /inputs."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    turns = [[{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(32)]
    (folder / "sft.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    (folder / "grade.py").write_text(GRADER)
    own = {name: folder / name for name in ("sft.jsonl", "grade.py", "cache")}
    return {"tiny": tiny_model, "train.jsonl": arithmetic_data[0], "heldout.jsonl": arithmetic_data[1], **own}


def go(name: str, root: Path, inputs: dict[str, Path], steps: int) -> None:
    command, args = COMMANDS[name]
    train, held = ("sft.jsonl", "sft.jsonl") if command == "sft" else ("train.jsonl", "heldout.jsonl")
    files = (f"data.train_files=[{inputs[train]}]", f"data.eval_files=[{inputs[held]}]")
    places = (f"run.root_dir={root}", f"model.path={inputs['tiny']}", f"data.cache_dir={inputs['cache']}", *files)
    args = [a.replace("/inputs/grade.py", str(inputs["grade.py"])) for a in args]
    resolved = load_config([*places, *args, *MORE[name], f"run.total_steps={steps}"])
    run_supervised(resolved, command) if command == "sft" else run_rl(resolved, quiet=True)


@pytest.mark.parametrize("name", ["train", "sft"])
def test_a_run_that_was_begun_with_old_keys_continues_bitwise(name, tmp_path, inputs, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "identity_of", lambda *given: as_recorded_then(name, identity_of(*given)))
        go(name, tmp_path / "cut", inputs, 2)
    begun = tmp_path / "cut" / "r"
    recorded = read_state(begun / "checkpoints" / "step_2").identity.values
    assert "supervised.rows_per_step" in recorded and "reward.name" in recorded, "by the keys of then"
    text = (OLDER / name / "config.yaml").read_text()
    for place, path in inputs.items():
        text = text.replace(f"/inputs/{place}", str(path))
    for path in (begun / "config.yaml", begun / "configs" / "attempt_0000.yaml"):
        path.write_text(text)
    capsys.readouterr()
    go(name, tmp_path / "cut", inputs, 4)
    assert "changed since step 2: run.total_steps 2 -> 4" in capsys.readouterr().out
    assert "supervised.rows_per_step" not in read_state(begun / "checkpoints" / "step_4").identity.values
    go(name, tmp_path / "straight", inputs, 4)
    cut, straight = (tensors_of(tmp_path / of / "r", 4, ROLE[name]) for of in ("cut", "straight"))
    assert cut.keys() == straight.keys() and all(torch.equal(cut[n], straight[n]) for n in cut)
    a, b = metrics_of(begun), metrics_of(tmp_path / "straight" / "r")
    assert all(a[step].get(key) == b[step].get(key) for step in range(1, 5) for key in PER_STEP[name])
    if name == "train":  # with the file of then
        assert replay([f"run.root_dir={tmp_path}/cut", "run.name=r"], 2) == 0, capsys.readouterr().out
